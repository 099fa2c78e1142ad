"""Tables as CSV, JSON and Parquet: what is chosen, how it is written, what is refused."""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from rooms.model import Reading
from rooms.report import ExportedFile, ExportOrder, export
from rooms.root import BadInput, DatabaseProblem, SystemClock
from rooms.store import TABLES, DetectionFilter, MergeOrder, columns_of, list_tables, merge, open_sealed
from support.task_files import START_MS, TaskFile, make_job

NASTY = 'a"b,c\r\nd <script>é\u2028漢'


def task_file(folder: Path, **changes: Any) -> Path:
    reading = Reading(utilization_percent=80, power_w=250.5)  # what else there is to know was not given
    settings = {"states": {"a": "done", "b": "failed", "c": "pending"}, "reading": reading, **changes}
    return TaskFile(folder, **settings).write()


def change(database: Path, sql: str, *values: object) -> None:
    with closing(sqlite3.connect(database)) as db, db:
        db.execute(sql, values)


def add_rows(database: Path, count: int) -> None:
    change(
        database,
        """WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
           INSERT INTO host_sample SELECT 1, i, i / 7.0, i * 1000, NULL FROM n""",
        count,
    )


def write(database: Path, form: str, output: Path, *tables: str, **more: Any) -> list[ExportedFile]:
    return export(ExportOrder(database, form, output, tables, **more), io.BytesIO())[0]


def rows_of(database: Path, table: str) -> list[dict[str, Any]]:
    with closing(open_sealed(database)) as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute(f"SELECT * FROM {table}")]


def as_csv(database: Path, folder: Path, *tables: str, **more: Any) -> list[dict[str, str]]:
    write(database, "csv", folder / "out.csv", *tables, **more)
    return list(csv.DictReader((folder / "out.csv").open(encoding="utf-8", newline="")))


# --- forms ------------------------------------------------------------------------------------------------------------


def test_csv_has_a_header_and_an_empty_field_where_nothing_is_known(tmp_path: Path) -> None:
    database = task_file(tmp_path)
    assert write(database, "csv", tmp_path / "s.csv", "sample") == [ExportedFile(str(tmp_path / "s.csv"), "sample", 3)]
    text = (tmp_path / "s.csv").read_bytes().decode()
    assert text.startswith(",".join(columns_of("sample")) + "\r\n")
    first = next(csv.DictReader(io.StringIO(text)))
    assert first["power_w"] == "250.5"
    assert first["temperature_c"] == ""


def test_json_is_one_document_with_the_same_rows_and_null_where_nothing_is_known(tmp_path: Path) -> None:
    database = task_file(tmp_path)
    write(database, "json", tmp_path / "s.json", "sample")
    rows = json.loads((tmp_path / "s.json").read_text())
    assert rows == rows_of(database, "sample")
    assert rows[0]["temperature_c"] is None


def test_json_into_a_jsonl_file_is_an_object_per_line(tmp_path: Path) -> None:
    database = task_file(tmp_path)
    write(database, "json", tmp_path / "s.jsonl", "sample")
    lines = (tmp_path / "s.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows_of(database, "sample")


def test_parquet_has_the_types_of_the_columns_and_null_where_nothing_is_known(tmp_path: Path) -> None:
    database = task_file(tmp_path)
    for table in ("sample", "chunk"):
        write(database, "parquet", tmp_path / "out.parquet", table)
        found = pyarrow.parquet.read_table(tmp_path / "out.parquet")
        assert found.to_pylist() == rows_of(database, table)
        arrow = {"INTEGER": "int64", "REAL": "double", "TEXT": "string"}
        wanted = {c.name: arrow[c.sql.split()[0]] for t in TABLES if t.name == table for c in t.columns}
        assert {field.name: str(field.type) for field in found.schema} == wanted


def test_parquet_finds_the_types_of_what_a_view_computes(tmp_path: Path) -> None:
    job = make_job(tmp_path / "run")
    for view in ("task_summary", "device_summary", "job_summary"):
        write(job, "parquet", tmp_path / "out.parquet", view)
        found = pyarrow.parquet.read_table(tmp_path / "out.parquet")
        assert found.to_pylist() == rows_of(job, view)
    assert str(found.schema.field("tasks").type) == "int64"
    assert str(found.schema.field("audio_hours").type) == "double"


@pytest.mark.parametrize("form", ["csv", "json", "jsonl", "parquet"])
def test_a_table_without_rows_is_a_whole_file_all_the_same(tmp_path: Path, form: str) -> None:
    database, output = task_file(tmp_path), tmp_path / f"alert.{form}"
    assert write(database, "json" if form == "jsonl" else form, output, "alert")[0].rows == 0
    if form == "parquet":
        assert pyarrow.parquet.read_table(output).column_names == list(columns_of("alert"))
    else:
        wanted = {"csv": ",".join(columns_of("alert")) + "\r\n", "json": "[]\n", "jsonl": ""}
        assert output.read_bytes().decode() == wanted[form]


@pytest.mark.parametrize("form", ["csv", "json", "jsonl", "parquet"])
def test_quotes_commas_line_breaks_markup_and_any_script_come_back_unchanged(tmp_path: Path, form: str) -> None:
    database, output = task_file(tmp_path), tmp_path / f"out.{form}"
    change(database, "UPDATE detection SET recording_id = ?, label_name = ?", NASTY, "")
    write(database, "json" if form == "jsonl" else form, output, "detection")
    if form == "csv":
        row = next(csv.DictReader(output.open(encoding="utf-8", newline="")))
    elif form == "parquet":
        (row,) = pyarrow.parquet.read_table(output).to_pylist()
    else:
        found = json.loads(output.read_text(encoding="ascii"))
        row = found if form == "jsonl" else found[0]
    assert (row["recording_id"], row["label_name"]) == (NASTY, "")


def test_a_number_that_json_has_no_word_for_is_null(tmp_path: Path) -> None:
    database = task_file(tmp_path)
    change(database, "UPDATE detection SET score = 9e999")
    write(database, "json", tmp_path / "d.json", "detection")
    assert json.loads((tmp_path / "d.json").read_text())[0]["score"] is None


PEAK = """
import io, sys
from pathlib import Path
from badcjobs.report.export import ExportOrder, export
export(ExportOrder(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), ("host_sample",)), io.BytesIO())
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, form: str) -> None:
    few, many = task_file(tmp_path / "few"), task_file(tmp_path / "many")
    add_rows(few, 70_000)  # more than one row group
    add_rows(many, 200_000)  # 60 MB as Python objects
    peaks_kb = [
        int(subprocess.check_output([sys.executable, "-c", PEAK, str(database), form, str(tmp_path / "out")]))
        for database in (few, many)
    ]
    assert peaks_kb[1] < peaks_kb[0] + 20_000


def test_a_long_parquet_file_is_written_in_row_groups(tmp_path: Path) -> None:
    database = task_file(tmp_path)
    add_rows(database, 70_000)
    write(database, "parquet", tmp_path / "out.parquet", "host_sample")
    file = pyarrow.parquet.ParquetFile(tmp_path / "out.parquet")
    assert (file.num_row_groups, file.metadata.num_rows) == (2, 70_003)


# --- what is chosen ---------------------------------------------------------------------------------------------------


def test_without_a_name_it_is_the_detections_on_the_clock_of_their_recordings(tmp_path: Path) -> None:
    task = task_file(tmp_path)
    merge(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock())
    found = as_csv(tmp_path / "job.sqlite", tmp_path)
    assert [(row["chunk_id"], row["species_code"]) for row in found] == [("a", "LOUD")]
    with pytest.raises(DatabaseProblem, match="has no detections in the time of the recordings"):
        as_csv(task, tmp_path)


def test_several_tables_are_a_file_each_in_a_folder_that_is_made_and_added_to(tmp_path: Path) -> None:
    database, folder = task_file(tmp_path), tmp_path / "new" / "folder"
    exported = write(database, "json", folder, "chunk", "sample", "chunk")
    assert [(Path(file.path).name, file.rows) for file in exported] == [("chunk.json", 3), ("sample.json", 3)]
    write(database, "csv", folder, "gap", "task")
    assert sorted(p.name for p in folder.iterdir()) == ["chunk.json", "gap.csv", "sample.json", "task.csv"]


def test_one_table_goes_into_a_folder_that_is_there_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (file,) = write(task_file(tmp_path), "csv", tmp_path / "there", "task")
    assert file.path == str(tmp_path / "there" / "task.csv")
    assert Path(file.path).is_file()


def test_everything_is_every_table_and_view(tmp_path: Path) -> None:
    job = make_job(tmp_path / "run")
    exported = write(job, "csv", tmp_path / "all", "all")
    with closing(open_sealed(job)) as db:
        assert [file.table for file in exported] == list_tables(db)
    assert {"detection", "source_file", "job_summary"} <= {file.table for file in exported}
    assert sorted(p.stem for p in (tmp_path / "all").iterdir()) == sorted(file.table for file in exported)


def test_a_run_folder_means_its_job_database(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    assert as_csv(tmp_path, tmp_path) == as_csv(job, tmp_path)


def test_the_database_is_not_touched(tmp_path: Path) -> None:
    database = task_file(tmp_path)
    before = (database.read_bytes(), database.stat().st_mtime_ns, sorted(database.parent.iterdir()))
    write(database, "csv", tmp_path / "out", "all")
    write(database, "badc", tmp_path / "badc")
    assert (database.read_bytes(), database.stat().st_mtime_ns, sorted(database.parent.iterdir())) == before


# --- what is refused --------------------------------------------------------------------------------------------------


def test_all_tables_that_are_not_there_are_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has no table nope, sqlite_master") as refused:
        write(task_file(tmp_path), "csv", tmp_path / "out", "nope", "chunk", "sqlite_master")
    assert "detection" in (refused.value.why or "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tables": ("all",), "output": None}, "several files, not to stdout"),
        ({"tables": ("chunk", "task"), "output": None}, "several files, not to stdout"),
        ({"form": "badc", "output": None}, "several files, not to stdout"),
        ({"form": "badc", "tables": ("chunk",)}, "takes no --table"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    settings = {"source": task_file(tmp_path), "form": "csv", "output": tmp_path / "out", **changes}
    with pytest.raises(BadInput, match=words):
        export(ExportOrder(**settings), io.BytesIO())


def test_the_database_itself_is_never_the_output(tmp_path: Path) -> None:
    database = task_file(tmp_path)
    (tmp_path / "link").symlink_to(database)
    for output in (database, tmp_path / "link"):
        with pytest.raises(BadInput, match="is the database itself"):
            write(database, "csv", output, "chunk")
    assert rows_of(database, "task")


def test_a_folder_that_is_not_merged_is_answered_with_the_line_that_merges_it(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    with pytest.raises(DatabaseProblem) as refused:
        write(tmp_path, "csv", tmp_path / "out")
    assert refused.value.fix == f"badcjobs merge {tmp_path}"


def test_what_is_no_database_of_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("no database" * 100)
    (tmp_path / "empty.sqlite").touch()
    change(tmp_path / "other.sqlite", "CREATE TABLE chunk (x)")
    newer = task_file(tmp_path)
    change(newer, "PRAGMA user_version = 99")
    for database in (tmp_path / "text.sqlite", tmp_path / "empty.sqlite", tmp_path / "other.sqlite", newer):
        with pytest.raises(DatabaseProblem, match=database.name) as refused:
            write(database, "csv", tmp_path / "out.csv")
        upgrade, merge = "pip install --upgrade badcjobs", f"badcjobs merge {tmp_path}"
        assert (refused.value.fix or "").startswith(upgrade if database == newer else merge)
    with pytest.raises(DatabaseProblem, match="does not exist"):
        write(tmp_path / "gone.sqlite", "csv", tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("ending", ["-wal", "-journal"])
def test_a_file_that_somebody_may_be_writing_is_not_half_exported(tmp_path: Path, ending: str) -> None:
    database = task_file(tmp_path)
    database.with_name(database.name + ending).write_bytes(b"rows of which a sealed file knows nothing")
    with pytest.raises(DatabaseProblem, match=f"{ending} exists: the file is being written"):
        write(database, "csv", tmp_path / "out.csv")


def test_damage_in_the_middle_leaves_the_old_output_and_no_half_file(tmp_path: Path) -> None:
    database = task_file(tmp_path)
    add_rows(database, 50_000)
    with database.open("r+b") as file:  # the header says what it should; a page in the middle does not
        file.seek(database.stat().st_size // 4096 // 2 * 4096)
        file.write(b"\xff" * 8192)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "host.csv").write_text("old")
    with pytest.raises(DatabaseProblem, match="cannot be read"):
        write(database, "csv", tmp_path / "out" / "host.csv", "host_sample")
    assert [(p.name, p.read_text()) for p in (tmp_path / "out").iterdir()] == [("host.csv", "old")]


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    database = task_file(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot be written") as refused:
        write(database, "csv", tmp_path / "no" / "folder.csv", "chunk")
    assert refused.value.fix == f"mkdir -p {tmp_path / 'no'}"
    for output in (tmp_path / "file" / "x.csv", Path("/dev/full")):
        with pytest.raises(BadInput, match="cannot be written") as refused:
            write(database, "csv", output, "chunk")
        look = f"ls -ld {output.parent} {output}" if output.suffix else "df -h /dev"
        assert refused.value.fix == look


@pytest.mark.parametrize("order", [{"tables": ("chunk", "task")}, {"tables": ("all",)}, {"form": "badc"}])
def test_several_files_for_one_name_are_answered_with_a_folder_beside_it(tmp_path: Path, order: dict[str, Any]) -> None:
    database, there = task_file(tmp_path), tmp_path / "july.csv"
    there.write_text("kept")
    with pytest.raises(BadInput, match="writes several files, not one file") as refused:
        export(ExportOrder(**{"source": database, "form": "csv", "output": there, **order}), io.BytesIO())
    assert refused.value.fix == f"--out {there}-files"
    assert there.read_text() == "kept"


@pytest.mark.parametrize("form", ["csv", "json", "parquet", "badc"])
def test_an_export_of_a_merge_that_is_out_of_date_says_so_with_the_command(tmp_path: Path, form: str) -> None:
    task = task_file(tmp_path, ended_at_ms=None)
    merge(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock())

    def notes_of(source: Path) -> list[str]:
        tables = () if form == "badc" else ("detection",)
        return export(ExportOrder(source, form, tmp_path / "exported", tables), io.BytesIO())[1]

    assert (notes_of(tmp_path), notes_of(task)) == ([], [])
    os.utime(task, (START_MS // 1000 + 9000,) * 2)  # published again
    (note,) = notes_of(tmp_path)
    assert note.startswith("merged: as of ")
    assert note.endswith(f"; 1 task database has changed since; to include that: badcjobs merge {tmp_path}")
    heard = ExportOrder(tmp_path, "csv", None, wanted=DetectionFilter(min_score=0.1))
    assert export(heard, io.BytesIO())[1][0] == note


def test_a_device_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    assert write(task_file(tmp_path), "csv", Path("/dev/null"), "task")[0].rows == 1
    assert Path("/dev/null").is_char_device()
