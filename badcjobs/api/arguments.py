"""Checks what other people's Python hands over, where they hand it over."""

from __future__ import annotations

import math

from badcjobs.errors import BadInput
from badcjobs.model import AlertLimits

_SHORTEST_S, _LONGEST_S = 0.01, 86_400.0


class BadArgument(BadInput, ValueError):
    """An argument that cannot be used; a ``ValueError`` for whoever expects one."""


def check_interval(interval_s: object) -> float:
    """Return the seconds between samples, or say what is wrong with them."""
    if isinstance(interval_s, bool) or not isinstance(interval_s, int | float) or not math.isfinite(interval_s):
        raise BadArgument(f"interval_s={interval_s!r} cannot be used", why="it must be a number of seconds")
    if not _SHORTEST_S <= interval_s <= _LONGEST_S:
        raise BadArgument(
            f"interval_s={interval_s!r} cannot be used",
            why=f"the shortest is {_SHORTEST_S} s, the longest a day ({_LONGEST_S:.0f} s)",
        )
    return float(interval_s)


def check_simulate(simulate: object) -> None:
    """Refuse what is no number of devices."""
    if simulate is not None and (type(simulate) is not int or simulate < 1):
        raise BadArgument(
            f"simulate={simulate!r} cannot be used", why="it must be a whole number from 1 on, or None: the real ones"
        )


def check_limits(limits: object) -> AlertLimits:
    """Return the limits, or say all that is wrong with them."""
    if limits is None:
        return AlertLimits()
    if not isinstance(limits, AlertLimits):
        raise BadArgument(f"limits={limits!r} cannot be used", fix="limits=AlertLimits(temperature_c=80)")
    if problems := limits.problems():
        raise BadArgument("these limits cannot be used", why="\n".join(problems), fix="badcjobs guide telemetry")
    return limits


def check_on_alert(on_alert: object) -> None:
    """Refuse what nobody can call."""
    if on_alert is not None and not callable(on_alert):
        raise BadArgument(f"on_alert={on_alert!r} cannot be used", why="it must be a function of one argument")
