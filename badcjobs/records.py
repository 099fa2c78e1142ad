"""A task's records while it lives: its own database, the recorder beside it, and the one file they publish."""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from badcjobs import __version__
from badcjobs.model import Allocation, Device, TaskKey
from badcjobs.paths import LocalFolder
from badcjobs.store.live_readings import Pulse, last_reading_ms, read_pulse
from badcjobs.store.publisher import Publisher
from badcjobs.store.task_writer import TaskWriter
from badcjobs.telemetry.sidecar import Sidecar, SidecarOrder
from badcjobs.world import World

log = logging.getLogger(__name__)

_SIDECAR_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Recording:
    """How devices are to be recorded."""

    interval_s: float
    simulate: int | None
    simulate_script: str | None


@dataclass(frozen=True, slots=True)
class Closing:
    """How the records were closed."""

    ended_at_ms: int
    published: bool
    telemetry_failure: str | None


class Records:
    """Written on node-local disk, published to ``target``; the recorder publishes in our place if we are killed."""

    def __init__(
        self, key: TaskKey, target: Path, allocation: Allocation, world: World, *, started_at_ms: int, mark: str
    ) -> None:
        self.local = LocalFolder.create(allocation.local_dir, key)
        self.writer = TaskWriter(self.local.wrapper_file, key)
        self._key = key
        self._target = target
        self._allocation = allocation
        self._world = world
        self._started_at_ms = started_at_ms
        self._mark = mark
        self._publisher: Publisher | None = None
        self._sidecar: Sidecar | None = None

    def begin(self, *, engine: str | None, telemetry: bool) -> None:
        """Write the task's own row."""
        self.writer.begin_task(
            self._allocation,
            started_at_ms=self._started_at_ms,
            pid=self._world.pid,
            version=__version__,
            engine=engine,
            telemetry=telemetry,
        )

    def start_publishing(self, every_s: float) -> None:
        """Publish now, so that a file is there from the beginning, and from now on every so often."""
        files = [self.local.wrapper_file, self.local.recorder_file]
        self._publisher = Publisher(files, self._target, base_interval_s=every_s)
        self._publisher.start()

    def start_recorder(self, devices: tuple[Device, ...], how: Recording, *, wait_s: float = 0.0) -> None:
        """Start the recorder as a process of its own; it follows the same devices by UUID.

        ``wait_s``: wait so long for its first sample, so that what comes next is recorded from its beginning.
        """
        script = None if how.simulate_script is None else str(self._world.cwd / how.simulate_script)
        self._sidecar = Sidecar(
            SidecarOrder(
                mark=self._mark,
                task_id=self._key.task_id,
                wrapper_pid=self._world.pid,
                devices=[(self.writer.device_id(device), device.uuid) for device in devices],
                interval_s=how.interval_s,
                simulate=how.simulate,
                simulate_script=script,
                started_at_ms=self._started_at_ms,
                asked_at_ms=self._world.clock.now_ms(),
                recorder_file=str(self.local.recorder_file),
                wrapper_file=str(self.local.wrapper_file),
                publish_to=str(self._target),
                local_folder=str(self.local.path),
            )
        )
        if wait_s > 0:
            self._sidecar.wait_until_ready(wait_s)

    @property
    def recorder_started(self) -> bool:
        """Whether there is (or was) a recorder."""
        return self._sidecar is not None

    def look_after_recorder(self) -> None:
        """Restart a dead recorder, once."""
        if self._sidecar is not None:
            self._sidecar.check()

    def publish_soon(self) -> None:
        """Publish without waiting for the next time, and without making the caller wait."""
        if self._publisher is not None:
            self._publisher.publish_soon()

    def pulse(self, last_s: float) -> Pulse:
        """Return how the machine has been lately."""
        return read_pulse(self.local.recorder_file, self._world.clock.now_ms() - int(last_s * 1000))

    def close(self, *, exit_code: int, verdict: str) -> Closing:
        """Stop the recorder, write the end, publish a last time; what could not be published stays on this node."""
        failure = self._stop_recorder()
        ended_at_ms = self._world.clock.now_ms()
        try:
            self.writer.end_task(ended_at_ms=ended_at_ms, exit_code=exit_code, verdict=verdict)
        except sqlite3.Error as error:
            log.warning("the end of the task cannot be written: %s", error)  # a full disk; what was there is published
        published = False
        if self._publisher is not None:
            self._publisher.stop()
            published = self._publisher.publish_now(
                {"ended_at_ms": ended_at_ms, "exit_code": exit_code, "verdict": verdict}
            )
        if self._sidecar is not None:
            self._sidecar.release(_SIDECAR_PATIENCE_S)
        if published:
            self.local.remove()
        return Closing(ended_at_ms, published, failure)

    def _stop_recorder(self) -> str | None:
        """Return why telemetry is not complete; None: it is."""
        if self._sidecar is None:
            return None
        self._sidecar.stop(_SIDECAR_PATIENCE_S)
        failure = self._sidecar.failure
        if failure is not None:
            self._note_telemetry_failure(failure)
        return failure

    def _note_telemetry_failure(self, failure: str) -> None:
        try:
            since_ms = last_reading_ms(self.local.recorder_file) or self._started_at_ms
            self.writer.add_gap(None, since_ms, self._world.clock.now_ms(), failure)
        except sqlite3.Error as error:
            log.warning("the gap in the telemetry cannot be written: %s", error)
