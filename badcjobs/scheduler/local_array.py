"""The emulation at work: starts array tasks as there is room, drives them to their end, starts those again that ask."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from badcjobs.errors import ExitCode
from badcjobs.scheduler.device_pool import DevicePool
from badcjobs.scheduler.emulated_task import CANCELLED, Attempt, Launch, Limits, interpreter, launch
from badcjobs.scheduler.local_environment import Identity, inherited, task_variables
from badcjobs.scheduler.local_job import LocalJob, StopSignals, Terms
from badcjobs.scheduler.local_processes import MARK
from badcjobs.scheduler.local_state import COMPLETED, FAILED, PENDING, RUNNING, StateFile, TaskRow, count_words
from badcjobs.scheduler.local_watch import Watch
from badcjobs.seams import Clock

_TICK_S = 0.05
_LOOK_FOR_CANCELS_S = 0.5
_TRY_LOCKED_S, _TELL_WAITING_S = 1.0, 30.0


class LocalArray:
    """All tasks of one job. One thread does it all: a task must not lose its parent when a thread ends."""

    def __init__(
        self,
        job: LocalJob,
        pool: DevicePool,
        terms: Terms,
        *,
        clock: Clock,
        stop: StopSignals,
        tell: Callable[[str], None],
    ) -> None:
        self.job = job
        self._pool = pool
        self._terms = terms
        self._clock = clock
        self._stop = stop
        self._tell = tell
        indices = (None,) if job.request.array is None else job.request.array.indices
        self.rows = [TaskRow(index, job.log(job.identity(index), job.request.output)) for index in indices]
        self._waiting = list(self.rows)
        self._running: list[TaskRow] = []
        self._closing = False  # nothing new is started
        self._heard: set[str] = set()
        self._outer_mark = job.environ.get(MARK, "")
        self._state = StateFile(job.state_file, job.job_id, os.getpid(), clock)
        self._next_cancels_s = self._next_lock_s = self._next_words_s = 0.0

    @property
    def mark(self) -> str:
        """What every process of this job carries, behind what the job around it carries."""
        mine = f"{self.job.job_id}-{os.getpid()}"
        return f"{self._outer_mark}/{mine}" if self._outer_mark else mine

    def run(self) -> list[TaskRow]:
        """Run everything to its end."""
        watch = Watch(self.mark, self._terms.grace_s, self.job.folder, self.job.environ)
        try:
            while self._running or (self._waiting and not self._closing):
                self._heed_signals()
                self._heed_cancels()
                for row in [row for row in self._running if row.attempt is not None and row.attempt.look()]:
                    self._settle(row)
                self._start_what_fits()
                self._state.write(self.rows, changed=False)
                self._clock.sleep(_TICK_S)
            for row in self._waiting:
                self._change(row, CANCELLED, "never started: the emulation was stopped")
        except BaseException:
            watch.release()  # it ends whatever runs
            raise
        finally:
            self._state.write(self.rows, changed=True, last=True)
        shutil.rmtree(self.job.folder, ignore_errors=True)
        watch.dismiss()
        return self.rows

    # --- what comes from outside --------------------------------------------------------------------------------------

    def _heed_signals(self) -> None:
        """Pass a warning on; end everybody in order when asked to, and at once when asked again."""
        stop, attempts = self._stop, [row.attempt for row in self._running if row.attempt is not None]
        if stop.warned_by and self._is_news("warned"):
            self._tell(f"{stop.warned_by.name}: starting nothing new, passing it on to {len(attempts)} tasks")
            for attempt in attempts:
                attempt.warn(stop.warned_by)
        if stop.ended_by and self._is_news("ended"):
            self._tell(f"{stop.ended_by.name}: ending {len(attempts)} tasks in order; once more ends them at once")
            for attempt in attempts:
                attempt.end(CANCELLED)
        if stop.cut_short_by and self._is_news("cut short"):
            self._tell(f"{stop.cut_short_by.name}: ending {len(attempts)} tasks at once")
            for attempt in attempts:
                attempt.kill(CANCELLED)

    def _is_news(self, what: str) -> bool:
        self._closing = True
        news = what not in self._heard
        self._heard.add(what)
        return news

    def _heed_cancels(self) -> None:
        """Look for the files that cancel single tasks; those that wait are asked when their turn comes."""
        if self._clock.monotonic_s() < self._next_cancels_s:
            return
        self._next_cancels_s = self._clock.monotonic_s() + _LOOK_FOR_CANCELS_S
        for row in self._running:
            if row.attempt is not None and _obey_file(row.cancel_file):
                row.attempt.end(CANCELLED)

    # --- from PENDING to RUNNING --------------------------------------------------------------------------------------

    def _start_what_fits(self) -> None:
        while self._waiting and not self._closing and self._has_room():
            row = self._waiting[0]
            if _obey_file(row.cancel_file):
                self._waiting.pop(0)
                self._change(row, CANCELLED, "cancelled while it waited")
                continue
            devices = self._pool.take(self.job.request.gpus)
            if devices is None:
                self._wait_for_others()
                return
            row.devices = devices
            self._waiting.pop(0)
            self._start(row)

    def _has_room(self) -> bool:
        request = self.job.request
        if request.array is not None and request.array.parallel and len(self._running) >= request.array.parallel:
            return False
        if request.gpus:
            return self._clock.monotonic_s() >= self._next_lock_s
        return len(self._running) < max(1, self.job.node.cores // (request.cpus or 1))

    def _wait_for_others(self) -> None:
        """Do not ask for locks twenty times a second; say who has what we wait for."""
        if not self._pool.refusals:
            return
        now_s = self._clock.monotonic_s()
        self._next_lock_s = now_s + _TRY_LOCKED_S
        if now_s >= self._next_words_s:
            self._next_words_s = now_s + _TELL_WAITING_S
            self._tell(f"waiting for GPUs that other runs have: {'; '.join(self._pool.refusals)}")

    def _start(self, row: TaskRow) -> None:
        who, request = self.job.identity(row.index, row.restarts), self.job.request
        folder = self.job.folder / f"{who.name}.r{row.restarts}"
        mark = f"{self.mark}/{who.name}.r{row.restarts}"
        try:
            folder.mkdir()
            script = folder / "slurm_script"  # a copy: whoever edits the script meanwhile changes no running task
            script.write_text(self.job.script)
            tmp = folder / "tmp"
            tmp.mkdir()
            env = self._environment(who, row) | {"SLURM_TMPDIR": str(tmp), MARK: mark}
            error = None if request.error is None else self.job.log(who, request.error)
            argv = (*interpreter(self.job.script), str(script), *self.job.arguments)
            cwd = self.job.node.submit_dir / (request.chdir or "")
            process = launch(Launch(argv, env, cwd, row.log, error, request.append))
        except OSError as problem:
            self._pool.give_back(row.devices)
            row.devices = ()
            self._change(row, FAILED, f"it cannot be started: {problem}")
            return
        row.attempt = Attempt(process, mark, Limits(request.time_s, request.warning, self._terms.grace_s), self._clock)
        self._running.append(row)
        on = ", ".join(f"GPU {device.token}" for device in row.devices)
        again = f"for the {row.restarts + 1}. time" if row.restarts else ""
        self._change(row, RUNNING, " ".join(filter(None, [again, f"on {on}" if on else ""])))

    def _environment(self, who: Identity, row: TaskRow) -> dict[str, str]:
        job, now_s = self.job, self._clock.now_ms() // 1000
        limit_s = job.request.time_s
        times = {"SLURM_JOB_START_TIME": str(now_s)}
        if limit_s is not None:
            times["SLURM_JOB_END_TIME"] = str(now_s + limit_s)
        variables = task_variables(who, job.request, job.node, row.devices, name=job.name)
        return inherited(job.environ, job.request.export) | variables | times

    # --- from RUNNING to an end ---------------------------------------------------------------------------------------

    def _settle(self, row: TaskRow) -> None:
        attempt = row.attempt
        assert attempt is not None
        self._running.remove(row)
        self._pool.give_back(row.devices)
        row.devices, row.attempt, row.exit_code = (), None, attempt.exit_code
        shutil.rmtree(self.job.folder / f"{self.job.identity(row.index).name}.r{row.restarts}", ignore_errors=True)
        seconds = self._clock.monotonic_s() - attempt.started_s
        words = f"exit code {row.exit_code} after {seconds:.0f} s"
        if attempt.ended_by != CANCELLED and row.exit_code == ExitCode.RUN_ME_AGAIN:
            why_not = self._why_no_requeue(row)
            if why_not is None:
                row.restarts += 1
                self._waiting.append(row)
                self._change(row, PENDING, f"{words}: it is started again")
                return
            words += f"; not started again: {why_not}"
        ended_well = COMPLETED if row.exit_code == 0 else FAILED
        if row.exit_code:
            words += f"; its log: {row.log}"
        self._change(row, attempt.ended_by or ended_well, words)

    def _why_no_requeue(self, row: TaskRow) -> str | None:
        """Return why a task with work left is not started again; None: it is."""
        if self._closing:
            return "the emulation is being stopped"
        if not self.job.request.requeue:
            return "--no-requeue"
        if row.restarts >= self._terms.max_requeues:
            return f"it was, {row.restarts} times"
        if self._terms.progress(self.job.job_id, row.index or 0, row.restarts) is False:
            return "it got nothing done"
        return None

    def _change(self, row: TaskRow, state: str, note: str) -> None:
        row.state, row.note = state, note
        name = self.job.identity(row.index).name
        self._tell(f"{name} {state}{' ' + note if note else ''}; {count_words(self.rows)}")
        self._state.write(self.rows, changed=True)


def _obey_file(path: Path) -> bool:
    """Say whether the file is there, and remove it."""
    try:
        path.unlink()
    except OSError:
        return False
    return True
