"""What the recorder reads of the machine: its own cost (CPU, memory, lateness), and the load around it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from badcjobs.model import HostReading, Reading
from badcjobs.store.telemetry_writer import TelemetryWriter
from badcjobs.telemetry.recorder import Book, Effort

_EVERY_MS = 10_000
_WORTH_A_SHARE_S = 10.0  # of a shorter life the start is nearly all

Use = tuple[float, int | None]  # seconds of CPU, and the most bytes of memory so far (None: not known)


def read_own_use() -> Use:
    """Return what this process has used so far."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    return time.process_time(), parse_peak_memory(status)


def parse_peak_memory(status: str) -> int | None:
    """Return the most memory a process had, from /proc/PID/status; None: it does not say.

    Not from getrusage: that remembers the program which started this one, and it may be a large one.
    """
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else None


class CostBook(Book):
    """Brings the recorder's row up to date every ten seconds, and at the end."""

    def __init__(
        self,
        writer: TelemetryWriter,
        effort: Effort,
        *,
        interval_s: float,
        started_at_ms: int,
        backend: Callable[[], tuple[str, str]],  # what reads the devices, and why that
        use: Callable[[], Use] = read_own_use,
    ) -> None:
        self._writer = writer
        self._effort = effort
        self._interval_s = interval_s
        self._started_at_ms = started_at_ms
        self._backend = backend
        self._use = use
        self._at_ms = started_at_ms
        self._next_ms = started_at_ms

    def write(self, at_ms: int, readings: Sequence[tuple[int, Reading]], unreadable: Mapping[int, str]) -> None:
        """Write the row when it is due."""
        self._at_ms = at_ms
        if at_ms >= self._next_ms:
            self._next_ms = at_ms + _EVERY_MS
            self.finish()

    def finish(self) -> None:
        """Write the row now."""
        effort, (cpu_s, memory_bytes), (backend, why) = self._effort, self._use(), self._backend()
        self._writer.write_recorder(
            {
                "pid": os.getpid(), "backend": backend, "why": why, "interval_s": self._interval_s,
                "started_at_ms": self._started_at_ms, "last_at_ms": self._at_ms, "ticks": effort.ticks,
                "cpu_s": cpu_s, "memory_bytes": memory_bytes, "worst_late_s": effort.worst_late_s,
                "reading_s": effort.reading_s,
            }
        )  # fmt: skip

    @property
    def words(self) -> str:
        """The cost so far, for the task's log."""
        effort, (cpu_s, memory_bytes) = self._effort, self._use()
        lived_s = (self._at_ms - self._started_at_ms) / 1000
        share = f" ({100 * cpu_s / lived_s:.2f} % of a core)" if lived_s >= _WORTH_A_SHARE_S else ""
        memory = "?" if memory_bytes is None else f"{memory_bytes / 2**20:.0f}"
        return (
            f"{effort.ticks} instants read by {self._backend()[0]} in {lived_s:.0f} s; {cpu_s:.2f} s of CPU"
            f"{share}, {memory} MiB, at worst {effort.worst_late_s:.3f} s late"
        )


class HostReader:
    """CPU share since the last reading, and memory now."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before: tuple[int, int] | None = None

    def read(self) -> HostReading | None:
        """Return the reading; None where the machine does not say."""
        try:
            now = parse_cpu_times((self._proc / "stat").read_text())
            used_bytes, total_bytes = parse_memory((self._proc / "meminfo").read_text())
        except (OSError, ValueError, KeyError, IndexError):
            return None
        before, self._before = self._before, now
        return HostReading(_busy_percent(before, now), used_bytes, total_bytes)


def parse_cpu_times(stat: str) -> tuple[int, int]:
    """Return (busy, all) ticks of all cores together, from /proc/stat; waiting for a disk is not busy."""
    # user nice system idle iowait irq softirq steal; guests are in user already.
    ticks = [int(word) for word in stat.partition("\n")[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def parse_memory(meminfo: str) -> tuple[int, int]:
    """Return (used, total) bytes, from /proc/meminfo; what could be given back at once is not used."""
    total, available = (
        int(meminfo.partition(name)[2].split(None, 1)[0]) * 1024 for name in ("MemTotal:", "MemAvailable:")
    )
    return total - available, total


def _busy_percent(before: tuple[int, int] | None, now: tuple[int, int]) -> float | None:
    """Return the share between two moments; None: there was no earlier one, or no time has passed."""
    if before is None or now[1] <= before[1]:
        return None
    return min(100.0, max(0.0, round(100 * (now[0] - before[0]) / (now[1] - before[1]), 1)))
