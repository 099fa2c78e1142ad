"""The published databases of a run, each read again only when it has changed, and what each of them said last."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from badcjobs.errors import BadcjobsError, DatabaseProblem
from badcjobs.paths import RunFolder
from badcjobs.report.task_states import tells_of_a_kill
from badcjobs.seams import Clock
from badcjobs.store.live_reader import read_tasks
from badcjobs.store.merging.slurm_ends import end_beside, read_end_beside
from badcjobs.task_lines import ToldTask, tell_task

_ENDED_IS_LOOKED_AT_EVERY_MS = 60_000  # a task that has ended publishes nothing more

Mark = tuple[int, int, int]


def mark_of(status: os.stat_result) -> Mark:
    """Return what is another thing once a file was replaced."""
    return status.st_mtime_ns, status.st_size, status.st_ino


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a path ends outside a folder, by whatever links."""
    try:
        return not path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # links that lead in a circle
        return True


@dataclass(slots=True)
class _Seen:
    """What a file said when it was last read."""

    mark: Mark
    tasks: tuple[ToldTask, ...]
    looked_at_ms: int
    end_mark: Mark | None = None  # of the record of its end that was read

    @property
    def ended(self) -> bool:
        return all(not told.line.alive for told in self.tasks)


@dataclass(slots=True)
class RunFiles:
    """The databases of a run folder, or one of them alone (``only``).

    ``confined``: of the run folder, no link is followed that leads out of it.
    """

    folder: RunFolder
    only: Path | None
    clock: Clock
    confined: bool = False
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _troubles: dict[str, str] = field(default_factory=dict)
    _records: set[str] = field(default_factory=set)  # names of files in which somebody says how a task ended

    @property
    def tasks(self) -> list[ToldTask]:
        """Every attempt that any file told of."""
        return [told for seen in self._seen.values() for told in seen.tasks]

    @property
    def troubles(self) -> list[str]:
        """Why some files could not be read."""
        outside = [_not_followed("tasks")] if self.only is None and self.strays(self.folder.tasks) else []
        return outside + [self._troubles[name] for name in sorted(self._troubles)]

    def read_changes(self, now_ms: int, until_s: float) -> int:
        """Read what has changed, as far as there is time; return how many files were never read yet."""
        found = dict(self.find())
        for name in self._seen.keys() - found.keys():
            del self._seen[name]
        self._troubles = {name: words for name, words in self._troubles.items() if name in found}
        for number, name in enumerate(sorted(found, key=self._looked_at_ms)):  # so that each has its turn
            if number and self.clock.monotonic_s() >= until_s:
                break
            seen, path = self._seen.get(name), found[name]
            if seen and seen.ended and now_ms - seen.looked_at_ms < _ENDED_IS_LOOKED_AT_EVERY_MS:
                continue
            try:
                self._read(name, path, now_ms, found)
            except FileNotFoundError:
                continue  # gone since the folder was listed: the next look knows
            except (OSError, BadcjobsError) as error:
                self._troubles[name] = error.what if isinstance(error, BadcjobsError) else f"{name}: {error}"
        return len(found.keys() - self._seen.keys() - self._troubles.keys())

    def find(self) -> Iterator[tuple[str, Path]]:
        """Yield the databases that there are now, by name; raise DatabaseProblem where the run is gone or closed."""
        try:
            yield from self._find()
        except OSError as error:
            line = shlex.join(["ls", "-ld", str(error.filename)])
            what = f"{error.filename} cannot be looked into: {error.strerror}"  # all that a remark or an answer shows
            raise DatabaseProblem(what, why="how the tasks are is written there", fix=line) from error

    def _find(self) -> Iterator[tuple[str, Path]]:
        whole = self.only or self.folder.path
        if not whole.exists():
            raise DatabaseProblem(f"{whole} is gone", why="it was there before: somebody has moved or removed it")
        if self.only is not None:
            yield self.only.name, self.only
            return
        if not self.strays(self.folder.tasks):
            yield from self._find_tasks()
        if self.folder.job_database.exists():
            yield self.folder.job_database.name, self.folder.job_database

    def _find_tasks(self) -> Iterator[tuple[str, Path]]:
        try:
            with os.scandir(self.folder.tasks) as entries:
                for entry in entries:
                    if entry.name.endswith(".sqlite") and not entry.name.startswith(".") and not _is_pipe(entry):
                        yield entry.name, Path(entry.path)
                    elif entry.name.endswith(".slurm.json"):
                        self._records.add(entry.name)
        except FileNotFoundError:
            pass  # no task has begun

    def strays(self, path: Path) -> bool:
        """Whether something in the run folder is a link that nobody may follow."""
        return self.confined and path.is_symlink() and leads_out(path, self.folder.path)

    def check_inside(self, path: Path) -> None:
        """Raise DatabaseProblem for a link that nobody may follow; a file that was asked for by name is read."""
        if path != self.only and self.strays(path):
            raise DatabaseProblem(_not_followed(path.name))

    def names_known(self, path: Path, found: Iterable[str]) -> set[str]:
        """Return the tasks that a job database need not tell of: they have a file of their own."""
        if self.only or path != self.folder.job_database:
            return set()
        return {name.removesuffix(".sqlite") for name in found if not self.strays(self.folder.tasks / name)}

    def _looked_at_ms(self, name: str) -> int:
        return self._seen[name].looked_at_ms if name in self._seen else 0

    def _read(self, name: str, path: Path, now_ms: int, found: Iterable[str]) -> None:
        self.check_inside(path)
        status = path.stat()
        mark = mark_of(status)
        seen = self._seen.get(name)
        if seen is None or seen.mark != mark:
            tasks = read_tasks(path, self.names_known(path, found))
            told = tuple(tell_task(task, status.st_mtime_ns // 10**6, status.st_size) for task in tasks)
            self._seen[name] = seen = _Seen(mark, told, now_ms)
        if not seen.ended and path != self.folder.job_database:
            self._read_end(seen, path)
        seen.looked_at_ms = now_ms
        self._troubles.pop(name, None)

    def _read_end(self, seen: _Seen, path: Path) -> None:
        """Read how a task ended that has not said so itself, where somebody has written it beside its database."""
        record = end_beside(path)
        if record.name not in self._records and path != self.only:
            return
        try:
            mark = mark_of(record.stat())
        except OSError:
            return  # nobody has
        if mark == seen.end_mark or self.strays(record):
            return
        seen.end_mark = mark
        if tells_of_a_kill(read_end_beside(path)):
            seen.tasks = tuple(told.killed if told.line.alive else told for told in seen.tasks)


def _is_pipe(entry: os.DirEntry[str]) -> bool:
    """Say whether nobody ever comes to the end of something: a pipe, a socket, a device."""
    try:
        return not entry.is_file() and not entry.is_dir() and not stat.S_ISREG(entry.stat().st_mode)
    except OSError:
        return False  # a link to nowhere: who reads it is told


def _not_followed(name: str) -> str:
    return f"{name} is a link that leads out of the run folder: it is not followed"
