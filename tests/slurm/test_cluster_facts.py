"""What our code believes about Slurm, asked of a real one; and what the tests believe about the cluster itself."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import psutil
import pytest
from support.slurm_cluster import ClusterProblem, JobEnd, SlurmCluster
from support.waiting import wait_for


def write_script(folder: Path, *lines: str) -> Path:
    script = folder / "job.sh"
    script.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    return script


def ends_of(cluster: SlurmCluster, job_id: int) -> dict[str, JobEnd]:
    """Wait for a job and name its array tasks by their index alone."""
    return {name.partition("_")[2]: end for name, end in cluster.wait(job_id).items()}


def test_every_array_task_ends_with_its_own_exit_code(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path, "exit $((SLURM_ARRAY_TASK_ID * 75))")
    assert ends_of(slurm_cluster, slurm_cluster.sbatch(script, "--array=0-1", cwd=tmp_path)) == {
        "0": JobEnd("COMPLETED", 0),
        "1": JobEnd("FAILED", 75),
    }


def test_a_job_without_an_array_is_known_by_its_number_alone(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    job_id = slurm_cluster.sbatch(write_script(tmp_path, "kill -9 $$"), cwd=tmp_path)
    assert slurm_cluster.wait(job_id) == {str(job_id): JobEnd("FAILED", 0, signal.SIGKILL)}


def test_tasks_cancelled_before_they_started_have_an_end_too(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    job_id = slurm_cluster.sbatch(write_script(tmp_path, "true"), "--array=0-2", "--hold", cwd=tmp_path)
    slurm_cluster.run(["scancel", str(job_id)])
    assert {end.state for end in ends_of(slurm_cluster, job_id).values()} == {"CANCELLED"}


@pytest.mark.parametrize("gpus", [1, 3])
def test_a_task_sees_as_many_device_tokens_as_it_asked_gpus(
    slurm_cluster: SlurmCluster, tmp_path: Path, gpus: int
) -> None:
    script = write_script(tmp_path, "echo $CUDA_VISIBLE_DEVICES > $SLURM_ARRAY_TASK_ID.tokens")
    slurm_cluster.wait(slurm_cluster.sbatch(script, "--array=0-1", f"--gpus-per-node={gpus}", cwd=tmp_path))
    for index in (0, 1):
        tokens = (tmp_path / f"{index}.tokens").read_text().strip().split(",")
        assert len(set(tokens)) == gpus
        assert set(tokens) <= {"0", "1", "2", "3"}


def test_a_task_that_asked_no_gpu_has_no_device_variable(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = write_script(tmp_path, "echo ${CUDA_VISIBLE_DEVICES-unset} > tokens")
    slurm_cluster.wait(slurm_cluster.sbatch(script, cwd=tmp_path))
    assert (tmp_path / "tokens").read_text() == "unset\n"


def test_tasks_at_work_on_one_node_never_share_a_device(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        "started=$(date +%s%N)",
        "sleep 0.5",
        "echo $SLURMD_NODENAME $started $(date +%s%N) $CUDA_VISIBLE_DEVICES > $SLURM_ARRAY_TASK_ID.use",
    )
    slurm_cluster.wait(slurm_cluster.sbatch(script, "--array=0-5", "--gpus-per-node=2", cwd=tmp_path))
    uses = [(tmp_path / f"{index}.use").read_text().split() for index in range(6)]
    together = [
        (tokens.split(","), other_tokens.split(","))
        for (node, start, end, tokens), (other, other_start, other_end, other_tokens) in itertools.combinations(uses, 2)
        if node == other and int(start) < int(other_end) and int(other_start) < int(end)
    ]
    assert together, "no two tasks ever ran side by side, so this proved nothing"
    assert all(set(tokens).isdisjoint(other_tokens) for tokens, other_tokens in together)


# array → its indices, and the MIN, MAX, STEP and COUNT that every task is told.
SHAPES = {
    "0-3": ([0, 1, 2, 3], "0 3 1 4"),
    "1-9:4": ([1, 5, 9], "1 9 4 3"),
    "0-7:3": ([0, 3, 6], "0 6 3 3"),  # MAX is the last index, not the end of the range
    "0-4:2%1": ([0, 2, 4], "0 4 2 3"),  # one after the other: those that start late are told the same
    "5": ([5], "5 5 1 1"),
    # STEP is the first `:n` of the text, else 1, whatever the indices are. So the array is an even sequence
    # where MIN + (COUNT - 1) * STEP == MAX; a list does not look like one, not even 2,4,6.
    "3,7": ([3, 7], "3 7 1 2"),
    "1,2,5": ([1, 2, 5], "1 5 1 3"),
    "2,4,6": ([2, 4, 6], "2 6 1 3"),
    "0,10-20:5": ([0, 10, 15, 20], "0 20 5 4"),
    # The exception, only possible with a `:n`: it passes for even, and only index 3, between two steps, can tell.
    "0-2:2,3,6": ([0, 2, 3, 6], "0 6 2 4"),
}


@pytest.fixture(scope="module")
def told_shapes(slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """Run every array of SHAPES; return what each of its tasks was told, by index."""
    folder = tmp_path_factory.mktemp("shapes")
    names = " ".join(f"$SLURM_ARRAY_TASK_{name}" for name in ("MIN", "MAX", "STEP", "COUNT"))
    script = write_script(folder, f"echo {names} > ${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID")
    job_ids = {array: slurm_cluster.sbatch(script, f"--array={array}", cwd=folder) for array in SHAPES}
    return {
        array: {int(name.partition("_")[2]): (folder / name).read_text().strip() for name in slurm_cluster.wait(job_id)}
        for array, job_id in job_ids.items()
    }


@pytest.mark.parametrize("array", SHAPES)
def test_every_task_is_told_the_same_shape_of_its_array(told_shapes: dict[str, dict[int, str]], array: str) -> None:
    indices, shape = SHAPES[array]
    assert told_shapes[array] == dict.fromkeys(indices, shape)


@pytest.mark.parametrize(
    ("scancel", "signal_name"),
    [
        (["scancel"], "TERM"),
        (["scancel", "--batch", "--signal=USR1"], "USR1"),  # what --signal=B:USR1@180 sends before the time limit
    ],
)
def test_a_program_started_with_exec_hears_the_signal_itself(
    slurm_cluster: SlurmCluster, tmp_path: Path, scancel: list[str], signal_name: str
) -> None:
    program = tmp_path / "program.sh"
    program.write_text(f"trap 'echo heard > heard; exit 0' {signal_name}\ntouch ready\nwhile :; do sleep 0.1; done\n")
    job_id = slurm_cluster.sbatch(write_script(tmp_path, "exec bash program.sh"), cwd=tmp_path)
    wait_for((tmp_path / "ready").exists, "it is ready")
    slurm_cluster.run([*scancel, str(job_id)])
    slurm_cluster.wait(job_id)
    assert (tmp_path / "heard").exists()


def test_without_exec_the_warning_kills_the_shell_and_never_reaches_the_program(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    program = tmp_path / "program.sh"
    program.write_text("trap 'echo heard > heard; exit 0' USR1\ntouch ready\nwhile :; do sleep 0.1; done\n")
    job_id = slurm_cluster.sbatch(write_script(tmp_path, "bash program.sh", "true"), cwd=tmp_path)
    wait_for((tmp_path / "ready").exists, "it is ready")
    slurm_cluster.run(["scancel", "--batch", "--signal=USR1", str(job_id)])
    assert slurm_cluster.wait(job_id) == {str(job_id): JobEnd("FAILED", 0, signal.SIGUSR1)}
    assert not (tmp_path / "heard").exists()


def test_a_log_folder_that_does_not_exist_fails_the_task_without_a_word(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    job_id = slurm_cluster.sbatch(write_script(tmp_path, "touch ran"), "--output=logs/%j.log", cwd=tmp_path)
    assert slurm_cluster.wait(job_id)[str(job_id)].state == "FAILED"
    assert [path.name for path in tmp_path.iterdir()] == ["job.sh"]


def test_nothing_of_the_callers_own_slurm_job_leaks_in(
    slurm_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_GRES", "gpu:4")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "elsewhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    script = write_script(tmp_path, "echo ${SLURM_ARRAY_TASK_ID-none} ${CUDA_VISIBLE_DEVICES-none} > seen")
    slurm_cluster.wait(slurm_cluster.sbatch(script, cwd=tmp_path))
    assert (tmp_path / "seen").read_text() == "none none\n"


def test_two_clusters_side_by_side_leave_no_process_and_no_file(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    stubborn = write_script(tmp_path, "trap '' TERM", "env -i setsid sleep 600 &", "echo $! $$ > pids", "wait")
    with SlurmCluster(nodes=1, gpus=0) as other:
        other.sbatch(stubborn, "--export=NONE", cwd=tmp_path)
        wait_for(lambda: len(read_pids(tmp_path)) == 2, "both run")
    assert not other.root.exists()
    assert not [pid for pid in read_pids(tmp_path) if is_running(pid)]
    assert slurm_cluster.run(["sinfo", "-h", "-o", "%D"]).stdout.strip() == "2"


def read_pids(folder: Path) -> list[int]:
    pids = folder / "pids"
    return [int(pid) for pid in pids.read_text().split()] if pids.exists() else []


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_cluster_that_cannot_start_shows_the_logs_and_leaves_nothing() -> None:
    cluster = SlurmCluster(nodes=1, extra_conf=["NoSuchSetting=1"])
    with pytest.raises(ClusterProblem, match="unrecognized key: NoSuchSetting"):
        cluster.__enter__()
    assert not cluster.root.exists()
