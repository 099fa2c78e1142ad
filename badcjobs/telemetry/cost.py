"""What the recorder costs: it writes its own processor time, memory and lateness beside what it records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from badcjobs.model import Reading

_EVERY_MS = 10_000
_WORTH_A_SHARE_S = 10.0  # of a shorter life the start is nearly all


@dataclass(slots=True)
class Effort:
    """What the loop knows about itself; it adds to this as it goes."""

    ticks: int = 0
    worst_late_s: float = 0.0
    reading_s: float = 0.0

    def note_lateness(self, late_s: float) -> None:
        """Remember the worst: how long after its point on the grid a sample was taken."""
        self.worst_late_s = max(self.worst_late_s, late_s)


@dataclass(frozen=True, slots=True)
class Use:
    """What the system says about a process."""

    cpu_s: float
    memory_bytes: int | None


def read_own_use() -> Use:
    """Return what this process has used so far."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    return Use(time.process_time(), parse_peak_memory(status))


def parse_peak_memory(status: str) -> int | None:
    """Return the most memory a process had, from /proc/PID/status; None: it does not say.

    Not from getrusage: that remembers the program which started this one, and it may be a large one.
    """
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else None


class CostWriter(Protocol):
    """Where the recorder's row is written."""

    def write_recorder(self, values: Mapping[str, object]) -> None: ...


@dataclass(frozen=True, slots=True)
class Life:
    """What stays the same while one recorder lives."""

    pid: int
    interval_s: float
    started_at_ms: int
    backend: Callable[[], tuple[str, str]]  # what reads the devices, and why that


class CostBook:
    """Brings the recorder's row up to date every ten seconds, and at the end."""

    def __init__(self, writer: CostWriter, life: Life, effort: Effort, use: Callable[[], Use] = read_own_use) -> None:
        self._writer = writer
        self._life = life
        self._effort = effort
        self._use = use
        self._at_ms = life.started_at_ms
        self._next_ms = life.started_at_ms

    def write(self, at_ms: int, readings: Sequence[tuple[int, Reading]], unreadable: Mapping[int, str]) -> None:
        """Write the row when it is due."""
        self._at_ms = at_ms
        if at_ms >= self._next_ms:
            self._next_ms = at_ms + _EVERY_MS
            self.finish()

    def finish(self) -> None:
        """Write the row now."""
        life, effort, use = self._life, self._effort, self._use()
        backend, why = life.backend()
        self._writer.write_recorder(
            {
                "pid": life.pid, "backend": backend, "why": why, "interval_s": life.interval_s,
                "started_at_ms": life.started_at_ms, "last_at_ms": self._at_ms, "ticks": effort.ticks,
                "cpu_s": use.cpu_s, "memory_bytes": use.memory_bytes, "worst_late_s": effort.worst_late_s,
                "reading_s": effort.reading_s,
            }
        )  # fmt: skip

    def written(self) -> None:
        """Do nothing: a row that was refused is written anew when it is due again."""

    @property
    def words(self) -> str:
        """The cost so far, for the task's log."""
        life, effort, use = self._life, self._effort, self._use()
        lived_s = (self._at_ms - life.started_at_ms) / 1000
        share = f" ({100 * use.cpu_s / lived_s:.2f} % of a core)" if lived_s >= _WORTH_A_SHARE_S else ""
        memory = "?" if use.memory_bytes is None else f"{use.memory_bytes / 2**20:.0f}"
        return (
            f"{effort.ticks} instants read by {life.backend()[0]} in {lived_s:.0f} s; {use.cpu_s:.2f} s of CPU"
            f"{share}, {memory} MiB, at worst {effort.worst_late_s:.3f} s late"
        )
