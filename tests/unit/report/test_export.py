"""Exports as whole files: tables, detections in the time of the recordings, and the files for BADC."""

import io
import json
import os
import sqlite3
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.model import Reading, parse_pattern, parse_time_zone
from rooms.report import ExportOrder, export, form_of
from rooms.root import BadInput, DatabaseProblem
from rooms.store import chunk_file
from support.cases import read_data
from support.databases import change, join_again
from support.filesystems import small_disk
from support.labelled_job import LABELLED, make_labelled
from support.pages import tree
from support.task_files import START_MS, TaskFile, merge_run

STATES = {"a": "done", "b": "failed", "c": "pending", "d": "done", "e": "poison", "f": "skipped"}
INSERT = "INSERT INTO recording (task_id, recording_id, source_path, study_area, location, recorded_at)"
NASTY = "q\"'<script>\n\u2028"


def say(folder, order):
    """Export; return the files, the notes and the progress as text."""
    stdout, heard = io.BytesIO(), []
    files, notes = export(order, stdout, lambda *reported: heard.append(reported[: 2 if reported[2] is None else 3]))
    lines = [f"{file.path}: {file.rows} rows of {file.table}" for file in files]
    lines += [f"note: {note}" for note in notes] + [f"progress: {heard}"]
    shown = stdout.getvalue().decode()
    return "\n".join([*lines, *([f"--- stdout\n{shown}"] if shown else [])]).replace(str(folder), "")


def test_the_files_for_badc(tmp_path, pages):
    """Chunks as it aggregates them, a line for the start and the end of each try, and how each chunk ended.

    Only chunks know which detections are wanted.
    """
    reading = Reading(utilization_percent=80, memory_used_bytes=5 * 2**30)
    database = TaskFile(tmp_path, states=STATES, reading=reading, labels=("LOUD", "SOFT"), samples=6).write()
    at = f"{START_MS} +"
    on_device = (f"UPDATE {table} SET device_id = (SELECT device_id FROM device)" for table in ("attempt", "chunk"))
    for sql in (
        *on_device, f"UPDATE sample SET utilization_percent = (at_ms - {START_MS}) / 1000",
        f"UPDATE attempt SET started_at_ms = {at} 1400, ended_at_ms = {at} 3600 WHERE chunk_id = 'a'",
        f"UPDATE attempt SET started_at_ms = {at} 20000, ended_at_ms = {at} 20001 WHERE chunk_id = 'b'",  # 15 s later
        f"UPDATE attempt SET started_at_ms = {at} -1, ended_at_ms = NULL, outcome = NULL WHERE chunk_id = 'd'",
        "UPDATE chunk SET attempts = 3 WHERE chunk_id IN ('d', 'e')",
        "INSERT INTO detection SELECT task_id, 'rec', 'd', 5, 6, 'EARLY', NULL, NULL FROM task",
        *(f"INSERT INTO detection SELECT task_id, 'rec', '{left}', 1, 2, 'X', NULL, 0.5 FROM task"
          for left in ("A", "B", "c", "c2", "c3", "nobody")),
        "DELETE FROM detection WHERE chunk_id = 'a' AND label = 'SOFT'",
    ):  # fmt: skip
        change(database, sql)
    said = {"said.txt": say(tmp_path, ExportOrder(database, "badc", tmp_path / "out"))}
    said |= {name: text.replace(str(tmp_path), "") for name, text in tree(tmp_path / "out").items()}
    for name, wanted in {"sure": {"min_score": 0.5}, "early": {"species": ("early", "GONE")}}.items():
        said[f"{name}/said.txt"] = say(tmp_path, ExportOrder(database, "badc", tmp_path / name, **wanted))
        said |= {f"{name}/{file}": text.replace(str(tmp_path), "") for file, text in tree(tmp_path / name).items()}
    quiet = TaskFile(tmp_path / "cpu", states={"a": "done", "b": "failed"}, devices=0, labels=()).write()
    change(quiet, "UPDATE chunk SET recording_id = 'other', chunk_id = 'a' WHERE chunk_id = 'b'")
    said["cpu/said.txt"] = say(tmp_path, ExportOrder(quiet, "badc", tmp_path / "none"))
    said |= {f"cpu/{name}": text.replace(str(tmp_path), "") for name, text in tree(tmp_path / "none").items()}
    for name in (name for name in said if name.endswith((".json", ".summary"))):
        said[name] = json.dumps(json.loads(said[name]), indent=1, ensure_ascii=False)
    read_by_badc = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("*.json")]  # as it walks a folder
    assert sorted(one["chunk_id"] for one in read_by_badc) == ["a", "b", "d", "e"]
    pages(said)


def test_files_in_the_folder_that_badc_would_take_for_chunks_are_counted(tmp_path):
    order = ExportOrder(TaskFile(tmp_path, states={"a": "done", "b": "failed"}).write(), "badc", tmp_path / "out")
    first, second = (export(order, io.BytesIO())[1] for _ in range(2))
    for name in ("old.json", "chunks/rec/old.json"):
        (tmp_path / "out" / name).touch()
    [note] = set(export(order, io.BytesIO())[1]) - set(first)
    assert second == first and note.startswith(f"2 more .json in {tmp_path / 'out'}, perhaps from an earlier export")


def test_labels_in_three_formats_leave_out_what_their_readers_refuse(job, tmp_path, pages):
    """A recording without detections has a file, one that failed has none; names of species are HawkEars' own."""
    data = tmp_path / "HawkEars" / "data"
    data.mkdir(parents=True)
    (data / "classes.csv").write_text(
        "Name,Code,AltName,AltCode\nSora,SORA,Porzana carolina,sora\n\nOwl,BADO,Strix,b\nNoise,Noise,,\nRobin,AMRO,,\n"
    )
    (data / "taxonomy.csv").write_text("model_code,name,code,alt_name,alt_code\nBADO,,BAOW,Strix varia,brdowl\n")
    settings = json.dumps({"hawkears_root": str(data.parent)})
    change(job, "INSERT INTO task_meta SELECT task_id, 'settings', ? FROM task", settings)
    with closing(sqlite3.connect(job)) as db, db:
        db.executescript(read_data("odd_labels.sql"))
        join_again(db)
    out = tmp_path / "out"
    (out / "raven").mkdir(parents=True)
    orders = [ExportOrder(job, form, out / form) for form in ("hawkears", "audacity", "raven")]
    orders.append(ExportOrder(job, "hawkears", out / "some", species=("amro",), min_score=0.5))
    orders.append(ExportOrder(job, "audacity", out / "none", species=("gone",)))
    said = [say(tmp_path, order) for order in orders]
    another = data.parent.rename(tmp_path / "copied")
    orders[3] = orders[3]._replace(output=out / "copied", hawkears_root=str(another))
    said.append(say(tmp_path, orders[3]))
    data.mkdir(parents=True)
    os.mkfifo(data / "classes.csv")  # does not block
    said.append(say(tmp_path, ExportOrder(job, "hawkears", out / "without classes", species=("Noise", "LOUD"))))
    pages({"said.txt": "\n".join(said), **tree(out)})


def test_recordings_have_names_that_tell_them_apart(tmp_path, pages):
    """As HawkEars names them where its importer understands that; tests/flow reads them back."""
    said = []
    for case, lines in LABELLED.items():
        job = tmp_path / case
        make_labelled(job, lines)
        export(ExportOrder(job, "audacity", job / "out"), None)
        said += [f"## {case}", *map(ascii, tree(job / "out"))]
    pages({"names.txt": "\n".join(said)})


def test_links_in_the_path_of_a_recording_are_followed_before_dots(job, tmp_path):
    (tmp_path / "real" / "far").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/far")
    change(job, "UPDATE chunk SET audio_path = ?", f"{tmp_path}/link/../x.wav")
    export(ExportOrder(job, "raven", tmp_path / "raven"), None)
    assert f"{tmp_path}/real/x.wav" in "".join(path.read_text() for path in (tmp_path / "raven").iterdir())


def test_labels_are_never_in_a_folder_by_halves(job, tmp_path):
    long = "x" * 250
    change(job, "UPDATE chunk SET source_path = ?, audio_path = ? WHERE chunk_id = 'c'", f"{long}.wav", f"/{long}.wav")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BadInput, match="cannot be written"):
        export(ExportOrder(job, "audacity", tmp_path / "labels"), None)
    assert sorted(tmp_path.iterdir()) == before


def test_labels_are_not_mixed_with_those_of_a_faster_export(job, tmp_path):
    theirs = tmp_path / "labels" / "scores.csv"

    def write_theirs(*_):
        theirs.parent.mkdir(exist_ok=True)
        theirs.touch()

    with pytest.raises(BadInput, match="is not empty"):
        export(ExportOrder(job, "hawkears", theirs.parent), None, write_theirs)
    assert theirs.read_text() == "" and not list(tmp_path.glob(".labels*"))


def test_labels_go_to_a_folder_that_is_a_filesystem_of_its_own(job, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        export(ExportOrder(job, "raven", disk.path), None)
        assert len(tree(disk.path)) == 4


def test_labels_are_streamed(job, tmp_path):
    rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40000)"
    change(job, f"{rows} INSERT INTO detection SELECT task_id, 'ra', 'a', i, i + 500, 'AMRO', NULL, 0.5 FROM task, n")
    for form in ("hawkears", "audacity", "raven"):
        tracemalloc.start()
        files, _ = export(ExportOrder(job, form, tmp_path / form), None)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert files[-1].rows > 40_000 and peak_bytes < 2e6, form


EVIL = ("..", "../..", "../../evil", "/etc/passwd", "a/../../../b", "./x", "", "/", "//", ".", "x/..", "x//y", "a\0b",
        "~root")  # fmt: skip


def test_no_id_leaves_the_folder(tmp_path):
    for evil in EVIL:
        for path in (chunk_file(evil, "c"), chunk_file("r", evil), chunk_file(evil, evil)):
            assert not path.is_absolute() and ".." not in path.parts and path.suffix == ".json"
            assert (tmp_path / path).resolve().is_relative_to(tmp_path)
    for ids, path in {("rec", "rec_0"): "rec/rec_0", ("Area/St 1/A", "c1"): "Area/St 1/A/c1", ("A/B", "A/B"): "A/B/A/B",
                      ("100%", "50%.x"): "100%/50%.x"}.items():  # fmt: skip
        assert chunk_file(*ids) == Path(f"{path}.json")
    long = {chunk_file("r", "é" * 300 + end) for end in "12"}
    assert len(long) == 2 and all(len(path.name.encode()) <= 255 for path in long)
    database = TaskFile(tmp_path / "task", states=dict.fromkeys("abc", "done"), labels=()).write()
    names = ("../../up", "/abs/olute", NASTY)
    for chunk_id, name in zip("abc", names, strict=True):
        for table in ("attempt", "chunk"):
            sql = f"UPDATE {table} SET recording_id = ?, chunk_id = ? WHERE chunk_id = ?"
            change(database, sql, name, name, chunk_id)
    before = set(tmp_path.rglob("*"))
    export(ExportOrder(database, "badc", tmp_path / "deep" / "out"), io.BytesIO())
    made = set(tmp_path.rglob("*")) - before
    assert all(path.is_relative_to(tmp_path / "deep") for path in made)
    documents = [json.loads(path.read_text()) for path in made if path.suffix == ".json"]
    assert {one["chunk_id"] for one in documents if "chunk_id" in one} == {*names}


ids = st.text("aé\0\n", max_size=20) | st.text("/.%2F0aE", max_size=8)


@given(st.tuples(ids, ids), st.tuples(ids, ids))
def test_two_chunks_of_a_source_never_share_a_file(one, other):
    # A chunk that carries its recording's name comes from a folder, where all do.
    if one != other and (one[0] == one[1]) == (other[0] == other[1]):
        assert chunk_file(*one) != chunk_file(*other)


@pytest.fixture
def job(tmp_path):
    """A job of four recordings: two study areas, one without, and one that is in no table."""
    chunks = {"a": "done", "b": "done", "c": "done", "d": "done", "e": "failed"}
    file = TaskFile(tmp_path, states=chunks, labels=("LOUD", "SOFT"), samples=1).write()
    os.utime(file, (START_MS / 1000,) * 2)
    merge_run(tmp_path)
    target = tmp_path / "job.sqlite"
    names = {"a": ("Fort Smith", "FS-01", "2022-05-01T06:00:00"), "b": ("../Edéhzhíe", None, "2022-05-02"),
             "c": (None, "L", None)}  # fmt: skip
    for chunk, (area, place, at) in names.items():
        for table in ("chunk", "detection", "attempt"):
            change(target, f"UPDATE {table} SET recording_id = 'r{chunk}' WHERE chunk_id = '{chunk}'")
        values = (f"r{chunk}", f"/data/{chunk}.wav", area, place, at)
        change(target, f"{INSERT} SELECT task_id, ?, ?, ?, ?, ? FROM task", *values)
    change(target, "UPDATE recording SET recorded_on = '2022-05-03' WHERE recording_id IN ('ra', 'rc')")
    change(target, "UPDATE recording SET location_name = 'Lake'")
    change(target, "UPDATE detection SET score = 0.5 WHERE label = 'SOFT'")
    return target


def test_tables_and_detections(job, tmp_path, pages):
    out = tmp_path / "out"
    (out / "folder").mkdir(parents=True)
    (out / "areas").mkdir()
    for n in range(21):
        (out / "areas" / f"old{n:02}.csv").touch()
    for other in ("areas/other.json", "folder/other.csv"):
        (out / other).touch()
    pattern = (parse_pattern("**/{study_area}.wav"),)
    orders = {
        "tables": ExportOrder(job, "csv", out / "tables", ("chunk", "task", "chunk")),
        "a table into a folder": ExportOrder(job, "json", out / "folder", ("device",)),
        "a table as lines": ExportOrder(job, "jsonl", out / "device.jsonl", ("device",)),
        "a table to stdout": ExportOrder(job, "csv", None, ("chunk",)),
        "detections to stdout": ExportOrder(job, "csv", None),
        "detections in Yellowknife": ExportOrder(job, "csv", None, time_zone=parse_time_zone("America/Yellowknife")),
        "detections into a folder": ExportOrder(job, "csv", out / "folder"),
        "detections into a file": ExportOrder(job, "json", out / "heard.json"),
        "some species": ExportOrder(job, "csv", None, species=("SOFT", "NOBODY", "GONE")),
        "sure ones": ExportOrder(job, "csv", None, min_score=0.9),
        "no such species": ExportOrder(job, "csv", None, species=("GONE",)),
        "by study area, beside other files": ExportOrder(job, "csv", out / "areas", by_study_area=True),
        "by study area": ExportOrder(job, "json", out / "json", by_study_area=True),
        "by study area of other patterns": ExportOrder(job, "csv", out / "read", by_study_area=True, patterns=pattern),
    }  # fmt: skip
    assert len(export(ExportOrder(job, "csv", tmp_path / "all", ("all",)), io.BytesIO())[0]) > 30
    said = [f"## {name}\n{say(tmp_path, order)}" for name, order in orders.items()]
    (out / "areas" / "old20.csv").unlink()
    said.append(f"## 20 other files\n{say(tmp_path, orders['by study area, beside other files'])}")
    for n in range(19):
        (out / "areas" / f"old{n:02}.csv").unlink()
    TaskFile(tmp_path, index=1, states={"x": "done"}).write()
    said.append(f"## one other file, and a new task\n{say(tmp_path, orders['by study area, beside other files'])}")
    said.append(f"## a table, and a new task\n{say(tmp_path, orders['a table as lines'])}")
    change(change(job, "DELETE FROM detection"), "UPDATE chunk SET status = 'done'")
    said.append(f"## nothing was heard\n{say(tmp_path, ExportOrder(job, 'csv', None))}")
    files = {f"files/{name}": text for name, text in tree(out).items() if text and not name.startswith("tables/")}
    pages({"said.txt": "\n".join(said), **files})


def test_options_that_do_not_go_together_are_answered(job, tmp_path, pages):
    (tmp_path / "there").touch()
    said = []

    def refuse(name, *order, **more):
        with pytest.raises((BadInput, DatabaseProblem)) as caught:
            export(ExportOrder(*order, **more), io.BytesIO())
        error = caught.value
        said.append(f"## {name}\n{error.what}\n  why: {error.why}\n  try: {error.fix}".replace(str(tmp_path), ""))

    refuse("all mistakes", job, "badc", job, ("chunk",), True, ("",), float("nan"))
    refuse("detections and a table", job, "csv", None, ("chunk",), species=("A",), min_score=0.5)
    refuse("detections for BADC", job, "badc", tmp_path / "x", by_study_area=True)
    refuse("areas for Audacity", job, "audacity", tmp_path / "x", by_study_area=True)
    refuse("a table for Raven", job, "raven", tmp_path / "x", ("chunk",))
    refuse("labels to stdout", job, "hawkears", None)
    refuse("labels into a file", job, "audacity", tmp_path / "there")
    refuse("labels beside other files", job, "raven", tmp_path)
    refuse("labels of a task", next((tmp_path / "tasks").iterdir()), "hawkears", tmp_path / "x")
    refuse("an empty species", job, "csv", None, species=("A", ""))
    refuse("two tables to stdout", job, "csv", None, ("chunk", "task"))
    refuse("areas into a file", job, "csv", tmp_path / "a b.CSV", by_study_area=True)
    refuse("all into a file that is there", job, "csv", tmp_path / "there", ("all",))
    refuse("a table that is none", job, "csv", None, ("chunks",))
    refuse("a task", next((tmp_path / "tasks").iterdir()), "csv", None)
    sql = f"{INSERT} SELECT task_id, ?, 'x', ?, NULL, NULL FROM task"
    with closing(sqlite3.connect(job)) as db, db:
        db.executemany(sql, [(f"x{n}", f"area {n:04}") for n in range(997)])
    order = ExportOrder(job, "csv", tmp_path / "many", by_study_area=True)
    assert len(export(order, io.BytesIO())[0]) == 1 + 1000
    change(job, sql, "y", "area y")
    refuse("too many areas", job, "csv", tmp_path / "many", by_study_area=True)
    pages({"errors.txt": "\n".join(said)})
    forms = [form_of(Path(name), several=False) for name in ("a.CSV", "a.json", "a.jsonl", "a.PARQUET", "a")]
    assert forms == ["csv", "json", "jsonl", "parquet", "csv"]
    assert not (tmp_path / "x").exists()


def test_a_file_with_an_unknown_ending_is_refused_and_a_folder_may_have_any_name(tmp_path):
    (tmp_path / "run.1").mkdir()
    assert [form_of(Path("v1.2"), several=True), form_of(tmp_path / "run.1", several=False)] == ["csv", "csv"]
    with pytest.raises(BadInput) as caught:
        form_of(Path("a b.xlsx"), several=False)
    assert caught.value.what == "--out a b.xlsx has an unknown ending"
    assert caught.value.why == "known endings: .csv, .json, .jsonl, .parquet"
    assert caught.value.fix == "--out 'a b.csv'   (or --format csv)"
