"""The target of a merge: the merge lock, the old job database, and how the new one replaces it."""

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
        text = lock.read_text(encoding="utf-8")
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
            (application,) = db.execute("PRAGMA application_id").fetchone()
            what = "a task database" if application == APPLICATION_ID else "another program's database"
            is_ours = application == APPLICATION_ID and is_job_database(db)
            _refuse_if(not is_ours, f"{target} is {what}, not a job database")
            complaint = schema_problem(db)
            _refuse_if(complaint is not None, f"{target} has {complaint}")
            return "current", read_source_files(db)
    except sqlite3.Error as error:
        reason = f"the earlier job database could not be read ({error}); it was renamed, and a new one was made"
        return "damaged", (SourceFile(damaged_name(target).name, None, "skipped", reason),)


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
def write_in_place(target: Path, *, check: Callable[[], None]) -> Iterator[sqlite3.Connection]:
    """Give the job database itself; after a kill, the next reader restores the old content from the journal."""
    db = sqlite3.connect(target, isolation_level=None, uri=True, timeout=_READERS_TIMEOUT_S)
    try:
        db.execute(f"PRAGMA cache_size = -{SORT_CACHE_KIB}")
        db.execute("PRAGMA synchronous = FULL")
        with transaction(db, "BEGIN EXCLUSIVE"):  # fails if another program reads for longer than the timeout
            yield db
            check()
    finally:
        db.close()
