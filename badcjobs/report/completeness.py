"""The proof that a job is complete: the rows of the sources in run.toml against the chunks of its job database.

And what to do where it is not: the commands that do the rest, or merge what is new.

First by counting: the rows of every array task's share, each with the sum of its identities' hashes, so that renamed
rows are no equal rows. Where that does not add up, identity by identity in a scratch database. What stands in the job
database is ``store``'s business, what a row of a source is ``manifest``'s.
"""

from __future__ import annotations

import itertools
import shlex
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from badcjobs.errors import BadInput
from badcjobs.model import ArrayShape
from badcjobs.paths import RunFolder, is_there
from badcjobs.report.headlines import news_words
from badcjobs.report.words import index_ranges
from badcjobs.settings import FrozenRun
from badcjobs.sources.open import Sources, open_sources
from badcjobs.store.connect import open_job_database
from badcjobs.store.previous_results import NOT_LISTED, SourceRows, known_lengths, scratch_rows
from badcjobs.store.read_job import read_freshness
from badcjobs.store.read_model import Completeness, Freshness, JobFacts, TaskFacts
from badcjobs.store.submission_record import NO_NOTE, Trace, find_trace

Progress = Callable[[int], None]

_BATCH = 10_000  # rows between two words of progress
_LEFT = ("pending", "skipped", NOT_LISTED)


def prove_complete(database: Path, facts: JobFacts, progress: Progress = lambda rows: None) -> Completeness:
    """Compare the sources of a run with its job database; what cannot be found out is a remark, not an error.

    Of several runs (the waves of a plan) the sources are compared together; which array task would do what is left is
    for each run alone to say.
    """
    try:
        runs = _find_frozen(database.absolute().parent, facts.file_folders)
    except BadInput as error:
        return _describe(_by_task(facts, ()), facts, why_unknown=_reason(error))
    run, frozen = runs[0]
    shape = frozen.array if len(runs) == 1 else None
    absent = absent_indices(facts, shape)
    balance, why_unknown = _by_task(facts, absent), None
    try:
        balance = _compare(database, facts, [_open_frozen(one) for _, one in runs], shape, absent, progress)
    except BadInput as error:
        why_unknown = _reason(error)
    except (OSError, sqlite3.Error) as error:
        what = "source" if len(runs) == 1 else "sources"
        why_unknown = f"the {what} cannot be compared with the job database: {error}"
    if len(runs) > 1:
        return _describe(balance, facts, why_unknown=why_unknown)
    unmerged = tuple(index for index in balance.missing if index in facts.merged.new_indices)
    balance = _leave_out(balance, facts.merged.new_indices)
    trace = find_trace(run.path, max(facts.tasks, key=lambda task: task.started_at_ms).job_id if facts.tasks else "")
    finish = _commands(balance, frozen, run, facts, trace)
    return replace(
        _describe(balance, facts, why_unknown=why_unknown),
        finish=finish,
        left_indices=_left_indices(balance) if finish and frozen.array is not None else (),
        missing_logs=tuple(log for log in map(trace.log_of, balance.missing) if log is not None),
        missing_notes=tuple(trace.notes.get(index, NO_NOTE) for index in balance.missing) if trace.emulated else (),
        unmerged_indices=unmerged,
    )


def _leave_out(balance: _Balance, unread: Sequence[int]) -> _Balance:
    """Return the balance without array tasks whose newest database nobody has merged: it may have done the rest."""
    missing = tuple(index for index in balance.missing if index not in unread)
    left, failed = balance.left.difference(unread), balance.failed.difference(unread)
    return replace(balance, missing=missing, left=left, failed=failed)


def absent_indices(facts: JobFacts, shape: ArrayShape | None) -> list[int]:
    """Return the array indices that left no database.

    None are absent once a task outside the array has taken the whole source: then every chunk is in the database.
    """
    if shape is None or any(_is_outside(task) and task.shard_count == 1 for task in facts.tasks):
        return []
    seen = {task.array_index for task in facts.tasks if not _is_outside(task)}
    return [i for i in range(shape.first, shape.first + shape.count * shape.step, shape.step) if i not in seen]


def _is_outside(task: TaskFacts) -> bool:
    return task.job_id.startswith("local")


def _find_frozen(beside: Path, file_folders: Sequence[str]) -> list[tuple[RunFolder, FrozenRun]]:
    """Return the run whose tasks were merged: beside the job database or, where that lies elsewhere, above them.

    Several, where the task databases are of several runs; then each of them has to say what its source was.
    """
    if (frozen := _read_frozen(RunFolder(beside))) is not None:
        return [(RunFolder(beside), frozen)]
    above = [(beside / folder).parent for folder in file_folders if Path(folder).name == "tasks"]
    # By their real names: one run may have been given by two paths.
    runs = {path.resolve(): RunFolder(path) for path in above if is_there(RunFolder(path).run_toml)}
    found = [(run, frozen) for run in runs.values() if (frozen := _read_frozen(run)) is not None]
    if 0 < len(found) < len({path.resolve() for path in above}):  # rows of the others would be proved by nothing
        why = "its task databases are of several runs, not all of which have one"
        raise BadInput("no run.toml beside the job database", why=why)
    if not found:
        raise BadInput("no run.toml beside the job database")
    return found


def _read_frozen(run: RunFolder) -> FrozenRun | None:
    frozen = FrozenRun.read(run.run_toml)
    if frozen is not None:
        given, root = frozen.settings.get("source"), frozen.settings.get("root", "")
        if not isinstance(given, tuple) or not all(isinstance(path, str) for path in (*given, root)):
            raise BadInput(f"{run.run_toml} does not say what the source was")
    return frozen


def _open_frozen(frozen: FrozenRun) -> Sources:
    root = frozen.settings.get("root")
    paths = [Path(path) for path in frozen.settings["source"]]
    return open_sources(paths, root=None if root is None else Path(root), cutting=frozen.cutting)


def _reason(error: BadInput) -> str:
    return error.what if error.why is None else f"{error.what}: {error.why.splitlines()[0]}"


# --- who takes which row ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shares:
    """Which array index takes a row of the source: the same rule by which the tasks took theirs."""

    shape: ArrayShape | None  # None: there is no array, or its tasks cut the source in different ways
    step_tasks: int = 1
    by_manifest: bool = False  # a list of manifests: the position picks the line

    def rule(self) -> Callable[[int, int], int]:
        """Return the function that maps a row number and its part of the sources to a position in the array.

        Recordings that are cut are taken whole: all their chunks have the number of the recording.
        """
        step, count = self.step_tasks, 1 if self.shape is None else self.shape.count
        return (lambda row, part: part) if self.by_manifest else (lambda row, part: row // step % count)

    def index_at(self, position: int) -> int | None:
        """Return the array index at a position; None when no array task has it."""
        shape = self.shape
        return None if shape is None or position >= shape.count else shape.first + position * shape.step


def find_shares(tasks: Sequence[TaskFacts], shape: ArrayShape | None, *, by_manifest: bool) -> Shares:
    """Return how the array's tasks, and the tasks of the steps in them, have cut the source."""
    if shape is None or by_manifest:
        return Shares(shape, by_manifest=by_manifest)
    counts = {task.shard_count for task in tasks if task.shard_count and not _is_outside(task)}
    steps = {count // shape.count for count in counts if count % shape.count == 0} or {1}
    return Shares(shape, step_tasks=min(steps)) if len(steps) == 1 else Shares(None)


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Balance:
    """The rows of the source by state, and the array indices (None: no array task's) that have work left."""

    states: Mapping[str, int]
    left: set[int | None]
    failed: set[int | None]
    missing: tuple[int, ...] = ()
    strangers: int = 0
    not_listed_examples: tuple[str, ...] = ()
    strangers_examples: tuple[str, ...] = ()


def _by_task(facts: JobFacts, absent: Sequence[int], not_listed: int = 0) -> _Balance:
    indices = [(None if _is_outside(task) else task.array_index, task) for task in facts.tasks]
    return _Balance(
        states={**facts.chunks, NOT_LISTED: not_listed},
        left={*absent, *(index for index, task in indices if task.pending)},
        failed={index for index, task in indices if task.failed},
        missing=tuple(absent),
    )


def _compare(
    database: Path,
    facts: JobFacts,
    sources: Sequence[Sources],
    shape: ArrayShape | None,
    absent: list[int],
    progress: Progress,
) -> _Balance:
    """Compare the sources of a run with its job database; those of several together have no shape."""
    by_manifest = any(one.manifests_listed is not None for one in sources) and len(sources) == 1
    shares = find_shares(facts.tasks, shape, by_manifest=by_manifest)
    lengths = known_lengths(database) if any(one.cutting.cuts_recordings for one in sources) else {}
    tally = _count(sources, shares, lengths, progress)
    missing = [index for index in absent if index in tally]
    if _adds_up(database, facts, tally, missing) and not (shape and _is_anybodys(facts)):
        return _by_task(facts, missing, sum(tally[index][0] for index in missing))
    return _by_identity(database, facts, sources, shares, absent, lengths, progress)


def _read_rows(
    sources: Sequence[Sources],
    shares: Shares,
    lengths: Mapping[str, float],
    progress: Progress,
    take: Callable[[int, tuple[str, str]], None],
) -> None:
    """Hand every row of the sources on: its position in the array, and its identity."""
    position_of, seen = shares.rule(), itertools.count(1)

    def note(row: int, part: int, key: tuple[str, str]) -> None:
        take(position_of(row, part), key)
        if (rows := next(seen)) % _BATCH == 0:
            progress(rows)

    for one in sources:
        one.read_identities(note, lengths)


def _count(
    sources: Sequence[Sources], shares: Shares, lengths: Mapping[str, float], progress: Progress
) -> dict[int | None, tuple[int, int]]:
    """Return how many rows every array index takes, and the sum of the hashes of their identities."""
    rows: dict[int, int] = defaultdict(int)
    sums: dict[int, int] = defaultdict(int)

    def take(position: int, key: tuple[str, str]) -> None:
        rows[position] += 1
        sums[position] += hash(key)

    _read_rows(sources, shares, lengths, progress, take)
    tally: dict[int | None, tuple[int, int]] = {}
    for position, many in rows.items():
        index = shares.index_at(position)
        before = tally.get(index, (0, 0))  # positions behind the array's end belong to no task
        tally[index] = before[0] + many, before[1] + sums[position]
    return tally


def _adds_up(
    database: Path, facts: JobFacts, tally: Mapping[int | None, tuple[int, int]], missing: Sequence[int]
) -> bool:
    """Say whether the job database holds exactly the rows of all tasks but the missing ones."""
    there = [tally[index] for index in tally if index not in missing]
    if sum(rows for rows, _ in there) != sum(facts.chunks.values()):
        return False
    with closing(open_job_database(database)) as db:
        listed = sum(map(hash, db.execute("SELECT recording_id, chunk_id FROM chunk")))
    return listed == sum(hashes for _, hashes in there)


def _is_anybodys(facts: JobFacts) -> bool:
    """Say whether the task that a chunk is unfinished in does not tell which array index would finish it."""
    return bool(facts.chunks.get("skipped")) or any(
        _is_outside(task) and (task.pending or task.failed) for task in facts.tasks
    )


def _by_identity(
    database: Path,
    facts: JobFacts,
    sources: Sequence[Sources],
    shares: Shares,
    absent: list[int],
    lengths: Mapping[str, float],
    progress: Progress,
) -> _Balance:
    with scratch_rows() as rows:
        _read_rows(sources, shares, lengths, progress, lambda position, key: rows.add(key, position))
        rows.compare_with(database)
        return _read_balance(rows, facts, shares, absent)


def _read_balance(rows: SourceRows, facts: JobFacts, shares: Shares, absent: list[int]) -> _Balance:
    states: Counter[str] = Counter()
    indices: dict[str, set[int | None]] = {}
    for position, state, many in rows.states():
        states[state] += many
        indices.setdefault(state, set()).add(shares.index_at(position))
    unlisted = indices.get(NOT_LISTED, set())
    by_task = _by_task(facts, absent if unlisted else ())
    strangers = sum(facts.chunks.values()) - (sum(states.values()) - states[NOT_LISTED])
    known = shares.shape is not None
    return _Balance(
        states=states,
        left=set[int | None]().union(*(indices.get(state, ()) for state in _LEFT)) if known else by_task.left,
        failed=indices.get("failed", set()) | indices.get("poison", set()) if known else by_task.failed,
        missing=tuple(i for i in absent if i in unlisted) if known else by_task.missing,
        strangers=strangers,
        not_listed_examples=rows.only_in_source() if unlisted else (),
        strangers_examples=rows.only_in_job() if strangers else (),
    )


# --- what it says -----------------------------------------------------------------------------------------------------


def _describe(balance: _Balance, facts: JobFacts, *, why_unknown: str | None) -> Completeness:
    states, known = balance.states, why_unknown is None
    return Completeness(
        expected=sum(states.values()) if known else None,
        why_unknown=why_unknown,
        listed=sum(facts.chunks.values()),
        done=states.get("done", 0),
        failed=states.get("failed", 0),
        poison=states.get("poison", 0),
        pending=states.get("pending", 0),
        elsewhere=states.get("skipped", 0),
        not_listed=states[NOT_LISTED] if known else None,
        strangers=balance.strangers if known else None,
        not_listed_examples=balance.not_listed_examples,
        strangers_examples=balance.strangers_examples,
        missing_indices=balance.missing,
    )


def _left_indices(balance: _Balance) -> tuple[int, ...]:
    """Return the array tasks that would do what is left; none where somebody else would have to."""
    indices = balance.left or balance.failed
    return () if None in indices else tuple(sorted(index for index in indices if index is not None))


def _commands(balance: _Balance, frozen: FrozenRun, run: RunFolder, facts: JobFacts, trace: Trace) -> tuple[str, ...]:
    """Return the lines that do what is left; failed chunks alone are worth a line too, every run tries them again."""
    if not balance.missing and sum(balance.states.values()) == balance.states.get("done", 0):
        return ()
    if facts.merged.new_indices and not balance.left and not balance.failed:
        return ()  # all that is left may be done in what is not merged yet
    return finish_lines(frozen, run.path, facts.last_settings, trace, _left_indices(balance))


# --- what to do -------------------------------------------------------------------------------------------------------


def finish_lines(
    frozen: FrozenRun, out: Path, told: Mapping[str, Any], trace: Trace, left: Sequence[int]
) -> tuple[str, ...]:
    """Return the lines, the last one without Slurm.

    ``told``: the settings of the task that started last. ``left``: the array tasks that would do what is left; none
    where nobody knows them, or somebody else has to.
    """
    here = frozen.command_line(out, told)
    if trace.emulated:
        return (trace.line() or here,)
    if frozen.array is None or not left:
        return (here,)
    if trace.command:
        return trace.line("--again"), here
    return f"sbatch --array={index_ranges(left, frozen.array.step)} …", here


def find_news(db: sqlite3.Connection, database: Path) -> str | None:
    """Return the remark of an open job database; None: it is up to date, or nobody can say."""
    try:
        merged, file_folders = read_freshness(db, database.parent)
    except (sqlite3.Error, OSError):  # a damaged page elsewhere is no reason to give nothing
        return None
    news, command = news_words(merged), merge_again(database, file_folders, merged)
    if not news:
        return None
    return f"merged: {news}" + ("" if command is None else f"; to take that in: {command}")


def merge_again(database: Path, file_folders: Sequence[str], merged: Freshness) -> str | None:
    """Return the command that brings a job database up to date; None: there is nothing to merge.

    That files are not here is no reason for a command: what is not here cannot be merged.
    """
    if merged == Freshness(merged.as_of_ms, gone=merged.gone, closed=merged.closed):
        return None
    if database.name == "job.sqlite" and tuple(file_folders) == ("tasks",):
        return shlex.join(["badcjobs", "merge", str(database.parent)])
    folders = [str(database.parent / folder) for folder in file_folders]
    return shlex.join(["badcjobs", "merge", *folders, "-o", str(database)])
