"""The heartbeat line of a task's log: how the machine is, how far the work is, when it will be done."""

from __future__ import annotations

from dataclasses import dataclass

from badcjobs.seams import Clock


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a task is."""

    chunks_settled: int
    chunks_total: int
    audio_done_s: float
    elapsed_s: float
    start_up_s: float = 0.0  # of that, before the first chunk was begun
    failed: int = 0  # of the settled ones, for good
    retrying: int = 0  # of those that are left: they have failed before, and are tried again or wait for it

    @property
    def rate(self) -> float | None:
        """Seconds of audio per second; None before anything is known."""
        return self.audio_done_s / self.elapsed_s if self.elapsed_s > 0 and self.audio_done_s > 0 else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last chunk, at the pace since the first; None before anything is known.

        Nor when nothing is left but what has failed before: how long that rests, and how often, has no pace.
        """
        left = self.chunks_total - self.chunks_settled
        if self.chunks_settled == 0 or 0 < left <= self.retrying:
            return None
        return max(0.0, self.elapsed_s - self.start_up_s) * left / self.chunks_settled


class Beat:
    """Says when the next line is due."""

    def __init__(self, every_s: float, clock: Clock) -> None:
        self._every_s = every_s
        self._clock = clock
        self._next_s = clock.monotonic_s() + every_s

    @property
    def is_due(self) -> bool:
        """Whether it is time for a line; the next one is due after this, and what was slept through never."""
        late_s = self._clock.monotonic_s() - self._next_s
        if late_s < 0:
            return False
        self._next_s += self._every_s * (1 + late_s // self._every_s)
        return True


def heartbeat_line(
    progress: Progress,
    *,
    cpu_percent: float | None,
    memory_percent: float | None,
    gpu_percent: float | None,
    devices: int,
) -> str:
    """Return the line as other people's scripts read it; '?' stands for what nobody knows."""
    return (
        f"heartbeat cpu={_percent(cpu_percent)} mem={_percent(memory_percent)} gpu={_percent(gpu_percent)}"
        f" devices={devices} chunks={progress.chunks_settled}/{progress.chunks_total}"
        f" rate={_times(progress.rate)} eta={_clock_time(progress.eta_s)}"
    )


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}%"


def _times(rate: float | None) -> str:
    """Return a whole number, as scripts know it; below 1, where that would be 0, two digits of it."""
    if rate is None:
        return "?"
    return f"{rate:.0f}x" if rate >= 1 else f"{max(rate, 0.0001):.2g}x"  # never 5e-05


def _clock_time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    whole = round(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"
