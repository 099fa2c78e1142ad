"""The summary from which ``badc infer run --resume-summary`` and ``--resume-completed`` go on."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from badcjobs.store.exports.badc_chunks import finished
from badcjobs.store.exports.badc_paths import chunk_file
from badcjobs.store.exports.fresh_file import fresh_file
from badcjobs.store.exports.text import as_text
from badcjobs.store.exports.window import Window

log = logging.getLogger(__name__)

_CHUNKS = """chunk c LEFT JOIN task t USING (task_id) LEFT JOIN device d ON d.device_id = c.device_id"""
_WORKER = """t.node || '/' || CASE WHEN c.device_id IS NULL THEN 'cpu'
                                   ELSE 'gpu-' || coalesce(d.device_index, d.token, '?') END"""


def write_resume_summary(db: sqlite3.Connection, folder: Path, telemetry: Path, window: Window) -> tuple[Path, int]:
    """Write, next to the telemetry log, how every chunk ended; return the file and how many chunks are in it."""
    target = telemetry.with_name(telemetry.name + ".summary.json")  # the name that BADC derives from the log's
    written = 0
    with fresh_file(target) as out, as_text(out) as text:
        text.write(f'{{"telemetry_log": {json.dumps(str(telemetry))},\n')
        text.write(f'"workers": {json.dumps(_workers(db, window))},\n"jobs": {{')
        for written, (chunk_id, state) in enumerate(_jobs(db, folder, window), 1):
            text.write(f"{',' if written > 1 else ''}\n{json.dumps(chunk_id)}: {json.dumps(state)}")
        text.write("\n}}\n")
    return target, written


def _workers(db: sqlite3.Connection, window: Window) -> dict[str, dict[str, int]]:
    rows = db.execute(
        f"""SELECT {_WORKER} AS worker, sum(c.status = 'done'), sum(c.status != 'done'),
                   sum((c.status = 'done') * max(c.attempts - 1, 0)), sum((c.status != 'done') * max(c.attempts - 1, 0))
            FROM {_CHUNKS} WHERE {finished(window)} GROUP BY worker ORDER BY worker"""
    )
    names = ("success", "failure", "retries", "failed_retries")
    return {worker: dict(zip(names, counts, strict=True)) for worker, *counts in rows}


def _jobs(db: sqlite3.Connection, folder: Path, window: Window) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield each chunk id once: BADC keeps this list by chunk id alone."""
    rows = db.execute(
        f"""SELECT c.chunk_id, c.recording_id, c.status, c.attempts, c.error, {_WORKER}
            FROM {_CHUNKS} WHERE {finished(window)} ORDER BY c.chunk_id, c.status != 'done', c.recording_id"""
    )
    last, hidden = None, 0
    for chunk_id, recording_id, status, attempts, error, worker in rows:
        if chunk_id == last:
            hidden += 1
            continue
        last = chunk_id
        if status == "done":
            output = str(folder / chunk_file(recording_id, chunk_id))
            state = {"status": "success", "attempts": attempts, "retries": max(attempts - 1, 0), "output": output}
        else:
            state = {"status": "failure", "attempts": attempts, "error": error}
        yield chunk_id, {**state, "worker": worker, "recording_id": recording_id}
    if hidden:
        log.warning("BADC's resume summary has one entry per chunk id: it leaves out %d chunks whose id another "
                    "recording has too, and BADC would do them again", hidden)  # fmt: skip
