"""Read NVIDIA GPUs through NVML, by way of nvidia-ml-py (whose module is called ``pynvml``).

The reader starts and ends NVML, lists the devices, collects their faults (Xid errors) and keeps to what the seam
promises; ``nvml_device`` reads one device.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from badcjobs.devices.nvml_device import UNINITIALIZED, NvmlDevice, check, code_of, reason_of
from badcjobs.devices.plausible import or_none
from badcjobs.model import InventoryDevice, Reading
from badcjobs.seams import Clock, DeviceUnreadable, ReaderUnavailable

log = logging.getLogger(__name__)

_WHY_NOT = {  # by NVML error code
    9: "the NVIDIA driver is not loaded on this machine",
    12: "no NVIDIA driver on this machine: libnvidia-ml.so.1 was not found",
    18: "the NVIDIA driver and its library are of different versions; the machine needs a restart",
}


class NvmlReader:
    """Reads every NVIDIA GPU and MIG slice that this process may see."""

    backend = "nvml"

    def __init__(self, clock: Clock) -> None:
        self.why = "NVML is asked first"
        self._clock = clock
        self._nvml: Any = None
        self._faults = FaultWatch()
        self._devices: dict[str, NvmlDevice] = {}
        self._in_mig_mode: dict[str, bool] = {}  # remembered, since asking costs more than a whole reading
        self._warned: set[str] = set()

    def inventory(self) -> Sequence[InventoryDevice]:
        """List the cards in NVML's order, each followed by its slices.

        One that does not answer is left out, and the others keep their index.
        """
        nvml = self._open()
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise ReaderUnavailable(f"NVML does not list its devices: {error}") from error
        found: list[InventoryDevice] = []
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                card = _describe(nvml, handle, index)
            except nvml.NVMLError as error:
                self._warn(f"GPU {index} is left out: {error}")
                continue
            found += self._with_slices(nvml, handle, card)
        return found

    def read(self, uuid: str) -> Reading:
        """Ask the device what is due: some metrics every time, the others every 5 s."""
        device = self._devices.get(uuid)
        if device is None:
            device = self._devices[uuid] = NvmlDevice(uuid)
        try:
            nvml = self._open()
            now_s = self._clock.monotonic_s()
            self._faults.poll(nvml, now_s)
            if device.handle is None:
                device.handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                self._faults.listen(nvml, uuid, device.handle, is_slice=device.is_slice)
            reading = device.read(nvml, now_s)
        except Exception as error:  # broad: the recorder relies on no other exception coming out of here
            if self._nvml is not None:
                self._faults.poll(self._nvml, self._clock.monotonic_s(), at_once=True)
            faults = self._faults.pending[uuid]
            reason = reason_of(error) + (f" ({', '.join(faults)})" if faults else "")
            self._let_go(device, error)
            raise DeviceUnreadable(reason) from error
        faults = self._faults.pending.pop(uuid, [])
        return replace(reading, faults=tuple(faults)) if faults else reading

    def force_full_read(self) -> None:
        """Let the next reading of every device be a whole one."""
        self._faults.force_full_read()
        for device in self._devices.values():
            device.force_full_read(self._clock.monotonic_s())

    def close(self) -> None:
        """Give everything back; a reader that is used again starts NVML again."""
        nvml, self._nvml = self._nvml, None
        for device in self._devices.values():
            device.let_go(nvml)
        self._devices.clear()
        self._faults.close(nvml)
        if nvml is None:
            return
        try:
            nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            log.debug("NVML did not shut down: %s", error)

    def _open(self) -> Any:
        """Return the binding, with NVML started."""
        if self._nvml is not None:
            return self._nvml
        try:
            import pynvml
        except ImportError as error:
            raise ReaderUnavailable("the Python package nvidia-ml-py is not installed") from error
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise ReaderUnavailable(_WHY_NOT.get(error.value, f"NVML does not start: {error}")) from error
        self._nvml = pynvml
        self.why = f"NVML answers: driver {_or_none(pynvml.nvmlSystemGetDriverVersion) or 'of unknown version'}"
        return pynvml

    def _let_go(self, device: NvmlDevice, error: Exception) -> None:
        """Look for the device anew next time; start NVML again if other code in this process has ended it."""
        if code_of(error) != UNINITIALIZED:
            device.let_go(self._nvml)
            return
        for one in self._devices.values():
            one.let_go(None)
        self._faults.close(None)
        self._nvml = None

    def _with_slices(self, nvml: Any, handle: Any, card: InventoryDevice) -> list[InventoryDevice]:
        if card.uuid not in self._in_mig_mode:
            mode = _or_none(nvml.nvmlDeviceGetMigMode, handle)
            self._in_mig_mode[card.uuid] = mode is not None and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE
        if not self._in_mig_mode[card.uuid]:
            return [card]
        found, has_slices = [card], False
        for place in range(_or_none(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            slice_ = _or_none(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
            if slice_ is None:
                continue  # slices are made and taken away in any order
            has_slices = True
            try:
                found.append(_describe_slice(nvml, slice_, card))
            except nvml.NVMLError as error:
                self._warn(f"slice {place} of GPU {card.index} is left out: {error}")
        if not has_slices:  # CUDA sees no device in it, so it must not be given to a worker
            self._warn(f"GPU {card.index} is in MIG mode and has no slices: nothing can run on it")
            return []
        return found

    def _warn(self, text: str) -> None:
        """Log a warning once, however often the devices are listed."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)


def _describe(nvml: Any, handle: Any, index: int) -> InventoryDevice:
    limit_mw = _or_none(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    pci = _or_none(nvml.nvmlDeviceGetPciInfo, handle)
    total_bytes, reserved_bytes = _memory(nvml, handle)
    slowdown_c = _or_none(nvml.nvmlDeviceGetTemperatureThreshold, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    return InventoryDevice(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=_or_none(nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU",
        backend=NvmlReader.backend,
        memory_total_bytes=total_bytes,
        power_limit_w=None if limit_mw is None else or_none("power_limit_w", limit_mw / 1000),
        pci_bus_id=None if pci is None else pci.busId,
        driver=_or_none(nvml.nvmlSystemGetDriverVersion),
        slowdown_c=or_none("slowdown_c", slowdown_c),
        memory_reserved_bytes=reserved_bytes,
    )


def _describe_slice(nvml: Any, handle: Any, card: InventoryDevice) -> InventoryDevice:
    total_bytes, reserved_bytes = _memory(nvml, handle)
    return replace(
        card,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=_or_none(nvml.nvmlDeviceGetName, handle) or f"{card.name} MIG",
        memory_total_bytes=total_bytes,
        power_limit_w=None,  # the board's
        slowdown_c=None,
        memory_reserved_bytes=reserved_bytes,
        parent_uuid=card.uuid,
        slice=f"{nvml.nvmlDeviceGetGpuInstanceId(handle)}/{nvml.nvmlDeviceGetComputeInstanceId(handle)}",
    )


def _memory(nvml: Any, handle: Any) -> tuple[int | None, int]:
    """Return the total, and what the driver reserves (0 where it counts that as used)."""
    memory = _or_none(nvml.nvmlDeviceGetMemoryInfo, handle)
    total = None if memory is None else or_none("memory_total_bytes", int(memory.total))
    try:
        reserved = int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).reserved)
    except (nvml.NVMLError, AttributeError, TypeError):
        return total, 0
    return total, or_none("memory_total_bytes", reserved) or 0


def _or_none(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer, or None where there is none."""
    try:
        return check(call(*arguments))
    except Exception as error:  # broad: a fact that one card does not give must not hide the card
        log.debug("%s: %s", call.__name__, error)
        return None


# --- faults ----------------------------------------------------------------------------------------------------------

_REST_S = 4.5  # reports wait in the set until they are fetched; asking costs as much as two readings
_MOST_AT_ONCE = 16  # a storm of errors waits its turn
_ANY_INSTANCE = 2**32 - 1


class FaultWatch:
    """Collects the faults of every device that is listened to; ``pending`` has those that were not fetched, by UUID."""

    def __init__(self) -> None:
        self.pending: defaultdict[str, list[str]] = defaultdict(list)
        self._events: Any = None  # None: not made, or listening is not possible
        # UUID → address of its card, and the GPU instance of a slice (None: the whole card)
        self._listeners: dict[str, tuple[int | None, int | None]] = {}
        self._due_s = float("-inf")

    def listen(self, nvml: Any, uuid: str, handle: Any, *, is_slice: bool) -> None:
        """Collect the faults of this device from now on."""
        self._listeners.pop(uuid, None)
        try:
            card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_slice else handle
            gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(handle) if is_slice else None
            if all(_address(card) != other for other, _ in self._listeners.values()):  # slices share its events
                kinds = nvml.nvmlDeviceGetSupportedEventTypes(card) & nvml.nvmlEventTypeXidCriticalError
                if not kinds:
                    raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
                if self._events is None:
                    self._events = nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(card, kinds, self._events)
        except Exception as error:  # broad: a device without events is still read
            log.debug("no fault events of %s: %s", uuid, error)
        else:
            self._listeners[uuid] = _address(card), gpu_instance

    def poll(self, nvml: Any, now_s: float, *, at_once: bool = False) -> None:
        """Collect what was reported, once for all devices; ``at_once``: one of them is in trouble just now."""
        if self._events is None or (now_s < self._due_s and not at_once):
            return
        self._due_s = now_s + _REST_S
        try:
            for _ in range(_MOST_AT_ONCE):
                event = nvml.nvmlEventSetWait(self._events, 0)
                for uuid, (card, gpu_instance) in self._listeners.items():
                    # A slice gets its own errors and those of the whole card.
                    meant = gpu_instance is None or event.gpuInstanceId in (gpu_instance, _ANY_INSTANCE)
                    if meant and card == _address(event.device):
                        self.pending[uuid].append(f"Xid {event.eventData}")
        except nvml.NVMLError_Timeout:
            pass
        except Exception as error:  # broad: readings matter more than events
            log.debug("fault events cannot be read: %s", error)

    def force_full_read(self) -> None:
        """Collect at the next reading, which is the last."""
        self._due_s = float("-inf")

    def close(self, nvml: Any | None) -> None:
        """Give the event set back; without ``nvml`` it is gone already."""
        events, self._events = self._events, None
        self._listeners.clear()
        self.pending.clear()
        if events is None or nvml is None:
            return
        try:
            nvml.nvmlEventSetFree(events)
        except Exception as error:  # broad: on the way out
            log.debug("the event set was not given back: %s", error)


def _address(handle: Any) -> int | None:
    """Return where the driver keeps a card: handles of one card are equal in nothing else."""
    import ctypes  # the binding has loaded it; a machine without NVIDIA devices need not

    return ctypes.cast(handle, ctypes.c_void_p).value
