"""Whether the text on stdout is coloured: only on a terminal, and not where the user does not want it."""

from __future__ import annotations

import os
import sys


def colour_wanted() -> bool:
    """Say whether stdout is a terminal whose user has not switched colours off (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
