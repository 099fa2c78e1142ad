"""Merges many task databases into one job database. Read ``merge`` first.

Files that an earlier merge has read and that have not changed since are not opened. The rows of files that are now
gone, damaged or not given stay in the job database. The other modules: merge_target (the merge lock, the old and the
new job database), source_files (find and examine files), salvage (read damaged files), merge_writer (write the rows
of each task, and choose between several results of one chunk).
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.errors import DatabaseProblem
from badcjobs.model import stable_id
from badcjobs.seams import Clock
from badcjobs.store.connect import open_job_database, read_filesystem, transaction
from badcjobs.store.merge_target import damaged_name, merge_lock, read_old_job, write_in_place, write_new_file
from badcjobs.store.merge_writer import FileChanged, JobWriter, count_rows
from badcjobs.store.schema import DERIVED
from badcjobs.store.slurm_ends import find_ends, has_new_ends, read_ends, write_ends
from badcjobs.store.source_files import (
    HOLDING,
    STILL_WRITTEN,
    Intake,
    NoTaskDatabases,
    SourceFile,
    check_inputs,
    examine,
    find_task_databases,
    full_path,
    read_source_files,
    salvage_instead,
)

_MOST_IN_PLACE = 10  # SQLite attaches at most 10 files at a time
_LOOK_AHEAD = 3
_TRIES = 10
_THREADS = 1  # measured: more threads slow down the copying more than they help


@dataclass(frozen=True, slots=True)
class MergeOrder:
    """The inputs, the target and the callbacks of a merge."""

    inputs: Sequence[Path]
    target: Path
    progress: Callable[[int, int, int], None] = lambda files, of, rows: None
    tell: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True)
class MergeOutcome:
    """What a merge has done."""

    files: tuple[SourceFile, ...]  # all files of the job database
    read: int  # how many files were opened this time
    given: frozenset[str] = frozenset()  # the files that this merge was asked to merge


def merge(order: MergeOrder, clock: Clock) -> MergeOutcome:
    """Bring the job database up to date with the given files; the old one stays until the new one is complete."""
    check_inputs(order.inputs)
    if order.target.is_dir():
        raise DatabaseProblem(f"{order.target} is a folder", fix=f"badcjobs merge … -o {order.target}/job.sqlite")
    try:
        order.target.parent.mkdir(parents=True, exist_ok=True)
        with merge_lock(order.target, clock, order.tell) as check:
            return _merge(order, check)
    except (OSError, sqlite3.Error) as error:
        fix = "badcjobs merge … -o /a/folder/with/space/job.sqlite"
        if "malformed" in str(error):  # the job database: damaged task files are handled one by one
            fix = f"mv {order.target} {damaged_name(order.target)}   (then the same command again)"
        raise DatabaseProblem(f"{order.target} cannot be written", why=str(error), fix=fix) from error


def _merge(order: MergeOrder, check: Callable[[], None]) -> MergeOutcome:
    found = find_task_databases(order.inputs, order.target)
    state, files = read_old_job(order.target)
    if not found and not files:
        raise NoTaskDatabases(
            "no task database in " + ", ".join(str(place) for place in order.inputs),
            why="task databases are called tasks/<job>_<index>.r<restart>.<node>.sqlite",
            fix="badcjobs merge RUN_FOLDER   (the folder given as --out to badcjobs run)",
        )
    known = {file.path: file for file in files}
    changed = [file for file in found if _has_changed(file, known.get(file.path))]
    # Forget skipped files that are gone, and skipped folders that can be read now. The rows of other files that are
    # gone stay.
    skipped = [(file.path, order.target.parent / file.path) for file in files if file.status == "skipped"]
    gone = {name for name, path in skipped if not os.path.lexists(path) or (path.is_dir() and os.access(path, os.R_OK))}
    old = {path: file for path, file in known.items() if state == "damaged" or path not in gone}
    if state != "current" or changed or len(old) < len(known) or has_new_ends(order.target, files):
        files = _bring_up_to_date(order, state, old, changed, check)
    return MergeOutcome(files, len(changed), frozenset(file.path for file in found))


def _has_changed(file: Intake, known: SourceFile | None) -> bool:
    if known is None or file.has_leftovers or file.reason is not None:
        return True
    try:
        return not known.is_same(file.file.stat())
    except OSError:
        return known.size_bytes is not None  # no longer readable: keep its rows, and record that


def _bring_up_to_date(
    order: MergeOrder, state: str, old: Mapping[str, SourceFile], changed: list[Intake], check: Callable[[], None]
) -> tuple[SourceFile, ...]:
    """Write the changed files into the job database itself or, where that is not possible, into a new one."""
    # In the order of the key of the largest tables, so that rows are appended.
    changed.sort(key=lambda file: stable_id(os.fsencode(file.file.stem).decode(errors="replace")))
    with tempfile.TemporaryDirectory(prefix="badcjobs-merge-") as scratch:
        intakes = _examined(changed, Path(scratch))
        if state == "current" and len(changed) <= _MOST_IN_PLACE:
            few = list(intakes)
            # In place only if every file is sealed, nothing must be combined, and the disk is local.
            unproven = {file.task_id for file in old.values() if file.status in HOLDING and file.checksum is None}
            all_sealed = all(intake.checksum is not None and intake.task_id not in unproven for intake in few)
            if all_sealed and not read_filesystem(order.target.parent).shared:
                try:
                    with write_in_place(order.target, check=check) as db:
                        return _write(db, order, old, few, of=len(few))
                except sqlite3.OperationalError as error:
                    # Another program keeps reading it; or a file was published meanwhile and attached once more.
                    if "locked" not in str(error) and "attached" not in str(error):
                        raise
            intakes = iter(few)
        aside = damaged_name(order.target) if state == "damaged" else None
        with write_new_file(order.target, from_old=state == "current", keep_old_as=aside, check=check) as db:
            return _write(db, order, old, intakes, of=len(changed))


def _write(
    db: sqlite3.Connection, order: MergeOrder, old: Mapping[str, SourceFile], intakes: Iterable[Intake], *, of: int
) -> tuple[SourceFile, ...]:
    ends = read_ends(db)
    writer = JobWriter(db, old)
    rows, halves = 0, []
    for number, intake in enumerate(intakes, 1):
        if intake.is_half:
            halves.append(intake)  # after the file that has the task itself
        else:
            _add_file(writer, intake)
        rows += sum(intake.counts.values())
        order.progress(number, of, rows)
    for intake in halves:
        _add_file(writer, intake)
    files = writer.finish()
    if not any(file.status in HOLDING for file in files):
        raise DatabaseProblem(
            "none of the given files is a readable task database",
            why="\n".join(f"{file.path}: {file.reason}" for file in files),
            fix="badcjobs merge RUN_FOLDER   (the folder given as --out to badcjobs run)",
        )
    with transaction(db):
        write_ends(db, ends)  # for tasks whose rows were just written again
        write_ends(db, find_ends(db, files, order.target.parent))
    return files


def _add_file(writer: JobWriter, intake: Intake) -> None:
    """Give a file to the writer; examine it again if it was published meanwhile, salvage it if damage shows only now.

    An error in one file does not stop the merge: the file is salvaged or skipped.
    """
    for _ in range(_TRIES):
        try:
            writer.add_file(intake)
            break
        except FileChanged:
            found = Intake(intake.path, None, "skipped", file=intake.file)
            intake = examine(found, intake.scratch)
        except sqlite3.DatabaseError as error:
            is_of_file = "malformed" in str(error) and intake.checksum is None and intake.status != "salvaged"
            if not is_of_file:
                raise
            intake = salvage_instead(intake, f"damaged: {error}")
    else:
        writer.add_file(
            replace(intake, status="skipped", reason=STILL_WRITTEN, database=None, rows=None, size_bytes=None)
        )
    shutil.rmtree(intake.scratch, ignore_errors=True)


def _examined(files: Sequence[Intake], scratch: Path) -> Iterator[Intake]:
    """Examine the files in order, a few ahead of the one that is being merged."""
    waiting: deque[Future[Intake]] = deque()
    with ThreadPoolExecutor(_THREADS, "examine") as pool:
        try:
            for number, file in enumerate(files):
                place = scratch / str(number)
                place.mkdir()
                waiting.append(pool.submit(examine, file, place))
                if len(waiting) > _LOOK_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


# --- removing merged files --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Removal:
    """Which files were removed, and which were kept and why."""

    removed: tuple[str, ...]
    left: tuple[tuple[str, str], ...]


def remove_merged_files(job_database: Path, given: Collection[str]) -> Removal:
    """Count the rows of every task in the finished job database; remove the files of tasks that are complete there.

    Remove only files ``given`` to this merge, with a correct seal, and never the last record of what is done.
    """
    removed, left = [], []
    try:
        with closing(open_job_database(job_database)) as db:
            files = read_source_files(db)
            holders = {file.task_id: file for file in files if file.status == "merged"}
            for file in (file for file in files if file.path in given):
                path = job_database.parent / file.path
                if not path.exists():
                    continue
                why_not = _why_not(db, file, holders.get(file.task_id), path, job_database)
                if why_not is None:
                    path.unlink()
                    path.with_suffix(".slurm.json").unlink(missing_ok=True)
                    removed.append(file.path)
                else:
                    left.append((file.path, why_not))
    except (OSError, sqlite3.Error) as error:
        raise DatabaseProblem(f"not all merged files could be removed: {error}") from error
    return Removal(tuple(removed), tuple(left))


def _why_not(
    db: sqlite3.Connection, file: SourceFile, holder: SourceFile | None, path: Path, job_database: Path
) -> str | None:
    if file.status not in ("merged", "copy") or holder is None or file.task_id is None:
        return file.reason or f"it was {file.status}"
    if file.checksum is None or file.checksum != holder.checksum:
        return "it has no seal" if file.checksum is None else "it is not the file whose rows are in the job database"
    (verdict,) = db.execute("SELECT verdict FROM task WHERE task_id = ?", (file.task_id,)).fetchone()
    if verdict is None:
        return "its task had not ended when it was merged"
    counted = sum(count_rows(db, file.task_id, leave_out=DERIVED).values())
    if counted != holder.rows:
        return f"{counted:,} of its {holder.rows:,} rows are in the job database"
    if not file.is_same(path.stat()):
        return "it has changed since it was merged"
    run = path.parent.parent
    if path.parent.name == "tasks" and full_path(run / "job.sqlite") != full_path(job_database):
        return f"a later run looks for finished work only in {run}/job.sqlite; merge into that file first"
    return None
