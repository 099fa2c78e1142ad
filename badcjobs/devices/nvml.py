"""Read NVIDIA GPUs through NVML, with the package nvidia-ml-py (its module is ``pynvml``)."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from badcjobs.devices.nvml_device import NvmlDevice
from badcjobs.devices.programs import ProgramFailed, Stream, run_program
from badcjobs.devices.reading_builder import NoAnswer, check_range, or_none, reason_of, try_call
from badcjobs.model import InventoryDevice, Reading
from badcjobs.seams import Clock, DeviceUnreadable, GpuReader, ReaderUnavailable

log = logging.getLogger(__name__)

_WHY_NOT = {  # by NVML error code
    9: "the NVIDIA driver is not loaded on this machine",
    12: "no NVIDIA driver on this machine: libnvidia-ml.so.1 was not found",
    18: "the NVIDIA driver and its library have different versions; restart the machine",
}


@dataclass(eq=False)
class NvmlReader(GpuReader):
    """Reads every NVIDIA GPU and MIG slice that this process may see; ``dcgm`` adds metrics that NVML does not give."""

    backend = "nvml"
    why = "NVML is tried first"
    clock: Clock
    dcgm: DcgmActivity | None = None
    _nvml: Any = None

    def __post_init__(self) -> None:
        self._faults = FaultWatch()
        self._devices: dict[str, NvmlDevice] = {}
        self._warned: set[str] = set()

    def inventory(self) -> Sequence[InventoryDevice]:
        """List the cards in NVML's order, each followed by its slices.

        A card that does not answer is left out; the others keep their index.
        """
        nvml = self._open()
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise ReaderUnavailable(f"NVML cannot list the devices: {error}") from error
        devices = []
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                card = _describe(nvml, handle, index)
            except nvml.NVMLError as error:
                self._warn(f"GPU {index} is left out: {error}")
                continue
            devices += self._with_slices(nvml, handle, card)
        return devices

    def read(self, uuid: str) -> Reading:
        """Read the metrics that are due: some at each reading, the others every 5 or 20 s."""
        device = self._devices.get(uuid)
        if device is None:
            device = self._devices[uuid] = NvmlDevice(uuid)
        try:
            nvml = self._open()
            now_s = self.clock.monotonic_s()
            self._faults.poll(nvml, now_s)
            if device.handle is None:
                device.handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                self._faults.watch(nvml, uuid, device.handle, is_slice=device.is_slice)
            reading = device.read(nvml, now_s, watched=self.watched)
        except Exception as error:  # broad: the recorder expects no other exception
            self._faults.poll(self._nvml, self.clock.monotonic_s(), force=True)
            reason = reason_of(error)
            if self._faults.pending[uuid]:
                reason += f" ({', '.join(self._faults.pending[uuid])})"
            device.forget(self._nvml)
            raise DeviceUnreadable(reason) from error
        if faults := self._faults.pending.pop(uuid, []):
            reading = replace(reading, faults=tuple(faults))
        if self.dcgm is not None:
            reading = self.dcgm.complete(uuid, reading)
        return reading

    def force_full_read(self) -> None:
        """Read all metrics of each device at the next reading."""
        self._faults.poll(self._nvml, self.clock.monotonic_s(), force=True)
        for device in self._devices.values():
            device.force_full_read(self.clock.monotonic_s())

    def close(self) -> None:
        """Release everything and stop NVML; a later call starts it again."""
        if self.dcgm is not None:
            self.dcgm.close()
        for device in self._devices.values():
            device.forget(self._nvml)
        self._devices.clear()
        self._faults.close(self._nvml)
        if self._nvml is not None:
            try_call(self._nvml.nvmlShutdown)
        self._nvml = None

    def _open(self) -> Any:
        """Start NVML and return its Python module."""
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
        self.why = f"NVML works: driver {try_call(pynvml.nvmlSystemGetDriverVersion) or 'of unknown version'}"
        return pynvml

    def _with_slices(self, nvml: Any, handle: Any, card: InventoryDevice) -> list[InventoryDevice]:
        mode = try_call(nvml.nvmlDeviceGetMigMode, handle)
        if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return [card]
        devices = [card]
        for place in range(try_call(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            slice_ = try_call(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
            if slice_ is None:  # the numbers may have gaps
                continue
            try:
                devices.append(_describe_slice(nvml, slice_, card))
            except nvml.NVMLError as error:
                self._warn(f"slice {place} of GPU {card.index} is left out: {error}")
        if devices == [card]:  # CUDA shows no device for it, so no worker can use it
            self._warn(f"GPU {card.index} is in MIG mode and has no slices: no program can use it")
            return []
        return devices

    def _warn(self, text: str) -> None:
        """Log a warning once, even if the devices are listed again."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)


def _describe(nvml: Any, handle: Any, index: int) -> InventoryDevice:
    limit_mw = try_call(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    pci = try_call(nvml.nvmlDeviceGetPciInfo, handle)
    total_bytes, reserved_bytes = _memory(nvml, handle)
    slowdown_c = try_call(nvml.nvmlDeviceGetTemperatureThreshold, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    return InventoryDevice(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=try_call(nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU",
        backend=NvmlReader.backend,
        memory_total_bytes=total_bytes,
        power_limit_w=limit_mw and or_none("power_limit_w", limit_mw / 1000),
        pci_bus_id=pci and pci.busId,
        driver=try_call(nvml.nvmlSystemGetDriverVersion),
        slowdown_c=or_none("slowdown_c", slowdown_c),
        memory_reserved_bytes=reserved_bytes,
        exclusive=try_call(nvml.nvmlDeviceGetComputeMode, handle) not in (None, nvml.NVML_COMPUTEMODE_DEFAULT),
    )


def _describe_slice(nvml: Any, handle: Any, card: InventoryDevice) -> InventoryDevice:
    total_bytes, reserved_bytes = _memory(nvml, handle)
    return replace(
        card,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=try_call(nvml.nvmlDeviceGetName, handle) or f"{card.name} MIG",
        memory_total_bytes=total_bytes,
        power_limit_w=None,  # only the card has one
        slowdown_c=None,
        memory_reserved_bytes=reserved_bytes,
        parent_uuid=card.uuid,
        slice=f"{nvml.nvmlDeviceGetGpuInstanceId(handle)}/{nvml.nvmlDeviceGetComputeInstanceId(handle)}",
    )


def _memory(nvml: Any, handle: Any) -> tuple[int | None, int]:
    """Return the total memory and the memory reserved by the driver (0 if the driver counts it as used)."""
    memory = try_call(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    if memory is None:  # drivers before 510
        memory = try_call(nvml.nvmlDeviceGetMemoryInfo, handle)
    total_bytes = memory and or_none("memory_total_bytes", int(memory.total))
    return total_bytes, int(getattr(memory, "reserved", 0))


# --- MPS --------------------------------------------------------------------------------------------------------------

_VOLTA = (7, 0)
_MPS_SERVER = "nvidia-cuda-mps"  # the kernel keeps 15 characters of a name


def find_mps_obstacle(uuid: str) -> str | None:
    """Return why MPS cannot be used on a card: its age, or another daemon; None: it can be used."""
    with _card(uuid) as (nvml, handle):
        capability = try_call(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        processes = try_call(nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle) or ()
    if handle is None:
        return "NVML does not find the device"
    if capability is not None and tuple(capability) < _VOLTA:
        return f"the device is older than Volta (compute capability {capability[0]}.{capability[1]})"
    for process in processes:
        name = try_call(Path(f"/proc/{process.pid}/comm").read_text) or ""  # it may not be visible from here
        if name.startswith(_MPS_SERVER):
            return f"another MPS daemon uses the device (its server is process {process.pid})"
    return None


def list_mps_clients(uuid: str) -> set[int]:
    """Return the processes that use a card through MPS, as far as NVML lists them."""
    with _card(uuid) as (nvml, handle):
        clients = try_call(nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, handle) or ()
    return {client.pid for client in clients}


@contextmanager
def _card(uuid: str) -> Iterator[tuple[Any, Any]]:
    """Yield NVML and its handle of a card; None: it does not find it."""
    import pynvml as nvml

    try_call(nvml.nvmlInit)
    try:
        yield nvml, try_call(nvml.nvmlDeviceGetHandleByUUID, uuid)
    finally:
        try_call(nvml.nvmlShutdown)


# --- faults ----------------------------------------------------------------------------------------------------------

_REST_S = 4.5  # events stay in the set until they are fetched; a call costs as much as two readings
_MOST_EVENTS = 16  # per poll; the rest stays in the set
_ANY_INSTANCE = 2**32 - 1


class FaultWatch:
    """Collects the faults of the watched devices; ``pending`` has those that no reading contains yet, by UUID."""

    def __init__(self) -> None:
        self.pending: defaultdict[str, list[str]] = defaultdict(list)
        self._events: Any = None  # None: not created, or events are not supported
        # UUID → address of its card, and the GPU instance of a slice (None: a card)
        self._watched: dict[str, tuple[int | None, int | None]] = {}
        self._due_s = -inf

    def watch(self, nvml: Any, uuid: str, handle: Any, *, is_slice: bool) -> None:
        """Collect the faults of this device from now on."""
        self._watched.pop(uuid, None)
        try:
            card = handle
            gpu_instance = None
            if is_slice:
                card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
                gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(handle)
            if all(_address(card) != address for address, _ in self._watched.values()):  # slices share events
                kinds = nvml.nvmlDeviceGetSupportedEventTypes(card) & nvml.nvmlEventTypeXidCriticalError
                if not kinds:
                    return
                if self._events is None:
                    self._events = nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(card, kinds, self._events)
        except Exception as error:  # broad: a device without events can still be read
            log.debug("no fault events of %s: %s", uuid, error)
        else:
            self._watched[uuid] = _address(card), gpu_instance

    def poll(self, nvml: Any, now_s: float, *, force: bool = False) -> None:
        """Collect the events of all devices if it is time; ``force``: now, after a failure and at the end."""
        if self._events is None or (now_s < self._due_s and not force):
            return
        self._due_s = now_s + _REST_S
        try:
            for _ in range(_MOST_EVENTS):
                event = nvml.nvmlEventSetWait(self._events, 0)
                for uuid, (card, gpu_instance) in self._watched.items():
                    # A slice gets its own errors and those of its card.
                    concerns_it = gpu_instance is None or event.gpuInstanceId in (gpu_instance, _ANY_INSTANCE)
                    if concerns_it and card == _address(event.device):
                        self.pending[uuid].append(f"Xid {event.eventData}")
        except nvml.NVMLError_Timeout:
            pass
        except Exception as error:  # broad: readings are more important than events
            log.debug("cannot read fault events: %s", error)

    def close(self, nvml: Any) -> None:
        """Free the event set."""
        if self._events is not None:
            try_call(nvml.nvmlEventSetFree, self._events)
        self._events = None
        self._watched.clear()
        self.pending.clear()


def _address(handle: Any) -> int | None:
    """Return the address of a card in the driver: handles of the same card have nothing else in common."""
    import ctypes  # imported here: a machine without NVIDIA devices does not need it

    return ctypes.cast(handle, ctypes.c_void_p).value


# --- SM activity and occupancy from DCGM -----------------------------------------------------------------------------

_FROM_DCGM = ("sm_activity_percent", "sm_occupancy_percent")
_DCGM_FIELDS = "1002,1003"  # DCGM_FI_PROF_SM_ACTIVE, DCGM_FI_PROF_SM_OCCUPANCY: fractions from 0 to 1
_TOO_OLD_S = 5.0
_DMON_ROW = re.compile(r"GPU\s+(\d{1,6})\s+(\S+)\s+(\S+)")
_LISTED = re.compile(r"^\|\s*(\d{1,6})\s*\|.*?Device UUID:\s*(\S+)", re.DOTALL | re.MULTILINE)

Shares = dict[str, float]  # metric → percent


@dataclass(eq=False)
class DcgmActivity:
    """Adds SM activity and occupancy to readings of cards without GPM (Volta to Ampere).

    These cards have the counters, but NVML does not show them; DCGM's host engine may, if the site runs one. One
    ``dcgmi dmon`` streams them; it starts when the first device needs it. DCGM numbers all devices of the machine, so
    ``dcgmi discovery`` maps its numbers to UUIDs. ``program`` is the path of dcgmi, None if it is not on PATH.
    """

    program: str | None
    clock: Clock
    _stream: Stream | None = None

    def __post_init__(self) -> None:
        self._uuid_of: dict[int, str] = {}
        self._latest: dict[str, tuple[float, Shares]] = {}  # by UUID

    def complete(self, uuid: str, reading: Reading) -> Reading:
        """Return the reading with the metrics that NVML lacks and dcgmi has."""
        lacking = [metric for metric in _FROM_DCGM if metric in reading.missing]
        if not lacking:
            return reading
        if self.program is not None and self._stream is None:
            self._stream = Stream(self._prepare, self._receive)
        received_s, shares = self._latest.get(uuid, (-inf, {}))
        if self.clock.monotonic_s() - received_s > _TOO_OLD_S:
            shares = {}
        reason = "dcgmi is not on PATH"
        if self._stream is not None:
            reason = f"dcgmi: {self._stream.last_message or 'no data for this device'}"
        missing = dict(reading.missing)
        values: dict[str, Any] = {}
        for metric in lacking:
            if metric in shares:
                values[metric] = shares[metric]
                del missing[metric]
            else:
                missing[metric] += f"; {reason}"
        sources = {**reading.sources, **dict.fromkeys(values, "dcgmi")}
        return replace(reading, **values, missing=missing, sources=sources)

    def close(self) -> None:
        """Stop dcgmi."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        self._latest.clear()

    def _prepare(self) -> list[str]:
        """Map DCGM's numbers to UUIDs and return the command to stream from; runs in the stream's thread."""
        assert self.program is not None
        listing = run_program([self.program, "discovery", "-l"])
        self._uuid_of = {int(number): uuid for number, uuid in _LISTED.findall(listing)}
        if not self._uuid_of:
            raise ProgramFailed("discovery lists no GPU")
        return [self.program, "dmon", "-e", _DCGM_FIELDS, "-d", "1000"]

    def _receive(self, text: str) -> bool:
        """Keep the shares of a row; return whether it is a row of a known device, or the head of a table."""
        row = _DMON_ROW.fullmatch(text)
        if row is None:
            return text.startswith(("#", "ID"))
        uuid = self._uuid_of.get(int(row[1]))
        if uuid is None:
            return False
        shares: Shares = {}
        for metric, fraction in zip(_FROM_DCGM, row.groups()[1:], strict=True):
            with suppress(ValueError, NoAnswer):  # N/A, or implausible
                shares[metric] = check_range(metric, round(float(fraction) * 100, 3))
        self._latest[uuid] = (self.clock.monotonic_s(), shares)
        return True
