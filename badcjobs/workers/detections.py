"""Understands the detection files of engines: HawkEars' labels and tables, and the CSV of any command. Pure."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from badcjobs.model import Detection


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where a kind of table keeps the label; times and score have the same names in all of them."""

    label: str
    label_name: str | None = None
    recording: str | None = None

    @property
    def needed(self) -> tuple[str, ...]:
        named = (self.recording, "start_time", "end_time", self.label_name, self.label, "score")
        return tuple(column for column in named if column)


_ANY_COMMAND = _Columns(label="label")
_HAWKEARS_2 = _Columns(label="name", recording="recording")
_HAWKEARS_1 = _Columns(label="class_code", label_name="class_name", recording="filename")


def parse_detections_csv(text: str) -> list[Detection]:
    """Read the table of one chunk: our own four columns, or those of HawkEars 1 or 2.

    Further columns are ignored; a header alone means nothing was found. Anything else that is not
    a whole table raises ValueError with the line and the column.
    """
    return [detection for _, detection in _parse_table(text, _ANY_COMMAND, _HAWKEARS_2, _HAWKEARS_1)]


def parse_scores_csv(text: str) -> dict[str, list[Detection]]:
    """Map a recording's stem to its detections, from HawkEars 2's ``scores.csv``."""
    found: dict[str, list[Detection]] = {}
    for row, detection in _parse_table(text, _HAWKEARS_2):
        found.setdefault(row["recording"], []).append(detection)
    return found


def parse_labels_csv(text: str) -> dict[str, list[Detection]]:
    """Map a recording's file name to its detections, from HawkEars 1's ``HawkEars_labels.csv``."""
    found: dict[str, list[Detection]] = {}
    for row, detection in _parse_table(text, _HAWKEARS_1):
        found.setdefault(row["filename"], []).append(detection)
    return found


def parse_audacity_labels(text: str) -> list[Detection]:
    """Read HawkEars 2's ``<stem>_scores.txt``; an empty text means nothing was found.

    Each line is ``start<TAB>end<TAB>label;score``, two decimals for the seconds, three for the score.
    HawkEars' own steps are quarters of a second, so this says as much as scores.csv; only an
    odd ``--seg`` or ``--max-label-length`` loses up to 5 ms here.
    """
    if text and not text.endswith("\n"):
        raise ValueError(f"line {text.count(chr(10)) + 1} is cut off")
    return [_parse_label_line(line, number) for number, line in enumerate(text.splitlines(), start=1)]


def _parse_label_line(line: str, number: int) -> Detection:
    cells = line.split("\t")
    if len(cells) != 3:
        raise ValueError(f"line {number} has {len(cells)} columns instead of start, end and label;score")
    label, _, score = cells[2].rpartition(";")
    row = {"start_time": cells[0], "end_time": cells[1], "label": label, "score": score}
    return _parse_row(row, _ANY_COMMAND, number)


def _parse_table(text: str, *kinds: _Columns) -> Iterator[tuple[Mapping[str, str], Detection]]:
    rows = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        header = [name.strip() for name in next(rows, [])]
        columns = _recognise(header, kinds)
        for cells in rows:
            if not cells:
                continue  # an empty line
            if len(cells) != len(header):
                column = header[len(cells)] if len(cells) < len(header) else f"number {len(header) + 1}"
                raise ValueError(
                    f"line {rows.line_num} has {len(cells)} cells, the header {len(header)} (column {column})"
                )
            row = dict(zip(header, cells, strict=True))
            yield row, _parse_row(row, columns, rows.line_num)
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num}: {error}") from error


def _recognise(header: list[str], kinds: tuple[_Columns, ...]) -> _Columns:
    for kind in kinds:
        if set(kind.needed) <= set(header):
            return kind
    nearest = min(kinds, key=lambda kind: len(set(kind.needed) - set(header)))
    missing = ", ".join(column for column in nearest.needed if column not in header)
    raise ValueError(f"line 1: column {missing} is missing; the header is {','.join(header) or 'empty'}")


def _parse_row(row: Mapping[str, str], columns: _Columns, number: int) -> Detection:
    start_s = _parse_number(row, "start_time", number)
    end_s = _parse_number(row, "end_time", number)
    if end_s < start_s:
        raise ValueError(f"line {number}, column end_time: {end_s} is before the start, {start_s}")
    label = row[columns.label].strip()
    if not label:
        raise ValueError(f"line {number}, column {columns.label}: empty")
    return Detection(
        start_ms=round(start_s * 1000),
        end_ms=round(end_s * 1000),
        label=label,
        score=_parse_number(row, "score", number) if row["score"].strip() else None,
        label_name=row[columns.label_name].strip() or None if columns.label_name else None,
    )


def _parse_number(row: Mapping[str, str], column: str, number: int) -> float:
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"line {number}, column {column}: {row[column]!r} is not a number")
    return value
