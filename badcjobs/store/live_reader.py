"""Reads what a published database says of tasks that may still run: how far they are, how their devices fare.

Only files that are complete and never change in place: nobody's live files. One file is read in a few milliseconds.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from badcjobs.errors import DatabaseProblem
from badcjobs.model import METRICS, Reading
from badcjobs.store.connect import complain_about, open_sealed
from badcjobs.store.job_file import open_job_database
from badcjobs.store.job_schema import is_job_database
from badcjobs.store.last_heard import parse_publish_every_s
from badcjobs.store.live_snapshot import DeviceSnapshot, OpenAlert, Row, TaskSnapshot

_TASKS = """
    SELECT task_id, name, job_id, array_index, restart, node, procid, engine, devices AS granted, workers, shard_index,
           shard_count, started_at_ms, ended_at_ms, exit_code, verdict FROM task"""
_DEVICES = """
    SELECT task_id, device_id, device_index AS "index", uuid, token, name, backend, memory_total_bytes, power_limit_w
    FROM device ORDER BY device_index, token"""
_COUNTS = """
    SELECT task_id, device_id, status, error_class IS NOT NULL, count(*), total(audio_s)
    FROM chunk GROUP BY 1, 2, 3, 4"""
_UNDER_WAY = """
    SELECT task_id, device_id, recording_id, chunk_id FROM attempt
    WHERE ended_at_ms IS NULL ORDER BY started_at_ms DESC"""
_STRETCHES = """
    SELECT device_id, from_ms, to_ms, CAST(round(utilization_mean_percent) AS INTEGER),
           CAST(round(memory_used_mean_bytes) AS INTEGER), CAST(round(temperature_mean_c) AS INTEGER),
           CAST(round(power_mean_w) AS INTEGER)
    FROM device_stretch WHERE task_id = ? ORDER BY device_id, from_ms"""
_ALERTS = """
    SELECT task_id, device_id, kind, severity, message, started_at_ms, peak, threshold FROM alert
    WHERE ended_at_ms IS NULL"""
_MOST_UNDER_WAY = 16  # names of chunks; nobody reads more of them


def read_tasks(path: Path, known: Collection[str] = ()) -> tuple[TaskSnapshot, ...]:
    """Return the tasks of a task or job database, without those whose names are known already."""
    try:
        with closing(open_sealed(path)) as db:
            trouble = complain_about(path, db)
            if trouble is None and not is_job_database(db):
                return _read(db, known)
        if trouble is None:
            with closing(open_job_database(path)) as db:  # a merge may be changing it
                return _read(db, known)
    except (OSError, sqlite3.Error) as error:
        raise DatabaseProblem(f"{path.name} cannot be read: {error}") from error
    raise DatabaseProblem(f"{path.name} cannot be read: {trouble}")


def _read(db: sqlite3.Connection, known: Collection[str]) -> tuple[TaskSnapshot, ...]:
    rows = [row for row in _by_name(db, _TASKS) if row["name"] not in known]
    if not rows:
        return ()
    there = _Contents(db)
    return tuple(_snapshot(there, row.pop("task_id"), row) for row in rows)


def _by_name(db: sqlite3.Connection, sql: str) -> list[dict[str, Any]]:
    """Return rows under the names of their columns."""
    cursor = db.execute(sql)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


@dataclass(slots=True)
class _Counts:
    """What became of chunks."""

    done: int = 0
    failed: int = 0
    before: int = 0
    pending: int = 0
    audio_done_s: float = 0.0

    def add(self, status: str, in_error: int, many: int, audio_s: float) -> None:
        if status == "done":
            self.done += many
            self.audio_done_s += audio_s
        elif status in ("failed", "poison") or (in_error and status == "skipped"):
            self.failed += many
        elif status == "skipped":
            self.before += many
        else:
            self.pending += many


class _Contents:
    """All that a file says, by task and by device."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        self.of_task: dict[int, _Counts] = defaultdict(_Counts)
        self.of_device: dict[int | None, _Counts] = defaultdict(_Counts)
        for task_id, device_id, *row in db.execute(_COUNTS):
            self.of_task[task_id].add(*row)
            self.of_device[device_id].add(*row)
        self.devices: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for device in _by_name(db, _DEVICES):
            self.devices[device.pop("task_id")].append(device)
        self.under_way: dict[int, list[tuple[int | None, str]]] = defaultdict(list)  # task → device, chunk
        for task_id, device_id, recording_id, chunk_id in db.execute(_UNDER_WAY):
            name = recording_id if recording_id == chunk_id else f"{recording_id}/{chunk_id}"
            self.under_way[task_id].append((device_id, name))
        self.alerts: dict[int, list[OpenAlert]] = defaultdict(list)
        for task_id, *row in db.execute(_ALERTS):
            self.alerts[task_id].append(OpenAlert(*row))
        self.last = self._last_samples()
        self._settings = self._all_settings()

    def _rows(self, table: str, sql: str) -> Iterator[Row]:
        """Yield rows of a table that files of older versions do not have."""
        if table in self.tables:
            yield from self._db.execute(sql)

    def _last_samples(self) -> dict[int, tuple[int, Reading]]:
        """Return the last reading of each device.

        There is no index in a task database, but samples lie device by device: how many there are tells where the
        last one is. Where they lie otherwise, as in a job database, there is an index.
        """
        columns = {row[1] for row in self._db.execute("PRAGMA table_info(sample)")}
        metrics = [metric for metric in METRICS if metric in columns]
        wanted = f"SELECT at_ms, {', '.join(metrics)} FROM sample WHERE"
        found, row_number = {}, 0
        for device_id, task_id, samples, last_ms in self._rows(
            "device_total",
            "SELECT device_id, task_id, samples, last_at_ms FROM device_total WHERE samples > 0 ORDER BY device_id",
        ):
            row_number += samples
            place = (row_number, device_id, last_ms)
            row = self._db.execute(f"{wanted} rowid = ? AND device_id = ? AND at_ms = ?", place).fetchone()
            if row is None:
                here = (task_id, device_id, last_ms)
                row = self._db.execute(f"{wanted} task_id = ? AND device_id = ? AND at_ms = ?", here).fetchone()
            if row is not None:
                found[device_id] = row[0], Reading(**dict(zip(metrics, row[1:], strict=True)))
        return found

    def _all_settings(self) -> dict[int | None, str]:
        """Return the settings by task; a task database has those of its only task."""
        if "task_meta" in self.tables:
            return dict(self._db.execute("SELECT task_id, value FROM task_meta WHERE key = 'settings'"))
        return dict(self._db.execute("SELECT NULL, value FROM meta WHERE key = 'settings'"))

    def settings(self, task_id: int) -> str | None:
        """Return how a task was told to work."""
        return self._settings.get(task_id if "task_meta" in self.tables else None)

    def stretches(self, task_id: int) -> dict[int, list[Row]]:
        """Return the stretches of the devices of a task, oldest first."""
        found: dict[int, list[Row]] = defaultdict(list)
        if "device_stretch" in self.tables:
            for device_id, *stretch in self._db.execute(_STRETCHES, (task_id,)):
                found[device_id].append(tuple(stretch))
        return found

    def last_host(self, task_id: int) -> tuple[int | None, float | None, int | None, float | None]:
        """Return when the machine was last read, how busy it was, and how full its memory in bytes and percent."""
        last = "at_ms" if "source_file" in self.tables else "rowid"  # what the rows of a job database are ordered by
        row = self._db.execute(
            f"""SELECT at_ms, cpu_percent, memory_used_bytes, 100.0 * memory_used_bytes / memory_total_bytes
                FROM host_sample WHERE task_id = ? ORDER BY {last} DESC LIMIT 1""",
            (task_id,),
        ).fetchone()
        return row or (None, None, None, None)

    def last_attempt_ms(self, task_id: int) -> int | None:
        """Return the last moment that a try was heard of."""
        sql = "SELECT max(coalesce(ended_at_ms, started_at_ms)) FROM attempt WHERE task_id = ?"
        (last_ms,) = self._db.execute(sql, (task_id,)).fetchone()
        return None if last_ms is None else int(last_ms)


def _snapshot(there: _Contents, task_id: int, row: dict[str, Any]) -> TaskSnapshot:
    stretches = there.stretches(task_id)
    devices = tuple(_device(there, task_id, row, stretches) for row in there.devices[task_id])
    counts = there.of_task[task_id]
    host_ms, cpu_percent, memory_used_bytes, memory_percent = there.last_host(task_id)
    settings = there.settings(task_id)
    signs = [
        row["started_at_ms"],
        row["ended_at_ms"],
        host_ms,
        there.last_attempt_ms(task_id),
        *(d.read_at_ms for d in devices),
    ]
    return TaskSnapshot(
        **row,
        last_sign_ms=max(sign for sign in signs if sign is not None),
        done=counts.done,
        failed=counts.failed,
        before=counts.before,
        pending=counts.pending,
        audio_done_s=counts.audio_done_s,
        settings=settings,
        publish_every_s=parse_publish_every_s(settings),
        cpu_percent=cpu_percent,
        memory_used_bytes=memory_used_bytes,
        memory_percent=memory_percent,
        under_way=tuple(name for _, name in there.under_way[task_id][:_MOST_UNDER_WAY]),
        devices=devices,
        alerts=tuple(there.alerts[task_id]),
    )


def _device(
    there: _Contents, task_id: int, row: dict[str, Any], stretches: Mapping[int, Sequence[Row]]
) -> DeviceSnapshot:
    device_id = row["device_id"]
    read_at_ms, reading = there.last.get(device_id, (None, Reading()))
    return DeviceSnapshot(
        **row,
        read_at_ms=read_at_ms,
        reading=reading,
        stretches=tuple(stretches.get(device_id, ())),
        under_way=tuple(name for on, name in there.under_way[task_id] if on == device_id)[:_MOST_UNDER_WAY],
        done=there.of_device[device_id].done,
        audio_done_s=there.of_device[device_id].audio_done_s,
    )
