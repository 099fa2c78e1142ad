"""Detections on the recording's own clock, each sound once: the view against the rule in Python."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms.model import Detection
from rooms.store import JOB_TABLES, ORDERED_BY, VIEWS, create_indexes, ddl_script
from rooms.workers import Stretch, join_detections

Heard = Sequence[tuple[Stretch, Sequence[Detection]]]


@pytest.fixture(scope="module")
def db() -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.executescript(ddl_script(JOB_TABLES, ORDERED_BY))
    view = next(view for view in VIEWS if view.name == "recording_detection")
    db.execute(f"CREATE VIEW {view.name} AS {view.select()}")
    create_indexes(db, ("detection_by_chunk",))
    yield db
    db.close()


def add(db: sqlite3.Connection, recording: str, heard: Heard, status: str = "done", end_known: bool = True) -> None:
    """Write chunks of a recording as merge leaves them, and what was heard in them."""
    columns = "task_id, recording_id, chunk_id, source_path, audio_path, start_ms, end_ms, audio_s, status, attempts"
    insert = f"INSERT INTO chunk ({columns}) VALUES (1, ?, ?, '', '', ?, ?, ?, ?, 1)"
    for number, (stretch, found) in enumerate(heard):
        start_ms, end_ms, chunk = round(stretch[0] * 1000), round(stretch[1] * 1000), f"{status}{number:03d}"
        length_s = (end_ms - start_ms) / 1000
        db.execute(insert, (recording, chunk, start_ms, end_ms if end_known else None, length_s, status))
        rows = [(1, recording, chunk, d.start_ms, d.end_ms, d.label, d.label_name, d.score) for d in found]
        db.executemany("INSERT INTO detection VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)


def on_its_clock(db: sqlite3.Connection, recording: str = "rec") -> list[Detection]:
    columns = "start_ms, end_ms, label, score, label_name"
    rows = db.execute(f"SELECT {columns} FROM recording_detection WHERE recording_id = ?", (recording,))
    return in_order([Detection(*row) for row in rows])


def in_order(found: Sequence[Detection]) -> list[Detection]:
    return sorted(found, key=lambda d: (d.start_ms, d.end_ms, d.label, d.score or -1.0, d.label_name or ""))


def clear(db: sqlite3.Connection) -> None:
    for table in ("detection", "chunk", "recording"):
        db.execute(f"DELETE FROM {table}")


tenths = st.integers(0, 119)
scores = st.one_of(st.none(), st.sampled_from([0.1, 0.5, 0.9]))
detections = st.builds(
    lambda start, length, label, score: Detection(start * 100, (start + length) * 100, label, score, f"{score}"),
    tenths, st.integers(0, 40), st.sampled_from(["ROPT", "RUGR"]), scores,
)  # fmt: skip
found_in_one = st.lists(detections, max_size=8).map(lambda found: sorted(found, key=lambda d: (d.start_ms, d.end_ms)))


@given(st.lists(found_in_one, min_size=2, max_size=4), st.integers(1, 60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_neighbours_are_joined_as_pieces_are(
    db: sqlite3.Connection, found: list[list[Detection]], overlap: int
) -> None:
    """Whatever was heard, near the joint or not, several times or once."""
    clear(db)
    heard = [((12 * n - (overlap / 10 if n else 0), 12 * (n + 1)), one) for n, one in enumerate(found)]
    add(db, "rec", heard)
    assert on_its_clock(db) == in_order(join_detections(heard))


ROPT, LATE = Detection(1000, 4000, "ROPT", 0.9), Detection(26_000, 28_000, "ROPT", 0.9)
# recording: its chunks with what was heard, and the times on its clock
CASES: dict[str, tuple[Heard, list[tuple[int, int]]]] = {
    "side by side": ([((0, 30), [ROPT]), ((30, 60), [ROPT])], [(1000, 4000), (31_000, 34_000)]),
    "one within another": (
        [((0, 60), [ROPT, Detection(50_000, 52_000, "ROPT", 0.9)]), ((10, 20), [ROPT]), ((55, 90), [ROPT])],
        [(1000, 4000), (11_000, 14_000), (50_000, 52_000), (56_000, 59_000)],
    ),
    "a": ([((0, 30), [Detection(28_000, 30_000, "ROPT", 0.9)])], [(28_000, 30_000)]),
    "b": ([((24, 54), [Detection(4000, 6000, "ROPT", 0.8)])], [(28_000, 30_000)]),
    "no end": ([((0, 30), [LATE]), ((24, 54), [Detection(2000, 4000, "ROPT", 0.8)])], [(26_000, 28_000)]),
    "next to a failure": ([((0, 30), [Detection(26_000, 29_500, "ROPT", 0.9)])], [(26_000, 29_500)]),
}


def test_only_chunks_of_one_recording_that_are_done_and_overlap_are_neighbours(db: sqlite3.Connection) -> None:
    clear(db)
    for recording, (heard, _) in CASES.items():
        add(db, recording, heard, end_known=recording != "no end")
    add(db, "next to a failure", [((20, 50), [])], status="failed")
    names = "(task_id, recording_id, source_path, study_area, location, recorded_at)"
    db.execute(f"INSERT INTO recording {names} VALUES (1, 'a', 'x', 'Gameti', 'G1', '2022-05-01T06:00:00')")
    db.execute(f"INSERT INTO recording {names} VALUES (2, 'a', 'x', 'elsewhere', 'E1', NULL)")
    for recording, (_, times) in CASES.items():
        assert [(d.start_ms, d.end_ms) for d in on_its_clock(db, recording)] == times, recording
    place = "SELECT study_area, location, recorded_at FROM recording_detection WHERE recording_id = 'a'"
    assert db.execute(place).fetchall() == [("Gameti", "G1", "2022-05-01T06:00:00")], "by the task that heard it"


def test_no_step_of_the_view_looks_through_a_table_for_every_row_of_another(db: sqlite3.Connection) -> None:
    """With 100,000 chunks that would be minutes instead of seconds."""
    plan = [str(row[3]) for row in db.execute("EXPLAIN QUERY PLAN SELECT * FROM recording_detection")]
    for alias in ("d", "r", "l", "e", "t"):
        steps = [step for step in plan if step.split(" ")[1:2] == [alias] or step.startswith(f"SCAN {alias} ")]
        assert steps and all(step.startswith("SEARCH ") for step in steps), (alias, steps)
