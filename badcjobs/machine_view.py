"""Looks at this machine's devices again and again: each look is one Frame of the live view, with what went before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from badcjobs.allocation.slurm_variables import parse_allocation
from badcjobs.devices import Sight, open_sight
from badcjobs.errors import NotHere
from badcjobs.model import AlertLimits, InventoryDevice, Reading, StandIn
from badcjobs.monitor.frame import (
    AlertLine,
    DeviceLine,
    Frame,
    ProcessLine,
    Total,
    Trail,
)
from badcjobs.monitor.totals import mean_utilization, total_power_w
from badcjobs.process_names import name_processes
from badcjobs.seams import Clock, DeviceUnreadable
from badcjobs.telemetry.alerts import AlertBook
from badcjobs.telemetry.followed import Followed

_MOST_READINGS = 240  # per device
_SHOWN = ("kind", "severity", "message", "started_at_ms", "peak", "threshold")


def open_machine_view(
    environ: Mapping[str, str], clock: Clock, stand_in: StandIn | None = None, *, hostname: str
) -> MachineView:
    """Look at every device of this machine, granted or not; raise NotHere where there is none. To be closed."""
    in_slurm = parse_allocation(environ, hostname="", pid=0, started_at_ms=0).in_slurm
    with ExitStack() as stack:
        sight = stack.enter_context(open_sight(environ, clock, stand_in or StandIn(), in_slurm=in_slurm))
        if not sight.inventory:
            raise NotHere(
                "there is no GPU to look at",
                why=sight.trouble or sight.grant.why,
                fix="give a run folder, or --simulate 4 to see how it looks",
            )
        return MachineView(sight, clock, hostname, stack.pop_all())


class MachineView:
    """The devices of this machine, and their readings since it was opened."""

    def __init__(self, sight: Sight, clock: Clock, hostname: str, held: ExitStack) -> None:
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

    def look(self, patience_s: float | None = None) -> Frame:
        """Read every device and return what is known now."""
        now_ms = self._clock.now_ms()
        lines, good, bad = [], [], {}
        for number, device in enumerate(self._sight.inventory):
            reading, trouble = self._read(device)
            if trouble is None:
                good.append((number, reading))
            else:
                bad[number] = trouble
            lines.append(self._line(device, reading, trouble, now_ms))
        self._book.write(now_ms, good, bad)
        self._book.written()
        return Frame(
            at_ms=now_ms,
            title=self._hostname,
            of_run=False,
            devices=tuple(lines),
            alerts=tuple(self._alerts.lines(self._sight.inventory, self._hostname)),
            total=Total(devices=len(lines), utilization_percent=mean_utilization(lines), power_w=total_power_w(lines)),
        )

    def close(self) -> None:
        """Give the reader back."""
        self._held.close()

    def _read(self, device: InventoryDevice) -> tuple[Reading, str | None]:
        try:
            return self._sight.reader.read(device.uuid), None
        except DeviceUnreadable as error:
            return Reading(), str(error)

    def _line(self, device: InventoryDevice, reading: Reading, trouble: str | None, now_ms: int) -> DeviceLine:
        past = self._past[device.uuid]
        past.take(now_ms, reading)
        return DeviceLine(
            node=self._hostname,
            index=device.index,
            uuid=device.uuid,
            token=None,
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
    processes: tuple[ProcessLine, ...] | None = None

    def take(self, at_ms: int, reading: Reading) -> None:
        self.readings.append((at_ms, reading))
        if reading.processes is not None:
            self.processes = tuple(
                ProcessLine(p.pid, p.program, p.user, p.memory_used_bytes) for p in name_processes(reading.processes)
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

    def lines(self, inventory: Sequence[InventoryDevice], node: str) -> Iterator[AlertLine]:
        for values in self._open.values():
            device = inventory[int(str(values["device_id"]))]
            shown: dict[str, Any] = {name: values[name] for name in _SHOWN}
            yield AlertLine(**shown, node=node, device_index=device.index, device_uuid=device.uuid)
