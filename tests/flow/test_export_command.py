"""``badcjobs export`` as a shell calls it: results on stdout, the conversation on stderr, the promised exit codes."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pyarrow.parquet
import pytest
from support.badcjobs_program import Site, assert_refused, rows
from support.task_files import TaskFile, make_job
from support.waiting import wait_for


@pytest.fixture
def database(site: Site) -> Path:
    """A run folder with a job database."""
    return make_job(site.out)


def test_every_form_is_written_and_named_on_stdout(site: Site, database: Path) -> None:
    files = {form: site.folder / f"d.{form}" for form in ("csv", "json", "parquet")}
    table = ("--table", "detection")
    commands = [("export", site.out, *table, "--format", form, "-o", path) for form, path in files.items()]
    ends = site.badcjobs_each(commands)
    assert [end.exit_code for end in ends] == [0, 0, 0], [end.stderr for end in ends]
    assert ends[0].stdout == f"{files['csv']}: 5 rows (detection)\n"
    labels = [label for (label,) in rows(database, "SELECT label FROM detection")]
    assert [row["label"] for row in csv.DictReader(files["csv"].open())] == labels
    assert [row["label"] for row in json.loads(files["json"].read_text())] == labels
    assert pyarrow.parquet.read_table(files["parquet"])["label"].to_pylist() == labels


def test_several_tables_are_files_of_a_folder_and_all_means_every_one(site: Site, database: Path) -> None:
    folder, everything = site.folder / "tables", site.folder / "all"
    two, every = site.badcjobs_each(
        [
            ("export", database, "--table", "chunk", "--table", "task", "-o", folder),
            ("export", database, "--table", "all", "--format", "json", "-o", everything),
        ]
    )
    assert two.stdout == f"{folder / 'chunk.csv'}: 5 rows (chunk)\n{folder / 'task.csv'}: 2 rows (task)\n"
    assert two.stderr == ""
    assert every.exit_code == 0, every.stderr
    assert {"chunk.json", "sample.json", "job_summary.json"} <= {path.name for path in everything.iterdir()}


def test_stdout_is_utf_8_whatever_the_locale_and_holds_nothing_else(site: Site) -> None:
    task = TaskFile(site.out, states={"a": "done"}, labels=("Grüne-漢",)).write()
    command = [
        sys.executable,
        "-m",
        "badcjobs",
        "export",
        str(task),
        "--table",
        "detection",
        "-o",
        "-",
    ]
    env = site.environ({"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"})
    (row,) = csv.DictReader(io.StringIO(subprocess.check_output(command, env=env).decode("utf-8")))
    assert row["label"] == "Grüne-漢"


def test_rows_for_which_there_is_no_room_are_answered_with_what_helps(site: Site) -> None:
    task = long_task(site.out, 3000)
    line = """write() { "$0" -m badcjobs export "$TASK" --format csv --table host_sample -o "$1"; echo $? >&2; }
              write - > /dev/full; ulimit -S -f 4; write - > out.csv; write rows.csv"""
    argv, env = ["bash", "-c", line, sys.executable], site.environ({"TASK": str(task)})
    told = subprocess.run(argv, env=env, cwd=site.folder, capture_output=True, text=True)
    tries = [said.removeprefix("  try: ") for said in told.stderr.splitlines() if said.startswith("  try: ")]
    larger_files = "ulimit -f unlimited   (then the same command again)"
    assert tries == ["df -h .", larger_files, larger_files], told.stderr
    assert told.stderr.count("\n2\n") == 3
    assert not (site.folder / "rows.csv").exists()


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_a_reader_who_leaves_early_is_no_failure(site: Site, form: str) -> None:
    task = long_task(site.out, 20_000)
    command = [
        sys.executable,
        "-m",
        "badcjobs",
        "export",
        str(task),
        "--format",
        form,
        "--table",
        "host_sample",
        "-o",
        "-",
    ]
    process = subprocess.Popen(command, env=site.environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(2)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


def test_badc_files_are_made_for_a_job(site: Site, database: Path) -> None:
    out = site.folder / "for-badc"
    done = site.badcjobs("export", site.out, "--format", "badc", "-o", out)
    assert done.stdout.splitlines() == [
        f"{out}: 4 rows (chunk)",
        f"{out}/telemetry.jsonl: 8 rows (attempt)",
        f"{out}/telemetry.jsonl.summary.json: 4 rows (chunk)",
    ]
    document = json.loads((out / "rec" / "a.json").read_text())
    assert (document["chunk_id"], document["status"]) == ("a", "ok")


def test_wrong_input_is_refused_in_our_way(site: Site, database: Path) -> None:
    export = ("export", site.out, "-o", site.folder / "x", "--format")
    (site.folder / "empty").mkdir()
    (site.folder / "text.sqlite").write_text("text")
    cases = [
        ((*export, "xml"), 2, ("xml", "parquet")),
        ((*export, "csv", "--table", "nope", "--table", "neither"), 2, ("nope, neither", "detection")),
        (("export", site.out, "--table", "all", "-o", "-"), 2, ("several files, not to stdout",)),
        (("export", "-o", "x.csv"), 2, ("DIR is missing",)),
        (("export", site.out, "--format", "csv"), 2, ("--out",)),
        (("export", site.folder / "empty", "--format", "csv", "-o", "x"), 4, ("is not a run folder",)),
        (("export", site.folder / "gone", "--format", "csv", "-o", "x"), 4, ("gone does not exist",)),
        (("export", site.folder / "text.sqlite", "--format", "csv", "-o", "x"), 4, ("text.sqlite",)),
    ]
    for (_, exit_code, words), outcome in zip(cases, site.badcjobs_each([case[0] for case in cases]), strict=True):
        assert_refused(outcome, exit_code, *words)
    assert not (site.folder / "x").exists()


def test_without_pyarrow_parquet_says_what_to_install_and_the_rest_works(site: Site, database: Path) -> None:
    stub = site.folder / "stub"
    stub.mkdir()
    (stub / "pyarrow.py").write_text("raise ImportError('no pyarrow here')")
    env = {"PYTHONPATH": os.pathsep.join([str(stub), *filter(None, [os.environ.get("PYTHONPATH")])])}
    refused = site.badcjobs("export", site.out, "--format", "parquet", "-o", site.folder / "d.parquet", env=env)
    assert_refused(refused, 3, "try: pip install 'badcjobs[parquet]'")
    done = site.badcjobs("export", site.out, "--format", "csv", "-o", site.folder / "d.csv", env=env)
    assert done.exit_code == 0, done.stderr


def long_task(folder: Path, count: int) -> Path:
    """Make a task database with so many host samples, quicker than a recorder would."""
    task = TaskFile(folder, samples=0).write()
    with closing(sqlite3.connect(task)) as db, db:
        db.execute(
            """WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
               INSERT INTO host_sample SELECT 1, i, i / 7.0, i, i FROM n""",
            (count,),
        )
    return task


def test_a_killed_export_leaves_the_old_file_and_a_second_one_succeeds(site: Site) -> None:
    command = ("export", long_task(site.out, 150_000), "--format", "json", "--table", "host_sample", "-o")
    folder = site.folder / "tables"
    folder.mkdir()
    (folder / "h.json").write_text("old")
    program = site.start(*command, folder / "h.json")
    wait_for(lambda: [p for p in folder.iterdir() if p.name != "h.json" and p.stat().st_size], "it has begun")
    program.send(signal.SIGKILL)
    assert program.wait().exit_code == -signal.SIGKILL
    assert (folder / "h.json").read_text() == "old"
    done = site.badcjobs(*command, folder / "h.json")
    assert done.exit_code == 0, done.stderr
    assert len(json.loads((folder / "h.json").read_text())) == 150_000


def test_somebody_who_watches_sees_the_rows_count_up(site: Site) -> None:
    task, pipe = long_task(site.out, 20_000), site.folder / "pipe"
    os.mkfifo(pipe)
    terminal, its_end = os.openpty()
    command = ["export", str(task), "--format", "csv", "--table", "host_sample", "-o", str(pipe)]
    process = subprocess.Popen(
        [sys.executable, "-m", "badcjobs", *command], env=site.environ(), stdout=subprocess.DEVNULL, stderr=its_end
    )
    with pipe.open("rb") as slow_reader:
        slow_reader.read(10)
        time.sleep(1.1)
        slow_reader.read()
    assert process.wait() == 0
    os.close(its_end)
    assert b"rows of host_sample written" in os.read(terminal, 65536)
    os.close(terminal)
