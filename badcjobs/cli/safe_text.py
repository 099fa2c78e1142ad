"""Text that came from files, as a terminal and a log may see it: it steers no terminal and forges no line of ours.

The last thing that happens to whatever is printed or logged; letters of every script stay as they are.
"""

from __future__ import annotations

import logging
import re

from badcjobs.errors import BadcjobsError
from badcjobs.report.words import plain

_OUR_COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")
_NOT_PLAIN_ASCII = re.compile(r"[^\n\x20-\x7e]")
_GOES_ON = "    | "  # nobody takes a line that begins so for one of ours


def safe_lines(text: str, *, painted: bool = False, tabs: bool = False) -> str:
    """Return text whose lines stay lines; ``painted``: colours are ours and stay, ``tabs``: those as well."""
    if painted:
        return "".join(part if number % 2 else safe_lines(part) for number, part in enumerate(_OUR_COLOURS.split(text)))
    if text.isprintable():
        return text
    kept = "\n\t" if tabs else "\n"
    return "".join(one if one in kept else plain(one) for one in re.split(f"([{kept}])", text.replace("\r\n", "\n")))


def safe_json(text: str) -> str:
    r"""Return the same JSON document with every sign that is not printable spelled out, such as \u202e."""
    return _NOT_PLAIN_ASCII.sub(_spelled_out, text)


def _spelled_out(found: re.Match[str]) -> str:
    sign = found[0]
    if sign.isprintable() or "\ud800" <= sign <= "\udfff":  # half a sign: strict readers refuse it spelled out
        return sign
    pairs = sign.encode("utf-16-be").hex()
    return "".join(f"\\u{pairs[at : at + 4]}" for at in range(0, len(pairs), 4))


def safe_error(error: BadcjobsError) -> str:
    """Return what is said of an error; what happened is one line, its reason and the line to paste may be several."""
    return safe_lines(str(BadcjobsError(plain(error.what), why=error.why, fix=error.fix)), tabs=True)


class SafeFormatter(logging.Formatter):
    """Formats a record so that it is one line of the log, or a line and what visibly belongs to it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and with its mark before each whatever follows it: an engine's last words, a traceback."""
        return safe_lines(super().format(record).rstrip("\n"), tabs=True).replace("\n", f"\n{_GOES_ON}")
