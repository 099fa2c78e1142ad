"""``badcjobs export`` as a shell calls it: results on stdout, the conversation on stderr, the promised exit codes."""

from __future__ import annotations

import csv
import io
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.badcjobs_program import Site, assert_refused
from support.databases import change
from support.task_files import TaskFile, make_job
from support.waiting import wait_for

EXPORT = (sys.executable, "-m", "badcjobs", "export")
HOSTS = ("--table", "host_sample", "--format")


def long_task(folder: Path, count: int) -> Path:
    """Make a task database with so many host samples, quicker than a recorder would."""
    task = TaskFile(folder, samples=0, states={"a": "done"}, labels=("Grüne-漢",)).write()
    rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
    return change(task, f"{rows} INSERT INTO host_sample SELECT 1, i, i / 7.0, i, i FROM n", count)


def test_what_is_written_is_named_on_stdout_and_what_is_wrong_is_refused_in_our_way(site: Site) -> None:
    make_job(site.out)
    out, export = site.folder / "for-badc", ("export", site.out, "-o", site.folder / "x", "--format")
    done = site.badcjobs("export", site.out, "--format", "badc", "-o", out)
    files = {"": "4 rows (chunk)", "/telemetry.jsonl": "8 rows (attempt)",
             "/telemetry.jsonl.summary.json": "4 rows (chunk)"}  # fmt: skip
    assert done.stdout.splitlines() == [f"{out}{name}: {what}" for name, what in files.items()]
    (site.folder / "empty").mkdir()
    (site.folder / "stub").mkdir()
    (site.folder / "stub" / "pyarrow.py").write_text("raise ImportError('no pyarrow here')")
    without = {"PYTHONPATH": os.pathsep.join([str(site.folder / "stub"), site.environ()["PYTHONPATH"]])}
    cases: list[tuple[tuple[object, ...], int, str]] = [
        ((*export, "xml"), 2, "parquet"), ((*export, "csv", "--table", "nope"), 2, "detection"),
        (("export", "-o", "x.csv"), 2, "DIR is missing"), (("export", site.out, "--format", "csv"), 2, "--out"),
        (("export", site.folder / "empty", "--format", "csv", "-o", "x"), 4, "is not a run folder"),
        (("export", site.folder / "gone", "--format", "csv", "-o", "x"), 4, "gone does not exist"),
        ((*export, "parquet"), 3, "try: pip install 'badcjobs[parquet]'"),
    ]  # fmt: skip
    envs = [without if code == 3 else {} for _, code, _ in cases]
    for (_, code, words), outcome in zip(cases, site.badcjobs_each([case[0] for case in cases], envs), strict=True):
        assert_refused(outcome, code, words)
    assert not (site.folder / "x").exists()


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
    command = [*EXPORT, str(long_task(site.out, 20_000)), *HOSTS, form, "-o", "-"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=site.environ(), **pipes) as process:  # type: ignore[call-overload]
        process.stdout.read(2)
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_somebody_who_watches_sees_the_rows_count_up_and_a_kill_leaves_the_old_file(site: Site) -> None:
    pipe, folder, task = site.folder / "pipe", site.folder / "tables", long_task(site.out, 60_000)
    os.mkfifo(pipe)
    folder.mkdir()
    (folder / "h.json").write_text("old")
    terminal, its_end = os.openpty()
    command = [*EXPORT, str(task), *HOSTS, "csv", "-o", str(pipe)]
    process = subprocess.Popen(command, env=site.environ(), stdout=subprocess.DEVNULL, stderr=its_end)
    with pipe.open("rb") as slow_reader:
        told = b""
        while b"rows of host_sample written" not in told:
            slow_reader.read(20_000)
            while select.select([terminal], [], [], 0.05)[0]:
                told += os.read(terminal, 65536)
        slow_reader.read()
    assert process.wait() == 0
    os.close(its_end)
    os.close(terminal)
    order = ("export", task, *HOSTS, "json", "-o", folder / "h.json")
    program = site.start(*order)
    wait_for(lambda: [p for p in folder.iterdir() if p.name != "h.json" and p.stat().st_size], "it has begun")
    program.send(signal.SIGKILL)
    assert (program.wait().exit_code, (folder / "h.json").read_text()) == (-signal.SIGKILL, "old")
    assert site.badcjobs(*order).exit_code == 0
    assert len(json.loads((folder / "h.json").read_text())) == 60_000
