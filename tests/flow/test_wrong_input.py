"""Wrong input to every command: what, why and a line to paste, the right exit code, and no traceback."""

import os
import re
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.badcjobs_program import MANIFEST_HEADER, ON_CPU
from support.behaviour import FixedSite
from support.cases import read_blocks

FILES = {
    "empty.csv": b"", "latin.csv": MANIFEST_HEADER.encode() + b"\nrec\xff,c0,x.wav,0,1,0,,\n", "silence/notes.txt": b"",
    "script.toml": b"[[device]]\nspeed = 1\n", "july/run.toml": b"",
    "wrong.toml": b'speed = "fast"\n[run]\nretrys = 3\nretries = "three"\nengine_arg = "--x"\nsimulate = true\n'
                  b"interval = 0\n",
}  # fmt: skip
# Lines of the log, and what click says of an option in its own words.
OF_OTHERS = re.compile(r"(?m)^\d{4}-.* INFO .*\n|(?<=error: )[A-Z].*(?=\n  try: badcjobs \w+ --help)")


@pytest.fixture
def place():
    site = FixedSite(after_s=None)
    audio = site.manifest(2, name="good.csv").parent / "audio" / "c000.wav"
    for name, content in FILES.items():
        (site.folder / name).parent.mkdir(exist_ok=True)
        (site.folder / name).write_bytes(content)
    rows = [f"c0,{audio},0,600,0,,", f"c0,{audio},0,600,0,,", "c1,/no/such/file.wav,0,600,0,,", f"c2,{audio},600,0,0,,",
            f",{audio},0,600,0,,", f"c3,{audio},0"]  # fmt: skip
    (site.folder / "mistakes.csv").write_text("\n".join([MANIFEST_HEADER, *(f"rec,{row}" for row in rows), ""]))
    (site.folder / "latin").mkdir()
    Path(os.fsdecode(os.fsencode(site.folder) + b"/latin/caf\xe9.wav")).write_bytes(audio.read_bytes())
    yield site
    site.close()


def test_every_wrong_command_is_answered(place, pages):
    before, said = {*place.folder.rglob("*")}, {}
    for case in read_blocks("wrong_commands.txt"):
        name, *lines = case.splitlines()
        envs, commands = zip(*(line.split("badcjobs ", 1) for line in lines), strict=True)
        changes = [dict(word.split("=") for word in shlex.split(env)) for env in envs]
        answers = place.badcjobs_each([*map(shlex.split, commands)], changes)
        assert {(done.stdout, "Traceback" in done.stderr) for done in answers} == {("", False)}
        text = "\n".join(
            f"$ {line}\nexit code {done.exit_code}\n{OF_OTHERS.sub('', place.plain(done.stderr))}"
            for line, done in zip(lines, answers, strict=True)
        )
        said[name] = re.sub("TOKEN=[0-9a-f]{32}", "TOKEN=32-HEX-DIGITS", text)
    pages(said)
    left = {path for path in {*place.folder.rglob("*")} - before if place.folder / "said" not in path.parents}
    assert {path for path in left if "cache" not in path.parts} == set(), "a refused command has left something"


def test_debug_shows_the_traceback_and_keeps_the_exit_code(site):
    lines = ("--debug merge nowhere", "run --loud --debug", "run --loud -- --debug", "--version", "")
    reported = site.badcjobs_each([line.split() for line in lines])
    assert [one.exit_code for one in reported] == [4, 2, 2, 0, 0]
    assert ["Traceback (most recent call last)" in one.stderr for one in reported] == [True, True, False, False, False]
    assert re.fullmatch(r"badcjobs [\d.]+\w*\n", reported[3].stdout)
    assert reported[4].stdout.startswith("Usage: badcjobs COMMAND")


def test_a_bug_is_called_one_with_what_to_do_about_it(site):
    (site.folder / "lib").mkdir()
    (site.folder / "lib" / "csv.py").write_text("raise RuntimeError('broken')\n")
    env = {"PYTHONPATH": os.pathsep.join([str(site.folder / "lib"), site.environ()["PYTHONPATH"]])}
    for words, fix in (
        (("plan", "x"), "the same command with --debug:  badcjobs --debug plan …"),
        (("--debug", "plan", "x"), "report it, with the traceback above"),
    ):
        reported = site.badcjobs(*words, env=env)
        assert reported.exit_code == 70
        end = f"badcjobs: error: RuntimeError: broken\n  why: this is a bug in badcjobs\n  try: {fix}\n"
        assert reported.stderr.endswith(end)


def test_earlier_databases_that_cannot_be_read_are_a_warning_and_no_obstacle(site):
    """Also in a run folder whose name needs care."""
    site.out = site.folder / "été 100% #1?"
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
    assert (again.exit_code, again.json["chunks"]) == (0, {"done": 3})
    for name in (earlier.name, "half.sqlite", "job.sqlite"):
        assert f"{name} cannot be read" in again.stderr
    for path in (earlier, half, site.out / "job.sqlite"):
        path.unlink()
    merged = site.badcjobs("merge", site.out, "--json")
    assert (merged.exit_code, merged.json["done"], (site.out / "report.html").exists()) == (0, 3, True)
