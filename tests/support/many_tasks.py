"""Task databases by the thousand: one is written and published as a real task does it, the others are made from it."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from rooms.model import TaskKey, stable_id
from rooms.store import TABLES, columns_of, move_into_place, prepare_seal
from support.story import JOB_ID, Story, write_story

DEVICES, SECONDS, CHUNKS = 4, 3600, 240  # an hour of a node with four devices at 1 Hz: 14,400 samples


def write_tasks(folder: Path, tasks: range, seconds: int = SECONDS) -> list[Path]:
    """Write one sealed task database for each array index into ``folder``/tasks."""
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    pause_s = seconds * DEVICES / CHUNKS - 0.3  # as long as a chunk takes
    story = Story(
        node="template", devices=DEVICES, workers=1, chunks=(30.0,) * CHUNKS, prepare_s=0.0, start_up_s=0.0, tick_s=1.0,
        pause_s=pause_s, end_s=pause_s, species=[(f"SP{n:02d}", "A species") for n in range(4)],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as local:
        template = write_story(Path(local), story)
        return [_write_variant(template, index, folder / "tasks") for index in tasks]


def _write_variant(template: Path, index: int, folder: Path) -> Path:
    """Give the template's rows another task, other devices and other recordings, and seal them."""
    key = TaskKey(JOB_ID, index, 0, f"gpu{index % 44}")
    copy = Path(shutil.copyfile(template, template.with_name("variant.sqlite")))
    other = {
        "task_id": str(key.task_id), "recording_id": f"recording_id || '-{index:04d}'",
        "device_id": "(SELECT new FROM ids WHERE old = device_id)",
        "worker_id": "(SELECT new FROM ids WHERE old = worker_id)",
    }  # fmt: skip
    with closing(sqlite3.connect(copy, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("BEGIN")
        db.execute("CREATE TEMP TABLE ids (old INTEGER PRIMARY KEY, new INTEGER)")
        for kind in ("device", "worker"):
            ids = db.execute(f"SELECT {kind}_id FROM {kind}").fetchall()
            db.executemany("INSERT INTO ids VALUES (?, ?)", [(old, stable_id(key.name, kind, old)) for (old,) in ids])
        for table in (table.name for table in TABLES if table.name != "meta"):
            changes = [f"{name} = {value}" for name, value in other.items() if name in columns_of(table)]
            db.execute(f"UPDATE {table} SET {', '.join(changes)}")
        db.execute("UPDATE task SET name = ?, array_index = ?, node = ?", (key.name, index, key.node))
        prepare_seal(db)
        db.execute("COMMIT")
    move_into_place(copy, folder / f"{key.name}.sqlite")
    return folder / f"{key.name}.sqlite"
