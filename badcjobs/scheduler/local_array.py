"""The emulation at work: starts array tasks as there is room, drives them to their end, starts those again that ask."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence

from badcjobs.errors import ExitCode
from badcjobs.scheduler.device_pool import DevicePool
from badcjobs.scheduler.emulated_task import CANCELLED, REQUEUED, SENT_BACK, Attempt, Limits
from badcjobs.scheduler.local_environment import cores_of
from badcjobs.scheduler.local_job import LocalJob, StopSignals, Terms
from badcjobs.scheduler.local_orders import take_orders
from badcjobs.scheduler.local_processes import MARK
from badcjobs.scheduler.local_record import AttemptEnd, write_records
from badcjobs.scheduler.local_start import start_attempt
from badcjobs.scheduler.local_state import COMPLETED, FAILED, PENDING, RUNNING, StateFile, TaskRow, count_words
from badcjobs.scheduler.local_watch import Watch
from badcjobs.seams import Clock

_TICK_S = 0.05
_LOOK_FOR_ORDERS_S = 0.5
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
        self._next_orders_s = self._next_lock_s = self._next_words_s = 0.0

    @property
    def mark(self) -> str:
        """What every process of this job carries, behind what the job around it carries."""
        mine = f"{self.job.job_id}-{os.getpid()}"
        return f"{self._outer_mark}/{mine}" if self._outer_mark else mine

    def run(self) -> list[TaskRow]:
        """Run everything to its end."""
        self._watch = watch = Watch(self.mark, self._terms.grace_s, self.job.folder, self.job.environ)
        try:
            while self._running or (self._waiting and not self._closing):
                self._heed_signals()
                self._heed_orders()
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
            self._tell(f"{stop.warned_by.name}: starting nothing new, passing it on to {_tasks(attempts)}")
            for attempt in attempts:
                attempt.warn(stop.warned_by)
        if stop.ended_by and self._is_news("ended"):
            self._tell(f"{stop.ended_by.name}: ending {_tasks(attempts)} in order; once more ends them at once")
            for attempt in attempts:
                attempt.end(CANCELLED)
        if stop.cut_short_by and self._is_news("cut short"):
            self._tell(f"{stop.cut_short_by.name}: ending {_tasks(attempts)} at once")
            for attempt in attempts:
                attempt.kill(CANCELLED)

    def _is_news(self, what: str) -> bool:
        self._closing = True
        news = what not in self._heard
        self._heard.add(what)
        return news

    def _heed_orders(self) -> None:
        """Look for the files with orders for single tasks; those of tasks that wait are read when their turn comes."""
        if self._clock.monotonic_s() < self._next_orders_s:
            return
        self._next_orders_s = self._clock.monotonic_s() + _LOOK_FOR_ORDERS_S
        for row in self._running:
            for order in take_orders(row.log):
                if order == REQUEUED and not self.job.request.requeue:
                    self._refuse(row, order, "--no-requeue forbids it")
                elif row.attempt is not None:
                    row.attempt.end(order)

    def _refuse(self, row: TaskRow, order: str, why: str) -> None:
        self._tell(f"{self.job.identity(row.index).name} is not {order.lower()}: {why}")

    # --- from PENDING to RUNNING --------------------------------------------------------------------------------------

    def _start_what_fits(self) -> None:
        while self._waiting and not self._closing and self._has_room():
            row = self._waiting[0]
            orders = take_orders(row.log)
            if CANCELLED in orders:
                self._waiting.pop(0)
                self._change(row, CANCELLED, "cancelled while it waited")
                continue
            for order in orders:
                self._refuse(row, order, "it does not run yet")
            devices = self._pool.take(self.job.request.gpus)
            if devices is None:
                self._wait_for_others()
                return
            row.devices = devices
            self._watch.keep((*self.job.keep, *self._pool.lock_files))
            self._waiting.pop(0)
            self._start(row)

    def _has_room(self) -> bool:
        request = self.job.request
        if request.array is not None and request.array.parallel and len(self._running) >= request.array.parallel:
            return False
        if request.gpus and self._clock.monotonic_s() < self._next_lock_s:
            return False
        if request.gpus and not self._pool.share:
            return True  # there are never more tasks than devices: cores that are too few make them slow, no more
        return len(self._running) < self.job.node.cores // cores_of(request, self.job.node)

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
        request, mark = self.job.request, f"{self.mark}/{self.job.identity(row.index).name}.r{row.restarts}"
        try:
            process = start_attempt(self.job, row, mark, self._clock.now_ms() // 1000)
        except OSError as problem:
            self._give_back(row)
            self._change(row, FAILED, f"it cannot be started: {problem}")
            return
        row.attempt = Attempt(process, mark, Limits(request.time_s, request.warning, self._terms.grace_s), self._clock)
        self._running.append(row)
        on = ", ".join(f"GPU {device.token}" for device in row.devices)
        again = f"for the {row.restarts + 1}. time" if row.restarts else ""
        self._change(row, RUNNING, " ".join(filter(None, [again, f"on {on}" if on else ""])))

    # --- from RUNNING to an end ---------------------------------------------------------------------------------------

    def _settle(self, row: TaskRow) -> None:
        attempt = row.attempt
        assert attempt is not None
        self._running.remove(row)
        self._give_back(row)
        row.attempt, row.exit_code = None, attempt.exit_code
        words = f"exit code {row.exit_code} after {self._clock.monotonic_s() - attempt.started_s:.0f} s"
        sent_back = attempt.ended_by in SENT_BACK
        if sent_back or (attempt.ended_by != CANCELLED and row.exit_code == ExitCode.RUN_ME_AGAIN):
            why_not = self._why_no_requeue(row, sent_back=sent_back)
            if why_not is None:
                self._queue_again(row, attempt, words)
                return
            words += f"; not started again: {why_not}"
        state = attempt.ended_by or (COMPLETED if row.exit_code == 0 else FAILED)
        state = CANCELLED if state == REQUEUED else state  # nobody starts it any more
        if row.exit_code:
            words += f"; its log: {row.log}"
        self._write_down(row, attempt, state)
        self._change(row, state, words)

    def _queue_again(self, row: TaskRow, attempt: Attempt, words: str) -> None:
        """Let a task wait again, behind all others."""
        self._write_down(row, attempt, attempt.ended_by or REQUEUED)
        row.restarts += 1
        row.asked += attempt.ended_by not in SENT_BACK
        self._waiting.append(row)
        by = "" if attempt.ended_by is None else f"{attempt.ended_by}, "
        self._change(row, PENDING, f"{by}{words}: it is started again")

    def _write_down(self, row: TaskRow, attempt: Attempt, state: str) -> None:
        """Keep how an attempt has ended, also where merge finds it; then its folder can go."""
        who, now_s = self.job.identity(row.index, row.restarts), self._clock.now_ms() // 1000
        lasted_s = round(self._clock.monotonic_s() - attempt.started_s)
        codes = attempt.exit_code, attempt.slurm_exit_code
        row.ends.append(AttemptEnd(row.restarts, state, *codes, now_s - lasted_s, now_s))
        folder = self.job.attempt_folder(who)
        write_records(folder, who, self.job.node.name, row.ends[-1])
        shutil.rmtree(folder, ignore_errors=True)

    def _give_back(self, row: TaskRow) -> None:
        self._pool.give_back(row.devices)
        self._watch.keep((*self.job.keep, *self._pool.lock_files))
        row.devices = ()

    def _why_no_requeue(self, row: TaskRow, *, sent_back: bool) -> str | None:
        """Return why a task with work left, or sent back by somebody, is not started again; None: it is."""
        if self._closing:
            return "the emulation is being stopped"
        if not self.job.request.requeue:
            return "--no-requeue"
        if sent_back:
            return None  # it has not asked for it, so nobody counts
        return self._terms.why_not_again(self.job.job_id, row.index, restarts=row.restarts, asked=row.asked)

    def _change(self, row: TaskRow, state: str, note: str) -> None:
        row.state, row.note = state, note
        name = self.job.identity(row.index).name
        self._tell(f"{name} {state}{' ' + note if note else ''}; {count_words(self.rows)}")
        self._state.write(self.rows, changed=True)


def _tasks(attempts: Sequence[Attempt]) -> str:
    return "1 task" if len(attempts) == 1 else f"{len(attempts)} tasks"
