"""Every template on a real Slurm: filled in by ``badcjobs template``, submitted as a scientist would, side by side."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.badcjobs_program import Site
from support.databases import query
from support.slurm_cluster import JobEnd, SlurmCluster
from support.waiting import wait_for

CHUNKS = 12
DEMO = "--engine demo --simulate 4 --interval 0.5 --config run.publish_every_s=0.5"


@dataclass
class Scientist:
    """Somebody with a folder, a manifest, and programs of their own on PATH."""

    cluster: SlurmCluster
    folder: Path

    def __post_init__(self) -> None:
        self.manifest = Site(self.folder).manifest(CHUNKS)
        (self.folder / "bin").mkdir()
        self.program("badcjobs", f'exec {sys.executable} -m badcjobs "$@"')

    def program(self, name: str, text: str) -> Path:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def fill(self, name: str, *settings: str) -> Path:
        """Make a script of a template."""
        argv = [sys.executable, "-m", "badcjobs", "template", name, "-o", "job.sbatch"]
        given = [f"source={self.manifest}", f"args={DEMO}"] if name != "merge" else []
        for setting in (*given, f"out={self.folder / 'out'}", *settings):
            argv += ["--set", setting]
        subprocess.run(argv, cwd=self.folder, check=True, capture_output=True)
        return self.folder / "job.sbatch"

    def sbatch(self, script: Path, *options: str) -> int:
        """Submit with our own programs before all others, as a user's venv would be."""
        env = {**self.cluster.env, "PATH": f"{self.folder / 'bin'}{os.pathsep}{self.cluster.env['PATH']}"}
        argv = ["sbatch", "--parsable", *options, str(script)]
        done = subprocess.run(argv, cwd=self.folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def ends(self, job_id: int) -> set[JobEnd]:
        return set(self.cluster.wait(job_id, timeout_s=120).values())

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    def at_work(self) -> list[Path]:
        """Return the task databases, as they are published, in which a chunk was begun."""
        published = (self.folder / "out" / "tasks").glob("*.sqlite")
        return [path for path in published if query(path, "SELECT 1 FROM attempt LIMIT 1")]

    def merged(self) -> Path:
        argv = [sys.executable, "-m", "badcjobs", "merge", str(self.folder / "out")]
        subprocess.run(argv, check=True, capture_output=True)
        return self.folder / "out" / "job.sqlite"


def single(me: Scientist) -> dict[str, Any]:
    job_id = me.sbatch(me.fill("single", f"setup=echo set up > {me.folder}/was-set-up", "gpus_per_node=2"))
    return {"ends": me.ends(job_id), "job": me.merged()}


def multinode(me: Scientist) -> dict[str, Any]:
    job_id = me.sbatch(me.fill("multinode"))
    return {"ends": me.ends(job_id), "job": me.merged()}


def multinode_warned(me: Scientist) -> dict[str, Any]:
    script = me.fill("multinode", "args=--engine-arg=--burn-s=1.5", "gpus-per-node=1", "cpus-per-task=2")
    job_id = me.sbatch(script)
    wait_for(lambda: len(me.at_work()) == 2, "both nodes are at a chunk", 60)
    me.cluster.run(["scancel", "--signal=USR1", str(job_id)])
    return {"ends": me.ends(job_id), "job": me.merged()}


def sockeye(me: Scientist) -> dict[str, Any]:
    me.program("module", "exit 0")
    script = me.fill("sockeye-array", "account=st-pi-1-gpu", "array=1-3%2", "cpus_per_task=4")
    text = script.read_text()
    script.write_text(text.replace("#SBATCH --constraint=gpu_mem_32\n", ""))  # our nodes have no features
    read_only = me.sbatch(script, "--array=1", f"--export=ALL,OUT={Path.home()}/results")
    job_id = me.sbatch(script)
    return {"ends": me.ends(job_id), "job": me.merged(), "read_only": me.ends(read_only), "text": text}


def apptainer_then_merge(me: Scientist) -> dict[str, Any]:
    # A container with all of this machine in it; it shows how it was called.
    me.program(
        "apptainer", f'echo "$@" >> {me.folder}/called\nwhile [ "$1" != birds.sif ]; do shift; done; shift\nexec "$@"'
    )
    script = me.fill("apptainer-array", "image=birds.sif", "bind=/data", "array=0-1", "gpus-per-node=2")
    job_id = me.sbatch(script, "--hold")
    script.unlink()
    merge_id = me.sbatch(me.fill("merge", f"dependency=afterany:{job_id}"))
    me.cluster.run(["scancel", f"{job_id}_1"])  # afterany: a task that never ran does not keep it waiting
    me.cluster.run(["scontrol", "release", str(job_id)])
    merged = me.ends(merge_id)
    called = (me.folder / "called").read_text()
    summary = (me.folder / f"badcjobs-merge-{merge_id}.log").read_text()
    return {"merged": merged, "called": called, "summary": summary}


SCENARIOS: list[Callable[[Scientist], dict[str, Any]]] = [
    multinode_warned, multinode, sockeye, single, apptainer_then_merge,
]  # fmt: skip
Outcomes = dict[str, Future[dict[str, Any]]]


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory, slurm_cluster: SlurmCluster) -> dict[str, Scientist]:
    names = [scenario.__name__ for scenario in SCENARIOS]
    return {name: Scientist(slurm_cluster, tmp_path_factory.mktemp(name)) for name in names}


@pytest.fixture(scope="module")
def outcomes(people: dict[str, Scientist]) -> Iterator[Outcomes]:
    with ThreadPoolExecutor(max_workers=len(SCENARIOS)) as pool:
        yield {scenario.__name__: pool.submit(scenario, people[scenario.__name__]) for scenario in SCENARIOS}


def statuses(job: Path) -> dict[str, int]:
    return dict(query(job, "SELECT status, count(*) FROM chunk GROUP BY status"))


def test_the_single_template_does_all_with_one_task_after_its_set_up(
    people: dict[str, Scientist], outcomes: Outcomes
) -> None:
    found = outcomes["single"].result()
    assert found["ends"] == {JobEnd("COMPLETED", 0)}, people["single"].log()
    assert statuses(found["job"]) == {"done": CHUNKS}
    assert query(found["job"], "SELECT count(*) FROM device") == [(2,)]
    assert (people["single"].folder / "was-set-up").read_text() == "set up\n"


def test_the_multinode_template_starts_one_wrapper_per_node_and_each_takes_its_share(
    people: dict[str, Scientist], outcomes: Outcomes
) -> None:
    found = outcomes["multinode"].result()
    assert found["ends"] == {JobEnd("COMPLETED", 0)}, people["multinode"].log()
    assert statuses(found["job"]) == {"done": CHUNKS}
    shares = "SELECT node, count(*) FROM chunk JOIN task USING (task_id) GROUP BY node ORDER BY node"
    assert query(found["job"], shares) == [("gpu0", CHUNKS // 2), ("gpu1", CHUNKS // 2)]
    devices = "SELECT node, count(*) FROM device JOIN task USING (task_id) GROUP BY node ORDER BY node"
    assert query(found["job"], devices) == [("gpu0", 4), ("gpu1", 4)]


def test_the_warning_reaches_every_node_of_the_multinode_template_and_75_is_the_jobs_exit_code(
    people: dict[str, Scientist], outcomes: Outcomes
) -> None:
    found = outcomes["multinode_warned"].result()
    assert found["ends"] == {JobEnd("FAILED", 75)}, people["multinode_warned"].log()
    assert query(found["job"], "SELECT node, exit_code, verdict FROM task ORDER BY node") == [
        ("gpu0", 75, "stopped"),
        ("gpu1", 75, "stopped"),
    ]
    left = statuses(found["job"])
    assert set(left) == {"done", "pending"}  # what was running was finished
    assert sum(left.values()) == CHUNKS


def test_the_sockeye_template_runs_filled_in_and_refuses_a_folder_where_jobs_cannot_write(
    people: dict[str, Scientist], outcomes: Outcomes
) -> None:
    found = outcomes["sockeye"].result()
    assert found["ends"] == {JobEnd("COMPLETED", 0)}, people["sockeye"].log()
    assert statuses(found["job"]) == {"done": CHUNKS}
    assert query(found["job"], "SELECT count(*) FROM task") == [(3,)]
    assert found["read_only"] == {JobEnd("FAILED", 2)}
    assert "where jobs cannot write" in people["sockeye"].log()
    for line in (
        "#SBATCH --account=st-pi-1-gpu", "#SBATCH --gpus-per-node=4", "#SBATCH --constraint=gpu_mem_32",
        "#SBATCH --signal=B:USR1@180", "#SBATCH --open-mode=append", "module load gcc cuda",
    ):  # fmt: skip
        assert line in found["text"].splitlines()


def test_the_apptainer_template_runs_badcjobs_in_the_image_and_the_merge_template_merges_what_is_there(
    people: dict[str, Scientist], outcomes: Outcomes
) -> None:
    me, found = people["apptainer_then_merge"], outcomes["apptainer_then_merge"].result()
    assert found["called"].startswith("exec --nv --bind /data")
    assert f"birds.sif badcjobs run {me.manifest} --out {me.folder}/out --workers-per-gpu auto" in found["called"]
    assert found["merged"] == {JobEnd("COMPLETED", 0)}, me.log()
    assert f"{CHUNKS // 2} done, 0 failed" in found["summary"]
    assert "sbatch --array=1" in found["summary"]  # what is left is named
