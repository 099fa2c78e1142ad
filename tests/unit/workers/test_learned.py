"""What runs learn from each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rooms.workers import Learned, Lesson, MemoryLimit, known_files


def test_a_lesson_is_found_by_the_next_task_of_the_run_and_by_another_run(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path / "home")}
    here, elsewhere = (known_files("learned.json", tmp_path / name, environ) for name in ("one", "two"))
    Learned("hawkears", here).note("Tesla V100", workers=3, cores=6, settled=True)
    lesson = Lesson(workers=3, cores=6, settled=True)
    assert Learned("hawkears", here).about("Tesla V100") == lesson
    assert Learned("hawkears", elsewhere).about("Tesla V100") == lesson
    assert Learned("hawkears", elsewhere).about("H200") == Learned("demo", here).about("Tesla V100") == Lesson()


def test_what_is_nearer_wins_fact_by_fact_and_notes_add_up(tmp_path: Path) -> None:
    near, far = tmp_path / "near.json", tmp_path / "far.json"
    Learned("demo", [far]).note("GPU", workers=2, crowded_s=600.0)
    Learned("demo", [near]).note("GPU", workers=5)
    Learned("demo", [near]).note("GPU", alone_s=900.0)
    assert Learned("demo", [near, far]).about("GPU") == Lesson(workers=5, limit=MemoryLimit(600.0, 900.0))


def test_a_folder_that_cannot_be_written_is_no_harm(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    good = tmp_path / "good.json"
    Learned("demo", [blocked / "learned.json", good]).note("GPU", workers=2)
    assert Learned("demo", [blocked / "learned.json", good]).about("GPU").workers == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "good.json"]


def test_a_file_that_cannot_be_replaced_is_no_harm_and_no_draft_remains(tmp_path: Path) -> None:
    (tmp_path / "learned.json").mkdir()
    Learned("demo", [tmp_path / "learned.json"]).note("GPU", workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["learned.json"]


@pytest.mark.parametrize(
    "text",
    [
        "", "nonsense", "[]", '{"version": 99, "lessons": {"demo": {"GPU": {"workers": 2}}}}', '{"version": 1}',
        '{"version": 1, "lessons": []}', '{"version": 1, "lessons": {"demo": 3}}',
        '{"version": 1, "lessons": {"demo": {"GPU": 3}}}',
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_teaches_nothing_and_stays_usable(tmp_path: Path, text: str) -> None:
    file = tmp_path / "learned.json"
    file.write_text(text)
    assert Learned("demo", [file]).about("GPU") == Lesson()
    Learned("command", [file]).note("GPU", workers=4)
    assert json.loads(file.read_text())["version"] == 1
    assert Learned("command", [file]).about("GPU").workers == 4
