"""How numbers are written, in every text and log; live/assets/words.js writes them the same way on the live page.

'–' means not available. One test runs one list of cases through both.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Collection, Sequence
from datetime import datetime, timezone
from decimal import ROUND_HALF_UP, Decimal

UNKNOWN = "–"
_SMALLEST = 0.0001  # digits of smaller numbers do not matter
_MOST_RANGES = 10
_BARS = "▁▂▃▄▅▆▇█"
_FEW_S = 600  # less GPU time than this is written as a duration
_MANY_W = 10_000  # more power than this is written in kW
_GIB = 2**30
_MIB = 2**20
_ASCII = str.maketrans("–×·°…→▸↑↓━╸─▁▂▃▄▅▆▇█", "-x| ~>>^v=>-_.:-=+*#")


# --- quantities -------------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 1) -> str:
    """Return a number with thousands separated; small ones keep two significant digits."""
    if value is None:
        return UNKNOWN
    if value == 0 or abs(value) >= 10**-digits:
        return fixed(value, digits)
    if abs(value) < _SMALLEST:
        return f"under {_SMALLEST}"
    return f"{value:.2g}"


def fixed(value: float, digits: int) -> str:
    """Return a number with a fixed number of decimals; halves are rounded up: 0.155 is 0.16."""
    if not math.isfinite(value):
        return f"{value:,}"
    return f"{Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_UP):,}"


def count(many: int, one: str, more: str | None = None) -> str:
    """Return '1 chunk', '2 chunks'."""
    if many == 1:
        return f"1 {one}"
    return f"{many:,} {more or one + 's'}"


def duration(seconds: float | None) -> str:
    """Return a duration with its units."""
    if seconds is None:
        return UNKNOWN
    if seconds < 59.95:
        return f"{fixed(seconds, 1)} s"
    whole_s = math.floor(seconds + 0.5)
    if whole_s < 3600:
        return f"{whole_s // 60} min {whole_s % 60:02d} s"
    minutes = (whole_s + 30) // 60
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def share_words(percent: float | None) -> str:
    """Return a percentage; a small one is '<1 %', not '0 %'."""
    if percent is None:
        return UNKNOWN
    if 0 < percent < 0.5:
        return "<1 %"
    return f"{fixed(percent, 0)} %"


def progress(share: float) -> str:
    """Return how far something is, from 0 to 1, as a percentage; only all of it is 100 %."""
    percent = min(100, math.floor(100 * share + 1e-9))
    if share > 0 and percent == 0:
        return "<1 %"
    return f"{percent} %"


def three_digits(value: float) -> float:
    """Round a number to three digits."""
    return float(f"{value:.3g}")


def memory(value: float | None, beside: Collection[float] = ()) -> str:
    """Return bytes as GiB or MiB; in a unit that fits the values beside it, too, so that they can be compared."""
    if value is None:
        return UNKNOWN
    values = (value, *beside)
    if max(values) >= _GIB and min(values) >= _GIB / 10:
        return f"{fixed(value / _GIB, 1)} GiB"
    return f"{fixed(value / _MIB, 0)} MiB"


def data_size(value: float | None) -> str:
    """Return bytes of files as TB, GB, MB or kB, as quotas are counted."""
    if value is None:
        return UNKNOWN
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= scale:
            return f"{fixed(value / scale, 1)} {unit}"
    return f"{fixed(value / 1000, 1)} kB"


def speed(times_real_time: float | None) -> str:
    """Return seconds of audio per second."""
    if times_real_time is None:
        return UNKNOWN
    return f"{number(times_real_time)} ×"


def audio_time(audio_s: float) -> str:
    """Return a length of audio."""
    return f"{number(audio_s / 3600, 2)} hours"


def gpu_time(gpu_s: float) -> str:
    """Return GPU time as a duration or in hours."""
    if not gpu_s:
        return "no GPU"
    if gpu_s < _FEW_S:
        return f"{duration(gpu_s)} of GPU time"
    return f"{number(gpu_s / 3600, 2)} GPU-hours"


def power(value_w: float | None) -> str:
    """Return a power as W or kW."""
    if value_w is None:
        return UNKNOWN
    if value_w >= _MANY_W:
        return f"{fixed(value_w / 1000, 1)} kW"
    return f"{fixed(value_w, 0)} W"


def temperature(value_c: float | None) -> str:
    """Return a temperature."""
    if value_c is None:
        return UNKNOWN
    return f"{fixed(value_c, 0)} °C"


def energy(watt_hours: float | None) -> str:
    """Return an energy as Wh or kWh."""
    if watt_hours is None:
        return UNKNOWN
    if watt_hours >= 1000:
        return f"{number(watt_hours / 1000, 2)} kWh"
    if 0 < watt_hours < 0.01:
        return "under 0.01 Wh"
    return f"{number(watt_hours, 1 if watt_hours >= 10 else 2)} Wh"


# --- charts, times, names ---------------------------------------------------------------------------------------------


def spark(values: Sequence[float | None], full: float) -> str:
    """Return a chart with one character per value; a dot where the value is not known."""
    signs = []
    for value in values:
        if value is None:
            signs.append("·")
            continue
        height = int(value * len(_BARS) / full)
        signs.append(_BARS[max(0, min(len(_BARS) - 1, height))])
    return "".join(signs)


def moment(at_ms: int) -> str:
    """Return a time to the minute, in UTC."""
    return f"{datetime.fromtimestamp(at_ms / 1000, tz=timezone.utc):%Y-%m-%d %H:%M} UTC"


def period(from_ms: int, to_ms: int) -> str:
    """Return a period in UTC; the date is not repeated, and a short period includes seconds."""
    begin = datetime.fromtimestamp(from_ms / 1000, tz=timezone.utc)
    end = datetime.fromtimestamp(to_ms / 1000, tz=timezone.utc)
    clock_form = "%H:%M:%S" if to_ms - from_ms < 600_000 else "%H:%M"
    end_form = clock_form if begin.date() == end.date() else f"%Y-%m-%d {clock_form}"
    return f"{begin:%Y-%m-%d} {begin:{clock_form}} to {end:{end_form}} UTC"


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


def first_names(names: Sequence[str], most: int) -> str:
    """Return the first names of a list, and how many more there are."""
    listed = ", ".join(names[:most])
    if len(names) <= most:
        return listed
    return f"{listed} and {len(names) - most:,} more"


def indices(values: Sequence[int]) -> str:
    """Return the first few ranges of array indices, for people to read."""
    ranges = index_ranges(values).split(",")
    listed = ",".join(ranges[:_MOST_RANGES])
    if len(ranges) <= _MOST_RANGES:
        return listed
    return f"{listed},… ({len(values):,} in total)"


def index_ranges(values: Sequence[int], step: int = 1) -> str:
    """Return array indices as --array takes them: 3,7-9; with a step: 1,7-11:2."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + step:
            runs[-1].append(value)
        else:
            runs.append([value])
    suffix = f":{step}" if step > 1 else ""
    ranges = []
    for run in runs:
        if len(run) > 2:
            ranges.append(f"{run[0]}-{run[-1]}{suffix}")
        else:
            ranges += [str(value) for value in run]
    return ",".join(ranges)


# --- text -------------------------------------------------------------------------------------------------------------


def to_ascii(text: str) -> str:
    """Return text with our own signs in ASCII, each of the same width; names keep their letters."""
    return text.translate(_ASCII)


def plain(text: str) -> str:
    """Return text with control characters escaped: an id from a file must not control the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escape(text: str, quote: bool = True) -> str:
    """Return text for HTML, with control characters escaped, except line ends."""
    return html.escape("\n".join(map(plain, text.split("\n"))), quote)
