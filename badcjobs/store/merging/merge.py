"""Merging: many task databases → one job database. Read ``merge`` first.

Files that an earlier merge has read and that have not changed since are not opened. What it had of files that are gone
by now, or damaged, or not given this time, stays. The rule for chunks that several tasks have is in task_rows.py.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.errors import DatabaseProblem
from badcjobs.model import stable_id
from badcjobs.seams import Clock
from badcjobs.store.connect import transaction
from badcjobs.store.filesystem import read_filesystem
from badcjobs.store.merging.draft import changed_in_place, drafted
from badcjobs.store.merging.find_files import (
    FoundFile,
    check_inputs,
    find_task_databases,
    full_path,
    is_open_folder,
    no_task_databases,
)
from badcjobs.store.merging.intake import STILL_WRITTEN, Intake, examine
from badcjobs.store.merging.job_writer import FileChanged, JobWriter
from badcjobs.store.merging.lock import only_merge
from badcjobs.store.merging.old_job import OldJob, damaged_name, look_at_old
from badcjobs.store.merging.slurm_ends import find_ends, has_news, read_ends, write_ends
from badcjobs.store.merging.source_file import HOLDING, SKIPPED, SourceFile

_MOST_IN_PLACE = 10  # SQLite attaches no more files at once
_LOOK_AHEAD = 3
_LOOKS = 10
_THREADS = 1  # more of them take more from the copying than they give


@dataclass(frozen=True, slots=True)
class MergeOrder:
    """What is wanted of a merge."""

    inputs: Sequence[Path]
    target: Path
    strict: bool = False  # refuse, rather than leave out what cannot be read
    wait: bool = True  # for another merge to end
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
        with only_merge(order.target, clock, wait=order.wait, tell=order.tell) as check:
            return _merge(order, check)
    except (OSError, sqlite3.Error) as error:
        fix = "badcjobs merge … -o /a/folder/with/space/job.sqlite"
        if "malformed" in str(error):  # not a task file: those were checked
            fix = f"mv {order.target} {damaged_name(order.target)}   (then the same command again)"
        raise DatabaseProblem(f"{order.target} cannot be made", why=str(error), fix=fix) from error


def _merge(order: MergeOrder, check: Callable[[], None]) -> MergeOutcome:
    found = find_task_databases(order.inputs, order.target)
    old = look_at_old(order.target)
    if not found and not old.files:
        raise no_task_databases(order.inputs)
    known = {file.path: file for file in old.files}
    names = {file: shown_path(file.path, order.target) for file in found}
    changed = [file for file, name in names.items() if _has_changed(file, known.get(name))]
    gone = _gone(old, order.target)
    files = old.files
    if old.state != "current" or changed or gone or has_news(order.target, old.files):
        files = _bring_up_to_date(order, old, changed, gone, check)
    _refuse_if_strict(order, files)
    return MergeOutcome(files, len(changed), frozenset(names.values()))


def _bring_up_to_date(
    order: MergeOrder, old: OldJob, changed: list[FoundFile], gone: set[str], check: Callable[[], None]
) -> tuple[SourceFile, ...]:
    # In the order of the key under which most rows are kept: then they are appended.
    changed.sort(key=lambda file: stable_id(os.fsencode(file.path.stem).decode(errors="replace")))
    with tempfile.TemporaryDirectory(prefix="badcjobs-merge-") as scratch:
        intakes = _examined(changed, Path(scratch))
        if old.state == "current" and len(changed) <= _MOST_IN_PLACE:
            few = list(intakes)
            if _is_simple(few, old, order.target):
                try:
                    with changed_in_place(order.target, check=check) as db:
                        return _write(db, order, old, few, gone, of=len(few))
                except sqlite3.OperationalError as error:
                    # Somebody reads it and does not stop; or a file was published meanwhile and attached once more.
                    if "locked" not in str(error) and "attached" not in str(error):
                        raise
            intakes = iter(few)
        aside = damaged_name(order.target) if old.state == "damaged" else None
        with drafted(order.target, from_old=old.state == "current", keep_old_as=aside, check=check) as db:
            return _write(db, order, old, intakes, gone, of=len(changed))


def _is_simple(intakes: Sequence[Intake], old: OldJob, target: Path) -> bool:
    """Say whether a few files can be added where the job database lies: all whole, nothing to be put together."""
    unproven = {file.task_id for file in old.files if file.status in HOLDING and file.checksum is None}
    whole = all(intake.checksum is not None and intake.task_id not in unproven for intake in intakes)
    return whole and not read_filesystem(target.parent).shared


def _write(
    db: sqlite3.Connection,
    order: MergeOrder,
    old: OldJob,
    intakes: Iterable[Intake],
    gone: set[str],
    *,
    of: int,
) -> tuple[SourceFile, ...]:
    """Write what the old job database had, if it is not this one, then what is new."""
    ends = read_ends(db)
    writer = JobWriter(db, {file.path: file for file in old.files if file.path not in gone})
    if old.state == "older":
        writer.adopt(order.target)
    rows, halves = 0, []
    for number, intake in enumerate(intakes, 1):
        if intake.is_half:
            halves.append(intake)  # once its task is here
        else:
            _take(writer, intake, order.target)
        rows += sum(intake.rows.values())
        order.progress(number, of, rows)
    for intake in halves:
        _take(writer, intake, order.target)
    files = writer.finish()
    _refuse_if_strict(order, files)
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


def _take(writer: JobWriter, intake: Intake, target: Path) -> None:
    """Hand a file over; look at it again if its task publishes it in this very moment."""
    name = shown_path(intake.path, target)
    for _ in range(_LOOKS):
        try:
            writer.take(name, intake)
            break
        except FileChanged:
            intake = examine(FoundFile(intake.path), intake.scratch)
    else:
        writer.take(name, replace(intake, status=SKIPPED, reason=STILL_WRITTEN, database=None, size_bytes=None))
    shutil.rmtree(intake.scratch, ignore_errors=True)


def _examined(files: Sequence[FoundFile], scratch: Path) -> Iterator[Intake]:
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


def _refuse_if_strict(order: MergeOrder, files: Sequence[SourceFile]) -> None:
    lossy = [file for file in files if file.lost_something]
    if order.strict and lossy:
        raise DatabaseProblem(
            f"--strict: {len(lossy)} of {len(files)} files cannot be read whole; {order.target} stays as it was",
            why="\n".join(f"{file.path}: {file.reason}" for file in lossy),
            fix="the same command without --strict merges what can be read and names the rest",
        )


def _gone(old: OldJob, target: Path) -> set[str]:
    """Return what was skipped and is not there any more, or a folder that was closed then and is not any more.

    Of other files that are gone the rows stay.
    """
    if old.state == "damaged":
        return set()
    skipped = [(file.path, target.parent / file.path) for file in old.files if file.status == SKIPPED]
    return {name for name, path in skipped if not os.path.lexists(path) or is_open_folder(path)}


def _has_changed(file: FoundFile, known: SourceFile | None) -> bool:
    if known is None or file.has_leftovers or file.closed:
        return True
    try:
        status = file.path.stat()
    except OSError:
        return known.size_bytes is not None  # cannot be read any more: its rows stay, and that is noted
    return (status.st_size, status.st_mtime_ns) != (known.size_bytes, known.mtime_ns)


def shown_path(path: Path, target: Path) -> str:
    """Return a path as ``source_file`` has it."""
    shown = str(path).removeprefix(f"{full_path(target.parent)}{os.sep}")  # not relative_to: this is done for thousands
    return shown.encode("utf-8", "backslashreplace").decode()  # a name that is no UTF-8 is no text for a database
