"""Looks at one file before it is merged: is it whole, can it be made whole, what of it can be saved?

The file itself is never touched. What needs a journal rolled back, or rows picked out of damaged pages, is done on a
copy in a scratch folder, and that copy is merged instead.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from badcjobs.store.connect import SQLITE_MAGIC, file_uri, open_sealed, version_complaint
from badcjobs.store.job_schema import is_job_database
from badcjobs.store.merging.find_files import LEFTOVERS, FoundFile, is_plain_file
from badcjobs.store.merging.salvage import Salvaged, salvage
from badcjobs.store.merging.source_file import MERGED, NOT_OURS, RECOVERED, SALVAGED, SKIPPED
from badcjobs.store.schema import APPLICATION_ID, DERIVED, SCHEMA_VERSION, TABLES
from badcjobs.store.seal import read_checksum, read_sealed_rows

STILL_WRITTEN = "it is still being written; merge again when it is complete"
_LOOKS = 3
_WHOSE_READINGS = "SELECT task_id FROM sample UNION SELECT task_id FROM host_sample LIMIT 2"
_LAST_SIGN = """
    SELECT max(at_ms) FROM (
        SELECT max(started_at_ms, coalesce(ended_at_ms, 0)) AS at_ms FROM task
        UNION ALL SELECT max({column}) FROM {table}
        UNION ALL SELECT max(to_ms) FROM gap UNION ALL SELECT max(ended_at_ms) FROM attempt)"""


@dataclass(frozen=True, slots=True)
class Intake:
    """What is known about a file before it is merged."""

    path: Path
    status: str
    scratch: Path  # an empty folder for copies, until it is merged
    reason: str | None = None
    size_bytes: int | None = None
    mtime_ns: int | None = None
    database: Path | None = None  # what to merge: the file, or a copy made whole; None: nothing
    task_id: int | None = None
    task_name: str | None = None
    started_at_ms: int | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    rows_lost: int | None = None
    last_sign_ms: int | None = None
    checksum: str | None = None

    @property
    def is_half(self) -> bool:
        """Whether this is a recorder's live file: readings of a task without the task itself."""
        return self.database is not None and self.task_name is None


class _Refused(Exception):
    """Nothing of this file can be merged; the text says why."""


def examine(file: FoundFile, scratch: Path) -> Intake:
    """Look at a file, and again if it changed meanwhile."""
    skipped = Intake(file.path, SKIPPED, scratch, file.closed)
    if file.closed is not None:
        return skipped
    try:
        for _ in range(_LOOKS):
            before = file.path.stat()
            intake = _examine(skipped, before)
            after = file.path.stat()
            if _stamp(before) == _stamp(after):
                size_bytes, mtime_ns = _stamp(before)
                return replace(intake, size_bytes=size_bytes, mtime_ns=mtime_ns)
    except OSError as error:
        return replace(skipped, reason=error.strerror or str(error))
    return replace(skipped, reason=STILL_WRITTEN)


def salvage_instead(intake: Intake, damage: str) -> Intake:
    """Save what can be of a file that looked whole and is not."""
    try:
        return _save_what_can_be(intake, damage)
    except _Refused as refusal:
        return replace(intake, status=SKIPPED, reason=str(refusal), database=None, task_id=None)


def describe(intake: Intake) -> Intake:
    """Fill in what the database itself says: whose it is, how many rows it has, until when."""
    assert intake.database is not None
    with closing(open_sealed(intake.database)) as db:
        return _describe(db, intake, _count_rows(db), _LAST_SIGN.format(column="at_ms", table="sample"))


def _describe(db: sqlite3.Connection, intake: Intake, rows: Mapping[str, int], last_sign: str) -> Intake:
    tasks = db.execute("SELECT task_id, name, started_at_ms FROM task").fetchall()
    if not tasks:
        tasks = [(task_id, None, None) for (task_id,) in db.execute(_WHOSE_READINGS)]
    if len(tasks) != 1:
        raise _Refused("it holds no task" if not tasks else f"it holds {len(tasks)} tasks")
    ((task_id, name, started_at_ms),) = tasks
    (last_sign_ms,) = db.execute(last_sign).fetchone()
    return replace(
        intake, task_id=task_id, task_name=name, started_at_ms=started_at_ms, rows=rows, last_sign_ms=last_sign_ms
    )


def _count_rows(db: sqlite3.Connection) -> dict[str, int]:
    there = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    tables = [table.name for table in TABLES if table.name != "meta" and table.name in there]
    return {name: db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}


def has_changed(intake: Intake) -> bool:
    """Say whether the file of a task was replaced since it was examined."""
    if intake.database != intake.path:
        return False  # a copy of ours
    try:
        return _stamp(intake.path.stat()) != (intake.size_bytes, intake.mtime_ns)
    except OSError:
        return True


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _examine(intake: Intake, status: os.stat_result) -> Intake:
    try:
        if not is_plain_file(status):
            raise _Refused("not a file")
        if status.st_size == 0:
            raise _Refused("the file is empty")
        return _read(intake, status.st_size)
    except _Refused as refusal:
        return replace(intake, reason=str(refusal))


def _read(intake: Intake, size_bytes: int) -> Intake:
    path = intake.path
    stated, computed = read_checksum(path)
    damage = _check_head(path, size_bytes, believed=stated is None or stated == computed)
    if damage is None and stated == computed:
        return _read_sealed(replace(intake, status=MERGED, database=path, checksum=stated))
    leftovers = [ending for ending in LEFTOVERS if _has_content(path.with_name(path.name + ending))]
    if leftovers:
        reason = f"with what lay beside it in {path.name}{leftovers[0]}, on a copy"
        intake = replace(intake, status=RECOVERED, reason=reason, database=_recover(path, leftovers, intake.scratch))
    elif damage is None:
        intake = replace(intake, status=MERGED, database=path)
        if stated is not None:
            intake = replace(intake, status=SALVAGED, reason="damaged: its bytes are not those that were published")
    return _read_unproven(intake, damage)


def _read_sealed(intake: Intake) -> Intake:
    """Believe what a file says of itself: not a bit of it has changed since it was published."""
    with closing(open_sealed(intake.path)) as db:
        if is_job_database(db):
            raise _Refused(NOT_OURS)
        last_sign = _LAST_SIGN.format(column="last_at_ms", table="device_total")
        return _describe(db, intake, read_sealed_rows(db), last_sign)


def _read_unproven(intake: Intake, damage: str | None) -> Intake:
    """Read a file without a good seal: a live one, one of an earlier version, one that was recovered or changed."""
    if intake.database is None:
        return _save_what_can_be(intake, damage or "damaged")
    try:
        with closing(open_sealed(intake.database)) as db:
            if is_job_database(db):
                raise _Refused(NOT_OURS)
            (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
            sealed = read_sealed_rows(db)
        intake = describe(intake)
    except sqlite3.Error as error:
        verdict = str(error)
    if verdict != "ok":
        return _save_what_can_be(intake, f"damaged: {verdict}")
    lost = {
        table: many - intake.rows.get(table, 0) for table, many in sealed.items() if many > intake.rows.get(table, 0)
    }
    if lost or intake.status == SALVAGED:
        saved = Salvaged(intake.rows, lost, known=bool(sealed), task_rebuilt=False)
        reason = f"{intake.reason or 'damaged: rows are missing'}; {_what_was_saved(saved)}"
        return replace(intake, status=SALVAGED, reason=reason, rows_lost=sum(lost.values()) if sealed else None)
    return intake


def _check_head(path: Path, size_bytes: int, *, believed: bool) -> str | None:
    """Return what the first page says of damage; refuse what is no task database of ours.

    Not ``believed``: the file carries our seal, and it is broken; then a strange header is damage, too.
    """
    with path.open("rb") as file:
        head = file.read(100)
    if not head.startswith(SQLITE_MAGIC) or len(head) < 100:
        return "not a SQLite database"
    page_bytes, pages, version, application = struct.unpack(">16xH10xI28xI4xI28x", head)
    if not believed and (application != APPLICATION_ID or version > SCHEMA_VERSION):
        return "damaged: its header is not what was published"
    if application != APPLICATION_ID:
        raise _Refused("not a badcjobs database")
    if version > SCHEMA_VERSION:
        with closing(open_sealed(path)) as db:
            raise _Refused(version_complaint(db) or "")
    wanted_bytes = pages * (65536 if page_bytes == 1 else page_bytes)
    return f"truncated: {size_bytes:,} of {wanted_bytes:,} bytes" if wanted_bytes > size_bytes else None


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _recover(path: Path, leftovers: list[str], scratch: Path) -> Path:
    """Let SQLite finish, on a copy, what a dead writer had begun."""
    copy = scratch / path.name
    for ending in ("", *leftovers):
        shutil.copyfile(path.with_name(path.name + ending), copy.with_name(copy.name + ending))
    try:
        with closing(sqlite3.connect(file_uri(copy, "mode=rw"), uri=True, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = DELETE").fetchone()
    except sqlite3.Error:
        pass  # the check that follows says what is wrong with it
    return copy


def _save_what_can_be(intake: Intake, damage: str) -> Intake:
    """Pick the healthy rows out of a damaged file; refuse it when there are none."""
    clean = intake.scratch / f"salvaged-{intake.path.name}"
    clean.unlink(missing_ok=True)
    saved = salvage(intake.database or intake.path, clean)
    if saved is None:
        raise _Refused(damage)
    rows_lost = sum(_without_derived(saved.lost).values()) if saved.known else None
    reason = f"{damage}; {_what_was_saved(saved)}"
    saved_intake = replace(intake, status=SALVAGED, reason=reason, database=clean, rows_lost=rows_lost, checksum=None)
    return describe(saved_intake)


def _what_was_saved(saved: Salvaged) -> str:
    rows = sum(_without_derived(saved.rows).values())
    lost = _without_derived(saved.lost)
    if not saved.known:
        return f"{rows:,} rows saved; how many there were is lost, too"
    if not lost:
        return f"all {rows:,} rows saved, but a value in them may be wrong"
    words = ", ".join(f"{many:,} of {table}" for table, many in sorted(lost.items()))
    return f"{rows:,} of {rows + sum(lost.values()):,} rows saved (lost: {words})"


def _without_derived(rows: Mapping[str, int]) -> dict[str, int]:
    return {table: many for table, many in rows.items() if table not in ("meta", *DERIVED)}
