"""How numbers are said: the same in text and on the page, and '–' for what nobody knows."""

from __future__ import annotations

from collections.abc import Sequence

UNKNOWN = "–"


def number(value: float | None, digits: int = 1) -> str:
    """Return a number with thousands separated; small ones keep two significant digits."""
    if value is None:
        return UNKNOWN
    if value and abs(value) < 10**-digits:
        return f"{value:.2g}"
    return f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """Return a whole percentage."""
    return UNKNOWN if value is None else f"{value:.0f}%"


def memory(value: int | None) -> str:
    """Return bytes as GiB or MiB."""
    if value is None:
        return UNKNOWN
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Return a time span as people say it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d} h"


def energy(watt_hours: float | None) -> str:
    """Return an energy as Wh or kWh."""
    if watt_hours is None:
        return UNKNOWN
    return f"{watt_hours / 1000:,.2f} kWh" if watt_hours >= 1000 else f"{number(watt_hours)} Wh"


def count(many: int, one: str, more: str | None = None) -> str:
    """Return '1 chunk', '2 chunks'."""
    return f"{many:,} {one if many == 1 else more or one + 's'}"


def indices(values: Sequence[int], most: int = 10) -> str:
    """Return array indices for people: the first few ranges."""
    ranges = index_ranges(values).split(",")
    return ",".join(ranges[:most]) + (f",… ({len(values)} in all)" if len(ranges) > most else "")


def index_ranges(values: Sequence[int], step: int = 1) -> str:
    """Return array indices as --array takes them: 3,7-9; with a step: 1,7-11:2."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + step:
            runs[-1].append(value)
        else:
            runs.append([value])
    suffix = f":{step}" if step > 1 else ""
    return ",".join(f"{run[0]}-{run[-1]}{suffix}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def plain(text: str) -> str:
    """Return text without control characters: an id from a file must not steer somebody's terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
