"""The emulation at work: starts array tasks as there is room, drives them to their end, starts those again that ask."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from badcjobs.cluster.local_devices import DevicePool
from badcjobs.cluster.local_task import CANCELLED, COMPLETED, FAILED, REQUEUED, Attempt, AttemptEnd, LocalJob
from badcjobs.cluster.local_watch import MARK, Watcher
from badcjobs.cluster.wait_for_job import made_progress
from badcjobs.errors import ExitCode
from badcjobs.model import Device, StandIn
from badcjobs.store.submission_record import PENDING, RUNNING

_TICK_S = 0.05
_TRY_LOCKED_S, _TELL_WAITING_S = 1.0, 30.0
_WRITE_EVERY_S = 0.5  # the file of states


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """How to emulate."""

    stand_in: StandIn = field(default_factory=StandIn)
    share_gpus: bool = False  # several tasks on one device
    max_requeues: int = 10
    kill_wait_s: float = 30.0
    lock: bool = True  # keep other runs off the devices; no need to where they are simulated for us alone
    again: bool = False  # the user says that the job of Slurm in the same folder has ended

    @property
    def options(self) -> tuple[str, ...]:
        """The same as options of ``badcjobs submit``, as far as ``run`` has no such option."""
        sharing = ("--share-gpus",) if self.share_gpus else ()
        waiting = () if self.kill_wait_s == 30.0 else (f"--kill-wait={self.kill_wait_s}",)
        return *sharing, *waiting


@dataclass(slots=True)
class TaskRow:
    """One array task, from its submission to its end."""

    index: int | None
    log: Path
    state: str = PENDING
    restarts: int = 0
    exit_code: int | None = None  # of its last attempt
    note: str = ""
    devices: tuple[Device, ...] = ()
    attempt: Attempt | None = field(default=None, repr=False)
    ends: list[AttemptEnd] = field(default_factory=list)  # of all its attempts that are over

    def to_dict(self) -> dict[str, object]:
        """Return the row as ``--json`` shows it."""
        return {
            "index": self.index,
            "state": self.state,
            "exit_code": self.exit_code,
            "restarts": self.restarts,
            "attempts": [asdict(end) for end in self.ends],
            "log": str(self.log),
            "note": self.note or None,
        }


class LocalArray:
    """All tasks of one job. One thread does it all: a task must not lose its parent when a thread ends."""

    def __init__(
        self, job: LocalJob, pool: DevicePool, settings: LocalSettings, tasks: Path, tell: Callable[[str], None]
    ) -> None:
        self.job = job
        self.rows = [TaskRow(index, job.log(index, job.request.output)) for index in job.request.indices]
        self._pool = pool
        self._settings = settings
        self._tasks = tasks  # the folder of the task databases, by which progress is seen
        self._tell = tell
        self._clock = job.world.clock
        self._waiting = list(self.rows)
        self._running: list[TaskRow] = []
        self._heard: set[str] = set()  # what signals have asked for so far; then nothing new is started
        outer = job.world.environ.get(MARK, "")
        # What every process of this job carries, behind what the job around it carries.
        self._mark = f"{outer}/{job.job_id}-{os.getpid()}".lstrip("/")
        self._next_lock_s = self._next_words_s = self._next_write_s = 0.0
        self._stale = False

    def run(self) -> list[TaskRow]:
        """Run everything to its end."""
        self._watch = Watcher(self._mark, self._settings.kill_wait_s, self.job.folder, self.job.world.environ)
        try:
            while self._running or (self._waiting and not self._heard):
                self._obey_signals()
                for row in [row for row in self._running if row.attempt is not None and row.attempt.look()]:
                    self._settle(row)
                self._start_what_fits()
                self._write_states()
                self._clock.sleep(_TICK_S)
            for row in self._waiting:
                self._change(row, CANCELLED, "never started: the emulation was stopped")
        except BaseException:
            self._watch.release()  # it ends whatever runs
            raise
        finally:
            self._write_states(last=True)
        shutil.rmtree(self.job.folder, ignore_errors=True)
        self._watch.dismiss()
        return self.rows

    def _obey_signals(self) -> None:
        """Pass a warning on; end all tasks in order when asked to, and at once when asked again."""
        stop, attempts = self.job.world.stop, [row.attempt for row in self._running if row.attempt is not None]
        tasks = f"{len(attempts)} task{'' if len(attempts) == 1 else 's'}"
        steps: tuple[tuple[signal.Signals | None, str, Callable[[Attempt, signal.Signals], None]], ...] = (
            (stop.warned_by, "starting nothing new, passing it on to {}", Attempt.warn),
            (stop.ended_by, "ending {} in order; once more ends them at once", lambda one, _: one.end(CANCELLED)),
            (stop.cut_short_by, "ending {} at once", lambda one, _: one.kill(CANCELLED)),
        )
        for signum, words, act in steps:
            if signum is not None and words not in self._heard:
                self._heard.add(words)
                self._tell(f"{signum.name}: {words.format(tasks)}")
                for attempt in attempts:
                    act(attempt, signum)

    # --- from PENDING to RUNNING --------------------------------------------------------------------------------------

    def _start_what_fits(self) -> None:
        while self._waiting and not self._heard and self._has_room():
            devices = self._pool.take(self.job.request.gpus)
            if devices is None:
                self._wait_for_others()
                return
            self._watch.keep((*self.job.keep, *self._pool.lock_files))
            row = self._waiting.pop(0)
            row.devices = devices
            self._start(row)

    def _has_room(self) -> bool:
        request = self.job.request
        if request.array is not None and request.array.parallel and len(self._running) >= request.array.parallel:
            return False
        if request.gpus and self._clock.monotonic_s() < self._next_lock_s:
            return False
        if request.gpus and not self._pool.share:
            return True  # there are never more tasks than devices: cores that are too few make them slow, no more
        return len(self._running) < self.job.world.cores // self.job.cores

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
        request, mark = self.job.request, f"{self._mark}/{self.job.task_name(row.index)}.r{row.restarts}"
        try:
            process = self.job.start(row.index, row.restarts, row.devices, mark)
        except OSError as problem:
            self._give_back(row)
            self._change(row, FAILED, f"it cannot be started: {problem}")
            return
        row.attempt = Attempt(
            process,
            mark,
            self._clock,
            time_s=request.time_s,
            warning=request.warning,
            kill_wait_s=self._settings.kill_wait_s,
        )
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
        state = attempt.ended_by or (COMPLETED if row.exit_code == 0 else FAILED)
        if row.exit_code == ExitCode.RUN_ME_AGAIN and state != CANCELLED:
            why_not = self._why_no_requeue(row)
            if why_not is None:
                self._write_down(row, attempt, attempt.ended_by or REQUEUED)
                row.restarts += 1
                self._waiting.append(row)
                by = "" if attempt.ended_by is None else f"{attempt.ended_by}, "
                self._change(row, PENDING, f"{by}{words}: it is started again")
                return
            words += f"; not started again: {why_not}"
        if row.exit_code:
            words += f"; its log: {row.log}"
        self._write_down(row, attempt, state)
        self._change(row, state, words)

    def _why_no_requeue(self, row: TaskRow) -> str | None:
        """Return why a task with work left is not started again; None: it is."""
        if self._heard:
            return "the emulation is being stopped"
        if not self.job.request.requeue:
            return "--no-requeue"
        if self._settings.max_requeues == 0:
            return "--requeues 0"
        if row.restarts >= self._settings.max_requeues:
            return f"it was, {row.restarts} time{'s' * (row.restarts != 1)}"
        made = made_progress(self._tasks, f"{self.job.job_id}_{row.index or 0}.r{row.restarts}")
        return "it got nothing done" if made is False else None

    def _write_down(self, row: TaskRow, attempt: Attempt, state: str) -> None:
        """Keep how an attempt has ended, also where merge finds it; then its folder can go."""
        now_s = self._clock.now_ms() // 1000
        lasted_s = round(self._clock.monotonic_s() - attempt.started_s)
        codes = attempt.exit_code, attempt.slurm_exit_code
        row.ends.append(AttemptEnd(row.restarts, state, *codes, now_s - lasted_s, now_s))
        self.job.write_end(row.index, row.ends[-1])
        shutil.rmtree(self.job.attempt_folder(row.index, row.restarts), ignore_errors=True)

    def _give_back(self, row: TaskRow) -> None:
        self._pool.give_back(row.devices)
        self._watch.keep((*self.job.keep, *self._pool.lock_files))
        row.devices = ()

    # --- what is said of it -------------------------------------------------------------------------------------------

    def _change(self, row: TaskRow, state: str, note: str) -> None:
        row.state, row.note, self._stale = state, note, True
        self._tell(f"{self.job.task_name(row.index)} {state}{' ' + note if note else ''}; {count_words(self.rows)}")

    def _write_states(self, *, last: bool = False) -> None:
        """Write the states to their file, not more often than is worth reading; the last time in any case."""
        path, now_s = self.job.state_file, self._clock.monotonic_s()
        if path is None or not (last or (self._stale and now_s >= self._next_write_s)):
            return
        self._next_write_s, self._stale = now_s + _WRITE_EVERY_S, False
        draft = path.with_suffix(".tmp")
        rows = [row.to_dict() for row in self.rows]
        try:
            draft.write_text(json.dumps({"job_id": self.job.job_id, "pid": os.getpid(), "ended": last, "tasks": rows}))
            draft.replace(path)
        except OSError:
            pass  # a full disk under it must not stop the work


def count_words(rows: Sequence[TaskRow]) -> str:
    """Return how far an array is, in words."""
    counts = Counter(row.state for row in rows)
    waiting, running = counts.pop(PENDING, 0), counts.pop(RUNNING, 0)
    ended = ", ".join(f"{many} {state.lower()}" for state, many in sorted(counts.items()))
    words = f" ({ended})" if ended else ""
    return f"{sum(counts.values())} of {len(rows)} ended{words}, {running} running, {waiting} waiting"
