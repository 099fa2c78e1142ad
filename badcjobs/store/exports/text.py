"""Rows as text, written as they come: CSV, one JSON document, or JSON lines. UTF-8, whatever the machine's locale."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, TextIO

Rows = Iterable[Sequence[object]]

# ASCII: readers that cut lines at every Unicode line break, or read in the locale's encoding, stay right.
_encode = json.JSONEncoder(allow_nan=False).encode


def write_csv(names: Sequence[str], batches: Iterable[Rows], out: BinaryIO) -> None:
    """Write a header and the rows as RFC 4180 has them; an unknown value is an empty field."""
    with as_text(out) as text:
        writer = csv.writer(text)
        writer.writerow(names)
        for batch in batches:
            writer.writerows(batch)


def write_json(names: Sequence[str], batches: Iterable[Rows], out: BinaryIO) -> None:
    """Write one JSON document, an array with an object on each line; an unknown value is null."""
    with as_text(out) as text:
        before = "[\n"
        for batch in batches:
            for row in batch:
                text.write(before + json_object(names, row))
                before = ",\n"
        text.write("[]\n" if before == "[\n" else "\n]\n")


def write_json_lines(names: Sequence[str], batches: Iterable[Rows], out: BinaryIO) -> None:
    """Write an object per line; an unknown value is null."""
    with as_text(out) as text:
        for batch in batches:
            text.writelines(json_object(names, row) + "\n" for row in batch)


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
