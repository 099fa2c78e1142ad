"""What engines share to start their programs, to notice that one hangs, and to see that the kernel has killed one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from badcjobs.processes import Launcher
from badcjobs.seams import Clock
from badcjobs.workers import policy

START_S = 1800.0  # of an engine: a cold import from a busy filesystem is slow
_COMPILE_S = 900.0  # with the first chunk
_FIRST = 3  # times as long for the first chunk of a worker, which compiles
_FACTOR = 20  # a worker that is silent for this many times the slowest chunk hangs
_UNKNOWN_AUDIO_S = 3600.0  # assumed for audio of unknown length
# Also of a program whose child was killed.
_MAY_BE_MEMORY = (policy.WORKER_DIED, policy.ENGINE_CRASH, policy.EXIT_CODE, policy.NO_OUTPUT)


@dataclass(kw_only=True)
class HangTimeout:
    """Decides when a silent engine hangs, from the slowest chunk so far; shared by all workers of a task."""

    start_s: float = START_S  # until the first chunk starts (imports, models, a cold filesystem)
    least_s: float = 120.0  # a shorter silence is never a hang
    slowest: float = 2.0  # assumed seconds of work per second of audio, until a chunk is done
    _slowest_rate: float | None = None  # seconds of work per second of audio
    _slowest_s: float | None = None  # used for audio of unknown length

    def learn(self, took_s: float, audio_s: float | None) -> None:
        """Record the time that a finished chunk took."""
        self._slowest_s = max(took_s, self._slowest_s or 0.0)
        if audio_s:
            self._slowest_rate = max(took_s / audio_s, self._slowest_rate or 0.0)

    def limit_s(self, audio_s: float | None, *, is_first: bool = False) -> float:
        """Return how long a worker may be silent with this much audio in progress."""
        least_s = self.least_s * (_FIRST if is_first else 1)
        if self._slowest_s is None:
            return min(self.start_s, _COMPILE_S) + self.slowest * (audio_s or _UNKNOWN_AUDIO_S)
        if audio_s is None or self._slowest_rate is None:
            return max(least_s, _FACTOR * self._slowest_s)
        return max(least_s, _FACTOR * self._slowest_rate * audio_s)


def read_oom_kills(proc: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how many processes of this control group the kernel has killed for lack of memory; None: not known.

    A line of /proc/self/cgroup is ``0::/path``, or ``9:memory:/path`` with version 1.
    """
    counts: list[int] = []
    with suppress(OSError, ValueError):
        for line in proc.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            group = path.lstrip("/")
            if not controllers:
                events = groups / group / "memory.events"
            elif "memory" in controllers.split(","):
                events = groups / "memory" / group / "memory.oom_control"
            else:
                continue
            if events.exists():
                counts += map(int, re.findall(r"^oom_kill (\d+)$", events.read_text(), re.MULTILINE))
    return max(counts, default=None)


@dataclass(frozen=True)
class EngineStart:
    """What every engine needs to start its programs."""

    args: Sequence[str]  # the values of --engine-arg
    environ: Mapping[str, str]
    launcher: Launcher
    clock: Clock
    raw: Path | None = None  # with run.keep_raw: the folder for copies of output files
    places: bool = False  # recordings may have places
    cwd: Path = Path()  # relative paths in the settings are relative to it
    allow_cpu: bool = False
    start_s: float = START_S  # how long an engine may take to start
    oom_kills: Callable[[], int | None] = read_oom_kills

    def blame_memory(self, error_class: str, kills_before: int | None) -> str:
        """Return the class of a program's end: full memory, if the kernel has killed a process for that meanwhile."""
        was_killed = (self.oom_kills() or 0) > (kills_before or 0)
        if was_killed and error_class in _MAY_BE_MEMORY:
            return policy.HOST_MEMORY
        return error_class
