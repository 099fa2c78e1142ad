"""Looks at this machine's devices again and again: each look is one Snapshot, with what went before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from badcjobs.devices.allocation import parse_allocation
from badcjobs.devices.listing import OpenedDevices, name_processes, open_devices
from badcjobs.errors import NotHere
from badcjobs.live.snapshot import Snapshot, Total, mean_utilization, total_power_w
from badcjobs.model import AlertLimits, InventoryDevice, Reading, StandIn
from badcjobs.seams import Clock, DeviceUnreadable
from badcjobs.store.read_model import DeviceFacts, ProcessFacts, TaskAlert, Trail
from badcjobs.telemetry.alerts import AlertBook
from badcjobs.telemetry.recorder import Followed

_MOST_READINGS = 240  # per device
_SHOWN = ("kind", "severity", "message", "started_at_ms", "peak", "threshold")


def open_machine_view(
    environ: Mapping[str, str], clock: Clock, stand_in: StandIn | None = None, *, hostname: str
) -> MachineView:
    """Look at every device of this machine, granted or not; raise NotHere where there is none. To be closed."""
    in_slurm = parse_allocation(environ, hostname="", pid=0, started_at_ms=0).in_slurm
    with ExitStack() as stack:
        sight = stack.enter_context(open_devices(environ, clock, stand_in or StandIn(), in_slurm=in_slurm))
        if not sight.inventory:
            raise NotHere(
                "there is no GPU to look at",
                why=sight.trouble or sight.grant.why,
                fix="give a run folder, or --simulate 4 to see how it looks",
            )
        return MachineView(sight, clock, hostname, stack.pop_all())


class MachineView:
    """The devices of this machine, and their readings since it was opened."""

    def __init__(self, sight: OpenedDevices, clock: Clock, hostname: str, held: ExitStack) -> None:
        self._sight = sight
        self._held = held
        self._clock = clock
        self._hostname = hostname
        self._past = {device.uuid: _Past() for device in sight.inventory}
        self._alerts = _OpenAlerts()
        followed = [
            Followed(n, d.uuid, d.index, d.memory_total_bytes, d.power_limit_w, d.slowdown_c)
            for n, d in enumerate(sight.inventory)
        ]
        self._book = AlertBook(self._alerts, followed, AlertLimits())

    def look(self, patience_s: float | None = None) -> Snapshot:
        """Read every device and return what is known now."""
        now_ms = self._clock.now_ms()
        devices = [self._read(device, now_ms) for device in self._sight.inventory]
        good = [(number, device.reading) for number, device in enumerate(devices) if device.trouble is None]
        bad = {number: device.trouble for number, device in enumerate(devices) if device.trouble is not None}
        self._book.write(now_ms, good, bad)
        self._book.written()
        return Snapshot(
            at_ms=now_ms,
            title=self._hostname,
            of_run=False,
            devices=tuple(devices),
            alerts=tuple(self._alerts.facts(self._sight.inventory, self._hostname)),
            total=Total(
                devices=len(devices), utilization_percent=mean_utilization(devices), power_w=total_power_w(devices)
            ),
        )

    def close(self) -> None:
        """Give the reader back."""
        self._held.close()

    def _read(self, device: InventoryDevice, now_ms: int) -> DeviceFacts:
        past, reading, trouble = self._past[device.uuid], Reading(), None
        try:
            reading = self._sight.reader.read(device.uuid)
        except DeviceUnreadable as error:
            trouble = str(error)
        past.take(now_ms, reading)
        return DeviceFacts(
            task="",
            node=self._hostname,
            index=device.index,
            uuid=device.uuid,
            token="",
            name=device.name,
            backend=device.backend,
            memory_total_bytes=device.memory_total_bytes,
            power_limit_w=device.power_limit_w,
            read_at_ms=None if trouble else now_ms,
            reading=reading,
            trail=past.trail,
            processes=past.processes,
            trouble=trouble,
        )


@dataclass(slots=True)
class _Past:
    """The readings of one device so far, and its processes when they were last told."""

    readings: deque[tuple[int, Reading]] = field(default_factory=lambda: deque(maxlen=_MOST_READINGS))
    processes: tuple[ProcessFacts, ...] | None = None

    def take(self, at_ms: int, reading: Reading) -> None:
        self.readings.append((at_ms, reading))
        if reading.processes is not None:
            self.processes = tuple(
                ProcessFacts(p.pid, p.program, p.user, p.memory_used_bytes) for p in name_processes(reading.processes)
            )

    @property
    def trail(self) -> Trail:
        first_ms, last_ms = self.readings[0][0], self.readings[-1][0]
        readings = [reading for _, reading in self.readings]
        return Trail(
            first_ms,
            (last_ms - first_ms) // max(1, len(readings) - 1),
            tuple(reading.utilization_percent for reading in readings),
            tuple(reading.memory_used_bytes for reading in readings),
            tuple(reading.temperature_c for reading in readings),
            tuple(None if reading.power_w is None else round(reading.power_w) for reading in readings),
        )


class _OpenAlerts:
    """Keeps the alerts that go on, instead of writing them down."""

    def __init__(self) -> None:
        self._open: dict[tuple[object, ...], Mapping[str, object]] = {}

    def write_alert(self, values: Mapping[str, object]) -> None:
        place = (values["device_id"], values["kind"], values["started_at_ms"])
        if values["ended_at_ms"] is None:
            self._open[place] = values
        else:
            self._open.pop(place, None)

    def open_alerts(self) -> Sequence[Mapping[str, object]]:
        return list(self._open.values())

    def facts(self, inventory: Sequence[InventoryDevice], node: str) -> Iterator[TaskAlert]:
        for values in self._open.values():
            device = inventory[int(str(values["device_id"]))]
            shown: dict[str, Any] = {name: values[name] for name in _SHOWN}
            yield TaskAlert(**shown, node=node, device_index=device.index, device_uuid=device.uuid)
