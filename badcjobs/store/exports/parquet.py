"""Rows as Parquet, a row group at a time; the one file that needs pyarrow, an extra, and only when it is called."""

from __future__ import annotations

import importlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from badcjobs.errors import NotHere
from badcjobs.store.exports.tables import Selection, declared_types, quoted
from badcjobs.store.exports.text import Rows, Write

ROW_GROUP = 65_536

_ARROW = {"INTEGER": "int64", "REAL": "float64", "TEXT": "string"}


def require_pyarrow() -> None:
    """Say what to install where pyarrow is missing."""
    _load()


@contextmanager
def parquet_rows(types: Mapping[str, str], out: BinaryIO) -> Iterator[Write]:
    """Write each lot of rows as a row group; ``types`` are those of SQL; an unknown value stays null."""
    arrow, parquet = _load()
    schema = arrow.schema([(name, getattr(arrow, _ARROW[kind])()) for name, kind in types.items()])
    with parquet.ParquetWriter(out, schema, compression="zstd") as writer:

        def write(rows: Rows) -> None:
            columns = zip(schema.types, zip(*rows, strict=True), strict=True)
            arrays = [arrow.array(values, kind) for kind, values in columns]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))

        yield write


def column_types(db: sqlite3.Connection, selection: Selection) -> dict[str, str]:
    """Map each column to its SQL type: as declared or, where a view computes it, as its values are."""
    types = {name: declared_types(db, selection.table)[name] for name in selection.columns}
    computed = [name for name, kind in types.items() if kind not in _ARROW]
    return {**types, **_types_of_values(db, selection, computed)}


def _types_of_values(db: sqlite3.Connection, selection: Selection, names: Sequence[str]) -> dict[str, str]:
    """Look at all values, once: a view may take a while."""
    if not names:
        return {}
    found = ", ".join(f"group_concat(DISTINCT typeof({quoted(name)}))" for name in names)
    row = db.execute(f"SELECT {found} FROM ({selection.sql})").fetchone()
    return {name: _type_for(set((kinds or "null").split(","))) for name, kinds in zip(names, row, strict=True)}


def _type_for(kinds: set[str]) -> str:
    if "text" in kinds:
        return "TEXT"
    return "INTEGER" if kinds - {"null"} == {"integer"} else "REAL"


def _load() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise NotHere(
            "--format parquet needs pyarrow, which is not installed",
            why=str(error),
            fix="pip install 'badcjobs[parquet]'",
        ) from error
