"""The emulation beside a real sbatch: which options both take, how many GPUs they give, and what a job is told."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.slurm_cluster import FOREIGN, SlurmCluster

from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput
from badcjobs.model import Device
from badcjobs.scheduler.device_pool import DevicePool
from badcjobs.scheduler.job_script import parse_limit, read_request
from badcjobs.scheduler.local import LocalScheduler, Machine
from badcjobs.scheduler.local_environment import Node
from badcjobs.scheduler.local_job import Terms
from badcjobs.stop import StopRequest
from badcjobs.this_machine import NoLocks

# Options by themselves, then such as must or must not stand together.
OPTIONS = [
    "--job=x", "--arr=0-3", "--tim=5", "--time=5", "--t=5", "--gpus-per=1", "--gpus-per-n=1", "--gre=gpu:1", "--me=1G",
    "--no-r", "--re", "--req", "--nta=2", "--cpus-per=2", "--cpus-per-t=2", "--exclu", "--exclus", "--exp=ALL",
    "--ou=x", "--o=x", "--open=append", "--pa=gpu", "--part=gpu", "--sig=B:USR1@60", "--share", "--tasks-per-node=1",
    "--tasks=1", "--cores=1", "--workdir=x", "--hold=x", "--node=1", "--q", "--v", "--wai", "--=x", "--nice",
    "--overs", "--ge", "--threads=1", "--thread=1", "--core=1", "--de=x", "--h=x", "--no-k", "-HQt5", "-t=5", "-koff",
    "-sx", "--exclusive", "--exclusive=user", "--exclusive=x", "--ntasks=0", "--ntasks=x", "--cpus-per-task=0",
    "--open-mode=x", "--open-mode=app", "--signal=FOO", "--nodes=", "--nodes=1,3", "--time=", "--array=",
    *[f"--mem={mem}" for mem in (
        "1GB", "1KB", "1TB", "1gb", "1Gb", "1.5G", "10k", "0", "0G", "1 G", "G", "", "1GiB", "1B", "1P", "1GG", "-1",
        "+1G",
    )],
    "--mem=1G --mem-per-cpu=1G", "--cpus-per-gpu=2 --cpus-per-task=1 -G2", "--gpus-per-task=1", "--gpus-per-task=1 -n1",
    "--gpus-per-task=1 --gpus=1", "--gpus-per-task=1 --gpus-per-node=1", "--gpus-per-task=2 --gpus=3",
    "--gpus-per-task=1 -n2 --gpus=4", "--gpus-per-task=2 -n2 --gpus-per-node=3", "--gres=gpu:2 --gpus=1",
    "--gpus=3 --gres=gpu:2", "--gpus-per-socket=1",
]  # fmt: skip
# What a node with four GPUs gives: with --exclusive all of them, whatever is asked for.
GRANTS = [
    "", "--gres=gpu:2 --gpus-per-node=1", "--gpus-per-node=1 --gres=gpu:2", "--gpus=2 --gpus-per-node=2",
    "--gres=gpu:1,gpu:2", "--gres=none", "--gpus-per-node=0", "--gpus-per-task=1 -N1", "--gpus-per-task=2 --gpus=4",
    "--gpus-per-task=1 --ntasks-per-node=2", "--gres=gpu:2 -n2 --gpus-per-task=1", "--exclusive",
    "--exclusive --gpus-per-node=1", "--exclusive --gres=none -c3", "--exclusive=user", "-G2 --cpus-per-gpu=2",
    "--array=7 --gpus-per-node=2 -n2 -c2 --mem=1G --ntasks-per-node=2 --chdir=sub",
    "-G1 --gpu-bind=none --gpu-freq=low --open-mode=append -m block --threads-per-core=1 -O --account=x",
    "--mem-per-cpu=1GB --ntasks-per-core=1 --export=ALL,A=1", "--export=NONE --mem-per-gpu=1G -G1",
]  # fmt: skip

# Of the cluster itself, where its daemons are; the emulation has none to talk to.
OF_THE_CLUSTER = {"SLURM_CONF", "SLURM_WORKING_CLUSTER"}
# Of newer versions of Slurm, and of sites.
OF_THE_EMULATION = {"SLURM_JOB_END_TIME", "SLURM_JOB_START_TIME", "SLURM_TMPDIR"}
# Numbers and names that differ from job to job and from machine to machine.
OWN = {
    "SLURM_ARRAY_JOB_ID", "SLURM_CLUSTER_NAME", "SLURM_JOBID", "SLURM_JOB_ID", "SLURM_JOB_PARTITION", "SLURM_TASK_PID",
    "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURMD_NODENAME", "SLURM_SUBMIT_HOST", "SLURM_TOPOLOGY_ADDR", "HOSTNAME",
    "CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS",
}  # fmt: skip
SCRIPT = """#!/bin/bash
env -0 > {folder}/env.part
echo $$ > {folder}/pid
pwd > {folder}/pwd
mv {folder}/env.part {folder}/env
"""


def emulate(folder: Path, script: str, options: list[str]) -> None:
    environ = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    pool = DevicePool([Device(str(i), "", index=i, uuid=f"GPU-{i}") for i in range(4)], NoLocks)
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    machine = Machine(
        environ=environ,
        clock=SystemClock(),
        stop=StopRequest(SystemClock().monotonic_s),
        node=Node("here", 24, user, folder),
        open_pool=lambda count: pool if count else DevicePool((), NoLocks),
        tell=lambda words: None,
    )
    LocalScheduler(machine, Terms(grace_s=5)).run_script(script, name="job.sh", options=options)


def variables(folder: Path) -> dict[str, str]:
    pairs = (one.partition("=") for one in (folder / "env").read_text().split("\0"))
    return {
        name: value for name, _, value in pairs if name.startswith(("SLURM", "CUDA_VIS", "ENVIRONMENT", "HOSTNAME"))
    }


@pytest.fixture(scope="module")
def both(slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Run every line of GRANTS both ways; return where each has left what it saw."""
    found: dict[str, tuple[Path, Path]] = {}
    jobs = []
    for line in GRANTS:
        parent = tmp_path_factory.mktemp("grants")
        found[line] = (parent / "slurm", parent / "local")
        for folder in found[line]:
            (folder / "sub").mkdir(parents=True)
            (folder / "job.sh").write_text(SCRIPT.format(folder=folder))
        words = ["--exclude=gpu1", *line.split()]  # or it spreads a job; an emulated one has nowhere else to go
        jobs.append(slurm_cluster.sbatch(parent / "slurm" / "job.sh", *words, cwd=parent / "slurm"))
    for line, (_, local) in found.items():
        emulate(local, SCRIPT.format(folder=local), line.split())
    for job in jobs:
        slurm_cluster.wait(job, timeout_s=120)
    return found


def test_both_take_and_refuse_the_same_options(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/bash\n")

    def takes_it(line: str) -> bool:
        words = ["sbatch", "--hold", "--comment=an-option", *_words(line), "job.sh"]
        return slurm_cluster.run(words, cwd=tmp_path, check=False).returncode == 0

    with ThreadPoolExecutor(2) as pool:
        sbatch = dict(zip(OPTIONS, pool.map(takes_it, OPTIONS), strict=True))
    held = slurm_cluster.run(["squeue", "-h", "-t", "PENDING", "-o", "%F %k"]).stdout.splitlines()
    slurm_cluster.run(["scancel", *(line.split()[0] for line in held if line.endswith(" an-option"))])
    assert set(sbatch.values()) == {True, False}
    assert {line: is_taken_here(line) for line in OPTIONS} == sbatch


@pytest.mark.parametrize("time", ["0:04", "1:01", "0:00", "0", "1:00:01"])
def test_both_count_time_limits_in_whole_minutes(slurm_cluster: SlurmCluster, tmp_path: Path, time: str) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/bash\n")
    job = slurm_cluster.sbatch(tmp_path / "job.sh", "--hold", f"--time={time}", cwd=tmp_path)
    said = slurm_cluster.run(["squeue", "-h", "-j", str(job), "-O", "TimeLimit:20"]).stdout.strip()
    slurm_cluster.run(["scancel", str(job)])
    limit_s = read_request("#!/bin/bash\n", [f"--time={time}"]).time_s
    assert limit_s == parse_limit(said)
    assert limit_s is None or limit_s % 60 == 0


def is_taken_here(line: str) -> bool:
    try:
        read_request("#!/bin/bash\n", _words(line))
    except BadInput:
        return False
    return True


def _words(line: str) -> list[str]:
    return [line] if line.startswith("--mem=1 ") else line.split()


@pytest.mark.parametrize("line", GRANTS)
def test_both_grant_as_many_devices(both: dict[str, tuple[Path, Path]], line: str) -> None:
    slurm, local = (variables(folder).get("CUDA_VISIBLE_DEVICES", "") for folder in both[line])
    assert len(local.split(",")) == len(slurm.split(","))
    assert bool(local) == bool(slurm)


@pytest.mark.parametrize("line", GRANTS)
def test_both_tell_a_job_the_same(both: dict[str, tuple[Path, Path]], line: str) -> None:
    slurm, local = (variables(folder) for folder in both[line])
    assert set(slurm) - set(local) <= OF_THE_CLUSTER
    assert set(local) - set(slurm) <= OF_THE_EMULATION | {"CUDA_VISIBLE_DEVICES"}  # empty, where none is granted
    common = (set(slurm) & set(local)) - OWN - {"SLURM_SUBMIT_DIR"}
    assert {name: local[name] for name in common} == {name: slurm[name] for name in common}
    for folder in both[line]:
        assert variables(folder)["SLURM_TASK_PID"] == (folder / "pid").read_text().strip()
        assert variables(folder)["SLURM_SUBMIT_DIR"] == str(folder)


def test_both_run_in_the_folder_of_chdir_and_write_relative_logs_there(both: dict[str, tuple[Path, Path]]) -> None:
    (line,) = [line for line in GRANTS if "--chdir" in line]
    for folder in both[line]:
        assert (folder / "pwd").read_text().strip() == str(folder / "sub")
        assert [path.name.partition("_")[2] for path in folder.rglob("slurm-*.out")] == ["7.out"]
        assert list(folder.glob("slurm-*.out")) == []
