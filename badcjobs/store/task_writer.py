"""Writes the wrapper's half of a task database: chunks, workers, attempts and detections.

One connection, one thread, one file. The recorder writes the other half (telemetry/recorder.py); publish.py joins the
two. While the disk is full, a write waits, and with it the work.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, fields
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from badcjobs.model import (
    Allocation,
    Chunk,
    ChunkKey,
    ChunkResult,
    Detection,
    Device,
    Fingerprint,
    NameGaps,
    Place,
    PlaceCounts,
    RecordingName,
    TaskKey,
    UsageReading,
    stable_id,
)
from badcjobs.model.decisions import Decision
from badcjobs.store.connect import (
    CHUNK_NAME,
    create_live,
    grouped,
    read_as,
    read_only_uri,
    reading,
    rows_by_name,
    transaction,
)
from badcjobs.store.live_files import take_snapshot
from badcjobs.store.schema import columns_of, insert_sql

log = logging.getLogger(__name__)

_RETRY_S = 1.0
Change = tuple[str, Sequence[Sequence[object]]]  # a statement, and the rows to execute it with

# The chunks of a recording usually follow each other; if not, its first row stays.
_INSERT_RECORDING = f"{insert_sql('recording')} ON CONFLICT DO NOTHING"
_GAP = "count(*) FILTER (WHERE {0}), min(source_path) FILTER (WHERE {0})"
_DATED = "coalesce(recorded_at, recorded_on)"
_GAPS = (
    f"{_DATED} IS NULL",
    "study_area IS NULL",
    "pattern IS NULL",
    f"length({_DATED}) = length('2026-05-01')",
)


def count_gaps(db: sqlite3.Connection, recordings: str = "recording") -> NameGaps:
    """Count the recordings without a study area, a date or a time, with an example of each."""
    kinds = ", ".join(_GAP.format(gap) for gap in _GAPS)
    return NameGaps(*db.execute(f"SELECT count(*), {kinds} FROM {recordings}").fetchone())


_PLACED = "(region IS NOT NULL OR latitude IS NOT NULL)"
_PLACE_GAPS = f"""
    SELECT count(*) AS recordings, count(left_out) AS left_out,
           count(*) FILTER (WHERE {_PLACED} AND recorded_on IS NULL) AS undated,
           count(*) FILTER (WHERE NOT {_PLACED} AND left_out IS NULL) AS unplaced,
           count(*) FILTER (WHERE no_county) AS not_covered
    FROM recording"""
_PATHS = "SELECT source_path FROM recording WHERE {} ORDER BY source_path LIMIT 5"


def count_places(db: sqlite3.Connection) -> PlaceCounts | None:
    """Count the recordings that are left out, or lack a date or a place; None: there are no places."""
    [counts] = read_as(db, PlaceCounts, _PLACE_GAPS)
    if counts.unplaced == counts.recordings:
        return None
    counts.left_out_names = [path for (path,) in db.execute(_PATHS.format("left_out IS NOT NULL"))]
    counts.not_covered_names = [path for (path,) in db.execute(_PATHS.format("no_county"))]
    return counts


_PLACE = tuple(column.name for column in fields(Place))
_PENDING = f"""
    SELECT c.rowid, c.recording_id, c.chunk_id, c.source_path,
           c.audio_path, c.start_ms, c.end_ms,
           c.is_cut, c.audio_bytes, c.audio_mtime_ns,
           {", ".join(f"r.{name}" for name in _PLACE)}
    FROM chunk c LEFT JOIN recording r ON r.task_id = c.task_id
        AND r.recording_id = c.recording_id
    WHERE c.status = 'pending' AND c.rowid > ? ORDER BY c.rowid LIMIT ?"""
_RECENT = """
    SELECT a.device_id, c.audio_s, (a.ended_at_ms - a.started_at_ms) / 1000.0
    FROM attempt a JOIN chunk c USING (recording_id, chunk_id)
    WHERE a.task_id = ? AND a.outcome = 'done' ORDER BY a.attempt_id DESC LIMIT ?"""
# The source reports repeated chunks at its end, with their line numbers; then none of these rows are kept.
_INSERT_CHUNK = """
    INSERT OR IGNORE INTO chunk (task_id, recording_id, chunk_id, source_path, audio_path, start_ms, end_ms, audio_s,
                       audio_bytes, audio_mtime_ns, audio_sha256, is_cut, status,
                       attempts)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'pending', 0)"""
_chunk_values = attrgetter(
    "recording_id",
    "chunk_id",
    "source_path",
    "audio_path",
    "start_ms",
    "end_ms",
    "audio_s",
    "fingerprint.audio_bytes",
    "fingerprint.audio_mtime_ns",
    "fingerprint.audio_sha256",
    "is_cut",
)


_COUNTS = """
    SELECT count(*) FILTER (WHERE status = 'done') AS done,
           count(*) FILTER (WHERE status IN ('failed', 'poison')) AS failed,
           count(*) FILTER (WHERE status = 'pending') AS pending,
           count(*) FILTER (WHERE status = 'pending' AND attempts > 0) AS retrying,
           count(*) FILTER (WHERE status = 'skipped' AND error_class IS NULL) AS done_before,
           count(*) FILTER (WHERE status = 'skipped' AND error_class IS NOT NULL) AS failed_before,
           total(audio_s) FILTER (WHERE status = 'done') AS audio_done_s,
           coalesce((SELECT max(0, min(a.started_at_ms) - t.started_at_ms) / 1000.0
                     FROM attempt a JOIN task t USING (task_id)
                     WHERE a.attempt_id = 1), 0.0) AS start_up_s,
           max(end_ms - start_ms) FILTER (WHERE status = 'pending') / 1000.0 AS longest_pending_s
    FROM chunk"""

# The same audio: equal checksums, if both sides have one (a file may be moved, or copied without its times); else equal
# times and an equal path, as written in the source or as resolved. Without a fingerprint it counts as the same.
_SAME_AUDIO = """(o.audio_bytes IS NULL OR c.audio_bytes IS NULL OR (
        o.audio_bytes = c.audio_bytes AND o.start_ms = c.start_ms AND o.end_ms IS c.end_ms
        AND CASE WHEN o.audio_sha256 IS NOT NULL AND c.audio_sha256 IS NOT NULL THEN o.audio_sha256 = c.audio_sha256
            ELSE o.audio_mtime_ns = c.audio_mtime_ns
                AND (o.source_path = c.source_path OR o.audio_path = c.audio_path) END))"""
# Our open chunks that are done (or failed) in the database attached as ``other``: our row, the status there, the class
# and text of the error there, whether it is the same audio. A chunk that failed in one database may be done in the
# next, so chunks that are skipped with an error count as open.
_DONE_ELSEWHERE = f"""
    SELECT c.rowid, o.status,
           iif(o.status != 'done', coalesce(o.error_class, 'unknown'), NULL),
           iif(o.status != 'done', o.error, NULL), {_SAME_AUDIO}
    FROM main.chunk c CROSS JOIN other.chunk o ON o.recording_id = c.recording_id AND o.chunk_id = c.chunk_id
    WHERE c.rowid > ? AND (c.status = 'pending' OR c.error_class IS NOT NULL)
        AND (o.status = 'done' OR ? AND o.status IN ('failed', 'poison'))
    ORDER BY c.rowid LIMIT 10000"""

_SAME_PLACE = " AND ".join(f"o.{name} IS r.{name}" for name in ("latitude", "longitude", "region", "recorded_on"))
_MOVED = f"""
    SELECT r.source_path FROM main.recording r
    CROSS JOIN other.recording o ON o.recording_id = r.recording_id
    WHERE NOT ({_SAME_PLACE}) AND EXISTS (
        SELECT 1 FROM other.chunk c WHERE c.recording_id = r.recording_id
        AND c.status = 'done')
    ORDER BY r.rowid"""


class ChunkCounts(NamedTuple):
    """The chunks of a task, and the time and audio behind those counts."""

    done: int
    failed: int  # for good
    pending: int
    retrying: int  # pending, but they have failed or were lost at least once
    done_before: int  # in an earlier task, like those that follow
    failed_before: int
    audio_done_s: float
    start_up_s: float  # until the first attempt
    longest_pending_s: float | None  # the longest pending chunk; None: no length is known


class TaskWriter:
    """Writes the rows of one task; each public method is one transaction, unless inside ``batch``."""

    def __init__(self, path: Path, key: TaskKey, *, shared: bool = False) -> None:
        self.path = path
        self.task_id = key.task_id
        self._key = key
        self.patience_s = 0.0  # how long to wait for a disk that cannot be written
        self._db = create_live(path, shared=shared)
        self._batch: list[Change] | None = None  # the changes of the open batch
        self._attempts = 0
        self.workers_started = 0  # engine processes so far
        self._open_attempts: dict[ChunkKey, int] = {}
        self._cursor = 0
        self._changed: set[int] = set()
        self._marks = 0

    # --- the task -------------------------------------------------------------------------------------------------

    def begin_task(self, allocation: Allocation, **values: object) -> None:
        """Write the row of the task with these columns, and the environment variables of its allocation."""
        identity = {**asdict(self._key), "name": self._key.name}
        self._insert("task", **(identity | values), cpus=allocation.cpus)
        self.write_meta({"environment": json.dumps(dict(allocation.facts))})

    def update_task(self, **values: object) -> None:
        """Set columns of the task's row."""
        self._update("task", {"task_id": self.task_id}, **values)

    def write_meta(self, values: Mapping[str, str]) -> None:
        """Write keys and values of the table ``meta``."""
        self._write_many("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(values.items()))

    def device_id(self, device: Device) -> int:
        """Return the id of a device in this task's tables."""
        return stable_id(self.task_id, "device", device.pin)

    def add_devices(self, devices: Sequence[Device]) -> None:
        """Write a row for each granted device."""
        with self.batch():
            for device in devices:
                facts = {name: getattr(device, name) for name in columns_of("device") if hasattr(device, name)}
                self._insert("device", device_id=self.device_id(device), device_index=device.index, **facts)

    def add_gap(self, device_id: int | None, from_ms: int, to_ms: int, reason: str) -> None:
        """Write a gap that only the wrapper can know of."""
        self._insert("gap", device_id=device_id, from_ms=from_ms, to_ms=to_ms, reason=reason)

    def add_decision(self, decision: Decision, at_ms: int) -> None:
        """Write a decision that the program has made by itself."""
        self._insert(
            "decision",
            at_ms=at_ms,
            code=decision.code.value,
            subject=decision.subject,
            figures=json.dumps(decision.figures),
            reason=decision.reason,
        )

    def add_usage(self, reading: UsageReading, at_ms: int) -> None:
        """Write the CPU, memory and disk use of the task's own processes."""
        self._insert("usage_sample", at_ms=at_ms, **asdict(reading))

    def begin_mark(self, name: str, at_ms: int) -> int:
        """Write the start of a named mark, and return its number."""
        self._marks += 1
        self._insert("mark", rowid=self._marks, name=name, started_at_ms=at_ms)
        return self._marks

    def end_mark(self, mark: int, at_ms: int) -> None:
        """Write the end of a mark."""
        self._update("mark", {"rowid": mark}, ended_at_ms=at_ms)

    # --- the work -------------------------------------------------------------------------------------------------

    def fill(
        self,
        chunks: Iterable[Chunk],
        progress: Callable[[int], None],
        name_of: Callable[[Chunk], RecordingName] | None = None,
    ) -> int:
        """Write every chunk as pending, streaming; nothing is written if the source has mistakes.

        ``name_of`` says where and when a recording was made, and whether it is left out; without it no rows of
        recordings are written. Return the number of chunks.
        """
        listed = 0
        last_recording = None
        name = RecordingName()
        with transaction(self._db):
            for rows, chunk in enumerate(chunks, 1):
                progress(rows)
                if name_of is not None and chunk.recording_id != last_recording:
                    last_recording = chunk.recording_id
                    name = name_of(chunk)
                    self._add_recording(chunk, name)
                if name.left_out is not None:
                    continue
                listed += 1
                self._db.execute(_INSERT_CHUNK, (self.task_id, *_chunk_values(chunk)))
        return listed

    def _add_recording(self, chunk: Chunk, name: RecordingName) -> None:
        header = chunk.fingerprint.header
        ids = (self.task_id, chunk.recording_id, chunk.source_path)
        from_path = (name.study_area, name.location, name.recorded_at)
        from_header = (header.duration_s, header.sample_rate_hz, header.channels)
        rest = (name.pattern, *astuple(name.place), name.left_out, name.no_county)
        self._db.execute(_INSERT_RECORDING, (*ids, *from_path, *from_header, *rest))

    def name_gaps(self) -> NameGaps:
        """Count the recordings whose paths lack a study area, a date or a time."""
        return count_gaps(self._db)

    def count_places(self) -> PlaceCounts | None:
        """Count the recordings that are left out, or lack a date or a place; None: there are no places."""
        return count_places(self._db)

    @contextmanager
    def _attached(self, database: Path) -> Iterator[sqlite3.Connection]:
        """Attach a sealed database as ``other``."""
        with reading(database):
            self._db.execute("ATTACH ? AS other", (read_only_uri(database),))
            try:
                yield self._db
            finally:
                self._db.execute("DETACH other")

    def moved_since(self, database: Path) -> list[str]:
        """Return the recordings that have another place or date than in a database where some of them is done."""
        with self._attached(database) as db:
            return [path for (path,) in db.execute(_MOVED)]

    def skip_done_in(self, database: Path, *, retry_failed: bool = True) -> int:
        """Skip the chunks that another (sealed) database has done with the same audio; return their number.

        Unless ``retry_failed``, skip chunks that failed there for good, too, with their error. Such a chunk counts as
        open for the next database, where it may be done.
        """
        skip = "UPDATE chunk SET status = 'skipped', error_class = ?, error = ? WHERE rowid = ?"
        skipped = 0
        last = 0
        with self._attached(database) as db:
            while rows := db.execute(_DONE_ELSEWHERE, (last, not retry_failed)).fetchall():
                same = [(error_class, error, row) for row, _, error_class, error, is_same in rows if is_same]
                self._write_many(skip, same)
                self._changed |= {row for row, status, _, _, is_same in rows if status == "done" and not is_same}
                self._changed -= {row for _, _, row in same}
                skipped += len(same)
                last = rows[-1][0]
        return skipped

    @property
    def changed(self) -> int:
        """How many chunks are done elsewhere, but with different audio."""
        return len(self._changed)

    def counts(self) -> ChunkCounts:
        """Count the chunks by what is left to do with them."""
        [counts] = read_as(self._db, ChunkCounts, _COUNTS)
        return counts

    def next_pending(self, limit: int) -> list[Chunk]:
        """Return the next pending chunks in source order; each is returned once."""
        chunks = []
        for row in rows_by_name(self._db, _PENDING, (self._cursor, limit)):
            self._cursor = row.pop("rowid")
            is_cut = bool(row.pop("is_cut"))
            fingerprint = Fingerprint(row.pop("audio_bytes"), row.pop("audio_mtime_ns"))
            place = Place(**{name: row.pop(name) for name in _PLACE})
            chunks.append(Chunk(**row, fingerprint=fingerprint, is_cut=is_cut, place=place))
        return chunks

    def count_by_status(self) -> dict[str, int]:
        """Count the chunks by status."""
        return dict(self._db.execute("SELECT status, count(*) FROM chunk GROUP BY status"))

    def done_by_device(self) -> dict[int | None, tuple[int, float]]:
        """Return the number of chunks and the seconds of audio that each device has done; None: the CPU."""
        sql = "SELECT device_id, count(*), total(audio_s) FROM chunk WHERE status = 'done' GROUP BY 1"
        return {device_id: (done, audio_s) for device_id, done, audio_s in self._db.execute(sql)}

    def under_way(self) -> dict[int | None, list[str]]:
        """Return the names of the chunks in progress by device; None: the CPU."""
        sql = f"""SELECT device_id, {CHUNK_NAME} FROM attempt
                  WHERE task_id = ? AND ended_at_ms IS NULL ORDER BY attempt_id"""
        return grouped(self._db.execute(sql, (self.task_id,)))

    def recent_work(self, limit: int) -> list[tuple[int | None, float | None, float]]:
        """Return device, seconds of audio and seconds of work of the chunks done last."""
        return self._db.execute(_RECENT, (self.task_id, limit)).fetchall()

    def failed_chunks(self, limit: int) -> list[tuple[str, str, str, str]]:
        """Return (recording, chunk, error class, error) of chunks that failed for good, here or in an earlier task."""
        return self._db.execute(
            """SELECT recording_id, chunk_id, coalesce(error_class, ''), coalesce(error, '') FROM chunk
               WHERE status IN ('failed', 'poison') OR status = 'skipped'
               AND error_class IS NOT NULL
               ORDER BY rowid LIMIT ?""",
            (limit,),
        ).fetchall()

    # --- called by the supervisor ---------------------------------------------------------------------------------

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Write the changes of a block in one transaction; an exception in the block drops all of them."""
        changes: list[Change] = []
        self._batch = changes
        try:
            yield
        finally:
            self._batch = None
        self._commit(changes)

    def worker_started(self, *, device_id: int | None, pid: int | None, engine: str, at_ms: int) -> int:
        """Write a new engine process and return its id."""
        self.workers_started += 1
        worker_id = stable_id(self.task_id, "worker", self.workers_started)
        self._insert(
            "worker",
            worker_id=worker_id,
            device_id=device_id,
            pid=pid,
            engine=engine,
            started_at_ms=at_ms,
        )
        return worker_id

    def worker_ended(self, worker_id: int, *, exit_code: int | None, at_ms: int) -> None:
        """Write the end of an engine process."""
        self._update("worker", {"worker_id": worker_id}, ended_at_ms=at_ms, exit_code=exit_code)

    def attempt_started(
        self, chunk: Chunk, *, try_number: int, worker_id: int, device_id: int | None, at_ms: int
    ) -> None:
        """Write the start of an attempt; after a kill its row shows what was running."""
        self._attempts += 1
        self._open_attempts[chunk.key] = self._attempts
        self._insert(
            "attempt",
            attempt_id=self._attempts,
            recording_id=chunk.recording_id,
            chunk_id=chunk.chunk_id,
            try_number=try_number,
            worker_id=worker_id,
            device_id=device_id,
            started_at_ms=at_ms,
        )

    def attempt_ended(
        self,
        result: ChunkResult,
        *,
        status: str,
        try_number: int,
        worker_id: int,
        device_id: int | None,
        gpu_state: str | None = None,
    ) -> None:
        """Write the end of an attempt, the chunk's new state, and its detections."""
        chunk = result.chunk
        if chunk.key not in self._open_attempts:
            self.attempt_started(
                chunk,
                try_number=try_number,
                worker_id=worker_id,
                device_id=device_id,
                at_ms=result.started_at_ms,
            )
        self._end_attempt(result, gpu_state)
        length = {} if result.audio_s is None else {"audio_s": result.audio_s}
        self._update(
            "chunk",
            {"recording_id": chunk.recording_id, "chunk_id": chunk.chunk_id},
            status=status,
            attempts=try_number,
            device_id=device_id,
            worker_id=worker_id,
            detections=len(result.detections) if result.ok else None,
            **length,
            **_times_and_error(result),
        )
        self._add_sounds("detection", chunk, result.detections)
        self._add_sounds("rarity", chunk, result.rarities)

    def _end_attempt(self, result: ChunkResult, gpu_state: str | None) -> None:
        outcome = "failed" if result.charged else "lost"
        if result.ok:
            outcome = "done"
        self._update(
            "attempt",
            {"task_id": self.task_id, "attempt_id": self._open_attempts.pop(result.chunk.key)},
            outcome=outcome,
            gpu_state=gpu_state,
            pieces=result.pieces,
            **_times_and_error(result),
        )

    def _add_sounds(self, table: str, chunk: Chunk, sounds: Sequence[Detection]) -> None:
        ids = (self.task_id, *chunk.key)
        rows = [(*ids, d.start_ms, d.end_ms, d.label, d.label_name, d.score) for d in sounds]
        self._write_many(insert_sql(table), rows)

    # --- publishing and closing -----------------------------------------------------------------------------------

    def half(self, workplace: Path) -> str:
        """Write a scratch copy of everything written so far and return its URI; may be called from any thread."""
        copy = workplace / "own.sqlite"
        take_snapshot(self._db, copy, lasting=False)
        return read_only_uri(copy)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _insert(self, table: str, **values: object) -> None:
        row = {"task_id": self.task_id, **values}
        self._write_many(insert_sql(table, row), [tuple(row.values())])

    def _update(self, table: str, key: Mapping[str, object], **values: object) -> None:
        changes = ", ".join(f"{name} = ?" for name in values)
        condition = " AND ".join(f"{name} = ?" for name in key)
        sql = f"UPDATE {table} SET {changes} WHERE {condition}"
        self._write_many(sql, [(*values.values(), *key.values())])

    def _write_many(self, sql: str, rows: Sequence[Sequence[object]]) -> None:
        if self._batch is None:
            self._commit([(sql, rows)])
        else:
            self._batch.append((sql, rows))

    def _commit(self, changes: Sequence[Change]) -> None:
        """Write changes in one transaction; wait while the disk refuses them."""
        give_up_at_s = time.monotonic() + self.patience_s
        is_refused = False
        while True:
            try:
                with transaction(self._db):
                    for sql, rows in changes:
                        self._db.executemany(sql, rows)
                break
            except sqlite3.OperationalError as error:
                if time.monotonic() >= give_up_at_s:
                    self.patience_s = 0.0  # do not wait again for each of the last rows
                    raise
                if not is_refused:
                    log.warning("%s cannot be written: %s; the work pauses", self.path, error)
                is_refused = True
                time.sleep(_RETRY_S)
        if is_refused:
            log.info("%s can be written again; no data was lost", self.path)


def _times_and_error(result: ChunkResult) -> dict[str, object]:
    """Return the columns that a chunk and its attempt have in common."""
    return {name: getattr(result, name) for name in ("started_at_ms", "ended_at_ms", "error_class", "error")}
