"""Devices that a cgroup hides: a job with cards 2 and 3 of its node sees two cards, and they are called 0 and 1.

On a real Slurm where it can make device cgroups (v1, as root): ``--require cgroup`` makes its absence a failure.
Everywhere with the variables that such a job was seen to have.
"""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

from support.badcjobs_program import Site, wait_for
from support.needs import missing
from support.slurm_cluster import INSTALL, JobEnd, SlurmCluster
from support.slurm_job import SlurmJob

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


def test_two_cards_out_of_four_are_found_under_their_new_numbers(tmp_path: Path) -> None:
    listed = Site(tmp_path / "site").badcjobs("gpus", "--simulate", "2", "--json", env=RECORDED)
    assert listed.exit_code == 0, listed.stderr
    assert [(device["token"], device["index"]) for device in listed.json["devices"]] == [("0", 0), ("1", 1)]


def test_in_a_cgroup_a_job_works_with_its_own_two_cards_of_four(tmp_path: Path) -> None:
    if programs := SlurmCluster.missing():
        missing("slurm", f"no Slurm here, {', '.join(programs)} not found; try: {INSTALL}")
    if why := SlurmCluster.missing_for_cgroups():
        missing("cgroup", why)
    with SlurmCluster(nodes=1, gpus=4, cgroup_devices=True) as cluster:
        other = SlurmJob(cluster, tmp_path / "other")
        other.submit_script("touch holds; sleep 60", options=("--gpus-per-node=2",))
        wait_for((other.folder / "holds").exists, "somebody holds the first two cards")
        # Inside the cgroup the driver shows two cards; so does the simulation.
        job = SlurmJob(cluster, tmp_path / "job", simulate=2)
        job.write_program("look.py", LOOK)
        look = f"{sys.executable} look.py {' '.join(str(cluster.root / f'nvidia{n}') for n in range(4))} > look.json"
        job_id = job.submit_script(look, f"exec {job.run_words}", options=("--gpus-per-node=2",))
        merge_id = job.submit_merge(job_id)
        assert cluster.wait(job_id) == {str(job_id): JobEnd("COMPLETED", 0)}, job.log
        assert cluster.wait(merge_id) == {str(merge_id): JobEnd("COMPLETED", 0)}
    opened, visible, physical = json.loads((job.folder / "look.json").read_text())
    assert opened == [errno.EPERM, errno.EPERM, errno.ENXIO, errno.ENXIO], "the cgroup hides nothing"
    assert (visible, physical) == (RECORDED["CUDA_VISIBLE_DEVICES"], RECORDED["SLURM_JOB_GPUS"])
    job.check_that_every_chunk_is_done_once()
    assert job.ask("SELECT token, device_index FROM device ORDER BY 1") == [("0", 0), ("1", 1)]
