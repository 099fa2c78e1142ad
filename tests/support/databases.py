"""Looks into task and job databases from tests, as anyone with the sqlite3 shell would."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


def query(database: Path, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Return the rows of one query."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return connection.execute(sql, parameters).fetchall()
