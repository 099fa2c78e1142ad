"""Whether one more worker on each device fits into the main memory that Slurm granted to the task. Pure.

The processes on all devices count together, as Slurm counts them, and the devices of a task go up together: what is
held with n workers on each becomes (n + 1) / n times as much.
"""

from __future__ import annotations

from badcjobs.model import MemoryHeld

_FULL = 0.9  # of what was granted: whoever takes all of it is killed
_STEADY, _APART_S = 1.05, 5.0  # from one reading to another: for a while after its start a worker takes more and more
EACH_BYTES = 4 * 2**30  # what an engine process may need, as long as nobody has measured it
_GIB, _MIB = 2**30, 2**20


def count_with_room(granted_bytes: int, devices: int, each_bytes: int) -> int:
    """Return how many workers that take so much each device may begin with; one it always may."""
    return max(1, int(_FULL * granted_bytes / (max(1, devices) * each_bytes)))


class MainMemory:
    """What the task's processes have held since their number changed; without a limit, everything fits."""

    def __init__(self, granted_bytes: int | None) -> None:
        self._granted_bytes = granted_bytes
        self._since_s = 0.0
        self._is_read = False  # somebody reads it at all
        self._readings: list[MemoryHeld] = []

    def start_anew(self, now_s: float) -> None:
        """Forget what was read before: it was about fewer workers, or about some that had only just begun."""
        self._since_s = now_s
        self._readings.clear()

    def note(self, held: MemoryHeld | None) -> None:
        """Take the latest reading; the same one may come many times, and None where nobody reads."""
        self._is_read = held is not None
        if held is not None and held.at_s >= self._since_s and held not in self._readings[-1:]:
            self._readings.append(held)

    @property
    def peak_bytes(self) -> int | None:
        """The most that was held; None: nobody has read it since."""
        return max((held.memory_bytes for held in self._readings), default=None)

    @property
    def is_known(self) -> bool:
        """Whether the readings tell what these workers take: they no longer grow, or they do not matter."""
        if self._granted_bytes is None or not self._is_read:
            return True
        if not self._readings:
            return False
        last = self._readings[-1]
        before = [held.memory_bytes for held in self._readings if held.at_s <= last.at_s - _APART_S]
        return bool(before) and last.memory_bytes <= _STEADY * before[-1]

    def too_little_for(self, workers: int) -> str | None:
        """Say why one more than so many on each device might not fit; None: it does, as far as anybody knows."""
        held_bytes = self.peak_bytes
        if self._granted_bytes is None or held_bytes is None:
            return None
        then_bytes = held_bytes * (workers + 1) / workers
        if then_bytes <= _FULL * self._granted_bytes:
            return None
        now, then, granted = size(held_bytes), size(then_bytes), size(self._granted_bytes)
        return f"one more might raise the main memory in use from {now} to {then}, and {granted} were granted"


def size(memory_bytes: float) -> str:
    """Return an amount of memory in words."""
    return f"{memory_bytes / _GIB:.1f} GiB" if memory_bytes >= _GIB else f"{memory_bytes / _MIB:.0f} MiB"
