"""Read AMD GPUs through ``amdsmi``, AMD's own Python package (extra ``amd``; ROCm 6 and later, 5.7 as far as it goes).

First what is asked of a device, then the reader: it starts and ends the library, lists devices and finds them again.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from badcjobs.devices.plausible import Absurd, NoAnswer, check_range, or_none
from badcjobs.model import InventoryDevice, ProcessReading, Reading
from badcjobs.seams import Clock, DeviceUnreadable, ReaderUnavailable

log = logging.getLogger(__name__)

_REST_S = 5.0
_NOT_SUPPORTED = (2, 3)  # AMDSMI_STATUS_NOT_SUPPORTED, AMDSMI_STATUS_NOT_YET_IMPLEMENTED
_NOT_AVAILABLE = (0xFFFF, 2**32 - 1, 2**64 - 1)  # how the library writes "no value" into a number
_REAL = ("power_w", "energy_j", "busy_percent")
_NO_MASK = "amdsmi has no mask of reasons like NVML's"


@dataclass(frozen=True, slots=True, eq=False)
class AmdQuestion:
    """One call and the metrics it answers."""

    metrics: tuple[str, ...]
    ask: Callable[[Any, Any], Sequence[float | NoAnswer]]  # (amdsmi, handle) → one number for each metric
    rest_s: float = 0  # asked at most this often


@dataclass(slots=True)
class AmdDevice:
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
    AmdQuestion(("utilization_percent", "busy_percent", "memory_utilization_percent"), _activity),
    AmdQuestion(
        ("memory_used_bytes",),
        lambda smi, handle: [number_of(smi.amdsmi_get_gpu_vram_usage(handle), "vram_used") * 2**20],
    ),
    AmdQuestion(("temperature_c",), lambda smi, handle: [temperature_c(smi, handle, "CURRENT")]),
    AmdQuestion(("power_w",), _power),
    AmdQuestion(("energy_j",), _energy, _REST_S),
    AmdQuestion(("sm_clock_mhz",), lambda smi, handle: _clock(smi, handle, "GFX")),
    AmdQuestion(("memory_clock_mhz",), lambda smi, handle: _clock(smi, handle, "MEM")),
    AmdQuestion(("fan_percent",), _fan, _REST_S),
    AmdQuestion(
        ("ecc_errors",),
        lambda smi, handle: [number_of(smi.amdsmi_get_gpu_total_ecc_count(handle), "uncorrectable_count")],
        _REST_S,
    ),
)


def take_reading(smi: Any, device: AmdDevice, now_s: float) -> Reading:
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


def _is_due(device: AmdDevice, name: str, rest_s: float, now_s: float) -> bool:
    if now_s < device.due_s.get(name, now_s):
        return False
    device.due_s[name] = now_s + rest_s
    return True


def _answers(smi: Any, device: AmdDevice, question: AmdQuestion) -> Sequence[float | NoAnswer]:
    try:
        return question.ask(smi, device.handle)
    except NoAnswer as reason:
        return [reason] * len(question.metrics)
    except Exception as error:  # broad: amdsmi has errors of its own, and of Python where versions differ
        words = reason_of(error)
        if isinstance(error, AttributeError) or getattr(error, "err_code", None) in _NOT_SUPPORTED:
            device.refused.update(dict.fromkeys(question.metrics, words))
        return [NoAnswer(words)] * len(question.metrics)


def _processes(smi: Any, device: AmdDevice, now_s: float) -> tuple[ProcessReading, ...] | None:
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


# --- the reader ------------------------------------------------------------------------------------------------------

_AMD = "0x1002"  # PCI vendor
_WATTS_END = 10_000  # a power limit above this is in microwatts


class AmdReader:
    """Reads every AMD GPU that this process may see; ``machine`` is where /sys lies."""

    backend = "amd"

    def __init__(self, clock: Clock, *, machine: Path = Path("/"), why: str = "asked for") -> None:
        self.why = why
        self._clock = clock
        self._machine = machine
        self._smi: Any = None
        self._devices: dict[str, AmdDevice] = {}

    def inventory(self) -> Sequence[InventoryDevice]:
        """List the devices by HIP's numbers, or in the library's order where it does not tell them."""
        smi = self._open()
        try:
            handles = list(smi.amdsmi_get_processor_handles())
        except Exception as error:  # broad: errors differ between versions of the package
            raise ReaderUnavailable(f"amdsmi does not list its devices: {reason_of(error)}") from error
        if not handles:
            raise ReaderUnavailable("amdsmi lists no device")
        described = [_describe(smi, handle, position) for position, handle in enumerate(handles)]
        for device, handle in zip(described, handles, strict=True):
            self._devices.setdefault(device.uuid, AmdDevice(handle)).handle = handle
        return sorted(described, key=lambda device: device.index)

    def read(self, uuid: str) -> Reading:
        """Ask the device what is due; energy, fan, errors and processes rest 5 s between two answers."""
        try:
            if uuid not in self._devices:
                self.inventory()
            if uuid not in self._devices:
                raise DeviceUnreadable(f"amdsmi lists no device {uuid!r}")
            return take_reading(self._open(), self._devices[uuid], self._clock.monotonic_s())
        except DeviceUnreadable:
            raise
        except Exception as error:  # broad: the recorder counts on nothing else coming out of here
            raise DeviceUnreadable(reason_of(error)) from error

    def force_full_read(self) -> None:
        """Do nothing: every reading is a whole one."""

    def close(self) -> None:
        smi, self._smi = self._smi, None
        self._devices.clear()
        if smi is None:
            return
        try:
            smi.amdsmi_shut_down()
        except Exception as error:  # broad, as above
            log.debug("amdsmi did not shut down: %s", reason_of(error))

    def _open(self) -> Any:
        """Return the package, with its library started."""
        if self._smi is None:
            self._smi = _start(self._machine)
        return self._smi


def has_amd_gpu(machine: Path) -> bool:
    """Say whether the kernel knows an AMD GPU."""
    for file in machine.glob("sys/class/drm/card*/device/vendor"):
        try:
            if file.read_text(encoding="ascii").strip() == _AMD:
                return True
        except (OSError, ValueError):
            pass  # a card that vanished while we looked
    return False


def _start(machine: Path) -> Any:
    if importlib.util.find_spec("amdsmi") is None:
        raise ReaderUnavailable(
            "there is an AMD GPU, but the Python package amdsmi is not installed (pip install 'badcjobs[amd]')"
            if has_amd_gpu(machine)
            else "no AMD GPU either"
        )
    try:
        smi = importlib.import_module("amdsmi")
        smi.amdsmi_init()
    except Exception as error:  # broad: without ROCm's library even the import fails, in several ways
        raise ReaderUnavailable(f"amdsmi does not start: {reason_of(error)}") from error
    return smi


def _describe(smi: Any, handle: Any, position: int) -> InventoryDevice:
    asic = _or_none(lambda: smi.amdsmi_get_gpu_asic_info(handle)) or {}
    numbers = _or_none(lambda: smi.amdsmi_get_gpu_enumeration_info(handle)) or {}  # since ROCm 6.4
    driver = _or_none(lambda: smi.amdsmi_get_gpu_driver_info(handle)) or {}
    vram_mib = _or_none(lambda: number_of(smi.amdsmi_get_gpu_vram_usage(handle), "vram_total"))
    slowdown = _or_none(lambda: temperature_c(smi, handle, "CRITICAL"))
    hip_id = numbers.get("hip_id")
    return InventoryDevice(
        index=hip_id if isinstance(hip_id, int) and or_none("index", hip_id) is not None else position,
        uuid=_uuid(smi, handle, asic, numbers),
        name=_name(smi, handle, asic),
        backend=AmdReader.backend,
        memory_total_bytes=None if vram_mib is None else or_none("memory_total_bytes", round(vram_mib) * 2**20),
        power_limit_w=_power_limit_w(smi, handle),
        pci_bus_id=_text(_or_none(lambda: smi.amdsmi_get_gpu_device_bdf(handle))),
        driver=_text(driver.get("driver_version")),
        slowdown_c=None if slowdown is None else or_none("slowdown_c", round(slowdown)),
        vendor="amd",
    )


def _uuid(smi: Any, handle: Any, asic: Mapping[str, Any], numbers: Mapping[str, Any]) -> str:
    """Return the name that ROCR_VISIBLE_DEVICES takes (GPU- and the serial), else the library's own UUID."""
    hip = _text(numbers.get("hip_uuid"))
    if hip and hip.startswith("GPU-"):
        return hip
    serial = re.fullmatch(r"(?:0x)?([0-9a-f]{1,16})", str(asic.get("asic_serial", "")).lower())
    if serial and int(serial[1], 16):
        return f"GPU-{serial[1]:0>16}"
    return str(smi.amdsmi_get_gpu_device_uuid(handle))


def _name(smi: Any, handle: Any, asic: Mapping[str, Any]) -> str:
    board = _or_none(lambda: smi.amdsmi_get_gpu_board_info(handle)) or {}
    return _text(asic.get("market_name")) or _text(board.get("product_name")) or "AMD GPU"


def _power_limit_w(smi: Any, handle: Any) -> float | None:
    limit = _or_none(lambda: number_of(smi.amdsmi_get_power_cap_info(handle), "power_cap"))
    return None if not limit else or_none("power_limit_w", float(limit / 1e6 if limit > _WATTS_END else limit))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value not in ("", "N/A") else None


def _or_none(call: Callable[[], Any]) -> Any:
    """Return the answer, or None where there is none."""
    try:
        return call()
    except Exception as error:  # broad: a device is listed even if it does not say everything
        log.debug("amdsmi does not say: %s", reason_of(error))
        return None
