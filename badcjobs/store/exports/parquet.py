"""Rows as Parquet, a row group at a time; the one file that needs pyarrow, an extra, and only when it is called."""

from __future__ import annotations

import importlib
import sqlite3
from collections.abc import Iterable
from typing import Any, BinaryIO

from badcjobs.errors import NotHere
from badcjobs.store.exports.tables import Row, Selection, declared_types, quoted

ROW_GROUP = 65_536

_ARROW = {"INTEGER": "int64", "REAL": "float64", "TEXT": "string"}


def require_pyarrow() -> None:
    """Say what to install where pyarrow is missing."""
    _load()


def write_parquet(db: sqlite3.Connection, selection: Selection, batches: Iterable[list[Row]], out: BinaryIO) -> None:
    """Write each batch as a row group; an unknown value stays null."""
    arrow, parquet = _load()
    types = column_types(db, selection)
    schema = arrow.schema([(name, getattr(arrow, _ARROW[types[name]])()) for name in selection.columns])
    with parquet.ParquetWriter(out, schema, compression="zstd") as writer:
        for batch in batches:
            columns = zip(schema.types, zip(*batch, strict=True), strict=True)
            arrays = [arrow.array(values, kind) for kind, values in columns]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))


def column_types(db: sqlite3.Connection, selection: Selection) -> dict[str, str]:
    """Map each column to its SQL type: as declared or, where a view computes it, as its values are."""
    declared = declared_types(db, selection.table)
    return {
        name: declared[name] if declared[name] in _ARROW else _type_of_values(db, selection, name)
        for name in selection.columns
    }


def _type_of_values(db: sqlite3.Connection, selection: Selection, name: str) -> str:
    found = {kind for (kind,) in db.execute(f"SELECT DISTINCT typeof({quoted(name)}) FROM ({selection.sql})")}
    if "text" in found:
        return "TEXT"
    return "INTEGER" if found - {"null"} == {"integer"} else "REAL"


def _load() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise NotHere(
            "--format parquet needs pyarrow, which is not installed",
            why=str(error),
            fix="pip install 'badcjobs[parquet]'",
        ) from error
