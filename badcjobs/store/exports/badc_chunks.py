"""The files that ``badc infer aggregate`` reads: one JSON document per chunk, in BADC's own shape.

Its telemetry log and its resume summary are in badc_telemetry and badc_summary.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from badcjobs.store.exports.badc_paths import chunk_file
from badcjobs.store.exports.fresh_file import fresh_file, make_folder
from badcjobs.store.exports.tables import declared_types
from badcjobs.store.exports.window import Window

_OF_MANIFEST = ("start_ms", "end_ms", "overlap_ms", "sha256", "notes")


def write_chunks(db: sqlite3.Connection, folder: Path, window: Window, progress: Callable[[int], None]) -> int:
    """Write ``<recording_id>/<chunk_id>.json`` for every chunk that is done or failed; return how many."""
    heard = _Detections(db)
    written = 0
    for written, chunk in enumerate(_finished_chunks(db, window), 1):
        key = (chunk["recording_id"], chunk["chunk_id"])
        target = folder / chunk_file(*key)
        make_folder(target.parent)
        with fresh_file(target) as out:
            out.write(json.dumps(_document(chunk, heard.of(key))).encode())
        progress(written)
    return written


def finished(window: Window) -> str:
    """Return the SQL condition for the chunks ``c`` that BADC hears of: done or failed, in this time."""
    inside = window.overlaps("c.started_at_ms", "c.ended_at_ms") if window else "true"
    return f"c.status IN ('done', 'failed', 'poison') AND {inside}"


def _finished_chunks(db: sqlite3.Connection, window: Window) -> sqlite3.Cursor:
    there = declared_types(db, "chunk")  # what of the manifest is kept differs between versions
    manifest = ", ".join(f"c.{name}" if name in there else f"NULL AS {name}" for name in _OF_MANIFEST)
    cursor = db.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor.execute(
        f"""SELECT c.recording_id, c.chunk_id, c.source_path, c.status, c.error_class, c.error, t.engine, {manifest}
            FROM chunk c LEFT JOIN task t USING (task_id)
            WHERE {finished(window)} ORDER BY c.recording_id, c.chunk_id"""
    )


def _document(chunk: sqlite3.Row, detections: list[dict[str, object]]) -> dict[str, object]:
    done = chunk["status"] == "done"
    document = {
        "chunk_id": chunk["chunk_id"],
        "recording_id": chunk["recording_id"],
        "source_path": chunk["source_path"],
        "status": "failed" if not done else "ok" if detections else "no_detections",
        "detections": detections if done else [],
        "chunk": {name: chunk[name] for name in _OF_MANIFEST},
        "runner": chunk["engine"],
    }
    return document if done else {**document, "error_class": chunk["error_class"], "error": chunk["error"]}


class _Detections:
    """Walks through all detections beside the chunks, both in the order of their keys."""

    def __init__(self, db: sqlite3.Connection) -> None:
        rows = db.execute(
            """SELECT recording_id, chunk_id, start_ms, end_ms, label, label_name, score FROM detection
               ORDER BY recording_id, chunk_id, start_ms, end_ms, label"""
        )
        self._groups = groupby(rows, key=lambda row: (row[0], row[1]))
        self._next = next(self._groups, None)

    def of(self, key: tuple[str, str]) -> list[dict[str, object]]:
        """Return what was heard in this chunk; each call's key comes after the last one's."""
        while self._next is not None and self._next[0] < key:
            self._next = next(self._groups, None)
        if self._next is None or self._next[0] != key:
            return []
        return [_detection(*row[2:]) for row in self._next[1]]


def _detection(
    start_ms: int, end_ms: int, label: str, label_name: str | None, score: float | None
) -> dict[str, object]:
    return {
        "timestamp_ms": start_ms,
        "end_ms": end_ms,
        "label": label,
        "label_code": label,
        "label_name": label_name,
        "confidence": score,
    }
