"""What a probe finds out: trials of one length each, and what follows from them for one model of device."""

from __future__ import annotations

from dataclasses import dataclass

FITS, TOO_LONG, NO_START = "fits", "too long", "no start"  # the last: its models alone fill the device


@dataclass(frozen=True, slots=True)
class Trial:
    """Chunks of one length, given to an engine on one device."""

    length_s: float
    lean: bool  # with one thread, and nothing beside it
    outcome: str  # FITS, TOO_LONG or NO_START
    chunks: int = 0  # that were done
    work_s: float | None = None  # their time without the start of the engine
    times_real_time: float | None = None
    peak_bytes: int | None = None  # the most memory of the device in use; None: nobody could read it, or it ran out
    host_peak_bytes: int | None = None  # the most memory that our processes held on the node


@dataclass(frozen=True, slots=True)
class ProbeKey:
    """What a probe is about: with anything else here, another length may fit."""

    gpu: str  # the model's name; "cpu" without a device
    memory_bytes: int | None
    engine: str
    engine_version: str
    settings: str
    chunks_at_once: int = 1  # in all the threads of all the workers of a device
    workers: int = 1


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What all trials together say; None: not known, or there is none."""

    longest_s: float | None  # that fits
    too_long_s: float | None  # the shortest that does not; None: all that was tried fits
    safe_s: float | None  # the longest, less the margin
    best_s: float | None  # the shortest of those that are about as fast as the fastest
    times_real_time: float | None  # at the best length
    peak_bytes: int | None = None  # at the best length
    lean_longest_s: float | None = None  # with one thread, and nothing beside it; not searched where all fits as usual
    lean_too_long_s: float | None = None
    lean_safe_s: float | None = None
    margin_percent: float = 10.0


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe of one model of device; there is a result as soon as the usual way is known."""

    key: ProbeKey
    trials: tuple[Trial, ...] = ()
    result: ProbeResult | None = None
    finished: bool = False
    at: str | None = None  # when the last trial ended, UTC
