"""What to ask ``amdsmi`` about one device, and how to take its answers.

The package's answers changed with ROCm 5, 6 and 7: keys were renamed, numbers became "N/A" or all ones. So every
question stands alone: one that fails is None with its reason, one that a device does not support is not put again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from badcjobs.gpu.sane import Absurd, check_range, or_none
from badcjobs.model import ProcessReading, Reading
from badcjobs.seams import DeviceUnreadable

_REST_S = 5.0
_NOT_SUPPORTED = (2, 3)  # AMDSMI_STATUS_NOT_SUPPORTED, AMDSMI_STATUS_NOT_YET_IMPLEMENTED
_NOT_AVAILABLE = (0xFFFF, 2**32 - 1, 2**64 - 1)  # how the library writes "no value" into a number
_REAL = ("power_w", "energy_j", "busy_percent")
_NO_MASK = "amdsmi has no mask of reasons like NVML's"


class NoAnswer(Exception):
    """This question has no answer now; the text is the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One call and the metrics it answers."""

    metrics: tuple[str, ...]
    ask: Callable[[Any, Any], Sequence[float | NoAnswer]]  # (amdsmi, handle) → one number for each metric
    rest_s: float = 0  # asked at most this often


@dataclass(slots=True)
class Acquaintance:
    """What a reader has learned about one device."""

    handle: Any
    refused: dict[str, str] = field(default_factory=dict)  # metric → why it is not asked again
    due_s: dict[str, float] = field(default_factory=dict)
    lists_processes: bool = True
    absurd: dict[str, str] = field(default_factory=dict)  # metric → the reason for its first value that could not be


def number_of(answer: Any, *keys: str) -> float:
    """Return the number under the first key that has one; raise NoAnswer with what stands there instead."""
    said = [answer[key] for key in keys if key in answer] if isinstance(answer, Mapping) else [answer]
    for value in said:
        value = getattr(value, "value", value)  # some versions hand out ctypes numbers
        if isinstance(value, int | float) and math.isfinite(value) and value not in _NOT_AVAILABLE:
            return value
    raise NoAnswer(f"amdsmi says {said[0]!r}" if said else f"amdsmi's answer has no {keys[0]!r}")


def reason_of(error: Exception) -> str:
    """Return what an error of amdsmi says, in one line."""
    info = getattr(error, "err_info", None)
    return " ".join(str(info or error).split()) or repr(error)


def temperature_c(smi: Any, handle: Any, metric: str) -> float:
    """Return a temperature of the hottest spot; the edge has a sensor only on older cards."""
    kind, which = smi.AmdSmiTemperatureType, getattr(smi.AmdSmiTemperatureMetric, metric)
    sensor = getattr(kind, "HOTSPOT", None) or kind.JUNCTION
    try:
        value = number_of(smi.amdsmi_get_temp_metric(handle, sensor, which))
    except Exception:  # broad: whatever is wrong with this sensor, there is another one
        value = number_of(smi.amdsmi_get_temp_metric(handle, kind.EDGE, which))
    return value / 1000 if value >= 1000 else value  # ROCm 5 spoke of thousandths


def _activity(smi: Any, handle: Any) -> Sequence[float | NoAnswer]:
    answer = smi.amdsmi_get_gpu_activity(handle)
    busy, memory = _number_or_reason(answer, "gfx_activity"), _number_or_reason(answer, "umc_activity")
    return busy, busy, memory


def _number_or_reason(answer: Any, key: str) -> float | NoAnswer:
    try:
        return number_of(answer, key)
    except NoAnswer as reason:
        return reason


def _clock(smi: Any, handle: Any, name: str) -> Sequence[float]:
    kind = getattr(smi.AmdSmiClkType, name)
    return (number_of(smi.amdsmi_get_clock_info(handle, kind), "clk", "cur_clk"),)


def _power(smi: Any, handle: Any) -> Sequence[float]:
    answer = smi.amdsmi_get_power_info(handle)
    return (number_of(answer, "socket_power", "current_socket_power", "average_socket_power"),)


def _energy(smi: Any, handle: Any) -> Sequence[float]:
    answer = smi.amdsmi_get_energy_count(handle)
    ticks = number_of(answer, "energy_accumulator", "power")
    return (ticks * number_of(answer, "counter_resolution") / 1e6,)  # the resolution is in millionths of a joule


def _fan(smi: Any, handle: Any) -> Sequence[float]:
    full = number_of(smi.amdsmi_get_gpu_fan_speed_max(handle, 0))
    if not full:
        raise NoAnswer("no fan")
    return (100 * number_of(smi.amdsmi_get_gpu_fan_speed(handle, 0)) / full,)


_QUESTIONS = (
    Question(("utilization_percent", "busy_percent", "memory_utilization_percent"), _activity),
    Question(
        ("memory_used_bytes",),
        lambda smi, handle: [number_of(smi.amdsmi_get_gpu_vram_usage(handle), "vram_used") * 2**20],
    ),
    Question(("temperature_c",), lambda smi, handle: [temperature_c(smi, handle, "CURRENT")]),
    Question(("power_w",), _power),
    Question(("energy_j",), _energy, _REST_S),
    Question(("sm_clock_mhz",), lambda smi, handle: _clock(smi, handle, "GFX")),
    Question(("memory_clock_mhz",), lambda smi, handle: _clock(smi, handle, "MEM")),
    Question(("fan_percent",), _fan, _REST_S),
    Question(
        ("ecc_errors",),
        lambda smi, handle: [number_of(smi.amdsmi_get_gpu_total_ecc_count(handle), "uncorrectable_count")],
        _REST_S,
    ),
)


def take_reading(smi: Any, device: Acquaintance, now_s: float) -> Reading:
    """Ask what is due; raise DeviceUnreadable when no question was answered."""
    values: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for question in _QUESTIONS:
        if question.metrics[0] in device.refused or not _is_due(device, question.metrics[0], question.rest_s, now_s):
            continue
        for metric, number in zip(question.metrics, _answers(smi, device, question), strict=True):
            if isinstance(number, NoAnswer):
                missing[metric] = str(number)
                continue
            try:
                values[metric] = (float if metric in _REAL else round)(check_range(metric, number))
            except Absurd as reason:
                missing[metric] = device.absurd.setdefault(metric, str(reason))  # each new text would be a new gap
    missing.update(device.refused)
    if not values:
        raise DeviceUnreadable(f"no metric can be read: {'; '.join(sorted(set(missing.values())))}")
    sources = {"busy_percent": "utilization"} if "busy_percent" in values else {}
    processes = _processes(smi, device, now_s)
    return Reading(**values, missing={**missing, "throttle_reasons": _NO_MASK}, sources=sources, processes=processes)


def _is_due(device: Acquaintance, name: str, rest_s: float, now_s: float) -> bool:
    if now_s < device.due_s.get(name, now_s):
        return False
    device.due_s[name] = now_s + rest_s
    return True


def _answers(smi: Any, device: Acquaintance, question: Question) -> Sequence[float | NoAnswer]:
    try:
        return question.ask(smi, device.handle)
    except NoAnswer as reason:
        return [reason] * len(question.metrics)
    except Exception as error:  # broad: amdsmi has errors of its own, and of Python where versions differ
        words = reason_of(error)
        if isinstance(error, AttributeError) or getattr(error, "err_code", None) in _NOT_SUPPORTED:
            device.refused.update(dict.fromkeys(question.metrics, words))
        return [NoAnswer(words)] * len(question.metrics)


def _processes(smi: Any, device: Acquaintance, now_s: float) -> tuple[ProcessReading, ...] | None:
    if not device.lists_processes or not _is_due(device, "processes", _REST_S, now_s):
        return None
    try:
        listed = smi.amdsmi_get_gpu_process_list(device.handle)
        found = [_process(smi, device.handle, one) for one in listed]
        return tuple(one for one in found if or_none("pid", one.pid) is not None)
    except Exception:  # broad, as above
        device.lists_processes = False  # there is no metric whose gap could hold the reason
        return None


def _process(smi: Any, handle: Any, listed: Any) -> ProcessReading:
    facts = listed if isinstance(listed, Mapping) else smi.amdsmi_get_gpu_process_info(handle, listed)  # before 6.1
    memory = facts.get("memory_usage")
    try:
        used = or_none("memory_used_bytes", int(number_of(memory, "vram_mem") if memory else number_of(facts, "mem")))
    except NoAnswer:
        used = None
    return ProcessReading(int(facts["pid"]), used)
