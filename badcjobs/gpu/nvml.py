"""Read NVIDIA GPUs through NVML, by way of nvidia-ml-py (whose module is called ``pynvml``).

This file starts and ends NVML and keeps to what the seam promises. Devices are listed in ``nvml_inventory.py`` and
read in ``nvml_device.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from badcjobs.gpu.nvml_answers import is_shut_down, reason_of
from badcjobs.gpu.nvml_device import NvmlDevice
from badcjobs.gpu.nvml_faults import FaultWatch
from badcjobs.gpu.nvml_inventory import BACKEND, Inventory, driver_version
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

    def hurry(self) -> None:
        """Let the next reading of every device be a whole one."""
        self._faults.hurry()
        for device in self._devices.values():
            device.hurry(self._clock.monotonic_s())

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
