"""Samples as text for people who want no database: CSV or JSON lines, one line per device and instant."""

from __future__ import annotations

import csv
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TextIO

from badcjobs.model import METRICS
from badcjobs.store.connect import open_sealed

TEXT_FORMS = (".csv", ".jsonl")

_SAMPLES = f"""
    SELECT strftime('%Y-%m-%dT%H:%M:%f', s.at_ms / 1000.0, 'unixepoch') || 'Z' AS at, s.at_ms,
           d.device_index, d.uuid, d.name, {", ".join(f"s.{metric}" for metric in METRICS)}
    FROM sample s JOIN device d USING (device_id) ORDER BY s.at_ms, d.device_index"""


def write_samples(database: Path, target: Path) -> Path:
    """Write the samples of a task database as text; an unknown value is an empty field, or null."""
    with closing(open_sealed(database)) as db, target.open("w", encoding="utf-8", newline="") as out:
        cursor = db.execute(_SAMPLES)
        names = [column[0] for column in cursor.description]
        if target.suffix == ".csv":
            writer = csv.writer(out)
            writer.writerow(names)
            writer.writerows(cursor)
        else:
            _write_json_lines(cursor, names, out)
    return target


def _write_json_lines(cursor: sqlite3.Cursor, names: list[str], out: TextIO) -> None:
    for row in cursor:
        print(json.dumps(dict(zip(names, row, strict=True))), file=out)
