"""A recording that ``badcjobs record`` wrote as CSV or JSON lines, as a task database."""

from __future__ import annotations

import csv
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from badcjobs import __version__
from badcjobs.errors import DatabaseProblem
from badcjobs.model import METRICS
from badcjobs.store.schema import ddl_script

ENDINGS = (".csv", ".jsonl")


def load_readings(path: Path, target: Path) -> None:
    """Write the readings into a new task database; a last line that is not whole is left out."""
    rows = list(_read(path))
    if not rows:
        why = "it has no readings as badcjobs record writes them"
        raise DatabaseProblem(f"{path} cannot be read", why=why, fix="badcjobs record --out FILE.sqlite …")
    times = sorted(int(row["at_ms"]) for row in rows)
    devices = {row["uuid"] or str(row["device_index"]): row for row in rows}
    ids = {key: number for number, key in enumerate(devices, 1)}
    task = {
        "task_id": 1, "name": path.stem, "job_id": f"local{times[0]}", "array_index": 0, "restart": 0, "node": "–",
        "telemetry": 1, "devices": len(devices), "workers": 0, "started_at_ms": times[0], "ended_at_ms": times[-1],
        "exit_code": 0, "verdict": "done", "version": __version__,
    }  # fmt: skip
    with closing(sqlite3.connect(target)) as db, db:
        db.executescript(ddl_script())
        _insert(db, "task", task)
        for key, row in devices.items():
            facts = {name: row[name] or None for name in ("uuid", "name")} | {"device_index": row["device_index"]}
            known = {"device_id": ids[key], "task_id": 1, "token": key, "backend": "recording", "why": path.name}
            _insert(db, "device", known | facts)
        for row in rows:
            facts = {name: number for name in METRICS if (number := _number(row.get(name))) is not None}
            device_id = ids[row["uuid"] or str(row["device_index"])]
            _insert(db, "sample", {"task_id": 1, "device_id": device_id, "at_ms": int(row["at_ms"]), **facts})


def _read(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        lines = csv.DictReader(file) if path.suffix == ".csv" else file
        for line in lines:
            try:
                row = line if isinstance(line, dict) else json.loads(line)
                int(row["at_ms"]), row["uuid"], row["device_index"], row["name"]
                if path.suffix != ".csv" or None not in row.values():  # a line of CSV that ends too early
                    yield row
            except (ValueError, TypeError, KeyError):
                continue


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:  # not known
        return None


def _insert(db: sqlite3.Connection, table: str, values: dict[str, Any]) -> None:
    marks = ", ".join("?" * len(values))
    db.execute(f"INSERT OR REPLACE INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))
