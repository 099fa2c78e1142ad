"""Publishes a task database: joins the two live files of a task into one sealed file in the run folder.

The joined file is built next to the live files (or next to the target, if their disk is full), copied under a temporary
name, then renamed: a reader on another node sees either the old or the new file, complete, and no lock is needed.
"""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from badcjobs.errors import DatabaseProblem
from badcjobs.model import METRICS, publish_interval_s
from badcjobs.store.atomic_write import (
    empty_stamped_page,
    move_into_place,
    scratch_folder,
    write_row_counts,
)
from badcjobs.store.connect import (
    as_sqlite_utils,
    create_scratch,
    create_tables,
    open_sealed,
    read_value,
    transaction,
)
from badcjobs.store.export_tables import rows_written_to
from badcjobs.store.figures import write_figures
from badcjobs.store.live_files import Half, LiveHalf, count_rows
from badcjobs.store.schema import TABLES, insert_sql
from badcjobs.version import __version__

log = logging.getLogger(__name__)

TEXT_FORMS = (".csv", ".jsonl")
Gap = tuple[int, int, str]  # from, to, reason
_NOTHING: Mapping[str, object] = MappingProxyType({})

_SAMPLES = f"""
    SELECT strftime('%Y-%m-%dT%H:%M:%f', s.at_ms / 1000.0, 'unixepoch') || 'Z' AS at, s.at_ms,
           d.device_index, d.uuid, d.name, {", ".join(f"s.{metric}" for metric in METRICS)}
    FROM sample s JOIN device d USING (device_id) ORDER BY s.at_ms, d.device_index"""

_UNREADABLE = """
    INSERT INTO gap (task_id, from_ms, to_ms, reason)
    SELECT task_id, started_at_ms,
           coalesce(ended_at_ms, (SELECT max(started_at_ms) FROM attempt), started_at_ms), ? FROM task"""


def publish(
    halves: Sequence[Half | Path],
    target: Path,
    *,
    workplace: Path | None = None,
    closing: Mapping[str, object] = _NOTHING,
    gaps: Sequence[Gap] = (),
) -> int:
    """Publish the halves, joined, as ``target``; return its size. The extension selects SQLite, CSV or JSON lines.

    The first half is the wrapper's; a path is a live file on node-local disk. ``closing`` sets columns of the task row
    that are still NULL; ``gaps`` are added to the table of gaps.
    """

    def publish_from(place: Path) -> None:
        with scratch_folder(target, place) as folder:
            joined = folder / "joined.sqlite"
            join_files(halves, joined, closing, gaps)
            if target.suffix in TEXT_FORMS:
                joined = _write_as_text(joined, folder / target.name)
            move_into_place(joined, target)

    try:
        publish_from(workplace or target.parent)
    except (OSError, sqlite3.Error):  # the local disk is full; the run folder may have space
        publish_from(target.parent)
    return target.stat().st_size


def _write_as_text(joined: Path, text: Path) -> Path:
    with contextlib.closing(open_sealed(joined)) as db, text.open("wb") as out:
        cursor = db.execute(_SAMPLES)
        types = {column[0]: "" for column in cursor.description}
        with rows_written_to(out, text.suffix[1:], types) as write:
            write(cursor)
    return text


def join_files(
    halves: Sequence[Half | Path],
    joined: Path,
    closing: Mapping[str, object] = _NOTHING,
    gaps: Sequence[Gap] = (),
) -> None:
    """Write a new database with the rows of all halves that exist.

    The first half is the wrapper's and must be readable. If the recorder's cannot be read, a gap is recorded.
    """
    joined.write_bytes(empty_stamped_page())
    with contextlib.closing(create_scratch(joined)) as db:
        for half in halves:
            part = LiveHalf(half) if isinstance(half, Path) else half
            try:
                is_there = _copy_rows(db, part, joined.parent)
            except sqlite3.Error as error:
                if half is halves[0] or count_rows(part, joined.parent, TABLES) >= 0:
                    raise  # every row can be read: the target has no space
                log.warning("the recorder's file cannot be read; its readings are not published: %s", error)
                db.execute(_UNREADABLE, (f"the recorder's file cannot be read: {error}",))
            else:
                if half is halves[0] and not is_there:  # never replace a published file by an empty one
                    raise FileNotFoundError("the wrapper's file is gone")
        for column, value in closing.items():
            db.execute(f"UPDATE task SET {column} = coalesce({column}, ?)", (value,))
        db.executemany(
            "INSERT INTO gap (task_id, from_ms, to_ms, reason) SELECT task_id, ?, ?, ? FROM task",
            gaps,
        )
        with transaction(db):
            for (task_id,) in db.execute("SELECT task_id FROM task").fetchall():
                write_figures(db, task_id)
            write_row_counts(db)


def _copy_rows(db: sqlite3.Connection, half: Half, workplace: Path) -> bool:
    """Copy all rows in the order in which they were written; return whether there was a database.

    Samples are copied device by device, in the order of the job database.
    """
    uri = half(workplace)
    if uri is None:
        return False
    db.execute("ATTACH ? AS live", (uri,))
    try:
        if read_value(db, "PRAGMA live.user_version") == 0:
            return False  # just created, without tables
        with transaction(db):  # one snapshot of the live file
            for table in TABLES:
                copy = f"INSERT INTO main.{table} SELECT * FROM live.{table}"
                if table == "sample":
                    for device in db.execute("SELECT DISTINCT device_id FROM live.sample ORDER BY 1").fetchall():
                        db.execute(f"{copy} WHERE device_id = ? ORDER BY rowid", device)
                else:
                    db.execute(f"{copy} ORDER BY rowid")
    finally:
        db.execute("DETACH live")
    return True


# --- a recording that was published as text ---------------------------------------------------------------------------


def load_readings(path: Path, target: Path) -> None:
    """Write the readings of a CSV or JSON lines file into a new task database; incomplete lines are left out."""
    rows = list(_read_lines(path))
    if not rows:
        why = "it has no readings as badcjobs record writes them"
        raise DatabaseProblem(f"{path} cannot be read", why=why, fix="badcjobs record --out FILE.sqlite …")
    devices = {row["token"]: row for row in rows}
    ids = {token: number for number, token in enumerate(devices, 1)}
    with contextlib.closing(sqlite3.connect(target)) as db, db:
        create_tables(db)
        tool = as_sqlite_utils(db)
        tool.table("task").insert(_describe_recording(path, [int(row["at_ms"]) for row in rows], len(devices)))
        for token, row in devices.items():
            tool.table("device").insert(
                {
                    "device_id": ids[token],
                    "task_id": 1,
                    "uuid": row["uuid"] or None,
                    "device_index": row["device_index"],
                    "token": token,
                    "name": row["name"] or None,
                    "backend": "recording",
                    "why": path.name,
                }
            )
        db.executemany(
            insert_sql("sample", ("task_id", "device_id", "at_ms", *METRICS)),
            (
                (1, ids[row["token"]], int(row["at_ms"]), *(_number(row.get(metric)) for metric in METRICS))
                for row in rows
            ),
        )


def _describe_recording(path: Path, times: Sequence[int], devices: int) -> dict[str, object]:
    """Return the row of a task that did nothing but record."""
    return {
        "task_id": 1,
        "name": path.stem,
        "job_id": f"local{min(times)}",
        "array_index": 0,
        "restart": 0,
        "node": "–",
        "telemetry": 1,
        "devices": devices,
        "workers": 0,
        "started_at_ms": min(times),
        "ended_at_ms": max(times),
        "exit_code": 0,
        "verdict": "done",
        "version": __version__,
    }


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        lines = csv.DictReader(file) if path.suffix == ".csv" else file
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError, OverflowError):
                row = line if isinstance(line, dict) else json.loads(line)
                int(row["at_ms"]), row["name"]
                row["token"] = row["uuid"] or str(row["device_index"])
                if path.suffix != ".csv" or None not in row.values():  # a line of CSV that ends too early
                    yield row


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:  # not known
        return None


# --- publishing in the background -------------------------------------------------------------------------------------

_NICENESS = 10


@dataclass
class Publisher:
    """Publishes at regular intervals from a thread of its own; builds the file in ``workplace``."""

    halves: Sequence[Half | Path]
    target: Path
    base_interval_s: float
    workplace: Path | None = None

    def __post_init__(self) -> None:
        self._wake = threading.Event()
        self._over = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="publisher", daemon=True)
        self._size_bytes = 0
        self._failing = False

    def start(self) -> None:
        """Publish once, so that a file exists from the beginning, then continue in the background."""
        self.publish_now()
        self._thread.start()

    def publish_soon(self) -> None:
        """Publish in the background without waiting for the interval."""
        self._wake.set()

    def publish_now(self, closing: Mapping[str, object] = _NOTHING) -> bool:
        """Publish and return whether it worked; a full or unmounted disk is a warning, not the end of the job.

        ``closing`` sets columns of the task row that a full disk did not accept.
        """
        with self._one_at_a_time:
            try:
                self._size_bytes = publish(self.halves, self.target, workplace=self.workplace, closing=closing)
            except (OSError, sqlite3.Error) as error:
                if not self._failing:  # warn once, not at every interval
                    log.warning(
                        "%s could not be published: %s; retrying at every interval",
                        self.target.name,
                        error,
                    )
                self._failing = True
                return False
        if self._failing:
            log.info("%s is published again", self.target.name)
        self._failing = False
        return True

    def stop(self) -> None:
        """Stop the background thread; the caller publishes a last time with ``publish_now``."""
        self._over.set()
        self._wake.set()
        self._thread.join()

    def _loop(self) -> None:
        with contextlib.suppress(OSError):  # a sandbox may forbid it; on Linux each thread has its own priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while not self._over.is_set():
            self._wake.wait(publish_interval_s(self._size_bytes, self.base_interval_s))
            self._wake.clear()
            if not self._over.is_set():
                self.publish_now()
