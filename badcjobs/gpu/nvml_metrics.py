"""What NVML is asked about one device, one call per question, in tiers.

The hot tier is asked at every reading and costs some 20 µs; the warm one is for calls that take longer or change
slowly; a dear one is spared where it takes long (``nvml_thrift.py``). Windows, processes and counters have files of
their own; which tier is due is decided in ``nvml_device.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from badcjobs.gpu.nvml_answers import Line, NoAnswer, Way, check
from badcjobs.gpu.nvml_draft import Draft
from badcjobs.gpu.sane import LIMITS
from badcjobs.model import METRICS

Writer = Callable[[Draft, Any], None]

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
class Question:
    """One call to NVML and the metrics it answers."""

    metrics: tuple[str, ...]
    ways: tuple[Way, ...]  # the first one that this device, driver and binding know is used
    divisor: int | None = None


def _utilization(nvml: Any, handle: Any) -> tuple[int, int]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


HOT = (
    Question(("utilization_percent", "memory_utilization_percent"), (_utilization,)),
    Question(
        ("memory_used_bytes",),
        (
            lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used,
            # Drivers before 510; this one calls used what the driver keeps for itself.
            lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        ),
    ),
    Question(
        ("temperature_c",),
        (
            lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            # The binding says that CUDA 14 drops the call above; older drivers and bindings lack this one.
            lambda nvml, handle: nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU),
        ),
    ),
    Question(("power_w",), (lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle),), divisor=1000),
    Question(("sm_clock_mhz",), (lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),)),
    Question(("memory_clock_mhz",), (lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),)),
    Question(
        ("throttle_reasons",),
        (
            lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),  # drivers before 535
        ),
    ),
)

DEAR = (  # 4 ms of the processor on an H200, a hundred times all of the hot tier
    Question(("energy_j",), (lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle),), divisor=1000),
)
WARM = (
    Question(("fan_percent",), (lambda nvml, handle: nvml.nvmlDeviceGetFanSpeed(handle),)),
    Question(("encoder_percent",), (lambda nvml, handle: nvml.nvmlDeviceGetEncoderUtilization(handle)[0],)),
    Question(("decoder_percent",), (lambda nvml, handle: nvml.nvmlDeviceGetDecoderUtilization(handle)[0],)),
    Question(
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

    def __init__(self, questions: Iterable[Question], refused: Mapping[str, str], *, to_slice: bool) -> None:
        self._asked = tuple(
            (Line(*question.ways, to_slice=to_slice), _writer(question), question.metrics)
            for question in questions
            if question.metrics[0] not in refused
        )

    def ask(self, nvml: Any, handle: Any, draft: Draft) -> None:
        """Write down what the device answers; what it refuses is not asked again."""
        for line, write, metrics in self._asked:
            try:
                write(draft, line.ask(nvml, handle))
            except NoAnswer as reason:
                draft.miss(metrics, str(reason), for_good=line.refused)
                if line.refused:
                    self._asked = tuple(one for one in self._asked if one[0] is not line)


def _writer(question: Question) -> Writer:
    """Return what writes the answers to this question into a draft."""
    if len(question.metrics) == 1:
        return _single_writer(question.metrics[0], question.divisor)
    write_first, write_second = (_single_writer(metric, None) for metric in question.metrics)

    def write_pair(draft: Draft, numbers: tuple[int, int]) -> None:
        check(numbers[1])  # before the first is written: without one of them there is neither
        write_first(draft, numbers[0])
        write_second(draft, numbers[1])

    return write_pair


def _single_writer(metric: str, divisor: int | None) -> Writer:
    place = METRICS.index(metric)
    low, high = LIMITS[metric]

    def write(draft: Draft, number: int) -> None:
        value = check(number) if divisor is None else check(number) / divisor
        if low <= value <= high:
            draft.row[place] = value
        else:
            draft.doubt(metric, value)

    return write
