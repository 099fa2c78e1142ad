"""The commands as functions."""

from hawkears.commands._analyze import analyze

__all__ = ["analyze"]
