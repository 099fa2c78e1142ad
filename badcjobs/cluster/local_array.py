"""Run the tasks of an emulated array: start them as devices become free, follow them, restart those that ask for it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from badcjobs.cluster.local_task import CANCELLED, COMPLETED, FAILED, REQUEUED, Attempt, LocalJob
from badcjobs.cluster.local_watch import MARK, Watcher
from badcjobs.cluster.wait_for_job import TaskOutcome, Tell, made_progress, read_row
from badcjobs.devices.allocation import is_in_slurm
from badcjobs.devices.free import STAND_INS, DeviceLocks, describe_holder, lock_folder
from badcjobs.devices.listing import open_devices
from badcjobs.errors import ExitCode, NotHere
from badcjobs.model import Device, StandIn
from badcjobs.paths import RunFolder
from badcjobs.report.words import count as count_of
from badcjobs.store.atomic_write import replace_text
from badcjobs.store.submission_record import PENDING, RUNNING
from badcjobs.task.startup import NO_RESTART_VARIABLE, World

_TICK_S = 0.05
_TRY_LOCKED_S, _TELL_WAITING_S = 1.0, 30.0  # while other runs use the devices
_WRITE_EVERY_S = 0.5  # the file of states
_TELL_FIRST_S, _TELL_LAST_S = 0.5, 60.0  # the pause between two lines about the chunks doubles
_CHUNKS = "SELECT count(*), sum(status IN ('done', 'skipped')), sum(status IN ('failed', 'poison')) FROM chunk"


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """How to emulate."""

    stand_in: StandIn = field(default_factory=StandIn)
    share_gpus: bool = False  # several tasks on one device
    max_requeues: int = 0  # of a task that exits with 75; Slurm itself does not start it again
    kill_wait_s: float = 30.0
    again: bool = False  # the user states that the Slurm job of the same folder has ended
    chunks: int = 0  # of all tasks; 0: not known before they begin

    @property
    def options(self) -> tuple[str, ...]:
        """The same as options of ``badcjobs submit``."""
        sharing = ("--config=submit.share_gpus=true",) if self.share_gpus else ()
        waiting = () if self.kill_wait_s == 30.0 else (f"--config=submit.kill_wait_s={self.kill_wait_s:g}",)
        return *sharing, *waiting


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


class DevicePool:
    """Assigns the devices of this machine to tasks, the least used first; tasks share a device only with ``share``.

    Other runs on this machine (``run --max-gpus``, another emulation) respect the same locks; ``refusals`` names their
    holders. Without ``new_locks`` (simulated devices) nothing is locked.
    """

    def __init__(
        self, devices: Sequence[Device], new_locks: Callable[[], DeviceLocks] | None = None, *, share: bool = False
    ) -> None:
        self._users = dict.fromkeys(devices, 0)
        self._locks: dict[Device, DeviceLocks] = {}
        self._new_locks = new_locks
        self.share = share
        self.refusals: list[str] = []  # of the last call of take

    @property
    def lock_files(self) -> tuple[int, ...]:
        """The open lock files of all assigned devices."""
        return tuple(file for locks in self._locks.values() for file in locks.files)

    def take(self, count: int) -> tuple[Device, ...] | None:
        """Assign this many devices; None: not available now."""
        fit = [one for one, users in self._users.items() if self.share or not users]
        self.refusals = []
        if count == 0 or len(fit) < count:
            return None if count else ()
        chosen: list[Device] = []
        with nullcontext() if self._new_locks is None else self._new_locks().exclusive():  # else two get a part each
            for device in sorted(fit, key=self._users.__getitem__):
                if len(chosen) < count and self._lock(device):
                    self._users[device] += 1
                    chosen.append(device)
        if len(chosen) < count:
            self.give_back(chosen)
            return None
        return tuple(sorted(chosen, key=lambda device: device.index or 0))

    def _lock(self, device: Device) -> bool:
        if self._users[device] or device.uuid is None or self._new_locks is None:
            return True
        locks = self._new_locks()
        holder = locks.claim(device.uuid)
        if holder is None:
            self._locks[device] = locks
        else:
            self.refusals.append(f"GPU {device.index} {holder}")
        return holder is None

    def give_back(self, devices: Iterable[Device]) -> None:
        """Return devices to the pool; a device without users is unlocked."""
        for device in devices:
            self._users[device] -= 1
            if not self._users[device] and device in self._locks:
                self._locks.pop(device).release()


def open_pool(count: int, settings: LocalSettings, world: World, run: Path) -> DevicePool:
    """Return the devices that this process may use, for tasks that request ``count`` each."""
    if count == 0:
        return DevicePool((), share=settings.share_gpus)
    with open_devices(world.environ, world.clock, settings.stand_in) as sight:
        grant = sight.grant.for_work()
        devices, why = grant.devices, "\n".join(filter(None, [grant.why, sight.trouble]))
    if count > (most := len(devices)):
        fewer = f"--gpus-per-task {most}" if most else "--gpus-per-task 0 -- --cpu-workers 2"
        raise NotHere(
            f"each task asks for {count_of(count, 'GPU')}, but this machine has {most or 'none'}",
            why=why,
            fix=f"the same command with {fewer}, or with -- --simulate {count} to try it out",
        )
    folder = lock_folder(world.environ)
    if is_in_slurm(world.environ):  # Slurm itself keeps other jobs off the devices of this one
        private = world.environ.get("SLURM_TMPDIR") or world.environ.get("TMPDIR") or tempfile.gettempdir()
        folder = Path(private) / f"badcjobs-locks-{world.environ.get('SLURM_JOB_ID', 'job')}"
    new_locks = partial(DeviceLocks, folder, world.clock, describe_holder(world.pid, run))
    return DevicePool(devices, new_locks if devices[0].backend not in STAND_INS else None, share=settings.share_gpus)


class LocalArray:
    """All tasks of one job, in one thread: PDEATHSIG ends a task when the thread that started it ends."""

    def __init__(self, job: LocalJob, pool: DevicePool, settings: LocalSettings, run: RunFolder, tell: Tell) -> None:
        self.job = job
        self.rows = [TaskRow(one, PENDING, None, job.log(one, "output")) for one in job.request.indices]
        self._pool = pool
        self._settings = settings
        self._run = run  # its task databases show progress
        self._tell = tell
        self._clock = job.world.clock
        self._waiting = list(self.rows)
        self._running: list[tuple[TaskRow, Attempt]] = []
        self._obeyed: set[str] = set()  # the signals handled so far; after the first no task is started
        outer = job.world.environ.get(MARK, "")
        # Every process of this job carries this mark, appended to that of an outer job.
        self._mark = f"{outer}/{job.job_id}-{os.getpid()}".lstrip("/")
        self._next_lock_s = self._next_words_s = self._next_write_s = 0.0
        self._chunks: dict[int | None, tuple[int, ...]] = {}  # by index: listed, done, failed
        self._pause_s, self._next_chunks_s, self._told = _TELL_FIRST_S, 0.0, ""
        self._stale = False

    def run(self) -> list[TaskRow]:
        """Run everything to its end."""
        self._watch = Watcher(self._mark, self._settings.kill_wait_s, self.job.folder, self.job.world.environ)
        try:
            while self._running or (self._waiting and not self._obeyed):
                self._obey_signals()
                for row, attempt in [one for one in self._running if one[1].look()]:
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

    def _obey_signals(self) -> None:
        """Pass a warning on; the first ending signal stops all tasks in an orderly way, the second kills them."""
        stop, attempts = self.job.world.stop, [attempt for _, attempt in self._running]
        tasks = count_of(len(attempts), "task")
        steps: tuple[tuple[signal.Signals | None, str, Callable[[Attempt, signal.Signals], None]], ...] = (
            (stop.warned_by, "starting no new task, passing it on to {}", Attempt.warn),
            (stop.ended_by, "stopping {}; a second signal kills them", lambda one, _: one.end(CANCELLED)),
            (stop.cut_short_by, "killing {}", lambda one, _: one.kill(CANCELLED)),
        )
        for signum, words, act in steps:
            if signum is not None and words not in self._obeyed:
                self._obeyed.add(words)
                self._tell(f"{signum.name}: {words.format(tasks)}")
                for attempt in attempts:
                    act(attempt, signum)

    # --- from PENDING to RUNNING -------------------------------------------------------------------------------------

    def _start_what_fits(self) -> None:
        request = self.job.request
        most = len(self.rows) if request.array is None else request.array.parallel or len(self.rows)
        if not request.gpus or self._pool.share:
            # Tasks with their own devices are never more than the devices: too few cores only make them slower.
            most = min(most, self.job.world.cores // self.job.cores)
        if request.gpus and self._clock.monotonic_s() < self._next_lock_s:
            return
        while self._waiting and not self._obeyed and len(self._running) < most:
            devices, now_s = self._pool.take(self.job.request.gpus), self._clock.monotonic_s()
            if devices is None and self._pool.refusals:
                self._next_lock_s = now_s + _TRY_LOCKED_S
                if now_s >= self._next_words_s:
                    self._next_words_s = now_s + _TELL_WAITING_S
                    why = f"waiting for GPUs that other runs use: {'; '.join(self._pool.refusals)}"
                    self._tell(why)
                    self._run.tell_waiting(why)
            if devices is None:
                return
            self._run.stop_waiting()
            self._watch.keep((*self.job.keep, *self._pool.lock_files))
            row = self._waiting.pop(0)
            row.devices = devices
            self._start(row)

    def _start(self, row: TaskRow) -> None:
        request, mark = self.job.request, f"{self._mark}/{self.job.task_name(row.index)}.r{row.restarts}"
        try:
            process = self.job.start(row.index, row.restarts, row.devices, mark)
        except OSError as problem:
            self._give_back(row)
            self._change(row, FAILED, f"cannot be started: {problem}")
            return
        self._running.append((row, Attempt(process, mark, self._clock, request, self._settings.kill_wait_s)))
        on = "on " + ", ".join(f"GPU {device.token}" for device in row.devices) if row.devices else ""
        again = f"restart {row.restarts} " if row.restarts else ""
        self._change(row, RUNNING, (again + on).strip())

    # --- from RUNNING to an end --------------------------------------------------------------------------------------

    def _finish_attempt(self, row: TaskRow, attempt: Attempt) -> None:
        self._running.remove((row, attempt))
        self._give_back(row)
        row.exit_code = attempt.exit_code
        words = f"exit code {row.exit_code} after {self._clock.monotonic_s() - attempt.started_s:.0f} s"
        state = attempt.ended_by or (COMPLETED if row.exit_code == 0 else FAILED)
        if row.exit_code == ExitCode.RUN_ME_AGAIN and state != CANCELLED:
            why_not = self._why_no_requeue(row)
            if why_not is None:
                self._write_down(row, attempt, attempt.ended_by or REQUEUED)
                row.restarts += 1
                self._waiting.append(row)
                by = "" if attempt.ended_by is None else f"{attempt.ended_by}, "
                self._change(row, PENDING, f"{by}{words}: will be restarted")
                return
            words += f"; not restarted: {why_not}"
        if row.exit_code:
            words += f"; log: {row.log}"
        self._count_chunks(row, self._run.tasks.glob(f"{self.job.task_name(row.index)}.r{row.restarts}.*.sqlite"))
        self._write_down(row, attempt, state)
        self._change(row, state, words)

    def _why_no_requeue(self, row: TaskRow) -> str | None:
        """Return why a task with work left is not restarted; None: it is restarted."""
        if self._obeyed:
            return "the emulation is being stopped"
        if "no-requeue" in self.job.request.given:
            return "--no-requeue"
        if self._settings.max_requeues == 0:
            return "as in Slurm, unless [submit] requeues is set"
        if row.restarts >= self._settings.max_requeues:
            return f"already restarted {count_of(row.restarts, 'time')}"
        if (self.job.attempt_folder(row.index, row.restarts) / NO_RESTART_VARIABLE).exists():
            return "another task has its part of the source"
        made = made_progress(self._run.tasks, f"{self.job.job_id}_{row.index or 0}.r{row.restarts}")
        return "no chunk was done" if made is False else None

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
        self._watch.keep((*self.job.keep, *self._pool.lock_files))
        row.devices = ()

    # --- messages and the file of states -----------------------------------------------------------------------------

    def _change(self, row: TaskRow, state: str, note: str) -> None:
        row.state, row.note, self._stale = state, note, True
        counts = Counter(str(row.state) for row in self.rows)
        waiting, running = counts.pop(PENDING, 0), counts.pop(RUNNING, 0)
        ends = ", ".join(f"{many} {state.lower()}" for state, many in sorted(counts.items()))
        ended = f"{sum(counts.values())} of {len(self.rows)} ended{f' ({ends})' if ends else ''}"
        name = " ".join(filter(None, [self.job.task_name(row.index), state, note]))
        self._tell(f"{name}; {ended}, {running} running, {waiting} waiting")

    def _tell_chunks(self) -> None:
        """Tell how many chunks are done, from the files that the tasks are writing, if that has changed."""
        now_s = self._clock.monotonic_s()
        if now_s < self._next_chunks_s or not self._running:
            return
        for row, _ in self._running:
            live = self.job.attempt_folder(row.index, row.restarts).glob("tmp/*/wrapper.sqlite")
            self._count_chunks(row, live, live=True)
        listed, done, failed = (sum(counts[kind] for counts in self._chunks.values()) for kind in range(3))
        total = max(listed, self._settings.chunks)
        begun = "" if self._settings.chunks or len(self._chunks) == len(self.rows) else " in the tasks that have begun"
        words = f"{done:,} of {count_of(total, 'chunk')} done{begun}{f', {failed:,} failed' if failed else ''}"
        if listed and words != self._told:
            self._told = words
            self._tell(f"job {self.job.job_id}: {words}; {len(self._running)} running, {len(self._waiting)} waiting")
            self._pause_s = min(2 * self._pause_s, _TELL_LAST_S)
        self._next_chunks_s = now_s + self._pause_s

    def _count_chunks(self, row: TaskRow, files: Iterable[Path], *, live: bool = False) -> None:
        for path in files:
            if (found := read_row(path, _CHUNKS, live=live)) and found[0]:
                self._chunks[row.index] = found

    def _write_states(self, *, last: bool = False) -> None:
        """Write the states to their file, at most twice a second, and at the end."""
        path, now_s = self.job.state_file, self._clock.monotonic_s()
        if path is None or not (last or (self._stale and now_s >= self._next_write_s)):
            return
        self._next_write_s, self._stale = now_s + _WRITE_EVERY_S, False
        rows = [row.to_dict() for row in self.rows]
        states = {"job_id": self.job.job_id, "pid": os.getpid(), "ended": last, "tasks": rows}
        with suppress(OSError):  # a full disk must not stop the work
            replace_text(path, json.dumps(states))
