"""Read one device through NVML: which metrics, how often, and which source shows how busy it was.

Cards, drivers, versions of the binding and MIG modes differ in the calls that they support. A refused call is never
tried again; any other failure applies to this reading only; the error of a lost device is raised.

Hot questions are asked at each reading and cost about 20 µs; warm ones every 5 s, or every 2 s while they are watched;
cold ones, among them the processes and the energy counter (4 ms on an H200), every 20 s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from math import inf, isfinite
from typing import Any

from badcjobs.devices.reading_builder import Call, NoAnswer, Question, ReadingBuilder, or_none, reason_of
from badcjobs.model import ProcessReading, Reading

_INVALID_ARGUMENT = 2
_GPU_IS_LOST = 15
# Not Supported, Insufficient Permissions, Function Not Found; a version of a call that the driver does not have yet, or
# no longer has.
_PERMANENT = frozenset((3, 4, 13, 25, 26))


def is_refusal(error: Exception, *, by_slice: bool = False) -> bool:
    """Return whether the device gives this error permanently; raise the error of a device that is lost."""
    code = getattr(error, "value", None)  # of NVML
    if code == _GPU_IS_LOST:
        raise error
    # AttributeError: this version of the binding does not have the call. A slice answers "invalid argument" to calls
    # that only a whole card has.
    return code in _PERMANENT or isinstance(error, AttributeError) or (by_slice and code == _INVALID_ARGUMENT)


# --- the questions ---------------------------------------------------------------------------------------------------

_WATCHED_S = 1.9  # every 2 s, with some tolerance for an early tick
_WARM_S = 4.9
_COLD_S = 19.9
_SHORTEST_WINDOW_S = 0.2  # GPM needs its samples at least 0.1 s apart

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
_HOT = (
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
    (("power_w",), lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
    (("sm_clock_mhz",), _call("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM")),
    (("memory_clock_mhz",), _call("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM")),
    (
        ("throttle_reasons",),
        _call("nvmlDeviceGetCurrentClocksEventReasons"),
        _call("nvmlDeviceGetCurrentClocksThrottleReasons"),  # drivers before 535
    ),
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
    (("energy_j",), lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000),
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
_NO_COUNT = 2**64 - 1


class GpmWindows:
    """The GPM windows of one card or slice; raises NoAnswer if the device does not support GPM."""

    def __init__(self, nvml: Any, handle: Any, *, to_slice: bool) -> None:
        self._nvml = nvml
        self._card = handle
        self._gpu_instance = None
        names = _ACTIVITY | _TRAFFIC
        if to_slice:
            self._card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            self._gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(handle)
            names = _ACTIVITY

        if not nvml.nvmlGpmQueryDeviceSupport(self._card).isSupportedDevice:
            raise NoAnswer("not supported by the driver")
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
            self._request.sample1 = begin
            self._request.sample2 = end
            self._nvml.nvmlGpmMetricsGet(self._request)
            for metric, answer in zip(self._metrics, self._request.metrics, strict=False):
                self._add_answer(metric, answer, builder)
        self._samples = [end, begin]
        self._has_begun = True

    def _add_answer(self, metric: str, answer: Any, builder: ReadingBuilder) -> None:
        value = answer.value
        if answer.nvmlReturn:
            builder.add_missing([metric], str(self._nvml.NVMLError(answer.nvmlReturn)))
            return
        if not isfinite(value):
            builder.add_missing([metric], "Not Available")
            return
        if metric in _TRAFFIC:
            value = round(value * 2**20)
        elif value <= 100 + _OVERSHOOT_PERCENT:
            value = min(100.0, value)
        builder.add(metric, value, "gpm")

    def close(self) -> None:
        """Free the samples."""
        while self._samples:
            with suppress(Exception):  # broad: a sample that is not freed does no harm
                self._nvml.nvmlGpmSampleFree(self._samples.pop())


class PcieCounters:
    """Turns the counters of the bytes that crossed a card's PCIe bus into rates."""

    def __init__(self) -> None:
        self._question = Question(tuple(_PCIE_BYTES), _read_counters, is_refusal=is_refusal)
        self._earlier: tuple[float, list[int]] | None = None  # time, and the counters at that time

    def add_rates(self, nvml: Any, handle: Any, now_s: float, builder: ReadingBuilder) -> None:
        """Add the rates between two readings of the counters."""
        if not self._question.calls:
            return
        try:
            counts = self._question.ask(nvml, handle)
        except NoAnswer as reason:
            builder.add_missing(_PCIE_BYTES, str(reason), permanent=not self._question.calls)
            return
        earlier = self._earlier
        self._earlier = (now_s, counts)
        if earlier is None or now_s <= earlier[0]:
            return
        earlier_s, earlier_counts = earlier
        for metric, count, before in zip(_PCIE_BYTES, counts, earlier_counts, strict=True):
            builder.add(metric, round((count - before) / (now_s - earlier_s)), "counters")

    def reset(self) -> None:
        """Begin again: the next counters are the first."""
        self._earlier = None


def _read_counters(nvml: Any, handle: Any) -> list[int]:
    counts = []
    for field in nvml.nvmlDeviceGetFieldValues(handle, list(_PCIE_BYTES.values())):
        if field.nvmlReturn == nvml.NVML_ERROR_INVALID_ARGUMENT:  # the answer of a driver without this field
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        if field.nvmlReturn:
            raise nvml.NVMLError(field.nvmlReturn)
        if field.value.ullVal == _NO_COUNT:
            raise NoAnswer("Not Available")
        counts.append(field.value.ullVal)
    return counts


_PROCESS_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",  # an MPS server is a compute process, with its clients
)


class DeviceProcesses:
    """Lists the processes of a device, and how long each of them kept it busy."""

    def __init__(self, refusal: Callable[[Exception], bool]) -> None:
        self.list_is_empty = False
        self._compute, *self._more = (
            Question((), *(_call(f"{name}_{version}") for version in ("v3", "v2")), is_refusal=refusal)
            for name in _PROCESS_LISTS
        )
        self.samples = Question((), self._new_samples, is_refusal=refusal)
        self._sampled_until_us: int | None = None  # the newest sample, by the driver's clock; None: not read yet
        self._since_list: defaultdict[int, list[int]] = defaultdict(list)  # pid → SM utilization in each sample

    def shares_since(self, nvml: Any, handle: Any) -> dict[int, float]:
        """Return the mean SM utilization of each process since the last call."""
        is_first = self._sampled_until_us is None
        try:
            samples = self.samples.ask(nvml, handle)
        except NoAnswer:
            return {}
        self._sampled_until_us = max([self._sampled_until_us or 0, *(sample.timeStamp for sample in samples)])
        if is_first:  # the driver keeps old samples: the first call only finds the last one
            return {}
        since_last: defaultdict[int, list[int]] = defaultdict(list)
        for sample in samples:
            if sample.smUtil <= 100:  # some drivers return samples without values
                since_last[sample.pid].append(sample.smUtil)
                self._since_list[sample.pid].append(sample.smUtil)
        return _means(since_last)

    def add_list(self, nvml: Any, handle: Any, builder: ReadingBuilder) -> None:
        """Add the processes to the reading, with their shares since the last list."""
        shares = _means(self._since_list)
        self._since_list.clear()
        self.list_is_empty = False
        try:
            processes = list(self._compute.ask(nvml, handle))
        except NoAnswer as reason:
            builder.add_missing(["processes"], str(reason))
            return
        for question in self._more:
            with suppress(NoAnswer):  # many cards and all slices list only compute processes
                # A process that uses compute and graphics is in both lists, each with all its memory.
                processes = [*question.ask(nvml, handle), *processes]
        memory = {process.pid: or_none("memory_used_bytes", process.usedGpuMemory) for process in processes}
        builder.processes = tuple(
            ProcessReading(pid, memory.get(pid), round(shares[pid]) if pid in shares else None)
            for pid in sorted({*memory, *shares})  # a process that has ended still has a share
        )
        self.list_is_empty = not builder.processes

    def reset(self) -> None:
        """Begin again: the next samples are the first."""
        self._sampled_until_us = None
        self._since_list.clear()

    def _new_samples(self, nvml: Any, handle: Any) -> list[Any]:
        try:
            return list(nvml.nvmlDeviceGetProcessUtilization(handle, self._sampled_until_us or 0))
        except nvml.NVMLError_NotFound:  # no process ran since then
            return []


def _means(samples: Mapping[int, list[int]]) -> dict[int, float]:
    return {pid: sum(percents) / len(percents) for pid, percents in samples.items()}


class NvmlDevice:
    """Reads one device; remembers what it refuses.

    The busy time comes from GPM if the device has it, else from the processes, else from the utilization. The
    utilization comes last because it misses light load (0 at a true 5 %).
    """

    def __init__(self, uuid: str) -> None:
        self.is_slice = uuid.startswith("MIG-")
        self.handle: Any = None  # None: not looked up yet, or lost
        refused = {}
        if self.is_slice:
            refused = dict.fromkeys(_BOARD_WIDE, "board-wide under MIG")
        self._builder = ReadingBuilder(refused)

        refusal = partial(is_refusal, by_slice=self.is_slice)
        self._hot, self._warm, self._cold = (
            [Question(*question, is_refusal=refusal) for question in questions if question[0][0] not in refused]
            for questions in (_HOT, _WARM, _COLD)
        )
        self._counters = PcieCounters()
        self._processes = DeviceProcesses(refusal)
        self._gpm: GpmWindows | None = None
        self._has_gpm: bool | None = None  # None: not known yet
        self._warm_at_s = self._cold_at_s = -inf  # of the last answers

    def read(self, nvml: Any, now_s: float, *, watched: bool) -> Reading:
        """Read what is due; raise NVML's error if the device is lost, DeviceUnreadable if it gives no value."""
        builder = self._builder
        builder.begin()
        builder.ask(self._hot, nvml, self.handle)
        builder.raise_if_empty()
        if now_s - self._warm_at_s < (_WATCHED_S if watched else _WARM_S):
            if self._has_gpm is False and not self._processes.samples.calls:  # there is no better source
                builder.use_utilization()
            return builder.finish()

        self._warm_at_s = now_s
        builder.ask(self._warm, nvml, self.handle)
        if self._has_gpm is not False:
            self._read_gpm(nvml, builder)
        if self._has_gpm is False and not self.is_slice:
            self._counters.add_rates(nvml, self.handle, now_s, builder)
        is_cold_due = now_s - self._cold_at_s >= _COLD_S
        # The first GPM window may have only begun.
        gives_busy_time = self._has_gpm and "busy_percent" not in builder.missing
        shares = {}
        if is_cold_due or not gives_busy_time:
            shares = self._processes.shares_since(nvml, self.handle)
        if is_cold_due:
            self._cold_at_s = now_s
            builder.ask(self._cold, nvml, self.handle)
            self._processes.add_list(nvml, self.handle, builder)
        if not gives_busy_time:
            self._add_busy_time(shares, builder)
        return builder.finish()

    def force_full_read(self, now_s: float) -> None:
        """Read all metrics at the next reading, unless the last one did so a moment ago."""
        if now_s > self._warm_at_s + _SHORTEST_WINDOW_S:
            self._warm_at_s = self._cold_at_s = -inf

    def forget(self, nvml: Any) -> None:
        """Forget the handle of the device, not what it refused."""
        self.handle = None
        self._warm_at_s = self._cold_at_s = -inf
        if self._gpm is not None:
            self._gpm.close()
        self._gpm = None
        self._counters.reset()
        self._processes.reset()

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
            self._gpm = None
            self._has_gpm = False
            builder.add_missing(_ONLY_FROM_GPM, f"no GPM on this device: {reason_of(error)}", permanent=True)

    def _add_busy_time(self, shares: Mapping[int, float], builder: ReadingBuilder) -> None:
        """Add the busy time that GPM does not give."""
        if shares:
            builder.add("busy_percent", min(100.0, sum(shares.values())), "processes")
        # In a container the list may be empty because it shows no process of the host: then use the utilization.
        elif self._processes.list_is_empty and not builder.values.get("utilization_percent"):
            builder.add("busy_percent", 0.0, "processes")
        else:
            builder.use_utilization()
