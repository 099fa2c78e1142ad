"""Is a job complete? Compares the rows of the sources in run.toml with the chunks of the job database.

If it is not, returns the commands that do the rest, or merge what is new. Rows are compared by their identities, in a
scratch database.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from badcjobs.errors import BadInput
from badcjobs.model import ArrayShape, not_none
from badcjobs.paths import RunFolder, is_there, shell_line
from badcjobs.report.verdict import news_words
from badcjobs.report.words import count, index_ranges
from badcjobs.run_toml import FrozenRun
from badcjobs.sources.open import Sources, open_sources
from badcjobs.store.connect import is_job_database, published_uri
from badcjobs.store.read_job import known_lengths, read_outline
from badcjobs.store.read_model import Completeness, Freshness, JobFacts, TaskFacts
from badcjobs.store.submission_record import NO_NOTE, Trace, find_trace

Progress = Callable[[int], None]  # how many rows of the source have been read
Indices = set[int | None]  # of an array; None: a row that belongs to no array task

NOT_LISTED = "not listed"  # the state of a row that is in no task
_BATCH = 10_000  # rows between two progress messages
_EXAMPLES = 5
_LEFT = ("pending", "skipped", NOT_LISTED)
_SCRATCH = """
    PRAGMA journal_mode = OFF;
    PRAGMA synchronous = OFF;
    PRAGMA cache_size = -65536;
    CREATE TABLE row (
        recording_id TEXT, chunk_id TEXT, array_index INTEGER, PRIMARY KEY (recording_id, chunk_id)
    ) WITHOUT ROWID;
    BEGIN"""
_STATES = f"""
    SELECT r.array_index, coalesce(c.status, '{NOT_LISTED}'), count(*)
    FROM main.row r LEFT JOIN job.chunk c ON c.recording_id = r.recording_id AND c.chunk_id = r.chunk_id
    GROUP BY 1, 2"""


def prove_complete(database: Path, facts: JobFacts, progress: Progress) -> Completeness:
    """Compare the sources of a run with its job database; what cannot be compared is a remark, not an error.

    The sources of several runs (the waves of a plan) are compared together; then no commands are suggested.
    """
    try:
        runs = _find_frozen(database.absolute().parent, facts.file_folders)
    except BadInput as error:
        return _describe(facts.chunks, facts, (), why_unknown=_reason(error))
    run, frozen = runs[0]
    shape = frozen.array if len(runs) == 1 else None
    try:
        sources = []
        for _, one in runs:
            paths, root = [Path(path) for path in one.settings["source"]], one.settings.get("root")
            sources.append(open_sources(paths, root=None if root is None else Path(root), cutting=one.cutting))
        proof, left, failed = _compare(database, facts, sources, shape, progress)
    except (BadInput, OSError, sqlite3.Error) as error:
        what = "source" if len(runs) == 1 else "sources"
        why = f"the {what} cannot be compared with the job database: {error}"
        why = _reason(error) if isinstance(error, BadInput) else why
        absent = absent_indices(facts, shape)
        proof = _describe(facts.chunks, facts, absent, why_unknown=why)
        left, failed = _unfinished(facts, absent)
    if len(runs) > 1:
        return proof
    # Array tasks whose newest database is not merged may have done the rest.
    new = frozenset(facts.merged.new_indices)
    unmerged = tuple(index for index in proof.missing_indices if index in new)
    missing = tuple(index for index in proof.missing_indices if index not in new)
    left, failed = left.difference(new), failed.difference(new)
    wanted = left or failed
    indices = () if None in wanted else tuple(sorted(not_none(wanted)))
    trace = find_trace(run.path, max(facts.tasks, key=lambda task: task.started_at_ms).job_id if facts.tasks else "")
    # Failed chunks alone are worth a command: every run tries them again. The rest may be in files that are not merged.
    all_done = not missing and proof.done == (proof.listed if proof.expected is None else proof.expected)
    finish = (
        () if all_done or (new and not wanted) else finish_lines(frozen, run.path, facts.last_settings, trace, indices)
    )
    return replace(
        proof,
        missing_indices=missing,
        finish=finish,
        left_indices=indices if finish and frozen.array is not None else (),
        missing_logs=tuple(not_none(map(trace.log_of, missing))),
        missing_notes=tuple(trace.notes.get(index, NO_NOTE) for index in missing) if trace.emulated else (),
        unmerged_indices=unmerged,
    )


def absent_indices(facts: JobFacts, shape: ArrayShape | None) -> list[int]:
    """Return the array indices that left no database; none, if a task outside the array took all of the source."""
    if shape is None or any(task.is_local and task.shard_count == 1 for task in facts.tasks):
        return []
    seen = {task.array_index for task in facts.tasks if not task.is_local}
    return [index for index in shape.indices if index not in seen]


def _find_frozen(beside: Path, file_folders: Sequence[str]) -> list[tuple[RunFolder, FrozenRun]]:
    """Return the run whose tasks were merged: beside the job database or, if that is elsewhere, above the tasks.

    Returns several if the task databases are from several runs; then each needs its run.toml.
    """
    if (frozen := _read_frozen(RunFolder(beside))) is not None:
        return [(RunFolder(beside), frozen)]
    above = [(beside / folder).parent for folder in file_folders if Path(folder).name == "tasks"]
    # Resolved, because one run may have been given by two paths.
    runs = {path.resolve(): RunFolder(path) for path in above if is_there(RunFolder(path).run_toml)}
    found = [(run, frozen) for run in runs.values() if (frozen := _read_frozen(run)) is not None]
    if 0 < len(found) < len({path.resolve() for path in above}):  # the rows of the others cannot be compared
        why = "its task databases are from several runs, and not all of them have one"
        raise BadInput("no run.toml beside the job database", why=why)
    if not found:
        raise BadInput("no run.toml beside the job database")
    return found


def _read_frozen(run: RunFolder) -> FrozenRun | None:
    frozen = FrozenRun.read(run.run_toml)
    if frozen is not None:
        given, root = frozen.settings.get("source"), frozen.settings.get("root", "")
        if not isinstance(given, tuple) or not all(isinstance(path, str) for path in (*given, root)):
            raise BadInput(f"{run.run_toml} has no source")
    return frozen


def _reason(error: BadInput) -> str:
    return error.what if error.why is None else f"{error.what}: {error.why.splitlines()[0]}"


# --- the comparison ---------------------------------------------------------------------------------------------------


def find_shares(
    tasks: Sequence[TaskFacts], shape: ArrayShape | None, *, by_manifest: bool
) -> Callable[[int, int], int | None] | None:
    """Return the rule that assigns rows of the source to array tasks; None: no array, or tasks with different rules.

    It maps the number of a row and its part of the sources to an array index, or to None if no array task takes it; all
    chunks of a recording that is cut have the number of the recording.
    """
    if shape is None:
        return None
    indices = shape.indices
    if by_manifest:  # a list of manifests: the position picks the line
        return lambda row, part: indices[part] if part < shape.count else None
    counts = {task.shard_count for task in tasks if task.shard_count and not task.is_local}
    steps = {count // shape.count for count in counts if count % shape.count == 0} or {1}
    step_tasks = min(steps)
    return (lambda row, part: indices[row // step_tasks % shape.count]) if len(steps) == 1 else None


def _compare(
    database: Path, facts: JobFacts, sources: Sequence[Sources], shape: ArrayShape | None, progress: Progress
) -> tuple[Completeness, Indices, Indices]:
    """Compare the sources of a run with its job database; return also which array tasks have work left or failed."""
    by_manifest = any(one.manifests_listed is not None for one in sources) and len(sources) == 1
    index_of = find_shares(facts.tasks, shape, by_manifest=by_manifest)
    lengths = known_lengths(database) if any(one.cutting.cuts_recordings for one in sources) else {}
    states: Counter[str] = Counter()
    indices: dict[str, Indices] = {}
    with closing(sqlite3.connect("", isolation_level=None, uri=True)) as db:  # in memory, or on disk
        db.executescript(_SCRATCH)
        batch: list[tuple[str, str, int | None]] = []
        seen = 0

        def flush() -> None:
            # A repeated row counts once, because it is done once.
            db.executemany("INSERT OR IGNORE INTO row VALUES (?, ?, ?)", batch)
            batch.clear()

        def note(row: int, part: int, key: tuple[str, str]) -> None:
            nonlocal seen
            seen += 1
            batch.append((*key, None if index_of is None else index_of(row, part)))
            if len(batch) == _BATCH:
                flush()
                progress(seen)

        for one in sources:
            one.read_identities(note, lengths)
        flush()
        db.execute("COMMIT")
        db.execute("ATTACH ? AS job", (published_uri(database),))
        for index, state, many in db.execute(_STATES):
            states[state] += many
            indices.setdefault(state, set()).add(index)
        unlisted = indices.get(NOT_LISTED, set())
        strangers = sum(facts.chunks.values()) - (sum(states.values()) - states[NOT_LISTED])
        absent = absent_indices(facts, shape)
        missing = tuple(index for index in absent if index in unlisted or (unlisted and index_of is None))
        # Rows of missing tasks are reported by the array index.
        not_listed_examples = _only_in(db, "main.row", "job.chunk") if unlisted.difference(missing) else ()
        strangers_examples = _only_in(db, "job.chunk", "main.row") if strangers else ()
    left, failed = _unfinished(facts, missing)
    if index_of is not None:
        left = Indices().union(*(indices.get(state, ()) for state in _LEFT))
        failed = indices.get("failed", set()) | indices.get("poison", set())
    proof = replace(
        _describe(states, facts, missing),
        strangers=strangers,
        not_listed_examples=not_listed_examples,
        strangers_examples=strangers_examples,
    )
    return proof, left, failed


def _only_in(db: sqlite3.Connection, here: str, not_here: str) -> tuple[str, ...]:
    """Return the first rows that are only in one of two tables."""
    found = db.execute(
        f"""SELECT recording_id, chunk_id FROM {here} a WHERE NOT EXISTS (
                SELECT 1 FROM {not_here} b WHERE b.recording_id = a.recording_id AND b.chunk_id = a.chunk_id)
            ORDER BY recording_id, chunk_id LIMIT {_EXAMPLES}"""
    )
    return tuple(recording if recording == chunk else f"{recording} {chunk}" for recording, chunk in found)


def _unfinished(facts: JobFacts, missing: Sequence[int]) -> tuple[Indices, Indices]:
    """Return the array indices (None: no array task) that have work left, and those with failed chunks."""
    by_task = [(None if task.is_local else task.array_index, task) for task in facts.tasks]
    left = {*missing, *(index for index, task in by_task if task.pending)}
    return left, {index for index, task in by_task if task.failed}


def _describe(
    states: Mapping[str, int], facts: JobFacts, missing: Sequence[int], why_unknown: str | None = None
) -> Completeness:
    known = why_unknown is None
    return Completeness(
        expected=sum(states.values()) if known else None,
        why_unknown=why_unknown,
        listed=sum(facts.chunks.values()),
        done=states.get("done", 0),
        failed=states.get("failed", 0),
        poison=states.get("poison", 0),
        pending=states.get("pending", 0),
        elsewhere=states.get("skipped", 0),
        not_listed=states.get(NOT_LISTED, 0) if known else None,
        missing_indices=tuple(missing),
    )


# --- what to do -------------------------------------------------------------------------------------------------------


def finish_lines(
    frozen: FrozenRun, out: Path, settings: Mapping[str, Any], trace: Trace, left: Sequence[int]
) -> tuple[str, ...]:
    """Return the commands that finish a run; the last one works without Slurm.

    ``settings``: of the task that started last. ``left``: the array tasks with work left; empty if not known.
    """
    here = frozen.command_line(out, settings)
    if trace.emulated:
        return (trace.line() or here,)
    if frozen.array is None or not left:
        return (here,)
    if trace.command:
        return trace.line("--again"), here
    return f"sbatch --array={index_ranges(left, frozen.array.step)} …", here


def find_remarks(db: sqlite3.Connection, database: Path, progress: Progress) -> list[str]:
    """Return remarks for an export: the job database is out of date, or its run is not complete."""
    try:
        facts = read_outline(db, database.parent)
        proof = prove_complete(database, facts, progress) if is_job_database(db) else _describe(facts.chunks, facts, ())
    except (sqlite3.Error, ValueError, OSError):  # damage elsewhere must not stop the export
        return []
    remarks, total = [], proof.listed if proof.expected is None else proof.expected
    if news := news_words(facts.merged):
        command = merge_again(database, facts.file_folders, facts.merged)
        remarks.append(f"merged: {news}" + ("" if command is None else f"; to include that: {command}"))
    if proof.done < total:
        failed, what = proof.failed + proof.poison, "run" if is_job_database(db) else "task"
        left = total - proof.done - failed
        counts = f"{proof.done:,} of {count(total, 'chunk')} done, {failed:,} failed, {left:,} left"
        remarks.append(f"the {what} is not complete: {counts}; only chunks that are done have detections")
    elif total and proof.why_unknown:
        remarks.append(f"not known whether the run is complete: {proof.why_unknown}")
    return remarks


def merge_again(database: Path, file_folders: Sequence[str], merged: Freshness) -> str | None:
    """Return the command that brings a job database up to date; None: there is nothing to merge here."""
    if merged == Freshness(merged.as_of_ms, gone=merged.gone, closed=merged.closed):
        return None
    if database.name == "job.sqlite" and tuple(file_folders) == ("tasks",):
        return shell_line("badcjobs", "merge", database.parent)
    folders = [database.parent / folder for folder in file_folders]
    return shell_line("badcjobs", "merge", *folders, "-o", database)
