"""Reads the values of single options of sbatch: a time limit, a signal, memory. Pure.

All raise ValueError, with a sentence for people.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")
_SIGNAL = re.compile(r"(?:(?P<who>[BR]{1,2}):)?(?P<name>[A-Za-z0-9]+)(?:@(?P<lead>\d+))?")
_MEMORY = re.compile(r"\+?(?P<number>[0-9]+)(?:(?P<unit>[KMGT])B?)?", re.IGNORECASE)
_MIB = {"M": 1, "G": 1024, "T": 1024**2}
_UNLIMITED = ("unlimited", "infinite", "-1")


@dataclass(frozen=True, slots=True)
class EarlySignal:
    """The early signal: ``--signal=B:USR1@180``."""

    signum: signal.Signals
    lead_s: int
    to_script: bool  # without B: only srun steps hear it


def parse_limit(text: str) -> int | None:
    """Return the seconds of ``--time``: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``; None: no limit.

    Slurm counts in whole minutes, rounded up, and takes no time at all for no limit.
    """
    if text.strip().lower() in _UNLIMITED:
        return None
    parts = _CLOCK.fullmatch(text.strip())
    if parts is None:
        raise ValueError(f"--time={text} is no time; write minutes, or H:M:S, or D-H:M:S")
    a, b, c = (int(parts[name] or 0) for name in "abc")
    if parts["days"] is None and parts["c"] is None:
        a, b, c = 0, a, b
    seconds = ((int(parts["days"] or 0) * 24 + a) * 60 + b) * 60 + c
    return -(-seconds // 60) * 60 or None


def parse_memory(text: str, name: str = "mem") -> int:
    """Return the MiB of ``--mem``: 4096, 4096M, 4G, 4gb; kilobytes are rounded up, 0 is all there is."""
    found = _MEMORY.fullmatch(text)
    if found is None:
        raise ValueError(f"--{name}={text} is no memory; write 4G")
    number, unit = int(found["number"]), (found["unit"] or "M").upper()
    return -(-number // 1024) if unit == "K" else number * _MIB[unit]


def parse_signal(text: str) -> EarlySignal:
    """Read ``--signal``: ``[B:]NAME-or-number[@seconds]``; 60 seconds where none are named."""
    found = _SIGNAL.fullmatch(text)
    name = found["name"].upper().removeprefix("SIG") if found else ""
    try:
        number = signal.Signals(int(name)) if name.isdecimal() else signal.Signals[f"SIG{name}"]
    except (KeyError, ValueError):
        raise ValueError(f"--signal={text} is no signal; write B:USR1@180") from None
    assert found is not None
    return EarlySignal(number, int(found["lead"] or 60), "B" in (found["who"] or ""))
