"""Reads the values of single options of sbatch: a time limit, a signal, a number of GPUs. Pure.

All raise ValueError, with a sentence for people.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")
_SIGNAL = re.compile(r"(?:(?P<who>[BR]{1,2}):)?(?P<name>[A-Za-z0-9]+)(?:@(?P<lead>\d+))?")
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_UNLIMITED = ("unlimited", "infinite", "-1", "0")


@dataclass(frozen=True, slots=True)
class EarlySignal:
    """The early signal: ``--signal=B:USR1@180``."""

    signum: signal.Signals
    lead_s: int
    to_script: bool  # without B: only srun steps hear it


def parse_limit(text: str) -> int | None:
    """Return the seconds of ``--time``: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``; None: no limit."""
    if text.strip().lower() in _UNLIMITED:
        return None
    parts = _CLOCK.fullmatch(text.strip())
    if parts is None:
        raise ValueError(f"--time={text} is no time; write minutes, or H:M:S, or D-H:M:S")
    a, b, c = (int(parts[name] or 0) for name in "abc")
    if parts["days"] is not None:
        return ((int(parts["days"]) * 24 + a) * 60 + b) * 60 + c
    if parts["c"] is not None:
        return (a * 60 + b) * 60 + c
    return a * 60 + b


def parse_memory(text: str) -> int:
    """Return the MiB of ``--mem``: 4096, 4096M, 4G."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "M")
    if not (number.isascii() and number.isdecimal() and unit in _MIB):
        raise ValueError(f"--mem={text} is no memory; write 4G")
    return max(1, round(int(number) * _MIB[unit]))


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


def count_gpus(given: Mapping[str, str]) -> int:
    """Return how many devices an array task asks for, by whichever option says it."""
    if "gpus-per-node" in given or "gpus" in given:
        name = "gpus-per-node" if "gpus-per-node" in given else "gpus"
        return _typed_sum(given[name], name)
    if "gres" in given:
        asked = [one.removeprefix("gres/") for one in given["gres"].split(",")]
        gpus = [one[4:] or "1" for one in asked if one == "gpu" or one.startswith("gpu:")]
        return sum(_typed_sum(one, "gres") for one in gpus)
    if "gpus-per-task" in given:
        return _typed_sum(given["gpus-per-task"], "gpus-per-task") * int(given.get("ntasks", "1"))
    return 0


def _typed_sum(text: str, name: str) -> int:
    """Return 2 for ``2``, ``a100:2`` and ``v100:1,a100:1``; a type alone is one."""
    total = 0
    for one in text.split(","):
        count = one.rpartition(":")[2]
        if not count.isdecimal() and name != "gres":
            raise ValueError(f"--{name}={text} is no number of GPUs")
        total += int(count) if count.isdecimal() else 1
    return total
