"""``badcjobs cluster`` and ``badcjobs check`` asked on a real Slurm."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.slurm_cluster import SlurmCluster
from support.waiting import wait_for


def ask(cluster: SlurmCluster, *args: str, cwd: Path) -> dict[str, Any]:
    done = cluster.run([sys.executable, "-m", "badcjobs", args[0], "--json", *args[1:]], cwd=cwd, check=False)
    assert done.returncode in (0, 1), done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.fixture
def busy_node(slurm_cluster: SlurmCluster, tmp_path: Path) -> Iterator[str]:
    """A node of which a job holds three GPUs."""
    script = tmp_path / "hold.sh"
    script.write_text("#!/bin/bash\necho $SLURMD_NODENAME > node.tmp; mv node.tmp node\nexec sleep 600\n")
    job_id = slurm_cluster.sbatch(script, "--gpus-per-node=3", cwd=tmp_path)
    wait_for((tmp_path / "node").exists, "the job runs")
    yield (tmp_path / "node").read_text().strip()
    slurm_cluster.run(["scancel", str(job_id)])


def test_the_gpus_of_a_running_job_are_used_and_a_larger_one_goes_elsewhere(
    slurm_cluster: SlurmCluster, busy_node: str, tmp_path: Path
) -> None:
    said = ask(slurm_cluster, "cluster", "--gpus-per-task", "2", cwd=tmp_path)
    nodes = {one["name"]: one for one in said["nodes"]}
    assert set(nodes) == set(slurm_cluster.shape.node_names)
    assert nodes[busy_node]["used"] >= 3
    assert nodes[busy_node]["total"] == slurm_cluster.shape.gpus
    assert said["total"] == slurm_cluster.shape.gpus * len(nodes)
    assert said["best"]["node"] != busy_node
    assert "gpu" in {one["name"] for one in said["partitions"]}


def test_the_preflight_asks_this_slurm_for_its_limits_and_its_clock(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    said = ask(slurm_cluster, "check", "--tasks", "20000", "--out", "out", "--", "--engine", "demo", cwd=tmp_path)
    found = {(one["severity"], one["subject"]): one for one in said["findings"]}
    config = slurm_cluster.run(["scontrol", "show", "config"]).stdout
    most = int(config.partition("MaxArraySize")[2].split()[1])
    assert found["problem", "array"]["fix"] == f"--tasks {most}"
    assert "Slurm's controller" in found["fine", "clock"]["text"]
    assert f"{slurm_cluster.shape.kill_wait_s} s after TERM" in found["warning", "grace"]["text"]
    assert ("warning", "out") in found  # a disk of this machine, for all that Slurm knows


def test_the_preflight_knows_how_large_a_node_of_this_slurm_is(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    gpus = slurm_cluster.shape.gpus
    for asked, partition in ((gpus + 1, None), (gpus + 1, "gpu"), (gpus, "gpu"), (gpus + 1, "nowhere")):
        where = f"#SBATCH --partition={partition}\n" if partition else ""
        script = f"#!/bin/bash\n#SBATCH --gpus-per-node={asked}\n{where}hostname\n"
        (tmp_path / "job.sbatch").write_text(script)
        said = ask(slurm_cluster, "check", "job.sbatch", cwd=tmp_path)
        found = [one["fix"] for one in said["findings"] if one["severity"] == "problem"]
        refused = slurm_cluster.run(["sbatch", "--test-only", "job.sbatch"], cwd=tmp_path, check=False).returncode != 0
        assert refused == (asked > gpus)
        fitting = "#SBATCH --partition=gpu" if partition == "nowhere" else f"#SBATCH --gpus-per-node={gpus}"
        assert [fix.partition("   (")[0] for fix in found] == ([fitting] if refused else [])


def test_options_that_only_look_like_some_and_folders_that_are_not_there_are_as_the_preflight_says(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "near.sbatch").write_text("#!/bin/bash\n# SBATCH --birds\n  #SBATCH --birds\nhostname\n")
    taken = slurm_cluster.run(["sbatch", "--test-only", "near.sbatch"], cwd=tmp_path, check=False)
    assert taken.returncode == 0, "both are comments to sbatch"
    said = ask(slurm_cluster, "check", "near.sbatch", cwd=tmp_path)
    assert [one["fix"][:15] for one in said["findings"] if one["subject"] == "script"] == ["#SBATCH --birds"] * 2
