"""Salvage: what can still be read of a damaged task database → a clean new one.

SQLite gives up at the first bad page it meets; here every page is read by itself (sqlite_pages.py), and every row that
can be true (row_forms.py) is kept. Whether a file is damaged, and what to say about it, is merge's business.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from badcjobs.model import TaskKey, stable_id
from badcjobs.store.connect import create_tables
from badcjobs.store.merging.row_forms import RowForm, find_form, is_time
from badcjobs.store.merging.sqlite_pages import read_rows
from badcjobs.store.schema import DERIVED, TABLES
from badcjobs.store.seal import SEAL, read_sealed_rows

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

    The damaged file is only read. It must have the name it was published under: that is what proves whose rows they
    are when the task's own row is lost. ``clean`` must not exist; it does not after None either.
    """
    with damaged.open("rb") as file:
        task_id = _find_task(_believable_rows(file), damaged.stem)
        if task_id is None:
            return None  # rows of nobody cannot be merged
        with closing(_create(clean)) as db:
            _write_rows(db, (row for row in _believable_rows(file) if row.task_id in (None, task_id)))
            rows = {table.name: _count(db, table.name) for table in _TABLES}
            key = TaskKey.parse(damaged.stem)
            if not rows["task"] and key:
                _rebuild_task(db, key, latest_start_ms=int(damaged.stat().st_mtime * 1000))
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


def _believable_rows(file: BinaryIO) -> Iterator[_Row]:
    for _, rowid, values in read_rows(file, holes=True):
        form = find_form(values)
        if form is not None and form.table not in DERIVED:
            row = form.complete(rowid, values)
            if form.is_believable(row):
                yield _Row(form, rowid, row)


def _find_task(rows: Iterable[_Row], file_name: str) -> int | None:
    """Return the task of this file: the one that its name says, or else the only one that has a row in it."""
    wanted = stable_id(file_name)
    tasks, wanted_is_here = set(), False
    for row in rows:
        wanted_is_here = wanted_is_here or row.task_id == wanted
        if row.form.table == "task":
            tasks.add(row.task_id)
        if wanted in tasks:
            return wanted
    if wanted_is_here and TaskKey.parse(file_name):
        return wanted
    return tasks.pop() if len(tasks) == 1 else None  # several: a job database


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


def _rebuild_task(db: sqlite3.Connection, key: TaskKey, *, latest_start_ms: int) -> None:
    values = {
        "task_id": key.task_id, "name": key.name, "job_id": key.job_id, "array_index": key.array_index,
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
