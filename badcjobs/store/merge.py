"""Merges many task databases into one job database. Read ``merge`` first.

Files that an earlier merge has read and that have not changed since are not opened. The rows of files that are now
gone, damaged or not given stay in the job database. The other modules: source_files (find and examine files), salvage
(read damaged files), merge_writer (write the rows of each task, and choose between several results of one chunk).
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import psutil

from badcjobs.errors import BadcjobsError, DatabaseProblem
from badcjobs.model import stable_id
from badcjobs.seams import Clock
from badcjobs.small_files import read_small
from badcjobs.store.atomic_write import remove_unfinished, replacing, sync_file, unfinished_name
from badcjobs.store.connect import (
    SQLITE_MAGIC,
    file_uri,
    is_job_database,
    open_job_database,
    open_uri,
    read_filesystem,
    read_value,
    schema_problem,
    transaction,
)
from badcjobs.store.job_schema import SORT_CACHE_KIB, open_draft
from badcjobs.store.merge_writer import FileChanged, JobWriter, count_rows
from badcjobs.store.plausible import UNREADABLE, find_damage
from badcjobs.store.runs import refuse_different_runs, refuse_no_runs
from badcjobs.store.schema import APPLICATION_ID, DERIVED
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
    skipped,
)

log = logging.getLogger(__name__)

# --- one merge at a time ----------------------------------------------------------------------------------------------
# The lock is a file that only one merge can create, on any node; shared filesystems may have no kernel locks. Its owner
# touches it every few seconds. A lock that is no longer touched, or whose process on this machine is gone, belongs to
# a merge that was killed.

_TOUCH_EVERY_S = 5.0
_STALE_AFTER_S = 60.0
_POLL_S = 0.2


@contextmanager
def merge_lock(target: Path, clock: Clock, tell: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Hold the lock of a job database; wait for another merge to end.

    Gives a function to call before anything is replaced: a merge that was suspended for a minute counts as dead, and
    another one may have taken the lock.
    """
    lock = target.with_name(f".{target.name}.lock")
    me = f"{os.uname().nodename} {os.getpid()}"
    _acquire(lock, me, clock, tell)
    over = threading.Event()

    def touch() -> None:
        while not over.wait(_TOUCH_EVERY_S):
            with suppress(OSError):  # a full or unmounted disk: the merge itself reports it
                os.utime(lock)

    def check() -> None:
        if _read(lock)[0] != me:
            raise DatabaseProblem(
                f"another merge has taken over {target.name} while this one was suspended",
                why="this merge has replaced nothing",
                fix="run the same command again",
            )

    toucher = threading.Thread(target=touch, name="merge lock", daemon=True)
    toucher.start()
    try:
        yield check
    finally:
        over.set()
        toucher.join()
        if _read(lock)[0] == me:
            lock.unlink(missing_ok=True)


def _acquire(lock: Path, me: str, clock: Clock, tell: Callable[[str], None]) -> None:
    seen, seen_at_s, reported = None, clock.monotonic_s(), False
    while True:
        try:
            with lock.open("x", encoding="utf-8") as file:
                file.write(me)
            return
        except FileExistsError:
            now = _read(lock)
        except OSError:
            lock.unlink(missing_ok=True)  # a full disk: do not leave an empty lock
            raise
        if now != seen:
            seen, seen_at_s = now, clock.monotonic_s()
        if now == (None, None):
            continue  # it has just been removed
        node, _, pid = (now[0] or "").partition(" ")  # empty: not readable, or not written yet
        is_dead = node == os.uname().nodename and pid.isdigit() and not psutil.pid_exists(int(pid))
        if is_dead or clock.monotonic_s() - seen_at_s > _STALE_AFTER_S:
            _remove(lock, now[0])
            continue
        if not reported:
            tell(f"another merge is running on {node or 'an unknown node'}, process {pid or 'unknown'}; waiting for it")
            reported = True
        clock.sleep(_POLL_S)


def _read(lock: Path) -> tuple[str | None, int | None]:
    """Return the content of a lock, and when it was touched; None: not readable, or gone."""
    text = touched_ns = None
    with suppress(OSError):
        touched_ns = lock.stat().st_mtime_ns
        text = read_small(lock).decode(errors="replace")
    return text, touched_ns


def _remove(lock: Path, holder: str | None) -> None:
    """Remove the lock of a dead merge; if several merges try this, none removes the lock of the next owner."""
    aside = lock.with_name(f"{lock.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    with suppress(OSError):
        os.rename(lock, aside)  # noqa: PTH104
        if _read(aside)[0] != holder:
            with suppress(OSError):
                os.link(aside, lock)
        if aside.is_dir():
            aside.rmdir()
        else:
            aside.unlink()


# --- the job database of an earlier merge -----------------------------------------------------------------------------


def read_old_job(target: Path) -> tuple[str, tuple[SourceFile, ...]]:
    """Return the state of the old job database (none, current or damaged), and the files it lists.

    Refuse to replace a file that is not a job database of ours, or has a newer schema.
    """
    if not target.exists():
        return "none", ()
    try:
        with target.open("rb") as file:
            if file.read(16) != SQLITE_MAGIC:
                _refuse_if(target.suffix not in (".sqlite", ".db"), f"{target} is not a database")
                raise sqlite3.DatabaseError("not a SQLite database")  # perhaps its first page is damaged
        with closing(open_job_database(target)) as db:
            application = read_value(db, "PRAGMA application_id")
            what = "a task database" if application == APPLICATION_ID else "another program's database"
            is_ours = application == APPLICATION_ID and is_job_database(db)
            _refuse_if(not is_ours, f"{target} is {what}, not a job database")
            complaint = schema_problem(db)
            _refuse_if(complaint is not None, f"{target} has {complaint}")
            return "current", read_source_files(db)
    except UNREADABLE as error:
        return "damaged", _damaged(target, error)


def _damaged(target: Path, why: object) -> tuple[SourceFile, ...]:
    """Return the list of files of a job database that replaces a damaged one."""
    reason = f"the earlier job database could not be read ({why}); it was renamed, and a new one was made"
    return (SourceFile(damaged_name(target).name, None, "skipped", reason),)


def _find_damage(target: Path) -> str | None:
    with closing(open_job_database(target)) as db:
        return find_damage(db)


def _refuse_if(wrong: bool, what: str) -> None:
    if wrong:
        fix = "badcjobs merge RUN_FOLDER -o another/name.sqlite"
        raise DatabaseProblem(what, why="merge would replace it", fix=fix)


def damaged_name(target: Path) -> Path:
    """Return a free name for a damaged job database, which may have rows of task files that are gone."""
    names = (target.with_name(f"{target.name}.damaged" + (f".{number}" if number > 1 else "")) for number in count(1))
    return next(name for name in names if not name.exists())


# --- writing the new one ----------------------------------------------------------------------------------------------
# ``write_new_file``: a new file with a hidden name, renamed when it is complete. This works on every filesystem, but
# writes the complete file. ``write_in_place``: one SQLite transaction, for a few more files on a local disk.

_READERS_TIMEOUT_S = 5.0


@contextmanager
def write_new_file(
    target: Path, *, from_old: bool, keep_old_as: Path | None, check: Callable[[], None]
) -> Iterator[sqlite3.Connection]:
    """Give a new job database, or a copy of the old one, to write to; move it into place if there was no error."""
    draft = unfinished_name(target)
    with replacing(target, draft):
        if from_old:
            shutil.copyfile(target, draft)
        with closing(open_draft(draft, new=not from_old)) as db:
            yield db
        sync_file(draft)
        check()
        if keep_old_as is not None:
            os.replace(target, keep_old_as)  # noqa: PTH105


@contextmanager
def write_in_place(target: Path, *, check: Callable[[], None]) -> Iterator[sqlite3.Connection]:
    """Give the job database itself; after a kill, the next reader restores the old content from the journal."""
    with closing(open_uri(file_uri(target, "mode=rw"), timeout=_READERS_TIMEOUT_S)) as db:
        db.execute(f"PRAGMA cache_size = -{SORT_CACHE_KIB}")
        db.execute("PRAGMA synchronous = FULL")
        with transaction(db, "BEGIN EXCLUSIVE"):  # fails if another program reads for longer than the timeout
            yield db
            check()


# --- the merge ------------------------------------------------------------------------------------------------------

_MOST_IN_PLACE = 10  # SQLite attaches at most 10 files at a time
_LOOK_AHEAD = 3
_TRIES = 10
_THREADS = 1  # measured: more threads slow down the copying more than they help


class MergeOrder(NamedTuple):
    """The inputs, the target and the callbacks of a merge."""

    inputs: Sequence[Path]
    target: Path
    mix: bool = False  # files of different runs, and folders that are no run
    progress: Callable[[int, int, int], None] = lambda files, of, rows: None
    tell: Callable[[str], None] = lambda text: None


class MergeOutcome(NamedTuple):
    """What a merge has done."""

    files: tuple[SourceFile, ...]  # all files of the job database
    read: int  # how many files were opened this time
    given: frozenset[str]  # the files that this merge was asked to merge


def merge(order: MergeOrder, clock: Clock) -> MergeOutcome:
    """Bring the job database up to date with the given files; the old one stays until the new one is complete."""
    check_inputs(order.inputs)
    if not order.mix:
        refuse_no_runs(order.inputs)
    if order.target.is_dir():
        raise DatabaseProblem(f"{order.target} is a folder", fix=f"badcjobs merge … -o {order.target}/job.sqlite")
    try:
        order.target.parent.mkdir(parents=True, exist_ok=True)
        with merge_lock(order.target, clock, order.tell) as check:
            return _merge(order, check)
    except (OSError, sqlite3.Error) as error:
        fix = "badcjobs merge … -o /a/folder/with/space/job.sqlite"
        raise DatabaseProblem(f"{order.target} cannot be written", why=str(error), fix=fix) from error


def _remove_leftovers(target: Path) -> None:
    """Remove what killed merges into this file have left; only the holder of the lock may do this."""
    remove_unfinished(target)
    for folder in Path(tempfile.gettempdir()).glob(f"{_scratch_prefix(target)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _scratch_prefix(target: Path) -> str:
    """Return how the names of temporary folders begin, the same for all merges into this file."""
    return f"badcjobs-merge-{stable_id(os.fsencode(full_path(target))):x}-"


def _merge(order: MergeOrder, check: Callable[[], None]) -> MergeOutcome:
    _remove_leftovers(order.target)
    found = find_task_databases(order.inputs, order.target)
    state, files = read_old_job(order.target)
    if not found and not files:
        why = "task databases are called tasks/<job>_<index>.r<restart>.<node>.sqlite"
        fix = "badcjobs merge RUN_FOLDER   (the folder given as --out to badcjobs run)"
        if any(place.joinpath("run.toml").is_file() for place in order.inputs):
            why, fix = "no task of this run has begun to work", "the command of this run again: it says why"
        raise NoTaskDatabases("no task database in " + ", ".join(map(str, order.inputs)), why=why, fix=fix)
    known = {file.path: file for file in files}
    changed = [file for file in found if _has_changed(file, known.get(file.path))]
    if not order.mix:
        readable = [file.file for file in changed if file.reason is None]
        refuse_different_runs(readable, order.inputs, order.target if state == "current" else None)
    # Forget skipped files that are gone, and skipped folders that can be read now. The rows of other files that are
    # gone stay.
    unread = [(file.path, order.target.parent / file.path) for file in files if file.status == "skipped"]
    gone = {name for name, path in unread if not os.path.lexists(path) or (path.is_dir() and os.access(path, os.R_OK))}
    old = {path: file for path, file in known.items() if state == "damaged" or path not in gone}
    if state != "current" or changed or len(old) < len(known) or has_new_ends(order.target, files):
        try:
            files = _bring_up_to_date(order, state, old, changed, check)
        except UNREADABLE as error:
            if state != "current" or not (damage := _find_damage(order.target)):
                raise
            log.debug("%s: %s", order.target, error)
            old, changed = {file.path: file for file in _damaged(order.target, damage)}, found
            files = _bring_up_to_date(order, "damaged", old, changed, check)
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
    with tempfile.TemporaryDirectory(prefix=_scratch_prefix(order.target)) as scratch:
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
                except (OSError, BadcjobsError):
                    raise
                except Exception as error:
                    # Another program keeps reading it; a file was published meanwhile and attached once more; or a file
                    # cannot be merged: only in a new job database can its rows be rolled back.
                    log.debug("%s is not changed in place: %s", order.target, error)
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

    An isolation boundary: an error in one file does not stop the merge. Its rows are rolled back, and the file is
    salvaged or, if that does not help, skipped.
    """
    is_salvaged = False
    for _ in range(_TRIES):
        try:
            writer.add_file(intake)
            break
        except FileChanged:
            found = Intake(intake.path, None, "skipped", file=intake.file)
            intake = examine(found, intake.scratch)
        except OSError:  # no space for a copy
            raise
        except Exception as error:
            if writer.is_cause(error, after_salvage=is_salvaged):
                raise
            demote = skipped if is_salvaged else salvage_instead
            intake, is_salvaged = demote(intake, f"damaged: {error}"), True
    else:
        writer.add_file(replace(skipped(intake, STILL_WRITTEN), size_bytes=None))
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
    if read_value(db, "SELECT verdict FROM task WHERE task_id = ?", file.task_id) is None:
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
