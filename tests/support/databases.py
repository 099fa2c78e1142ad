"""Looks into task and job databases from tests, as anyone with the sqlite3 shell would; and changes them."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from rooms.store import read_checksum


def query(database: Path, sql: str, *values: object) -> list[tuple[Any, ...]]:
    """Return the rows of one query."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        return db.execute(sql, values).fetchall()


def change(database: Path, sql: str, *values: object) -> Path:
    """Run one statement."""
    with closing(sqlite3.connect(database)) as db, db:
        db.execute(sql, values)
    return database


def unseal(database: Path, *keys: str) -> Path:
    """Remove the seal, and other rows of the table meta, with their bytes."""
    with closing(sqlite3.connect(database)) as db, db:
        db.execute("PRAGMA secure_delete = ON")
        db.executemany("DELETE FROM meta WHERE key = ?", [(key,) for key in ("seal", *keys)])
    return database


def canonical(database: Path) -> str:
    """Return the whole logical content of a database, the same whatever order its rows were written in."""
    lines = []
    for kind, name, sql in query(database, "SELECT type, name, sql FROM sqlite_master ORDER BY type, name"):
        lines.append(f"{kind} {name} {sql}")
        if kind == "table":
            lines += sorted(repr(row) for row in query(database, f"SELECT * FROM {name}"))
    return "\n".join(lines)


def seal_is_broken(path: Path) -> bool | None:
    """Say whether the bytes of a file differ from those that were sealed; None: it has no seal."""
    stated, computed = read_checksum(path)
    return None if stated is None else stated != computed


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
