"""Samples as text for people who want no database: CSV or JSON lines, one line per device and instant."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from badcjobs.model import METRICS
from badcjobs.store.connect import open_sealed
from badcjobs.store.exports.text import csv_rows, json_lines

TEXT_FORMS = (".csv", ".jsonl")

_SAMPLES = f"""
    SELECT strftime('%Y-%m-%dT%H:%M:%f', s.at_ms / 1000.0, 'unixepoch') || 'Z' AS at, s.at_ms,
           d.device_index, d.uuid, d.name, {", ".join(f"s.{metric}" for metric in METRICS)}
    FROM sample s JOIN device d USING (device_id) ORDER BY s.at_ms, d.device_index"""


def write_samples(database: Path, target: Path) -> Path:
    """Write the samples of a task database as text; an unknown value is an empty field, or null."""
    rows_to = csv_rows if target.suffix == ".csv" else json_lines
    with closing(open_sealed(database)) as db, target.open("wb") as out:
        cursor = db.execute(_SAMPLES)
        with rows_to([column[0] for column in cursor.description], out) as write:
            write(cursor)
    return target
