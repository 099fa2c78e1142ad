"""The job database that a merge makes: one merge at a time, the old one, and how the new one takes its place."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path

import psutil

from badcjobs.errors import DatabaseProblem
from badcjobs.seams import Clock
from badcjobs.store.atomic_write import remove_unfinished, replacing, sync_file, unfinished_name
from badcjobs.store.connect import SQLITE_MAGIC, is_job_database, open_job_database, schema_problem, transaction
from badcjobs.store.job_schema import SORT_CACHE_KIB, open_draft
from badcjobs.store.schema import APPLICATION_ID
from badcjobs.store.source_files import SourceFile, read_source_files

# --- one merge at a time ----------------------------------------------------------------------------------------------
# On whatever node it runs: a file that only one merge can create. No kernel lock, which shared filesystems may not
# have. The holder touches the file every few seconds; one that is left alone, or whose process is gone from this
# machine, belongs to a merge that was killed.

_TOUCH_EVERY_S = 5.0
_LEFT_ALONE_S = 60.0
_LOOK_EVERY_S = 0.2


@contextmanager
def only_merge(target: Path, clock: Clock, tell: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Hold the lock of a job database; wait for another merge to end.

    Gives a check for the moment before anything is replaced: a merge that stood still for a minute may have been taken
    for dead, and another one may be at it.
    """
    lock = target.with_name(f".{target.name}.lock")
    me = f"{os.uname().nodename} {os.getpid()}"
    _take(lock, me, clock, tell)
    over = threading.Event()

    def touch() -> None:
        while not over.wait(_TOUCH_EVERY_S):
            with suppress(OSError):  # a full or vanished disk; the merge itself will say so
                os.utime(lock)

    def check() -> None:
        if _read(lock)[0] != me:
            raise DatabaseProblem(
                f"another merge has taken over {target.name} while this one stood still",
                why="nothing was replaced by this one",
                fix="the same command again",
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


def _take(lock: Path, me: str, clock: Clock, tell: Callable[[str], None]) -> None:
    seen, seen_at_s, told = None, clock.monotonic_s(), False
    while True:
        try:
            with lock.open("x", encoding="utf-8") as file:
                file.write(me)
            return
        except FileExistsError:
            now = _read(lock)
        except OSError:
            lock.unlink(missing_ok=True)  # a full disk: an empty lock would keep others waiting
            raise
        if now != seen:
            seen, seen_at_s = now, clock.monotonic_s()
        if now == (None, None):
            continue  # gone this moment
        node, _, pid = (now[0] or "").partition(" ")  # empty: a lock that we may not read, or that is not written yet
        is_dead = node == os.uname().nodename and pid.isdigit() and not psutil.pid_exists(int(pid))
        if is_dead or clock.monotonic_s() - seen_at_s > _LEFT_ALONE_S:
            _remove(lock, now[0])
            continue
        if not told:
            tell(f"another merge is running on {node or 'an unknown node'}, process {pid or 'unknown'}; waiting for it")
            told = True
        clock.sleep(_LOOK_EVERY_S)


def _read(lock: Path) -> tuple[str | None, int | None]:
    """Return what a lock says, and when it was touched; None: it does not say, or is gone."""
    text = touched_ns = None
    with suppress(OSError):
        touched_ns = lock.stat().st_mtime_ns
        text = lock.read_text(encoding="utf-8")
    return text, touched_ns


def _remove(lock: Path, holder: str | None) -> None:
    """Remove the lock of a dead merge; of several that try, one succeeds, and nobody removes the next one's."""
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


def look_at_old(target: Path) -> tuple[str, tuple[SourceFile, ...]]:
    """Return none, current (go on with a copy) or damaged (put aside), and the files it knows.

    Refuse to replace what is not a job database of ours, or is a newer one.
    """
    if not target.exists():
        return "none", ()
    try:
        with target.open("rb") as file:
            if file.read(16) != SQLITE_MAGIC:
                _refuse_if(target.suffix not in (".sqlite", ".db"), f"{target} is not a database")
                raise sqlite3.DatabaseError("not a SQLite database")  # it may have lost its first page
        with closing(open_job_database(target)) as db:
            (application,) = db.execute("PRAGMA application_id").fetchone()
            what = "a task database" if application == APPLICATION_ID else "another program's database"
            is_ours = application == APPLICATION_ID and is_job_database(db)
            _refuse_if(not is_ours, f"{target} is {what}, not a job database")
            complaint = schema_problem(db)
            _refuse_if(complaint is not None, f"{target} has {complaint}")
            return "current", read_source_files(db)
    except sqlite3.Error as error:
        reason = f"the earlier job database could not be read ({error}); made anew, and the old one put aside"
        return "damaged", (SourceFile(damaged_name(target).name, None, "skipped", reason),)


def _refuse_if(wrong: bool, what: str) -> None:
    if wrong:
        fix = "badcjobs merge RUN_FOLDER -o another/name.sqlite"
        raise DatabaseProblem(what, why="merge would replace it", fix=fix)


def damaged_name(target: Path) -> Path:
    """Return where a damaged file is kept: of a job database, rows whose task files are gone may still be in it."""
    names = (target.with_name(f"{target.name}.damaged" + (f".{number}" if number > 1 else "")) for number in count(1))
    return next(name for name in names if not name.exists())


# --- a draft, or a change in place ------------------------------------------------------------------------------------
# ``drafted``: made beside the old one under a hidden name, and renamed when it is whole. Works on every filesystem, but
# writes the whole file. ``changed_in_place``: one SQLite transaction, for a few more files on a local disk.

_READERS_PATIENCE_S = 5.0


@contextmanager
def drafted(
    target: Path, *, from_old: bool, keep_old_as: Path | None, check: Callable[[], None]
) -> Iterator[sqlite3.Connection]:
    """Give a new job database, or a copy of the old one, to be written; put it in place when all went well."""
    remove_unfinished(target)
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
def changed_in_place(target: Path, *, check: Callable[[], None]) -> Iterator[sqlite3.Connection]:
    """Give the job database itself; a kill leaves a journal, with which the next reader restores what was there."""
    db = sqlite3.connect(target, isolation_level=None, uri=True, timeout=_READERS_PATIENCE_S)
    try:
        db.execute(f"PRAGMA cache_size = -{SORT_CACHE_KIB}")
        db.execute("PRAGMA synchronous = FULL")
        with transaction(db, "BEGIN EXCLUSIVE"):  # or not at all, when somebody is reading for long
            yield db
            check()
    finally:
        db.close()
