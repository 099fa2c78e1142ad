"""Is a job complete? Compares the rows of the sources in run.toml with the chunks of the job database.

If it is not, returns the commands that do the rest, or merge what is new. Rows are compared by their identities, in a
scratch database.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from badcjobs.errors import BadInput, DatabaseProblem
from badcjobs.model import ArrayShape, Place, not_none
from badcjobs.paths import RunFolder, shell_line
from badcjobs.report.summary import chunk_name, describe_chunks
from badcjobs.report.verdict import judge_rows, news_words
from badcjobs.run_toml import FrozenRun
from badcjobs.settings import RunSettings
from badcjobs.sources.open import Sources, open_sources, open_sources_of
from badcjobs.sources.places import gives_places, place_sources, place_words
from badcjobs.store.connect import read_only_uri, reading
from badcjobs.store.read_job import known_lengths, merged_files, read_outline
from badcjobs.store.read_model import Completeness, JobFacts, TaskFacts
from badcjobs.store.submission_record import NO_NOTE, Trace, find_trace
from badcjobs.store.task_writer import count_places
from badcjobs.words import index_ranges

Progress = Callable[[int], None]  # how many rows of the source have been read

NOT_LISTED = "not listed"  # the state of a row that is in no task
_STEP = 10_000  # rows between two progress messages
_EXAMPLES = 5
_SCRATCH = """
    PRAGMA journal_mode = OFF;
    PRAGMA synchronous = OFF;
    PRAGMA cache_size = -65536;
    CREATE TABLE row (recording_id TEXT, chunk_id TEXT, PRIMARY KEY (recording_id, chunk_id)) WITHOUT ROWID;
    BEGIN"""
_STATES = f"""
    SELECT coalesce(c.status, '{NOT_LISTED}'), count(*)
    FROM main.row r LEFT JOIN job.chunk c ON c.recording_id = r.recording_id AND c.chunk_id = r.chunk_id
    GROUP BY 1"""
_SET_ASIDE = """
    DELETE FROM main.row WHERE recording_id IN (SELECT recording_id FROM job.recording WHERE left_out IS NOT NULL)"""


def prove_complete(database: Path, facts: JobFacts, progress: Progress) -> Completeness:
    """Compare the sources of a run with its job database; what cannot be compared is a remark, not an error.

    The sources of several runs (the waves of a plan) are compared together; then no commands are suggested.
    """
    proof = describe_chunks(facts)
    try:
        runs = _find_frozen(database.absolute().parent, facts.file_folders)
    except BadInput as error:
        return replace(proof, why_unknown=_reason(error))
    try:
        proof = _compare(database, facts, [_open_frozen_sources(frozen) for _, frozen in runs], progress)
    except (BadInput, OSError, sqlite3.Error) as error:
        proof = replace(proof, why_unknown=_reason(error))
    if len(runs) > 1:
        return proof
    return _with_commands(proof, facts, *runs[0])


def _with_commands(proof: Completeness, facts: JobFacts, run: RunFolder, frozen: FrozenRun) -> Completeness:
    """Return the proof with the array tasks that left no database, and the commands that do the rest."""
    absent = absent_indices(facts, frozen.array)
    if proof.not_listed == 0:
        absent = []  # others have taken over their work
    # Array tasks whose newest database is not merged may have done the rest.
    new = frozenset(facts.merged.new_indices)
    missing = tuple(index for index in absent if index not in new)
    unmerged = tuple(index for index in absent if index in new)
    left = _indices(task for task in facts.tasks if task.pending)
    failed = _indices(task for task in facts.tasks if task.failed)
    to_do = (left.union(absent) - new) or (failed - new)
    indices: tuple[int, ...] = ()
    if frozen.array is not None:
        indices = tuple(sorted(not_none(to_do)))
        if None in to_do:  # a task outside the array has left something of their shares
            finished = _finished_indices(facts.tasks) | new
            indices = tuple(index for index in frozen.array.indices if index not in finished)
        if not indices:  # whose share the rest is, is not known
            indices = tuple(frozen.array.indices)

    _, last_job = max(((task.started_at_ms, task.job_id) for task in facts.tasks), default=(0, ""))
    trace = find_trace(run.path, last_job)
    finish = Finish()
    # Failed chunks alone are worth a command: every run tries them again. The rest may be in files that are not merged.
    all_done = proof.done == proof.rows and not missing
    if not all_done and (to_do or not new):
        finish = find_finish(frozen, run.path, facts.last_settings, trace, indices)
    return replace(
        proof,
        # Rows of missing tasks are named by their array index.
        not_listed_examples=() if absent else proof.not_listed_examples,
        missing_indices=missing,
        unmerged_indices=unmerged,
        finish=finish.lines,
        finish_by=finish.by,
        left_indices=indices if finish.lines else (),
        missing_logs=tuple(not_none(map(trace.log_of, missing))),
        missing_notes=tuple(trace.notes.get(index, NO_NOTE) for index in missing) if trace.emulated else (),
    )


def absent_indices(facts: JobFacts, shape: ArrayShape | None) -> list[int]:
    """Return the array indices that left no database; none, if a task outside the array took all of the source."""
    if shape is None or any(task.is_local and task.shard_count == 1 for task in facts.tasks):
        return []
    present = _indices(facts.tasks)
    return [index for index in shape.indices if index not in present]


def _finished_indices(tasks: Sequence[TaskFacts]) -> set[int]:
    """Return the array indices all of whose processes have done their whole share, in one of their attempts."""
    own = [task for task in tasks if not task.is_local]
    done = {(task.array_index, task.procid) for task in own if task.verdict == "done" and not task.pending}
    unfinished = {task.array_index for task in own if (task.array_index, task.procid) not in done}
    return {task.array_index for task in own} - unfinished


def _indices(tasks: Iterable[TaskFacts]) -> set[int | None]:
    """Return the indices of these tasks in their array; None: a task outside it."""
    return {None if task.is_local else task.array_index for task in tasks}


def _find_frozen(beside: Path, file_folders: Sequence[str]) -> list[tuple[RunFolder, FrozenRun]]:
    """Return the run whose tasks were merged: beside the job database or, if that is elsewhere, above the tasks.

    Returns several if the task databases are from several runs; then each needs its run.toml.
    """
    own = RunFolder(beside)
    frozen = _read_frozen(own)
    if frozen is not None:
        return [(own, frozen)]

    # Resolved, because one run may have been given by two paths.
    above = {(beside / folder).parent.resolve() for folder in file_folders if Path(folder).name == "tasks"}
    runs = []
    for run in map(RunFolder, sorted(above)):
        frozen = _read_frozen(run)
        if frozen is not None:
            runs.append((run, frozen))
    if not runs:
        raise BadInput("no run.toml beside the job database")
    if len(runs) < len(above):
        raise BadInput("some of the runs have no run.toml")
    return runs


def _read_frozen(run: RunFolder) -> FrozenRun | None:
    frozen = FrozenRun.read(run.run_toml)
    if frozen is not None and not frozen.settings.get("source"):
        raise BadInput(f"{run.run_toml} has no source")
    return frozen


def _open_frozen_sources(frozen: FrozenRun) -> Sources:
    paths = [Path(path) for path in frozen.settings["source"]]
    root = frozen.settings.get("root")
    return open_sources(paths, root=None if root is None else Path(root), cutting=frozen.cutting)


def _reason(error: Exception) -> str:
    if not isinstance(error, BadInput):
        return f"the source cannot be compared with the job database: {error}"
    if error.why is None:
        return error.what
    return f"{error.what}: {error.why.splitlines()[0]}"


# --- the comparison ---------------------------------------------------------------------------------------------------


def _compare(database: Path, facts: JobFacts, sources: Sequence[Sources], progress: Progress) -> Completeness:
    """Compare the sources of a run with its job database."""
    lengths = {}
    if any(source.cutting.cuts_recordings for source in sources):
        lengths = known_lengths(database)
    with closing(sqlite3.connect("", isolation_level=None, uri=True)) as db:  # in memory, or on disk
        db.executescript(_SCRATCH)

        def add(key: tuple[str, str]) -> None:
            """Add a row of a source; a repeated row counts once, because it is done once."""
            db.execute("INSERT OR IGNORE INTO row VALUES (?, ?)", key)
            if db.total_changes % _STEP == 0:
                progress(db.total_changes)

        for source in sources:
            source.read_identities(add, lengths)
        db.execute("COMMIT")
        db.execute("ATTACH ? AS job", (read_only_uri(database),))
        left_out = db.execute(_SET_ASIDE).rowcount  # they are neither done nor missing

        states = Counter(dict(db.execute(_STATES)))
        return replace(
            describe_chunks(facts, states),
            expected=sum(states.values()),
            not_listed=states[NOT_LISTED],
            left_out=left_out,
            strangers=sum(facts.chunks.values()) - (sum(states.values()) - states[NOT_LISTED]),
            not_listed_examples=_only_in(db, "main.row", "job.chunk"),
            strangers_examples=_only_in(db, "job.chunk", "main.row"),
        )


def _only_in(db: sqlite3.Connection, here: str, not_here: str) -> tuple[str, ...]:
    """Return the first rows that are only in one of two tables."""
    rows = db.execute(
        f"""SELECT recording_id, chunk_id FROM {here} a WHERE NOT EXISTS (
                SELECT 1 FROM {not_here} b WHERE b.recording_id = a.recording_id AND b.chunk_id = a.chunk_id)
            ORDER BY recording_id, chunk_id LIMIT {_EXAMPLES}"""
    )
    return tuple(chunk_name(recording, chunk) for recording, chunk in rows)


# --- what to do -------------------------------------------------------------------------------------------------------


class Finish(NamedTuple):
    """How to finish a run."""

    by: str = ""  # what the first line does: run, submit, emulate, or script: submit a script that is not known
    lines: tuple[str, ...] = ()  # commands, each of which does the rest; the last one works without Slurm


def find_finish(frozen: FrozenRun, out: Path, settings: Mapping[str, Any], trace: Trace, left: Sequence[int]) -> Finish:
    """Return how to finish a run.

    ``settings``: of the task that started last. ``left``: the array tasks with work left; empty if not known.
    """
    here = frozen.command_line(out, settings)
    if trace.emulated:
        return Finish("emulate", (trace.line() or here,))
    if frozen.array is None or not left:
        return Finish("run", (here,))
    if trace.command:
        return Finish("submit", (trace.line("--again"), here))
    return Finish("script", (f"sbatch --array={index_ranges(left, frozen.array.step)} …", here))


def find_remarks(db: sqlite3.Connection, database: Path, progress: Progress) -> list[str]:
    """Return remarks for an export: the job database is out of date, or its run is not complete."""
    try:
        facts = read_outline(db, database)
        places = count_places(db)
        proof = prove_complete(database, facts, progress)
    except (sqlite3.Error, ValueError, OSError):  # damage elsewhere must not stop the export
        return []
    remarks = []
    news = news_words(facts.merged)
    if news:
        command = merge_again(database, facts)
        if command is not None:
            news += f"; to include that: {command}"
        remarks.append(f"merged: {news}")
    if places and places.left_out:
        remarks.append(f"places: {place_words(places)}")

    if proof.done < proof.rows:
        outcome = judge_rows(proof, running=False)
        remarks.append(f"the run is not complete: {outcome.counts}; only chunks that are done have detections")
    elif proof.rows and proof.why_unknown:
        remarks.append(f"not known whether the run is complete: {proof.why_unknown}")
    return remarks


def merge_again(database: Path, facts: JobFacts) -> str | None:
    """Return the command that brings a job database up to date; None: there is nothing to merge here."""
    if not (facts.merged.changed or facts.merged.new):
        return None
    if database.name == "job.sqlite" and facts.file_folders == ("tasks",):
        return shell_line("badcjobs", "merge", database.parent)
    folders = [database.parent / folder for folder in facts.file_folders]
    return shell_line("badcjobs", "merge", *folders, "-o", database)


# --- places: another comparison of the sources with the job database --------------------------------------------------


def open_placed_sources(settings: RunSettings, cwd: Path) -> Sources:
    """Open the sources and look up all places; refuse another place for a recording with chunks that are done."""
    sources = open_sources_of(settings, cwd)
    places: dict[str, Place] = {}
    if settings.out is not None and gives_places(settings, sources):
        places = _places_done(RunFolder(cwd / settings.out))
    return place_sources(settings, sources, cwd, places)


def _places_done(folder: RunFolder) -> dict[str, Place]:
    """Return the places with which chunks are done, by recording id; databases that cannot be read are passed over."""
    merged = merged_files(folder.job_database)
    databases = [path for path in folder.tasks.glob("*.sqlite") if path.name not in merged]
    places = {}
    for database in (folder.job_database, *databases):
        with suppress(DatabaseProblem), reading(database) as db:
            for recording_id, *values in db.execute(_PLACES_DONE):
                places[recording_id] = Place(*values)
    return places


_PLACES_DONE = """
    SELECT recording_id, latitude, longitude, region, recorded_on FROM recording r
    WHERE EXISTS (SELECT 1 FROM chunk c WHERE c.recording_id = r.recording_id AND c.status = 'done')"""
