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
from contextlib import closing
from pathlib import Path

import pytest
from support.badcjobs_program import Site, assert_refused
from support.task_files import TaskFile, make_job
from support.waiting import wait_for

EXPORT = (sys.executable, "-m", "badcjobs", "export")


def long_task(folder: Path, count: int) -> Path:
    """Make a task database with so many host samples, quicker than a recorder would."""
    task = TaskFile(folder, samples=0, states={"a": "done"}, labels=("Grüne-漢",)).write()
    with closing(sqlite3.connect(task)) as db, db:
        db.execute(
            """WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
               INSERT INTO host_sample SELECT 1, i, i / 7.0, i, i FROM n""",
            (count,),
        )
    return task


def test_what_is_written_is_named_on_stdout_and_what_is_wrong_is_refused_in_our_way(site: Site) -> None:
    make_job(site.out)
    out = site.folder / "for-badc"
    done = site.badcjobs("export", site.out, "--format", "badc", "-o", out)
    assert done.stdout.splitlines() == [
        f"{out}: 4 rows (chunk)",
        f"{out}/telemetry.jsonl: 8 rows (attempt)",
        f"{out}/telemetry.jsonl.summary.json: 4 rows (chunk)",
    ]
    export = ("export", site.out, "-o", site.folder / "x", "--format")
    (site.folder / "empty").mkdir()
    (site.folder / "text.sqlite").write_text("text")
    cases = [
        ((*export, "xml"), 2, ("xml", "parquet")),
        ((*export, "csv", "--table", "nope", "--table", "neither"), 2, ("nope, neither", "detection")),
        (("export", "-o", "x.csv"), 2, ("DIR is missing",)),
        (("export", site.out, "--format", "csv"), 2, ("--out",)),
        (("export", site.folder / "empty", "--format", "csv", "-o", "x"), 4, ("is not a run folder",)),
        (("export", site.folder / "gone", "--format", "csv", "-o", "x"), 4, ("gone does not exist",)),
        (("export", site.folder / "text.sqlite", "--format", "csv", "-o", "x"), 4, ("text.sqlite",)),
    ]
    for (_, exit_code, words), outcome in zip(cases, site.badcjobs_each([case[0] for case in cases]), strict=True):
        assert_refused(outcome, exit_code, *words)
    assert not (site.folder / "x").exists()
    stub = site.folder / "stub"
    stub.mkdir()
    (stub / "pyarrow.py").write_text("raise ImportError('no pyarrow here')")
    env = {"PYTHONPATH": os.pathsep.join([str(stub), *filter(None, [os.environ.get("PYTHONPATH")])])}
    refused = site.badcjobs("export", site.out, "--format", "parquet", "-o", site.folder / "d.parquet", env=env)
    assert_refused(refused, 3, "try: pip install 'badcjobs[parquet]'")


def test_stdout_is_utf_8_in_any_locale_and_no_room_for_it_is_answered_with_what_helps(site: Site) -> None:
    task = long_task(site.out, 3000)
    env = site.environ({"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "TASK": str(task)})
    said = subprocess.check_output([*EXPORT, str(task), "--table", "detection", "-o", "-"], env=env)
    assert [row["label"] for row in csv.DictReader(io.StringIO(said.decode("utf-8")))] == ["Grüne-漢"]
    line = """write() { "$0" -m badcjobs export "$TASK" --format csv --table host_sample -o "$1"; echo $? >&2; }
              write - > /dev/full; ulimit -S -f 4; write rows.csv"""
    argv = ["bash", "-c", line, sys.executable]
    told = subprocess.run(argv, env=env, cwd=site.folder, capture_output=True, text=True)
    tries = [said.removeprefix("  try: ") for said in told.stderr.splitlines() if said.startswith("  try: ")]
    assert tries == ["df -h .", "ulimit -f unlimited   (then the same command again)"], told.stderr
    assert told.stderr.count("\n2\n") == 2 and not (site.folder / "rows.csv").exists()


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_reader_who_leaves_early_is_no_failure(site: Site, form: str) -> None:
    command = [*EXPORT, str(long_task(site.out, 20_000)), "--format", form, "--table", "host_sample", "-o", "-"]
    process = subprocess.Popen(command, env=site.environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(2)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 0)
    process.stderr.close()


def test_somebody_who_watches_sees_the_rows_count_up_and_a_kill_leaves_the_old_file(site: Site) -> None:
    pipe, folder = site.folder / "pipe", site.folder / "tables"
    os.mkfifo(pipe)
    folder.mkdir()
    (folder / "h.json").write_text("old")
    task = long_task(site.out, 60_000)
    terminal, its_end = os.openpty()
    command = [*EXPORT, str(task), "--format", "csv", "--table", "host_sample", "-o", str(pipe)]
    process = subprocess.Popen(command, env=site.environ(), stdout=subprocess.DEVNULL, stderr=its_end)
    with pipe.open("rb") as slow_reader:
        slow_reader.read(10)
        told = b""
        while b"rows of host_sample written" not in told:
            slow_reader.read(20_000)
            while select_one(terminal):
                told += os.read(terminal, 65536)
        slow_reader.read()
    assert process.wait() == 0
    os.close(its_end)
    os.close(terminal)
    order = ("export", task, "--format", "json", "--table", "host_sample", "-o", folder / "h.json")
    program = site.start(*order)
    wait_for(lambda: [p for p in folder.iterdir() if p.name != "h.json" and p.stat().st_size], "it has begun")
    program.send(signal.SIGKILL)
    assert (program.wait().exit_code, (folder / "h.json").read_text()) == (-signal.SIGKILL, "old")
    assert site.badcjobs(*order).exit_code == 0
    assert len(json.loads((folder / "h.json").read_text())) == 60_000


def select_one(terminal: int) -> bool:
    import select

    return bool(select.select([terminal], [], [], 0.05)[0])
