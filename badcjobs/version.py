"""The version of badcjobs."""

__version__ = "0.1.0"
