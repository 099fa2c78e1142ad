"""List devices with their current state, as ``badcjobs gpus`` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

from badcjobs.devices.allocation import VISIBLE, Grant, as_device, is_in_slurm, resolve_devices
from badcjobs.devices.choose import NoReader, open_reader
from badcjobs.model import Device, InventoryDevice, ProcessFacts, ProcessReading, Reading, StandIn, load_word
from badcjobs.seams import Clock, DeviceUnreadable, Environ, GpuReader, ReaderUnavailable


def name_processes(readings: Sequence[ProcessReading]) -> tuple[ProcessFacts, ...]:
    """Return the processes with user and program name, both None for a pid that is not visible in this container."""
    import psutil  # imported here: most callers do not list processes

    facts = []
    for reading in readings:
        user = program = None
        with suppress(psutil.Error, OSError, ValueError):  # ended, in another namespace, or an invalid pid
            process = psutil.Process(reading.pid)
            user = process.username()
            program = process.name()
        facts.append(ProcessFacts(reading.pid, program, user, reading.memory_used_bytes))
    return tuple(facts)


@dataclass(frozen=True)
class DeviceNow:
    """A device and its current state; None: not available."""

    index: int | None
    uuid: str | None
    token: str | None
    name: str | None
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    utilization_percent: int | None
    temperature_c: int | None
    power_w: float | None
    score: float | None
    backend: str
    granted: bool
    why: str
    pin: str | None  # its name for CUDA_VISIBLE_DEVICES (AMD: ROCR_…); None: not granted
    vendor: str
    parent_uuid: str | None  # the card of a MIG slice
    trouble: str | None  # why it cannot be read
    missing: Mapping[str, str]  # metric → why it has no value
    processes: tuple[ProcessFacts, ...] | None  # None: not requested, or not available
    load: str | None  # the utilization in a word: idle, light, moderate or heavy


@dataclass(frozen=True)
class Listing:
    """Devices, the reason for the choice, and the reader."""

    devices: tuple[DeviceNow, ...]
    why: str
    backend: str
    backend_why: str
    skipped: tuple[DeviceNow, ...] = ()  # better ones that --free could not choose; ``why``: locked, or too busy

    def to_dict(self) -> dict[str, object]:
        """Return the JSON document of ``badcjobs gpus --json``; docker and apptainer select its granted devices."""
        granted = [device for device in self.devices if device.granted]
        return {**asdict(self), **container_options(granted)}


def container_options(devices: Sequence[DeviceNow]) -> dict[str, str | None]:
    """Return what shows a container only these devices, ready for a shell; None: it cannot select them.

    ``docker`` is its option; ``apptainer`` is a variable for ``apptainer exec --nv`` (AMD: ``--rocm``).
    """
    options: dict[str, str | None] = {"docker": None, "apptainer": None}
    pins = ",".join(device.pin or "" for device in devices)
    vendor = devices[0].vendor if devices else "none"  # of one vendor; only the kernel lists several
    if vendor == "nvidia":
        # Docker splits the option at commas, unless its value has quotes of its own.
        options["docker"] = f"--gpus '\"device={pins}\"'"
    if vendor in VISIBLE:
        options["apptainer"] = f"APPTAINERENV_{VISIBLE[vendor]}={pins}"
    return options


class OpenedDevices(NamedTuple):
    """An open reader, the devices of this machine, and those granted to this process."""

    reader: GpuReader
    inventory: tuple[InventoryDevice, ...]
    grant: Grant
    trouble: str | None  # why no device can be read

    @property
    def read_by(self) -> str:
        """What reads the devices, and why; or why nothing does."""
        return self.trouble or f"read through {self.reader.backend}: {self.reader.why}"

    def now(self) -> list[DeviceNow]:
        """Read the granted devices."""
        return [_read_now(device, self.reader) for device in self.grant.devices]


@contextmanager
def open_devices(environ: Environ, clock: Clock, stand_in: StandIn) -> Iterator[OpenedDevices]:
    """Open a reader and find the granted devices; a simulation starts now."""
    reader = open_reader(stand_in, clock, clock.now_ms(), environ.get("PATH"), environ.get("SYSFS_PATH"))
    inventory = None
    trouble = None
    with closing(reader):
        try:
            inventory = tuple(reader.inventory())
        except ReaderUnavailable as error:
            trouble = str(error)
            reader = NoReader(trouble)
        grant = resolve_devices(environ, inventory, in_slurm=is_in_slurm(environ))
        yield OpenedDevices(reader, inventory or (), grant, trouble)


def list_granted(environ: Environ, clock: Clock, stand_in: StandIn, *, everything: bool = False) -> Listing:
    """Return the devices granted to this process, or (``everything``) all devices, with their processes."""
    with open_devices(environ, clock, stand_in) as opened:
        devices = [_read_now(device, opened.reader, processes=everything) for device in opened.grant.devices]
        if everything:
            devices += _read_others(opened)
        why = opened.grant.why
        if opened.trouble:
            why += f"; {opened.trouble}"
        return Listing(tuple(devices), why, opened.reader.backend, opened.reader.why)


def _read_others(opened: OpenedDevices) -> Iterator[DeviceNow]:
    """Read the devices that are not granted."""
    granted = {device.uuid for device in opened.grant.devices}
    in_mig_mode = {device.parent_uuid for device in opened.inventory}
    for device in opened.inventory:
        if device.uuid in granted:
            continue
        why = "not granted to this task"
        if device.uuid in in_mig_mode:
            why = "in MIG mode: its slices are the devices"
        yield _read_now(as_device("", device, why), opened.reader, processes=True)


def _read_now(device: Device, reader: GpuReader, *, processes: bool = False) -> DeviceNow:
    granted = device.token != ""
    reading = Reading()
    trouble = None
    try:
        reading = reader.read(device.uuid or "")  # without a reader no UUID is known
    except DeviceUnreadable as error:
        trouble = str(error)
    total_bytes = device.memory_total_bytes
    free_bytes = None
    if total_bytes is not None and reading.memory_used_bytes is not None:
        free_bytes = max(0, total_bytes - reading.memory_used_bytes - device.memory_reserved_bytes)
    listed = None
    if processes and reading.processes is not None:
        listed = name_processes(reading.processes)
    return DeviceNow(
        index=device.index,
        uuid=device.uuid,
        token=device.token or None,
        name=device.name,
        memory_total_bytes=total_bytes,
        memory_free_bytes=free_bytes,
        utilization_percent=reading.utilization_percent,
        temperature_c=reading.temperature_c,
        power_w=reading.power_w,
        score=score_of(free_bytes, total_bytes, reading.utilization_percent),
        backend=device.backend,
        granted=granted,
        why=device.why,
        pin=device.pin if granted else None,
        vendor=device.vendor,
        parent_uuid=device.parent_uuid,
        trouble=trouble,
        missing=dict(reading.missing),
        processes=listed,
        load=load_word(reading.utilization_percent),
    )


def score_of(free_bytes: int | None, total_bytes: int | None, utilization_percent: int | None) -> float | None:
    """Return how free a device is, from 0 to 1: 0.6 · free memory + 0.4 · idle share; None: unknown."""
    if free_bytes is None or not total_bytes or utilization_percent is None:
        return None
    return round(0.6 * free_bytes / total_bytes + 0.4 * (1 - utilization_percent / 100), 4)
