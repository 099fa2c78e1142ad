"""A run in the middle of its work, as its folder looks: tasks that run, that are done, that failed, that wait."""

from __future__ import annotations

import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path

from support.many_tasks import CHUNKS, DEVICES, write_tasks
from support.task_files import START_MS

SECONDS = 600
_SILENT, _SILENCE_S = 15, 1800
_TIMES = {
    **dict.fromkeys(("task", "attempt", "chunk", "worker"), ("started_at_ms", "ended_at_ms")),
    **dict.fromkeys(("sample", "host_sample"), ("at_ms",)),
    "device_total": ("first_at_ms", "last_at_ms"),
    "device_stretch": ("from_ms", "to_ms"),
}


def write_live_run(folder: Path, tasks: int, *, now_ms: int, waiting: int = 0, seconds: int = SECONDS) -> list[Path]:
    """Write a run of so many tasks that began ``seconds`` ago, and say in run.toml that more of them wait.

    Of twenty tasks one has failed, one is silent and two are done; the others run, some with an alert.
    """
    chance = random.Random(7)
    files = write_tasks(folder, range(tasks), seconds)
    for index, path in enumerate(files):
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("BEGIN")
            _move(db, now_ms - START_MS - seconds * 1000)
            _tell(db, index, chance, now_ms)
            db.execute("UPDATE task SET shard_index = ?, shard_count = ?", (index, tasks + waiting))
            db.execute("COMMIT")
        if index % 20 == _SILENT:
            os.utime(path, (now_ms / 1000 - _SILENCE_S,) * 2)
    array = f"[array]\nfirst = 0\nstep = 1\ncount = {tasks + waiting}\n"
    (folder / "run.toml").write_text(f'[run]\nsource = ["/data/manifest.csv"]\n\n{array}')
    return files


def _move(db: sqlite3.Connection, by_ms: int) -> None:
    for table, columns in _TIMES.items():
        db.execute(f"UPDATE {table} SET {', '.join(f'{column} = {column} + {by_ms}' for column in columns)}")


def _tell(db: sqlite3.Connection, index: int, chance: random.Random, now_ms: int) -> None:
    kind = index % 20
    if kind in (4, 11):
        return  # done
    left = chance.randrange(CHUNKS // 10, CHUNKS * 7 // 10)
    rows = "rowid > (SELECT max(rowid) FROM chunk) - ?"
    db.execute(f"UPDATE chunk SET status = 'pending', device_id = NULL, audio_s = 30.0 WHERE {rows}", (left,))
    if kind == 7:
        db.execute("UPDATE task SET exit_code = 1, verdict = 'failed'")
        db.execute("UPDATE chunk SET status = 'failed', error_class = 'bad_audio' WHERE status = 'pending'")
        return
    db.execute("UPDATE task SET ended_at_ms = NULL, exit_code = NULL, verdict = NULL")
    db.execute("DELETE FROM attempt WHERE attempt_id > ?", (CHUNKS - left,))
    db.execute(
        """INSERT INTO attempt (task_id, attempt_id, recording_id, chunk_id, try_number, device_id, started_at_ms)
           SELECT task_id, 100000 + rowid, recording_id, chunk_id, 1,
                  (SELECT device_id FROM device WHERE device_index = c.rowid % ?), ?
           FROM chunk c WHERE status = 'pending' ORDER BY rowid LIMIT ?""",
        (DEVICES, now_ms - 20_000, DEVICES),
    )
    if kind == _SILENT:
        _move(db, -1000 * _SILENCE_S)
    if kind == 2:
        db.execute(
            """INSERT INTO alert SELECT task_id, device_id, 'thermal', 'warning', ?, NULL, 86, 83,
               'device 2 is at 86 °C, above 83 °C' FROM device WHERE device_index = 2""",
            (now_ms - 190_000,),
        )
