"""What our code believes about Slurm, asked of a real one; and what an administrator may install, by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path

from support.databases import query
from support.needs import missing
from support.slurm_cluster import JobEnd
from support.slurm_stories import SCRIPTS, SPANK_HEADER, Desk, Hooks, story
from support.waiting import wait_for

BARE = {"PATH": "/usr/bin:/bin"}
# array → its indices, and the MIN, MAX, STEP and COUNT that every task is told: STEP is the first `:n` of the text, or
# 1, whatever the indices are; MAX is the last index, not the end of the range.
SHAPES = {
    "1-9:4": ([1, 5, 9], "1 9 4 3"), "0-7:3%1": ([0, 3, 6], "0 6 3 3"), "5": ([5], "5 5 1 1"),
    "1,2,5": ([1, 2, 5], "1 5 1 3"), "0-2:2,3,6": ([0, 2, 3, 6], "0 6 2 4"),
}  # fmt: skip


@story
def test_arrays_exit_codes_and_signals_are_as_we_believe(desk: Desk) -> None:
    cluster, folder = desk.cluster, desk.folder

    def sbatch(line: str, *options: str) -> int:
        (folder / "job.sh").write_text(f"#!/bin/bash\n{line}\n")
        return cluster.sbatch(folder / "job.sh", *options, cwd=folder)

    told = "eval echo \\$SLURM_ARRAY_TASK_{MIN,MAX,STEP,COUNT} ${CUDA_VISIBLE_DEVICES-unset}"
    told += " > ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    arrays = {array: sbatch(told, f"--array={array}") for array in SHAPES}
    hears = "bash -c 'trap \"exit 3\" USR1; touch ready-$0; while :; do sleep 0.1; done'"
    ends = {
        sbatch(f"exec {hears} 1"): JobEnd("FAILED", 3),
        sbatch(f"{hears} 2; true"): JobEnd("FAILED", 0, signal.SIGUSR1),  # not exec: the shell is ended by it
        sbatch("kill -9 $$"): JobEnd("FAILED", 0, signal.SIGKILL),
        sbatch("true", "--output=logs/%j.log"): JobEnd("FAILED", 0, 53),  # without a word
    }
    for number, job_id in enumerate([*ends][:2], 1):
        wait_for((folder / f"ready-{number}").exists, "it is ready", 100)
        cluster.run("scancel", "--batch", "--signal=USR1", job_id)
    assert {job_id: next(iter(cluster.wait(job_id).values())) for job_id in ends} == ends
    for array, (indices, shape) in SHAPES.items():
        cluster.wait(arrays[array])
        said = {path.name: path.read_text() for path in folder.glob(f"{arrays[array]}_*")}
        assert said == {f"{arrays[array]}_{index}": f"{shape} unset\n" for index in indices}
    assert not (folder / "logs").exists()


@story
def test_a_job_that_asks_the_plugin_for_telemetry_finds_a_recording_of_its_own_gpus(desk: Desk) -> None:
    if not SPANK_HEADER.exists():
        missing("spank", f"no {SPANK_HEADER}")
    cluster = desk.cluster
    asked, quiet, without, step = (desk.job(name, chunks=1) for name in ("asked", "quiet", "without", "step"))
    for job in (asked, quiet, step):
        python = (job.folder / "badcjobs").read_text().split()[2]
        job.program("badcjobs", f'command=$1; shift; exec {python} -m badcjobs $command --simulate 4 "$@"')
    recorded = "until ls badc-telemetry-*$1.sqlite >/dev/null 2>&1; do sleep 0.1; done; sleep 1"
    # A program that waits for its children must not find one that it did not start.
    bare = "--export=ALL,PATH=/usr/bin:/bin"
    children = "read -r found < /proc/$$/task/$$/children; echo -n $found > children"
    ids = {
        asked: asked.sbatch_lines(children, recorded, "exit 7", options=("--gpus-per-node=2", "--badc-telemetry=0.2")),
        quiet: quiet.sbatch_lines("exit 7", options=("--gpus-per-node=1",)),
        without: without.sbatch_lines("sleep 0.5", "exit 7", options=("--gpus-per-node=1", "--badc-telemetry", bare)),
    }
    script = recorded.replace("$1", "p$SLURM_PROCID")
    srun = ("srun", "-N1", "-n2", "--gpus-per-task=1", "--badc-telemetry=0.2", "bash", "-c", script)
    cluster.run(*srun, cwd=step.folder, env=step.env)
    for job, job_id in ids.items():
        assert job.wait(job_id) == {JobEnd("FAILED", 7)}, "the job's exit code is its own"
    (recording,) = asked.folder.glob("badc-telemetry-*")
    assert recording.name.startswith(f"badc-telemetry-{ids[asked]}.r0.gpu")
    assert query(recording, "SELECT verdict, devices, interval_s FROM task, recorder") == [("done", 2, 0.2)]
    ((samples, devices),) = query(recording, "SELECT count(*), count(DISTINCT device_id) FROM sample")
    assert devices == 2 and samples >= 4
    assert (asked.folder / "children").read_text() == ""
    assert not list(quiet.folder.glob("badc-telemetry-*"))
    (said,) = (path.read_text() for path in without.folder.glob("badc-telemetry-*.log"))
    assert "badcjobs cannot be started: No such file" in said and "try: " in said
    each = [query(path, "SELECT uuid FROM device") for path in step.folder.glob("badc-telemetry-*.s0.p?.sqlite")]
    assert len(each) == 2 and each[0] != each[1], each
    refused = cluster.run("sbatch", "--badc-telemetry=often", asked.folder / "job.sh", check=False)
    assert refused.returncode != 0
    assert "--badc-telemetry=often: must be a number of seconds between samples" in refused.stderr


# --- the scripts by themselves, without a cluster ---------------------------------------------------------------------


def test_whatever_is_missing_the_scripts_are_silent_and_exit_with_0(tmp_path: Path) -> None:
    for script in ("task_prolog.sh", "task_epilog.sh", "jobcomp.sh", "epilog.d/50-badcjobs.sh"):
        for env in (BARE, {**BARE, "SLURM_JOB_ID": "no number"}, {}):
            words = ["/bin/bash", str(SCRIPTS / script)]
            done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), script
    assert list(tmp_path.iterdir()) == []


def test_the_controllers_hook_writes_for_jobs_that_asked_and_follows_no_link(tmp_path: Path) -> None:
    hooks = Hooks(tmp_path)
    asked, linked, stranger = (hooks.spool / "wanted" / name for name in "789")
    asked.touch()
    linked.symlink_to(asked)
    stranger.touch()
    me, array = asked.owner(), {"ARRAYJOBID": "7", "ARRAYTASKID": "3", "JOBSTATE": "PENDING"}
    jobs = {"7": (me, {}), "8": (me, {}), "9": ("somebody-else", {}), "../7": (me, {}), "12": (me, array)}
    for job, (user, more) in jobs.items():
        told = {"ARRAYJOBID": "0", "ARRAYTASKID": "4294967294", "EXITCODE": "0:15", "START": "1", "END": "2"}
        told |= {"JOBID": job, "USERNAME": user, "NODES": "gpu0", "JOBSTATE": 'TIMEOUT"}', **more}
        subprocess.run([hooks.scripts / "jobcomp.sh"], env={**BARE, **told}, check=True)
    assert [path.name for path in (hooks.spool / "ends").iterdir()] == ["7.jsonl"]
    assert [(one["state"], one["array_index"], one["exit_code"]) for one in hooks.ends(7)] == [
        ("TIMEOUT", None, "0:15"), ("REQUEUED", 3, "0:15"),
    ]  # fmt: skip


def test_the_nodes_epilog_finishes_what_the_task_epilog_could_not_and_never_as_root() -> None:
    uid = 65534 if os.getuid() == 0 else os.getuid()  # root becomes somebody
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # other users cannot read those of pytest
        open_folder, notes = Path(name), Path(f"/tmp/badcjobs-slurm-{uid}")
        open_folder.chmod(0o755)
        tasks, hooks = open_folder / "out" / "tasks", Hooks(open_folder)
        left = notes / "4242.batch.0.r0.gpu9"
        for folder in (notes, tasks):
            folder.mkdir(parents=True, exist_ok=True)
            os.chown(folder, uid, -1)
        left.write_text(f'{{"node": "gpu9"}}\n{tasks}/4242_0.r0.gpu9.sqlite\n/etc/tasks.sqlite\n')
        os.chown(left, uid, -1)
        told = {"SLURM_JOB_ID": "4242", "SLURM_JOB_UID": str(uid), "SLURM_JOB_GID": str(os.getgid() or 65534)}
        env = {**BARE, **told, "SLURMD_NODENAME": "gpu9", "SLURM_JOB_EXIT_CODE2": "0:9"}
        done = subprocess.run([hooks.epilog], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        (record,) = tasks.iterdir()
        assert record.stat().st_uid == uid
        written = json.loads(record.read_text())
        assert (written["node"], written["exit_code"], written["written_by"]) == ("gpu9", "0:9", "epilog")
        assert not left.exists()
        notes.rmdir()
