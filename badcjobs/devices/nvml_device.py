"""Read one device through NVML: what it is asked, how often, and which source tells how busy it was.

Cards, drivers, bindings and MIG modes differ in what they answer. A refusal holds for good and is never asked again;
any other failure holds for this reading; an error of a device that is gone is raised.

The hot questions are asked at every reading and cost some 20 µs; the warm ones, which take longer or change slowly,
every 5 s; expensive ones are rate-limited on top of that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from math import isfinite
from typing import Any

from badcjobs.devices.reading_builder import Call, NoAnswer, Question, ReadingBuilder, check_number, or_none, reason_of
from badcjobs.model import ProcessReading, Reading

log = logging.getLogger(__name__)

UNINITIALIZED, _INVALID_ARGUMENT, _GPU_IS_LOST = 1, 2, 15
# Not Supported, Insufficient Permissions, Function Not Found; a version of a call that the driver does not know, or no
# longer.
_PERMANENT = frozenset((3, 4, 13, 25, 26))


def code_of(error: Exception) -> int | None:
    """Return NVML's error code; None when it is no error of NVML's."""
    return getattr(error, "value", None)


def is_refusal(error: Exception, *, by_slice: bool = False) -> bool:
    """Return whether the device gives this error permanently; raise the error of a device that is lost."""
    code = code_of(error)
    if code in (UNINITIALIZED, _GPU_IS_LOST):
        raise error
    # AttributeError: this version of the binding does not have the call. A slice answers "invalid argument" to calls
    # that only a whole card has.
    return code in _PERMANENT or isinstance(error, AttributeError) or (by_slice and code == _INVALID_ARGUMENT)


_EXPENSIVE_S = 0.5e-3  # a call that takes so long is left out the next time; twice as long, the next two times


class NvmlCallBudget:
    """Rate-limits an expensive NVML call: knows how many turns it is still left out."""

    def __init__(self, most_turns: int = 4) -> None:
        self._most_turns = most_turns
        self._turns_off = 0
        self._took_before_s = 0.0

    def is_due(self) -> bool:
        """Return whether it is asked this time, and count the turn."""
        self._turns_off -= 1
        return self._turns_off < 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the question while it is asked."""
        started_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - started_s
        # The shorter of the last two: one that took long may only have been interrupted.
        self._turns_off = min(self._most_turns, int(min(took_s, self._took_before_s) / _EXPENSIVE_S))
        self._took_before_s = took_s

    def force_full_read(self) -> None:
        """Ask it the next time, whatever it costs."""
        self._turns_off = 0


# --- what is asked ---------------------------------------------------------------------------------------------------

_WARM_S = 4.9  # every 5 s; a tick that comes a little early counts
_SHORTEST_WINDOW_S = 0.2  # GPM needs its samples at least 0.1 s apart
_AT_ONCE = float("-inf")

# What only the whole card has: a slice that showed it would count it as its own.
_BOARD_WIDE = (
    "temperature_c",
    "power_w",
    "energy_j",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "throttle_reasons",
    "pcie_rx_bytes_per_s",
    "pcie_tx_bytes_per_s",
    "fan_percent",
    "ecc_errors",
)


def _utilization(nvml: Any, handle: Any) -> tuple[int, int]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


# The metrics of a question, and the ways to ask it: the first one that this driver and this binding know is taken.
_HOT: tuple[tuple[Any, ...], ...] = (
    (("utilization_percent", "memory_utilization_percent"), _utilization),
    (
        ("memory_used_bytes",),
        lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used,
        # Drivers before 510; this one calls used what the driver keeps for itself.
        lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
    ),
    (
        ("temperature_c",),
        lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        # The binding says that CUDA 14 drops the call above; older drivers and bindings lack this one.
        lambda nvml, handle: nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU),
    ),
    (("power_w",), lambda nvml, handle: check_number(nvml.nvmlDeviceGetPowerUsage(handle)) / 1000),
    (("sm_clock_mhz",), lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
    (("memory_clock_mhz",), lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
    (
        ("throttle_reasons",),
        lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),  # drivers before 535
    ),
)
_EXPENSIVE = (  # 4 ms of the processor on an H200, a hundred times all of the hot ones
    (("energy_j",), lambda nvml, handle: check_number(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000),
)
_WARM = (
    (("fan_percent",), lambda nvml, handle: nvml.nvmlDeviceGetFanSpeed(handle)),
    (("encoder_percent",), lambda nvml, handle: nvml.nvmlDeviceGetEncoderUtilization(handle)[0]),
    (("decoder_percent",), lambda nvml, handle: nvml.nvmlDeviceGetDecoderUtilization(handle)[0]),
    (
        ("ecc_errors",),
        lambda nvml, handle: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
    ),
)


_ACTIVITY = {  # metric → the binding's name for it
    "busy_percent": "NVML_GPM_METRIC_GRAPHICS_UTIL",
    "sm_activity_percent": "NVML_GPM_METRIC_SM_UTIL",
    "sm_occupancy_percent": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "tensor_percent": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram_percent": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
_TRAFFIC = {  # in MiB/s; of the whole card, so not for slices
    "pcie_rx_bytes_per_s": "NVML_GPM_METRIC_PCIE_RX_PER_SEC",
    "pcie_tx_bytes_per_s": "NVML_GPM_METRIC_PCIE_TX_PER_SEC",
}
_ONLY_FROM_GPM = tuple(metric for metric in _ACTIVITY if metric != "busy_percent")  # the others have another source
_OVERSHOOT_PERCENT = 1.0  # two samples are not taken in one instant; more than this cannot be

# Drivers know these fields since 550, the binding has names for them since 12.545.
_PCIE_BYTES = {"pcie_rx_bytes_per_s": 198, "pcie_tx_bytes_per_s": 197}
_MEMBER = {1: "uiVal", 2: "ulVal", 3: "ullVal"}  # by NVML_VALUE_TYPE_


class GpmWindows:
    """The GPM windows of one card or slice; raises NoAnswer where the driver says that there are none."""

    def __init__(self, nvml: Any, handle: Any, *, to_slice: bool) -> None:
        card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if to_slice else handle
        if not nvml.nvmlGpmQueryDeviceSupport(card).isSupportedDevice:
            raise NoAnswer("the driver says that it does not support it")
        self._nvml = nvml
        self._card = card
        self._gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(handle) if to_slice else None
        names = _ACTIVITY if to_slice else _ACTIVITY | _TRAFFIC
        self._metrics = tuple(names)
        self._request = nvml.c_nvmlGpmMetricsGet_t(version=nvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(names))
        for place, name in enumerate(names.values()):
            self._request.metrics[place].metricId = getattr(nvml, name)
        self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]  # where the window began; the next one
        self._begun = False

    def next_window(self, builder: ReadingBuilder) -> None:
        """End the window, write down what it shows, and begin the next; the first call only begins one."""
        begin, end = self._samples
        if self._gpu_instance is None:
            self._nvml.nvmlGpmSampleGet(self._card, end)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._card, self._gpu_instance, end)
        if self._begun:
            self._request.sample1, self._request.sample2 = begin, end
            self._nvml.nvmlGpmMetricsGet(self._request)
            for metric, one in zip(self._metrics, self._request.metrics, strict=False):
                if one.nvmlReturn:
                    builder.add_missing([metric], str(self._nvml.NVMLError(one.nvmlReturn)))
                elif not isfinite(one.value):
                    builder.add_missing([metric], "Not Available")
                elif metric in _TRAFFIC:
                    builder.add(metric, round(one.value * 2**20), "gpm")
                else:
                    full = 100 < one.value <= 100 + _OVERSHOOT_PERCENT
                    builder.add(metric, 100.0 if full else one.value, "gpm")
        self._samples, self._begun = [end, begin], True

    def close(self) -> None:
        """Give the samples back."""
        samples, self._samples = self._samples, []
        for sample in samples:
            try:
                self._nvml.nvmlGpmSampleFree(sample)
            except Exception as error:  # broad: a sample that stays behind does no harm
                log.debug("a GPM sample was not given back: %s", error)


_COMPUTE: tuple[Call, ...] = (
    lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle),
    lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle),  # drivers before 510
)
_GRAPHICS: tuple[Call, ...] = (
    lambda nvml, handle: nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle),
    lambda nvml, handle: nvml.nvmlDeviceGetGraphicsRunningProcesses_v2(handle),
)


class NvmlDevice:
    """What a reader has learned of one device, and how it reads it.

    How busy it was tells GPM where there is GPM, else counters, processes, utilization. The plain utilization is blind
    to light load (0 at a true 5 %), so it comes last.
    """

    def __init__(self, uuid: str) -> None:
        self.is_slice = uuid.startswith("MIG-")
        self.handle: Any = None  # None: not looked up, or lost
        refused = dict.fromkeys(_BOARD_WIDE, "board-wide under MIG") if self.is_slice else {}
        self._builder = ReadingBuilder(refused)
        refusal = partial(is_refusal, by_slice=self.is_slice)
        self._hot, self._warm, self._expensive = (
            [Question(*asked, is_refusal=refusal) for asked in questions if asked[0][0] not in refused]
            for questions in (_HOT, _WARM, _EXPENSIVE)
        )
        self._warm_due_s = _AT_ONCE
        self._energy_budget, self._process_budget = NvmlCallBudget(), NvmlCallBudget()
        self._gpm_budget = NvmlCallBudget(most_turns=1)  # a window then lasts two turns, and still covers every moment
        self._gpm: GpmWindows | None = None
        self._has_gpm: bool | None = None  # None: the device has not said so far
        self._counters = Question(tuple(_PCIE_BYTES), _read_counters, is_refusal=is_refusal)
        self._counted: tuple[float, list[int]] | None = None  # when, and the counters then
        self._compute, self._graphics = (Question((), *calls, is_refusal=refusal) for calls in (_COMPUTE, _GRAPHICS))
        self._shares = Question((), self._samples_of_processes, is_refusal=refusal)
        self._seen_until_us: int | None = None  # samples of processes, by the driver's clock; None: not asked yet

    def read(self, nvml: Any, now_s: float) -> Reading:
        """Ask what is due; raise NVML's error when the device is gone, DeviceUnreadable when it says nothing."""
        builder = self._builder
        builder.begin()
        builder.ask(self._hot, nvml, self.handle)
        builder.raise_if_empty()
        if now_s >= self._warm_due_s:
            self._warm_due_s = now_s + _WARM_S
            builder.ask(self._warm, nvml, self.handle)
            if self._energy_budget.is_due():
                with self._energy_budget.timed():
                    builder.ask(self._expensive, nvml, self.handle)
            self._read_activity(nvml, now_s, builder)
        elif self._has_gpm is False and not self._shares.calls:  # only the plain utilization tells
            builder.use_utilization()
        return builder.finish()

    def force_full_read(self, now_s: float) -> None:
        """Let the next reading be a whole one, unless the last one was so just now."""
        if now_s > self._warm_due_s - _WARM_S + _SHORTEST_WINDOW_S:
            self._warm_due_s = _AT_ONCE
            for budget in (self._energy_budget, self._process_budget, self._gpm_budget):
                budget.force_full_read()

    def let_go(self, nvml: Any | None) -> None:
        """Forget where the device is, not what it refused; without ``nvml`` there is nothing left to give back."""
        self.handle = None
        self._warm_due_s = _AT_ONCE
        gpm, self._gpm = self._gpm, None
        if gpm is not None and nvml is not None:
            gpm.close()
        self._seen_until_us = self._counted = None

    def _read_activity(self, nvml: Any, now_s: float, builder: ReadingBuilder) -> None:
        """Write down what the device did since the last time."""
        if self._has_gpm is not False and self._gpm_budget.is_due():
            with self._gpm_budget.timed():
                self._look_with_gpm(nvml, builder)
        if self._has_gpm is False and not self.is_slice:
            self._look_at_pcie(nvml, now_s, builder)
        # Without GPM their shares tell how busy the device was; with it they can be left out where they are expensive.
        with_shares = not self._has_gpm or self._process_budget.is_due()
        with self._process_budget.timed() if with_shares else nullcontext():
            shares = self._shares_since(nvml) if with_shares else {}
            self._list_processes(nvml, shares, builder)
        if "busy_percent" in builder.values:
            return
        if self._has_gpm and "busy_percent" not in builder.missing:
            return  # a window has only begun, or goes on
        if shares:
            builder.add("busy_percent", min(100.0, sum(shares.values())), "processes")
        # In a container the list may be empty because it shows no process of the host: then utilization decides.
        elif builder.processes == () and not builder.values.get("utilization_percent"):
            builder.add("busy_percent", 0.0, "processes")
        else:
            builder.use_utilization()

    def _look_with_gpm(self, nvml: Any, builder: ReadingBuilder) -> None:
        try:
            if self._gpm is None:
                self._gpm = GpmWindows(nvml, self.handle, to_slice=self.is_slice)
                self._has_gpm = True
            self._gpm.next_window(builder)
        except Exception as error:  # broad: without GPM there is still everything else
            if not (isinstance(error, NoAnswer) or is_refusal(error)):
                builder.add_missing((*_ACTIVITY, *_TRAFFIC), reason_of(error))
                return
            if self._gpm is not None:
                self._gpm.close()
            self._gpm, self._has_gpm = None, False
            builder.add_missing(_ONLY_FROM_GPM, f"no GPM on this device: {reason_of(error)}", permanent=True)

    def _look_at_pcie(self, nvml: Any, now_s: float, builder: ReadingBuilder) -> None:
        """Write down the rates between two readings of the counters."""
        if not self._counters.calls:
            return
        try:
            counts = self._counters.ask(nvml, self.handle)
        except NoAnswer as reason:
            builder.add_missing(_PCIE_BYTES, str(reason), permanent=not self._counters.calls)
            return
        before, self._counted = self._counted, (now_s, counts)
        if before is None or now_s <= before[0]:
            return
        moved = [new - old for new, old in zip(counts, before[1], strict=True)]
        if min(moved) < 0:  # NVML's manual: the value can wrap
            builder.add_missing(_PCIE_BYTES, "the byte counter began anew")
            return
        for metric, one in zip(_PCIE_BYTES, moved, strict=True):
            builder.add(metric, round(one / (now_s - before[0])), "counters")

    def _list_processes(self, nvml: Any, shares: Mapping[int, float], builder: ReadingBuilder) -> None:
        try:
            listed = list(self._compute.ask(nvml, self.handle))
        except NoAnswer as reason:
            builder.add_missing(["processes"], str(reason))
            return
        try:
            # A process that computes and draws stands in both lists, with all its memory in each.
            listed = [*self._graphics.ask(nvml, self.handle), *listed]
        except NoAnswer:
            pass  # many cards and all slices know compute processes alone
        memory = {one.pid: or_none("memory_used_bytes", one.usedGpuMemory) for one in listed}
        builder.processes = tuple(
            ProcessReading(pid, memory.get(pid), round(shares[pid]) if pid in shares else None)
            for pid in sorted({*memory, *shares})  # one that has ended meanwhile used its share all the same
        )

    def _shares_since(self, nvml: Any) -> dict[int, float]:
        """Return the mean share of each process since the last look that asked for shares."""
        first = self._seen_until_us is None
        try:
            samples = self._shares.ask(nvml, self.handle)
        except NoAnswer:
            return {}
        self._seen_until_us = max([self._seen_until_us or 0, *(one.timeStamp for one in samples)])
        if first:  # the driver keeps samples of some time: the first look only learns where to begin
            return {}
        by_pid: dict[int, list[int]] = {}
        for one in samples:
            if one.smUtil <= 100:  # drivers have been seen to hand out samples that were never filled in
                by_pid.setdefault(one.pid, []).append(one.smUtil)
        return {pid: sum(percents) / len(percents) for pid, percents in by_pid.items()}

    def _samples_of_processes(self, nvml: Any, handle: Any) -> list[Any]:
        try:
            return list(nvml.nvmlDeviceGetProcessUtilization(handle, self._seen_until_us or 0))
        except nvml.NVMLError_NotFound:  # nothing ran since then
            return []


def _read_counters(nvml: Any, handle: Any) -> list[int]:
    counts = []
    for field in nvml.nvmlDeviceGetFieldValues(handle, list(_PCIE_BYTES.values())):
        if field.nvmlReturn == nvml.NVML_ERROR_INVALID_ARGUMENT:  # the answer of a driver that does not know the field
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        if field.nvmlReturn:
            raise nvml.NVMLError(field.nvmlReturn)
        counts.append(int(check_number(getattr(field.value, _MEMBER.get(field.valueType, "ullVal")))))
    return counts
