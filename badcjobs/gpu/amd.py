"""Read AMD GPUs through ``amdsmi``, AMD's own Python package (extra ``amd``; ROCm 6 and later, 5.7 as far as it goes).

This file starts and ends the library, lists devices and finds them again; what is asked of a device stands in
``amd_metrics.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from badcjobs.gpu.amd_metrics import Acquaintance, NoAnswer, number_of, reason_of, take_reading, temperature_c
from badcjobs.gpu.sane import or_none
from badcjobs.model import InventoryDevice, Reading
from badcjobs.seams import Clock, DeviceUnreadable, ReaderUnavailable

log = logging.getLogger(__name__)

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
        self._devices: dict[str, Acquaintance] = {}

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
            self._devices.setdefault(device.uuid, Acquaintance(handle)).handle = handle
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

    def hurry(self) -> None:
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
    asic = _or_nothing(smi.amdsmi_get_gpu_asic_info, handle)
    numbers = _or_nothing(getattr(smi, "amdsmi_get_gpu_enumeration_info", None), handle)  # since ROCm 6.4
    vram_mib = _number(lambda: number_of(smi.amdsmi_get_gpu_vram_usage(handle), "vram_total"))
    slowdown = _number(lambda: temperature_c(smi, handle, "CRITICAL"))
    hip_id = numbers.get("hip_id")
    return InventoryDevice(
        index=hip_id if isinstance(hip_id, int) and or_none("index", hip_id) is not None else position,
        uuid=_uuid(smi, handle, asic, numbers),
        name=_name(smi, handle, asic),
        backend=AmdReader.backend,
        memory_total_bytes=None if vram_mib is None else or_none("memory_total_bytes", round(vram_mib) * 2**20),
        power_limit_w=_power_limit_w(smi, handle),
        pci_bus_id=_text(_or_nothing(lambda h: {"bdf": smi.amdsmi_get_gpu_device_bdf(h)}, handle).get("bdf")),
        driver=_text(_or_nothing(smi.amdsmi_get_gpu_driver_info, handle).get("driver_version")),
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
    board = _or_nothing(smi.amdsmi_get_gpu_board_info, handle)
    return _text(asic.get("market_name")) or _text(board.get("product_name")) or "AMD GPU"


def _power_limit_w(smi: Any, handle: Any) -> float | None:
    limit = _number(lambda: number_of(smi.amdsmi_get_power_cap_info(handle), "power_cap"))
    return None if not limit else or_none("power_limit_w", float(limit / 1e6 if limit > _WATTS_END else limit))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value not in ("", "N/A") else None


def _number(ask: Callable[[], float]) -> float | None:
    try:
        return ask()
    except NoAnswer:
        return None
    except Exception as error:  # broad: a device is listed even if it does not say everything
        log.debug("amdsmi does not say: %s", reason_of(error))
        return None


def _or_nothing(call: Callable[[Any], Mapping[str, Any]] | None, handle: Any) -> Mapping[str, Any]:
    """Return the answer, or an empty one where there is none."""
    try:
        return {} if call is None else call(handle)
    except Exception as error:  # broad, as above
        log.debug("amdsmi does not say: %s", reason_of(error))
        return {}
