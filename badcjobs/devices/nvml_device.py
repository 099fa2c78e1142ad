"""Read one device through NVML: which metrics, how often, and which source shows how busy it was.

Cards, drivers, versions of the binding and MIG modes differ in the calls that they support. A refused call is never
tried again; any other failure applies to this reading only; the error of a lost device is raised.

Hot questions are asked at each reading and cost about 20 µs; warm and cold questions take longer or change slowly and
are asked every 5 s, warm ones every 2 s while they are watched; expensive calls are rate-limited in addition.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from math import isfinite
from typing import Any

from badcjobs.devices.reading_builder import Call, NoAnswer, Question, ReadingBuilder, check_number, or_none, reason_of
from badcjobs.model import ProcessReading, Reading

UNINITIALIZED, _INVALID_ARGUMENT, _GPU_IS_LOST = 1, 2, 15
# Not Supported, Insufficient Permissions, Function Not Found; a version of a call that the driver does not have yet, or
# no longer has.
_PERMANENT = frozenset((3, 4, 13, 25, 26))


def code_of(error: Exception) -> int | None:
    """Return NVML's error code; None for other errors."""
    return getattr(error, "value", None)


def is_refusal(error: Exception, *, by_slice: bool = False) -> bool:
    """Return whether the device gives this error permanently; raise the error of a device that is lost."""
    code = code_of(error)
    if code in (UNINITIALIZED, _GPU_IS_LOST):
        raise error
    # AttributeError: this version of the binding does not have the call. A slice answers "invalid argument" to calls
    # that only a whole card has.
    return code in _PERMANENT or isinstance(error, AttributeError) or (by_slice and code == _INVALID_ARGUMENT)


_EXPENSIVE_S = 0.5e-3  # a call that takes this long is skipped once; twice as long, two times


class NvmlCallBudget:
    """Rate-limits an expensive NVML call: counts for how many turns the call is skipped."""

    def __init__(self, most_turns: int = 4) -> None:
        self._most_turns = most_turns
        self._turns_off = 0
        self._took_before_s = 0.0

    def is_due(self) -> bool:
        """Count a turn, and return whether to make the call."""
        self._turns_off -= 1
        return self._turns_off < 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the duration of the call."""
        started_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - started_s
        # The shorter of the last two: the process may have been interrupted during one of them.
        self._turns_off = min(self._most_turns, int(min(took_s, self._took_before_s) / _EXPENSIVE_S))
        self._took_before_s = took_s

    def force_full_read(self) -> None:
        """Make the call at the next turn."""
        self._turns_off = 0


# --- the questions ---------------------------------------------------------------------------------------------------

_WARM_S, _COLD_S = 1.9, 4.9  # every 2 and 5 s, with some tolerance for an early tick
_SHORTEST_WINDOW_S = 0.2  # GPM needs its samples at least 0.1 s apart
_NOW = float("-inf")

# Metrics of the card: a slice that showed them would count them as its own.
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


def _call(function: str, *constants: str) -> Call:
    """Return a call of NVML with the handle of a device and these constants."""

    def call(nvml: Any, handle: Any) -> Any:
        return getattr(nvml, function)(handle, *(getattr(nvml, name) for name in constants))

    return call


def _utilization(nvml: Any, handle: Any) -> tuple[int, int]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


# The metrics of a question, and its calls: the first one that this driver and this binding support is used.
_HOT: tuple[tuple[Any, ...], ...] = (
    (("utilization_percent", "memory_utilization_percent"), _utilization),
    (
        ("memory_used_bytes",),
        lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used,
        # Drivers before 510; this call counts the memory reserved by the driver as used.
        lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
    ),
    (
        ("temperature_c",),
        _call("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
        # According to the binding CUDA 14 drops the call above; older drivers and bindings do not have this one.
        _call("nvmlDeviceGetTemperatureV", "NVML_TEMPERATURE_GPU"),
    ),
    (("power_w",), lambda nvml, handle: check_number(nvml.nvmlDeviceGetPowerUsage(handle)) / 1000),
    (("sm_clock_mhz",), _call("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM")),
    (("memory_clock_mhz",), _call("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM")),
    (
        ("throttle_reasons",),
        _call("nvmlDeviceGetCurrentClocksEventReasons"),
        _call("nvmlDeviceGetCurrentClocksThrottleReasons"),  # drivers before 535
    ),
)
_EXPENSIVE = (  # 4 ms of CPU time on an H200, a hundred times all hot questions together
    (("energy_j",), lambda nvml, handle: check_number(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000),
)
_WARM = (
    (("fan_percent",), _call("nvmlDeviceGetFanSpeed")),
    (("encoder_percent",), lambda nvml, handle: nvml.nvmlDeviceGetEncoderUtilization(handle)[0]),
    (("decoder_percent",), lambda nvml, handle: nvml.nvmlDeviceGetDecoderUtilization(handle)[0]),
)
_COLD = (
    (
        ("ecc_errors",),
        _call("nvmlDeviceGetTotalEccErrors", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC"),
    ),
)


_ACTIVITY = {  # metric → its name in the binding
    "busy_percent": "NVML_GPM_METRIC_GRAPHICS_UTIL",
    "sm_activity_percent": "NVML_GPM_METRIC_SM_UTIL",
    "sm_occupancy_percent": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "tensor_percent": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram_percent": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
_TRAFFIC = {  # in MiB/s; of the card, so not for slices
    "pcie_rx_bytes_per_s": "NVML_GPM_METRIC_PCIE_RX_PER_SEC",
    "pcie_tx_bytes_per_s": "NVML_GPM_METRIC_PCIE_TX_PER_SEC",
}
_ONLY_FROM_GPM = tuple(metric for metric in _ACTIVITY if metric != "busy_percent")  # NVML has no other source
_OVERSHOOT_PERCENT = 1.0  # the samples are not taken at the same instant; more is an error

# Drivers have these fields since 550, the binding has names for them since 12.545.
_PCIE_BYTES = {"pcie_rx_bytes_per_s": 198, "pcie_tx_bytes_per_s": 197}
_MEMBER = {1: "uiVal", 2: "ulVal", 3: "ullVal"}  # by NVML_VALUE_TYPE_


class GpmWindows:
    """The GPM windows of one card or slice; raises NoAnswer if the device does not support GPM."""

    def __init__(self, nvml: Any, handle: Any, *, to_slice: bool) -> None:
        card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if to_slice else handle
        if not nvml.nvmlGpmQueryDeviceSupport(card).isSupportedDevice:
            raise NoAnswer("not supported by the driver")
        self._nvml = nvml
        self._card = card
        self._gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(handle) if to_slice else None
        names = _ACTIVITY if to_slice else _ACTIVITY | _TRAFFIC
        self._metrics = tuple(names)
        self._request = nvml.c_nvmlGpmMetricsGet_t(version=nvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(names))
        for place, name in enumerate(names.values()):
            self._request.metrics[place].metricId = getattr(nvml, name)
        self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]  # begin and end of the window
        self._has_begun = False

    def next_window(self, builder: ReadingBuilder) -> None:
        """End the window, add its values, and begin the next window; the first call only begins one."""
        begin, end = self._samples
        if self._gpu_instance is None:
            self._nvml.nvmlGpmSampleGet(self._card, end)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._card, self._gpu_instance, end)
        if self._has_begun:
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
        self._samples, self._has_begun = [end, begin], True

    def close(self) -> None:
        """Free the samples."""
        samples, self._samples = self._samples, []
        for sample in samples:
            with suppress(Exception):  # broad: a sample that is not freed does no harm
                self._nvml.nvmlGpmSampleFree(sample)


def _calls_for_processes(kind: str) -> tuple[Call, Call]:
    """Return the calls that list the processes of a kind; drivers before 510 have only the second."""
    name = f"nvmlDeviceGet{kind}RunningProcesses"
    return _call(f"{name}_v3"), _call(f"{name}_v2")


class NvmlDevice:
    """Reads one device; remembers what it refuses.

    The busy time comes from GPM if the device has it, else from the processes, else from the utilization. The
    utilization comes last because it misses light load (0 at a true 5 %).
    """

    def __init__(self, uuid: str) -> None:
        self.is_slice = uuid.startswith("MIG-")
        self.handle: Any = None  # None: not looked up yet, or lost
        refused = dict.fromkeys(_BOARD_WIDE, "board-wide under MIG") if self.is_slice else {}
        self._builder = ReadingBuilder(refused)
        refusal = partial(is_refusal, by_slice=self.is_slice)
        self._hot, self._warm, self._cold, self._expensive = (
            [Question(*asked, is_refusal=refusal) for asked in questions if asked[0][0] not in refused]
            for questions in (_HOT, _WARM, _COLD, _EXPENSIVE)
        )
        self._warm_due_s = self._cold_due_s = _NOW
        self._energy_budget, self._process_budget = NvmlCallBudget(), NvmlCallBudget()
        self._gpm_budget = NvmlCallBudget(most_turns=1)  # a window then lasts two turns, without a gap
        self._gpm: GpmWindows | None = None
        self._has_gpm: bool | None = None  # None: not known yet
        self._counters = Question(tuple(_PCIE_BYTES), _read_counters, is_refusal=is_refusal)
        self._counted: tuple[float, list[int]] | None = None  # time, and the counters at that time
        self._compute, *self._others = (
            Question((), *_calls_for_processes(kind), is_refusal=refusal)
            for kind in ("Compute", "Graphics", "MPSCompute")  # an MPS server is a compute process, with its clients
        )
        self._shares = Question((), self._samples_of_processes, is_refusal=refusal)
        self._seen_until_us: int | None = None  # last sample of processes, by the driver's clock; None: not read yet
        self._percents: dict[int, list[int]] = {}  # pid → its samples since the processes were listed
        self._lists_none = False  # the last list of processes was empty

    def read(self, nvml: Any, now_s: float, *, watched: bool = False) -> Reading:
        """Read what is due; raise NVML's error if the device is lost, DeviceUnreadable if it gives no value."""
        builder = self._builder
        builder.begin()
        builder.ask(self._hot, nvml, self.handle)
        builder.raise_if_empty()
        cold = now_s >= self._cold_due_s
        if cold or (watched and now_s >= self._warm_due_s):
            self._warm_due_s = now_s + _WARM_S
            builder.ask(self._warm, nvml, self.handle)
            if cold:
                self._cold_due_s = now_s + _COLD_S
                builder.ask(self._cold, nvml, self.handle)
                if self._energy_budget.is_due():
                    with self._energy_budget.timed():
                        builder.ask(self._expensive, nvml, self.handle)
            self._read_activity(nvml, now_s, builder, cold=cold, watched=watched)
        elif self._has_gpm is False and not self._shares.calls:  # there is no better source
            builder.use_utilization()
        return builder.finish()

    def force_full_read(self, now_s: float) -> None:
        """Read all metrics at the next reading, unless the last one did so a moment ago."""
        if now_s > self._warm_due_s - _WARM_S + _SHORTEST_WINDOW_S:
            self._cold_due_s = _NOW
            for budget in (self._energy_budget, self._process_budget, self._gpm_budget):
                budget.force_full_read()

    def forget(self, nvml: Any | None) -> None:
        """Forget the handle of the device, not what it refused; without ``nvml`` there is nothing to free."""
        self.handle = None
        self._cold_due_s = _NOW
        gpm, self._gpm = self._gpm, None
        if gpm is not None and nvml is not None:
            gpm.close()
        self._seen_until_us = self._counted = None
        self._percents = {}

    def _read_activity(self, nvml: Any, now_s: float, builder: ReadingBuilder, *, cold: bool, watched: bool) -> None:
        """Add the activity of the device since the last time."""
        if self._has_gpm is not False and (watched or self._gpm_budget.is_due()):
            with self._gpm_budget.timed():
                self._read_gpm(nvml, builder)
        if self._has_gpm is False and not self.is_slice:
            self._read_pcie(nvml, now_s, builder)
        # Without GPM the shares of the processes are the busy time; with GPM they are skipped if they are expensive.
        with_shares = not self._has_gpm or (cold and self._process_budget.is_due())
        with self._process_budget.timed() if with_shares else nullcontext():
            shares = self._shares_since(nvml) if with_shares else {}
            if cold:
                self._list_processes(nvml, builder)
        if "busy_percent" in builder.values:
            return
        if self._has_gpm and "busy_percent" not in builder.missing:
            return  # the window is not over yet
        if shares:
            builder.add("busy_percent", min(100.0, sum(shares.values())), "processes")
        # In a container the list may be empty because it shows no process of the host: then use the utilization.
        elif self._lists_none and not builder.values.get("utilization_percent"):
            builder.add("busy_percent", 0.0, "processes")
        else:
            builder.use_utilization()

    def _read_gpm(self, nvml: Any, builder: ReadingBuilder) -> None:
        try:
            if self._gpm is None:
                self._gpm = GpmWindows(nvml, self.handle, to_slice=self.is_slice)
                self._has_gpm = True
            self._gpm.next_window(builder)
        except Exception as error:  # broad: the other metrics do not need GPM
            if not (isinstance(error, NoAnswer) or is_refusal(error)):
                builder.add_missing((*_ACTIVITY, *_TRAFFIC), reason_of(error))
                return
            if self._gpm is not None:
                self._gpm.close()
            self._gpm, self._has_gpm = None, False
            builder.add_missing(_ONLY_FROM_GPM, f"no GPM on this device: {reason_of(error)}", permanent=True)

    def _read_pcie(self, nvml: Any, now_s: float, builder: ReadingBuilder) -> None:
        """Add the rates between two readings of the counters."""
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
            builder.add_missing(_PCIE_BYTES, "the byte counter was reset")
            return
        for metric, one in zip(_PCIE_BYTES, moved, strict=True):
            builder.add(metric, round(one / (now_s - before[0])), "counters")

    def _list_processes(self, nvml: Any, builder: ReadingBuilder) -> None:
        percents, self._percents = self._percents, {}
        shares = {pid: sum(values) / len(values) for pid, values in percents.items()}
        self._lists_none = False
        try:
            listed = list(self._compute.ask(nvml, self.handle))
        except NoAnswer as reason:
            builder.add_missing(["processes"], str(reason))
            return
        for question in self._others:
            with suppress(NoAnswer):  # many cards and all slices list only compute processes
                # A process that uses compute and graphics is in both lists, each with all its memory.
                listed = [*question.ask(nvml, self.handle), *listed]
        memory = {one.pid: or_none("memory_used_bytes", one.usedGpuMemory) for one in listed}
        builder.processes = tuple(
            ProcessReading(pid, memory.get(pid), round(shares[pid]) if pid in shares else None)
            for pid in sorted({*memory, *shares})  # a process that has ended still has a share
        )
        self._lists_none = not builder.processes

    def _shares_since(self, nvml: Any) -> dict[int, float]:
        """Return the mean SM utilization of each process since the last call."""
        first = self._seen_until_us is None
        try:
            samples = self._shares.ask(nvml, self.handle)
        except NoAnswer:
            return {}
        self._seen_until_us = max([self._seen_until_us or 0, *(one.timeStamp for one in samples)])
        if first:  # the driver keeps old samples: the first call only finds the last one
            return {}
        by_pid: dict[int, list[int]] = {}
        for one in samples:
            if one.smUtil <= 100:  # some drivers return samples without values
                by_pid.setdefault(one.pid, []).append(one.smUtil)
        for pid, percents in by_pid.items():
            self._percents.setdefault(pid, []).extend(percents)
        return {pid: sum(percents) / len(percents) for pid, percents in by_pid.items()}

    def _samples_of_processes(self, nvml: Any, handle: Any) -> list[Any]:
        try:
            return list(nvml.nvmlDeviceGetProcessUtilization(handle, self._seen_until_us or 0))
        except nvml.NVMLError_NotFound:  # no process ran since then
            return []


def _read_counters(nvml: Any, handle: Any) -> list[int]:
    counts = []
    for field in nvml.nvmlDeviceGetFieldValues(handle, list(_PCIE_BYTES.values())):
        if field.nvmlReturn == nvml.NVML_ERROR_INVALID_ARGUMENT:  # the answer of a driver without this field
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        if field.nvmlReturn:
            raise nvml.NVMLError(field.nvmlReturn)
        counts.append(int(check_number(getattr(field.value, _MEMBER.get(field.valueType, "ullVal")))))
    return counts
