"""Looks at this machine's devices again and again: each look is one Snapshot, with what went before."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from badcjobs.devices.listing import OpenedDevices, name_processes, open_devices
from badcjobs.errors import NotHere
from badcjobs.live.snapshot import Snapshot, Total, mean_utilization, total_power_w
from badcjobs.model import AlertLimits, InventoryDevice, Reading, StandIn
from badcjobs.seams import Clock, DeviceUnreadable
from badcjobs.store.read_model import DeviceFacts, ProcessFacts, TaskAlert, Trail
from badcjobs.telemetry.alerts import AlertBook
from badcjobs.telemetry.recorder import Followed

_MOST_READINGS = 240  # per device


def open_machine_view(
    environ: Mapping[str, str], clock: Clock, stand_in: StandIn | None = None, *, hostname: str
) -> MachineView:
    """Look at every device of this machine, granted or not; raise NotHere where there is none. To be closed."""
    with ExitStack() as stack:
        sight = stack.enter_context(open_devices(environ, clock, stand_in or StandIn()))
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
        self._readings: list[deque[tuple[int, Reading]]] = [deque(maxlen=_MOST_READINGS) for _ in sight.inventory]
        self._processes: dict[int, tuple[ProcessFacts, ...]] = {}  # when they were last given
        followed = [
            Followed(n, d.uuid, d.index, d.memory_total_bytes, d.power_limit_w, d.slowdown_c)
            for n, d in enumerate(sight.inventory)
        ]
        self._book = AlertBook(None, followed, AlertLimits())

    def look(self, patience_s: float | None = None) -> Snapshot:
        """Read every device and return what is known now."""
        now_ms, node = self._clock.now_ms(), self._hostname
        devices = [self._read(number, device, now_ms) for number, device in enumerate(self._sight.inventory)]
        good = [(number, device.reading) for number, device in enumerate(devices) if device.trouble is None]
        bad = {number: device.trouble for number, device in enumerate(devices) if device.trouble is not None}
        self._book.write(now_ms, good, bad)
        self._book.written()
        return Snapshot(
            at_ms=now_ms,
            title=node,
            of_run=False,
            devices=tuple(devices),
            alerts=tuple(
                TaskAlert(
                    a.kind, a.severity, a.message, node, a.started_at_ms, None, a.device_index, a.device_uuid,
                    a.peak, a.threshold,
                )
                for a in self._book.open_alerts
            ),
            total=Total(
                devices=len(devices), utilization_percent=mean_utilization(devices), power_w=total_power_w(devices)
            ),
        )  # fmt: skip

    def close(self) -> None:
        """Give the reader back."""
        self._held.close()

    def _read(self, number: int, device: InventoryDevice, now_ms: int) -> DeviceFacts:
        reading, trouble = Reading(), None
        try:
            reading = self._sight.reader.read(device.uuid)
        except DeviceUnreadable as error:
            trouble = str(error)
        if reading.processes is not None:
            self._processes[number] = tuple(
                ProcessFacts(p.pid, p.program, p.user, p.memory_used_bytes) for p in name_processes(reading.processes)
            )
        self._readings[number].append((now_ms, reading))
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
            trail=_trail(self._readings[number]),
            processes=self._processes.get(number),
            trouble=trouble,
        )


def _trail(past: Sequence[tuple[int, Reading]]) -> Trail:
    first_ms, last_ms = past[0][0], past[-1][0]
    return Trail(
        first_ms,
        (last_ms - first_ms) // max(1, len(past) - 1),
        tuple(reading.utilization_percent for _, reading in past),
        tuple(reading.memory_used_bytes for _, reading in past),
        tuple(reading.temperature_c for _, reading in past),
        tuple(None if reading.power_w is None else round(reading.power_w) for _, reading in past),
    )
