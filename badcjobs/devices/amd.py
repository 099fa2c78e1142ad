"""Read AMD GPUs through ``amdsmi``, AMD's Python package (extra ``amd``; ROCm 6 and later)."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from badcjobs.devices.reading_builder import (
    Call,
    NoAnswer,
    Question,
    ReadingBuilder,
    look_up,
    or_none,
    reason_of,
    try_call,
)
from badcjobs.devices.sysfs import has_card
from badcjobs.model import InventoryDevice, ProcessReading, Reading
from badcjobs.seams import Clock, DeviceUnreadable, GpuReader, ReaderUnavailable

_COLD_S = 5.0
_NOT_SUPPORTED = (2, 3)  # AMDSMI_STATUS_NOT_SUPPORTED, AMDSMI_STATUS_NOT_YET_IMPLEMENTED
_NOT_AVAILABLE = (0xFFFF, 2**32 - 1, 2**64 - 1)  # the library's numbers for "no value"
_AMD = "0x1002"  # PCI vendor id
_MOST_WATTS = 10_000  # a power limit above this is in microwatts


def number_of(answer: Any, *keys: str) -> float:
    """Return the number under the first key that has one; raise NoAnswer with the value that it has instead."""
    candidates = [answer]
    if isinstance(answer, Mapping):
        candidates = [answer[key] for key in keys if key in answer]
    if not candidates:
        raise NoAnswer(f"amdsmi's answer has no {keys[0]!r}")
    for value in candidates:
        if isinstance(value, int | float) and math.isfinite(value) and value not in _NOT_AVAILABLE:
            return value
    raise NoAnswer(f"amdsmi returns {candidates[0]!r}")


def temperature_c(smi: Any, handle: Any, metric: str) -> int:
    """Return a temperature of the hot spot, else of the edge, which only older cards have."""
    sensors = smi.AmdSmiTemperatureType
    metric_code = getattr(smi.AmdSmiTemperatureMetric, metric)
    try:
        return round(number_of(smi.amdsmi_get_temp_metric(handle, sensors.HOTSPOT, metric_code)))
    except Exception:  # broad: for any error of this sensor, try the other one
        return round(number_of(smi.amdsmi_get_temp_metric(handle, sensors.EDGE, metric_code)))


def _energy_j(smi: Any, handle: Any) -> float:
    answer = smi.amdsmi_get_energy_count(handle)
    ticks = number_of(answer, "energy_accumulator")
    return ticks * number_of(answer, "counter_resolution") / 1e6  # the resolution is in microjoules


def _fan_percent(smi: Any, handle: Any) -> int:
    highest = number_of(smi.amdsmi_get_gpu_fan_speed_max(handle, 0))
    if not highest:
        raise NoAnswer("no fan")
    return round(100 * number_of(smi.amdsmi_get_gpu_fan_speed(handle, 0)) / highest)


def _clock_mhz(smi: Any, handle: Any, name: str) -> int:
    kind = getattr(smi.AmdSmiClkType, name)
    return round(number_of(smi.amdsmi_get_clock_info(handle, kind), "clk"))


def _number(function: str, *keys: str, unit: float = 1) -> Call:
    """Return a call that reads one number, in multiples of ``unit``; it is rounded if the unit is an int."""

    def call(smi: Any, handle: Any) -> float:
        number = number_of(getattr(smi, function)(handle), *keys) * unit
        if isinstance(unit, int):
            return round(number)
        return number

    return call


_POWER_KEYS = ("socket_power", "current_socket_power", "average_socket_power")
# Metric, and the call that returns it.
_HOT = (
    ("utilization_percent", _number("amdsmi_get_gpu_activity", "gfx_activity")),
    ("memory_utilization_percent", _number("amdsmi_get_gpu_activity", "umc_activity")),
    ("memory_used_bytes", _number("amdsmi_get_gpu_vram_usage", "vram_used", unit=2**20)),
    ("temperature_c", partial(temperature_c, metric="CURRENT")),
    ("power_w", _number("amdsmi_get_power_info", *_POWER_KEYS, unit=1.0)),
    ("sm_clock_mhz", partial(_clock_mhz, name="GFX")),
    ("memory_clock_mhz", partial(_clock_mhz, name="MEM")),
)
_COLD = (
    ("energy_j", _energy_j),
    ("fan_percent", _fan_percent),
    ("ecc_errors", _number("amdsmi_get_gpu_total_ecc_count", "uncorrectable_count")),
)


def _is_refusal(error: Exception) -> bool:
    # AttributeError: this version of the package does not have the call.
    return isinstance(error, AttributeError) or getattr(error, "err_code", None) in _NOT_SUPPORTED


class AmdDevice:
    """Reads one device; remembers which calls it does not support."""

    def __init__(self) -> None:
        self.handle: Any = None
        self._builder = ReadingBuilder({})
        self._hot, self._cold = (
            [Question((metric,), call, is_refusal=_is_refusal) for metric, call in calls] for calls in (_HOT, _COLD)
        )
        self._cold_due_s = -math.inf

    def read(self, smi: Any, now_s: float) -> Reading:
        """Read the metrics that are due; raise DeviceUnreadable if no metric can be read."""
        builder = self._builder
        builder.begin()
        builder.ask(self._hot, smi, self.handle)
        builder.raise_if_empty()
        builder.use_utilization()
        builder.add_missing(["throttle_reasons"], "amdsmi does not report throttle reasons as NVML does")
        if now_s >= self._cold_due_s:
            self._cold_due_s = now_s + _COLD_S
            builder.ask(self._cold, smi, self.handle)
            builder.processes = try_call(_list_processes, smi, self.handle)
        return builder.finish()


def _list_processes(smi: Any, handle: Any) -> tuple[ProcessReading, ...]:
    processes = []
    for facts in smi.amdsmi_get_gpu_process_list(handle):
        used_bytes = try_call(number_of, facts.get("memory_usage") or facts, "vram_mem", "mem")
        processes.append(ProcessReading(int(facts["pid"]), or_none("memory_used_bytes", used_bytes)))
    return tuple(processes)


# --- the reader ------------------------------------------------------------------------------------------------------


class AmdReader(GpuReader):
    """Reads every AMD GPU that this process may see; ``sysfs`` is the folder /sys."""

    backend = "amd"

    why = "requested"

    def __init__(self, clock: Clock, sysfs: Path = Path("/sys")) -> None:
        self._clock = clock
        self._sysfs = sysfs
        self._smi: Any = None
        self._devices: dict[str, AmdDevice] = {}

    def inventory(self) -> Sequence[InventoryDevice]:
        """List the devices by HIP's numbers, or in the library's order if it does not have these numbers."""
        smi = self._open()
        try:
            handles = list(smi.amdsmi_get_processor_handles())
        except Exception as error:  # broad: errors differ between versions of the package
            raise ReaderUnavailable(f"amdsmi cannot list the devices: {reason_of(error)}") from error
        if not handles:
            raise ReaderUnavailable("amdsmi lists no device")
        described = [_describe(smi, handle, position) for position, handle in enumerate(handles)]
        for device, handle in zip(described, handles, strict=True):
            self._devices.setdefault(device.uuid, AmdDevice()).handle = handle
        return sorted(described, key=lambda device: device.index)

    def read(self, uuid: str) -> Reading:
        """Read the metrics that are due; fan, energy, errors and processes every 5 s."""
        try:
            device = look_up(uuid, self._devices, self)
            return device.read(self._open(), self._clock.monotonic_s())
        except DeviceUnreadable:
            raise
        except Exception as error:  # broad: the recorder expects no other exception
            raise DeviceUnreadable(reason_of(error)) from error

    def close(self) -> None:
        self._devices.clear()
        if self._smi is not None:
            try_call(self._smi.amdsmi_shut_down)
        self._smi = None

    def _open(self) -> Any:
        """Import the package, start its library, and return it."""
        if self._smi is not None:
            return self._smi
        if importlib.util.find_spec("amdsmi") is None:
            if not has_card(self._sysfs, _AMD):
                raise ReaderUnavailable("no AMD GPU")
            raise ReaderUnavailable(
                "there is an AMD GPU, but the Python package amdsmi is not installed (pip install 'badcjobs[amd]')"
            )
        try:
            smi = importlib.import_module("amdsmi")
            smi.amdsmi_init()
        except Exception as error:  # broad: without ROCm's library the import fails with various errors
            raise ReaderUnavailable(f"amdsmi does not start: {reason_of(error)}") from error
        self._smi = smi
        return smi


def _describe(smi: Any, handle: Any, position: int) -> InventoryDevice:
    def facts(kind: str) -> Mapping[str, Any]:
        return try_call(lambda: getattr(smi, f"amdsmi_get_gpu_{kind}_info")(handle)) or {}

    asic = facts("asic")
    numbers = facts("enumeration")  # since ROCm 6.4
    limit_w = try_call(_number("amdsmi_get_power_cap_info", "power_cap", unit=1.0), smi, handle)
    if limit_w and limit_w > _MOST_WATTS:
        limit_w /= 1e6
    vram_bytes = try_call(_number("amdsmi_get_gpu_vram_usage", "vram_total", unit=2**20), smi, handle)
    index: Any = numbers.get("hip_id")
    if index not in range(2**16):
        index = position
    return InventoryDevice(
        index=index,
        uuid=_uuid(smi, handle, asic, numbers),
        name=_text(asic.get("market_name")) or _text(facts("board").get("product_name")) or "AMD GPU",
        backend=AmdReader.backend,
        memory_total_bytes=or_none("memory_total_bytes", vram_bytes),
        power_limit_w=or_none("power_limit_w", limit_w) or None,
        pci_bus_id=_text(try_call(lambda: smi.amdsmi_get_gpu_device_bdf(handle))),
        driver=_text(facts("driver").get("driver_version")),
        slowdown_c=or_none("slowdown_c", try_call(temperature_c, smi, handle, "CRITICAL")),
        vendor="amd",
    )


def _uuid(smi: Any, handle: Any, asic: Mapping[str, Any], numbers: Mapping[str, Any]) -> str:
    """Return the name for ROCR_VISIBLE_DEVICES (GPU- and the serial number), else the library's UUID."""
    hip_uuid = _text(numbers.get("hip_uuid"))
    if hip_uuid and hip_uuid.startswith("GPU-"):
        return hip_uuid
    serial = re.fullmatch(r"(?:0x)?([0-9a-f]{1,16})", str(asic.get("asic_serial", "")).lower())
    if serial and int(serial[1], 16):
        return f"GPU-{serial[1]:0>16}"
    return str(smi.amdsmi_get_gpu_device_uuid(handle))


def _text(value: Any) -> str | None:
    if isinstance(value, str) and value not in ("", "N/A"):
        return value
    return None
