"""Run the tasks of an emulated array: start them as devices become free, follow them, restart those that ask for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from badcjobs.cluster.local_devices import DevicePool
from badcjobs.cluster.local_task import Attempt, LocalJob, TaskRow
from badcjobs.cluster.local_watch import Watcher
from badcjobs.cluster.scheduler import CANCELLED, COMPLETED, FAILED, REQUEUED, count_done, made_progress
from badcjobs.cluster.wait_for_job import Tell
from badcjobs.errors import ExitCode
from badcjobs.paths import RunFolder
from badcjobs.seams import Clock
from badcjobs.store.atomic_write import replace_text
from badcjobs.store.submission_record import PENDING, RUNNING, rows_in
from badcjobs.task.startup import NO_RESTART_VARIABLE
from badcjobs.words import count as count_of

LockRun = Callable[[Path], None]  # locks a run folder

_TICK_S = 0.05
_TELL_S = 30.0  # between two lines about the chunks, or about GPUs that others use
_WRITE_EVERY_S = 0.5  # the file of states
_WARNED = 1  # the steps of stopping: no task is started, then all tasks are stopped, then killed
_ENDED = 2
_STEPS = {
    _WARNED: "starting no new task, passing it on to {}",
    _ENDED: "stopping {}; a second signal kills them",
    _ENDED + 1: "killing {}",
}


@dataclass
class Timer:
    """Is due at once, then after each interval."""

    clock: Clock
    every_s: float
    next_s: float = 0.0

    def is_due(self) -> bool:
        """Say whether the interval is over; if so, begin the next one."""
        now_s = self.clock.monotonic_s()
        if now_s < self.next_s:
            return False
        self.next_s = now_s + self.every_s
        return True


@dataclass
class LocalArray:
    """All tasks of one job, in one thread: PDEATHSIG ends a task when the thread that started it ends."""

    job: LocalJob
    pool: DevicePool
    tell: Tell
    lock_run: LockRun
    run_folder: RunFolder | None  # None: no task has named it yet

    def __post_init__(self) -> None:
        self.rows = [TaskRow(index, PENDING, None, self.job.log(index)) for index in self.job.indices]
        self._clock = self.job.world.clock
        self._waiting = list(self.rows)
        self._running: list[Attempt] = []
        self._stopping = 0  # the last step of stopping
        self._waiting_timer = Timer(self._clock, _TELL_S)
        self._chunk_timer = Timer(self._clock, _TELL_S)
        self._write_timer = Timer(self._clock, _WRITE_EVERY_S)
        self._chunk_line = "0 chunks done"  # the last one; this one says nothing
        self._stale = False

    @property
    def most_at_a_time(self) -> int:
        """How many tasks may run at a time, without regard to devices."""
        most = self.job.parallel or len(self.rows)
        if self.job.gpus and not self.pool.share:
            return most  # too few cores only make them slower
        return min(most, self.job.world.cores // self.job.cores)

    def run(self) -> None:
        """Run everything to its end."""
        job = self.job
        self._watch = Watcher(job.mark, job.settings.kill_wait_s, job.folder, job.world.environ)
        if self.run_folder is not None:
            self._watch.keep_run(self.run_folder.path)
        try:
            while self._running or (self._waiting and not self._stopping):
                self._handle_signals()
                for attempt in list(self._running):
                    has_ended = attempt.look()
                    self._look_for_run_folder(attempt)
                    if has_ended:
                        self._finish_attempt(attempt)
                self._start_what_fits()
                self._write_states()
                self._tell_chunks()
                self._clock.sleep(_TICK_S)
            for row in self._waiting:
                self._change(row, CANCELLED, "never started: the emulation was stopped")
        finally:
            self._write_states(last=True)
            self._watch.release()

    def _handle_signals(self) -> None:
        """Pass a warning on; the first ending signal stops all tasks in an orderly way, the second kills them."""
        stop = self.job.world.stop
        for step, signum in enumerate((stop.warned_by, stop.ended_by, stop.cut_short_by), 1):
            if signum is None or self._stopping >= step:
                continue
            self._stopping = step
            self.tell(f"{signum.name}: {_STEPS[step].format(count_of(len(self._running), 'task'))}")
            for attempt in self._running:
                if step == _WARNED:
                    attempt.warn(signum)
                elif step == _ENDED:
                    attempt.end(CANCELLED)
                else:
                    attempt.kill(CANCELLED)

    # --- from PENDING to RUNNING -------------------------------------------------------------------------------------

    def _start_what_fits(self) -> None:
        while self._waiting and not self._stopping and len(self._running) < self.most_at_a_time:
            devices = self.pool.take(self.job.gpus)
            if devices is None:
                self._tell_waiting()
                return
            if self.run_folder is not None:
                self.run_folder.stop_waiting()
            row = self._waiting.pop(0)
            try:
                attempt = Attempt(self.job, row, devices, self.pool.lock_files(devices))
            except OSError as problem:
                self.pool.give_back(devices)
                self._change(row, FAILED, f"cannot be started: {problem}")
                continue
            self._running.append(attempt)
            notes = []
            if row.restarts:
                notes.append(f"restart {row.restarts}")
            if devices:
                notes.append("on " + ", ".join(f"GPU {device.token}" for device in devices))
            self._change(row, RUNNING, " ".join(notes))

    def _tell_waiting(self) -> None:
        """Tell which other runs use the devices, at most every 30 s."""
        if not self.pool.refusals or not self._waiting_timer.is_due():
            return
        why = f"waiting for GPUs that other runs use: {'; '.join(self.pool.refusals)}"
        self.tell(why)
        if self.run_folder is not None:
            self.run_folder.tell_waiting(why)

    # --- from RUNNING to an end --------------------------------------------------------------------------------------

    def _finish_attempt(self, attempt: Attempt) -> None:
        row = attempt.row
        self._running.remove(attempt)
        self.pool.give_back(attempt.devices)
        row.exit_code = attempt.exit_code
        state = attempt.ended_by or (FAILED if row.exit_code else COMPLETED)
        note = f"exit code {row.exit_code} after {self._clock.monotonic_s() - attempt.started_s:.0f} s"
        if row.exit_code == ExitCode.RUN_ME_AGAIN and state != CANCELLED:
            why_not = self._why_no_requeue(attempt)
            if why_not is None:
                self._requeue(attempt, note)
                return
            note += f"; not restarted: {why_not}"
        if row.exit_code:
            note += f"; log: {row.log}"
        attempt.write_end(state)
        self._change(row, state, note)

    def _requeue(self, attempt: Attempt, note: str) -> None:
        attempt.write_end(attempt.ended_by or REQUEUED)
        attempt.row.restarts += 1
        self._waiting.append(attempt.row)
        if attempt.ended_by is not None:
            note = f"{attempt.ended_by}, {note}"
        self._change(attempt.row, PENDING, f"{note}: will be restarted")

    def _why_no_requeue(self, attempt: Attempt) -> str | None:
        """Return why a task with work left is not restarted; None: it is restarted."""
        job = self.job
        row = attempt.row
        if self._stopping:
            return "the emulation is being stopped"
        if "no-requeue" in job.request.options:
            return "--no-requeue"
        if row.restarts >= job.settings.max_requeues:
            return f"[submit] requeues = {job.settings.max_requeues}"
        if (attempt.folder / NO_RESTART_VARIABLE).exists():
            return "another task has its part of the source"
        if self.run_folder is not None:
            files = f"{job.job_id}_{row.index or 0}.r{row.restarts}"
            if made_progress(self.run_folder.tasks, files) is False:
                return "no chunk was done"
        return None

    def _look_for_run_folder(self, attempt: Attempt) -> None:
        """Use the run folder of the first task that names it."""
        databases = attempt.databases() if self.run_folder is None else []
        if databases:
            run = RunFolder(databases[0].parent.parent)
            self.lock_run(run.path)
            self.run_folder = run
            self._watch.keep_run(run.path)

    # --- messages and the file of states -----------------------------------------------------------------------------

    def _change(self, row: TaskRow, state: str, note: str) -> None:
        row.state = state
        row.note = note
        self._stale = True
        waiting = sum(row.state == PENDING for row in self.rows)
        running = sum(row.state == RUNNING for row in self.rows)
        ended = len(self.rows) - waiting - running
        name = " ".join(filter(None, [self.job.task_name(row.index), state, note]))
        self.tell(f"{name}; {ended} of {len(self.rows)} ended, {running} running, {waiting} waiting")

    def _tell_chunks(self) -> None:
        """Tell how many chunks are done in the databases that the tasks have published, if that has changed."""
        if self.run_folder is None or not self._chunk_timer.is_due():
            return
        done = count_done(self.run_folder.tasks.glob("[!.]*.sqlite"))
        line = f"{count_of(done, 'chunk')} done"
        if self.job.settings.chunks:
            line = f"{done:,} of {count_of(self.job.settings.chunks, 'chunk')} done"
        if line != self._chunk_line:
            self._chunk_line = line
            self.tell(f"job {self.job.job_id}: {line}; {len(self._running)} running, {len(self._waiting)} waiting")

    def _write_states(self, *, last: bool = False) -> None:
        """Write the states to their file, at most twice a second, and at the end."""
        is_due = last or (self._stale and self._write_timer.is_due())
        if self.run_folder is None or not is_due:
            return
        self._stale = False
        job = self.job
        rows = [row.to_dict() for row in self.rows]
        states = {"job_id": job.job_id, "pid": job.world.pid, "ended": last, "tasks": rows}
        with suppress(OSError):  # a full disk must not stop the work
            replace_text(rows_in(self.run_folder.path, str(job.job_id)), json.dumps(states))
