"""run.toml: frozen by the first task, and binding for all the others."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.model import ArrayShape, Cutting, parse_patterns
from rooms.root import BadInput, FrozenRun, Project, RunSettings, check_against, freeze

SETTINGS = RunSettings(out=Path("runs/july"), source=("m.csv",), engine="demo")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def frozen(chosen: RunSettings = SETTINGS, array: ArrayShape | None = None, cwd: str = "/data") -> FrozenRun:
    return FrozenRun.of(chosen, array, Path(cwd))


def test_the_first_task_writes_the_file_and_a_later_one_reads_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert FrozenRun.read(path) is None
    first = frozen(array=ArrayShape(1, 4, 3))
    assert freeze(path, first, "0.1.0") == first
    assert freeze(path, frozen(replace(SETTINGS, retries=9)), "0.2.0") == first
    assert FrozenRun.read(path) == first
    assert 'written_by = "badcjobs 0.1.0"' in path.read_text()
    assert names_in(tmp_path) == ["run.toml"]


def test_of_many_tasks_that_start_together_exactly_one_is_first(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    fork = multiprocessing.get_context("fork")
    barrier, answers = fork.Barrier(6), fork.SimpleQueue()

    def start(retries: int) -> None:
        barrier.wait()
        answers.put(freeze(path, frozen(replace(SETTINGS, retries=retries)), "0.1.0").settings["retries"])

    tasks = [fork.Process(target=start, args=(number,)) for number in range(6)]
    for task in tasks:
        task.start()
    seen = {answers.get() for _ in tasks}
    for task in tasks:
        task.join()
    assert seen == {FrozenRun.read(path).settings["retries"]}  # type: ignore[union-attr]
    assert names_in(tmp_path) == ["run.toml"]


def test_paths_are_absolute_but_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "key.csv").touch()
    (tmp_path / "m.csv").symlink_to("data/key.csv")
    run = frozen(replace(SETTINGS, source=("m.csv", "/abs/x.csv", "../y.csv"), root="audio"), cwd=str(tmp_path))
    assert run.settings["source"] == (f"{tmp_path}/m.csv", "/abs/x.csv", f"{tmp_path.parent}/y.csv")
    assert run.settings["root"] == f"{tmp_path}/audio"


def test_tasks_that_say_the_same_from_different_folders_agree() -> None:
    here = frozen(replace(SETTINGS, source=("july/m.csv",)), cwd="/data")
    there = frozen(replace(SETTINGS, source=("m.csv",)), cwd="/data/july")
    check_against(here, there, Path("run.toml"))


def test_what_may_differ_between_tasks_is_not_frozen() -> None:
    one = frozen(replace(SETTINGS, simulate=2, max_gpus=1, grace_s=5.0, shard="0/2", resume=False, telemetry=False))
    check_against(one, frozen(replace(SETTINGS, retry_failed=False, stop_after="1:00:00")), Path("run.toml"))
    check_against(one, frozen(), Path("run.toml"))
    assert set(one.settings) == {"source", "engine", "engine_arg", "interval", "retries"}


def test_how_recordings_are_cut_cannot_change_in_the_middle_of_a_run() -> None:
    run = frozen(replace(SETTINGS, chunk_length_s=300.0, overlap_s=6.0))
    assert run.cutting == Cutting(None, 300.0, 6.0)
    check_against(run, frozen(replace(SETTINGS, chunk_length_s=300, overlap_s=6)), Path("run.toml"))
    with pytest.raises(BadInput, match=r"chunk_length, cut, overlap: different from run\.toml") as refusal:
        check_against(run, frozen(replace(SETTINGS, chunk_length_s=60.0, cut=True)), Path("run.toml"))
    assert (refusal.value.why or "").splitlines() == [
        "chunk_length was 300.0, now 60.0", "cut was (not set), now true", "overlap was 6.0, now 0.0",
    ]  # fmt: skip
    with pytest.raises(BadInput, match="chunk_length, overlap: different from"):
        check_against(frozen(), run, Path("run.toml"))  # as a version froze it that could not cut


def test_every_setting_that_differs_is_named_with_both_values() -> None:
    now = frozen(replace(SETTINGS, retries=5, engine_args=("--burn-s=1",), root="audio", interval_s=0.5))
    with pytest.raises(BadInput) as refused:
        check_against(frozen(), now, Path("runs/july/run.toml"))
    assert refused.value.what == "engine_arg, interval, retries, root: different from runs/july/run.toml"
    assert (refused.value.why or "").splitlines() == [
        'engine_arg was [], now ["--burn-s=1"]',
        "interval was 1.0, now 0.5",
        "retries was 2, now 5",
        'root was (not set), now "/data/audio"',
    ]
    assert refused.value.exit_code == 2


def test_a_whole_number_written_by_hand_for_a_fraction_is_no_difference(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(frozen().to_toml("0.1.0").replace("interval = 1.0", "interval = 1"))
    written = FrozenRun.read(path)
    assert written is not None
    check_against(written, frozen(), path)


def test_the_file_can_be_given_as_config(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    chosen = replace(SETTINGS, source=("/data/m.csv",), engine_args=("--burn-s=0.1",), interval_s=0.25, retries=4)
    freeze(path, frozen(chosen, ArrayShape(0, 1, 4)), "0.1.0")
    assert Project.read([str(path)], tmp_path).make(RunSettings, {"out": str(chosen.out)}, "run") == chosen


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@settings(deadline=None, max_examples=60)
@given(args=st.lists(texts, max_size=3), command=st.none() | texts, interval_s=st.floats(0.01, 1e6))
def test_any_text_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, args: list[str], command: str | None, interval_s: float
) -> None:
    path = tmp_path_factory.getbasetemp() / "any-run.toml"
    run = frozen(replace(SETTINGS, engine_args=tuple(args), command=command, interval_s=interval_s))
    path.write_text(run.to_toml("0.1.0"), encoding="utf-8")
    assert FrozenRun.read(path) == run


@pytest.mark.parametrize(
    "text",
    ["no toml at all", "[array]\nfirst = 0\n", "[array]\nfirst = 0\nstep = 1\ncount = 2\nlast = 3\n", "run = 3\n",
     "array = 7\n", '[array]\nfirst = "a"\nstep = 1\ncount = 2\n', "recordings = 3\n",
     "[recordings]\npatterns = [1]\n", "[run]\nchunk_length = 'long'\n"],
)  # fmt: skip
def test_a_file_that_somebody_broke_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as refused:
        FrozenRun.read(path)
    assert str(path) in refused.value.what


@pytest.mark.parametrize("out", ["runs/july", "/scratch/runs/july", "../july"])
@pytest.mark.parametrize(("python", "found"), [("python3", "python3"), ("venv/bin/python", "/ada/venv/bin/python")])
def test_paths_that_a_task_was_told_work_from_any_folder_however_its_out_was_given(
    out: str, python: str, found: str
) -> None:
    told = RunSettings(Path(out), hawkears_root="../HawkEars", hawkears_python=python, simulate="/data/tape")
    line = frozen().command_line(Path("/runs/july"), json.loads(told.to_json(Path("/ada"))))
    assert line.endswith(f" --hawkears-python={found} --hawkears-root=/HawkEars --simulate=/data/tape")


PATTERNS = parse_patterns(["{study_area}/{location}/*", '{location}_"0+1"_{date}?{time}.wav'])[0]


def test_what_paths_of_recordings_mean_cannot_change_in_the_middle_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    run = freeze(path, frozen(replace(SETTINGS, patterns=PATTERNS)), "0.1.0")
    check_against(run, frozen(replace(SETTINGS, patterns=PATTERNS)), path)
    with pytest.raises(BadInput) as refused:
        check_against(run, frozen(replace(SETTINGS, patterns=PATTERNS[:1], retries=5)), path)
    assert refused.value.what == f"[recordings] patterns, retries: different from {path}"
    texts = r'["{study_area}/{location}/*", "{location}_\"0+1\"_{date}?{time}.wav"]'
    assert f'[recordings] patterns was {texts}, now ["{{study_area}}/{{location}}/*"]' in (refused.value.why or "")
    assert (refused.value.fix or "").startswith(f"use the same settings (--config={path} has them), or another --out")
    assert (refused.value.fix or "").endswith("; badcjobs export --config FILE uses other patterns")
    with pytest.raises(BadInput, match="patterns: different from"):
        check_against(frozen(), run, path)  # a run without any is one, too


def test_the_command_that_goes_on_has_the_patterns_of_the_run(tmp_path: Path) -> None:
    chosen = replace(SETTINGS, source=("/data/m.csv",), patterns=PATTERNS)
    run = freeze(tmp_path / "run.toml", frozen(chosen), "0.1.0")
    line = run.command_line(tmp_path, {"simulate": 2})
    assert line == f"badcjobs run --config={tmp_path}/run.toml --out={tmp_path} --simulate=2"
    again = Project.read([str(tmp_path / "run.toml")], tmp_path).make(
        RunSettings, {"out": str(chosen.out), "simulate": "2"}, "run"
    )
    check_against(run, frozen(again), tmp_path / "run.toml")
