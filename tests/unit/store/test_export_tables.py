"""Tables as CSV, JSON and Parquet: what is chosen, how it is written, what is refused."""

import csv
import io
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow.parquet
import pytest
from rooms.model import Reading
from rooms.report import ExportedFile, ExportOrder, export
from rooms.root import BadInput, DatabaseProblem
from rooms.store import TABLES, area_names, open_sealed, safe_name
from support import damage
from support.databases import change
from support.task_files import TaskFile, add_host_samples, make_job

from badcjobs import __version__

NASTY = 'a"b,c\r\nd <script>é\u2028漢'
FORMULAS = ("=1+2", "+1", "-1", "@SUM(1)", "\t=1", "\r=1", "\n=1", "a=1", "'=1")  # two of them are none
FORMS = ("csv", "json", "jsonl", "parquet")
ARROW = {"INTEGER": "int64", "REAL": "double", "TEXT": "string"}
COLUMNS = {
    name: {column.split()[0]: ARROW[column.split()[1]] for column in table.columns} for name, table in TABLES.items()
}


@pytest.fixture
def task(tmp_path):
    """A task database with odd words, and a number that JSON has no word for."""
    reading = Reading(utilization_percent=80, power_w=250.5)  # what else there is to know was not given
    path = TaskFile(tmp_path / "run", states={"a": "done", "b": "failed", "c": "pending"}, reading=reading).write()
    change(path, "UPDATE detection SET recording_id = ?, label_name = '', score = 9e999, start_ms = -5", NASTY)
    insert = "INSERT INTO detection SELECT task_id, '@', ?, 1, 2, ?, ?, -0.5 FROM task"
    for number, text in enumerate(FORMULAS):
        change(path, insert, number, text, f" {text}")
    return path


def write(database, form, output, *tables, **more):
    return export(ExportOrder(database, form, output, tables, **more), io.BytesIO())


def read(path):
    """Read a file back; in CSV all is text, and empty is unknown."""
    if path.suffix == ".csv":
        return list(csv.DictReader(path.open(encoding="utf-8", newline="")))
    if path.suffix == ".parquet":
        return list(pyarrow.parquet.read_table(path).to_pylist())
    text = path.read_text(encoding="ascii")
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def as_csv(value):
    """Return a cell: a text that a spreadsheet would run has an apostrophe, a number never."""
    harmful = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    return "" if value is None else f"'{value}" if harmful else str(value)


def types_of(path):
    return {field.name: str(field.type) for field in pyarrow.parquet.read_table(path).schema}


def rows_of(database, table):
    with closing(open_sealed(database)) as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute(f"SELECT * FROM {table}")]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_back_the_rows_of_every_table_and_what_is_unknown_is_unknown(task, form):
    before = (task.read_bytes(), task.stat().st_mtime_ns, sorted(task.parent.iterdir()))
    infinite = None if form.startswith("json") else float("inf")
    for table in ("sample", "detection", "chunk", "alert"):  # the last one is empty
        output, wanted = task.parents[1] / f"{table}.{form}", rows_of(task, table)
        assert write(task, form, output, table)[0] == [ExportedFile(str(output), table, len(wanted))]
        wanted = [{n: infinite if v == float("inf") else v for n, v in row.items()} for row in wanted]
        if form == "csv":
            wanted = [{n: as_csv(v) for n, v in row.items()} for row in wanted]
        assert read(output) == wanted
        assert form != "parquet" or types_of(output) == COLUMNS[table]
    empty = {"csv": ",".join(COLUMNS["alert"]) + "\r\n", "json": "[]\n", "jsonl": ""}
    assert form == "parquet" or output.read_bytes().decode() == empty[form]
    assert (task.read_bytes(), task.stat().st_mtime_ns, sorted(task.parent.iterdir())) == before


def test_parquet_has_types_for_what_a_view_computes_and_long_tables_are_row_groups(tmp_path, task):
    job, out = make_job(tmp_path / "job"), tmp_path / "out.parquet"
    for view in ("device_summary", "task_summary", "job_summary"):
        write(job, "parquet", out, view)
        assert read(out) == rows_of(job, view)
    assert [types_of(out)[name] for name in ("tasks", "audio_hours")] == ["int64", "double"]
    change(job, "CREATE VIEW odd AS SELECT 1 AS one, NULL AS none, 'x' AS word, 1.5 AS half, device_id FROM device")
    write(job, "parquet", out, "odd")
    assert list(types_of(out).values()) == ["int64", "double", "string", "double", "int64"]
    for count, forms in ((6_000, FORMS[:3]), (65_537, FORMS[3:])):  # longer than a batch of text, and than a row group
        add_host_samples(change(task, "DELETE FROM host_sample"), count)
        for form in forms:
            assert write(task, form, tmp_path / f"long.{form}", "host_sample")[0][0].rows == count
    file = pyarrow.parquet.ParquetFile(tmp_path / "long.parquet")
    assert (file.num_row_groups, file.metadata.num_rows) == (7, 65_537)
    assert [len(read(tmp_path / f"long.{form}")) for form in FORMS[:3]] == [6_000] * 3


def test_detections_are_chosen_by_code_or_name_in_any_case_and_by_score(tmp_path):
    job = make_job(tmp_path)
    change(job, "UPDATE detection SET score = 0.5, label_name = 'Soft Sound' WHERE label = 'SOFT' AND chunk_id = 'd'")
    change(job, "UPDATE detection SET score = NULL WHERE label = 'SOFT' AND chunk_id = 'e'")
    loud = ["aLOUD", "dLOUD", "eLOUD"]
    cases = {
        (("soft",), None): ["dSOFT", "eSOFT"], (("SOFT SOUND",), 0.5): ["dSOFT"], ((), 0.5): [*loud, "dSOFT"],
        ((), 0.51): loud, (("x",), None): [], (("x", "Loud Sound"), 0.5): loud,
    }  # fmt: skip
    for (species, score), wanted in cases.items():
        write(job, "csv", tmp_path / "out.csv", species=species, min_score=score)
        assert sorted(row["chunk_id"] + row["species_code"] for row in read(tmp_path / "out.csv")) == sorted(wanted)


def refusal(folder, database, form, output, tables=""):
    """Return what a wrong order is answered, with the order."""
    with pytest.raises((BadInput, DatabaseProblem)) as refused:
        write(database, form, output, *tables.split())
    return f"{form} {tables} to {output or 'stdout'}\n{refused.value}\n".replace(str(folder), "HERE")


def test_what_cannot_be_written_is_refused_and_nothing_is_lost(tmp_path, task, pages):
    there, new = tmp_path / "july.csv", tmp_path / "x"
    there.write_text("kept")
    (tmp_path / "link").symlink_to(task)
    (tmp_path / "tasks").mkdir()
    orders = [
        ("csv", None, "all"), ("badc", None, ""), ("badc", new, "chunk"), ("csv", there, "chunk task"),
        ("badc", there, ""), ("csv", task, "chunk"), ("csv", tmp_path / "link", "chunk"),
        ("csv", tmp_path / "no" / "x.csv", "chunk"), ("csv", there / "x.csv", "chunk"),
        ("csv", Path("/dev/full"), "chunk"), ("csv", new, ""),
    ]  # fmt: skip
    said = [refusal(tmp_path, task, *order) for order in orders]
    pages({"said.txt": "\n".join([*said, refusal(tmp_path, tmp_path, "csv", new)])})
    assert there.read_text() == "kept" and rows_of(task, "task") and not new.exists()


def damage_page(task):
    add_host_samples(task, 50_000)
    damage.overwrite(task, task.stat().st_size // 4096 // 2 * 4096, b"\xff" * 8192)


UNREADABLE = {
    "text": lambda task: task.write_text("no database" * 100),
    "empty": lambda task: task.write_bytes(b""),
    "newer": lambda task: change(task, "PRAGMA user_version = 99"),
    "other": lambda task: change(task, "PRAGMA application_id = 7"),
    "log": lambda task: task.with_name(task.name + "-wal").write_bytes(b"x" * 9),
    "journal": lambda task: task.with_name(task.name + "-journal").write_bytes(b"x"),
    "page": damage_page,  # the header says what it should; a page in the middle does not
}


def test_what_cannot_be_read_leaves_the_old_output_and_no_half_file(tmp_path, pages):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "host.csv").write_text("old")
    said = []
    for kind, harm in UNREADABLE.items():
        task = TaskFile(tmp_path / kind, states={"a": "done"}).write()
        harm(task)
        said.append(refusal(tmp_path, task, "csv", tmp_path / "out" / "host.csv", "host_sample"))
        assert [(p.name, p.read_text()) for p in (tmp_path / "out").iterdir()] == [("host.csv", "old")]
    pages({"said.txt": "\n".join(said).replace(__version__, "VERSION").replace("0.1.0", "VERSION")})


def test_names_of_files_stay_in_their_folder_and_differ():
    wide, long = "ü" * 120, "ü" * 200
    names = {"a/b": "a%2Fb", "..": "%2E%2E", "": "%FF", "a\0b": "a%00b", "%2F": "%252F", "50%": "50%", wide: wide}
    assert {name: safe_name(name) for name in names} == names
    assert len(safe_name(long).encode()) <= 240 and safe_name(long) != safe_name(long + "x")
    areas = ["all", "ALL", "a", "A", ".x", None]
    reported = area_names(areas, taken="all", nameless="none")
    assert [reported[area] for area in areas] == ["all~2", "ALL~3", "a", "A~2", "%2Ex", "none"]
