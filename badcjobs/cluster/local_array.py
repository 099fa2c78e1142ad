"""Run the tasks of an emulated array: start them as devices become free, follow them, restart those that ask for it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from badcjobs.cluster.local_devices import DevicePool
from badcjobs.cluster.local_task import Attempt, LocalJob
from badcjobs.cluster.local_watch import Watcher
from badcjobs.cluster.outcomes import DoneChunks, made_progress
from badcjobs.cluster.scheduler import CANCELLED, COMPLETED, FAILED, REQUEUED, TaskOutcome
from badcjobs.cluster.wait_for_job import Tell
from badcjobs.errors import ExitCode
from badcjobs.model import Device, StandIn
from badcjobs.paths import RunFolder
from badcjobs.seams import Clock
from badcjobs.store.atomic_write import replace_text
from badcjobs.store.submission_record import PENDING, RUNNING, rows_in
from badcjobs.task.startup import NO_RESTART_VARIABLE
from badcjobs.words import count as count_of

LockRun = Callable[[Path], None]  # locks a run folder

_TICK_S = 0.05
_TRY_LOCKED_S = 1.0  # while other runs use the devices
_TELL_S = 30.0  # between two lines about the chunks, or about GPUs that others use
_WRITE_EVERY_S = 0.5  # the file of states
_KILL_WAIT_S = 30.0  # as Slurm's default


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """How to emulate."""

    stand_in: StandIn = field(default_factory=StandIn)
    share_gpus: bool = False  # several tasks on one device
    max_requeues: int = 0  # of a task that exits with 75; Slurm itself does not start it again
    kill_wait_s: float = _KILL_WAIT_S
    again: bool = False  # the user states that the Slurm job of the same folder has ended
    chunks: int = 0  # of all tasks; 0: not known before they begin

    @property
    def options(self) -> list[str]:
        """The same as options of ``badcjobs submit``."""
        options = []
        if self.share_gpus:
            options.append("--config=submit.share_gpus=true")
        if self.kill_wait_s != _KILL_WAIT_S:
            options.append(f"--config=submit.kill_wait_s={self.kill_wait_s:g}")
        return options


@dataclass(slots=True)
class TaskRow(TaskOutcome):
    """One array task, from its submission to its end."""

    restarts: int = 0
    devices: tuple[Device, ...] = ()
    ends: list[dict[str, Any]] = field(default_factory=list)  # of all attempts that have ended

    def to_dict(self) -> dict[str, object]:
        """Return the row as ``--json`` shows it."""
        more = {"restarts": self.restarts, "attempts": self.ends, "note": self.note or None}
        return {**TaskOutcome.to_dict(self), **more}


class Timer:
    """Is due at once, then after each interval."""

    def __init__(self, clock: Clock, every_s: float) -> None:
        self._clock = clock
        self._every_s = every_s
        self._next_s = 0.0

    def is_due(self) -> bool:
        """Say whether the interval is over; if so, begin the next one."""
        now_s = self._clock.monotonic_s()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._every_s
        return True


class LocalArray:
    """All tasks of one job, in one thread: PDEATHSIG ends a task when the thread that started it ends."""

    def __init__(
        self, job: LocalJob, pool: DevicePool, settings: LocalSettings, tell: Tell, lock: LockRun | None = None
    ) -> None:
        self.job = job
        self.run_folder: RunFolder | None = None  # None: no task has named it yet
        self.rows = [TaskRow(index, PENDING, None, job.log(index)) for index in job.request.indices]
        self._pool = pool
        self._settings = settings
        self._tell = tell
        self._lock_run = lock
        self._clock = job.world.clock
        self._waiting = list(self.rows)
        self._running: list[tuple[TaskRow, Attempt]] = []
        self._stopping = 0  # 1: no task is started, 2: all tasks are being stopped, 3: killed
        self._mark = f"{job.job_id}-{os.getpid()}"  # in the environment of every process of this job
        self._next_lock_s = 0.0
        self._waiting_timer = Timer(self._clock, _TELL_S)
        self._chunk_timer = Timer(self._clock, _TELL_S)
        self._write_timer = Timer(self._clock, _WRITE_EVERY_S)
        self._chunks = DoneChunks()
        self._chunk_line = "0 chunks done"  # the last one; this one says nothing
        self._stale = False

    def use_run_folder(self, path: Path) -> None:
        """Lock this run folder and use it."""
        if self._lock_run is not None:
            self._lock_run(path)
        self.run_folder = RunFolder(path)

    def run(self) -> list[TaskRow]:
        """Run everything to its end."""
        self._watch = Watcher(self._mark, self._settings.kill_wait_s, self.job.folder, self.job.world.environ)
        if self.run_folder is not None:
            self._watch.keep_run(self.run_folder.path)
        try:
            while self._running or (self._waiting and not self._stopping):
                self._handle_signals()
                for row, attempt in list(self._running):
                    has_ended = attempt.look()
                    self._look_for_run_folder(row)
                    if has_ended:
                        self._finish_attempt(row, attempt)
                self._start_what_fits()
                self._write_states()
                self._tell_chunks()
                self._clock.sleep(_TICK_S)
            for row in self._waiting:
                self._change(row, CANCELLED, "never started: the emulation was stopped")
        except BaseException:
            self._watch.release()  # it ends all processes
            raise
        finally:
            self._write_states(last=True)
        shutil.rmtree(self.job.folder, ignore_errors=True)
        self._watch.dismiss()
        return self.rows

    def _handle_signals(self) -> None:
        """Pass a warning on; the first ending signal stops all tasks in an orderly way, the second kills them."""
        stop = self.job.world.stop
        if stop.warned_by is not None and self._is_new(1, stop.warned_by, "starting no new task, passing it on to {}"):
            for _, attempt in self._running:
                attempt.warn(stop.warned_by)
        if stop.ended_by is not None and self._is_new(2, stop.ended_by, "stopping {}; a second signal kills them"):
            for _, attempt in self._running:
                attempt.end(CANCELLED)
        if stop.cut_short_by is not None and self._is_new(3, stop.cut_short_by, "killing {}"):
            for _, attempt in self._running:
                attempt.kill(CANCELLED)

    def _is_new(self, stopping: int, signum: signal.Signals, action: str) -> bool:
        if self._stopping >= stopping:
            return False
        self._stopping = stopping
        self._tell(f"{signum.name}: {action.format(count_of(len(self._running), 'task'))}")
        return True

    # --- from PENDING to RUNNING -------------------------------------------------------------------------------------

    @property
    def _most_at_a_time(self) -> int:
        request = self.job.request
        most = request.parallel or len(self.rows)
        if not request.gpus or self._pool.share:
            # Tasks with their own devices are never more than the devices: too few cores only make them slower.
            most = min(most, self.job.world.cores // self.job.cores)
        return most

    def _start_what_fits(self) -> None:
        gpus = self.job.request.gpus
        if gpus and self._clock.monotonic_s() < self._next_lock_s:
            return
        while self._waiting and not self._stopping and len(self._running) < self._most_at_a_time:
            devices = self._pool.take(gpus)
            if devices is None:
                self._tell_waiting()
                return
            if self.run_folder is not None:
                self.run_folder.stop_waiting()
            row = self._waiting.pop(0)
            row.devices = devices
            self._start(row)

    def _tell_waiting(self) -> None:
        """Tell which other runs use the devices, at most every 30 s."""
        if not self._pool.refusals:
            return
        self._next_lock_s = self._clock.monotonic_s() + _TRY_LOCKED_S
        if not self._waiting_timer.is_due():
            return
        why = f"waiting for GPUs that other runs use: {'; '.join(self._pool.refusals)}"
        self._tell(why)
        if self.run_folder is not None:
            self.run_folder.tell_waiting(why)

    def _start(self, row: TaskRow) -> None:
        mark = f"{self._mark}/{self.job.task_name(row.index)}.r{row.restarts}"
        try:
            lock_files = self._pool.lock_files(row.devices)
            process = self.job.start(row.index, row.restarts, row.devices, mark, lock_files)
        except OSError as problem:
            self._give_back(row)
            self._change(row, FAILED, f"cannot be started: {problem}")
            return
        attempt = Attempt(process, mark, self._clock, self.job.request, self._settings.kill_wait_s)
        self._running.append((row, attempt))
        notes = []
        if row.restarts:
            notes.append(f"restart {row.restarts}")
        if row.devices:
            notes.append("on " + ", ".join(f"GPU {device.token}" for device in row.devices))
        self._change(row, RUNNING, " ".join(notes))

    # --- from RUNNING to an end --------------------------------------------------------------------------------------

    def _finish_attempt(self, row: TaskRow, attempt: Attempt) -> None:
        self._running.remove((row, attempt))
        self._give_back(row)
        row.exit_code = attempt.exit_code
        state = attempt.ended_by or (FAILED if row.exit_code else COMPLETED)
        note = f"exit code {row.exit_code} after {self._clock.monotonic_s() - attempt.started_s:.0f} s"
        if row.exit_code == ExitCode.RUN_ME_AGAIN and state != CANCELLED:
            why_not = self._why_no_requeue(row)
            if why_not is None:
                self._requeue(row, attempt, note)
                return
            note += f"; not restarted: {why_not}"
        if row.exit_code:
            note += f"; log: {row.log}"
        self._write_down(row, attempt, state)
        self._change(row, state, note)

    def _requeue(self, row: TaskRow, attempt: Attempt, note: str) -> None:
        self._write_down(row, attempt, attempt.ended_by or REQUEUED)
        row.restarts += 1
        self._waiting.append(row)
        if attempt.ended_by is not None:
            note = f"{attempt.ended_by}, {note}"
        self._change(row, PENDING, f"{note}: will be restarted")

    def _why_no_requeue(self, row: TaskRow) -> str | None:
        """Return why a task with work left is not restarted; None: it is restarted."""
        if self._stopping:
            return "the emulation is being stopped"
        if "no-requeue" in self.job.request.given:
            return "--no-requeue"
        if row.restarts >= self._settings.max_requeues:
            return f"[submit] requeues = {self._settings.max_requeues}"
        if (self.job.attempt_folder(row.index, row.restarts) / NO_RESTART_VARIABLE).exists():
            return "another task has its part of the source"
        if self.run_folder is not None:
            attempt = f"{self.job.job_id}_{row.index or 0}.r{row.restarts}"
            if made_progress(self.run_folder.tasks, attempt) is False:
                return "no chunk was done"
        return None

    def _write_down(self, row: TaskRow, attempt: Attempt, state: str) -> None:
        """Record the end of an attempt, also for merge; then remove its folder."""
        now_s = self._clock.now_ms() // 1000
        end = {
            "restart": row.restarts,
            "state": state,  # REQUEUED: it was restarted
            "exit_code": attempt.exit_code,
            "slurm_exit_code": attempt.slurm_exit_code,
            "started_at_s": now_s - round(self._clock.monotonic_s() - attempt.started_s),
            "ended_at_s": now_s,
        }
        row.ends.append(end)
        self.job.write_end(row.index, end)
        shutil.rmtree(self.job.attempt_folder(row.index, row.restarts), ignore_errors=True)

    def _give_back(self, row: TaskRow) -> None:
        self._pool.give_back(row.devices)
        row.devices = ()

    # --- the run folder ----------------------------------------------------------------------------------------------

    def _look_for_run_folder(self, row: TaskRow) -> None:
        """Use the run folder of the first task that names it."""
        if self.run_folder is not None:
            return
        for database in self.job.databases(row.index, row.restarts):
            self.use_run_folder(database.parent.parent)
            self._watch.keep_run(database.parent.parent)
            return

    # --- messages and the file of states -----------------------------------------------------------------------------

    def _change(self, row: TaskRow, state: str, note: str) -> None:
        row.state = state
        row.note = note
        self._stale = True
        waiting = sum(row.state == PENDING for row in self.rows)
        running = sum(row.state == RUNNING for row in self.rows)
        ended = len(self.rows) - waiting - running
        name = " ".join(filter(None, [self.job.task_name(row.index), state, note]))
        self._tell(f"{name}; {ended} of {len(self.rows)} ended, {running} running, {waiting} waiting")

    def _tell_chunks(self) -> None:
        """Tell how many chunks are done in the databases that the tasks have published, if that has changed."""
        if self.run_folder is None or not self._chunk_timer.is_due():
            return
        done = self._chunks.count(self.run_folder.tasks.glob("[!.]*.sqlite"))
        line = f"{count_of(done, 'chunk')} done"
        if self._settings.chunks:
            line = f"{done:,} of {count_of(self._settings.chunks, 'chunk')} done"
        if line != self._chunk_line:
            self._chunk_line = line
            self._tell(f"job {self.job.job_id}: {line}; {len(self._running)} running, {len(self._waiting)} waiting")

    def _write_states(self, *, last: bool = False) -> None:
        """Write the states to their file, at most twice a second, and at the end."""
        is_due = last or (self._stale and self._write_timer.is_due())
        if self.run_folder is None or not is_due:
            return
        self._stale = False
        rows = [row.to_dict() for row in self.rows]
        states = {"job_id": self.job.job_id, "pid": os.getpid(), "ended": last, "tasks": rows}
        with suppress(OSError):  # a full disk must not stop the work
            replace_text(rows_in(self.run_folder.path, str(self.job.job_id)), json.dumps(states))
