"""What NVML is asked about one device, one call per question, in tiers.

The hot tier is asked at every reading and costs some 20 µs; the warm one is for calls that take longer or change
slowly; an expensive one is rate-limited (``CallBudget``). Which tier is due is decided in ``nvml.NvmlDevice``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from badcjobs.devices.nvml_answers import Line, ReadingBuilder, Way, check
from badcjobs.devices.plausible import LIMITS, NoAnswer
from badcjobs.model import METRICS

Writer = Callable[[ReadingBuilder, Any], None]

# What only the whole card has: a slice that showed it would count it as its own.
BOARD_WIDE = (
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


@dataclass(frozen=True, slots=True, eq=False)
class NvmlQuestion:
    """One call to NVML and the metrics it answers."""

    metrics: tuple[str, ...]
    ways: tuple[Way, ...]  # the first one that this device, driver and binding know is used
    divisor: int | None = None


def _utilization(nvml: Any, handle: Any) -> tuple[int, int]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


HOT = (
    NvmlQuestion(("utilization_percent", "memory_utilization_percent"), (_utilization,)),
    NvmlQuestion(
        ("memory_used_bytes",),
        (
            lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used,
            # Drivers before 510; this one calls used what the driver keeps for itself.
            lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        ),
    ),
    NvmlQuestion(
        ("temperature_c",),
        (
            lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            # The binding says that CUDA 14 drops the call above; older drivers and bindings lack this one.
            lambda nvml, handle: nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU),
        ),
    ),
    NvmlQuestion(("power_w",), (lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle),), divisor=1000),
    NvmlQuestion(("sm_clock_mhz",), (lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),)),
    NvmlQuestion(
        ("memory_clock_mhz",), (lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),)
    ),
    NvmlQuestion(
        ("throttle_reasons",),
        (
            lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),  # drivers before 535
        ),
    ),
)

EXPENSIVE = (  # 4 ms of the processor on an H200, a hundred times all of the hot tier
    NvmlQuestion(("energy_j",), (lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle),), divisor=1000),
)
WARM = (
    NvmlQuestion(("fan_percent",), (lambda nvml, handle: nvml.nvmlDeviceGetFanSpeed(handle),)),
    NvmlQuestion(("encoder_percent",), (lambda nvml, handle: nvml.nvmlDeviceGetEncoderUtilization(handle)[0],)),
    NvmlQuestion(("decoder_percent",), (lambda nvml, handle: nvml.nvmlDeviceGetDecoderUtilization(handle)[0],)),
    NvmlQuestion(
        ("ecc_errors",),
        (
            lambda nvml, handle: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        ),
    ),
)


class Tier:
    """Questions that are put to a device together."""

    def __init__(self, questions: Iterable[NvmlQuestion], refused: Mapping[str, str], *, to_slice: bool) -> None:
        self._asked = tuple(
            (Line(*question.ways, to_slice=to_slice), _writer(question), question.metrics)
            for question in questions
            if question.metrics[0] not in refused
        )

    def ask(self, nvml: Any, handle: Any, builder: ReadingBuilder) -> None:
        """Write down what the device answers; what it refuses is not asked again."""
        for line, write, metrics in self._asked:
            try:
                write(builder, line.ask(nvml, handle))
            except NoAnswer as reason:
                builder.miss(metrics, str(reason), for_good=line.refused)
                if line.refused:
                    self._asked = tuple(one for one in self._asked if one[0] is not line)


def _writer(question: NvmlQuestion) -> Writer:
    """Return what writes the answers to this question into a builder."""
    if len(question.metrics) == 1:
        return _single_writer(question.metrics[0], question.divisor)
    write_first, write_second = (_single_writer(metric, None) for metric in question.metrics)

    def write_pair(builder: ReadingBuilder, numbers: tuple[int, int]) -> None:
        check(numbers[1])  # before the first is written: without one of them there is neither
        write_first(builder, numbers[0])
        write_second(builder, numbers[1])

    return write_pair


def _single_writer(metric: str, divisor: int | None) -> Writer:
    place = METRICS.index(metric)
    low, high = LIMITS[metric]

    def write(builder: ReadingBuilder, number: int) -> None:
        value = check(number) if divisor is None else check(number) / divisor
        if low <= value <= high:
            builder.row[place] = value
        else:
            builder.doubt(metric, value)

    return write


# --- PCIe counters ---------------------------------------------------------------------------------------------------

PCIE_METRICS = ("pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s")

# Drivers know these fields since 550, the binding has names for them since 12.545.
_RX_BYTES, _TX_BYTES = 198, 197
_MEMBER = {1: "uiVal", 2: "ulVal", 3: "ullVal"}  # by NVML_VALUE_TYPE_


class PcieCounters:
    """The rates between two readings of one device's counters."""

    def __init__(self) -> None:
        self._line = Line(_read_counters)
        self._before: tuple[float, tuple[int, ...]] | None = None

    @property
    def refused(self) -> bool:
        return self._line.refused

    def rates(self, nvml: Any, handle: Any, now_s: float) -> dict[str, int]:
        """Return metric → bytes per second since the last call; nothing at the first."""
        counts = self._line.ask(nvml, handle)
        before, self._before = self._before, (now_s, counts)
        if before is None or now_s <= before[0]:
            return {}
        moved = [new - old for new, old in zip(counts, before[1], strict=True)]
        if min(moved) < 0:  # NVML's manual: the value can wrap
            raise NoAnswer("the byte counter began anew")
        return {metric: round(one / (now_s - before[0])) for metric, one in zip(PCIE_METRICS, moved, strict=True)}

    def forget(self) -> None:
        """Begin anew, as with a device that was lost."""
        self._before = None


def _read_counters(nvml: Any, handle: Any) -> tuple[int, ...]:
    return tuple(_count(nvml, value) for value in nvml.nvmlDeviceGetFieldValues(handle, [_RX_BYTES, _TX_BYTES]))


def _count(nvml: Any, field: Any) -> int:
    if field.nvmlReturn == nvml.NVML_ERROR_INVALID_ARGUMENT:  # so says a driver of a field that it does not know
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    if field.nvmlReturn:
        raise nvml.NVMLError(field.nvmlReturn)
    return int(check(getattr(field.value, _MEMBER.get(field.valueType, "ullVal"))))
