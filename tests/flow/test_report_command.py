"""``badcjobs report`` in all its forms, over a run on two simulated GPUs and one on the CPU."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import needs
from support.badcjobs_program import ON_CPU, QUICK, Site, assert_refused


@pytest.fixture(scope="module")
def july(shared_site: Site) -> Path:
    """A run on two devices, merged; beside it is one on the CPU."""
    manifest, cpu = shared_site.manifest(10), shared_site.folder / "cpu"
    shared_site.start("run", manifest, "--out", cpu, *QUICK, *ON_CPU).wait()
    done = shared_site.run(manifest, "--engine", "demo", "--engine-arg=--burn-s=0.3", "--simulate", 2)
    assert done.exit_code == 0, done.stderr
    for merged in shared_site.badcjobs_each([("merge", shared_site.out), ("merge", cpu)]):
        assert merged.exit_code == 0, merged.stderr
    return shared_site.out


@pytest.fixture(scope="module")
def document(july: Path, shared_site: Site) -> dict[str, Any]:
    done = shared_site.badcjobs("report", july, "--json")
    assert done.exit_code == 0, done.stderr

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return dict(json.loads(done.stdout, parse_constant=refuse))


def test_time_and_energy_of_a_real_run_add_up_to_the_whole(document: dict[str, Any]) -> None:
    states = document["states"].values()
    assert {"working", "start_up"} <= set(document["states"])
    assert sum(state["gpu_hours"] for state in states) == pytest.approx(document["gpu_hours"], rel=0.01)
    assert sum(state["energy_wh"] or 0 for state in states) == pytest.approx(document["energy_wh"], rel=0.01)
    for device in document["devices"]:
        assert sum(device["state_energy_j"].values()) == pytest.approx(device["energy_j"], rel=0.01)
        assert sum(device["state_s"].values()) == pytest.approx(document["wall_s"], rel=0.01)


def test_the_chunks_of_a_real_run_cost_what_the_gpus_spent_on_them(document: dict[str, Any]) -> None:
    cost, working = document["chunk_cost"], document["states"]["working"]
    assert cost["tries"] == 10
    assert cost["gpu_s_mean"] * 10 == pytest.approx(working["gpu_hours"] * 3600, rel=0.01)
    assert cost["gpu_s_p50"] <= cost["gpu_s_p95"] <= cost["gpu_s_max"]


def test_colours_are_for_terminals_whose_users_want_them(july: Path, shared_site: Site) -> None:
    colours = []
    for changes in ({"TERM": "xterm"}, {"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}):
        ours, theirs = pty.openpty()
        argv = [sys.executable, "-m", "badcjobs", "report", str(july)]
        with subprocess.Popen(argv, stdout=theirs, env=shared_site.environ(changes), cwd=shared_site.folder):
            os.close(theirs)
            said = read_all(ours)
        assert "all done" in said
        colours.append("\x1b[32mall done\x1b[0m" in said)
        assert ("\x1b" in said) == colours[-1]
    assert colours == [True, False, False]


def read_all(terminal: int) -> str:
    said = b""
    try:
        while block := os.read(terminal, 65536):
            said += block
    except OSError:
        pass  # Linux says so at the end of a terminal
    os.close(terminal)
    return said.decode()


def test_a_metrics_file_is_whole_at_every_moment(july: Path, shared_site: Site) -> None:
    path = shared_site.folder / "july.prom"
    path.write_text("what was here before\n")
    with path.open() as reader:
        done = shared_site.badcjobs("report", july, "--prometheus", path)
        assert done.exit_code == 0, done.stderr
        assert reader.read() == "what was here before\n", "a reader who had it open sees the old file to its end"
    text = path.read_text()
    assert 'badcjobs_chunks{run="run",state="done"} 10\n' in text
    assert [other.name for other in shared_site.folder.glob(".*")] == []
    if shutil.which("promtool") is None:
        needs.missing("promtool", "promtool (Debian package prometheus) is not installed")
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_every_form_can_be_had_at_once_and_one_of_them_on_stdout(july: Path, shared_site: Site) -> None:
    files = [shared_site.folder / name for name in ("a.html", "a.md", "a.prom")]
    pairs = zip(("--html", "--markdown", "--prometheus"), files, strict=True)
    options = [word for pair in pairs for word in pair]
    together, *printed = shared_site.badcjobs_each(
        [("report", july, *options, "--json"), *(("report", july, f"{name}=-") for name in options[::2])]
    )
    page, markdown, metrics = printed
    assert together.json["version"] == 2
    assert "<html" in files[0].read_text()[:200]
    assert page.stdout.startswith("<!doctype html>") and page.stdout.endswith("</html>\n")
    assert markdown.stdout == files[1].read_text()
    assert metrics.stdout == files[2].read_text()


def test_two_runs_stand_side_by_side(july: Path, shared_site: Site) -> None:
    cpu = shared_site.folder / "cpu"
    text, as_json, markdown, itself = shared_site.badcjobs_each(
        [("report", july, "--compare", cpu, *form) for form in ((), ("--json",), ("--markdown", "-"))]
        + [("report", july, "--compare", july / "job.sqlite")]
    )
    assert text.stdout.startswith("run is ")
    assert max(map(len, text.stdout.splitlines())) <= 100
    for word in ("settings that differ", "cpu_workers", "working", "speed (× real time)"):
        assert word in text.stdout
    document = as_json.json
    assert (document["this"]["title"], document["other"]["title"]) == ("run", "cpu")
    assert document["settings"]["simulate"] == {"this": "2", "other": None}
    found = {figure["key"]: figure for figure in document["figures"]}
    assert (found["chunks_done"]["change"], found["gpu_hours"]["other"]) == ("the same", 0.0)
    assert (found["energy_wh"]["other"], found["energy_wh"]["ratio"]) == (None, None)
    assert markdown.stdout.startswith("# run against cpu\n")
    assert f"{july} is as fast as {july / 'job.sqlite'}, with " in " ".join(itself.stdout.split())


def test_a_single_task_database_has_every_form_and_can_be_compared(july: Path, shared_site: Site) -> None:
    (task,) = (july / "tasks").glob("*.sqlite")
    as_json, page, markdown, metrics, compared = shared_site.badcjobs_each(
        [("report", task, *form) for form in (("--json",), ("--html=-",), ("--markdown=-",), ("--prometheus=-",))]
        + [("report", july, "--compare", task)]
    )
    assert (as_json.json["verdict"], as_json.json["done"], as_json.json["tasks_missing"]) == ("done", 10, [])
    assert f"<h1>{task.name}</h1>" in page.stdout
    assert markdown.stdout.replace("\\", "").startswith(f"# {task.name}: all done\n")
    assert f'run="{task.name}"' in metrics.stdout
    assert "is as fast as" in " ".join(compared.stdout.split())


def test_no_command_writes_over_somebodys_data(july: Path, shared_site: Site) -> None:
    database, settings = july / "job.sqlite", july / "run.toml"
    [task], audio = shared_site.task_databases(), shared_site.folder / "recording.wav"
    shutil.copy(next(path for path in shared_site.folder.rglob("*.wav") if path != audio), audio)
    kept = {path: path.read_bytes() for path in (database, settings, task)}
    cases: list[tuple[tuple[object, ...], str]] = [
        (("report", july, "--prometheus", "x.prom", "--html", database), "--html"),
        (("export", july, "--format", "csv", "-o", settings), "--out"),
        (("probe", audio, "--out", settings, "--", "--engine", "demo", "--simulate", 1), "--out"),
        (("template", "array", *("--set", "source=s", "--set", "out=o"), "-o", database), "--out"),
        (("record", "--simulate", 1, "--duration", 0.1, "--force", "--out", task), "--out"),
    ]
    told = shared_site.badcjobs_each([words for words, _ in cases])
    for outcome, (_, option) in zip(told, cases, strict=True):
        assert_refused(outcome, 2, f"error: {option} ", " is not written", f"try: the same command with {option} ")
    assert {path: path.read_bytes() for path in kept} == kept
    assert not (shared_site.folder / "x.prom").exists()


def test_a_reader_who_has_seen_enough_is_no_failure_under_any_name_of_stdout(july: Path, shared_site: Site) -> None:
    line = '"$0" -m badcjobs report "$1" --html /dev/stdout | head -c 9; echo " ${PIPESTATUS[0]}"'
    line += '; "$0" -m badcjobs report "$1" --markdown /dev/stdout > file.md && head -c 5 file.md'
    argv = ["bash", "-c", line, sys.executable, str(july)]
    told = subprocess.run(argv, env=shared_site.environ(), cwd=shared_site.folder, capture_output=True, text=True)
    assert (told.stdout, told.stderr) == ("<!doctype 0\n# run", "")


def test_a_page_that_is_larger_than_a_file_may_be_is_answered_with_what_helps(july: Path, shared_site: Site) -> None:
    argv = ["bash", "-c", 'ulimit -S -f 4; "$0" -m badcjobs report "$1" --html "$2"', sys.executable, july, "big.html"]
    told = subprocess.run(argv, env=shared_site.environ(), cwd=shared_site.folder, capture_output=True, text=True)
    assert told.returncode == 2
    assert "\n  try: ulimit -f unlimited   (then the same command again)\n" in told.stderr
    assert not (shared_site.folder / "big.html").exists()


def test_a_wrong_word_is_answered_with_what_is_right(july: Path, shared_site: Site) -> None:
    folder = shared_site.folder / "a folder"
    folder.mkdir()
    cases: list[tuple[tuple[object, ...], int, tuple[str, ...]]] = [
        (
            ("--json", "--markdown", "-"),
            2,
            ("--json and --markdown -", "one document", f"badcjobs report {july} --json"),
        ),
        (("--prometheus", "-", "--markdown", "-"), 2, ("--markdown - and --prometheus -",)),
        (("--json", "--html", "-"), 2, ("--json and --html -",)),
        (("--prometheus", folder), 2, ("a folder cannot be written",)),
        (("--prometheus", "no/such/x.prom"), 2, ("x.prom cannot be written", "try: mkdir -p no/such")),
        (("--markdown", folder), 2, ("a folder cannot be written",)),
        (("--compare", "nowhere"), 4, ("nowhere does not exist", "--out", "try: ls ")),
        (("--compare",), 2, ("--compare",)),
        (("--wat",), 2, ("--wat",)),
    ]
    told = shared_site.badcjobs_each([("report", july, *words) for words, _, _ in cases])
    for outcome, (_, exit_code, words) in zip(told, cases, strict=True):
        assert_refused(outcome, exit_code, *words)
