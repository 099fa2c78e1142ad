"""Xid errors: what the driver reports when a device or the program on it goes wrong.

One event set listens for all devices and is asked without waiting. Where events are not supported or not permitted
there are none, and nothing else changes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

_REST_S = 4.5  # reports wait in the set until they are fetched; asking costs as much as two readings
_MOST_AT_ONCE = 16  # a storm of errors waits its turn
_ANY_INSTANCE = 2**32 - 1


@dataclass(slots=True)
class _Listener:
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
        self._listeners: dict[str, _Listener] = {}
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
            self._listeners[uuid] = _Listener(_address(card), gpu_instance, known.faults if known else [])

    def poll(self, nvml: Any, now_s: float, *, at_once: bool = False) -> None:
        """Collect what was reported, once for all devices; ``at_once``: one of them is in trouble just now."""
        if self._events is None or (now_s < self._due_s and not at_once):
            return
        self._due_s = now_s + _REST_S
        for event in self._reported(nvml):
            for listener in self._listeners.values():
                if listener.is_meant(event):
                    listener.faults.append(f"Xid {event.eventData}")

    def hurry(self) -> None:
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
