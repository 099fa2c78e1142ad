"""Rows in one of the forms that others read, written as they are given."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import BinaryIO

from badcjobs.store.exports.parquet import ROW_GROUP, parquet_rows
from badcjobs.store.exports.text import Write, csv_rows, json_lines, json_rows

_TEXT = {"csv": csv_rows, "json": json_rows, "jsonl": json_lines}
_TEXT_BATCH = 5_000


def rows_written_to(out: BinaryIO, form: str, types: Mapping[str, str]) -> AbstractContextManager[Write]:
    """Return what writes lots of rows to a file in this form; ``types`` maps each column to its SQL type, in order."""
    if form == "parquet":
        return parquet_rows(types, out)
    return _TEXT[form](tuple(types), out)


def batch_size(form: str) -> int:
    """Return how many rows to give at once: a row group, or so many that the calls do not count."""
    return ROW_GROUP if form == "parquet" else _TEXT_BATCH
