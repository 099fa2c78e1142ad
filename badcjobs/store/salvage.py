"""Salvages a damaged task database: writes the rows that can still be read into a new one.

Pages whose stamp is wrong are not read. Every table is read with SQL from both ends up to the damage. If the list of
tables is damaged, that of an empty task database is used, where it is on the same pages. Rows that cannot be right are
dropped. Lost rows are counted by table.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from badcjobs.model import TaskKey
from badcjobs.store.atomic_write import PAGE_BYTES, SEAL, empty_stamped_page, is_stamped, read_sealed_rows, read_stamp
from badcjobs.store.connect import TableEntry, create_tables, list_tables, open_sealed, read_value
from badcjobs.store.plausible import UNREADABLE, is_plausible, is_time
from badcjobs.store.schema import DERIVED, TABLES, columns_of, insert_sql

_HIGHEST_ROWID = 2**63 - 1
Counts = dict[str, int]  # of rows, by table
_LOST_DEVICE = """
    INSERT INTO device (device_id, task_id, token, backend, why)
    SELECT DISTINCT device_id, task_id, '?', 'none', 'its row was lost; restored from its samples' FROM sample
    WHERE device_id NOT IN (SELECT device_id FROM device)"""
# A chunk stays done only if all its detections were saved.
_REOPEN = """
    UPDATE chunk SET status = 'pending', detections = NULL WHERE status = 'done' AND detections > (
        SELECT count(*) FROM detection d
        WHERE d.recording_id = chunk.recording_id AND d.chunk_id = chunk.chunk_id)"""


def salvage(damaged: Path, clean: Path) -> tuple[Counts, Counts | None] | None:
    """Write what can still be read of a damaged task database as a new one; None: nothing can be read.

    The damaged file is only read. Its name tells the task if the task's own row is lost. ``clean`` must not exist; it
    does not exist after None either. Returns, by table, the number of rows saved, and of rows that were published and
    are lost; None for the latter: the file no longer states how many rows it had.
    """
    copy = clean.with_name(f"readable-{clean.name}")
    if _copy_pages(damaged, copy):
        clean.write_bytes(empty_stamped_page())
    with closing(sqlite3.connect(clean, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = MEMORY")  # a scratch file
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA foreign_keys = OFF")  # keep samples whose device is lost
        create_tables(db)
        tables = _prepare_list_of_tables(copy, clean, list(list_tables(db)))
        db.execute("BEGIN")
        _read_tables(copy, db, tables)
        copy.unlink()
        task_id = _find_task(db, damaged.stem)
        if task_id is not None:
            saved = _complete(db, task_id, damaged)
            db.execute("COMMIT")
            return saved
    clean.unlink()
    return None  # rows without a task cannot be merged


# --- a copy that SQLite opens -----------------------------------------------------------------------------------------


def _copy_pages(damaged: Path, copy: Path) -> bool:
    """Copy the pages of one publication, with zeros in place of all others; return whether the pages have stamps."""
    stamps = read_stamps(damaged)
    publications = dict(Counter(filter(None, stamps)).most_common(1))
    has_stamps = bool(publications) or is_stamped(damaged)
    with copy.open("wb") as target:
        for number, page in _pages(damaged):
            is_good = stamps[number - 1] in publications or not has_stamps
            target.write(page if is_good else bytes(PAGE_BYTES))
    return has_stamps


def read_stamps(path: Path) -> list[bytes | None]:
    """Return the stamps of all pages; None: it is wrong."""
    return [read_stamp(page, number) for number, page in _pages(path)]


def _pages(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the complete pages of a file with their numbers; a page that cannot be read is zeros."""
    with path.open("rb") as file:
        for number in range(1, path.stat().st_size // PAGE_BYTES + 1):
            try:
                file.seek((number - 1) * PAGE_BYTES)
                page = file.read(PAGE_BYTES)
            except OSError:  # a bad block of the disk
                page = bytes(PAGE_BYTES)
            yield number, page


def _prepare_list_of_tables(copy: Path, clean: Path, ours: list[TableEntry]) -> set[str]:
    """Give the copy our own list of tables if its list is another one; return the names of the tables to read.

    SQLite numbers the pages of a new file in the order of its tables, so the pages are the same in all our files.
    """
    listed = list[TableEntry]()
    with suppress(*UNREADABLE), closing(_open(copy)) as source:
        listed.extend(list_tables(source))  # up to the damage
    if listed != ours:
        pages = {entry.name: entry.page for entry in ours}
        elsewhere = sum(pages.get(entry.name, entry.page) != entry.page for entry in listed)
        if elsewhere <= len(listed) // 10:  # our own list, but for the damage
            _restore_list_of_tables(copy, clean.read_bytes(), pages.values())
            listed = ours
        elif any(entry.is_strange for entry in listed):
            return set()
    return {entry.name for entry in listed}


def _restore_list_of_tables(copy: Path, empty: bytes, roots: Collection[int]) -> None:
    """Copy the pages of an empty database into the copy; ``roots``, the first pages of its tables, stay."""
    with copy.open("r+b") as file:
        for start in range(0, len(empty), PAGE_BYTES):
            if start // PAGE_BYTES + 1 not in roots:
                file.seek(start)
                file.write(empty[start : start + PAGE_BYTES])
        count = file.seek(0, os.SEEK_END) // PAGE_BYTES
        file.seek(28)
        file.write(count.to_bytes(4, "big"))


def _open(path: Path) -> Connection:
    db = open_sealed(path)
    db.execute("PRAGMA writable_schema = ON")  # allows a file that is shorter than its header states
    db.execute("PRAGMA cell_size_check = ON")
    return db


# --- rows -------------------------------------------------------------------------------------------------------------

# Derived tables are computed again from the saved rows.
_OWN = [table for table in TABLES if table.name not in DERIVED]
_NAMES = [table.name for table in _OWN]
# In these the row number is the first column: an id, not 1, 2, 3, …
_NUMBERED = {table.name for table in _OWN if table.columns[0].sql.startswith("INTEGER PRIMARY KEY")}


def _read_tables(copy: Path, clean: Connection, tables: set[str]) -> None:
    """Copy the rows that SQLite can reach: of each table from both ends up to the damage."""
    with closing(_open(copy)) as source:
        for table in (name for name in _NAMES if name in tables):
            reached = _copy_rows(source, clean, table, 0, "ASC")
            if reached is not None:
                _copy_rows(source, clean, table, reached + 1, "DESC")


def _copy_rows(source: Connection, clean: Connection, table: str, first_row: int, order: str) -> int | None:
    """Copy rows in one direction; return None if all were read, else the last row number reached."""
    step = 1 if order == "ASC" else -1
    reached = first_row - 1 if order == "ASC" else _HIGHEST_ROWID + 1
    is_complete = False
    names = columns_of(table)
    skipped = int(table in _NUMBERED)
    sql = f"""SELECT rowid, {", ".join(names)} FROM {table} NOT INDEXED
              WHERE rowid BETWEEN ? AND ? ORDER BY rowid {order}"""

    def read(low: int, high: int) -> Iterator[Sequence[Any]]:
        nonlocal reached
        for rowid, *values in source.execute(sql, (low, high)):
            reached = rowid
            if is_plausible(table, values):
                yield rowid, *values[skipped:]

    def rows() -> Iterator[Sequence[Any]]:
        nonlocal is_complete
        with suppress(*UNREADABLE):
            yield from read(first_row, _HIGHEST_ROWID)
            is_complete = True
            return
        with suppress(*UNREADABLE):  # Python drops a row if the next one cannot be read
            yield from read(reached + step, reached + step)

    clean.executemany(f"{insert_sql(table, ('rowid', *names[skipped:]))} ON CONFLICT DO NOTHING", rows())
    return None if is_complete else reached


# --- the task of the rows ---------------------------------------------------------------------------------------------


def _find_task(db: Connection, file_name: str) -> int | None:
    """Return the task of this file: the one that may have this name, or else the only one in it; None: not known."""
    key = _key_of(file_name)
    if key is None:
        tasks = db.execute("SELECT task_id FROM task").fetchall()
        return int(tasks[0][0]) if len(tasks) == 1 else None  # several tasks: a job database
    rows_of: Counter[int] = Counter()
    for table in _NAMES[1:]:
        rows_of.update(dict(db.execute(f"SELECT task_id, count(*) FROM {table} GROUP BY 1")))
    fitting = [(count, task_id) for task_id, count in rows_of.items() if key.may_have(task_id)]
    return max(fitting)[1] if fitting else None


def _key_of(file_name: str) -> TaskKey | None:
    return None if file_name.startswith(".") else TaskKey.parse(file_name)  # a hidden file is an unfinished copy


def _complete(db: Connection, task_id: int, damaged: Path) -> tuple[Counts, Counts | None]:
    """Keep the rows of one task that can be right, restore lost rows of tasks and devices, and count."""
    changed_at_ms = int(damaged.stat().st_mtime * 1000)
    published = read_sealed_rows(db)
    key = _key_of(damaged.stem)
    for table in _NAMES[1:]:
        db.execute(f"DELETE FROM {table} WHERE task_id != ?", (task_id,))
    if key:
        db.execute("DELETE FROM task WHERE name != ?", (key.name,))
    _drop_other_times(db, changed_at_ms)
    _drop_unknown_ids(db, published)
    rows = _count_rows(db)
    if not rows["task"] and key:
        times = [f"SELECT min({c.name}) AS at_ms FROM {t.name}" for t in _OWN for c in t.columns if is_time(c)]
        earliest_ms = read_value(db, f"SELECT min(at_ms) FROM ({' UNION ALL '.join(times)})")
        values = {
            "task_id": task_id, "name": key.name, "job_id": key.job_id, "array_index": key.array_index,
            "restart": key.restart, "node": key.node, "procid": key.procid, "version": "unknown",
            "telemetry": int(rows["sample"] > 0), "started_at_ms": earliest_ms or changed_at_ms,
        }  # fmt: skip
        db.execute(insert_sql("task", values), [*values.values()])
    db.execute(_LOST_DEVICE)  # else the summary would not see the samples of a lost device
    db.execute(_REOPEN)
    db.execute("DELETE FROM meta WHERE key = ?", (SEAL,))  # the bytes differ from those that were sealed
    lost = {table: count - rows[table] for table, count in published.items() if count > rows.get(table, count)}
    return rows, lost if published else None


def _count_rows(db: Connection) -> Counts:
    return {table: read_value(db, f"SELECT count(*) FROM {table}") for table in _NAMES}


# --- rows that cannot be right ----------------------------------------------------------------------------------------

_HOUR_MS = 3_600_000  # the clocks of a node, its recorder and its file server may differ
_LONGEST_TASK_MS = 30 * 24 * _HOUR_MS
_KEYS = {
    "device": "device_id",
    "worker": "worker_id",
    "recording": "recording_id",
    "chunk": "recording_id, chunk_id",
}


def _drop_other_times(db: Connection, changed_at_ms: int) -> None:
    """Drop rows from before the task's start, after its end, or after the last change of the file."""
    db.execute("DELETE FROM task WHERE ended_at_ms < started_at_ms")
    for started_at_ms, ended_at_ms in db.execute("SELECT started_at_ms, ended_at_ms FROM task").fetchall():
        last_ms = ended_at_ms or started_at_ms + _LONGEST_TASK_MS
        if changed_at_ms > started_at_ms:  # else the file's time is not its own
            last_ms = min(last_ms, changed_at_ms)
        span = (started_at_ms - _HOUR_MS, last_ms + _HOUR_MS)
        for table in _OWN:
            for column in filter(is_time, table.columns):
                db.execute(f"DELETE FROM {table.name} WHERE {column.name} NOT BETWEEN ? AND ?", span)


def _drop_unknown_ids(db: Connection, published: Mapping[str, int]) -> None:
    """Drop rows that refer to a device, worker, recording or chunk that never existed.

    If rows of these tables are lost, the ids cannot be checked.
    """
    for parent, key in _KEYS.items():
        count = _count_rows(db)[parent]
        if count == 0 or count != published.get(parent):
            continue
        for child in (name for name in _NAMES if name != parent and set(key.split(", ")) <= set(columns_of(name))):
            db.execute(f"DELETE FROM {child} WHERE ({key}) NOT IN (SELECT {key} FROM {parent})")
