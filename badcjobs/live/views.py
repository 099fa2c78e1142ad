"""Take snapshots of a run, or of this machine's devices.

A run is read only from its published databases (``run_files.py``), so this works on a login node while the tasks run
on other nodes."""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.devices.listing import OpenedDevices, name_processes, open_devices
from badcjobs.errors import BadcjobsError, DatabaseProblem, NotHere
from badcjobs.live.run_files import ArrayOfRun, RunFiles, is_abandoned, last_job_of, read_array
from badcjobs.live.snapshot import Snapshot, Tasks, Total, add_up, is_done, run_alerts, standstill, total_of_devices
from badcjobs.model import CHARTED, AlertLimits, AskQueue, InventoryDevice, ProcessFacts, Reading, StandIn, not_asked
from badcjobs.paths import RunFolder, is_there, shell_line
from badcjobs.report.completeness import finish_lines
from badcjobs.report.summary import Summary, summarize
from badcjobs.run_toml import FrozenRun
from badcjobs.seams import Clock, DeviceUnreadable
from badcjobs.store.connect import grouped
from badcjobs.store.read_model import AlertFacts, Completeness, DeviceFacts, JobFacts, TaskAlert, TaskFacts, Trail
from badcjobs.store.read_tasks import parse_settings, read_tasks
from badcjobs.store.run_lock import is_emulated_now, lock_file_in
from badcjobs.store.submission_record import file_in, find_idle_emulation, find_trace
from badcjobs.telemetry.alerts import Alert, AlertBook
from badcjobs.telemetry.books import process_words
from badcjobs.telemetry.recorder import Followed

_RUN_FOLDER_ENTRIES = ("tasks", "run.toml", "submitted.json", "job.sqlite", "logs")
_MAX_READINGS = 240  # per device
_MORE_PATIENCE = 4  # times as long as the first look
_RECENT_MS = 10_000  # a reading may lack metrics that an earlier one has
_TRY = "give the run folder (--out of run or submit)"


def open_run_view(path: Path, clock: Clock, *, confined: bool = False, ask_queue: AskQueue = not_asked) -> RunView:
    """Open a run folder, its tasks folder, a task database or a job database; raise DatabaseProblem for anything else.

    ``confined``: do not follow links that leave the run folder. ``ask_queue`` is called only while no task is running.
    """
    if not is_there(path):
        why = "badcjobs submit, or the first task that starts, creates the run folder"
        raise DatabaseProblem(f"{path} does not exist", why=why, fix=_TRY)
    if path.is_dir():
        try:
            names = set(os.listdir(path))  # noqa: PTH208 - names, not paths
        except OSError as error:
            line = shell_line("ls", "-ld", path)
            raise DatabaseProblem(f"{path} cannot be read", why=error.strerror, fix=line) from error
        is_tasks = path.absolute().name == "tasks" and any(name.endswith(".sqlite") for name in names)
        if names and not is_tasks and not names & set(_RUN_FOLDER_ENTRIES):
            why = f"it contains none of {', '.join(_RUN_FOLDER_ENTRIES)}"
            raise DatabaseProblem(f"{path} is not a run folder", why=why, fix=_TRY)
        folder = RunFolder(path.absolute().parent if is_tasks else path)
        return RunView(RunFiles(folder, None, clock, confined), clock, title=str(path), ask_queue=ask_queue)
    try:
        read_tasks(path)
    except DatabaseProblem as error:
        raise DatabaseProblem(error.what, why="it is not a task database or a job database", fix=_TRY) from error
    return RunView(RunFiles(RunFolder(path.absolute().parent), path, clock, confined), clock, title=str(path))


@dataclass(slots=True)
class RunView:
    """A run folder, or one database of it."""

    files: RunFiles
    clock: Clock
    title: str
    ask_queue: AskQueue = not_asked
    _read_until_s: float | None = None  # when reading stopped for lack of time; None: everything has been read

    def look(self, patience_s: float | None = None) -> Snapshot:
        """Read what has changed and return a snapshot; raise DatabaseProblem if the run folder is gone."""
        files, now_ms, began_s = self.files, self.clock.now_ms(), self.clock.monotonic_s()
        until_s = math.inf if patience_s is None else began_s + patience_s
        if patience_s is not None and self._read_until_s is not None:
            # Only the first look at a large run is short: each one costs time for all that was read before.
            until_s = began_s + max(_MORE_PATIENCE * patience_s, 2 * (began_s - self._read_until_s))
        unread = files.read_changes(now_ms, until_s)
        self._read_until_s = self.clock.monotonic_s() if unread else None
        every, array = files.tasks, ArrayOfRun() if files.only else read_array(files)
        newest = {task.part: task for task in sorted(every, key=lambda task: task.age)}.values()
        lines = sorted((task.at(now_ms) for task in newest), key=_sort_key)
        tasks = list(array.as_submitted(lines))
        if not unread:
            state = "unbegun" if is_abandoned(array, files, lines) else "waiting"
            tasks = sorted([*tasks, *array.waiting(lines, state)], key=_sort_key)
        devices = tuple(device for task in lines for device in task.its_devices)
        total = add_up(
            tasks,
            devices,
            every,
            source_chunks=array.chunks,
            array_count=array.count,
            alone=files.only is not None,
            all_listed=bool(array.indices)
            and not unread
            and all(task.begun and (task.shard_count is not None or task.chunks) for task in tasks),
        )
        remarks = [files.waiting, *files.troubles, array.trouble, array.cut_short and array.cut_short.what]
        if not every and not files.troubles:
            remarks.append("no task has published anything yet")
        return Snapshot(
            at_ms=now_ms,
            title=self.title,
            of_run=True,
            tasks=tuple(tasks),
            devices=devices,
            alerts=(
                *run_alerts(tasks),
                *(a for task in lines if task.state == "running" for a in task.alerts if a.is_open),
            ),
            total=total if unread else self._with_resume_commands(total, array, tasks, every),
            remarks=tuple(remark for remark in remarks if remark),
            unread=unread,
            files=files.many,
            merged=files.merged,
        )

    def close(self) -> None:
        """Do nothing: no file is kept open."""

    def _with_resume_commands(self, total: Total, array: ArrayOfRun, tasks: Tasks, every: Tasks) -> Total:
        """Add why no task is running, and the commands that resume the run, if chunks are left."""
        reason, run, cut_short = standstill(total), self.files.folder.path, array.cut_short
        if cut_short is not None and not total.states.get("running") and not is_done(total):
            return replace(total, standstill=reason or "no task is running", go_on=(cut_short.command,))
        lock = lock_file_in(run)
        readable = self.files.only is None and not any(map(self.files.is_outside, (lock.parent, lock, file_in(run))))
        if not tasks and self.files.only is None:
            over = find_idle_emulation(run.absolute()) if readable else None
            return total if over is None else replace(total, standstill=over.what, go_on=(over.command,))
        if total.ended_at_ms is not None and total.failed and reason is None and self.files.merged:
            return replace(total, go_on=self._resume_commands(last_job_of(tasks), tasks, every))
        if reason is None and set(total.states) != {"waiting"}:
            return total
        if not total.states.get("silent") and readable and is_emulated_now(run):
            return total  # a running emulation starts the next task
        queue = self.ask_queue(run, {task.job_id for task in tasks}) if readable else None
        if queue is not None and (queue.waiting or queue.running):
            now = "no task has published anything lately" if queue.running else "no task is running"
            return replace(total, standstill=f"{now}: {queue}", go_on=queue.release)
        if reason is None and (queue is None or not queue.known):
            return total
        reason = reason or "no task is running or queued, and none has started"
        unsure = " (unless still queued)" if queue is not None and not queue.known else ""
        go_on = self._resume_commands(last_job_of(tasks) or array.job_id, tasks, every)
        return replace(total, standstill=f"{reason}{unsure}", go_on=go_on)

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
            return (trace.line("--again"),) if trace.command else ()
        left = [task for task in tasks if task.pending or not task.begun] or [t for t in tasks if t.failed_for_good]
        without_slurm = any(task.is_local for task in left)
        indices = () if without_slurm else [task.array_index for task in left]
        last = max(every, key=lambda task: task.age, default=None)
        settings = parse_settings(last.settings if last else None)
        return finish_lines(frozen, run.path, settings, trace, indices)


def _sort_key(line: TaskFacts) -> tuple[int, str, int, int]:
    return len(line.job_id), line.job_id, line.array_index, line.procid or 0  # job 999 before job 1000


# --- accounts ---------------------------------------------------------------------------------------------------------


def summarize_run(files: RunFiles, snapshot: Snapshot) -> Summary:
    """Return the summary of a run at the time of a snapshot; without findings, which need the merged job."""
    tasks, total = files.accounts(), snapshot.total
    newest = {task.name for task in snapshot.tasks}
    latest = [task for task in tasks if task.name in newest]
    left = max(0, (total.chunks or 0) - total.settled)
    pending = min(left, sum(task.pending for task in latest))  # the others are not in any task yet
    about_left = pending if total.chunks_known else max(pending, (total.source_chunks or 0) - total.settled)
    alerts = grouped((alert.kind, alert) for task in tasks for alert in task.alerts)
    facts = JobFacts(
        tasks=tuple(tasks),
        devices=tuple(device for task in tasks for device in task.its_devices),
        chunks={"done": total.done, "failed": total.failed, "pending": pending},
        audio_done_s=total.audio_done_s,
        done_of_unknown_length=sum(task.done_of_unknown_length for task in tasks),
        tries=sum(task.tries for task in tasks),
        failed=(),
        labels=(("", None, sum(task.detections for task in tasks)),),
        gaps=(),
        file_remarks=(),
        audio_left_s=sum(task.audio_left_s for task in latest),
        # Includes chunks that no task has listed yet, while their number is unknown.
        left_of_unknown_length=max(0, about_left - sum(task.pending - task.left_of_unknown_length for task in latest)),
        alerts=tuple(
            # As in a merged job, a kind is as severe as its worst alert; "critical" sorts before "warning".
            AlertFacts(
                kind, min(a.severity for a in found), len(found), 0, 0.0, None, None, "", sum(a.is_open for a in found)
            )
            for kind, found in sorted(alerts.items())
        ),
    )
    known = total.chunks_known and total.chunks is not None
    completeness = Completeness(
        expected=total.chunks if known else None,
        why_unknown=None if known else "some tasks have not listed their chunks yet",
        listed=total.done + total.failed + pending,
        done=total.done,
        failed=total.failed,
        poison=0,
        pending=pending,
        elsewhere=0,
        not_listed=left - pending if known else None,
    )
    missing = [task.array_index for task in snapshot.tasks if not task.started_at_ms]
    return summarize(facts, missing, completeness, now_ms=snapshot.at_ms)


# --- this machine -----------------------------------------------------------------------------------------------------


def open_machine_view(
    environ: Mapping[str, str],
    clock: Clock,
    stand_in: StandIn | None = None,
    *,
    hostname: str,
    limits: AlertLimits | None = None,
) -> MachineView:
    """Open every device of this machine, granted or not; raise NotHere without a GPU. The caller closes it."""
    with ExitStack() as stack:
        opened = stack.enter_context(open_devices(environ, clock, stand_in or StandIn()))
        if not opened.inventory:
            why, fix = opened.trouble or opened.grant.why, "give a run folder, or try --simulate 4"
            raise NotHere("this machine has no GPU", why=why, fix=fix)
        return MachineView(opened, clock, hostname, limits or AlertLimits(), stack.pop_all())


class MachineView:
    """The devices of this machine, and their readings since it was opened."""

    def __init__(
        self, opened: OpenedDevices, clock: Clock, hostname: str, limits: AlertLimits, resources: ExitStack
    ) -> None:
        self._opened = opened
        self._resources = resources
        self._clock = clock
        self._hostname = hostname
        self._readings: list[deque[tuple[int, Reading]]] = [deque(maxlen=_MAX_READINGS) for _ in opened.inventory]
        self._processes: dict[int, tuple[ProcessFacts, ...]] = {}  # as last reported
        followed = [
            Followed(n, d.uuid, d.index, d.memory_total_bytes, d.power_limit_w, d.slowdown_c)
            for n, d in enumerate(opened.inventory)
        ]
        self._started = Counter[tuple[str, str]]()  # alerts by kind and severity at their start
        self._book = AlertBook(None, followed, limits, tell=self._count, describe=self._describe)

    def look(self, patience_s: float | None = None) -> Snapshot:
        """Read every device and return a snapshot."""
        now_ms, node = self._clock.now_ms(), self._hostname
        devices = [self._read(number, device, now_ms) for number, device in enumerate(self._opened.inventory)]
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
            total=total_of_devices(devices),
        )  # fmt: skip

    @property
    def alerts(self) -> list[AlertFacts]:
        """The alerts since it was opened, by kind and severity."""
        still_open = Counter((alert.kind, alert.severity) for alert in self._book.open_alerts)
        keys = self._started | still_open  # an alert may have become critical
        return [AlertFacts(*key, self._started[key], 0, 0, None, None, "", still_open[key]) for key in keys]

    def _count(self, alert: Alert) -> None:
        if not alert.over:
            self._started[alert.kind, alert.severity] += 1

    def close(self) -> None:
        """Close the device reader."""
        self._resources.close()

    def _describe(self, pid: int) -> str:
        named = (process for listed in self._processes.values() for process in listed if process.pid == pid)
        process = next(named, ProcessFacts(pid, None, None, None))
        return process_words(pid, process.program, process.user)

    def _read(self, number: int, device: InventoryDevice, now_ms: int) -> DeviceFacts:
        reading, trouble = Reading(), None
        try:
            reading = self._opened.reader.read(device.uuid)
        except DeviceUnreadable as error:
            trouble = str(error)
        if reading.processes is not None:
            self._processes[number] = name_processes(reading.processes)
        past = self._readings[number]
        recent = [one for at_ms, one in reversed(past) if now_ms - at_ms <= _RECENT_MS and trouble is None]
        past.append((now_ms, reading))
        columns = ([getattr(reading, metric) for _, reading in past] for metric in CHARTED)
        series = [tuple(None if value is None else round(value) for value in column) for column in columns]
        return DeviceFacts(
            task="",
            node=self._hostname,
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
            trail=Trail(past[0][0], (now_ms - past[0][0]) // max(1, len(past) - 1), *series),
            processes=self._processes.get(number),
            trouble=trouble,
        )


View = RunView | MachineView
