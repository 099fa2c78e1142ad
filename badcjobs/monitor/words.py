"""How numbers are said in a narrow column; '–' for what nobody knows, '-' where only ASCII can be shown."""

from __future__ import annotations

UNKNOWN = "–"


def percent(value: float | None) -> str:
    """Return a whole percentage."""
    return UNKNOWN if value is None else f"{value:.0f}%"


def memory(value: float | None) -> str:
    """Return bytes as GiB."""
    return UNKNOWN if value is None else f"{value / 2**30:.1f}"


def whole(value: float | None, unit: str = "") -> str:
    """Return a whole number with its unit."""
    return UNKNOWN if value is None else f"{value:.0f}{unit}"


def rate(value: float | None) -> str:
    """Return how many times faster than real time."""
    if value is None:
        return UNKNOWN
    if value >= 99_999.5:
        return f"{value / 1000:,.0f}k×"
    return f"{value:,.0f}×" if value >= 9.95 else f"{value:.1f}×"


def span(seconds: float | None) -> str:
    """Return a time span: 0:14:10, or 3d 04h where that is too long."""
    if seconds is None:
        return UNKNOWN
    left = round(seconds)
    if left >= 100 * 3600:
        return f"{left // 86400}d {left // 3600 % 24:02d}h"
    return f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"


def hours(seconds: float) -> str:
    """Return hours of audio."""
    value = seconds / 3600
    if 0 < value < 1:
        return f"{60 * value:.1f} min"
    return f"{value:,.0f} h" if value >= 100 else f"{value:.1f} h"


def plain(text: str) -> str:
    """Return text without control characters: a name from a file must not steer somebody's terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def in_ascii(text: str) -> str:
    """Return text for a terminal that shows nothing but ASCII."""
    return plain(text).translate(_ASCII).encode("ascii", "replace").decode()


_ASCII = str.maketrans({"–": "-", "×": "x", "·": "|", "°": "", "…": "~", "→": ">", "▸": ">", "↑": "^", "↓": "v"})
