"""What only a cgroup can do to a job: hide devices, so that cards 2 and 3 of a node are called 0 and 1; end who uses
more memory than was asked for.

On a real Slurm where it can make cgroups (v1, as root): ``--require cgroup`` makes its absence a failure. Devices
everywhere with the variables that such a job was seen to have.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.badcjobs_program import Site
from support.needs import missing
from support.slurm_cluster import JobEnd, SlurmCluster
from support.slurm_hooks import Hooks
from support.slurm_job import SlurmJob
from support.waiting import wait_for

# Seen in a job that holds cards 2 and 3 under ConstrainDevices=yes.
RECORDED = {
    "SLURM_JOB_ID": "4821",
    "SLURM_JOB_GPUS": "2,3",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_GPUS_PER_NODE": "2",
    "SLURMD_NODENAME": "gpu0",
    "CUDA_VISIBLE_DEVICES": "0,1",
}
# No driver is behind these devices: what may be opened is not there, what may not be is forbidden.
LOOK = """import errno, os, json, sys
def look(path):
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        return error.errno
names = ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS")
print(json.dumps([[look(path) for path in sys.argv[1:]], *(os.environ[name] for name in names)]))
"""
# One chunk takes more than its job has asked for, as long as nobody asks for more.
EATS = f"""#!/bin/sh
[ $BADCJOBS_CHUNK_ID != c11 ] || {sys.executable} -c 'b"x" * (400 << 20)' || exit 9
printf 'start_time,end_time,label,score\\n0,1,%s,0.5\\n' $BADCJOBS_CHUNK_ID > "$2"
"""
MORE = ("--array=0", "--nodelist=gpu1", "--gpus-per-node=1", "--cpus-per-task=1")


def test_two_cards_out_of_four_are_found_under_their_new_numbers(tmp_path: Path) -> None:
    listed = Site(tmp_path / "site").badcjobs("gpus", "--simulate", "2", "--json", env=RECORDED)
    assert listed.exit_code == 0, listed.stderr
    assert [(device["token"], device["index"]) for device in listed.json["devices"]] == [("0", 0), ("1", 1)]


@dataclass(frozen=True)
class Guarded:
    """The jobs that ran side by side where devices and memory are guarded; by the time a test looks all have ended."""

    cards: SlurmJob
    hungry: SlurmJob
    too_much: JobEnd
    merged_then: dict[str, object]
    enough: JobEnd


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    if programs := SlurmCluster.missing():
        missing("slurm", f"no Slurm here, {', '.join(programs)} not found")
    if why := SlurmCluster.missing_for_cgroups():
        missing("cgroup", why)
    folder = tmp_path_factory.mktemp("guarded")
    with SlurmCluster(nodes=2, gpus=4, cgroups=True, extra_conf=Hooks.install(folder).conf) as cluster:
        hungry = SlurmJob(cluster, folder / "hungry")
        hungry.write_program("engine.sh", EATS)
        first = hungry.submit_template(*MORE, "--mem=300M")
        first_merge = hungry.submit_merge(first)
        cards = _work_beside_others(cluster, folder)
        (too_much,) = cluster.wait(first).values()
        cluster.wait(first_merge)
        merged_then = hungry.merged
        second = hungry.submit_template(*MORE, "--mem=2G")
        second_merge = hungry.submit_merge(second)
        (enough,) = cluster.wait(second).values()
        assert cluster.wait(second_merge) == {str(second_merge): JobEnd("COMPLETED", 0)}
        yield Guarded(cards, hungry, too_much, merged_then, enough)


def _work_beside_others(cluster: SlurmCluster, folder: Path) -> SlurmJob:
    """Let somebody hold the first two cards of a node, and a job work with the others."""
    other = SlurmJob(cluster, folder / "other")
    other.submit_script("touch holds; sleep 60", options=("--nodelist=gpu0", "--gpus-per-node=2"))
    wait_for((other.folder / "holds").exists, "somebody holds the first two cards")
    # Inside the cgroup the driver shows two cards; so does the simulation.
    job = SlurmJob(cluster, folder / "job", simulate=2)
    job.write_program("look.py", LOOK)
    look = f"{sys.executable} look.py {' '.join(str(cluster.root / f'nvidia{n}') for n in range(4))} > look.json"
    job_id = job.submit_script(look, f"exec {job.run_words}", options=("--nodelist=gpu0", "--gpus-per-node=2"))
    merge_id = job.submit_merge(job_id)
    assert cluster.wait(job_id) == {str(job_id): JobEnd("COMPLETED", 0)}, job.log
    assert cluster.wait(merge_id) == {str(merge_id): JobEnd("COMPLETED", 0)}
    return job


def test_in_a_cgroup_a_job_works_with_its_own_two_cards_of_four(guarded: Guarded) -> None:
    job = guarded.cards
    opened, visible, physical = json.loads((job.folder / "look.json").read_text())
    assert opened == [errno.EPERM, errno.EPERM, errno.ENXIO, errno.ENXIO], "the cgroup hides nothing"
    assert (visible, physical) == (RECORDED["CUDA_VISIBLE_DEVICES"], RECORDED["SLURM_JOB_GPUS"])
    job.check_that_every_chunk_is_done_once()
    assert job.ask("SELECT token, device_index FROM device ORDER BY 1") == [("0", 0), ("1", 1)]


def test_a_task_that_uses_more_memory_than_it_has_asked_for_says_so_and_is_finished_with_more(guarded: Guarded) -> None:
    job, then = guarded.hungry, guarded.merged_then
    assert guarded.too_much.state == "OUT_OF_MEMORY", job.log
    assert (then["verdict"], then["done"], then["failed"], then["chunks"]) == ("failed", 11, 1, 12), job.log
    assert guarded.enough == JobEnd("COMPLETED", 0), job.log
    job.check_that_every_chunk_is_done_once()
    assert job.ask("SELECT verdict, exit_code, slurm_state FROM task ORDER BY started_at_ms") == [
        ("failed", 1, "OUT_OF_MEMORY"), ("done", 0, "COMPLETED"),
    ]  # fmt: skip
    assert job.ask("SELECT count(*) FROM attempt WHERE outcome = 'done'") == [(job.chunks,)], "nothing was done twice"
