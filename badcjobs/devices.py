"""Lists devices with a fresh reading of each: what ``badcjobs gpus`` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from badcjobs.allocation.slurm_variables import parse_allocation
from badcjobs.allocation.visible_devices import Grant, resolve_devices
from badcjobs.gpu.choose import open_reader
from badcjobs.model import Device, InventoryDevice, Reading, StandIn
from badcjobs.seams import Clock, DeviceUnreadable, GpuReader, ReaderUnavailable


@dataclass(frozen=True, slots=True)
class DeviceNow:
    """A device and its state at this moment; None where nobody knows."""

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


@dataclass(frozen=True, slots=True)
class Listing:
    """Devices, and why these."""

    devices: tuple[DeviceNow, ...]
    why: str

    def to_dict(self) -> dict[str, object]:
        """Return the JSON document of ``badcjobs gpus --json``."""
        return {"devices": [asdict(device) for device in self.devices], "why": self.why}


def list_granted(
    environ: Mapping[str, str], clock: Clock, *, stand_in: StandIn | None = None, everything: bool = False
) -> Listing:
    """Return the devices that this process may use, or (``everything``) all there are."""
    allocation = parse_allocation(environ, hostname="", pid=0, started_at_ms=0)
    reader = open_reader(stand_in or StandIn(), clock, clock.now_ms(), environ.get("PATH"))
    trouble = ""
    inventory: Sequence[InventoryDevice] | None
    try:
        inventory = reader.inventory()
    except ReaderUnavailable as error:
        inventory, trouble = None, f"; {error}"
    grant = resolve_devices(environ, inventory, in_slurm=allocation.in_slurm)
    devices = [_now(device, reader) for device in grant.devices]
    if everything:
        devices += [_now(device, reader, granted=False) for device in _others(grant, inventory or ())]
    reader.close()
    return Listing(tuple(devices), grant.why + trouble)


def _others(grant: Grant, inventory: Sequence[InventoryDevice]) -> list[Device]:
    mine = {device.uuid for device in grant.devices}
    return [
        Device("", "not granted to this task", d.index, d.uuid, d.name, d.backend, d.memory_total_bytes)
        for d in inventory
        if d.uuid not in mine
    ]


def _now(device: Device, reader: GpuReader, *, granted: bool = True) -> DeviceNow:
    reading = Reading()
    if device.uuid is not None:
        try:
            reading = reader.read(device.uuid)
        except DeviceUnreadable:
            pass  # its state is unknown, and says so by being None
    total, used = device.memory_total_bytes, reading.memory_used_bytes
    free = None if total is None or used is None else total - used
    return DeviceNow(
        index=device.index,
        uuid=device.uuid,
        token=device.token or None,
        name=device.name,
        memory_total_bytes=total,
        memory_free_bytes=free,
        utilization_percent=reading.utilization_percent,
        temperature_c=reading.temperature_c,
        power_w=reading.power_w,
        score=score_of(free, total, reading.utilization_percent),
        backend=device.backend,
        granted=granted,
        why=device.why,
    )


def score_of(free_bytes: int | None, total_bytes: int | None, utilization_percent: int | None) -> float | None:
    """Return how good a device is to take: 0.6 · free memory + 0.4 · idleness, 0 to 1; None when unknown."""
    if free_bytes is None or not total_bytes or utilization_percent is None:
        return None
    return round(0.6 * free_bytes / total_bytes + 0.4 * (1 - utilization_percent / 100), 4)
