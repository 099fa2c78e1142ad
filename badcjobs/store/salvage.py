"""Salvages a damaged task database: writes the rows that can still be read into a new one.

Only pages with the right stamp are read, so that no value is wrong. Every table is read with SQL from both ends up to
the damage. A chunk of which something is lost is pending again.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

from badcjobs.store.atomic_write import (
    PAGE_BYTES,
    count_tables,
    read_pages,
    read_row_counts,
    read_stamp,
    write_row_counts,
)
from badcjobs.store.connect import UNREADABLE, create_tables, open_sealed, read_value, refuse_strange_tables
from badcjobs.store.figures import write_figures
from badcjobs.store.schema import DERIVED, TABLES, columns_of, insert_sql

# A chunk stays done only if all its detections were saved, and only such a chunk has detections.
_REOPEN = """
    UPDATE chunk SET status = 'pending', detections = NULL
    WHERE status = 'done' AND detections > 0 AND (recording_id, chunk_id, detections) NOT IN (
        SELECT recording_id, chunk_id, count(*) FROM detection GROUP BY 1, 2)"""
_DROP = """
    DELETE FROM {} WHERE (recording_id, chunk_id) NOT IN (
        SELECT recording_id, chunk_id FROM chunk WHERE status = 'done')"""


def salvage(damaged: Path, clean: Path) -> Counter[str]:
    """Write what can still be read of a published file as a new one; return how many rows are lost, by table.

    The damaged file is only read. ``clean`` must not exist. An error of SQLite means that nothing can be saved.
    """
    copy = clean.with_name(f"readable-{clean.name}")
    _copy_good_pages(damaged, copy)
    with closing(open_sealed(copy)) as source, closing(sqlite3.connect(clean, isolation_level=None)) as db:
        source.execute("PRAGMA writable_schema = ON")  # allows a file that is shorter than its header states
        source.execute("PRAGMA cell_size_check = ON")
        refuse_strange_tables(source)
        db.execute("PRAGMA journal_mode = MEMORY")  # a scratch file
        db.execute("PRAGMA synchronous = OFF")
        create_tables(db)
        db.execute("BEGIN")
        for table in (table for table in TABLES if table not in DERIVED):
            _copy_rows(source, db, table)
        task_id = read_value(db, "SELECT task_id FROM task")
        if task_id is None:
            raise sqlite3.DatabaseError("the row of its task is lost")
        db.execute(_REOPEN)
        for table in ("detection", "rarity"):
            db.execute(_DROP.format(table))
        write_figures(db, task_id)
        lost = Counter(read_row_counts(db)) - Counter(count_tables(db))
        write_row_counts(db)
        db.execute("COMMIT")
    copy.unlink()
    return lost


def _copy_good_pages(damaged: Path, copy: Path) -> None:
    """Copy the pages of one publication; in place of all others, write bytes that are neither a table nor text.

    The first page has no rows, and changes when another program opens the file: it is always copied.
    """
    stamps = Counter(read_stamp(page, number) for number, page in read_pages(damaged))
    del stamps[None]
    if not stamps:
        raise sqlite3.DatabaseError("all of its pages are damaged")
    [(publication, _)] = stamps.most_common(1)
    with copy.open("wb") as target:
        for number, page in read_pages(damaged):
            is_good = number == 1 or read_stamp(page, number) == publication
            target.write(page if is_good else b"\xff" * PAGE_BYTES)


def _copy_rows(source: sqlite3.Connection, clean: sqlite3.Connection, table: str) -> None:
    """Copy the rows of a table from its beginning up to the damage, then from its end."""
    columns = ("rowid", *columns_of(table))
    select = f"SELECT {', '.join(columns)} FROM {table} NOT INDEXED WHERE rowid > ? ORDER BY rowid"
    insert = f"{insert_sql(table, columns)} ON CONFLICT DO NOTHING"
    last_copied = -1
    for order in ("ASC", "DESC"):
        with suppress(*UNREADABLE):
            clean.executemany(insert, source.execute(f"{select} {order}", (last_copied,)))
            return
        last_copied = read_value(clean, f"SELECT coalesce(max(rowid), -1) FROM {table}")
