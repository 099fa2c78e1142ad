"""Merging: many task databases → one job database. Read ``merge`` first.

Files that an earlier merge has read and that have not changed since are not opened. What it had of files that are gone
by now, or damaged, or not given this time, stays. The other parts of the story: merge_target (one merge at a time, the
old job database and the new one), source_files (look at each file; salvage what is damaged), merge_writer (the rows of
a task, which file they are from, and the rule for chunks that several tasks have).
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
from badcjobs.store.merge_target import changed_in_place, damaged_name, drafted, look_at_old, only_merge
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

_MOST_IN_PLACE = 10  # SQLite attaches no more files at once
_LOOK_AHEAD = 3
_LOOKS = 10
_THREADS = 1  # more of them take more from the copying than they give


@dataclass(frozen=True, slots=True)
class MergeOrder:
    """What is wanted of a merge."""

    inputs: Sequence[Path]
    target: Path
    progress: Callable[[int, int, int], None] = lambda files, of, rows: None
    tell: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True)
class MergeOutcome:
    """What a merge knows now."""

    files: tuple[SourceFile, ...]
    read: int  # how many of them were opened this time
    given: frozenset[str] = frozenset()  # those that this merge was asked to look at


def merge(order: MergeOrder, clock: Clock) -> MergeOutcome:
    """Bring the job database up to date with the files given; the old one stays until the new one is whole."""
    check_inputs(order.inputs)
    if order.target.is_dir():
        raise DatabaseProblem(f"{order.target} is a folder", fix=f"badcjobs merge … -o {order.target}/job.sqlite")
    try:
        order.target.parent.mkdir(parents=True, exist_ok=True)
        with only_merge(order.target, clock, order.tell) as check:
            return _merge(order, check)
    except (OSError, sqlite3.Error) as error:
        fix = "badcjobs merge … -o /a/folder/with/space/job.sqlite"
        if "malformed" in str(error):  # not a task file: those were checked
            fix = f"mv {order.target} {damaged_name(order.target)}   (then the same command again)"
        raise DatabaseProblem(f"{order.target} cannot be made", why=str(error), fix=fix) from error


def _merge(order: MergeOrder, check: Callable[[], None]) -> MergeOutcome:
    found = find_task_databases(order.inputs, order.target)
    state, files = look_at_old(order.target)
    if not found and not files:
        raise NoTaskDatabases(
            "no task database in " + ", ".join(str(place) for place in order.inputs),
            why="task databases are called tasks/<job>_<index>.r<restart>.<node>.sqlite",
            fix="badcjobs merge RUN_FOLDER   (the folder given as --out to badcjobs run)",
        )
    known = {file.path: file for file in files}
    changed = [file for file in found if _has_changed(file, known.get(file.path))]
    # Forget what was skipped and is gone, or was a closed folder and is open now; of other files that are gone the rows
    # stay.
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
        return known.size_bytes is not None  # cannot be read any more: its rows stay, and that is noted


def _bring_up_to_date(
    order: MergeOrder, state: str, old: Mapping[str, SourceFile], changed: list[Intake], check: Callable[[], None]
) -> tuple[SourceFile, ...]:
    """Write what is new: where the job database lies or, if that cannot be, into one that takes its place."""
    # In the order of the key under which most rows are kept: then they are appended.
    changed.sort(key=lambda file: stable_id(os.fsencode(file.file.stem).decode(errors="replace")))
    with tempfile.TemporaryDirectory(prefix="badcjobs-merge-") as scratch:
        intakes = _examined(changed, Path(scratch))
        if state == "current" and len(changed) <= _MOST_IN_PLACE:
            few = list(intakes)
            # All whole, nothing to be put together, and nobody else's disk.
            unproven = {file.task_id for file in old.values() if file.status in HOLDING and file.checksum is None}
            whole = all(intake.checksum is not None and intake.task_id not in unproven for intake in few)
            if whole and not read_filesystem(order.target.parent).shared:
                try:
                    with changed_in_place(order.target, check=check) as db:
                        return _write(db, order, old, few, of=len(few))
                except sqlite3.OperationalError as error:
                    # Somebody reads it and does not stop; or a file was published meanwhile and attached once more.
                    if "locked" not in str(error) and "attached" not in str(error):
                        raise
            intakes = iter(few)
        aside = damaged_name(order.target) if state == "damaged" else None
        with drafted(order.target, from_old=state == "current", keep_old_as=aside, check=check) as db:
            return _write(db, order, old, intakes, of=len(changed))


def _write(
    db: sqlite3.Connection, order: MergeOrder, old: Mapping[str, SourceFile], intakes: Iterable[Intake], *, of: int
) -> tuple[SourceFile, ...]:
    ends = read_ends(db)
    writer = JobWriter(db, old)
    rows, halves = 0, []
    for number, intake in enumerate(intakes, 1):
        if intake.is_half:
            halves.append(intake)  # once its task is here
        else:
            _take(writer, intake)
        rows += sum(intake.counts.values())
        order.progress(number, of, rows)
    for intake in halves:
        _take(writer, intake)
    files = writer.finish()
    if not any(file.status in HOLDING for file in files):
        raise DatabaseProblem(
            "none of the files given is a task database that can be read",
            why="\n".join(f"{file.path}: {file.reason}" for file in files),
            fix="badcjobs merge RUN_FOLDER   (the folder given as --out to badcjobs run)",
        )
    with transaction(db):
        write_ends(db, ends)  # of tasks whose rows were written anew
        write_ends(db, find_ends(db, files, order.target.parent))
    return files


def _take(writer: JobWriter, intake: Intake) -> None:
    """Hand a file over; look again where its task publishes it in this very moment, or where damage shows only now.

    What is wrong with one file ends here: it is salvaged or skipped, and the merge goes on.
    """
    for _ in range(_LOOKS):
        try:
            writer.take(intake)
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
        writer.take(replace(intake, status="skipped", reason=STILL_WRITTEN, database=None, rows=None, size_bytes=None))
    shutil.rmtree(intake.scratch, ignore_errors=True)


def _examined(files: Sequence[Intake], scratch: Path) -> Iterator[Intake]:
    """Look at the files in their order, a few ahead of the one that is being merged."""
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


# --- removing what is in the job database -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Removal:
    """What was removed, and what was not and why."""

    removed: tuple[str, ...]
    left: tuple[tuple[str, str], ...]


def remove_merged_files(job_database: Path, given: Collection[str]) -> Removal:
    """Count every task's rows in the job database as it lies there now; remove the files of those that are complete.

    Only of those ``given`` to this merge, and never the only file that says so: sealed ones, read to the last bit.
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
        return f"only {run}/job.sqlite tells a later run what is done; merge into that"
    return None
