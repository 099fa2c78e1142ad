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
_LABELS = ("label", "class_code", "species code", "scientific name", "scientific_name", "species_name", "name")
COLUMNS = {
    "start": ("start_time", "start (s)", "begin time (s)", "start", "offset"),
    "end": ("end_time", "end (s)", "end time (s)", "end", "duration"),
    "label": (*_LABELS, "species", "annotation", "common name", "common_name"),
    "score": ("score", "confidence"),
}
_SPECIES_NAMES = ("class_name", "common name", "common_name")
_LABEL_TRACK = ("start", "end", "label", "score", "common name")  # Audacity writes no header
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
    first_line = text.partition("\n")[0]
    lines = io.StringIO(text, newline="")
    has_tabs = "\t" in first_line
    if has_tabs:
        rows = csv.reader(
            lines,
            strict=True,
            delimiter="\t",
            quoting=csv.QUOTE_NONE,
        )
    else:
        rows = csv.reader(lines, strict=True, delimiter="," if "," in first_line else ";")
    try:
        if re.match(r"\s*[\d.]+\t[\d.]+(\t|\s*$)", first_line):
            return list(_LabelTrack(rows, _LABEL_TRACK, has_score=False).detections())
        header = [cell.strip().strip('"') for cell in next(rows, [])]
        return list(_Table(rows, header, has_score=not has_tabs).detections())
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num}: {error}") from error


class _Table:
    """A table with a header; ``has_score``: its format has a score, unlike those of Raven and Audacity."""

    def __init__(self, rows: Any, header: Sequence[str], *, has_score: bool) -> None:
        self._rows = rows
        self._header = [name.lower() for name in header]
        self._columns = {part: self._first_of(names) for part, names in COLUMNS.items()}
        missing = [part for part, column in self._columns.items() if not column and (has_score or part != "score")]
        if missing:
            understood = "; ".join(f"{part}: {', '.join(names)}" for part, names in COLUMNS.items())
            names = ", ".join(header) or "nothing"
            problem = f"line 1: no column for {', '.join(missing)}; found: {names}; understood: {understood}"
            raise UnknownTable(problem) if len(header) > 1 else ValueError(problem)
        self._species = self._first_of([name for name in _SPECIES_NAMES if name != self._columns["label"]])

    def detections(self) -> Iterator[Detection]:
        """Yield the detections of the table."""
        selections = set()
        for cells in filter(None, map(self._cells, filter(None, self._rows))):
            if len(cells) != len(self._header):
                counts = f"{len(cells)} cells, the header has {len(self._header)}"
                raise ValueError(f"line {self._rows.line_num} has {counts}")
            row = {name: cell.strip() for name, cell in zip(self._header, cells, strict=True)}
            selection = row.get("selection")
            if selection in selections:  # Raven repeats a selection for each view
                continue
            if row[self._columns["label"]] == row.get(self._species) == _NO_CALL:
                continue
            if selection:
                selections.add(selection)
            yield self._parse_row(row)

    def _first_of(self, names: Sequence[str]) -> str:
        """Return the first of these columns that the table has, or ""."""
        return next((name for name in names if name in self._header), "")

    def _cells(self, cells: list[str]) -> list[str]:
        """Return the cells of a row, without the rest of a path with commas, which BirdNET does not quote."""
        excess = len(cells) - len(self._header)
        if excess > 0 and self._header[-1] == "file":
            return cells[:-excess]
        if excess > 0 and self._header[0] in ("indir", "filepath"):
            return cells[excess:]
        return cells

    def _parse_row(self, row: Mapping[str, str]) -> Detection:
        columns = self._columns
        start_s = self._parse_seconds(row, columns["start"])
        end_s = self._parse_seconds(row, columns["end"])
        if columns["end"] == "duration":
            end_s += start_s
        if end_s < start_s:
            raise self._wrong(columns["end"], f"{end_s} is before the start, {start_s}")
        score = None
        if row.get(columns["score"]):
            score = self._parse_seconds(row, columns["score"])
        label = row[columns["label"]]
        name = row[self._species] if self._species else ""
        if columns["label"] == "species_name":  # of the Python package birdnet: both names
            label, _, name = label.partition("_")
        if not (label or name):
            raise self._wrong(columns["label"], "empty")
        return Detection(round(start_s * 1000), round(end_s * 1000), label or name, score, name or None)

    def _parse_seconds(self, row: Mapping[str, str], column: str) -> float:
        """Parse a number, or H:MM:SS."""
        value = 0.0
        try:
            for part in row[column].split(":"):
                value = value * 60 + float(part)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self._wrong(column, f"{row[column]!r} is not a number")
        return value

    def _wrong(self, column: str, problem: str) -> ValueError:
        return ValueError(f"line {self._rows.line_num}, column {column}: {problem}")


class _LabelTrack(_Table):
    """A label track of Audacity; BirdNET adds a score, and both names of the species are the label."""

    def _cells(self, cells: list[str]) -> list[str]:
        if cells[0] == "\\":  # the frequencies of the label above
            return []
        start, end, label, score = [*cells, "", "", ""][:4]
        name = ""
        if score:
            label, _, name = label.partition(", ")
        return [start, end, label, score, name]
