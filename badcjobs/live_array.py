"""Which array tasks a run should have, as run.toml and submitted.json say: those that nobody has heard of wait.

A submit that was cut short is told of as well; Slurm is asked by nobody here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.errors import BadcjobsError
from badcjobs.frozen_run import FrozenRun
from badcjobs.model import CutShort
from badcjobs.monitor.frame import TaskLine
from badcjobs.paths import RunFolder
from badcjobs.run_lock import lock_in
from badcjobs.scheduler.submitted_file import Record, file_in, intent_in, read_record
from badcjobs.trace import find_cut_short, is_emulation_over, rows_in


@dataclass(frozen=True, slots=True)
class ArrayOfRun:
    """Which array tasks there should be, and how many chunks they have together; None: nobody knows."""

    job_id: str = ""
    indices: Sequence[int] = ()
    submitted_at_ms: int | None = None
    chunks: int | None = None
    count: int = 0  # tasks of the array, also of those that were not handed in again; 0: there is none
    trouble: str | None = None
    cut_short: CutShort | None = None

    def as_submitted(self, lines: Sequence[TaskLine]) -> Iterator[TaskLine]:
        """Yield the tasks; one that has ended and was handed in again since waits."""
        for line in lines:
            since_ms = self.submitted_at_ms
            again = since_ms is not None and line.job_id != self.job_id and line.array_index in self.indices
            over = line.ended_at_ms is not None and since_ms is not None and line.ended_at_ms < since_ms
            yield replace(line, state="waiting") if again and over and line.state != "done" else line

    def waiting(self, lines: Sequence[TaskLine], state: str = "waiting") -> Iterator[TaskLine]:
        """Yield the array tasks of which nothing was heard yet."""
        there = {line.array_index for line in lines}
        job_id = self.job_id or next((line.job_id for line in lines), "")
        for index in self.indices:
            if index not in there:
                yield TaskLine(f"{job_id}_{index}", job_id, index, state)


def read_array(folder: RunFolder, check: Callable[[Path], None]) -> ArrayOfRun:
    """Return what the files of a run folder say; what is wrong with them, also by ``check``, is its ``trouble``."""
    try:
        for path in (file_in(folder.path), intent_in(folder.path), folder.run_toml):
            check(path)
        record, frozen = read_record(folder.path), FrozenRun.read(folder.run_toml)
        cut_short = find_cut_short(folder.path)
    except BadcjobsError as error:  # a run is looked at even if somebody has edited its files
        return ArrayOfRun(trouble=error.what)
    return replace(_array_of(record, frozen), cut_short=cut_short)


def _array_of(record: Record | None, frozen: FrozenRun | None) -> ArrayOfRun:
    if record is not None:
        return _of_record(record, frozen)
    shape = frozen.array if frozen else None
    if shape is None:
        return ArrayOfRun()
    indices = range(shape.first, shape.first + shape.count * shape.step, shape.step)
    return ArrayOfRun(indices=indices, count=shape.count)


def _of_record(record: Record, frozen: FrozenRun | None) -> ArrayOfRun:
    count = frozen.array.count if frozen and frozen.array else len(record.job.indices)
    return ArrayOfRun(record.job.job_id, record.job.indices, record.submitted_at_ms, record.chunks, count)


def is_given_up(array: ArrayOfRun, folder: RunFolder, lines: Sequence[TaskLine], check: Callable[[Path], None]) -> bool:
    """Say whether an emulation was to start the tasks that have not begun, and is over; not while one is running.

    ``check`` is of the files, as above.
    """
    if not array.indices or any(line.state == "running" for line in lines):
        return False
    begun_at_ms = max((line.started_at_ms or 0 for line in lines), default=0)
    submitted = array.submitted_at_ms is not None and array.submitted_at_ms > begun_at_ms
    if submitted or array.cut_short is not None:
        return False  # Slurm has them since, or may have
    job_id = last_job_of(lines)
    try:
        for path in ((rows := rows_in(folder.path, job_id)).parent, rows, lock_in(folder.path)):
            check(path)
    except (BadcjobsError, ValueError):  # the second: a number that is no name for a file
        return False
    return is_emulation_over(folder.path, job_id)


def last_job_of(lines: Sequence[TaskLine]) -> str:
    """Return the job of the task that began last; empty: none has begun."""
    begun = [line for line in lines if line.started_at_ms is not None]
    return max(begun, key=lambda line: line.started_at_ms or 0).job_id if begun else ""


def mark_of_array(folder: RunFolder) -> object:
    """Return what is another thing once one of these files has changed."""
    return tuple(map(_mark, (file_in(folder.path), intent_in(folder.path), folder.run_toml)))


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
