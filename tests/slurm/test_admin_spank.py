"""The SPANK plugin on a real Slurm: a job that asks for --badc-telemetry finds a recording in its folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.databases import query
from support.needs import missing
from support.slurm_cluster import JobEnd, SlurmCluster
from support.slurm_hooks import SCRIPTS

HEADER = Path("/usr/include/slurm/spank.h")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A cluster with the plugin as its Makefile builds it; badcjobs is where the jobs' PATH says."""
    if programs := SlurmCluster.missing():
        missing("slurm", f"no Slurm here, {', '.join(programs)} not found")
    if not HEADER.exists():
        missing("spank", f"no {HEADER}")
    folder = tmp_path_factory.mktemp("spank")
    for name in ("Makefile", "badc_telemetry.c"):
        (folder / name).write_text((SCRIPTS / "spank" / name).read_text())
    subprocess.run(["make", "-C", folder, "CFLAGS=-Wall -Wextra -Werror"], check=True, capture_output=True)
    plugins = folder / "plugstack.conf"
    plugins.write_text(f"optional {folder}/badc_telemetry.so\n")
    with SlurmCluster(nodes=1, gpus=4, extra_conf=[f"PlugStackConfig={plugins}"]) as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to submit from, with a badcjobs that finds four simulated cards."""
    program = tmp_path / "bin" / "badcjobs"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\ncommand=$1; shift\nexec {sys.executable} -m badcjobs $command --simulate 4 "$@"\n')
    program.chmod(0o755)
    return tmp_path


UNTIL_RECORDED = "until ls badc-telemetry-*.sqlite >/dev/null 2>&1; do sleep 0.1; done; sleep 1"


def submit(cluster: SlurmCluster, folder: Path, *options: str, path: str, work: str = UNTIL_RECORDED) -> int:
    # A program that waits for its children must not find one that it did not start.
    children = "read -r found < /proc/$$/task/$$/children; echo -n $found > children"
    (folder / "job.sh").write_text(f"#!/bin/bash\n{children}\n{work}\nexit 7\n")
    job_id = cluster.sbatch(
        folder / "job.sh", *options, f"--export=ALL,PATH={path}:/usr/bin:/bin", "--output=%j.out", cwd=folder
    )
    assert cluster.wait(job_id) == {str(job_id): JobEnd("FAILED", 7)}, "the job's exit code is its own"
    return job_id


def test_a_batch_job_finds_a_recording_of_its_own_gpus_in_its_folder(cluster: SlurmCluster, folder: Path) -> None:
    job_id = submit(cluster, folder, "--gpus-per-node=2", "--badc-telemetry=0.2", path=str(folder / "bin"))
    recording = folder / f"badc-telemetry-{job_id}.r0.gpu0.sqlite"
    assert query(recording, "SELECT verdict, devices FROM task") == [("done", 2)]
    ((samples, devices),) = query(recording, "SELECT count(*), count(DISTINCT device_id) FROM sample")
    assert devices == 2 and samples >= 4
    assert query(recording, "SELECT interval_s FROM recorder") == [(0.2,)]
    left = {path.name for path in folder.iterdir()}
    assert left == {"bin", "job.sh", "children", f"{job_id}.out", recording.name}
    assert (folder / "children").read_text() == ""


def test_a_job_that_does_not_ask_has_nothing(cluster: SlurmCluster, folder: Path) -> None:
    job_id = submit(cluster, folder, "--gpus-per-node=1", path=str(folder / "bin"), work="true")
    assert {path.name for path in folder.iterdir()} == {"bin", "job.sh", "children", f"{job_id}.out"}


def test_without_badcjobs_the_job_runs_as_if_nothing_were_wrong_and_a_log_says_so(
    cluster: SlurmCluster, folder: Path
) -> None:
    job_id = submit(cluster, folder, "--gpus-per-node=1", "--badc-telemetry", path="/no/such/folder", work="sleep 0.5")
    said = (folder / f"badc-telemetry-{job_id}.r0.gpu0.log").read_text()
    assert "badcjobs cannot be started: No such file" in said and "try: " in said


def test_tasks_with_a_gpu_each_have_a_recording_each(cluster: SlurmCluster, folder: Path) -> None:
    recorded = UNTIL_RECORDED.replace("-*.sqlite", "-*.p$SLURM_PROCID.sqlite")
    step = ["srun", "-n2", "--gpus-per-task=1", "--badc-telemetry=0.2", "bash", "-c", recorded]
    path = f"PATH={folder / 'bin'}:/usr/bin:/bin"
    cluster.run(["env", path, *step], cwd=folder)
    recordings = sorted(folder.glob("badc-telemetry-*.s0.p?.sqlite"))
    indices = [query(recording, "SELECT device_index FROM device") for recording in recordings]
    assert sorted(indices) == [[(0,)], [(1,)]]
    assert all(query(recording, "SELECT count(*) FROM sample") > [(1,)] for recording in recordings)


def test_a_senseless_interval_is_refused_before_anything_is_submitted(cluster: SlurmCluster, folder: Path) -> None:
    (folder / "job.sh").write_text("#!/bin/bash\n")
    refused = cluster.run(["sbatch", "--badc-telemetry=often", folder / "job.sh"], check=False)
    assert refused.returncode != 0
    assert "--badc-telemetry=often: must be a number of seconds between samples" in refused.stderr
