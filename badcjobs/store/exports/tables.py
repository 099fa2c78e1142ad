"""What an export takes out of a sealed file: its tables, the wanted columns, the wanted time.

Everything is asked of the file itself, so a file of an older version gives the columns that it has. How rows are
written is left to text, parquet and the modules for BADC.
"""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import BadInput, DatabaseProblem
from badcjobs.store.connect import complain_about
from badcjobs.store.exports.window import Window, condition
from badcjobs.store.job_file import open_published

Row = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """Some columns and rows of one table or view."""

    table: str
    columns: tuple[str, ...]
    sql: str

    def batches(self, db: sqlite3.Connection, size: int) -> Iterator[list[Row]]:
        """Yield the rows, so many at a time: neither all of them in memory nor one call for each."""
        cursor = db.execute(self.sql)
        while batch := cursor.fetchmany(size):
            yield batch


@contextmanager
def open_for_export(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a published task or job database for reading; whatever goes wrong while reading it names the file."""
    try:
        with closing(open_published(path)) as db:
            if trouble := _left_beside(path):  # of a job database's journal nothing is left by now
                raise DatabaseProblem(f"{path} is not complete", why=trouble, fix=f"badcjobs merge {path.parent}")
            complaint = complain_about(path, db)
            if complaint is not None:
                raise DatabaseProblem(f"{path} cannot be exported", why=complaint, fix=_way_out(path, complaint))
            yield db
    except sqlite3.Error as error:
        raise DatabaseProblem(f"{path} cannot be read", why=str(error), fix=f"badcjobs merge {path.parent}") from error


def _way_out(path: Path, complaint: str) -> str:
    if complaint.startswith("schema "):
        return "pip install --upgrade badcjobs"
    run = shlex.quote(str(path.parent.parent if path.parent.name == "tasks" else path.parent))
    return f"badcjobs merge {run} && badcjobs export {run} …"


def _left_beside(path: Path) -> str | None:
    """Return what a writer has left next to a file that is not sealed: opening it as sealed would miss those rows."""
    for ending in ("-wal", "-journal"):
        beside = path.with_name(path.name + ending)
        if beside.exists() and beside.stat().st_size:
            return f"{beside.name} lies next to it: it is being written, or its writer was killed"
    return None


def list_tables(db: sqlite3.Connection) -> list[str]:
    """Return the names of all tables and views, in the order of the file."""
    rows = db.execute(
        "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    )
    return [name for (name,) in rows]


def check_tables(db: sqlite3.Connection, wanted: Sequence[str], path: Path) -> None:
    """Refuse tables that the file does not have, all at once."""
    there = list_tables(db)
    if missing := [name for name in wanted if name not in there]:
        raise BadInput(
            f"{path.name} has no table {', '.join(missing)}",
            why="it has " + ", ".join(there),
            fix=f"badcjobs export {path} --table {there[0]} …" if there else None,
        )


def check_columns(db: sqlite3.Connection, table: str, wanted: Sequence[str], command: str) -> None:
    """Refuse columns that the table does not have, all at once, and those that are named twice.

    ``command`` is the one that was given, without its columns.
    """
    there = tuple(declared_types(db, table))
    right = ",".join(dict.fromkeys(name for name in wanted if name in there)) or there[0]
    fix = f"{command} --columns {shlex.quote(right)}"
    if missing := [name or "''" for name in wanted if name not in there]:
        raise BadInput(f"{table} has no column {', '.join(missing)}", why="it has " + ", ".join(there), fix=fix)
    if twice := sorted({name for name in wanted if wanted.count(name) > 1}):
        raise BadInput(f"--columns names {', '.join(twice)} more than once", fix=fix)


def select(
    db: sqlite3.Connection, table: str, columns: Sequence[str] | None = None, window: Window | None = None
) -> Selection:
    """Return the selection of these columns (None: all) and this time; the table and the columns are there."""
    there = tuple(declared_types(db, table))
    chosen = there if columns is None else tuple(columns)
    sql = f"SELECT {', '.join(map(quoted, chosen))} FROM {quoted(table)}"
    if window:
        inside = condition(table, there, window)
        if inside is None:
            raise BadInput(
                f"--from and --to mean nothing for {table}",
                why=f"its rows have no time; its columns are {', '.join(there)}",
                fix=f"the same command without them for --table {table}",
            )
        sql += f" WHERE {inside}"
    return Selection(table, chosen, sql)


def has_time(db: sqlite3.Connection, table: str) -> bool:
    """Say whether a window can choose among the rows of a table."""
    return condition(table, tuple(declared_types(db, table)), Window(0, 1)) is not None


def declared_types(db: sqlite3.Connection, table: str) -> dict[str, str]:
    """Map column to declared SQL type; an expression in a view may have none."""
    return {row[1]: row[2] for row in db.execute(f"PRAGMA table_info({quoted(table)})")}


def quoted(name: str) -> str:
    """Return a name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'
