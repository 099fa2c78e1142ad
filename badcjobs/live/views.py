"""Take snapshots of a run, or of this machine's devices.

A run is read only from its published databases (``run_files.py``), so this works on a login node while the tasks run
on other nodes."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from badcjobs.devices.listing import OpenedDevices, name_processes, open_devices
from badcjobs.errors import BadcjobsError, DatabaseProblem, NotHere
from badcjobs.live.run_files import ArrayOfRun, RunFiles, is_abandoned, last_job_of, read_array
from badcjobs.live.snapshot import Snapshot, Tasks, Total, add_up, has_more_to_do, is_done, run_alerts, total_of_devices
from badcjobs.model import CHARTED, AlertLimits, AskQueue, InventoryDevice, ProcessFacts, Reading, StandIn, not_asked
from badcjobs.paths import RunFolder, is_there, shell_line
from badcjobs.report.completeness import find_finish
from badcjobs.report.summary import Summary, describe_chunks, summarize
from badcjobs.run_toml import FrozenRun
from badcjobs.seams import Clock, DeviceUnreadable, Environ
from badcjobs.store.connect import grouped
from badcjobs.store.read_model import AlertFacts, DeviceFacts, JobFacts, TaskAlert, TaskFacts, Trail
from badcjobs.store.read_tasks import parse_settings, read_tasks
from badcjobs.store.run_lock import is_emulated_now, lock_file_in
from badcjobs.store.submission_record import file_in, find_idle_emulation, find_trace
from badcjobs.telemetry.alerts import Alert, AlertBook
from badcjobs.telemetry.recorder import Followed

_RUN_FOLDER_ENTRIES = ("tasks", "run.toml", "submitted.json", "job.sqlite", "logs")
_MAX_READINGS = 240  # per device
_RECENT_MS = 10_000  # a reading may lack metrics that an earlier one has
_NO_TASK = "no task is running, but work is left"
_TRY = "give the run folder (--out of run or submit)"


def open_run_view(path: Path, clock: Clock, *, confined: bool = False, ask_queue: AskQueue = not_asked) -> RunView:
    """Open a run folder, its tasks folder, a task database or a job database; raise DatabaseProblem for anything else.

    ``confined``: do not follow links that leave the run folder. ``ask_queue`` is called only while no task is running.
    """
    if not is_there(path):
        why = "badcjobs submit, or the first task that starts, creates the run folder"
        raise DatabaseProblem(f"{path} does not exist", why=why, fix=_TRY)
    if path.is_dir():
        files = RunFiles(_find_run_folder(path), None, clock, confined)
        return RunView(files, str(path), ask_queue)
    try:
        read_tasks(path)
    except DatabaseProblem as error:
        raise DatabaseProblem(error.what, why="it is not a task database or a job database", fix=_TRY) from error
    files = RunFiles(RunFolder(path.absolute().parent), path, clock, confined)
    return RunView(files, str(path))


def _find_run_folder(path: Path) -> RunFolder:
    """Return the run folder that a folder is, or whose tasks folder it is; raise DatabaseProblem for another one."""
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        line = shell_line("ls", "-ld", path)
        raise DatabaseProblem(f"{path} cannot be read", why=error.strerror, fix=line) from error
    if path.absolute().name == "tasks" and any(name.endswith(".sqlite") for name in names):
        return RunFolder(path.absolute().parent)
    if names and not names & set(_RUN_FOLDER_ENTRIES):
        why = f"it contains none of {', '.join(_RUN_FOLDER_ENTRIES)}"
        raise DatabaseProblem(f"{path} is not a run folder", why=why, fix=_TRY)
    return RunFolder(path)


@dataclass
class RunView:
    """A run folder, or one database of it."""

    files: RunFiles
    title: str
    ask_queue: AskQueue = not_asked

    def look(self, patience_s: float = math.inf) -> Snapshot:
        """Read what has changed, as far as time allows; raise DatabaseProblem if the run folder is gone."""
        files = self.files
        now_ms = files.clock.now_ms()
        unread = files.read_changes(now_ms, files.clock.monotonic_s() + patience_s)
        array = ArrayOfRun()
        if files.only is None:
            array = read_array(files)
        every = files.tasks
        newest = {task.part: task for task in sorted(every, key=lambda task: task.age)}.values()
        published = sorted((task.at(now_ms) for task in newest), key=_sort_key)
        tasks = list(array.as_submitted(published))
        if not unread:
            state = "unbegun" if is_abandoned(array, files, published) else "waiting"
            tasks = sorted([*tasks, *array.waiting(published, state)], key=_sort_key)
        devices = tuple(device for task in published for device in task.its_devices)
        is_array_listed = bool(array.indices) and not unread and all(map(_has_listed, tasks))
        total = add_up(
            tasks,
            devices,
            every,
            source_chunks=array.chunks,
            array_count=array.count,
            all_listed=files.only is not None or is_array_listed,
        )
        if not unread:
            total = self._with_resume_commands(total, array, tasks, every)
        return Snapshot(
            at_ms=now_ms,
            title=self.title,
            of_run=True,
            tasks=tuple(tasks),
            devices=devices,
            alerts=(*run_alerts(tasks), *_open_alerts(published)),
            total=total,
            remarks=self._remarks(array, every),
            unread=unread,
            files=files.many,
            merged=files.merged,
        )

    def _remarks(self, array: ArrayOfRun, every: Tasks) -> tuple[str, ...]:
        """Return what else there is to know about the files of the run."""
        remarks = [self.files.waiting, *self.files.troubles, array.trouble]
        if array.cut_short is not None:
            remarks.append(array.cut_short.what)
        if not every and not self.files.troubles:
            remarks.append("no task has published anything yet")
        return tuple(remark for remark in remarks if remark)

    def close(self) -> None:
        """Do nothing: no file is kept open."""

    def _with_resume_commands(self, total: Total, array: ArrayOfRun, tasks: Tasks, every: Tasks) -> Total:
        """Add why no task is running, and the commands that resume the run, if chunks are left."""
        if total.states.get("running") or is_done(total):
            return total
        if array.cut_short is not None:
            return replace(total, standstill=_NO_TASK, go_on=(array.cut_short.command,))

        reason = None
        if has_more_to_do(total):
            reason = _NO_TASK
        run = self.files.folder.path
        lock = lock_file_in(run)
        paths = (lock.parent, lock, file_in(run))
        outside = any(map(self.files.is_outside, paths))
        if self.files.only is None and not outside:
            if not tasks:
                idle = find_idle_emulation(run.absolute())
                if idle is None:
                    return total
                return replace(total, standstill=idle.what, go_on=(idle.command,))
            if not total.states.get("silent") and is_emulated_now(run):
                return total  # a running emulation starts the next task
            queue = self.ask_queue(run, {task.job_id for task in tasks})
            if queue is not None and (queue.waiting or queue.running):
                return replace(total, standstill=f"no task is publishing: {queue}", go_on=queue.release)
            if queue is not None and not queue.known:
                reason = reason and f"{_NO_TASK} (tasks may still be queued)"
            elif queue is not None and reason is None and set(total.states) == {"waiting"}:
                reason = "no task is running or queued, and none has started"
        if reason is None and not (total.ended_at_ms is not None and total.failed and self.files.merged):
            return total
        go_on = self._resume_commands(last_job_of(tasks) or array.job_id, tasks, every)
        return replace(total, standstill=reason, go_on=go_on)

    def _resume_commands(self, job_id: str, tasks: Tasks, every: Tasks) -> tuple[str, ...]:
        """Return commands that resume the run, the last one without Slurm; empty without a run.toml."""
        run = RunFolder(self.files.folder.path.absolute())
        logs = run.path / "logs"
        try:
            self.files.check_inside(run.run_toml, file_in(run.path), logs, *logs.glob("*.json"), *logs.glob("*.lock"))
            frozen = FrozenRun.read(run.run_toml)
        except BadcjobsError:
            return ()
        trace = find_trace(run.path, job_id)
        if frozen is None or not tasks or self.files.only is not None:
            if not trace.command:
                return ()
            return (trace.line("--again"),)
        left = [task for task in tasks if task.pending or not task.begun]
        if not left:
            left = [task for task in tasks if task.failed_for_good]
        indices = [task.array_index for task in left if not task.is_local]
        last = max(every, key=lambda task: task.age, default=None)
        settings = parse_settings(last.settings if last else None)
        return find_finish(frozen, run.path, settings, trace, indices).lines


def _open_alerts(tasks: Tasks) -> Iterator[TaskAlert]:
    """Yield the open alerts of running tasks."""
    for task in tasks:
        if task.state == "running":
            yield from (alert for alert in task.alerts if alert.is_open)


def _sort_key(task: TaskFacts) -> tuple[int, str, int, int]:
    return len(task.job_id), task.job_id, task.array_index, task.procid or 0  # job 999 before job 1000


def _has_listed(task: TaskFacts) -> bool:
    """Return whether a task has listed the chunks of its part."""
    return task.begun and bool(task.shard_count is not None or task.chunks)


# --- accounts ---------------------------------------------------------------------------------------------------------


def summarize_run(files: RunFiles, snapshot: Snapshot) -> Summary:
    """Return the summary of a run at the time of a snapshot; without findings, which need the merged job."""
    tasks = files.accounts()
    total = snapshot.total
    newest = {task.name for task in snapshot.tasks}
    latest = [task for task in tasks if task.name in newest]
    pending = min(total.left, sum(task.pending for task in latest))
    not_listed = total.left - pending  # in no task yet
    of_unknown_length = sum(task.left_of_unknown_length for task in latest)
    is_source_known = total.source_chunks is not None and total.parts is None
    if not is_source_known:
        of_unknown_length += not_listed
    facts = JobFacts(
        tasks=tuple(tasks),
        devices=tuple(device for task in tasks for device in task.its_devices),
        chunks={"done": total.done, "failed": total.failed, "pending": pending},
        audio_done_s=total.audio_done_s,
        done_of_unknown_length=sum(task.done_of_unknown_length for task in tasks),
        tries=sum(task.tries for task in tasks),
        labels=(("", None, sum(task.detections for task in tasks)),),
        audio_left_s=sum(task.audio_left_s for task in latest),
        left_of_unknown_length=of_unknown_length,
        alerts=tuple(_count_alerts(tasks)),
    )
    missing = tuple(task.array_index for task in snapshot.tasks if not task.started_at_ms)
    completeness = replace(describe_chunks(facts), missing_indices=missing)
    if is_source_known:
        completeness = replace(completeness, expected=total.chunks, not_listed=not_listed)
    return summarize(facts, completeness, now_ms=snapshot.at_ms)


def _count_alerts(tasks: Tasks) -> Iterator[AlertFacts]:
    """Yield the alerts of all tasks by kind; as in a merged job, a kind is as severe as its worst alert."""
    by_kind = grouped((alert.kind, alert) for task in tasks for alert in task.alerts)
    for kind, alerts in sorted(by_kind.items()):
        severity = min(alert.severity for alert in alerts)  # "critical" sorts before "warning"
        yield AlertFacts(kind, severity, len(alerts), still_open=sum(alert.is_open for alert in alerts))


# --- this machine -----------------------------------------------------------------------------------------------------


def open_machine_view(
    environ: Environ, clock: Clock, stand_in: StandIn, *, hostname: str, limits: AlertLimits
) -> MachineView:
    """Open every device of this machine, granted or not; raise NotHere without a GPU. The caller closes it."""
    with ExitStack() as stack:
        opened = stack.enter_context(open_devices(environ, clock, stand_in))
        if not opened.inventory:
            why = opened.trouble or opened.grant.why
            raise NotHere("this machine has no GPU", why=why, fix="give a run folder, or try --simulate 4")
        return MachineView(opened, clock, hostname, limits, stack.pop_all())


@dataclass
class MachineView:
    """The devices of this machine, and their readings since it was opened."""

    opened: OpenedDevices
    clock: Clock
    hostname: str
    limits: AlertLimits
    resources: ExitStack
    _readings: list[deque[tuple[int, Reading]]] = field(init=False)
    _processes: dict[int, tuple[ProcessFacts, ...]] = field(default_factory=dict)  # as last reported
    _started: Counter[tuple[str, str]] = field(default_factory=Counter)  # alerts by kind and severity at their start
    _book: AlertBook = field(init=False)

    def __post_init__(self) -> None:
        devices = self.opened.inventory
        self._readings = [deque(maxlen=_MAX_READINGS) for _ in devices]
        followed = [
            Followed(n, d.uuid, d.index, d.memory_total_bytes, d.power_limit_w, d.slowdown_c)
            for n, d in enumerate(devices)
        ]
        self._book = AlertBook(None, followed, self.limits, tell=self._count)

    def look(self, patience_s: float | None = None) -> Snapshot:
        """Read every device and return a snapshot."""
        now_ms = self.clock.now_ms()
        devices = [self._read(number, device, now_ms) for number, device in enumerate(self.opened.inventory)]
        good = [(number, device.reading) for number, device in enumerate(devices) if device.trouble is None]
        bad = {number: device.trouble for number, device in enumerate(devices) if device.trouble is not None}
        self._book.write(now_ms, good, bad)
        self._book.written()
        return Snapshot(
            at_ms=now_ms,
            title=self.hostname,
            of_run=False,
            devices=tuple(devices),
            alerts=tuple(self._open_alerts()),
            total=total_of_devices(devices),
        )

    def _open_alerts(self) -> Iterator[TaskAlert]:
        for alert in self._book.open_alerts:
            yield TaskAlert(
                alert.kind,
                alert.severity,
                alert.message,
                self.hostname,
                alert.started_at_ms,
                device_index=alert.device_index,
                device_uuid=alert.device_uuid,
                peak=alert.peak,
                threshold=alert.threshold,
            )

    @property
    def alerts(self) -> list[AlertFacts]:
        """The alerts since it was opened, by kind and severity."""
        still_open = Counter((alert.kind, alert.severity) for alert in self._book.open_alerts)
        keys = self._started | still_open  # an alert may have become critical
        return [AlertFacts(*key, self._started[key], still_open=still_open[key]) for key in keys]

    def _count(self, alert: Alert) -> None:
        if not alert.over:
            self._started[alert.kind, alert.severity] += 1

    def close(self) -> None:
        """Close the device reader."""
        self.resources.close()

    def _read(self, number: int, device: InventoryDevice, now_ms: int) -> DeviceFacts:
        reading = Reading()
        trouble = None
        try:
            reading = self.opened.reader.read(device.uuid)
        except DeviceUnreadable as error:
            trouble = str(error)
        if reading.processes is not None:
            self._processes[number] = name_processes(reading.processes)
        past = self._readings[number]
        recent = []
        if trouble is None:
            recent = [earlier for at_ms, earlier in reversed(past) if now_ms - at_ms <= _RECENT_MS]
        past.append((now_ms, reading))
        began_ms = past[0][0]
        step_ms = (now_ms - began_ms) // max(1, len(past) - 1)
        series = [_rounded(getattr(reading, metric) for _, reading in past) for metric in CHARTED]
        return DeviceFacts(
            task="",
            node=self.hostname,
            index=device.index,
            uuid=device.uuid,
            token="",
            name=device.name,
            backend=device.backend,
            driver=device.driver,
            memory_total_bytes=device.memory_total_bytes,
            power_limit_w=device.power_limit_w,
            read_at_ms=None if trouble else now_ms,
            reading=reading.completed(recent),
            trail=Trail(began_ms, step_ms, *series),
            processes=self._processes.get(number),
            trouble=trouble,
        )


def _rounded(values: Iterable[float | None]) -> tuple[int | None, ...]:
    return tuple(None if value is None else round(value) for value in values)


View = RunView | MachineView
