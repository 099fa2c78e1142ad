"""The stand-in's front door."""

__version__ = "2.3.0"
