"""List the cards of this machine and, right after each card in MIG mode, its slices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from badcjobs.gpu.nvml_answers import check
from badcjobs.model import InventoryDevice

log = logging.getLogger(__name__)

BACKEND = "nvml"


class Inventory:
    """Describes devices; remembers which cards are in MIG mode, since asking costs more than a whole reading."""

    def __init__(self) -> None:
        self._in_mig_mode: dict[str, bool] = {}

    def describe_all(self, nvml: Any, count: int) -> Iterator[InventoryDevice]:
        """Yield the devices in NVML's order; one that does not answer is left out, the others keep their index."""
        driver = driver_version(nvml)
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                card = _describe(nvml, handle, index, driver)
            except nvml.NVMLError as error:
                log.warning("GPU %d is left out: %s", index, error)
                continue
            yield card
            if self._is_in_mig_mode(nvml, handle, card.uuid):
                yield from _describe_slices(nvml, handle, card)

    def _is_in_mig_mode(self, nvml: Any, handle: Any, uuid: str) -> bool:
        if uuid not in self._in_mig_mode:
            mode = _or_none(nvml.nvmlDeviceGetMigMode, handle)
            self._in_mig_mode[uuid] = mode is not None and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE
        return self._in_mig_mode[uuid]


def driver_version(nvml: Any) -> str | None:
    """Return the driver's version as it writes it."""
    version = _or_none(nvml.nvmlSystemGetDriverVersion)
    return None if version is None else str(version)


def _describe(nvml: Any, handle: Any, index: int, driver: str | None) -> InventoryDevice:
    limit_mw = _or_none(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    pci = _or_none(nvml.nvmlDeviceGetPciInfo, handle)
    return InventoryDevice(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=_or_none(nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU",
        backend=BACKEND,
        memory_total_bytes=_memory_total(nvml, handle),
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
        pci_bus_id=None if pci is None else pci.busId,
        driver=driver,
        slowdown_c=_or_none(nvml.nvmlDeviceGetTemperatureThreshold, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
    )


def _describe_slices(nvml: Any, card_handle: Any, card: InventoryDevice) -> Iterator[InventoryDevice]:
    for place in range(_or_none(nvml.nvmlDeviceGetMaxMigDeviceCount, card_handle) or 0):
        handle = _or_none(nvml.nvmlDeviceGetMigDeviceHandleByIndex, card_handle, place)
        if handle is None:  # an empty place: slices are made and taken away in any order
            continue
        try:
            yield _describe_slice(nvml, handle, card)
        except nvml.NVMLError as error:
            log.warning("slice %d of GPU %d is left out: %s", place, card.index, error)


def _describe_slice(nvml: Any, handle: Any, card: InventoryDevice) -> InventoryDevice:
    instances = nvml.nvmlDeviceGetGpuInstanceId(handle), nvml.nvmlDeviceGetComputeInstanceId(handle)
    return replace(
        card,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=_or_none(nvml.nvmlDeviceGetName, handle) or f"{card.name} MIG",
        memory_total_bytes=_memory_total(nvml, handle),
        power_limit_w=None,  # the board's
        slowdown_c=None,
        parent_uuid=card.uuid,
        slice="{}/{}".format(*instances),
    )


def _memory_total(nvml: Any, handle: Any) -> int | None:
    memory = _or_none(nvml.nvmlDeviceGetMemoryInfo, handle)
    return None if memory is None else int(memory.total)


def _or_none(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer, or None where there is none."""
    try:
        return check(call(*arguments))
    except Exception as error:  # broad: a fact that one card keeps to itself must not hide the card
        log.debug("%s: %s", call.__name__, error)
        return None
