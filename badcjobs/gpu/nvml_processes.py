"""Who is on a device: pids, their memory, and how much of the multiprocessors each of them used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from badcjobs.gpu.nvml_answers import Line, NoAnswer
from badcjobs.gpu.sane import or_none
from badcjobs.model import ProcessReading


@dataclass(frozen=True, slots=True)
class ProcessesSeen:
    """What one look has shown."""

    processes: tuple[ProcessReading, ...] | None = None  # None: they cannot be listed
    why_none: str | None = None
    busy_percent: float | None = None  # in the time since the look before; None: nobody said


class ProcessWatch:
    """Looks at the processes of one device, again and again."""

    def __init__(self, *, to_slice: bool) -> None:
        self._compute = Line(
            lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle),
            lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle),  # drivers before 510
            to_slice=to_slice,
        )
        self._graphics = Line(
            lambda nvml, handle: nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle),
            lambda nvml, handle: nvml.nvmlDeviceGetGraphicsRunningProcesses_v2(handle),
            to_slice=to_slice,
        )
        self._shares = Line(self._ask_shares, to_slice=to_slice)
        self._seen_until_us: int | None = None  # by the driver's clock; None: nothing was asked yet

    @property
    def tell_their_shares(self) -> bool:
        """Say whether the device tells what each of them used; true until it has refused."""
        return not self._shares.refused

    def look(self, nvml: Any, handle: Any, *, with_shares: bool = True) -> ProcessesSeen:
        """List the processes, with what each used since the look before that asked for shares."""
        shares = self._shares_since(nvml, handle) if with_shares else {}
        busy = min(100.0, sum(shares.values())) if shares else None
        try:
            memory = self._memory_by_pid(nvml, handle)
        except NoAnswer as reason:
            return ProcessesSeen(why_none=str(reason), busy_percent=busy)
        pids = sorted({*memory, *shares})  # one that has ended meanwhile used its share all the same
        return ProcessesSeen(
            tuple(ProcessReading(pid, memory.get(pid), _rounded(shares.get(pid))) for pid in pids), busy_percent=busy
        )

    def forget(self) -> None:
        """Begin anew, as with a device that was lost."""
        self._seen_until_us = None

    def _memory_by_pid(self, nvml: Any, handle: Any) -> dict[int, int | None]:
        found = {one.pid: _memory_of(one) for one in self._compute.ask(nvml, handle)}
        try:
            drawing = self._graphics.ask(nvml, handle)
        except NoAnswer:  # many cards and all slices know compute processes alone
            return found
        # A process that computes and draws stands in both lists, with all its memory in each.
        return {one.pid: _memory_of(one) for one in drawing} | found

    def _shares_since(self, nvml: Any, handle: Any) -> dict[int, float]:
        first = self._seen_until_us is None
        try:
            samples = self._shares.ask(nvml, handle)
        except NoAnswer:
            return {}
        self._seen_until_us = max([self._seen_until_us or 0, *(one.timeStamp for one in samples)])
        # The driver keeps samples of some time: the first look only learns where to begin.
        return {} if first else _mean_by_pid(samples)

    def _ask_shares(self, nvml: Any, handle: Any) -> Sequence[Any]:
        try:
            return list(nvml.nvmlDeviceGetProcessUtilization(handle, self._seen_until_us or 0))
        except nvml.NVMLError_NotFound:  # nothing ran since then
            return ()


def _mean_by_pid(samples: Sequence[Any]) -> dict[int, float]:
    by_pid: dict[int, list[int]] = {}
    for one in samples:
        if one.smUtil <= 100:  # drivers have been seen to hand out samples that were never filled in
            by_pid.setdefault(one.pid, []).append(one.smUtil)
    return {pid: sum(shares) / len(shares) for pid, shares in by_pid.items()}


def _memory_of(listed: Any) -> int | None:
    memory: int | None = listed.usedGpuMemory
    return or_none("memory_used_bytes", memory)


def _rounded(share: float | None) -> int | None:
    return None if share is None else round(share)
