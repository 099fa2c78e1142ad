"""Reads the tables of detections that programs write: ours, HawkEars, BirdNET, Raven, Kaleidoscope and Audacity."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from badcjobs.model import Detection

# The columns of our format, HawkEars, BirdNET, Raven and Kaleidoscope, in small letters; the first that exists counts.
COLUMNS = {
    "start": ("start_time", "start (s)", "begin time (s)", "start", "offset"),
    "end": ("end_time", "end (s)", "end time (s)", "end", "duration"),
    "label": ("label", "class_code", "species code", "scientific name", "scientific_name", "species_name", "name",
              "species", "annotation", "common name", "common_name"),
    "score": ("score", "confidence"),
}  # fmt: skip
_SPECIES_NAMES = ("class_name", "common name", "common_name")
_LABEL_TRACK = ("start", "end", "label", "score", "common name")  # Audacity writes no header: see _label_cells
_NO_CALL = "nocall"  # BirdNET's Raven table always has a row


class UnknownTable(ValueError):
    """The header of a table has no columns for start, end, label or score."""


def parse_detections(text: str, name: str = "detections.csv") -> list[Detection]:
    """Parse the table of one chunk, by its header: ours, or one of HawkEars, BirdNET, Raven, Kaleidoscope or Audacity.

    Other columns are ignored; a header without rows means no detections, as does an empty label track (``name``.txt).
    Any other error in the file raises ValueError with the line and the column.
    """
    text = text.removeprefix("\ufeff")
    if name.endswith(".txt") and not text.strip():
        return []
    first = text.partition("\n")[0]
    tabs = "\t" in first
    delimiter = "\t" if tabs else ";" if ";" in first and "," not in first else ","
    lines = io.StringIO(text, newline="")
    rows = csv.reader(lines, strict=True, delimiter=delimiter, quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL)
    try:
        is_track = re.match(r"\s*[\d.]+\t[\d.]+(\t|\s*$)", first)
        header = _LABEL_TRACK if is_track else [cell.strip().strip('"') for cell in next(rows, [])]
        return list(_parse_rows(rows, header, scored=not tabs))
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num}: {error}") from error


def _parse_rows(rows: Any, written: Sequence[str], *, scored: bool) -> Iterator[Detection]:
    """Yield the detections of a table; ``scored``: its format has a score, unlike those of Raven and Audacity."""
    is_track = written is _LABEL_TRACK
    header = [name.lower() for name in written]
    columns = {part: next((name for name in names if name in header), "") for part, names in COLUMNS.items()}
    if missing := [part for part, column in columns.items() if not column and (scored or part != "score")]:
        known = "; ".join(f"{part}: {', '.join(names)}" for part, names in COLUMNS.items())
        what = f"no column for {', '.join(missing)}; found: {', '.join(written) or 'nothing'}; understood: {known}"
        raise (UnknownTable if len(header) > 1 else ValueError)(f"line 1: {what}")
    species = next((name for name in _SPECIES_NAMES if name in header and name != columns["label"]), None)
    selections = set()
    for cells in filter(None, rows):
        if is_track and cells[0] == "\\":  # the frequencies of the label above
            continue
        if is_track:
            cells = _label_cells(cells)
        elif len(cells) > len(header) and header[-1] == "file":  # BirdNET does not quote paths with commas
            del cells[len(header) :]
        elif len(cells) > len(header) and header[0] in ("indir", "filepath"):
            del cells[: len(cells) - len(header)]
        if len(cells) != len(header):
            column = header[len(cells)] if len(cells) < len(header) else f"number {len(header) + 1}"
            counts = f"{len(cells)} cells, the header has {len(header)}"
            raise ValueError(f"line {rows.line_num} has {counts} (column {column})")
        row = dict(zip(header, map(str.strip, cells), strict=True))
        selection = row.get("selection")
        if selection in selections or row[columns["label"]] == row.get(species or "") == _NO_CALL:
            continue  # Raven repeats a selection for each view
        if selection:
            selections.add(selection)
        yield _parse_row(row, columns, species, rows.line_num)


def _label_cells(cells: Sequence[str]) -> list[str]:
    """Return a line of a label track as a row; BirdNET adds a score, and both names of the species are the label."""
    start, end, label, score = [*cells, "", "", ""][:4]
    names = label.partition(", ") if score else (label, "", "")
    return [start, end, names[0], score, names[2]]


def _parse_row(row: Mapping[str, str], columns: Mapping[str, str], species: str | None, number: int) -> Detection:
    def parse_number(column: str) -> float:
        value = 0.0
        try:
            for part in row[column].split(":"):  # seconds, or H:MM:SS
                value = value * 60 + float(part)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"line {number}, column {column}: {row[column]!r} is not a number")
        return value

    start_s, end_s = parse_number(columns["start"]), parse_number(columns["end"])
    if columns["end"] == "duration":
        end_s += start_s
    if end_s < start_s:
        raise ValueError(f"line {number}, column {columns['end']}: {end_s} is before the start, {start_s}")
    score = parse_number(columns["score"]) if row.get(columns["score"]) else None
    label, name = row[columns["label"]], row[species] if species else ""
    if columns["label"] == "species_name":  # of the Python package birdnet: both names
        label, _, name = label.partition("_")
    if not (label or name):
        raise ValueError(f"line {number}, column {columns['label']}: empty")
    return Detection(round(start_s * 1000), round(end_s * 1000), label or name, score, name or None)
