"""Read NVIDIA GPUs through NVML, by way of nvidia-ml-py (whose module is called ``pynvml``).

The reader starts and ends NVML and keeps to what the seam promises; below it: how one device is read, how the
devices are listed, and how their faults (Xid errors) are collected. ``nvml_metrics`` has the questions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from badcjobs.devices.nvml_activity import Activity
from badcjobs.devices.nvml_answers import NvmlCallBudget, ReadingBuilder, Refusals, check, is_shut_down, reason_of
from badcjobs.devices.nvml_metrics import BOARD_WIDE, EXPENSIVE, HOT, WARM, Tier
from badcjobs.devices.plausible import or_none
from badcjobs.model import InventoryDevice, Reading
from badcjobs.seams import Clock, DeviceUnreadable, ReaderUnavailable

log = logging.getLogger(__name__)

BACKEND = "nvml"

_WHY_NOT = {  # by NVML error code
    9: "the NVIDIA driver is not loaded on this machine",
    12: "no NVIDIA driver on this machine: libnvidia-ml.so.1 was not found",
    18: "the NVIDIA driver and its library are of different versions; the machine needs a restart",
}


class NvmlReader:
    """Reads every NVIDIA GPU and MIG slice that this process may see."""

    backend = BACKEND

    def __init__(self, clock: Clock) -> None:
        self.why = "NVML is asked first"
        self._clock = clock
        self._nvml: Any = None
        self._inventory = Inventory()
        self._faults = FaultWatch()
        self._devices: dict[str, NvmlDevice] = {}

    def inventory(self) -> Sequence[InventoryDevice]:
        """List the cards in NVML's order, each followed by its slices; one that does not answer is left out."""
        nvml = self._open()
        try:
            return list(self._inventory.describe_all(nvml, nvml.nvmlDeviceGetCount()))
        except nvml.NVMLError as error:
            raise ReaderUnavailable(f"NVML does not list its devices: {error}") from error

    def read(self, uuid: str) -> Reading:
        """Ask the device what is due: some metrics every time, the others every 5 s."""
        device = self._devices.get(uuid)
        if device is None:
            device = self._devices[uuid] = NvmlDevice(uuid, self._faults)
        try:
            nvml = self._open()
            now_s = self._clock.monotonic_s()
            self._faults.poll(nvml, now_s)
            return device.read(nvml, now_s)
        except Exception as error:  # broad: the recorder counts on nothing else coming out of here
            if self._nvml is not None:
                self._faults.poll(self._nvml, self._clock.monotonic_s(), at_once=True)
            self._let_go(device, error)
            faults = self._faults.waiting(uuid)
            raise DeviceUnreadable(reason_of(error) + (f" ({', '.join(faults)})" if faults else "")) from error

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
        if self._nvml is None:
            self._nvml = _start_nvml()
            self.why = f"NVML answers: driver {driver_version(self._nvml) or 'of unknown version'}"
        return self._nvml

    def _let_go(self, device: NvmlDevice, error: Exception) -> None:
        """Look for the device anew next time; start NVML again if somebody in this process has ended it."""
        if not is_shut_down(error):
            device.let_go(self._nvml)
            return
        for one in self._devices.values():
            one.let_go(None)
        self._faults.close(None)
        self._nvml = None


def _start_nvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise ReaderUnavailable("the Python package nvidia-ml-py is not installed") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ReaderUnavailable(_WHY_NOT.get(error.value, f"NVML does not start: {error}")) from error
    return pynvml


# --- one device ------------------------------------------------------------------------------------------------------

_WARM_S = 4.9  # every 5 s; a tick that comes a little early counts
_SHORTEST_WINDOW_S = 0.2  # GPM needs its samples at least 0.1 s apart
_AT_ONCE = float("-inf")


class NvmlDevice:
    """What a reader has learned of one device, and how it reads it."""

    def __init__(self, uuid: str, faults: FaultWatch) -> None:
        self._uuid = uuid
        self._faults = faults
        self._is_slice = uuid.startswith("MIG-")
        self._refusals = Refusals(dict.fromkeys(BOARD_WIDE, "board-wide under MIG") if self._is_slice else {})
        self._hot = Tier(HOT, self._refusals.reasons, to_slice=self._is_slice)
        self._warm = Tier(WARM, self._refusals.reasons, to_slice=self._is_slice)
        self._expensive = Tier(EXPENSIVE, self._refusals.reasons, to_slice=self._is_slice)
        self._budget = NvmlCallBudget()
        self._activity = Activity(to_slice=self._is_slice)
        self._handle: Any = None  # None: not looked up, or lost
        self._warm_due_s = _AT_ONCE

    def read(self, nvml: Any, now_s: float) -> Reading:
        """Ask what is due; raise NVML's error when the device is gone, DeviceUnreadable when it says nothing."""
        if self._handle is None:
            self._handle = self._meet(nvml)
        builder = ReadingBuilder(self._refusals)
        self._hot.ask(nvml, self._handle, builder)
        if builder.is_empty:
            raise DeviceUnreadable(f"no metric can be read: {'; '.join(sorted(set(builder.missing.values())))}")
        if now_s >= self._warm_due_s:
            self._warm_due_s = now_s + _WARM_S
            self._warm.ask(nvml, self._handle, builder)
            if self._budget.is_due():
                with self._budget.timed():
                    self._expensive.ask(nvml, self._handle, builder)
            self._activity.look(nvml, self._handle, now_s, builder)
        else:
            self._activity.glance(builder)
        return builder.finish(self._faults.fetch(self._uuid))

    def force_full_read(self, now_s: float) -> None:
        """Let the next reading be a whole one, unless the last one was so just now."""
        if now_s > self._warm_due_s - _WARM_S + _SHORTEST_WINDOW_S:
            self._warm_due_s = _AT_ONCE
            self._budget.force_full_read()
            self._activity.force_full_read()

    def let_go(self, nvml: Any | None) -> None:
        """Forget where the device is, not what it refused; without ``nvml`` there is nothing left to give back."""
        self._handle = None
        self._warm_due_s = _AT_ONCE
        self._activity.let_go(nvml)

    def _meet(self, nvml: Any) -> Any:
        handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        self._faults.listen(nvml, self._uuid, handle, is_slice=self._is_slice)
        return handle


# --- the list of devices ---------------------------------------------------------------------------------------------


class Inventory:
    """Describes devices; remembers which cards are in MIG mode, since asking costs more than a whole reading.

    What is wrong with one is logged once, however often they are listed.
    """

    def __init__(self) -> None:
        self._in_mig_mode: dict[str, bool] = {}
        self._warned: set[str] = set()

    def describe_all(self, nvml: Any, count: int) -> Iterator[InventoryDevice]:
        """Yield the devices in NVML's order; one that does not answer is left out, the others keep their index."""
        driver = driver_version(nvml)
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                card = _describe(nvml, handle, index, driver)
            except nvml.NVMLError as error:
                self._warn(f"GPU {index} is left out: {error}")
                continue
            yield from self._with_slices(nvml, handle, card)

    def _with_slices(self, nvml: Any, handle: Any, card: InventoryDevice) -> Iterator[InventoryDevice]:
        if not self._is_in_mig_mode(nvml, handle, card.uuid):
            yield card
            return
        slices = _slice_handles(nvml, handle)
        if not slices:  # CUDA sees no device in it, so it must not be given to a worker
            self._warn(f"GPU {card.index} is in MIG mode and has no slices: nothing can run on it")
            return
        yield card
        for place, slice_ in slices:
            try:
                yield _describe_slice(nvml, slice_, card)
            except nvml.NVMLError as error:
                self._warn(f"slice {place} of GPU {card.index} is left out: {error}")

    def _is_in_mig_mode(self, nvml: Any, handle: Any, uuid: str) -> bool:
        if uuid not in self._in_mig_mode:
            mode = _or_none(nvml.nvmlDeviceGetMigMode, handle)
            self._in_mig_mode[uuid] = mode is not None and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE
        return self._in_mig_mode[uuid]

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)


def driver_version(nvml: Any) -> str | None:
    """Return the driver's version as it writes it."""
    version = _or_none(nvml.nvmlSystemGetDriverVersion)
    return None if version is None else str(version)


def _describe(nvml: Any, handle: Any, index: int, driver: str | None) -> InventoryDevice:
    limit_mw = _or_none(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    pci = _or_none(nvml.nvmlDeviceGetPciInfo, handle)
    total_bytes, reserved_bytes = _memory(nvml, handle)
    slowdown_c = _or_none(nvml.nvmlDeviceGetTemperatureThreshold, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    return InventoryDevice(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=_or_none(nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU",
        backend=BACKEND,
        memory_total_bytes=total_bytes,
        power_limit_w=None if limit_mw is None else or_none("power_limit_w", limit_mw / 1000),
        pci_bus_id=None if pci is None else pci.busId,
        driver=driver,
        slowdown_c=or_none("slowdown_c", slowdown_c),
        memory_reserved_bytes=reserved_bytes,
    )


def _slice_handles(nvml: Any, card_handle: Any) -> list[tuple[int, Any]]:
    """Return (place, handle) of every slice; places may be empty: slices are made and taken away in any order."""
    places = range(_or_none(nvml.nvmlDeviceGetMaxMigDeviceCount, card_handle) or 0)
    found = [(place, _or_none(nvml.nvmlDeviceGetMigDeviceHandleByIndex, card_handle, place)) for place in places]
    return [(place, handle) for place, handle in found if handle is not None]


def _describe_slice(nvml: Any, handle: Any, card: InventoryDevice) -> InventoryDevice:
    total_bytes, reserved_bytes = _memory(nvml, handle)
    instances = nvml.nvmlDeviceGetGpuInstanceId(handle), nvml.nvmlDeviceGetComputeInstanceId(handle)
    return replace(
        card,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=_or_none(nvml.nvmlDeviceGetName, handle) or f"{card.name} MIG",
        memory_total_bytes=total_bytes,
        power_limit_w=None,  # the board's
        slowdown_c=None,
        memory_reserved_bytes=reserved_bytes,
        parent_uuid=card.uuid,
        slice="{}/{}".format(*instances),
    )


def _memory(nvml: Any, handle: Any) -> tuple[int | None, int]:
    """Return the total, and what the driver keeps; where it does not tell them apart, it counts that as used."""
    memory = _or_none(nvml.nvmlDeviceGetMemoryInfo, handle)
    total = None if memory is None else or_none("memory_total_bytes", int(memory.total))
    try:
        told = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except (nvml.NVMLError, AttributeError, TypeError):
        return total, 0
    return total, or_none("memory_total_bytes", int(told.reserved)) or 0


def _or_none(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer, or None where there is none."""
    try:
        return check(call(*arguments))
    except Exception as error:  # broad: a fact that one card keeps to itself must not hide the card
        log.debug("%s: %s", call.__name__, error)
        return None


# --- faults ----------------------------------------------------------------------------------------------------------

_REST_S = 4.5  # reports wait in the set until they are fetched; asking costs as much as two readings
_MOST_AT_ONCE = 16  # a storm of errors waits its turn
_ANY_INSTANCE = 2**32 - 1


@dataclass(slots=True)
class _FaultListener:
    card: int | None  # where the driver keeps it: handles of one card are equal in nothing else
    gpu_instance: int | None  # None: the whole card
    faults: list[str] = field(default_factory=list)

    def is_meant(self, event: Any) -> bool:
        """Say whether an event is about this device: a slice hears of its own errors and of those of the whole card."""
        if _address(event.device) != self.card:
            return False
        return self.gpu_instance is None or event.gpuInstanceId in (self.gpu_instance, _ANY_INSTANCE)


class FaultWatch:
    """Collects the faults of every device that is listened to, until they are fetched."""

    def __init__(self) -> None:
        self._events: Any = None  # None: not made, or nobody may listen
        self._listeners: dict[str, _FaultListener] = {}
        self._due_s = float("-inf")

    def listen(self, nvml: Any, uuid: str, handle: Any, *, is_slice: bool) -> None:
        """Hear of this device from now on."""
        known = self._listeners.pop(uuid, None)
        try:
            card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_slice else handle
            gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(handle) if is_slice else None
            self._register(nvml, card)
        except Exception as error:  # broad: nobody stops reading a device for want of its events
            log.debug("no fault events of %s: %s", uuid, error)
        else:
            self._listeners[uuid] = _FaultListener(_address(card), gpu_instance, known.faults if known else [])

    def poll(self, nvml: Any, now_s: float, *, at_once: bool = False) -> None:
        """Collect what was reported, once for all devices; ``at_once``: one of them is in trouble just now."""
        if self._events is None or (now_s < self._due_s and not at_once):
            return
        self._due_s = now_s + _REST_S
        for event in self._reported(nvml):
            for listener in self._listeners.values():
                if listener.is_meant(event):
                    listener.faults.append(f"Xid {event.eventData}")

    def force_full_read(self) -> None:
        """Collect at the next reading, which is the last."""
        self._due_s = float("-inf")

    def waiting(self, uuid: str) -> tuple[str, ...]:
        """Return the faults of a device that nobody has fetched."""
        listener = self._listeners.get(uuid)
        return tuple(listener.faults) if listener and listener.faults else ()

    def fetch(self, uuid: str) -> tuple[str, ...]:
        """Return the faults of a device and forget them."""
        faults = self.waiting(uuid)
        if faults:
            self._listeners[uuid].faults.clear()
        return faults

    def close(self, nvml: Any | None) -> None:
        """Give the event set back; without ``nvml`` it is gone already."""
        events, self._events = self._events, None
        self._listeners.clear()
        if events is None or nvml is None:
            return
        try:
            nvml.nvmlEventSetFree(events)
        except Exception as error:  # broad: on the way out
            log.debug("the event set was not given back: %s", error)

    def _register(self, nvml: Any, card: Any) -> None:
        if _address(card) in (other.card for other in self._listeners.values()):
            return  # the slices of a card share its events
        kinds = nvml.nvmlDeviceGetSupportedEventTypes(card) & nvml.nvmlEventTypeXidCriticalError
        if not kinds:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        if self._events is None:
            self._events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(card, kinds, self._events)

    def _reported(self, nvml: Any) -> Iterator[Any]:
        try:
            for _ in range(_MOST_AT_ONCE):
                yield nvml.nvmlEventSetWait(self._events, 0)
        except nvml.NVMLError_Timeout:
            return
        except Exception as error:  # broad: readings matter more than events
            log.debug("fault events cannot be read: %s", error)


def _address(handle: Any) -> int | None:
    import ctypes  # the binding has loaded it; who has no NVIDIA device need not

    return ctypes.cast(handle, ctypes.c_void_p).value
