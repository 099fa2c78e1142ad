"""Files that a command is told to write: which of them are somebody's data."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from rooms.cli import Target, is_stdout, refuse_data, sources_of
from rooms.root import BadInput
from support.audio import make_wav


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with what its first task and its merge have left, a manifest, and a recording."""
    folder = tmp_path / "july"
    (folder / "tasks").mkdir(parents=True)
    (folder / "run.toml").write_text(f'[run]\nsource = ["{tmp_path}/july.csv"]\n')
    (folder / "tasks" / "4821_0.r0.gpu1.log").write_text("begin\n")
    (tmp_path / "july.csv").write_text("source_path\nx.wav\n")
    (tmp_path / "costs.toml").write_text("[report]\n")
    make_wav(tmp_path / "site.html", 1.0)  # called like a page, and yet a recording
    with closing(sqlite3.connect(tmp_path / "all.md")) as db, db:
        db.execute("CREATE TABLE t (a)")
    return folder


def write_to(*paths: str | Path, inputs: list[Path], whatever_it_holds: bool = False) -> None:
    targets = [Target(f"--{n}", Path(path), f"{n}.txt") for n, path in enumerate(paths)]
    refuse_data([*targets, Target("--none", None, "x")], inputs, whatever_it_holds=whatever_it_holds)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("july/run.toml", "it belongs to the run "),
        ("july/job.sqlite", "it belongs to the run "),  # not there yet
        ("july/submitted.json", "it belongs to the run "),
        ("july/tasks/4821_0.r0.gpu1.log", "tasks/ has"),
        ("july/tasks/new.html", "tasks/ has"),
        ("july/../july/tasks/deep/new.html", "tasks/ has"),
        ("july/logs/4821.json", "logs/ has"),
        ("july/logs/4821_1.out", "logs/ has"),
        ("sent/submitted.json", "it belongs to the run "),  # of which no task has begun
        ("sent/tasks/4821_0.r0.log", "tasks/ has"),
        ("emulated/logs/4821_1.out", "logs/ has"),
        ("july.csv", "reads it"),
        ("costs.toml", "reads it"),
        ("hard-link.html", "reads it"),
        ("link.html", "it belongs to the run "),
        ("site.html", "it is a recording"),
        ("all.md", "it is a database"),
    ],
)
def test_what_somebody_has_left_is_refused_by_whatever_name(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.chdir(run.parent)
    os.link("july.csv", "hard-link.html")
    Path("link.html").symlink_to("july/run.toml")
    for first in ("sent/submitted.json", "emulated/logs/emulation.lock"):
        Path(first).parent.mkdir(parents=True)
        Path(first).touch()
    for path in (Path(name), Path(name).absolute()):
        with pytest.raises(BadInput, match=f"--1 {path} is not written") as refused:
            write_to("new.html", path, inputs=[*sources_of(run), Path("costs.toml")])
        assert why in str(refused.value.why)
        assert refused.value.fix == "the same command with --1 1.txt"


def test_what_is_new_or_of_an_earlier_report_is_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    Path("elsewhere/tasks").mkdir(parents=True)  # nobody's run
    Path("elsewhere/logs").mkdir()
    (run / "report.html").write_text("<!doctype html>")
    for name in ("july/report.html", "new.md", "elsewhere/run.toml", "elsewhere/tasks/a.md", "july/july.prom", "july",
                 "elsewhere/logs/a.md", "elsewhere/submitted.json"):  # fmt: skip
        write_to(name, "/dev/null", "/dev/null", "-", inputs=[run, *sources_of(run)])
    write_to("all.md", inputs=[], whatever_it_holds=True)
    with pytest.raises(BadInput, match="not written"):
        write_to("july/job.sqlite", inputs=[], whatever_it_holds=True)


def test_one_file_is_not_written_twice(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    with pytest.raises(BadInput, match=r"--2 july/\.\./x\.html is not written") as refused:
        write_to("x.html", "y.md", "july/../x.html", inputs=[])
    assert refused.value.why == "--0 names it as well"


def test_the_sources_of_a_run_are_known_from_its_folder_and_from_each_of_its_databases(run: Path) -> None:
    for job in (run, run / "job.sqlite", run / "tasks" / "4821_0.r0.gpu1.sqlite"):
        assert sources_of(job) == [run.parent / "july.csv"]
    (run / "run.toml").write_text("[run\n")
    assert sources_of(run) == sources_of(run.parent) == []


def test_stdout_has_several_names() -> None:
    assert all(map(is_stdout, map(Path, ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"))))
    assert not any(map(is_stdout, (None, Path("./-/x"), Path("/dev/stderr"))))
