"""What keys send: bytes from a terminal, as names."""

from __future__ import annotations

import re

_NAMES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left",
    "\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left",
    "\x1b[H": "home", "\x1b[F": "end", "\x1bOH": "home", "\x1bOF": "end", "\x1b[1~": "home", "\x1b[4~": "end",
    "\x1b[7~": "home", "\x1b[8~": "end", "\x1b[5~": "page-up", "\x1b[6~": "page-down", "\x1b": "escape",
    "\r": "enter", "\n": "enter", "\t": "tab", "\x7f": "backspace", "\x08": "backspace", "\x03": "ctrl-c",
    "\x04": "ctrl-c", " ": " ", "\x06": "page-down", "\x02": "page-up",
}  # fmt: skip
_ONE_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|\x1b|.", re.DOTALL)


def parse_keys(text: str) -> list[str]:
    """Return the names of the keys that were pressed; letters are their own names, what nobody knows is left out."""
    keys = (_NAMES.get(found, found) for found in _ONE_KEY.findall(text))
    return [key for key in keys if key.isprintable()]
