"""Reads the machine around the devices: CPU and memory, from /proc, which costs less than a package that does."""

from __future__ import annotations

from pathlib import Path

from badcjobs.model import HostReading


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
