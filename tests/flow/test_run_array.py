"""``badcjobs run`` inside an array, told by Slurm's variables alone: whose part it is, what its files are called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.badcjobs_program import ON_CPU, Site, array_task, assert_refused, rows

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ODD = (1, 3, 5)  # sbatch --array=1-5:2


def chunks_of(site: Site, name: str) -> list[str]:
    """Return the chunks in one task's database, done or not."""
    return sorted(chunk for (chunk,) in rows(site.out / "tasks" / f"{name}.sqlite", "SELECT chunk_id FROM chunk"))


@pytest.fixture(scope="module")
def resubmitted(shared_site: Site) -> Site:
    """An array 1-5:2 of which only the first task ran; then ``--array=3,5``, a new job of another shape."""
    manifest = shared_site.manifest(8)
    first = shared_site.run(manifest, *ON_CPU, env=array_task(1, ODD, step=2))
    assert first.exit_code == 0, first.stderr
    shared_site.run_tasks(manifest, *ON_CPU, envs=[array_task(index, (3, 5), job_id=5000) for index in (3, 5)])
    return shared_site


def test_the_shards_are_disjoint_and_complete_even_when_some_indices_come_later(resubmitted: Site) -> None:
    assert chunks_of(resubmitted, "4821_1.r0.gpu-01") == ["c000", "c003", "c006"]
    assert chunks_of(resubmitted, "5000_3.r0.gpu-01") == ["c001", "c004", "c007"]
    assert chunks_of(resubmitted, "5000_5.r0.gpu-01") == ["c002", "c005"]
    assert resubmitted.rows("SELECT DISTINCT status FROM chunk") == [("done",)] * 3


def test_the_first_task_freezes_the_shape_of_the_array(resubmitted: Site) -> None:
    run_toml = tomllib.loads((resubmitted.out / "run.toml").read_text())
    assert run_toml["array"] == {"first": 1, "step": 2, "count": 3}


def test_every_task_has_its_database_and_its_log_under_the_name_of_the_contract(resubmitted: Site) -> None:
    there = sorted(path.name for path in (resubmitted.out / "tasks").iterdir())
    names = ("4821_1.r0.gpu-01", "5000_3.r0.gpu-01", "5000_5.r0.gpu-01")
    assert there == [f"{name}.{ending}" for name in names for ending in ("log", "sqlite")]


def test_the_task_row_repeats_what_the_name_says(resubmitted: Site) -> None:
    found = resubmitted.rows("SELECT job_id, array_index, restart, node, shard_index, shard_count FROM task")
    assert found == [
        ("4821", 1, 0, "gpu-01", 0, 3), ("5000", 3, 0, "gpu-01", 1, 3), ("5000", 5, 0, "gpu-01", 2, 3),
    ]  # fmt: skip


def test_an_index_outside_the_frozen_array_is_refused_with_a_line_to_paste(resubmitted: Site) -> None:
    before = sorted(resubmitted.out.rglob("*"))
    refused = resubmitted.run(resubmitted.folder / "manifest.csv", *ON_CPU, env=array_task(2, (2, 7)))
    assert_refused(refused, 2, "array index 2 is not part", "sbatch --array=1-5:2")
    assert sorted(resubmitted.out.rglob("*")) == before


def test_an_irregular_first_list_of_indices_is_refused_with_a_line_to_paste(site: Site) -> None:
    refused = site.run(site.manifest(3), *ON_CPU, env=array_task(5, (1, 2, 5)))
    assert_refused(refused, 2, "does not report the indices of a list to its tasks", "sbatch --array=0-2")
    assert not site.out.exists(), "a task that never began leaves nothing"


def test_an_array_over_a_run_that_began_without_one_is_refused_for_that_reason(site: Site) -> None:
    manifest = site.manifest(4)
    assert site.run(manifest, *ON_CPU).exit_code == 0
    refused = site.run(manifest, *ON_CPU, env=array_task(0, (0, 1)))
    assert_refused(refused, 2, "without an array")
    assert "indices of a list" not in refused.stderr


def test_the_tasks_of_a_step_share_the_part_of_their_array_task(site: Site) -> None:
    site.run_tasks(site.manifest(8), *ON_CPU, envs=step_of_two(array_task(2, (1, 2))))
    assert chunks_of(site, "4821_2.r0.gpu-01.p0") == ["c002", "c006"]
    assert chunks_of(site, "4821_2.r0.gpu-01.p1") == ["c003", "c007"]
    assert site.rows("SELECT procid FROM task") == [(0,), (1,)]


def test_each_task_takes_its_line_of_a_list_of_manifests(site: Site) -> None:
    listed = list_of_manifests(site, "dawn", "dusk")
    site.run_tasks(listed, *ON_CPU, envs=[array_task(index, (1, 2)) for index in (1, 2)])
    assert chunks_of(site, "4821_1.r0.gpu-01") == ["dawn000", "dawn001"]
    assert chunks_of(site, "4821_2.r0.gpu-01") == ["dusk000", "dusk001"]


def test_the_tasks_of_a_step_share_one_line_of_a_list_of_manifests(site: Site) -> None:
    site.run_tasks(list_of_manifests(site, "dawn", "dusk"), *ON_CPU, envs=step_of_two(array_task(1, (0, 1))))
    assert chunks_of(site, "4821_1.r0.gpu-01.p0") == ["dusk000"]
    assert chunks_of(site, "4821_1.r0.gpu-01.p1") == ["dusk001"]


def test_a_list_of_manifests_that_is_longer_than_the_array_is_refused(site: Site) -> None:
    listed = list_of_manifests(site, "dawn", "noon", "dusk")
    refused = site.run(listed, *ON_CPU, env=array_task(0, (0, 1)))
    assert_refused(refused, 2, "3 manifests", "2 tasks", "sbatch --array=0-2")


def test_a_requeued_task_has_the_next_number_and_does_only_what_is_left(site: Site) -> None:
    manifest = site.manifest(4)
    (site.folder / "audio" / "c002.wav").write_bytes(b"not audio")
    assert site.run(manifest, *ON_CPU, env=array_task(0, (0, 1))).exit_code == 1
    (site.folder / "audio" / "c002.wav").write_bytes((site.folder / "audio" / "c001.wav").read_bytes())
    env = {**array_task(0, (0, 1)), "SLURM_RESTART_COUNT": "1"}
    assert site.run(manifest, *ON_CPU, env=env).exit_code == 0
    again = site.out / "tasks" / "4821_0.r1.gpu-01.sqlite"
    assert rows(again, "SELECT chunk_id, status FROM chunk") == [("c000", "skipped"), ("c002", "done")]


def test_the_databases_of_sibling_tasks_are_not_looked_into(site: Site) -> None:
    (site.out / "tasks").mkdir(parents=True)
    (site.out / "tasks" / "4821_1.r0.gpu-02.sqlite").write_bytes(b"a sibling's: this must not even be opened")
    (site.out / "tasks" / "4700_1.r0.gpu-02.sqlite").write_bytes(b"another job's: this is looked into")
    done = site.run(site.manifest(4), *ON_CPU, env=array_task(0, (0, 1)))
    assert done.exit_code == 0
    assert "4700_1.r0.gpu-02.sqlite cannot be read" in done.stderr
    assert "4821_1.r0.gpu-02" not in done.stderr


def test_the_shard_option_wins_over_the_array(site: Site) -> None:
    done = site.run(site.manifest(6), *ON_CPU, "--shard", "2/3", env=array_task(0, (0, 1)))
    assert done.exit_code == 0
    assert chunks_of(site, "4821_0.r0.gpu-01") == ["c002", "c005"]


def test_a_task_without_a_share_ends_well(site: Site) -> None:
    done = site.run(site.manifest(2), *ON_CPU, env=array_task(2, (0, 1, 2)))
    assert done.exit_code == 0, done.stderr
    assert chunks_of(site, "4821_2.r0.gpu-01") == []
    assert site.rows("SELECT verdict FROM task") == [("done",)]


def test_slurms_own_scratch_folder_is_preferred(site: Site) -> None:
    scratch = site.folder / "slurm-tmpdir"
    scratch.mkdir()
    where = site.script("where.sh", f'dirname "$2" >> {site.folder}/where; echo start_time,end_time,label,score > "$2"')
    env = {**array_task(0, (0, 1)), "SLURM_TMPDIR": str(scratch)}
    done = site.run(
        site.manifest(2), "--command", f"{where} {{input}} {{output}}", "--cpu-workers", 1, "--no-emit-gpu-telemetry",
        env=env,
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert (site.folder / "where").read_text().startswith(f"{scratch}/")
    assert list(scratch.iterdir()) == []


def step_of_two(task: dict[str, str]) -> list[dict[str, str]]:
    """Return the variables of an srun step with two tasks inside an array task."""
    return [{**task, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(procid)} for procid in (0, 1)]


def list_of_manifests(site: Site, *names: str) -> Path:
    """Write manifests of two chunks each, and the list of them."""
    manifests = [site.manifest(2, name=f"{name}.csv", prefix=name) for name in names]
    listed = site.folder / "manifests.txt"
    listed.write_text("".join(f"{path}\n" for path in manifests))
    return listed
