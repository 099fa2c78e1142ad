"""Read the published databases of a run, each again only when it has changed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from badcjobs.errors import BadcjobsError, DatabaseProblem
from badcjobs.model import CutShort, Reading
from badcjobs.paths import FileVersion, LocalFolder, RunFolder, file_version, shell_line, version_of
from badcjobs.report.progress import means_killed
from badcjobs.run_toml import FrozenRun
from badcjobs.seams import Clock
from badcjobs.small_files import parse_fields, parse_json, read_small
from badcjobs.store.read_model import TaskFacts
from badcjobs.store.read_tasks import read_accounts, read_tasks
from badcjobs.store.run_lock import lock_file_in
from badcjobs.store.slurm_ends import end_beside, read_end_beside
from badcjobs.store.submission_record import file_in, find_cut_short, intent_in, is_emulation_over, read_record, rows_in

_NOT_FOLLOWED = "is a link to a place outside the run folder: not followed"
_ACCOUNTS_S = 3.0  # for reading accounts while a request waits for them
_WAITING_S = 60.0  # a task that still waits writes it again
_MOST_WAITING = 1000  # bytes
_CHECK_ENDED_EVERY_MS = 60_000  # a task that has ended publishes no more


def resolves_outside(path: Path, folder: Path) -> bool:
    """Return whether a path resolves to a place outside a folder."""
    try:
        return not path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # links in a circle
        return True


@dataclass(slots=True)
class _FileState:
    """The content of a file when it was last read."""

    path: Path
    version: FileVersion
    tasks: tuple[TaskFacts, ...]
    checked_at_ms: int = 0
    end_version: FileVersion | None = None  # of the Slurm record beside it, when that was last read
    accounts: tuple[TaskFacts, ...] | None = None  # the tasks with the accounts of their devices; None: never read
    accounts_of: tuple[TaskFacts, ...] | None = None  # the tasks as they were when their accounts were read
    accounts_at_s: float = 0.0

    @property
    def ended(self) -> bool:
        return all(not task.alive for task in self.tasks)


@dataclass
class RunFiles:
    """The databases of a run folder, or a single one of them (``only``).

    ``confined``: links that leave the run folder are not followed.
    """

    folder: RunFolder
    only: Path | None
    clock: Clock
    confined: bool
    _states: dict[str, _FileState] = field(default_factory=dict)
    _troubles: dict[str, str] = field(default_factory=dict)
    many: int = 0  # databases, read or not
    _records: set[str] = field(default_factory=set)  # names of Slurm's records beside the databases
    unaccounted: int = 0  # databases whose accounts have never been read, for lack of time

    @property
    def tasks(self) -> list[TaskFacts]:
        """All attempts in all files."""
        return [with_latest_readings(task) for state in self._states.values() for task in state.tasks]

    @property
    def merged(self) -> bool:
        """Whether the job database is newer than every task database."""
        job = self._states.get(self.folder.job_database.name)
        return job is not None and all(state.version[0] <= job.version[0] for state in self._states.values())

    @property
    def troubles(self) -> list[str]:
        """Why some files could not be read."""
        troubles = [self._troubles[name] for name in sorted(self._troubles)]
        if self.only is None and self.is_outside(self.folder.tasks):
            troubles.insert(0, f"tasks {_NOT_FOLLOWED}")
        return troubles

    @property
    def waiting(self) -> str | None:
        """Why tasks wait for devices, if one of them has written it lately."""
        path = self.folder.waiting
        with suppress(OSError, BadcjobsError):
            self.check_inside(self.folder.tasks, path)
            age_s = self.clock.now_ms() / 1000 - path.stat().st_mtime
            if age_s < _WAITING_S:
                return f"tasks are {read_small(path, _MOST_WAITING).decode(errors='replace')}"
        return None

    def accounts(self) -> list[TaskFacts]:
        """Return the attempts with the accounts of their devices, as far as these have been read.

        A file is read once for each change, and only for a short time: the one read longest ago first.
        """
        until_s = self.clock.monotonic_s() + _ACCOUNTS_S
        changed = [state for state in self._states.values() if state.accounts_of is not state.tasks]
        for state in sorted(changed, key=lambda state: state.accounts_at_s):
            now_s = self.clock.monotonic_s()
            if now_s >= until_s:
                break
            state.accounts = state.accounts or ()
            state.accounts_at_s = now_s
            with suppress(OSError, BadcjobsError):  # the snapshot has a remark about it
                self.check_inside(state.path)
                state.accounts = read_accounts(state.path, state.tasks)
                state.accounts_of = state.tasks
        self.unaccounted = sum(state.accounts is None for state in self._states.values())
        return [task for state in self._states.values() for task in state.accounts or ()]

    def read_changes(self, now_ms: int, until_s: float) -> int:
        """Read what has changed, as far as time allows; return the number of files that were never read.

        Raise DatabaseProblem if the run folder is gone or not readable.
        """
        try:
            paths = dict(self._find())
        except OSError as error:
            line = shell_line("ls", "-ld", Path(str(error.filename)))
            what = f"{error.filename} cannot be read: {error.strerror}"  # remarks and HTTP errors show only this line
            raise DatabaseProblem(what, why="the task databases are in it", fix=line) from error
        self.many = len(paths)
        self._forget_removed(paths)

        checked = {name: state.checked_at_ms for name, state in self._states.items()}
        oldest_first = sorted(paths, key=lambda name: checked.get(name, 0))
        for number, name in enumerate(oldest_first):
            if number and self.clock.monotonic_s() >= until_s:
                break
            state = self._states.get(name)
            if state is not None and state.ended and now_ms - state.checked_at_ms < _CHECK_ENDED_EVERY_MS:
                continue
            try:
                self._read(name, paths[name], now_ms, paths)
            except FileNotFoundError:
                continue  # removed since the folder was listed
            except BadcjobsError as error:
                self._troubles[name] = error.what
            except OSError as error:
                self._troubles[name] = f"{name}: {error}"
        return len(paths.keys() - self._states.keys() - self._troubles.keys())

    def _forget_removed(self, paths: Mapping[str, Path]) -> None:
        """Forget files that are gone; the job database is read again, for the tasks of merged and removed files."""
        if self._states.keys() - paths.keys():
            self._states.pop(self.folder.job_database.name, None)
        for name in self._states.keys() - paths.keys():
            del self._states[name]
        for name in self._troubles.keys() - paths.keys():
            del self._troubles[name]

    def _find(self) -> Iterator[tuple[str, Path]]:
        """Yield the databases that exist now."""
        root = self.only or self.folder.path
        if not root.exists():
            raise DatabaseProblem(f"{root} is gone", why="it was moved or removed")
        if self.only is not None:
            yield self.only.name, self.only
            return
        if not self.is_outside(self.folder.tasks):
            with suppress(FileNotFoundError), os.scandir(self.folder.tasks) as entries:  # no task has started
                for entry in entries:
                    path = Path(entry.path)
                    if path.name.endswith(".slurm.json"):
                        self._records.add(path.name)
                    is_database = path.suffix == ".sqlite" and not path.name.startswith(".")
                    if is_database and (entry.is_file() or not path.is_fifo()):  # reading a pipe would never end
                        yield path.name, path
        if self.folder.job_database.exists():
            yield self.folder.job_database.name, self.folder.job_database

    def is_outside(self, path: Path) -> bool:
        """Return whether a path in the run folder is a link that must not be followed."""
        return self.confined and path.is_symlink() and resolves_outside(path, self.folder.path)

    def check_inside(self, *paths: Path) -> None:
        """Raise DatabaseProblem for a link that must not be followed; a file named by the user is always read."""
        for path in paths:
            if path != self.only and self.is_outside(path):
                raise DatabaseProblem(f"{path.name} {_NOT_FOLLOWED}")

    def _read(self, name: str, path: Path, now_ms: int, names: Iterable[str]) -> None:
        self.check_inside(path)
        version = version_of(path.stat())
        state = self._states.get(name)
        if state is None or state.version != version:
            own: set[str] = set()  # tasks that have their own file, and need not be read from the job database
            if not self.only and path == self.folder.job_database:
                own = {file.removesuffix(".sqlite") for file in names if not self.is_outside(self.folder.tasks / file)}
            tasks = read_tasks(path, own)
            if state is None:
                state = self._states[name] = _FileState(path, version, tasks)
            state.version = version
            state.tasks = tasks
            state.end_version = None
        self._read_end(state)
        state.checked_at_ms = now_ms
        self._troubles.pop(name, None)

    def _read_end(self, state: _FileState) -> None:
        """Read how a task ended, if Slurm recorded it beside its file: a task that was killed does not say so."""
        record = end_beside(state.path)
        if record.name not in self._records and state.path != self.only:
            return
        if state.ended or self.is_outside(record):
            return
        version = file_version(record)
        if version not in (None, state.end_version) and means_killed(read_end_beside(state.path)):
            state.tasks = tuple(task.as_killed() if task.alive else task for task in state.tasks)
        state.end_version = version


def with_latest_readings(task: TaskFacts) -> TaskFacts:
    """Return a running task of this machine with the latest readings of its recorder; of another one, unchanged.

    They are in its live folder, whose name must contain the task's: a database could name any folder.
    """
    folder = Path(task.live_folder or "")
    if task.state != "running" or not folder.name.startswith(f"badcjobs-{task.name}-"):
        return task
    try:
        local = LocalFolder(folder)
        latest = parse_json(read_small(local.latest_file))
        with suppress(OSError):  # of another user
            local.watched_file.touch()
        at_ms = int(latest["at_ms"])
        readings = {int(device_id): parse_fields(Reading, values) for device_id, values in latest["devices"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return task  # of another machine, or it has just ended
    devices = []
    for device in task.its_devices:
        if device.device_id in readings and at_ms > (device.read_at_ms or 0):
            device = replace(device, reading=readings[device.device_id], read_at_ms=at_ms)
        devices.append(device)
    return replace(task, its_devices=tuple(devices))


# --- the array --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArrayOfRun:
    """The array tasks that are expected, and the number of their chunks; None: unknown."""

    job_id: str = ""
    indices: Sequence[int] = ()
    submitted_at_ms: int = 0
    chunks: int | None = None
    count: int = 0  # tasks of the array, including those not submitted again; 0: no array
    trouble: str | None = None
    cut_short: CutShort | None = None

    def as_submitted(self, tasks: Sequence[TaskFacts]) -> Iterator[TaskFacts]:
        """Yield the tasks; a task that has ended and was submitted again is waiting."""
        for task in tasks:
            again = task.job_id != self.job_id and task.array_index in self.indices and task.state != "done"
            over = task.ended_at_ms is not None and task.ended_at_ms < self.submitted_at_ms
            yield replace(task, state="waiting") if again and over else task

    def waiting(self, tasks: Sequence[TaskFacts], state: str) -> Iterator[TaskFacts]:
        """Yield the array tasks that have not published anything yet."""
        there = {task.array_index for task in tasks}
        job_id = self.job_id or next((task.job_id for task in tasks), "")
        for index in self.indices:
            if index not in there:
                yield TaskFacts(f"{job_id}_{index}", job_id, index, state=state)


def read_array(files: RunFiles) -> ArrayOfRun:
    """Return the array of a run folder; a problem with its files is stored in ``trouble``."""
    folder = files.folder
    run = folder.path
    try:
        files.check_inside(file_in(run), intent_in(run), folder.run_toml)
        array = ArrayOfRun(cut_short=find_cut_short(run))
        frozen = FrozenRun.read(folder.run_toml)
        record = read_record(run)
    except BadcjobsError as error:  # show the run even if its files were edited
        return ArrayOfRun(trouble=error.what)
    if frozen is not None and frozen.array is not None:
        array = replace(array, indices=frozen.array.indices, count=frozen.array.count)
    if record is None:
        return array
    job = record.job
    return replace(
        array,
        job_id=job.job_id,
        indices=job.indices,
        submitted_at_ms=record.submitted_at_ms,
        chunks=record.chunks,
        count=array.count or len(job.indices),
    )


def is_abandoned(array: ArrayOfRun, files: RunFiles, tasks: Sequence[TaskFacts]) -> bool:
    """Return whether tasks have not started and the emulation that should start them has ended."""
    if not array.indices or any(task.state == "running" for task in tasks):
        return False
    last_start_ms = max((task.started_at_ms for task in tasks), default=0)
    if array.submitted_at_ms > last_start_ms or array.cut_short is not None:
        return False  # they were, or may have been, submitted to Slurm since
    job_id = last_job_of(tasks)
    run = files.folder.path
    try:
        rows = rows_in(run, job_id)
        files.check_inside(rows.parent, rows, lock_file_in(run))
    except (BadcjobsError, ValueError):  # ValueError: the job id is not a valid file name
        return False
    return is_emulation_over(run, job_id)


def last_job_of(tasks: Sequence[TaskFacts]) -> str:
    """Return the job id of the task that started last; empty: none has started."""
    started = [task for task in tasks if task.started_at_ms]
    return max(started, key=lambda task: task.started_at_ms).job_id if started else ""
