"""--keep-raw: where copies of the engine's output files are written, and what happens if they cannot be."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from rooms.model import Chunk
from rooms.root import SubprocessLauncher, SystemClock, option_words
from rooms.workers import CommandEngine, EngineStart


def make_engine(raw: Path | None) -> CommandEngine:
    start = EngineStart((), {}, SubprocessLauncher("test"), SystemClock(), raw)
    return CommandEngine(start, "program {input} {output}")


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_file_is_kept_byte_for_byte_and_replaced_by_that_of_a_retry(tmp_path: Path) -> None:
    engine, chunk = make_engine(tmp_path / "raw"), Chunk("Area/rec 1", "c0", "a.wav", "a.wav")
    engine.keep_raw(chunk, b"\xff first")
    engine.keep_raw(chunk, b"second\r\n")
    assert files_in(tmp_path) == {"raw/Area/rec 1/c0.csv": b"second\r\n"}


def test_ids_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    make_engine(tmp_path / "raw").keep_raw(Chunk("../..", "../../c" + 300 * "x", "a.wav", "a.wav"), b"1")
    (name,) = files_in(tmp_path)
    assert name.startswith("raw/%2E%2E/%2E%2E/..%2F..%2Fcxx")


def test_without_the_option_nothing_is_written(tmp_path: Path) -> None:
    make_engine(None).keep_raw(Chunk("r", "c", "a.wav", "a.wav"), b"1")
    assert files_in(tmp_path) == {}


def test_files_that_cannot_be_written_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "raw").write_text("not a folder")
    engine = make_engine(tmp_path / "raw")
    with caplog.at_level(logging.INFO):
        for name in ("c0", "c1"):
            engine.keep_raw(Chunk("r", name, "a.wav", "a.wav"), b"1")
    (line,) = caplog.messages
    assert line == f"--keep-raw: {tmp_path}/raw/r cannot be written (Not a directory); the work continues"


def test_a_task_gets_it_as_options_that_run_accepts() -> None:
    assert list(option_words({"keep_raw": True})) == ["--keep-raw"]
    assert list(option_words({"keep_raw": False, "resume": False})) == ["--no-resume", "--config=run.keep_raw=false"]
