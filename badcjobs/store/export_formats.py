"""Rows as CSV, JSON, JSON lines or Parquet, written as they come. Text is UTF-8, whatever the machine's locale."""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, repeat
from typing import Any, BinaryIO, TextIO

from badcjobs.errors import NotHere

Rows = Iterable[Sequence[object]]
Write = Callable[[Rows], None]

# ASCII: readers that cut lines at every Unicode line break, or read in the locale's encoding, stay right.
_encode = json.JSONEncoder(allow_nan=False).encode


@contextmanager
def csv_rows(names: Sequence[str], out: BinaryIO) -> Iterator[Write]:
    """Write a header, and rows as they are given, as RFC 4180 has them; an unknown value is an empty field."""
    with as_text(out) as text:
        writer = csv.writer(text)
        writer.writerow(names)
        yield writer.writerows


@contextmanager
def json_rows(names: Sequence[str], out: BinaryIO) -> Iterator[Write]:
    """Write one JSON document, an array with an object on each line; an unknown value is null."""
    with as_text(out) as text:
        befores = chain(["[\n"], repeat(",\n"))
        yield lambda rows: text.writelines(next(befores) + json_object(names, row) for row in rows)
        text.write("[]\n" if next(befores) == "[\n" else "\n]\n")


@contextmanager
def json_lines(names: Sequence[str], out: BinaryIO) -> Iterator[Write]:
    """Write an object per line; an unknown value is null."""
    with as_text(out) as text:
        yield lambda rows: text.writelines(json_object(names, row) + "\n" for row in rows)


def json_object(names: Sequence[str], row: Sequence[object]) -> str:
    """Return a row as a JSON object on one line."""
    try:
        return _encode(dict(zip(names, row, strict=True)))
    except ValueError:  # SQLite stores infinity, JSON has no word for it
        finite = [None if isinstance(value, float) and not math.isfinite(value) else value for value in row]
        return _encode(dict(zip(names, finite, strict=True)))


@contextmanager
def as_text(out: BinaryIO) -> Iterator[TextIO]:
    """Write text to a binary file, which stays open."""
    text = io.TextIOWrapper(out, encoding="utf-8", newline="")
    try:
        yield text
        text.flush()
    finally:
        try:
            text.detach()  # flushes once more; what is wrong with the file was said by the flush before
        except OSError:
            pass


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


def _load() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise NotHere(
            "--format parquet needs pyarrow, which is not installed",
            why=str(error),
            fix="pip install 'badcjobs[parquet]'",
        ) from error


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
