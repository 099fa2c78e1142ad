"""The files for BADC, key by key: chunks, telemetry log, resume summary; and ids that try to leave the folder."""

from __future__ import annotations

import io
import json
import logging
import sqlite3
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.model import Reading
from rooms.report import ExportOrder, export
from rooms.store import chunk_file
from support.task_files import START_MS, TaskFile

STATES = {"a": "done", "b": "failed", "c": "pending", "d": "done", "e": "poison", "f": "skipped"}
READING = Reading(utilization_percent=80, memory_used_bytes=5 * 2**30)


def task_file(folder: Path, **changes: Any) -> Path:
    return TaskFile(folder, **{"states": STATES, "reading": READING, **changes}).write()


def change(database: Path, *statements: str) -> None:
    with closing(sqlite3.connect(database)) as db, db:
        for sql in statements:
            db.execute(sql)


def on_the_device(database: Path) -> None:
    """Say that all the work was done on the task's device, which TaskFile leaves open."""
    change(
        database, *(f"UPDATE {table} SET device_id = (SELECT device_id FROM device)" for table in ("attempt", "chunk"))
    )


def badc(database: Path, folder: Path, **more: Any) -> dict[str, Any]:
    """Export and return every JSON document below the folder, by its path."""
    export(ExportOrder(database, "badc", folder, **more), io.BytesIO())
    return {str(p.relative_to(folder)): json.loads(p.read_text(encoding="ascii")) for p in folder.rglob("*.json")}


def log_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "telemetry.jsonl").read_text(encoding="ascii").splitlines()]


# --- chunks -----------------------------------------------------------------------------------------------------------


def test_a_chunk_that_is_done_is_a_file_of_the_shape_that_badc_aggregates(tmp_path: Path) -> None:
    database = task_file(tmp_path, labels=("LOUD", "SOFT"))
    found = badc(database, tmp_path / "out")
    detection = {"timestamp_ms": 100, "end_ms": 600, "confidence": 0.9}
    assert found["rec/a.json"] == {
        "chunk_id": "a",
        "recording_id": "rec",
        "source_path": "a.wav",
        "status": "ok",
        "detections": [
            {**detection, "label": "LOUD", "label_code": "LOUD", "label_name": "LOUD sound"},
            {**detection, "label": "SOFT", "label_code": "SOFT", "label_name": "SOFT sound"},
        ],
        "chunk": {"start_ms": 0, "end_ms": 30_000, "overlap_ms": None, "sha256": None, "notes": None},
        "runner": "demo",
    }


def test_done_and_failed_chunks_have_files_and_what_was_not_done_has_none(tmp_path: Path) -> None:
    found = badc(task_file(tmp_path), tmp_path / "out")
    statuses = {path: found[path]["status"] for path in found if path.startswith("rec/")}
    assert statuses == {"rec/a.json": "ok", "rec/b.json": "failed", "rec/d.json": "ok", "rec/e.json": "failed"}
    assert found["rec/b.json"]["detections"] == []
    assert found["rec/b.json"]["error_class"] == "bad_audio"
    assert found["rec/b.json"]["error"] == "b: no luck"


def test_a_chunk_in_which_nothing_was_heard_says_so(tmp_path: Path) -> None:
    found = badc(task_file(tmp_path, labels=()), tmp_path / "out")
    assert (found["rec/a.json"]["status"], found["rec/a.json"]["detections"]) == ("no_detections", [])


def test_every_chunk_has_its_own_detections_in_the_order_of_time(tmp_path: Path) -> None:
    database = task_file(tmp_path, states={"a": "done", "aa": "done", "é": "done", "z": "done"}, labels=())
    change(
        database,
        "INSERT INTO detection SELECT task_id, 'rec', 'z', 500, 600, 'LATE', NULL, NULL FROM task",
        "INSERT INTO detection SELECT task_id, 'rec', 'é', 1, 2, 'E', NULL, 0.5 FROM task",
        "INSERT INTO detection SELECT task_id, 'rec', 'z', 5, 6, 'EARLY', NULL, 0.5 FROM task",
        "INSERT INTO detection SELECT task_id, 'rec', 'nobody', 1, 2, 'X', NULL, 0.5 FROM task",
    )
    found = badc(database, tmp_path / "out")
    heard = {p: [d["label"] for d in doc["detections"]] for p, doc in found.items() if p.startswith("rec/")}
    assert heard == {"rec/a.json": [], "rec/aa.json": [], "rec/é.json": ["E"], "rec/z.json": ["EARLY", "LATE"]}
    assert found["rec/z.json"]["detections"][1]["confidence"] is None


# --- telemetry log ----------------------------------------------------------------------------------------------------


def test_a_try_is_a_start_line_and_an_end_line_with_the_device_and_its_nearest_readings(tmp_path: Path) -> None:
    database = task_file(tmp_path, states={"a": "done"}, samples=6)
    on_the_device(database)
    change(database, f"UPDATE sample SET utilization_percent = (at_ms - {START_MS}) / 1000")
    change(database, f"UPDATE attempt SET started_at_ms = {START_MS + 1400}, ended_at_ms = {START_MS + 3600}")
    badc(database, tmp_path / "out")
    start, end = log_lines(tmp_path / "out")
    reading = {"index": 0, "memory_used_mb": 5120, "memory_total_mb": 16384}
    before, after = {**reading, "utilization": 1}, {**reading, "utilization": 4}
    assert start == {
        "chunk_id": "a",
        "gpu_index": 0,
        "gpu_name": "Tesla V100",
        "status": "start",
        "timestamp": "2027-01-15T08:00:01.400+00:00",
        "finished_at": None,
        "runtime_s": None,
        "details": {
            "attempt": 1, "recording_id": "rec", "runner": "demo", "gpu_metrics": {"before": before, "after": None}
        },
    }  # fmt: skip
    assert end == {
        **start,
        "status": "success",
        "timestamp": "2027-01-15T08:00:03.600+00:00",
        "finished_at": "2027-01-15T08:00:03.600+00:00",
        "runtime_s": 2.2,
        "details": {
            **start["details"],
            "output": str(tmp_path / "out" / "rec" / "a.json"),
            "gpu_metrics": {"before": before, "after": after},
        },
    }
    assert datetime.fromisoformat(end["timestamp"]).timestamp() * 1000 == START_MS + 3600


def test_a_try_that_failed_says_why_and_one_that_was_cut_short_has_no_end(tmp_path: Path) -> None:
    database = task_file(tmp_path, states={"b": "failed", "c": "done"})
    change(database, "UPDATE attempt SET ended_at_ms = NULL, outcome = NULL WHERE chunk_id = 'c'")
    badc(database, tmp_path / "out")
    lines = [(line["chunk_id"], line["status"]) for line in log_lines(tmp_path / "out")]
    assert sorted(lines) == [("b", "failure"), ("b", "start"), ("c", "start")]
    failure = log_lines(tmp_path / "out")[-1]["details"]
    assert (failure["error_class"], failure["stderr"]) == ("bad_audio", "b: no luck")


def test_lines_come_in_the_order_of_time(tmp_path: Path) -> None:
    database = task_file(tmp_path, states={"a": "done", "b": "done"})
    change(database, f"UPDATE attempt SET ended_at_ms = {START_MS + 9000} WHERE chunk_id = 'a'")
    badc(database, tmp_path / "out")
    times = [line["timestamp"] for line in log_lines(tmp_path / "out")]
    assert times == sorted(times)
    assert [line["chunk_id"] for line in log_lines(tmp_path / "out")] == ["a", "b", "b", "a"]


@pytest.mark.parametrize(("distance_ms", "found"), [(15_000, True), (15_001, False)])
def test_a_reading_that_is_far_away_in_time_is_not_taken_for_one(tmp_path: Path, distance_ms: int, found: bool) -> None:
    database = task_file(tmp_path, states={"a": "done"}, samples=1)
    on_the_device(database)
    change(database, f"UPDATE attempt SET started_at_ms = {START_MS}, ended_at_ms = {START_MS + distance_ms}")
    badc(database, tmp_path / "out")
    metrics = log_lines(tmp_path / "out")[1]["details"]["gpu_metrics"]
    assert metrics["before"]["utilization"] == 80
    assert (metrics["after"] is not None) is found


def test_without_a_device_or_a_value_there_is_null_and_never_zero(tmp_path: Path) -> None:
    badc(task_file(tmp_path / "cpu", states={"a": "done"}, devices=0), tmp_path / "out")
    line = log_lines(tmp_path / "out")[1]
    assert (line["gpu_index"], line["gpu_name"]) == (None, None)
    assert line["details"]["gpu_metrics"] == {"before": None, "after": None}
    silent = task_file(tmp_path / "gpu", states={"a": "done"}, reading=Reading(power_w=1.0))
    on_the_device(silent)
    badc(silent, tmp_path / "out")
    before = log_lines(tmp_path / "out")[1]["details"]["gpu_metrics"]["before"]
    assert before == {"index": 0, "utilization": None, "memory_used_mb": None, "memory_total_mb": 16384}


# --- resume summary ---------------------------------------------------------------------------------------------------


def test_the_resume_summary_says_how_each_chunk_ended_in_badcs_words(tmp_path: Path) -> None:
    database = task_file(tmp_path)
    on_the_device(database)
    change(database, "UPDATE chunk SET attempts = 3 WHERE chunk_id IN ('d', 'e')")
    summary = badc(database, tmp_path / "out")["telemetry.jsonl.summary.json"]
    assert summary["telemetry_log"] == str(tmp_path / "out" / "telemetry.jsonl")
    assert summary["workers"] == {"gpu1/gpu-0": {"success": 2, "failure": 2, "retries": 2, "failed_retries": 2}}
    assert {chunk: state["status"] for chunk, state in summary["jobs"].items()} == {
        "a": "success", "b": "failure", "d": "success", "e": "failure"
    }  # fmt: skip
    assert summary["jobs"]["d"] == {
        "status": "success",
        "attempts": 3,
        "retries": 2,
        "output": str(tmp_path / "out" / "rec" / "d.json"),
        "worker": "gpu1/gpu-0",
        "recording_id": "rec",
    }
    assert summary["jobs"]["b"]["error"] == "b: no luck"


def test_a_job_without_chunks_gives_a_valid_summary_and_an_empty_log(tmp_path: Path) -> None:
    assert badc(task_file(tmp_path, states={}), tmp_path / "out") == {
        "telemetry.jsonl.summary.json": {
            "telemetry_log": str(tmp_path / "out" / "telemetry.jsonl"),
            "workers": {},
            "jobs": {},
        }
    }
    assert log_lines(tmp_path / "out") == []


def test_a_chunk_id_of_two_recordings_is_in_the_summary_once_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = task_file(tmp_path, states={"a": "failed", "b": "done"})
    change(
        database,
        "UPDATE detection SET recording_id = 'other', chunk_id = 'a' WHERE chunk_id = 'b'",
        "UPDATE chunk SET recording_id = 'other', chunk_id = 'a' WHERE chunk_id = 'b'",
    )
    with caplog.at_level(logging.WARNING):
        found = badc(database, tmp_path / "out")
    assert {"rec/a.json", "other/a.json"} <= set(found)
    state = found["telemetry.jsonl.summary.json"]["jobs"]["a"]
    assert (state["status"], state["recording_id"]) == (
        "success",
        "other",
    )  # what is done is worth more than what is not
    assert "chunks of other recordings with the same id are left out (1)" in caplog.text


# --- ids as paths -----------------------------------------------------------------------------------------------------


def test_ids_are_paths_as_badc_makes_them(tmp_path: Path) -> None:
    assert chunk_file("rec", "rec_chunk_0") == Path("rec/rec_chunk_0.json")
    assert chunk_file("Area/Station 1/A_20240601", "c1") == Path("Area/Station 1/A_20240601/c1.json")
    assert chunk_file("Area/A", "Area/A") == Path("Area/A/Area/A.json")  # of a folder: the chunk is the recording
    assert chunk_file("100%", "50%.x") == Path("100%/50%.x.json")


EVIL = [
    "..",
    "../..",
    "../../evil",
    "/etc/passwd",
    "a/../../../b",
    "./x",
    "",
    "/",
    "//",
    ".",
    "x/..",
    "x//y",
    "a\0b",
    "~root",
]


@pytest.mark.parametrize("evil", EVIL)
def test_no_id_leaves_the_folder(tmp_path: Path, evil: str) -> None:
    for path in (chunk_file(evil, "c"), chunk_file("r", evil), chunk_file(evil, evil)):
        assert not path.is_absolute()
        assert ".." not in path.parts
        assert (tmp_path / path).resolve().is_relative_to(tmp_path)
        assert path.suffix == ".json"


def test_evil_ids_are_written_inside_with_their_true_names(tmp_path: Path) -> None:
    evil = ["../../up", "/abs/olute", "q\"'<script>\n\u2028"]
    database = task_file(tmp_path / "task", states={"a": "done", "b": "done", "c": "done"}, labels=())
    for chunk_id, name in zip("abc", evil, strict=True):
        with closing(sqlite3.connect(database)) as db, db:
            db.execute("UPDATE attempt SET recording_id = ?, chunk_id = ? WHERE chunk_id = ?", (name, name, chunk_id))
            db.execute("UPDATE chunk SET recording_id = ?, chunk_id = ? WHERE chunk_id = ?", (name, name, chunk_id))
    before = sorted(tmp_path.rglob("*"))
    found = badc(database, tmp_path / "deep" / "out")
    assert sorted(document["chunk_id"] for document in found.values() if "chunk_id" in document) == sorted(evil)
    assert sorted({line["chunk_id"] for line in log_lines(tmp_path / "deep" / "out")}) == sorted(evil)
    strangers = {p for p in tmp_path.rglob("*") if not p.is_relative_to(tmp_path / "deep")} - set(before)
    assert strangers == set()


def test_a_name_too_long_for_a_file_is_cut_and_stays_its_own(tmp_path: Path) -> None:
    one, other = "é" * 300 + "1", "é" * 300 + "2"
    paths = {chunk_file("r", one), chunk_file("r", other)}
    assert len(paths) == 2
    for path in paths:
        assert len(path.name.encode()) <= 255
        (tmp_path / path.name).touch()


ids = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.text("/.%2F0aE", max_size=8)


@given(st.tuples(ids, ids), st.tuples(ids, ids))
def test_two_chunks_of_a_source_never_share_a_file(one: tuple[str, str], other: tuple[str, str]) -> None:
    # A chunk that carries its recording's name comes from a folder, where all do.
    if one != other and (one[0] == one[1]) == (other[0] == other[1]):
        assert chunk_file(*one) != chunk_file(*other)
