"""Wrong input to every command: what, why and a line to paste, the right exit code, and no traceback."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rooms.cli import BY_NAME
from support.badcjobs_program import MANIFEST_HEADER, ON_CPU, Outcome, Site, assert_refused

COMMANDS = tuple(BY_NAME)
HEADER = MANIFEST_HEADER.encode()


@dataclass(frozen=True)
class Case:
    """A command that must be refused, and words that the answer must have."""

    args: tuple[object, ...]
    exit_code: int
    words: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)


def run(*args: object, code: int = 2, words: tuple[str, ...], files: dict[str, bytes] | None = None) -> Case:
    return Case(("run", *args, "--out", "x"), code, words, files or {})


def template(text: str, *words: str) -> Case:
    return run("good.csv", "--command", text, "--cpu-workers", 1, words=words)


CASES = {
    "a command nobody knows": Case(("dance",), 2, ("dance", "--help")),
    "an option nobody knows": Case(("merge", "--loud"), 2, ("--loud", "merge --help")),
    "an option that is a key now": Case(("run", "m.csv", "--grace", 5), 2, ("--grace", "try: --config run.grace_s=5")),
    "a key nobody knows": Case(("check", "--config", "run.cutt=false"), 2, ("run.cutt: unknown key", "run.cut?")),
    "a wrong value of a key": Case(
        ("record", "--out", "r.sqlite", "--config", "run.live_mode=fast"), 2, ('= "fast" must be one of auto, local',)
    ),
    "an option without its value": Case(("report", "july", "--markdown"), 2, ("--markdown", "badcjobs report --help")),
    # run: settings (more in tests/unit)
    "run without a folder": Case(("run", "good.csv"), 2, ("--out DIR is missing", "--out runs/first")),
    "run with words for a number": run("good.csv", "--retries", "few", words=("--retries", "few")),
    "run with hawkears where there is none": run(
        "good.csv", "--engine", "hawkears", "--simulate", 1, "--hawkears-python", "/no/python", code=3,
        words=("hawkears", "/no/python"),
    ),
    "run with an argument the demo engine does not know": run(
        "good.csv", *ON_CPU, "--engine-arg=--volume=11", words=("demo engine", "--volume=11")
    ),
    # run: commands
    "a placeholder nobody knows": template("true {input} {output} {gpu}", "{gpu} is not a placeholder", "{device}"),
    # run: sources
    "a source that does not exist": run("no.csv", *ON_CPU, words=("no.csv does not exist", "ls -l")),
    "an empty manifest": run("a.csv", *ON_CPU, words=("a.csv is empty",), files={"a.csv": b""}),
    "a manifest that is not UTF-8": run(
        "d.csv", *ON_CPU, words=("line 2", "UTF-8"), files={"d.csv": HEADER + b"\nrec\xff,c0,x.wav,0,1,0,,\n"}
    ),
    "a folder without audio": run("silence", *ON_CPU, words=("silence", "WAV, FLAC"), files={"silence/notes.txt": b""}),
    # run: simulation
    "a script with mistakes": run(
        "good.csv", "--engine", "demo", "--simulate",  "g.toml",
        words=("'index' is missing", "unknown key 'speed'"), files={"g.toml": b"[[device]]\nspeed = 1\n"},
    ),
    # the other commands
    "merge of nothing": Case(("merge",), 2, ("DIR is missing", "badcjobs merge runs/first")),
    "merge of a folder that does not exist": Case(("merge", "nowhere"), 4, ("nowhere does not exist", "--out")),
    "report of a folder that does not exist": Case(("report", "nowhere"), 4, ("does not exist", "--out", "try: ls ")),
    "report of something else": Case(("report", "good.csv"), 4, ("good.csv", "not a database")),
    "report with two documents for stdout": Case(
        ("report", "july", "--markdown", "-", "--prometheus", "-"), 2,
        ("--markdown - and --prometheus -", "badcjobs report july --markdown -   (and the others into files)"),
    ),
    "guide to a topic nobody knows": Case(("guide", "cooking"), 2, ("cooking", "slurm")),
    "gpus without any": Case(("gpus", "--simulate", 0), 2, ("--simulate", "0")),
    "demo with an argument": Case(("demo", "extra"), 2, ("extra",)),
    "demo into a file": Case(("demo", "--out", "good.csv"), 2, ("good.csv",)),
    "record into a format nobody knows": Case(("record", "--out", "r.xls"), 2, ("unknown extension '.xls'", ".csv")),
    "record into a folder that does not exist": Case(("record", "--out", "no/r.csv"), 2, ("mkdir -p no",)),
    "record without a file": Case(("record",), 2, ("--out",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(shared_site: Site) -> dict[str, Outcome]:
    """The answers of all cases, asked for together because that takes half the time."""
    shared_site.manifest(2, name="good.csv")
    for case in CASES.values():
        for name, content in case.files.items():
            (shared_site.folder / name).parent.mkdir(exist_ok=True)
            (shared_site.folder / name).write_bytes(content)
    before = sorted(shared_site.folder.glob("*"))
    answers = dict(zip(CASES, shared_site.badcjobs_each([case.args for case in CASES.values()]), strict=True))
    assert sorted(shared_site.folder.glob("*")) == before, "a refused command has left something"
    assert list(shared_site.local.iterdir()) == []
    return answers


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_command_is_answered(answers: dict[str, Outcome], name: str) -> None:
    assert_refused(answers[name], CASES[name].exit_code, *CASES[name].words)


def test_every_command_has_help_with_an_example(site: Site) -> None:
    for command, told in zip(COMMANDS, site.badcjobs_each([(name, "--help") for name in COMMANDS]), strict=True):
        assert told.exit_code == 0
        assert f"Example:\n  badcjobs {command}" in told.stdout
        lines = told.stdout.splitlines()
        assert len(lines) <= 40, command
        assert max(map(len, lines)) <= 80, command


def test_all_commands_together_have_at_most_130_options(site: Site) -> None:
    pages = site.badcjobs_each([(name, "--help") for name in COMMANDS])
    assert len(COMMANDS) == 17
    assert sum(len(re.findall(r"(?m)^  (?:-\w, )?--?[\[a-z]", page.stdout)) for page in pages) <= 130


def test_the_version_is_one_line(site: Site) -> None:
    told = site.badcjobs("--version")
    assert told.exit_code == 0
    assert told.stdout.startswith("badcjobs ")
    assert len(told.stdout.splitlines()) == 1


def test_debug_shows_the_traceback_and_keeps_the_exit_code(site: Site) -> None:
    commands = {("merge", "nowhere"): 4, ("run", "--loud"): 2}
    for told, exit_code in zip(
        site.badcjobs_each([("--debug", *args) for args in commands]), commands.values(), strict=True
    ):
        assert told.exit_code == exit_code
        assert "Traceback (most recent call last)" in told.stderr
        assert "badcjobs: error: " in told.stderr


def test_all_mistakes_of_a_manifest_are_told_at_once_with_their_lines(site: Site) -> None:
    audio = site.manifest(1).parent / "audio" / "c000.wav"
    manifest = site.folder / "wrong.csv"
    lines = [
        MANIFEST_HEADER,
        f"rec,c0,{audio},0,600,0,,",
        f"rec,c0,{audio},0,600,0,,",
        "rec,c1,/no/such/file.wav,0,600,0,,",
        f"rec,c2,{audio},600,0,0,,",
        f"rec,,{audio},0,600,0,,",
        f"rec,c3,{audio},0",
    ]
    manifest.write_text("\n".join(lines) + "\n")
    refused = site.run(manifest, *ON_CPU)
    assert_refused(
        refused, 2, "5 mistakes", "line 3", "line 4: no such file: /no/such/file.wav", "line 5: end_ms",
        "line 6: chunk_id is empty", "line 7",
    )  # fmt: skip
    assert not site.out.exists(), "a source with mistakes is not begun"
    assert list(site.local.iterdir()) == []


def test_a_file_name_that_is_not_utf8_is_a_mistake_and_no_bug(site: Site) -> None:
    audio = site.manifest(1).parent / "audio"
    (audio / "c000.wav").rename(os.fsdecode(os.fsencode(audio) + b"/caf\xe9.wav"))
    told = site.run(audio, *ON_CPU)
    assert_refused(told, 2, "UTF-8")


def test_a_run_folder_that_is_a_file_is_refused(site: Site) -> None:
    site.out.write_text("a file")
    assert_refused(site.run(site.manifest(1), *ON_CPU), 2, "--out", "cannot be used")


def test_a_node_local_folder_that_does_not_exist_is_refused_when_it_is_insisted_on(site: Site) -> None:
    env = {"TMPDIR": str(site.folder / "nowhere")}
    refused = site.run(site.manifest(1), *ON_CPU, "--config", "run.live_mode=local", env=env)
    assert_refused(refused, 2, "nowhere", "export TMPDIR=")
    assert not site.out.exists()


def test_slurm_variables_that_are_no_numbers_are_named(site: Site) -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "first"}
    assert_refused(site.run(site.manifest(1), *ON_CPU, env=env), 2, "SLURM_ARRAY_TASK_ID=first")


def test_earlier_databases_that_cannot_be_read_are_a_warning_and_no_obstacle(site: Site) -> None:
    manifest = site.manifest(3)
    assert site.run(manifest, *ON_CPU).exit_code == 0
    (earlier,) = site.task_databases()
    half = earlier.with_name("half.sqlite")
    half.write_bytes(earlier.read_bytes())
    with closing(sqlite3.connect(half)) as db:
        db.execute("DROP TABLE chunk")
    (site.out / "job.sqlite").write_bytes(half.read_bytes())  # nor has it the list of what was merged
    earlier.write_bytes(b"gone bad")
    again = site.run(manifest, *ON_CPU, "--json")
    assert again.exit_code == 0, again.stderr
    assert again.json["chunks"] == {"done": 3}
    for name in (earlier.name, "half.sqlite", "job.sqlite"):
        assert f"{name} cannot be read" in again.stderr


def test_a_reader_of_stdout_that_leaves_is_no_bug(site: Site) -> None:
    """As in ``badcjobs guide tables | head -1``."""
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "badcjobs", "guide", "tables"],
        env=site.environ(),
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_run_folder_may_have_a_name_that_needs_care(site: Site) -> None:
    site.out = site.folder / "été 100% #1?"
    assert site.run(site.manifest(2), *ON_CPU).exit_code == 0
    merged = site.badcjobs("merge", site.out, "--json")
    assert (merged.exit_code, merged.json["done"]) == (0, 2)
    assert Path(site.out / "report.html").exists()
