"""Looks at a run again and again: each look is one Frame of the live view.

A run is seen through its published databases alone (``live_files.py``), so this works on a login node while the tasks
run elsewhere. ``machine_view.py`` looks at this machine in the same way.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from badcjobs.errors import DatabaseProblem
from badcjobs.live_array import ArrayOfRun, is_given_up, mark_of_array, read_array
from badcjobs.live_files import RunFiles
from badcjobs.live_go_on import commands_that_go_on, emulation_to_repeat
from badcjobs.machine_view import open_machine_view as open_machine_view
from badcjobs.monitor.frame import Frame, TaskLine, Total
from badcjobs.monitor.standstill import is_done, standstill
from badcjobs.monitor.totals import add_up
from badcjobs.paths import RunFolder, is_there
from badcjobs.run_lock import is_emulated_now, lock_in
from badcjobs.seams import Clock
from badcjobs.store.live_reader import read_tasks
from badcjobs.task_lines import ToldTask

_SIGNS_OF_A_RUN = ("tasks", "run.toml", "submitted.json", "job.sqlite", "logs")


class View(Protocol):
    """Something that can be looked at again and again."""

    def look(self, patience_s: float | None = None) -> Frame:
        """Return what is known now; cheap when nothing has changed. What takes longer is left to the next look."""
        ...

    def close(self) -> None: ...


def open_run_view(path: Path, clock: Clock, *, confined: bool = False) -> RunView:
    """Look at a run folder, its tasks folder, a task database or a job database; raise DatabaseProblem for others.

    ``confined``: follow no link out of the folder.
    """
    if not is_there(path):
        raise DatabaseProblem(
            f"{path} does not exist",
            why="a run folder is made by the first task that starts, or by badcjobs submit",
            fix="give the run folder: what run or submit got as --out",
        )
    if path.is_dir():
        return RunView(RunFiles(_folder_of(path), None, clock, confined), clock, title=str(path))
    try:
        read_tasks(path)
    except DatabaseProblem as error:
        raise DatabaseProblem(
            error.what,
            why="a task database or a job database is wanted",
            fix="give the run folder: what run or submit got as --out",
        ) from error
    return RunView(RunFiles(RunFolder(path.absolute().parent), path, clock, confined), clock, title=str(path))


def _folder_of(path: Path) -> RunFolder:
    try:
        names = set(os.listdir(path))  # noqa: PTH208 - names, not paths
    except OSError as error:
        line = shlex.join(["ls", "-ld", str(path)])
        raise DatabaseProblem(f"{path} cannot be looked into", why=error.strerror, fix=line) from error
    if path.absolute().name == "tasks" and any(name.endswith(".sqlite") for name in names):
        return RunFolder(path.absolute().parent)
    if names and not names & set(_SIGNS_OF_A_RUN):
        raise DatabaseProblem(
            f"{path} is no run folder",
            why=f"it holds none of {', '.join(_SIGNS_OF_A_RUN)}",
            fix="give the run folder: what run or submit got as --out",
        )
    return RunFolder(path)


@dataclass(slots=True)
class RunView:
    """A run folder, or one database of it."""

    files: RunFiles
    clock: Clock
    title: str
    _array: ArrayOfRun = field(default_factory=ArrayOfRun)
    _array_mark: object = None
    _go_on: tuple[object, tuple[str, ...]] = (None, ())  # for which standstill, and the commands

    def look(self, patience_s: float | None = None) -> Frame:
        """Read what has changed and return what is known now; raise DatabaseProblem where the run is gone."""
        now_ms = self.clock.now_ms()
        until_s = math.inf if patience_s is None else self.clock.monotonic_s() + patience_s
        unread = self.files.read_changes(now_ms, until_s)
        self._read_array()
        every = self.files.tasks
        told = sorted((one.at(now_ms) for one in _newest(every)), key=lambda one: _in_order(one.line))
        lines = [one.line for one in told]
        waiting = () if unread else self._array.waiting(lines, self._state_of_others(lines))
        tasks = sorted((*self._array.as_submitted(lines), *waiting), key=_in_order)
        devices = tuple(device for one in told for device in one.devices)
        total = add_up(
            tasks,
            devices,
            **_everywhere(every),
            source_chunks=self._array.chunks,
            array_count=self._array.count,
            alone=self.files.only is not None,
            all_listed=bool(self._array.indices) and not unread and all(_has_listed(task) for task in tasks),
        )
        return Frame(
            at_ms=now_ms,
            title=self.title,
            of_run=True,
            tasks=tuple(tasks),
            devices=devices,
            alerts=tuple(alert for one in told if one.line.state == "running" for alert in one.alerts),
            total=total if unread else self._with_way_on(total, tasks, every),
            remarks=tuple(self._remarks(every)),
            unread=unread,
        )

    def close(self) -> None:
        """Do nothing: no file is kept open."""

    def _read_array(self) -> None:
        """Read which tasks there should be, where that is written down and has changed."""
        if self.files.only is not None:
            return
        mark = mark_of_array(self.files.folder)
        if mark != self._array_mark:
            self._array, self._array_mark = read_array(self.files.folder, self.files.check_inside), mark

    def _state_of_others(self, lines: Sequence[TaskLine]) -> str:
        """Return the state of array tasks of which nothing was heard."""
        given_up = is_given_up(self._array, self.files.folder, lines, self.files.check_inside)
        return "unbegun" if given_up else "waiting"

    def _remarks(self, every: Sequence[ToldTask]) -> Iterator[str]:
        yield from self.files.troubles
        if self._array.trouble:
            yield self._array.trouble
        if self._array.cut_short:
            yield self._array.cut_short.what
        if not every and not self.files.troubles:
            yield "no task has published anything yet"

    def _is_emulated(self) -> bool:
        lock = lock_in(self.files.folder.path)
        outside = self.files.only is not None or any(map(self.files.strays, (lock.parent, lock)))
        return not outside and is_emulated_now(self.files.folder.path)

    def _with_way_on(self, total: Total, tasks: Sequence[TaskLine], every: Sequence[ToldTask]) -> Total:
        """Say where nobody is at work though some is left, and how to go on with it."""
        said = standstill(total)
        if (cut_short := self._array.cut_short) is not None and not total.states.get("running") and not is_done(total):
            return replace(total, standstill=said or "no task is running", go_on=(cut_short.command,))
        if not tasks and self.files.only is None:
            over = emulation_to_repeat(self.files.folder, self.files.check_inside)
            return total if over is None else replace(total, standstill=over.what, go_on=(over.command,))
        if said is None or (not total.states.get("silent") and self._is_emulated()):
            return total  # also between two tasks of an emulation: it starts the next one
        if self._go_on[0] != (said, self._array_mark):
            settings = max(every, key=lambda told: told.age).settings if every else None
            alone = self.files.only is not None  # what else there is of the run is not looked at
            files = self.files
            commands = () if alone else commands_that_go_on(files.folder, tasks, settings, files.check_inside)
            self._go_on = (said, self._array_mark), commands
        return replace(total, standstill=said, go_on=self._go_on[1])


def _newest(every: Sequence[ToldTask]) -> list[ToldTask]:
    """Return the newest attempt of each array task."""
    newest: dict[object, ToldTask] = {}
    for told in every:
        other = newest.get(told.part)
        if other is None or told.age > other.age:
            newest[told.part] = told
    return list(newest.values())


def _has_listed(task: TaskLine) -> bool:
    return task.begun and (task.shard_count is not None or task.chunks > 0)


def _everywhere(every: Sequence[ToldTask]) -> dict[str, Any]:
    """Return what all attempts amount to, also those that another one has followed."""
    return {
        "done_everywhere": sum(told.line.done for told in every),
        "audio_everywhere_s": sum(told.line.audio_done_s for told in every),
        "lives_everywhere": [told.life for told in every],
    }


def _in_order(line: TaskLine) -> tuple[int, str, int, int]:
    return len(line.job_id), line.job_id, line.array_index, line.procid or 0  # 999 before 1000
