"""Says whether the values of a database can be right: a damaged byte often gives a value that no task writes."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Sequence
from typing import Any

from badcjobs.store.schema import TABLES, Column

# What SQLite raises for a damaged file; ValueError: text that is not UTF-8, also in a message of its own.
UNREADABLE = (sqlite3.Error, ValueError)
# By the unit that ends a column's name; integers of other columns are not negative.
_BOUNDS = {
    "percent": (0, 100),
    "c": (-100, 300),
    "w": (0, 1e5),
    "j": (0, 1e13),
    "mhz": (0, 1e6),
    "s": (0, 1e13),
    "ms": (0, 1e13),
    "bytes": (0, 2**60),
    "id": (0, 2**47),  # model.stable_id
}
_ANY_NUMBER = ("exit_code", "throttle_reasons", "audio_mtime_ns", "energy_counter_j")
_LARGEST = sys.float_info.max  # infinity is larger
_ANY_TIME = (946_684_800_000, 4_102_444_799_999)  # from 2000 to 2099
_ALLOWED = {
    "status": {"done", "failed", "poison", "pending", "skipped"},
    "outcome": {"done", "failed", "lost"},
    "verdict": {"done", "failed", "stopped", "killed"},
}
_TYPES = {"INTEGER": (int,), "REAL": (float, int), "TEXT": (str,)}


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
    name = column.name
    kind = column.sql.split()[0]
    types = _TYPES[kind]
    may_be_null = "NOT NULL" not in column.sql
    low, high = _bounds(column)

    def check(value: Any) -> bool:
        if value is None or type(value) not in types:
            return value is None and may_be_null
        if name in _ALLOWED:
            return value in _ALLOWED[name]
        if kind == "TEXT":
            return not value.endswith("\0")  # its end was on a page that was never written
        return bool(low <= value <= high)

    return check


def _bounds(column: Column) -> tuple[float, float]:
    """Return the smallest and the largest value that a number in this column can have."""
    if is_time(column):
        return _ANY_TIME
    if column.name in _ANY_NUMBER:
        return -_LARGEST, _LARGEST
    smallest = 0 if column.sql.startswith("INTEGER") else -_LARGEST
    return _BOUNDS.get(column.name.rsplit("_", 1)[-1], (smallest, _LARGEST))


def is_time(column: Column) -> bool:
    """Say whether a column holds a time (not a duration, or a position in a recording)."""
    return column.name in ("at_ms", "from_ms", "to_ms") or column.name.endswith("_at_ms")


_CHECKS = {table.name: [_value_check(column) for column in table.columns] for table in TABLES}
