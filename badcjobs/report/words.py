"""How numbers are written, the same in text and on the page; '–' means not available."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from decimal import ROUND_HALF_UP, Decimal

UNKNOWN = "–"
_SMALLEST = 0.0001  # digits of smaller numbers do not matter
_MOST_RANGES = 10
_BARS = "▁▂▃▄▅▆▇█"


def number(value: float | None, digits: int = 1) -> str:
    """Return a number with thousands separated; small ones keep two significant digits."""
    if value is None:
        return UNKNOWN
    if value and abs(value) < 10**-digits:
        return f"{value:.2g}" if abs(value) >= _SMALLEST else f"under {_SMALLEST}"
    return fixed(value, digits)


def fixed(value: float, digits: int) -> str:
    """Return a number with a fixed number of decimals; halves are rounded up: 0.155 is 0.16."""
    if not math.isfinite(value):
        return f"{value:,}"
    return f"{Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_UP):,}"


def share_words(value: float | None) -> str:
    """Return a percentage; a small one is '<1 %', not '0 %'."""
    return UNKNOWN if value is None else "<1 %" if 0 < value < 0.5 else f"{fixed(value, 0)} %"


def percent(value: float | None) -> str:
    """Return a percentage without a space: for narrow columns."""
    return UNKNOWN if value is None else f"{value:.0f}%"


def memory(value: int | None) -> str:
    """Return bytes as GiB or MiB."""
    if value is None:
        return UNKNOWN
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def data_size(value: int | None) -> str:
    """Return bytes of files as TB, GB, MB or kB, as quotas are counted."""
    if value is None:
        return UNKNOWN
    units = ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)
    unit, scale = next(((unit, scale) for unit, scale in units if value >= scale), ("kB", 1e3))
    return f"{value / scale:,.1f} {unit}"


def duration(seconds: float) -> str:
    """Return a duration with its units."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = (whole + 30) // 60
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def energy(watt_hours: float | None) -> str:
    """Return an energy as Wh or kWh."""
    return energies([watt_hours])[0]


def energies(many_wh: Sequence[float | None]) -> list[str]:
    """Return energies for one column, all in the unit of the largest."""
    largest_wh = max(filter(None, many_wh), default=0.0)
    per, unit, digits = (1000, "kWh", 2) if largest_wh >= 1000 else (1, "Wh", 1 if largest_wh >= 10 else 2)
    return [
        UNKNOWN if value is None
        else f"under 0.01 {unit}" if 0 < value / per < 0.01
        else f"{number(value / per, digits)} {unit}"
        for value in many_wh
    ]  # fmt: skip


def spark(values: Sequence[float | None], full: float) -> str:
    """Return a chart with one character per value; a dot where the value is not known."""
    last = len(_BARS) - 1
    return "".join("·" if one is None else _BARS[max(0, min(last, int(one * len(_BARS) / full)))] for one in values)


def moment(at_ms: int) -> str:
    """Return a time to the minute, in UTC."""
    return f"{datetime.fromtimestamp(at_ms / 1000, tz=timezone.utc):%Y-%m-%d %H:%M} UTC"


def period(from_ms: int, to_ms: int) -> str:
    """Return a period in UTC; the date is not repeated, and a short period includes seconds."""
    begin, end = (datetime.fromtimestamp(at_ms / 1000, tz=timezone.utc) for at_ms in (from_ms, to_ms))
    clock = "%H:%M:%S" if to_ms - from_ms < 600_000 else "%H:%M"
    day = "" if begin.date() == end.date() else "%Y-%m-%d "
    return f"{begin:%Y-%m-%d} {begin:{clock}} to {end:{day}{clock}} UTC"


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key by which gpu9 comes before gpu10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def round_up(seconds: float) -> int:
    """Round a time limit up to 5 minutes, from 3 h on to half an hour."""
    step_s = 300 if seconds <= 3 * 3600 else 1800
    return -(-int(seconds + 0.999) // step_s) * step_s


def clock(seconds: float) -> str:
    """Return a time limit as sbatch takes it."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def count(many: int, one: str, more: str | None = None) -> str:
    """Return '1 chunk', '2 chunks'."""
    return f"{many:,} {one if many == 1 else more or one + 's'}"


def indices(values: Sequence[int]) -> str:
    """Return the first few ranges of array indices, for people to read."""
    ranges = index_ranges(values).split(",")
    return ",".join(ranges[:_MOST_RANGES]) + (f",… ({len(values):,} in total)" if len(ranges) > _MOST_RANGES else "")


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
    """Return text with control characters escaped: an id from a file must not control the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escape(text: str, quote: bool = True) -> str:
    """Return text for HTML, with control characters escaped, except line ends."""
    return html.escape("\n".join(map(plain, text.split("\n"))), quote)
