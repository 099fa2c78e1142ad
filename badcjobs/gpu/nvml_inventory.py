"""List the cards of this machine and, right after each card in MIG mode, its slices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from badcjobs.gpu.nvml_answers import check
from badcjobs.gpu.sane import or_none
from badcjobs.model import InventoryDevice

log = logging.getLogger(__name__)

BACKEND = "nvml"


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
    slowdown_c = _or_none(nvml.nvmlDeviceGetTemperatureThreshold, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    return InventoryDevice(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=_or_none(nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU",
        backend=BACKEND,
        memory_total_bytes=_memory_total(nvml, handle),
        power_limit_w=None if limit_mw is None else or_none("power_limit_w", limit_mw / 1000),
        pci_bus_id=None if pci is None else pci.busId,
        driver=driver,
        slowdown_c=or_none("slowdown_c", slowdown_c),
        memory_reserved_bytes=_memory_reserved(nvml, handle),
    )


def _slice_handles(nvml: Any, card_handle: Any) -> list[tuple[int, Any]]:
    """Return (place, handle) of every slice; places may be empty: slices are made and taken away in any order."""
    places = range(_or_none(nvml.nvmlDeviceGetMaxMigDeviceCount, card_handle) or 0)
    found = [(place, _or_none(nvml.nvmlDeviceGetMigDeviceHandleByIndex, card_handle, place)) for place in places]
    return [(place, handle) for place, handle in found if handle is not None]


def _describe_slice(nvml: Any, handle: Any, card: InventoryDevice) -> InventoryDevice:
    instances = nvml.nvmlDeviceGetGpuInstanceId(handle), nvml.nvmlDeviceGetComputeInstanceId(handle)
    return replace(
        card,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=_or_none(nvml.nvmlDeviceGetName, handle) or f"{card.name} MIG",
        memory_total_bytes=_memory_total(nvml, handle),
        power_limit_w=None,  # the board's
        slowdown_c=None,
        memory_reserved_bytes=_memory_reserved(nvml, handle),
        parent_uuid=card.uuid,
        slice="{}/{}".format(*instances),
    )


def _memory_total(nvml: Any, handle: Any) -> int | None:
    memory = _or_none(nvml.nvmlDeviceGetMemoryInfo, handle)
    return None if memory is None else or_none("memory_total_bytes", int(memory.total))


def _memory_reserved(nvml: Any, handle: Any) -> int:
    """Return what the driver keeps; where it does not tell them apart, it counts that as used."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except (nvml.NVMLError, AttributeError, TypeError):
        return 0
    return or_none("memory_total_bytes", int(memory.reserved)) or 0


def _or_none(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer, or None where there is none."""
    try:
        return check(call(*arguments))
    except Exception as error:  # broad: a fact that one card keeps to itself must not hide the card
        log.debug("%s: %s", call.__name__, error)
        return None
