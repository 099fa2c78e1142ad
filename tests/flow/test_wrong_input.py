"""Wrong input to every command: what, why and a line to paste, the right exit code, and no traceback."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.badcjobs_program import MANIFEST_HEADER, ON_CPU, Site
from support.behaviour import FixedSite
from support.pages import Pages

RUN = ("run", "good.csv", "--out", "x")
CPU = (*ON_CPU, "--out", "x")
CASES: dict[str, list[tuple[object, ...]]] = {
    "usage": [
        ("dance",), ("merge", "--loud"), ("run", "m.csv", "--grace", 5), ("submit", "m.csv", "--chunk-length", 294,
            "--tasks", 3),
        ("run", "m.csv", "--tasks", 3), ("report", "july", "--markdown"), ("demo", "extra"), (*RUN, "--retries", "few"),
        ("serve", "--port", "x"), ("serve", "--port", 70000), ("monitor", "--interval", 0), ("monitor", "a", "b"),
        ("submit", "good.csv", "--", "--out", "y"), ("submit", "good.csv", "--", "--shard", "0/2"),
        ("submit", "good.csv", "--", "other.csv"), ("plan", "good.csv", "--", "--tasks", 3), ("guide", "cooking"),
    ],
    "settings": [
        ("check", "--config", "run.cutt=false"), ("record", "--out", "r.sqlite", "--config", "run.live_mode=fast"),
        ("run", "good.csv"), ("run", "good.csv", "--config", "wrong.toml", "--config", "run.grace_s=-1", "--out", "x"),
        (*RUN, "--engine", "fax", "--interval", 0), ("merge",), ("gpus", "--simulate", 0), ("export", "--config",
            "no.toml"),
        (*RUN, "--command", "true {input} {output} {gpu}", "--cpu-workers", 1), (*RUN, *ON_CPU,
            "--engine-arg=--volume=11"),
        (*RUN, "--engine", "hawkears", "--simulate", 1, "--hawkears-python", "/no/python"),
        (*RUN, "--engine", "demo", "--simulate", "script.toml"),
    ],
    "sources": [
        ("run", "no.csv", *CPU), ("run", "empty.csv", *CPU), ("run", "latin.csv", *CPU), ("run", "silence", *CPU),
        ("run", "mistakes.csv", *CPU), ("run", "latin", *CPU), ("run", "good.csv", *ON_CPU, "--out", "good.csv"),
    ],
    "results": [
        ("merge", "nowhere"), ("report", "nowhere"), ("report", "good.csv"), ("monitor", "nowhere"), ("monitor",
            "good.csv"),
        ("report", "july", "--markdown", "-", "--prometheus", "-"), ("demo", "--out", "good.csv"), ("monitor", "audio"),
        ("record", "--out", "r.xls"), ("record", "--out", "no/r.csv"), ("record",), ("monitor", "july", "--simulate",
            2),
        ("serve", "nowhere", "--port", 0), ("serve", "--simulate", 1, "--host", "0.0.0.0", "--port", 0, "--json"),
        ("serve", "july", "--simulate", 1, "--port", 0), ("export", "nowhere", "--out", "y"),
    ],
}  # fmt: skip
FILES = {
    "empty.csv": b"", "latin.csv": MANIFEST_HEADER.encode() + b"\nrec\xff,c0,x.wav,0,1,0,,\n", "silence/notes.txt": b"",
    "script.toml": b"[[device]]\nspeed = 1\n", "july/run.toml": b"",
    "wrong.toml": b'speed = "fast"\n[run]\nretrys = 3\nretries = "three"\nengine_arg = "--x"\nsimulate = true\n'
                  b"interval = 0\n",
}  # fmt: skip


# Lines of the log, and what click says of an option in its own words.
OF_OTHERS = re.compile(r"(?m)^\d{4}-.* INFO .*\n|(?<=error: )[A-Z].*(?=\n  try: badcjobs \w+ --help)")


@pytest.fixture
def place() -> Iterator[FixedSite]:
    site = FixedSite(after_s=None)
    audio = site.manifest(2, name="good.csv").parent / "audio" / "c000.wav"
    for name, content in FILES.items():
        (site.folder / name).parent.mkdir(exist_ok=True)
        (site.folder / name).write_bytes(content)
    lines = [MANIFEST_HEADER, f"rec,c0,{audio},0,600,0,,", f"rec,c0,{audio},0,600,0,,",
        "rec,c1,/no/such/file.wav,0,600,0,,",
             f"rec,c2,{audio},600,0,0,,", f"rec,,{audio},0,600,0,,", f"rec,c3,{audio},0"]  # fmt: skip
    (site.folder / "mistakes.csv").write_text("\n".join(lines) + "\n")
    (site.folder / "latin").mkdir()
    Path(os.fsdecode(os.fsencode(site.folder) + b"/latin/caf\xe9.wav")).write_bytes(audio.read_bytes())
    yield site
    site.close()


def test_every_wrong_command_is_answered(place: FixedSite, pages: Pages) -> None:
    before = sorted(place.folder.rglob("*"))
    said = {}
    for name, commands in CASES.items():
        answers = []
        for words, done in zip(commands, place.badcjobs_each(commands), strict=True):
            assert "Traceback" not in done.stderr
            assert done.stdout == ""
            shown = place.plain(" ".join(map(str, words)))
            answers.append(
                f"$ badcjobs {shown}\nexit code {done.exit_code}\n{OF_OTHERS.sub('', place.plain(done.stderr))}"
            )
        said[f"{name}.txt"] = re.sub("TOKEN=[0-9a-f]{32}", "TOKEN=32-HEX-DIGITS", "\n".join(answers))
    envs = {
        "live_mode": {"TMPDIR": str(place.folder / "nowhere")}, "array": {"SLURM_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": "first"},
        "poll": {"BADCJOBS_POLL_S": "soon"}, "token": {"BADCJOBS_TOKEN": "my secret"},
    }  # fmt: skip
    words = dict.fromkeys(("live_mode", "array"), (*RUN, *ON_CPU, "--config", "run.live_mode=local"))
    words |= dict.fromkeys(("poll", "token"), ("serve", "--simulate", "1", "--port", 0))
    said["environment.txt"] = re.sub(
        "[0-9a-f]{32}", "32-HEX-DIGITS", "\n".join(place.say(*words[name], env=env) for name, env in envs.items())
    )
    pages(said)
    left = {path for path in {*place.folder.rglob("*")} - {*before} if place.folder / "said" not in path.parents}
    assert {path for path in left if "cache" not in path.parts} == set(), "a refused command has left something"


def test_debug_shows_the_traceback_and_keeps_the_exit_code(site: Site) -> None:
    commands = {
        ("--debug", "merge", "nowhere"): 4,
        ("run", "--loud", "--debug"): 2,
        ("run", "--loud", "--", "--debug"): 2,
    }
    told = site.badcjobs_each([*commands, ("--version",), ()])
    assert [one.exit_code for one in told] == [*commands.values(), 0, 0]
    assert ["Traceback (most recent call last)" in one.stderr for one in told] == [True, True, False, False, False]
    assert re.fullmatch(r"badcjobs [\d.]+\w*\n", told[3].stdout)
    assert told[4].stdout.startswith("Usage: badcjobs COMMAND")


def test_earlier_databases_that_cannot_be_read_are_a_warning_and_no_obstacle(site: Site) -> None:
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


def test_a_reader_of_stdout_that_leaves_is_no_bug(site: Site) -> None:
    """As in ``badcjobs guide tables | head -1``."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "badcjobs", "guide", "tables"]
    ended = subprocess.run(words, env=site.environ(), stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, "")
