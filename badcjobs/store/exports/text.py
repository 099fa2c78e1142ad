"""Rows as text, written as they come: CSV, one JSON document, or JSON lines. UTF-8, whatever the machine's locale."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, TextIO

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
        before = "[\n"

        def write(rows: Rows) -> None:
            nonlocal before
            for row in rows:
                text.write(before + json_object(names, row))
                before = ",\n"

        yield write
        text.write("[]\n" if before == "[\n" else "\n]\n")


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
