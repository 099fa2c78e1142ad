"""Salvages a damaged task database: writes the rows that can still be read into a new one.

Every table is read with SQL from both ends; between two unreadable places the row numbers are bisected. If the list of
tables itself is damaged, the rest of it is taken from an empty task database, where it is on the same pages. If the
program ``sqlite3`` is installed, the rows that its ``.recover`` finds are added. Lost rows are counted by table.
"""

from __future__ import annotations

import heapq
import os
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from badcjobs.model import TaskKey
from badcjobs.store.atomic_write import SEAL, read_sealed_rows
from badcjobs.store.connect import create_tables, file_uri, read_only_uri
from badcjobs.store.plausible import UNREADABLE, is_plausible, is_time
from badcjobs.store.schema import DERIVED, TABLES, columns_of, insert_sql

_PAGE_BYTES = 4096  # SQLite's default, which we never change
_LEAST_ROW_BYTES = 4
_MOST_RANGES = 4000  # of row numbers, in one table; each of the remaining ones is only a few pages long
_FEW_RANGES = 50
_RANGES_WITHOUT_ROWS = 200
_PROGRAM_LIMIT_S = 600
_LOST_DEVICE = """
    INSERT INTO device (device_id, task_id, token, backend, why)
    SELECT DISTINCT device_id, task_id, '?', 'none', 'its row was lost; restored from its samples' FROM sample
    WHERE device_id NOT IN (SELECT device_id FROM device)"""
# A chunk stays done only if all its detections were saved.
_REOPEN = """
    UPDATE chunk SET status = 'pending', detections = NULL WHERE status = 'done' AND detections > (
        SELECT count(*) FROM detection d
        WHERE d.recording_id = chunk.recording_id AND d.chunk_id = chunk.chunk_id)"""


def salvage(damaged: Path, clean: Path) -> tuple[dict[str, int], dict[str, int] | None] | None:
    """Write what can still be read of a damaged task database as a new one; None: nothing can be read.

    The damaged file is only read. Its name tells the task if the task's own row is lost. ``clean`` must not exist; it
    does not exist after None either. Returns, by table, the number of rows saved, and of rows that were published and
    are lost; None for the latter: the file no longer states how many rows it had.
    """
    copy = clean.with_name(f"readable-{clean.name}")
    with closing(sqlite3.connect(clean, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = MEMORY")  # a scratch file
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA foreign_keys = OFF")  # keep samples whose device is lost
        create_tables(db)
        empty, ours = clean.read_bytes(), _list_of_tables(clean)
        roots = {number for (number,) in db.execute("SELECT rootpage FROM sqlite_master")}
        _copy_pages(damaged, copy)
        db.execute("BEGIN")
        if not _read_tables(copy, db):
            listed = _list_of_tables(copy)
            elsewhere = sum(page != ours[name][0] for name, (page, _) in listed.items())
            if listed != ours and elsewhere <= len(listed) // 10:  # our own list of tables, but for the damage
                _restore_list_of_tables(copy, empty, roots)
                _read_tables(copy, db)
            _add_recovered(copy, db)
        copy.unlink()
        task_id = _find_task(db, damaged.stem)
        if task_id is not None:
            saved = _complete(db, task_id, damaged)
            db.execute("COMMIT")
            return saved
    clean.unlink()
    return None  # rows without a task cannot be merged


# --- a copy that SQLite opens -----------------------------------------------------------------------------------------


def _copy_pages(damaged: Path, copy: Path) -> None:
    """Copy complete pages; unreadable pages become zeros, and an incomplete last page is left out."""
    last = b""
    with damaged.open("rb") as source, copy.open("wb") as target:
        for number in range(damaged.stat().st_size // _PAGE_BYTES):
            try:
                source.seek(number * _PAGE_BYTES)
                page = source.read(_PAGE_BYTES)
            except OSError:  # a bad block of the disk
                page = bytes(_PAGE_BYTES)
            target.write(page)
            if any(page):
                last, end = page, number + 1
        if last:
            is_cut = end < number + 1 and last.endswith(bytes(8))
            target.truncate((end - is_cut) * _PAGE_BYTES)


def _list_of_tables(path: Path) -> dict[str, tuple[int, str]]:
    """Return the tables that a file lists, with their first page and SQL; SQLite reads the list up to the damage."""
    found = {}
    with suppress(*UNREADABLE), closing(_open(path)) as db:
        for name, page, sql in db.execute("SELECT name, rootpage, sql FROM sqlite_master WHERE type = 'table'"):
            found[name] = page, sql
    return {name: about for name, about in found.items() if name in _NAMES}


def _restore_list_of_tables(copy: Path, empty: bytes, roots: Collection[int]) -> None:
    """Copy the pages with the list of tables from an empty database into the copy.

    SQLite numbers the pages of a new file in the order of its tables, so these pages are the same in all our files.
    ``roots`` are the first pages of the tables themselves, which stay as they are.
    """
    with copy.open("r+b") as file:
        for number in range(1, len(empty) // _PAGE_BYTES + 1):
            if number not in roots:
                file.seek((number - 1) * _PAGE_BYTES)
                file.write(empty[file.tell() : file.tell() + _PAGE_BYTES])
        count = file.seek(0, os.SEEK_END) // _PAGE_BYTES
        file.seek(28)
        file.write(count.to_bytes(4, "big"))


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(read_only_uri(path, sealed=True), uri=True, isolation_level=None)
    db.execute("PRAGMA writable_schema = ON")  # allows a file that is shorter than its header states
    db.execute("PRAGMA cell_size_check = ON")
    return db


# --- rows -------------------------------------------------------------------------------------------------------------


def _add_rows(clean: sqlite3.Connection, table: str, rows: Iterable[tuple[int, Sequence[Any]]]) -> None:
    """Add rows with their row numbers; in some tables the row number is the first column."""
    first = int(table in _NUMBERED)
    names = ("rowid", *columns_of(table)[first:])
    sql = f"INSERT OR IGNORE INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    clean.executemany(sql, ((rowid, *values[first:]) for rowid, values in rows))


# Derived tables are computed again from the saved rows.
_OWN = [table for table in TABLES if table.name not in DERIVED]
_NAMES = [table.name for table in _OWN]
_NUMBERED = {table.name for table in _OWN if table.columns[0].sql.startswith("INTEGER PRIMARY KEY")}


def _read_tables(copy: Path, clean: sqlite3.Connection) -> bool:
    """Copy the rows that SQLite can reach; return whether every table was read to its end."""
    there = _list_of_tables(copy)
    complete = len(there) == len(_NAMES)
    highest = copy.stat().st_size // _LEAST_ROW_BYTES
    with closing(_open(copy)) as source:
        for table in (table for table in _NAMES if table in there):
            published = read_sealed_rows(clean).get(table, highest)  # from meta, the first table
            if table in _NUMBERED:
                complete &= _read_table(source, clean, table, (0, 2**63 - 1), _MOST_RANGES)
            else:  # numbered from 1; there are more rows than published only if that number is damaged
                complete &= _read_table(source, clean, table, (1, published), _MOST_RANGES)
                complete &= _read_table(source, clean, table, (published + 1, highest), _FEW_RANGES)
    return complete


def _read_table(
    source: sqlite3.Connection, clean: sqlite3.Connection, table: str, ends: tuple[int, int], most_ranges: int
) -> bool:
    """Read a range of row numbers from both ends; halve what neither end reaches, the widest range first."""
    unread, complete, found = [(ends[0] - ends[1], *ends)], True, False
    for number in range(most_ranges):
        if not unread or (number == _RANGES_WITHOUT_ROWS and not found):
            break  # the root page of the table is lost
        _, low, high = heapq.heappop(unread)
        reached = _copy_rows(source, clean, table, (low, high), "ASC")
        found |= reached != low - 1
        if reached is None:
            continue
        complete, first = False, reached + 1
        reached = _copy_rows(source, clean, table, (first, high), "DESC")
        found |= reached != high + 1
        if reached is None:
            continue
        last = reached - 1
        middle = (first + last) // 2
        # If rows were read from an end, only the next row is known to be unreadable.
        halves = [(first, middle), (middle + 1, last)] if (first, last) == (low, high) else [(first, last)]
        for a, b in halves:
            if a <= b and (a, b) != (low, high):
                heapq.heappush(unread, (a - b, a, b))
    return complete


def _copy_rows(
    source: sqlite3.Connection, clean: sqlite3.Connection, table: str, ends: tuple[int, int], order: str
) -> int | None:
    """Copy rows in one direction; return None if all were read, else the last row number reached."""
    low, high = ends
    reached: int | None = low - 1 if order == "ASC" else high + 1

    def rows() -> Iterator[tuple[int, Sequence[Any]]]:
        nonlocal reached
        sql = f"""SELECT rowid, {", ".join(columns_of(table))} FROM {table} NOT INDEXED
                  WHERE rowid BETWEEN ? AND ? ORDER BY rowid {order}"""
        with suppress(*UNREADABLE):
            for rowid, *values in source.execute(sql, (low, high)):
                reached = rowid
                if is_plausible(table, values):
                    yield rowid, values
            reached = None

    _add_rows(clean, table, rows())
    return reached


# --- the program sqlite3 ----------------------------------------------------------------------------------------------


def _add_recovered(copy: Path, clean: sqlite3.Connection) -> None:
    """Add the rows that ``sqlite3 FILE .recover`` finds on pages that no other page refers to any more."""
    script, recovered = copy.with_suffix(".sql"), copy.with_name(f"recovered-{copy.name}")
    # The program may be missing, or may lack .recover.
    with suppress(OSError, subprocess.SubprocessError, *UNREADABLE):
        with script.open("wb") as out:
            find = ["sqlite3", str(copy), ".recover"]
            subprocess.run(find, stdout=out, stderr=subprocess.DEVNULL, check=False, timeout=_PROGRAM_LIMIT_S)
        with script.open("rb") as sql:
            write = ["sqlite3", str(recovered)]
            subprocess.run(write, stdin=sql, capture_output=True, check=False, timeout=_PROGRAM_LIMIT_S)
        with closing(sqlite3.connect(file_uri(recovered, "mode=ro"), uri=True)) as source:
            _copy_recovered(source, clean)
    script.unlink(missing_ok=True)
    recovered.unlink(missing_ok=True)


def _copy_recovered(source: sqlite3.Connection, clean: sqlite3.Connection) -> None:
    there = {name for (name,) in source.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    for table in (table for table in _NAMES if table in there):
        _copy_rows(source, clean, table, (-(2**63), 2**63 - 1), "ASC")
    if "lost_and_found" not in there:
        return
    # Columns: rootpgno, pgno, nfield, id, c0, c1, …: rows of pages whose table is not known.
    for _, _, fields, rowid, *values in source.execute("SELECT * FROM lost_and_found"):
        row = values[:fields]
        numbered = [rowid, *row[1:]] if row and row[0] is None else row
        fitting = [table for table in _NAMES if is_plausible(table, numbered if table in _NUMBERED else row)]
        if len(fitting) == 1:
            _add_rows(clean, fitting[0], [(rowid, row)])


# --- the task of the rows ---------------------------------------------------------------------------------------------


def _find_task(db: sqlite3.Connection, file_name: str) -> int | None:
    """Return the task of this file: the one of the same name, or else the only one in it; None: not known.

    If the task's own row has another id or name than its file and all other rows, its own row is the damaged one.
    """
    named = dict(db.execute("SELECT name, task_id FROM task"))
    rows_of: Counter[int] = Counter()
    for table in (table for table in _NAMES if table not in ("meta", "task")):
        rows_of.update(dict(db.execute(f"SELECT task_id, count(*) FROM {table} GROUP BY 1")))
    # An id that less than a tenth of the rows have is a damaged byte, not another task.
    many = {task_id for task_id, count in rows_of.items() if count * 10 >= rows_of.total()}
    key = None if file_name.startswith(".") else TaskKey.parse(file_name)  # a hidden file is an unfinished copy
    if len(named) == 1 and len(many) == 1 and (key is None or file_name in named or key.may_have(*many)):
        name = file_name if key else next(iter(named))
        db.execute("UPDATE task SET task_id = ?, name = ?", (*many, name))
        return many.pop()
    if file_name in named:
        return int(named[file_name])
    if key:
        nameless = many - set(named.values())
        return nameless.pop() if len(nameless) == 1 else None
    return int(*named.values()) if len(named) == 1 else None  # several tasks: a job database


def _complete(db: sqlite3.Connection, task_id: int, damaged: Path) -> tuple[dict[str, int], dict[str, int] | None]:
    """Keep the rows of one task, restore lost rows of tasks and devices, and count."""
    rows = {}
    for table in _NAMES:
        if table != "meta":
            db.execute(f"DELETE FROM {table} WHERE task_id != ?", (task_id,))
        rows[table] = int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    key = TaskKey.parse(damaged.stem)
    if not rows["task"] and key:
        times = [f"SELECT min({c.name}) AS at_ms FROM {t.name}" for t in _OWN for c in t.columns if is_time(c)]
        (earliest_ms,) = db.execute(f"SELECT min(at_ms) FROM ({' UNION ALL '.join(times)})").fetchone()
        values = {
            "task_id": task_id, "name": key.name, "job_id": key.job_id, "array_index": key.array_index,
            "restart": key.restart, "node": key.node, "procid": key.procid, "version": "unknown",
            "telemetry": int(rows["sample"] > 0),
            "started_at_ms": earliest_ms or int(damaged.stat().st_mtime * 1000),
        }  # fmt: skip
        db.execute(insert_sql("task", values), [*values.values()])
    db.execute(_LOST_DEVICE)  # else the summary would not see the samples of a lost device
    db.execute(_REOPEN)
    db.execute("DELETE FROM meta WHERE key = ?", (SEAL,))  # the bytes differ from those that were sealed
    published = read_sealed_rows(db)
    lost = {table: count - rows[table] for table, count in published.items() if count > rows.get(table, count)}
    return rows, lost if published else None
