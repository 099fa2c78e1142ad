"""Joins the detections of chunks that overlap, so that each sound is counted once, on the clock of its recording.

Two chunks that follow each other and overlap have a joint, in the middle of what both have; there is none if one chunk
is inside the other. A detection beyond a joint belongs to the neighbour. Of the rest, two of the same label, one of
each chunk, that overlap in time are one sound: it starts as in the earlier chunk, ends as in the later one, and has the
higher score. Two sounds of one chunk stay two.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple


class Sound(NamedTuple):
    """A detection on the clock of its recording."""

    start_ms: int
    end_ms: int
    label: str
    label_name: str | None
    score: float | None
    chunk_id: str = ""  # the chunk with the detection, or with its start
    task_id: int = 0


class Heard(NamedTuple):
    """A chunk on the clock of its recording, and what was heard in it, in order of time."""

    start_ms: int
    joint_ms: int | None  # with the chunk before; None: there is none
    sounds: Sequence[Sound]


_END = Heard(0, None, ())  # follows the last chunk


def join_overlaps(chunks: Iterable[Heard]) -> Iterator[Sound]:
    """Yield the sounds of the chunks of one recording, which are in order of time."""
    shared: list[Sound] = []  # the sounds of the chunk before that may be in this one, too
    for chunk, following in pairwise(chain(chunks, [_END])):
        sounds = chunk.sounds
        next_joint_ms = following.joint_ms
        if next_joint_ms is not None:
            sounds = [sound for sound in sounds if sound.start_ms < next_joint_ms or sound.end_ms <= next_joint_ms]
        if chunk.joint_ms is not None:
            sounds = list(_join(shared, sounds, chunk.joint_ms))
        yield from shared

        shared = []
        for sound in sounds:
            if next_joint_ms is not None and sound.end_ms > following.start_ms:
                shared.append(sound)
            else:
                yield sound


def _join(shared: list[Sound], sounds: Sequence[Sound], joint_ms: int) -> Iterator[Sound]:
    """Yield the sounds of a chunk from its joint on; take those that the chunk before has, too, out of ``shared``."""
    shared_until_ms = max((sound.end_ms for sound in shared), default=joint_ms)
    for late in sounds:
        if late.end_ms <= joint_ms:
            continue
        twins = []
        if late.start_ms < shared_until_ms:
            twins = [sound for sound in shared if sound.label == late.label and late.start_ms < sound.end_ms]
        if not twins:
            yield late
            continue
        early = min(
            twins,
            key=lambda sound: abs(sound.start_ms - late.start_ms) + abs(sound.end_ms - late.end_ms),
        )
        shared.remove(early)
        louder = max(early, late, key=lambda sound: -math.inf if sound.score is None else sound.score)
        yield early._replace(end_ms=late.end_ms, label_name=louder.label_name, score=louder.score)


# --- the tables of a job database -------------------------------------------------------------------------------------

CHANGED = "temp.changed_recording"  # recordings of which a merge has added or removed chunks
Row = tuple[Any, ...]
_END_MS = "coalesce(c.end_ms, c.start_ms + CAST(c.audio_s * 1000 AS INTEGER))"
# Two chunks that follow each other overlap, and neither is inside the other.
_OVERLAPS = f"""
    INSERT INTO overlap
    SELECT task_id, recording_id, chunk_id, (end_before_ms - start_ms) / 1000.0
    FROM (
        SELECT c.task_id, c.recording_id, c.chunk_id, c.start_ms,
               {_END_MS} AS stops_ms,
               lag(c.start_ms) OVER in_time AS start_before_ms,
               lag({_END_MS}) OVER in_time AS end_before_ms
        FROM {CHANGED} n JOIN chunk c ON c.recording_id = n.recording_id
            AND c.status = 'done'
        WINDOW in_time AS (
            PARTITION BY c.recording_id ORDER BY c.start_ms, {_END_MS}, c.chunk_id))
    WHERE start_before_ms < start_ms AND start_ms < end_before_ms
    AND end_before_ms < stops_ms"""
# With + SQLite searches by chunk, not by task, which would read all of a task.
_SAME_CHUNK = "d.recording_id = c.recording_id AND d.chunk_id = c.chunk_id AND +d.task_id = c.task_id"
# Where no chunks overlap, nothing is joined.
_MOVED = f"""
    SELECT r.study_area, r.location, r.recorded_at, c.recording_id,
           c.chunk_id, c.task_id,
           c.start_ms + d.start_ms, c.start_ms + d.end_ms, d.label,
           d.label_name, d.score
    FROM {CHANGED} n JOIN chunk c ON c.recording_id = n.recording_id
        AND c.status = 'done'
    JOIN {{table}} d ON {_SAME_CHUNK}
    LEFT JOIN recording r ON r.recording_id = c.recording_id
    WHERE n.recording_id NOT IN (SELECT recording_id FROM overlap)"""
_SOUNDS = f"""
    SELECT r.study_area, r.location, r.recorded_at, c.recording_id,
           c.start_ms,
           c.start_ms + CAST(round(o.overlap_s * 1000) AS INTEGER) / 2,
           c.chunk_id, c.task_id, c.start_ms + d.start_ms,
           c.start_ms + d.end_ms, d.label, d.label_name, d.score
    FROM {CHANGED} n JOIN chunk c ON c.recording_id = n.recording_id
        AND c.status = 'done'
    LEFT JOIN {{table}} d ON {_SAME_CHUNK}
    LEFT JOIN overlap o ON o.recording_id = c.recording_id
        AND o.chunk_id = c.chunk_id
    LEFT JOIN recording r ON r.recording_id = c.recording_id
    WHERE n.recording_id IN (SELECT recording_id FROM overlap)
    ORDER BY c.recording_id, c.start_ms, {_END_MS}, c.chunk_id, d.start_ms, d.end_ms, d.label, d.score"""
_VALUES = f"""(study_area, location, recorded_at, recording_id, {", ".join(Sound._fields)})
    VALUES ({", ".join("?" * (4 + len(Sound._fields)))})"""


def follow_changes(db: sqlite3.Connection) -> None:
    """Start to collect the recordings that change."""
    db.execute("CREATE TEMP TABLE IF NOT EXISTS changed_recording (recording_id TEXT PRIMARY KEY) WITHOUT ROWID")


def note_changes(db: sqlite3.Connection, tables: Iterable[str], task_id: int) -> None:
    """Note the recordings of a task in some tables, which were written or are about to be removed."""
    for table in tables:
        recordings = f"SELECT DISTINCT recording_id FROM {table} WHERE task_id = ?"
        db.execute(f"INSERT OR IGNORE INTO {CHANGED} {recordings}", (task_id,))


def settle_overlaps(db: sqlite3.Connection) -> None:
    """Write, for the recordings that have changed, their detections and rarities and what their chunks share."""
    changed = f"recording_id IN (SELECT recording_id FROM {CHANGED})"
    db.execute(f"DELETE FROM overlap WHERE {changed}")
    db.execute(_OVERLAPS)
    for table in ("detection", "rarity"):
        db.execute(f"DELETE FROM recording_{table} WHERE {changed}")
        if db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone():
            db.execute(f"INSERT INTO recording_{table} {_MOVED.format(table=table)}")
            db.executemany(f"INSERT INTO recording_{table} {_VALUES}", _read_sounds(db, table))
    db.execute(f"DELETE FROM {CHANGED}")


def _read_sounds(db: sqlite3.Connection, table: str) -> Iterator[Row]:
    for recording, rows in groupby(db.execute(_SOUNDS.format(table=table)), key=itemgetter(0, 1, 2, 3)):
        for sound in join_overlaps(_read_chunks(rows)):
            yield (*recording, *sound)


def _read_chunks(rows: Iterable[Row]) -> Iterator[Heard]:
    for (start_ms, joint_ms, chunk_id, task_id), rows_of_chunk in groupby(rows, key=itemgetter(4, 5, 6, 7)):
        sounds = [Sound._make((*row[8:], chunk_id, task_id)) for row in rows_of_chunk if row[8] is not None]
        yield Heard(start_ms, joint_ms, sounds)
