"""Salvage: what can still be read of a damaged task database → a clean new one.

SQLite gives up at the first bad page it meets; here every page is read by itself (sqlite_pages.py), and every row that
can be true (row_forms.py) is kept. Whether a file is damaged, and what to say about it, is merge's business.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from badcjobs.model import TaskKey, stable_id
from badcjobs.store.connect import create_tables
from badcjobs.store.merging.row_forms import RowForm, find_form, is_time
from badcjobs.store.merging.sqlite_pages import OUR_PAGE_SIZE, read_rows
from badcjobs.store.schema import DERIVED, TABLES
from badcjobs.store.seal import SEAL, Checksum, read_sealed_rows

_BLOCK_BYTES = 1 << 20
_FEW = 10  # less than one row in ten
_LOST_DEVICE = """
    INSERT INTO device (device_id, task_id, token, backend, why)
    SELECT DISTINCT device_id, task_id, '?', 'none', 'its row was lost; made anew from its samples' FROM sample
    WHERE device_id NOT IN (SELECT device_id FROM device)"""
_TABLES = tuple(table for table in TABLES if table.name not in DERIVED)  # those are made anew from what is left


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What came of a salvage."""

    rows: Mapping[str, int]  # table → rows that were read
    lost: Mapping[str, int]  # table → rows that were there at publication and are not any more; empty if not known
    known: bool  # whether the file could still say how many rows it had
    task_rebuilt: bool  # the task's own row was lost, and made anew from the name of the file


def salvage(damaged: Path, clean: Path) -> Salvaged | None:
    """Write what can still be read of a damaged task database as a new one; None: nothing can.

    The damaged file is only read. It must have the name it was published under: that is what says whose rows they
    are when the task's own row is lost. ``clean`` must not exist; it does not after None either.
    """
    with damaged.open("rb") as file:
        page_bytes = _known_page_bytes(file)
        task_id = _find_task(_believable_rows(file, page_bytes), damaged.stem)
        if task_id is None:
            return None  # rows of nobody cannot be merged
        with closing(_create(clean)) as db:
            _write_rows(db, (row for row in _believable_rows(file, page_bytes) if row.task_id in (None, task_id)))
            rows = {table.name: _count(db, table.name) for table in _TABLES}
            key = TaskKey.parse(damaged.stem)
            if not rows["task"] and key:
                _rebuild_task(db, key, task_id, latest_start_ms=int(damaged.stat().st_mtime * 1000))
            db.execute(_LOST_DEVICE)  # the summary goes through the devices: samples of none would not be seen
            db.execute("DELETE FROM meta WHERE key = ?", (SEAL,))  # these are other bytes
            db.execute("COMMIT")
            published = read_sealed_rows(db)
    lost = {table: count - rows[table] for table, count in published.items() if count > rows.get(table, count)}
    return Salvaged(rows, lost, known=bool(published), task_rebuilt=not rows["task"])


# --- reading ------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    form: RowForm
    rowid: int
    values: tuple[Any, ...]

    @property
    def task_id(self) -> int | None:
        """The task it belongs to; None: the table does not say."""
        at = self.form.task_column
        return None if at is None else self.values[at]


def _known_page_bytes(file: BinaryIO) -> int | None:
    """Return the size of the pages of a file that has our seal, whatever its header says; None: it has none."""
    checksum = Checksum()
    for start in range(0, file.seek(0, os.SEEK_END), _BLOCK_BYTES):
        try:
            file.seek(start)
            checksum.feed(file.read(_BLOCK_BYTES))
        except OSError:
            continue  # a bad block of the disk; the seal may still come
        if checksum.stated is not None:
            return OUR_PAGE_SIZE
    return None


def _believable_rows(file: BinaryIO, page_bytes: int | None) -> Iterator[_Row]:
    for _, rowid, values in read_rows(file, holes=True, page_bytes=page_bytes):
        form = find_form(values)
        if form is not None and form.table not in DERIVED:
            row = form.complete(rowid, values)
            if form.is_believable(row):
                yield _Row(form, rowid, row)


def _find_task(rows: Iterable[_Row], file_name: str) -> int | None:
    """Return the task of this file: the one that its name says, or else the only one that has a row in it."""
    rows_of: Counter[int] = Counter()
    tasks: set[int] = set()
    for row in rows:
        if row.task_id is None:
            continue
        rows_of[row.task_id] += 1
        if row.form.table == "task":
            tasks.add(row.task_id)
            if row.values[row.form.columns.index("name")] == file_name:
                return row.task_id
    if TaskKey.parse(file_name) and (nameless := _find_nameless(rows_of, tasks, stable_id(file_name))) is not None:
        return nameless
    return tasks.pop() if len(tasks) == 1 else None  # several: a job database


def _find_nameless(rows_of: Counter[int], tasks: set[int], old_style: int) -> int | None:
    """Return the task whose own row is lost: the one whose id the file name proves, or else the only one there is.

    A task with a row of its own has another name: it was written over ours. An id that few rows have is no task, but
    a byte that flipped.
    """
    if old_style in rows_of:
        return old_style
    nameless = {task_id for task_id, many in rows_of.items() if many * _FEW >= rows_of.total()} - tasks
    return nameless.pop() if len(nameless) == 1 else None


# --- writing ------------------------------------------------------------------------------------------------------


def _create(clean: Path) -> sqlite3.Connection:
    """Make an empty task database and begin to fill it."""
    db = sqlite3.connect(clean, isolation_level=None)
    db.execute("PRAGMA journal_mode = MEMORY")  # a new file: whoever is killed here begins again
    db.execute("PRAGMA synchronous = OFF")
    db.execute("PRAGMA foreign_keys = OFF")  # a sample whose device is lost is still a sample
    create_tables(db)
    db.execute("BEGIN")
    return db


def _write_rows(db: sqlite3.Connection, rows: Iterable[_Row]) -> None:
    """Write the rows under their old rowids; of two with one rowid or key the first stays."""
    for form, group in groupby(rows, key=lambda row: row.form):
        if form.rowid_column is None:
            names, values = ("rowid", *form.columns), ((row.rowid, *row.values) for row in group)
        else:
            names, values = form.columns, (row.values for row in group)
        db.executemany(_insert("INSERT OR IGNORE", form.table, names), values)


def _insert(verb: str, table: str, names: Iterable[str]) -> str:
    names = tuple(names)
    return f"{verb} INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


def _rebuild_task(db: sqlite3.Connection, key: TaskKey, task_id: int, *, latest_start_ms: int) -> None:
    values = {
        "task_id": task_id, "name": key.name, "job_id": key.job_id, "array_index": key.array_index,
        "restart": key.restart, "node": key.node, "procid": key.procid, "version": "unknown",
        "telemetry": int(_count(db, "sample") > 0), "started_at_ms": _earliest_ms(db) or latest_start_ms,
    }  # fmt: skip
    db.execute(_insert("INSERT", "task", values), tuple(values.values()))


def _earliest_ms(db: sqlite3.Connection) -> int | None:
    """Return the first instant that any row speaks of."""
    times = [
        db.execute(f"SELECT min({column.name}) FROM {table.name}").fetchone()[0]
        for table in _TABLES
        for column in table.columns
        if is_time(column)
    ]
    return min((at_ms for at_ms in times if at_ms is not None), default=None)


def _count(db: sqlite3.Connection, table: str) -> int:
    return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
