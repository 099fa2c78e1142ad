"""Says whether the values of a database can be right: a damaged byte often gives a value that no task writes."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from badcjobs.store.schema import TABLES, Column

# What SQLite raises for a damaged file; ValueError: text that is not UTF-8, also in a message of its own.
UNREADABLE = (sqlite3.Error, ValueError)
_YEAR_2000_MS, _YEAR_2100_MS = 946_684_800_000, 4_102_444_800_000
_ALLOWED = {
    "status": {"done", "failed", "poison", "pending", "skipped"},
    "outcome": {"done", "failed", "lost"},
    "verdict": {"done", "failed", "stopped", "killed"},
}
_TYPES: dict[str, tuple[type, ...]] = {"INTEGER": (int,), "REAL": (float, int), "TEXT": (str,)}


def is_plausible(table: str, values: Sequence[Any]) -> bool:
    """Say whether every value of a row is possible in its column."""
    checks = _CHECKS[table]
    return len(values) == len(checks) and all(check(value) for check, value in zip(checks, values, strict=True))


def find_damage(db: sqlite3.Connection, task_id: int | None = None) -> str | None:
    """Read a complete task or job database; return the first thing that is wrong with it, None: nothing.

    With ``task_id``, also a row of another task is wrong.
    """
    try:
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            return str(verdict)
        for table in _CHECKS:
            if any(not is_plausible(table, row) for row in db.execute(f"SELECT * FROM {table}")):
                return f"impossible values in {table}"
            others = f"SELECT count(*) FROM {table} WHERE task_id IS NOT ?"
            if task_id is not None and table != "meta" and db.execute(others, (task_id,)).fetchone()[0]:
                return f"rows of another task in {table}"
    except UNREADABLE as error:
        return str(error)
    return None


def _value_check(column: Column) -> Callable[[Any], bool]:
    """Return a function that says whether a value is possible in this column."""
    name, kind = column.name, column.sql.split()[0]
    types, may_be_null = _TYPES[kind], "NOT NULL" not in column.sql

    def check(value: Any) -> bool:
        if value is None or type(value) not in types:
            return value is None and may_be_null
        if name in _ALLOWED:
            return value in _ALLOWED[name]
        if is_time(column):
            return bool(_YEAR_2000_MS <= value < _YEAR_2100_MS)
        if name.endswith("_percent"):
            return bool(0 <= value <= 100)
        if kind == "TEXT":
            return not value.endswith("\0")  # its end was on a page that was never written
        return math.isfinite(value) and (value >= 0 or not name.endswith(("_bytes", "_id")))

    return check


def is_time(column: Column) -> bool:
    """Say whether a column holds a time (not a duration, or a position in a recording)."""
    return column.name in ("at_ms", "from_ms", "to_ms") or column.name.endswith("_at_ms")


_CHECKS = {table.name: [_value_check(column) for column in table.columns] for table in TABLES}
