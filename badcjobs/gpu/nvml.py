"""Read NVIDIA GPUs through NVML, by way of nvidia-ml-py (whose module is called ``pynvml``).

This file starts and ends NVML, lists devices and finds them again by UUID; what is asked of a device stands in
``nvml_metrics.py``. A card in MIG mode is listed as a whole; its slices are not listed yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from badcjobs.gpu.nvml_metrics import Acquaintance, take_reading
from badcjobs.model import InventoryDevice, Reading
from badcjobs.seams import Clock, DeviceUnreadable, ReaderUnavailable

log = logging.getLogger(__name__)

_WHY_NOT = {  # by NVML error code
    9: "the NVIDIA driver is not loaded on this machine",
    12: "no NVIDIA driver on this machine: libnvidia-ml.so.1 was not found",
    18: "the NVIDIA driver and its library are of different versions; the machine needs a restart",
}


class NvmlReader:
    """Reads every NVIDIA GPU that this process may see."""

    backend = "nvml"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._nvml: Any = None
        self._devices: dict[str, Acquaintance] = {}

    def inventory(self) -> Sequence[InventoryDevice]:
        """List the devices in NVML's order; one that does not answer is left out, the others keep their index."""
        nvml = self._open()
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise ReaderUnavailable(f"NVML does not list its devices: {error}") from error
        return list(_describe_all(nvml, count))

    def read(self, uuid: str) -> Reading:
        """Ask the device what is due; energy rests 5 s between two answers and is None meanwhile."""
        device = self._devices.setdefault(uuid, Acquaintance())
        try:
            nvml = self._open()
            if device.handle is None:
                device.handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            return take_reading(nvml, device, self._clock.monotonic_s())
        except Exception as error:  # broad: the recorder counts on nothing else coming out of here
            device.handle = None  # a device that comes back is looked up anew
            raise DeviceUnreadable(str(error) or repr(error)) from error

    def close(self) -> None:
        nvml, self._nvml = self._nvml, None
        self._devices.clear()
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
        return self._nvml


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


def _describe_all(nvml: Any, count: int) -> Iterator[InventoryDevice]:
    driver = _or_none(nvml, nvml.nvmlSystemGetDriverVersion)
    for index in range(count):
        try:
            yield _describe(nvml, index, driver)
        except nvml.NVMLError as error:
            log.warning("GPU %d is left out: %s", index, error)


def _describe(nvml: Any, index: int, driver: str | None) -> InventoryDevice:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    limit_mw = _or_none(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    memory = _or_none(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    pci = _or_none(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    return InventoryDevice(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=_or_none(nvml, nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU",
        backend=NvmlReader.backend,
        memory_total_bytes=None if memory is None else memory.total,
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
        pci_bus_id=None if pci is None else pci.busId,
        driver=driver,
    )


def _or_none(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer, or None where there is none."""
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None
