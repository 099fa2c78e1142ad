"""Templates on a real Slurm: filled in by ``badcjobs template``, submitted as a scientist would."""

from __future__ import annotations

from pathlib import Path

from support.slurm_cluster import JobEnd
from support.slurm_job import SlurmJob
from support.slurm_stories import Desk, story
from support.waiting import wait_for

DONE = {JobEnd("COMPLETED", 0)}


def fill(job: SlurmJob, name: str, *settings: str) -> Path:
    """Make a script of a template."""
    given = [f"source={job.folder}/manifest.csv", f"args={job.arguments}"] if name != "merge" else []
    words = [f"--set={one}" for one in (*given, f"out={job.out}", *settings)]
    done = job.badcjobs("template", name, *words, "-o", f"{name}.sbatch")
    assert done.exit_code == 0, done.stderr
    return job.folder / f"{name}.sbatch"


@story
def test_a_warning_reaches_every_node_of_the_multinode_template_and_75_is_the_jobs_exit_code(desk: Desk) -> None:
    job = desk.job(quick=4)
    job_id = job.sbatch(fill(job, "multinode", "gpus-per-node=1", "cpus-per-task=2"))
    job.hangs(2)
    desk.cluster.run("scancel", "--signal=USR1", str(job_id))
    wait_for(lambda: job.log.count("starting nothing new") == 2, f"both are warned: {job.log}")
    job.open()
    assert job.wait(job_id) == {JobEnd("FAILED", 75)}, job.log
    assert job.left() == 6  # what was running was finished
    tasks = job.ask("SELECT exit_code, verdict, shard_index, shard_count FROM task ORDER BY node")
    assert tasks == [(75, "stopped", 0, 2), (75, "stopped", 1, 2)]


@story
def test_single_and_sockeye_do_all_after_their_set_up_and_a_read_only_folder_is_refused(desk: Desk) -> None:
    one, sockeye = desk.job("single", chunks=4), desk.job("sockeye", chunks=4)
    single = one.sbatch(fill(one, "single", f"setup=echo set up > {one.folder}/was-set-up", "gpus_per_node=2"))
    sockeye.program("module", "exit 0")
    script = fill(sockeye, "sockeye-array", "account=st-pi-1-gpu", "array=1-2%1", "cpus_per_task=4", "gpus_per_node=1")
    script.write_text(script.read_text().replace("#SBATCH --constraint=gpu_mem_32\n", ""))  # our nodes have none
    refused = sockeye.sbatch(script, "--array=1", f"--export=ALL,OUT={Path.home()}/results")
    array = sockeye.sbatch(script)
    assert one.wait(single) == DONE == sockeye.wait(array), one.log + sockeye.log
    assert sockeye.wait(refused) == {JobEnd("FAILED", 2)}
    assert "where jobs cannot write" in sockeye.log
    one.all_done()
    sockeye.all_done()
    assert (one.folder / "was-set-up").read_text() == "set up\n"
    assert one.ask("SELECT count(*) FROM device") == [(2,)]
    assert sockeye.ask("SELECT array_index FROM task ORDER BY 1") == [(1,), (2,)]


@story
def test_apptainer_runs_badcjobs_in_the_image_and_the_merge_template_merges_what_is_there(desk: Desk) -> None:
    job = desk.job(chunks=4)
    # A container with all of this machine in it; it shows how it was called.
    job.program(
        "apptainer", f'echo "$@" >> {job.folder}/called\nwhile [ "$1" != birds.sif ]; do shift; done; shift\nexec "$@"'
    )
    settings = ("image=birds.sif", "bind=/data", "array=0-1", "gpus-per-node=2")
    job_id = job.sbatch(fill(job, "apptainer-array", *settings), "--hold")
    merge_id = job.sbatch(fill(job, "merge", f"dependency=afterany:{job_id}"))
    desk.cluster.run("scancel", f"{job_id}_1")  # afterany: a task that never ran does not keep it waiting
    desk.cluster.run("scontrol", "release", str(job_id))
    assert job.wait(merge_id) == DONE, job.log
    summary = (job.folder / f"badcjobs-merge-{merge_id}.log").read_text()
    assert "2 done, 0 failed" in summary and "sbatch --array=1" in summary  # what is left is named
    called = (job.folder / "called").read_text()
    assert called.startswith("exec --nv --bind /data")
    assert f"birds.sif badcjobs run {job.folder}/manifest.csv --out {job.out} --workers-per-gpu auto" in called
