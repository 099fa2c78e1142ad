"""What to ask NVML about one device, and how to take its answers.

Cards, drivers and MIG modes differ in what they answer, so every question stands alone: one that fails is None with
its reason, one that a device does not support is never put to it again. Starting NVML is left to ``nvml.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from badcjobs.model import Reading
from badcjobs.seams import DeviceUnreadable

Ask = Callable[[Any, Any], Sequence[int]]  # (pynvml, handle) → one number for each metric of the question


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One call to NVML and the metrics it answers."""

    metrics: tuple[str, ...]
    ways: tuple[Ask, ...]  # the first one that this device, driver and binding know is used
    divisor: int = 1
    rest_s: float = 0  # asked at most this often


def _utilization(nvml: Any, handle: Any) -> Sequence[int]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


_QUESTIONS = (
    Question(("utilization_percent", "memory_utilization_percent"), (_utilization,)),
    Question(
        ("memory_used_bytes",),
        (
            lambda nvml, handle: [nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used],
            # Drivers before 510; this one calls used what the driver keeps for itself.
            lambda nvml, handle: [nvml.nvmlDeviceGetMemoryInfo(handle).used],
        ),
    ),
    Question(
        ("temperature_c",),
        (
            lambda nvml, handle: [nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)],
            # The binding says that CUDA 14 drops the call above; older drivers and bindings lack this one.
            lambda nvml, handle: [nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU)],
        ),
    ),
    Question(("power_w",), (lambda nvml, handle: [nvml.nvmlDeviceGetPowerUsage(handle)],), divisor=1000),
    Question(
        ("energy_j",),
        (lambda nvml, handle: [nvml.nvmlDeviceGetTotalEnergyConsumption(handle)],),
        divisor=1000,
        rest_s=5,  # 3 ms a call, more than ten times all the others together
    ),
    Question(("sm_clock_mhz",), (lambda nvml, handle: [nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)],)),
    Question(("memory_clock_mhz",), (lambda nvml, handle: [nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)],)),
    Question(
        ("throttle_reasons",),
        (
            lambda nvml, handle: [nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)],
            lambda nvml, handle: [nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)],  # drivers before 535
        ),
    ),
)

_NOT_AVAILABLE = (2**32 - 1, 2**64 - 1)  # how NVML writes "no value" into a number


class _NoAnswer(Exception):
    """This question has no answer now; the text is the reason."""


@dataclass(slots=True)
class Acquaintance:
    """What a reader has learned about one device."""

    handle: Any = None  # None: not looked up, or lost
    ways: dict[Question, tuple[Ask, ...]] = field(default_factory=dict)  # those not refused so far
    refused: dict[str, str] = field(default_factory=dict)  # metric → why it is not asked again
    due_s: dict[Question, float] = field(default_factory=dict)


def take_reading(nvml: Any, device: Acquaintance, now_s: float) -> Reading:
    """Ask what is due; raise GpuIsLost as NVML does, and DeviceUnreadable when no question was answered."""
    values: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for question in _QUESTIONS:
        if question.metrics[0] in device.refused or now_s < device.due_s.get(question, now_s):
            continue
        device.due_s[question] = now_s + question.rest_s
        try:
            values.update(zip(question.metrics, _answer(nvml, device, question), strict=True))
        except _NoAnswer as reason:
            missing.update(dict.fromkeys(question.metrics, str(reason)))
    missing.update(device.refused)
    if not values:
        raise DeviceUnreadable(f"no metric can be read: {'; '.join(sorted(set(missing.values())))}")
    return Reading(**values, missing=missing)


def _answer(nvml: Any, device: Acquaintance, question: Question) -> list[float]:
    try:
        numbers = _ask(nvml, device, question)
    except nvml.NVMLError_GpuIsLost:
        raise
    except nvml.NVMLError as error:
        raise _NoAnswer(str(error)) from error
    if any(number in _NOT_AVAILABLE for number in numbers):
        raise _NoAnswer("Not Available")
    return [number if question.divisor == 1 else number / question.divisor for number in numbers]


def _ask(nvml: Any, device: Acquaintance, question: Question) -> Sequence[int]:
    """Put the question in the first way not refused; remember every refusal for good."""
    # AttributeError: this version of the binding does not have the call at all.
    refusals = (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, AttributeError)
    reason = ""
    for way in device.ways.setdefault(question, question.ways):
        try:
            return way(nvml, device.handle)
        except refusals as error:
            reason = reason or str(error)
            device.ways[question] = device.ways[question][1:]
    device.refused.update(dict.fromkeys(question.metrics, reason))
    raise _NoAnswer(reason)
