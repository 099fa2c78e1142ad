"""Tells which table a row without a name belongs to, and whether its values can be true.

The tables differ in the number and types of their columns (a test says so), so that a row read from a bare page needs
nothing else to be placed. What salvage.py does with it is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from badcjobs.model import TaskKey
from badcjobs.store.schema import EARLIER_WIDTHS, TABLES, Column, Table, columns_of

_YEAR_2000_MS, _YEAR_2100_MS = 946_684_800_000, 4_102_444_800_000
_WORDS = {
    "status": {"done", "failed", "poison", "pending", "skipped"},
    "outcome": {"done", "failed", "lost"},
    "verdict": {"done", "failed", "stopped", "killed"},
}
_TYPES: dict[str, frozenset[type]] = {
    "INTEGER": frozenset({int}),
    "REAL": frozenset({float, int}),  # one without a fraction is kept as an integer, which is shorter
    "TEXT": frozenset({str}),
}


def disk_types(table: Table) -> tuple[frozenset[type], ...]:
    """Return of which types each value of a row can be, as it lies in the file."""
    return tuple(_disk_types(column) for column in table.columns)


def _disk_types(column: Column) -> frozenset[type]:
    if _is_rowid(column):
        return frozenset({type(None)})
    types = _TYPES[_type(column)]
    return types if "NOT NULL" in column.sql else types | {type(None)}


def _type(column: Column) -> str:
    return column.sql.split()[0]


def _default(column: Column) -> int | None:
    """Return what a column holds where nothing was written."""
    value = column.sql.partition("DEFAULT ")[2]
    return int(value) if value else None


def _is_rowid(column: Column) -> bool:
    return column.sql.startswith("INTEGER PRIMARY KEY")


def is_time(column: Column) -> bool:
    """Say whether a column holds an instant (and not a length, or a place in a recording)."""
    return column.name in ("at_ms", "from_ms", "to_ms") or column.name.endswith("_at_ms")


class RowForm:
    """What the rows of one table look like in a file."""

    def __init__(self, table: Table) -> None:
        self.table = table.name
        self.columns = columns_of(table.name)
        self.rowid_column = next((i for i, column in enumerate(table.columns) if _is_rowid(column)), None)
        self.task_column = self.columns.index("task_id") if "task_id" in self.columns else None
        self.widths = (len(self.columns), *EARLIER_WIDTHS.get(table.name, ()))
        self._types = disk_types(table)
        self._defaults = tuple(_default(column) for column in table.columns)
        self._checks = [(i, check) for i, column in enumerate(table.columns) if (check := _check_of(column))]

    def fits(self, values: Sequence[Any]) -> bool:
        """Say whether a row can be of this table, going by the types of its values."""
        return len(values) in self.widths and all(map(_is_of, values, self._types))

    def complete(self, rowid: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Put the rowid where the file leaves it out, and the default where an earlier version had no column."""
        at, values = self.rowid_column, (*values, *self._defaults[len(values) :])
        return values if at is None else (*values[:at], rowid, *values[at + 1 :])

    def is_believable(self, row: Sequence[Any]) -> bool:
        """Say whether a complete row of this table can be true."""
        if not all(row[i] is None or check(row[i]) for i, check in self._checks):
            return False
        return self.table != "task" or _says_its_own_name(dict(zip(self.columns, row, strict=True)))


def _is_of(value: object, types: frozenset[type]) -> bool:
    return type(value) in types


def _check_of(column: Column) -> Callable[[Any], bool] | None:
    """Return what a value of this column must stand up to, unless it is NULL."""
    if column.name in _WORDS:
        return _WORDS[column.name].__contains__
    if is_time(column):
        return lambda at_ms: bool(_YEAR_2000_MS <= at_ms < _YEAR_2100_MS)
    if column.name.endswith("_percent"):
        return lambda percent: bool(0 <= percent <= 100)
    if column.name.endswith(("_bytes", "_id")) and _type(column) == "INTEGER":
        return lambda number: bool(number >= 0)
    if _type(column) == "TEXT":
        return lambda text: not text.endswith("\0")  # a page that was never written, where the rest of it lay
    return math.isfinite if _type(column) == "REAL" else None


def _says_its_own_name(task: dict[str, Any]) -> bool:
    """Say whether name and id of a task are made of the rest of its row; older files made the id of the name alone."""
    key = TaskKey(task["job_id"], task["array_index"], task["restart"], task["node"], task["procid"])
    ids = (replace(key, born_ms=task["started_at_ms"]).task_id, key.task_id)
    return key.name == task["name"] and task["task_id"] in ids


FORMS = tuple(RowForm(table) for table in TABLES)
_BY_WIDTH = {width: [f for f in FORMS if width in f.widths] for form in FORMS for width in form.widths}


def find_form(values: Sequence[Any]) -> RowForm | None:
    """Return the form that a row has; None: of no table of ours."""
    return next((form for form in _BY_WIDTH.get(len(values), ()) if form.fits(values)), None)
