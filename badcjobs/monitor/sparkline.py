"""A row of values as a row of small bars."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.:-=+*#"
_NOTHING = " "


def thin(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return at most ``width`` values: means of neighbours, None where none of them is known."""
    if len(values) <= width:
        return list(values)
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    return [_mean([value for value in part if value is not None]) for part in parts]


def sparkline(
    values: Sequence[float | None], width: int, top: float, *, ascii_only: bool = False, over: bool = False
) -> str:
    """Return values between 0 and ``top`` as bars, the newest at the right; a blank is a step without a reading.

    Those of something that is ``over`` begin at the left: nothing comes after them.
    """
    bars = _ASCII_BARS if ascii_only else _BARS
    text = "".join(_NOTHING if value is None else bars[_step(value, top, len(bars))] for value in thin(values, width))
    return text.ljust(width) if over else text.rjust(width)


def _step(value: float, top: float, steps: int) -> int:
    share = value / top if top > 0 else 0.0
    return min(steps - 1, max(0, int(share * steps)))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
