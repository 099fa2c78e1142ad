"""The names of files: unique per attempt, and telling enough to be skipped by."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.model import TaskKey, stable_id
from rooms.root import BadInput, LocalFolder, RunFolder
from support.powerless import powerless_folder

KEY = TaskKey("4821", 7, 0, "gpu3")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "july")
    folder.create()
    return folder


def publish(run: RunFolder, *names: str) -> None:
    for name in names:
        (run.tasks / name).touch()


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (KEY, "4821_7.r0.gpu3"),
        (replace(KEY, restart=2), "4821_7.r2.gpu3"),
        (replace(KEY, procid=0), "4821_7.r0.gpu3.p0"),
        (TaskKey("local1800000000000-42", 0, 0, "laptop"), "local1800000000000-42_0.r0.laptop"),
    ],
)
def test_a_task_is_named_after_its_job_index_restart_node_and_place_in_the_step(key: TaskKey, name: str) -> None:
    folder = RunFolder(Path("/out"))
    assert key.name == name
    assert str(folder.task_database(key)) == f"/out/tasks/{name}.sqlite"
    assert str(folder.task_log(key)) == f"/out/tasks/{name}.log"


def test_the_files_of_a_job_are_where_the_contract_says() -> None:
    folder = RunFolder(Path("/out"))
    files = (folder.run_toml, folder.tasks, folder.job_database, folder.report)
    assert [str(path) for path in files] == ["/out/run.toml", "/out/tasks", "/out/job.sqlite", "/out/report.html"]


names = st.lists(st.text("ab_.0", min_size=1, max_size=4), min_size=1, max_size=3)


@given(names, names)
def test_ids_are_the_same_everywhere_positive_and_fit_into_six_bytes(one: list[str], other: list[str]) -> None:
    assert stable_id(*one) == stable_id(*one)
    assert 0 <= stable_id(*one) < 2**47
    assert one == other or stable_id(*one) != stable_id(*other)


def test_ids_do_not_change_between_versions_or_machines() -> None:
    # Task databases of different nodes are joined by these: a new way to make them would need a new schema.
    assert KEY.task_id == stable_id("4821_7.r0.gpu3") == 96_294_291_038_168
    born = replace(KEY, started_at_ms=1_800_000_000_000)
    assert born.task_id == 96_294_290_993_438
    assert born.task_id >> 17 == KEY.task_id >> 17, "merge reads files in the order of their names' ids"


def test_a_task_known_by_its_file_name_is_the_same_task_though_its_start_is_not_known() -> None:
    born = replace(KEY, started_at_ms=1_800_000_000_000)
    assert TaskKey.parse(born.name) == born
    assert len({born, KEY}) == 1


# --- claiming a name --------------------------------------------------------------------------------------------------


def test_the_first_claim_gets_its_own_name_and_a_log(run: RunFolder) -> None:
    assert run.claim(KEY) == KEY
    assert names_in(run.tasks) == ["4821_7.r0.gpu3.log"]


def test_a_second_run_in_the_same_job_counts_as_a_restart(run: RunFolder) -> None:
    assert [run.claim(KEY).restart for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("mode", [0, 0o300, 0o400, 0o500])
def test_a_folder_that_is_closed_to_us_cannot_be_used_and_nothing_is_left_in_it(mode: int) -> None:
    with powerless_folder() as folder:
        run = RunFolder(folder)
        run.create()
        run.tasks.chmod(mode)
        with pytest.raises(BadInput, match="cannot be used") as caught:
            run.claim(KEY)
        assert (caught.value.why or "").startswith("Permission denied: ")
        assert (caught.value.fix or "").startswith(f"ls -ld {run.tasks} ")
        run.tasks.chmod(0o700)
        assert names_in(run.tasks) == []


def test_a_claim_keeps_the_start_so_that_one_name_in_two_run_folders_has_two_ids(tmp_path: Path) -> None:
    ids = set()
    for number in range(2):
        folder = RunFolder(tmp_path / f"run{number}")
        folder.create()
        claimed = folder.claim(replace(KEY, started_at_ms=1_800_000_000_000 + number))
        assert claimed.name == KEY.name
        ids.add(claimed.task_id)
    assert len(ids) == 2


def test_a_published_database_is_never_claimed_even_without_its_log(run: RunFolder) -> None:
    publish(run, "4821_7.r0.gpu3.sqlite", "4821_7.r1.gpu3.sqlite")
    assert run.claim(KEY).restart == 2


def test_slurms_own_restart_count_is_where_the_search_begins(run: RunFolder) -> None:
    assert run.claim(replace(KEY, restart=5)).restart == 5


def test_other_nodes_indices_and_step_tasks_do_not_get_in_the_way(run: RunFolder) -> None:
    for other in (KEY, replace(KEY, node="gpu4"), replace(KEY, array_index=8), replace(KEY, procid=1)):
        assert run.claim(other) == other


def test_a_claim_given_back_leaves_nothing(run: RunFolder) -> None:
    run.give_back(run.claim(KEY))
    assert not run.path.exists()


def test_giving_back_leaves_what_belongs_to_others(run: RunFolder) -> None:
    publish(run, "4821_8.r0.gpu3.sqlite")
    run.give_back(run.claim(KEY))
    assert names_in(run.tasks) == ["4821_8.r0.gpu3.sqlite"]


def test_a_task_that_has_published_is_not_given_back(run: RunFolder) -> None:
    key = run.claim(KEY)
    publish(run, f"{key.name}.sqlite")
    run.give_back(key)
    assert names_in(run.tasks) == ["4821_7.r0.gpu3.log", "4821_7.r0.gpu3.sqlite"]


def test_a_run_folder_that_cannot_be_made_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput) as refused:
        RunFolder(tmp_path / "file" / "july").create()
    assert refused.value.what == f"--out {tmp_path}/file/july cannot be used"
    assert "Not a directory" in (refused.value.why or "")


# --- whom to ask for finished work ------------------------------------------------------------------------------------


def earlier(run: RunFolder, key: TaskKey = KEY, merged: set[str] | None = None) -> list[str]:
    return [path.name for path in run.earlier_databases(key, merged or set())]


def test_siblings_of_the_same_array_are_not_asked(run: RunFolder) -> None:
    publish(run, *(f"4821_{index}.r0.gpu{index % 3}.sqlite" for index in range(20)))
    assert earlier(run) == ["4821_7.r0.gpu1.sqlite"]


def test_earlier_attempts_other_jobs_and_runs_outside_slurm_are_asked(run: RunFolder) -> None:
    asked = ["4700_3.r0.gpu1.sqlite", "4821_7.r0.gpu1.sqlite", "4821_7.r0.gpu1.p1.sqlite", "4821_7.r1.gpu2.sqlite",
             "local1800000000000-42_0.r0.login1.sqlite"]  # fmt: skip
    publish(run, *asked, "4821_71.r0.gpu1.sqlite", "4821_6.r3.gpu1.p1.sqlite")
    assert earlier(run) == sorted(asked)


def test_a_node_whose_name_looks_like_a_task_is_still_a_node(run: RunFolder) -> None:
    publish(run, "4821_8.r0.rack_7.r0.gpu3.sqlite", "4821_7.r0.rack_8.r0.gpu3.sqlite")
    assert earlier(run) == ["4821_7.r0.rack_8.r0.gpu3.sqlite"]


def test_what_the_job_database_holds_is_not_asked_again(run: RunFolder) -> None:
    publish(run, "4700_0.r0.gpu1.sqlite", "4700_1.r0.gpu1.sqlite")
    os.mkfifo(run.tasks / "4700_2.r0.gpu1.sqlite")  # nobody ever comes to the end of that
    assert earlier(run, merged={"4700_0.r0.gpu1.sqlite"}) == ["4700_1.r0.gpu1.sqlite"]


def test_unfinished_copies_logs_and_folders_of_strangers_are_left_alone(run: RunFolder) -> None:
    publish(run, ".4700_0.r0.gpu1.sqlite.gpu1.99.tmp", ".4700_0.r0.gpu1.sqlite", "4700_0.r0.gpu1.log", "notes.txt")
    assert earlier(run) == []


def test_a_database_with_a_name_of_its_own_is_asked(run: RunFolder) -> None:
    publish(run, "copied-by-hand.sqlite")
    assert earlier(run) == ["copied-by-hand.sqlite"]


# --- the node-local folder --------------------------------------------------------------------------------------------


def test_every_task_has_a_local_folder_of_its_own(tmp_path: Path) -> None:
    one, other = LocalFolder.create(tmp_path, "live-"), LocalFolder.create(tmp_path, "live-")
    assert one != other
    assert one.path.parent == tmp_path
    one.scratch.mkdir()
    one.wrapper_file.touch()
    one.remove()
    one.remove()
    assert names_in(tmp_path) == [other.path.name]


def test_a_local_folder_that_cannot_be_made_is_refused_with_the_line_to_paste(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        LocalFolder.create(tmp_path / "gone", "live-")
    assert str(tmp_path / "gone") in refused.value.what
    assert "TMPDIR" in (refused.value.fix or "")
