"""The records of a task: its database, the recorder next to it, the file of both; ``badcjobs record``."""

from __future__ import annotations

import json
import logging
import math
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from badcjobs.devices.allocation import EndTime, requested_memory_bytes
from badcjobs.devices.listing import OpenedDevices, open_devices
from badcjobs.errors import BadInput, ExitCode, NotHere
from badcjobs.locks import read_boot_id
from badcjobs.model import METRICS, AlertHooks, AlertLimits, Allocation, Device, MemoryHeld, StandIn, TaskKey
from badcjobs.paths import LocalFolder, shell_line
from badcjobs.processes import TASK_MARK
from badcjobs.seams import Clock, DeviceUnreadable
from badcjobs.store.atomic_write import try_to_write
from badcjobs.store.live_files import LiveHalf, last_reading_ms, left_behind, read_device_state, read_memory_peaks
from badcjobs.store.live_folder import Owner, choose_live_folder, hold
from badcjobs.store.publish import TEXT_FORMS, Publisher
from badcjobs.store.task_writer import TaskWriter
from badcjobs.task.startup import World, find_devices, read_allocation, task_mark
from badcjobs.telemetry.alert_command import AlertCommand
from badcjobs.telemetry.alerts import Alert
from badcjobs.telemetry.books import RECORDING_MARK
from badcjobs.telemetry.recorder import Followed, SidecarOrder
from badcjobs.telemetry.sidecar import Sidecar
from badcjobs.telemetry.usage import UsageReader, UsageWatch
from badcjobs.version import __version__

log = logging.getLogger(__name__)

_SIDECAR_TIMEOUT_S = 5.0
_SNAPSHOT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class RecordingOptions:
    """How to record devices."""

    interval_s: float
    stand_in: StandIn
    limits: AlertLimits
    on_alert: Callable[[Alert], None] | None = None  # called when an alert starts or ends, from check_recorder
    hooks: AlertHooks = field(default_factory=AlertHooks)  # the alert command


@dataclass(eq=False)
class Records:
    """Writes live files and publishes them to ``target``; if we are killed, the recorder publishes for us."""

    key: TaskKey
    target: Path
    allocation: Allocation
    world: World
    _: KW_ONLY
    live_mode: str
    recorder: Sidecar | None = None  # None: it was not started
    telemetry_failure: str | None = None  # known after ``close``
    claim_file: str | None = None  # the recorder gives it back if we are killed
    _publisher: Publisher | None = None
    _calls: AlertCommand | None = None
    _usage: UsageWatch | None = None

    def __post_init__(self) -> None:
        world = self.world
        target = self.target
        self.started_at_ms = self.ended_at_ms = self.allocation.started_at_ms or world.clock.now_ms()
        self.mark = task_mark(self.allocation, world)
        self._live = choose_live_folder(self.live_mode, self.allocation.local_dir, self.key, target)
        self.local = self._live.folder
        shared = self._live.shared
        self._lock = hold(
            self.local,
            Owner(str(target), self.mark, shared, world.hostname, read_boot_id()),
        )
        try:
            self.writer = TaskWriter(self.local.wrapper_file, self.key, shared=shared)
        except BaseException:
            self.local.remove()
            raise
        self._readings = RecorderHalf(self.local, target, shared)
        self.readings_at_hand = self._readings.uri_at_hand

    def begin(self, *, engine: str | None, telemetry: bool, end: EndTime | None = None) -> None:
        """Write the row of the task, and log where the live files are."""
        log.info("%s", self._live.description)
        if self._live.is_risky:
            log.warning("WAL on a shared filesystem: a reader on another machine may destroy the database")
        self.writer.begin_task(
            self.allocation,
            started_at_ms=self.started_at_ms,
            pid=self.world.pid,
            version=__version__,
            engine=engine,
            telemetry=telemetry,
            memory_limit_bytes=requested_memory_bytes(self.allocation.facts),
            time_limit_s=None if end is None else (end.at_ms - self.started_at_ms) / 1000,
        )
        self.writer.write_meta(self._live.to_meta())

    def start_publishing(self, every_s: float) -> None:
        """Publish now, so that a file exists from the beginning, and then at this interval."""
        self._publisher = Publisher(
            (self.writer.half, self._readings.uri),
            self.target,
            base_interval_s=every_s,
            workplace=self.local.path,
        )
        self._publisher.start()

    def start_recorder(self, devices: tuple[Device, ...], how: RecordingOptions) -> Sidecar:
        """Start the recorder as a separate process, and return it; it records the same devices by UUID."""
        world = self.world
        listeners = [] if how.on_alert is None else [how.on_alert]
        if how.hooks.command is not None:
            self._calls = AlertCommand(how.hooks, self.key.name, world.clock, world.environ, world.cwd)
            listeners.append(self._calls.add)
        followed = [
            Followed(self.writer.device_id(d), d.uuid, d.index, d.memory_total_bytes, d.power_limit_w, d.slowdown_c)
            for d in devices
        ]
        order = SidecarOrder(
            mark=self.mark,
            own_marks=[f"{name}={self.mark}" for name in (TASK_MARK, RECORDING_MARK)],
            task_id=self.key.task_id,
            wrapper_pid=world.pid,
            devices=followed,
            interval_s=how.interval_s,
            stand_in=how.stand_in,
            search_path=world.environ.get("PATH"),
            sysfs=world.environ.get("SYSFS_PATH"),
            started_at_ms=self.started_at_ms,
            asked_at_ms=world.clock.now_ms(),
            publish_to=str(self.target),
            local_folder=str(self.local.path),
            shared=self._live.shared,
            limits=how.limits,
            claim_file=self.claim_file,
        )
        self.recorder = self._readings.recorder = Sidecar(order, listeners)
        return self.recorder

    def start_usage(self) -> None:
        """Start a thread that reads the CPU, memory and disk use of our processes; check_recorder writes it."""
        self._usage = UsageWatch(UsageReader(self.world.pid), self.world.clock)

    def check_recorder(self, *, work_waits: bool | None = None) -> None:
        """Restart a dead recorder, once, and write the use of our own processes; call this regularly.

        ``work_waits``: whether an idle device is worth an alert.
        """
        if self.recorder is not None:
            self.recorder.check()
            if work_waits is not None:
                self.recorder.set_work_waits(work_waits)
        self._write_usage()

    def _write_usage(self) -> None:
        if self._usage is None:
            return
        try:
            for reading, at_ms in self._usage.take_readings():
                if self.recorder is not None:  # without telemetry it is only watched
                    self.writer.add_usage(reading, at_ms)
        except sqlite3.Error as error:
            log.warning("the CPU and memory use of our processes cannot be written: %s", error)
            self._usage = None  # warn once; the next chunk meets the same error

    def memory_held(self) -> MemoryHeld | None:
        """Return the main memory of our own processes at the last reading; None: not known."""
        return None if self._usage is None else self._usage.memory_held

    def publish_soon(self) -> None:
        """Publish in the background without waiting for the interval."""
        if self._publisher is not None:
            self._publisher.publish_soon()

    def device_state(self, device_id: int | None, before_ms: int) -> str | None:
        """Return the last reading of a device before a failure; None: not known."""
        if device_id is None:
            return None
        return read_device_state(self.readings_at_hand(), device_id, before_ms)

    def memory_peaks(self, last_s: float) -> dict[int, int]:
        """Return the peak memory in use on each device over the last seconds, where it is known."""
        return read_memory_peaks(self.readings_at_hand(), self.world.clock.now_ms() - int(last_s * 1000))

    @property
    def wall_s(self) -> float:
        """Seconds from its start to its end, as in the database: the last publication does not count."""
        return (self.ended_at_ms - self.started_at_ms) / 1000

    def close(self, *, exit_code: int, verdict: str) -> bool:
        """Stop the recorder, write the end, publish a last time; return False if that failed: the live files stay."""
        if self._publisher is not None:
            self._publisher.stop()
        if self.recorder is not None:
            self.recorder.stop(_SIDECAR_TIMEOUT_S, last_copy=self._readings.last_copy)
            self._write_gaps(self.recorder)
        if self._usage is not None:
            self._usage.finish()
            self._write_usage()

        self.ended_at_ms = self.world.clock.now_ms()
        end = {"ended_at_ms": self.ended_at_ms, "exit_code": exit_code, "verdict": verdict}
        with _warned("the end of the task"):  # also given to the publication
            self.writer.update_task(**end)
        published = self._publisher is not None and self._publisher.publish_now(end)
        if self.recorder is not None:
            self.recorder.release()
        if published:  # at once: Slurm may be about to kill us
            self._readings.beside_target.unlink(missing_ok=True)
            self.local.remove()

        if self.recorder is not None:
            self.recorder.wait(_SIDECAR_TIMEOUT_S)
        if self._calls is not None:
            self._calls.finish()  # last: the results are safe, even if the alert command hangs
        return published

    def _write_gaps(self, recorder: Sidecar) -> None:
        """Write where the telemetry is not complete, and why."""
        now_ms = self.world.clock.now_ms()
        gaps = recorder.unwritten.gaps(now_ms)
        if recorder.failure is not None:
            gaps.append((last_reading_ms(self.readings_at_hand()) or self.started_at_ms, now_ms, recorder.failure))
        with _warned("the gap in the telemetry"):
            for from_ms, to_ms, reason in gaps:
                self.writer.add_gap(None, from_ms, to_ms, reason)
        self.telemetry_failure = recorder.failure or recorder.unwritten.text


@contextmanager
def _warned(what: str) -> Iterator[None]:
    """Log a warning, and continue, if the disk refuses a write."""
    try:
        yield
    except sqlite3.Error as error:
        log.warning("%s cannot be written: %s", what, error)


@dataclass(eq=False)
class RecorderHalf:
    """The recorder's half of a publication: its file if it is safe to open, else a snapshot that the recorder makes.

    It is not safe on a shared filesystem while the recorder writes. It is not possible if the node-local folder was
    removed: then the file has no name any more, but the recorder still has it open.
    """

    local: LocalFolder
    target: Path
    shared: bool
    recorder: Sidecar | None = None  # None: it was not started yet

    @property
    def beside_target(self) -> Path:
        """The file for readings that have no other place."""
        return self.target.with_name(f".{self.target.name}.recorder.tmp")

    def uri(self, workplace: Path) -> str | None:
        """Return the URI of the recorder's rows, with a new snapshot if needed; None: there are none."""
        if self.recorder is not None and not self.recorder.over and self._needs_copy:
            self.recorder.request_snapshot(self._copy, _SNAPSHOT_TIMEOUT_S)
        return self._at_hand(workplace)

    def uri_at_hand(self) -> str | None:
        """Return the URI of recent readings without waiting for the recorder; None: there are none."""
        try:
            return self._at_hand(self.local.path)
        except (OSError, sqlite3.Error):
            return None

    def _at_hand(self, workplace: Path) -> str | None:
        if self._needs_copy:
            return LiveHalf(self._copy, "sealed")(workplace)
        return left_behind(self.local.recorder_file, shared=self.shared)(workplace)

    @property
    def last_copy(self) -> Path | None:
        """Where the recorder must copy its readings before it closes a file without a name; None: not needed."""
        return self.beside_target if self._is_removed else None

    @property
    def _needs_copy(self) -> bool:
        """Whether only a copy can be opened: the folder was removed, or the recorder still writes to a shared file."""
        if self.recorder is None or self.recorder.over:
            return self._is_removed
        return self._is_removed or self.shared

    @property
    def _copy(self) -> Path:
        return self.last_copy or self.local.recorder_snapshot

    @property
    def _is_removed(self) -> bool:
        return not self.local.path.exists()


# --- badcjobs record: the recorder alone, or around any command -----------------------------------------------------


_PUBLISH_EVERY_S = 30.0
_FIRST_SAMPLE_TIMEOUT_S = 10.0
_TICK_S = 0.1
_ENDINGS = (".sqlite", ".db", *TEXT_FORMS)


def run_record(
    out: Path,
    options: RecordingOptions,
    world: World,
    *,
    command: Sequence[str],
    duration_s: float | None,
    overwrite: bool,
    live_mode: str,
) -> dict[str, Any]:
    """Record until the command ends, the time is over or a signal arrives; return the JSON document of ``--json``."""
    _refuse_own_source(options.stand_in.replay, out)
    check_target(out, overwrite=overwrite)
    needs_device = None if command else shell_line("badcjobs", "record", "--out", out, "--simulate", "2")
    records, devices = start_recording(out.absolute(), world, options, live_mode=live_mode, needs_device=needs_device)
    if command:
        records.start_usage()

    def tick() -> float:
        records.check_recorder()
        return _TICK_S

    exit_code = _follow(command, duration_s, world, records.mark, tick)
    published = records.close(exit_code=exit_code, verdict="done" if exit_code == 0 else "failed")
    records.writer.close()
    if not command and (records.telemetry_failure or not published):
        exit_code = ExitCode.DATABASE  # recording was the only purpose
    files = "on" if published else f"not published; the files stay in {records.local.path}"
    return {
        "exit_code": int(exit_code),
        "out": str(out),
        "devices": len(devices),
        "wall_s": records.wall_s,
        "telemetry": records.telemetry_failure or files,
    }


def stream_samples(
    emit: Callable[[str], None],
    options: RecordingOptions,
    world: World,
    *,
    command: Sequence[str],
    duration_s: float | None,
) -> int:
    """Emit a JSON line per device and instant, until the command ends, the time is over or a signal arrives.

    ``emit`` raises BrokenPipeError when its reader is gone; a command then continues. Return the exit code of the
    command, whose own output goes to stderr. Nothing is stored.
    """
    with open_devices(world.environ, world.clock, options.stand_in) as sight:
        if not sight.grant.devices:
            fix = "badcjobs record --out - --simulate 2"
            raise NotHere("there is no GPU to record", why=sight.trouble or sight.grant.why, fix=fix)
        emit_due = _emitter(sight, emit, world.clock, options.interval_s)
        try:
            return _follow(
                command,
                duration_s,
                world,
                task_mark(read_allocation(world), world),
                emit_due,
                2,
            )
        except BrokenPipeError as error:
            return 0 if isinstance(error.__cause__, BrokenPipeError) else int(ExitCode.DATABASE)


def _emitter(sight: OpenedDevices, emit: Callable[[str], None], clock: Clock, interval_s: float) -> Callable[[], float]:
    """Return a function that emits the due samples of all devices, and returns the seconds until the next are due."""
    start_s = clock.monotonic_s()
    due_s = start_s
    troubles: set[str] = set()  # each is reported once

    def emit_due() -> float:
        nonlocal due_s
        now_s = clock.monotonic_s()
        if now_s >= due_s:
            due_s = now_s + interval_s - (now_s - start_s) % interval_s
            now_ms = clock.now_ms()
            for device in sight.grant.devices:
                emit_sample(device, now_ms)
        return max(0.0, due_s - clock.monotonic_s())

    def emit_sample(device: Device, now_ms: int) -> None:
        try:
            reading = sight.reader.read(device.uuid or "")
        except DeviceUnreadable as error:
            trouble = f"{device.uuid or device.token} cannot be read: {error}"
            if trouble not in troubles:
                troubles.add(trouble)
                log.warning("%s", trouble)
            return
        at = datetime.fromtimestamp(now_ms / 1000, timezone.utc).isoformat(timespec="milliseconds")[:-6] + "Z"
        row = {"at": at, "at_ms": now_ms, "device_index": device.index, "uuid": device.uuid, "name": device.name}
        emit(json.dumps(row | {metric: getattr(reading, metric) for metric in METRICS}))

    return emit_due


def start_recording(
    target: Path,
    world: World,
    options: RecordingOptions,
    *,
    live_mode: str = "auto",
    needs_device: str | None = None,
) -> tuple[Records, tuple[Device, ...]]:
    """Record the devices of this process into ``target``; return after the first sample.

    Without a device, record the machine alone or, if ``needs_device`` is given, raise NotHere with that line to paste.
    """
    allocation = read_allocation(world)
    grant = find_devices(world, options.stand_in)
    if not grant.devices and needs_device is not None:
        raise NotHere("there is no GPU to record", why=grant.why, fix=needs_device)
    if not grant.devices:
        log.warning("no GPU to record (%s): recording only CPU and memory", grant.why)
    records = Records(
        allocation.key,
        target,
        allocation,
        world,
        live_mode=live_mode,
    )
    records.begin(engine=None, telemetry=True)
    records.writer.add_devices(grant.devices)
    records.writer.update_task(devices=len(grant.devices), workers=0)
    records.start_publishing(_PUBLISH_EVERY_S)
    records.start_recorder(grant.devices, options).wait_until_ready(_FIRST_SAMPLE_TIMEOUT_S)
    return records, grant.devices


def _follow(
    command: Sequence[str],
    duration_s: float | None,
    world: World,
    mark: str,
    tick: Callable[[], float],  # returns the seconds until it must be called again
    stdout: int | None = None,
) -> int:
    """Call ``tick`` until the command ends, and return its exit code; without a command, until a signal arrives."""
    end_s = math.inf
    if duration_s is not None:
        end_s = world.clock.monotonic_s() + duration_s
    while not command:
        if world.stop.requested or world.clock.monotonic_s() >= end_s:  # both are a normal end
            return 0
        wait_s = min(_TICK_S, tick())
        world.clock.sleep(min(wait_s, max(0.0, end_s - world.clock.monotonic_s())))

    try:
        child = subprocess.Popen(command, env={**world.environ, RECORDING_MARK: mark}, stdout=stdout)
    except OSError as error:
        log.error("%s could not be started: %s", command[0], error)
        return 127 if isinstance(error, FileNotFoundError) else 126
    stop = world.stop
    forwarded = {None, signal.SIGINT}  # a Ctrl-C reaches it directly: it is in our process group
    while child.poll() is None:
        wait_s = _TICK_S
        with suppress(BrokenPipeError):  # the reader of a stream is gone; the command continues
            wait_s = min(_TICK_S, tick())
        for number in (stop.warned_by, stop.ended_by, stop.cut_short_by):
            if number is not None and number not in forwarded:
                forwarded.add(number)
                child.send_signal(number)
        if world.clock.monotonic_s() >= end_s:
            end_s = math.inf
            child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(wait_s)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _refuse_own_source(replay: str | None, out: Path) -> None:
    if replay is not None and out.exists() and Path(replay).exists() and out.samefile(replay):
        raise BadInput(
            f"{out} is the recording that --simulate plays",
            why="it would be overwritten before it is read",
            fix=f"the same command with --out {out.with_stem(out.stem + '-again')}",
        )


def check_target(out: Path, *, overwrite: bool) -> None:
    """Refuse a target that cannot be written, or that exists."""
    if out.suffix not in _ENDINGS:
        raise BadInput(
            f"{out} has an unknown extension {out.suffix!r}",
            why=f"known extensions: {', '.join(_ENDINGS)}",
            fix=f"write to {out.parent / (out.stem or 'recording')}.sqlite",
        )
    try:
        if out.exists() and not overwrite:
            raise BadInput(
                f"{out} already exists",
                why="recordings are not overwritten without --force",
                fix="another name, or --force (overwrite=True)",
            )
        if not out.absolute().parent.is_dir():
            raise BadInput(f"the folder of {out} does not exist", fix=shell_line("mkdir", "-p", out.parent))
        try_to_write(out)
    except OSError as error:
        why = f"no file can be created there: {error.strerror or error}"
        raise BadInput(f"{out} cannot be written", why=why, fix=f"write to ~/{out.name[-40:]}") from error
