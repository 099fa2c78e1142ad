"""How hard a device worked: GPM where there is GPM, else counters, processes and the plain utilization.

The plain utilization is blind to light load (0 at a true 5 %), so it comes last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import Any

from badcjobs.devices.nvml_answers import Line, NvmlCallBudget, ReadingBuilder, is_refusal, raise_if_gone, reason_of
from badcjobs.devices.nvml_metrics import PCIE_METRICS, PcieCounters
from badcjobs.devices.plausible import NoAnswer, or_none
from badcjobs.model import ProcessReading

log = logging.getLogger(__name__)

ACTIVITY = {  # metric → the binding's name for it
    "busy_percent": "NVML_GPM_METRIC_GRAPHICS_UTIL",
    "sm_activity_percent": "NVML_GPM_METRIC_SM_UTIL",
    "sm_occupancy_percent": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "tensor_percent": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram_percent": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
TRAFFIC = {  # in MiB/s; of the whole card, so not for slices
    "pcie_rx_bytes_per_s": "NVML_GPM_METRIC_PCIE_RX_PER_SEC",
    "pcie_tx_bytes_per_s": "NVML_GPM_METRIC_PCIE_TX_PER_SEC",
}
FROM_GPM = (*ACTIVITY, *TRAFFIC)
ONLY_FROM_GPM = tuple(metric for metric in ACTIVITY if metric != "busy_percent")  # the others have another source

_OVERSHOOT_PERCENT = 1.0  # two samples are not taken in one instant; more than this cannot be

Values = dict[str, float | int]
Failures = dict[str, str]


class NoGpm(Exception):
    """This device has no GPM; the text is the reason."""


class GpmWindows:
    """The windows of one device; ``take_sample`` fills a sample that this class has allocated."""

    def __init__(self, nvml: Any, take_sample: Callable[[Any], object], names: dict[str, str]) -> None:
        self._nvml = nvml
        self._take_sample = take_sample
        self._metrics = tuple(names)
        self._request = nvml.c_nvmlGpmMetricsGet_t(version=nvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(names))
        for place, name in enumerate(names.values()):
            self._request.metrics[place].metricId = getattr(nvml, name)
        self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]  # where the window began; the next one
        self._begun = False

    def next_window(self) -> tuple[Values, Failures]:
        """End the window and begin the next; the first call only begins one and has no values."""
        begin, end = self._samples
        self._take_sample(end)
        if self._begun:
            self._request.sample1, self._request.sample2 = begin, end
            self._nvml.nvmlGpmMetricsGet(self._request)
        answer = self._answers() if self._begun else ({}, {})
        self._samples, self._begun = [end, begin], True
        return answer

    def _answers(self) -> tuple[Values, Failures]:
        values: Values = {}
        failures: Failures = {}
        for place, metric in enumerate(self._metrics):
            one = self._request.metrics[place]
            if one.nvmlReturn:
                failures[metric] = str(self._nvml.NVMLError(one.nvmlReturn))
            elif not isfinite(one.value):
                failures[metric] = "Not Available"
            else:
                values[metric] = round(one.value * 2**20) if metric in TRAFFIC else _without_overshoot(one.value)
        return values, failures

    def close(self) -> None:
        """Give the samples back."""
        samples, self._samples = self._samples, []
        for sample in samples:
            try:
                self._nvml.nvmlGpmSampleFree(sample)
            except Exception as error:  # broad: a sample that stays behind does no harm
                log.debug("a GPM sample was not given back: %s", error)


def _without_overshoot(percent: float) -> float:
    return 100.0 if 100 < percent <= 100 + _OVERSHOOT_PERCENT else percent


def open_gpm(nvml: Any, handle: Any, *, is_slice: bool) -> GpmWindows:
    """Return the windows of a card or slice; raise NoGpm where the driver says that there are none."""
    card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_slice else handle
    if not nvml.nvmlGpmQueryDeviceSupport(card).isSupportedDevice:
        raise NoGpm("the driver says that it does not support it")
    if not is_slice:
        return GpmWindows(nvml, lambda sample: nvml.nvmlGpmSampleGet(card, sample), ACTIVITY | TRAFFIC)
    gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(handle)
    return GpmWindows(nvml, lambda sample: nvml.nvmlGpmMigSampleGet(card, gpu_instance, sample), ACTIVITY)


# --- processes -------------------------------------------------------------------------------------------------------


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


# --- all together ----------------------------------------------------------------------------------------------------


class Activity:
    """What one device did between two looks at it."""

    def __init__(self, *, to_slice: bool) -> None:
        self._to_slice = to_slice
        self._processes = ProcessWatch(to_slice=to_slice)
        self._budget = NvmlCallBudget()
        self._gpm_budget = NvmlCallBudget(most_turns=1)  # a window then lasts two turns, and still covers every moment
        self._pcie = PcieCounters()
        self._gpm: GpmWindows | None = None
        self._has_gpm: bool | None = None  # None: the device has not said so far

    def look(self, nvml: Any, handle: Any, now_s: float, builder: ReadingBuilder) -> None:
        """Write down everything that happened since the last look."""
        if self._has_gpm is not False and self._gpm_budget.is_due():
            with self._gpm_budget.timed():
                self._look_with_gpm(nvml, handle, builder)
        if self._has_gpm is False and not self._to_slice:
            self._look_at_pcie(nvml, handle, now_s, builder)
        # Without GPM their shares are how busy the device was; with it they can be spared where they are dear.
        with_shares = not self._has_gpm or self._budget.is_due()
        with self._budget.timed() if with_shares else nullcontext():
            seen = self._processes.look(nvml, handle, with_shares=with_shares)
        builder.processes = seen.processes
        if seen.why_none is not None:
            builder.miss(["processes"], seen.why_none, for_good=False)
        self._judge(builder, seen)

    def glance(self, builder: ReadingBuilder) -> None:
        """Write down, between two looks, what nothing but the plain utilization tells."""
        if self._has_gpm is False and not self._processes.tell_their_shares:
            _take_utilization(builder)

    def force_full_read(self) -> None:
        """Leave nothing out of the next look."""
        self._budget.force_full_read()
        self._gpm_budget.force_full_read()

    def let_go(self, nvml: Any | None) -> None:
        """Begin anew, as with a device that was lost; without ``nvml`` there is nothing left to give back."""
        gpm, self._gpm = self._gpm, None
        if gpm is not None and nvml is not None:
            gpm.close()
        self._processes.forget()
        self._pcie.forget()

    def _look_with_gpm(self, nvml: Any, handle: Any, builder: ReadingBuilder) -> None:
        try:
            if self._gpm is None:
                self._gpm = open_gpm(nvml, handle, is_slice=self._to_slice)
                self._has_gpm = True
            values, failures = self._gpm.next_window()
        except Exception as error:  # broad: without GPM there is still everything else
            self._do_without_gpm(error, builder)
            return
        for metric, value in values.items():
            builder.give(metric, value, "gpm")
        for metric, reason in failures.items():
            builder.miss([metric], reason, for_good=False)

    def _do_without_gpm(self, error: Exception, builder: ReadingBuilder) -> None:
        raise_if_gone(error)
        if not (isinstance(error, NoGpm) or is_refusal(error)):
            builder.miss(FROM_GPM, reason_of(error), for_good=False)
            return
        if self._gpm is not None:
            self._gpm.close()
        self._gpm, self._has_gpm = None, False
        builder.miss(ONLY_FROM_GPM, f"no GPM on this device: {reason_of(error)}", for_good=True)

    def _look_at_pcie(self, nvml: Any, handle: Any, now_s: float, builder: ReadingBuilder) -> None:
        try:
            rates = self._pcie.rates(nvml, handle, now_s)
        except NoAnswer as reason:
            builder.miss(PCIE_METRICS, str(reason), for_good=self._pcie.refused)
            return
        for metric, rate in rates.items():
            builder.give(metric, rate, "counters")

    def _judge(self, builder: ReadingBuilder, seen: ProcessesSeen) -> None:
        """Settle for what share of the time the device worked."""
        if builder.value("busy_percent") is not None:
            return
        if self._has_gpm and "busy_percent" not in builder.missing:
            return  # a window has only begun, or goes on
        if seen.busy_percent is not None:
            builder.give("busy_percent", seen.busy_percent, "processes")
        # In a container the list may be empty because it shows nobody: then the device is not idle but says so itself.
        elif seen.processes == () and not builder.value("utilization_percent"):
            builder.give("busy_percent", 0.0, "processes")
        elif not _take_utilization(builder) and "busy_percent" not in builder.missing:
            builder.miss(["busy_percent"], builder.missing.get("utilization_percent", "Not Available"), for_good=False)


def _take_utilization(builder: ReadingBuilder) -> bool:
    utilization = builder.value("utilization_percent")
    if utilization is not None:
        builder.give("busy_percent", float(utilization), "utilization")
    return utilization is not None
