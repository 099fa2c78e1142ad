"""The scripts that an administrator may install, on a real Slurm: they know of an end that badcjobs could not write."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.needs import missing
from support.slurm_cluster import SlurmCluster
from support.slurm_hooks import SCRIPTS, Hooks
from support.slurm_job import SlurmJob
from support.waiting import wait_for

NOTES = Path(f"/tmp/badcjobs-slurm-{os.getuid()}")
BARE = {"PATH": "/usr/bin:/bin"}


@dataclass(frozen=True)
class Hooked:
    """A cluster with the scripts installed, after some jobs; ``ids`` by their names."""

    cluster: SlurmCluster
    hooks: Hooks
    jobs: dict[str, SlurmJob]
    ids: dict[str, int]

    def notes(self, name: str) -> list[Path]:
        return list(NOTES.glob(f"{self.ids[name]}.*.gpu0"))


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hooked]:
    if programs := SlurmCluster.missing():
        missing("slurm", f"no Slurm here, {', '.join(programs)} not found")
    folder = tmp_path_factory.mktemp("hooks")
    hooks = Hooks.install(folder)
    with SlurmCluster(nodes=1, gpus=4, extra_conf=hooks.conf) as cluster:
        jobs = {name: SlurmJob(cluster, folder / name, quick=4) for name in ("killed", "cancelled", "other")}
        one = ("--gpus-per-node=1", "--cpus-per-task=1")
        ids = {name: jobs[name].submit_template("--array=3", *one) for name in ("killed", "cancelled")}
        ids["other"] = jobs["other"].submit_script("env > env.txt", options=one)
        for name in ("killed", "cancelled"):
            jobs[name].hangs(1)
        for pid in jobs["killed"].processes:
            with suppress(psutil.Error):  # gone with another of them
                psutil.Process(pid).kill()
        cluster.run(["scancel", str(ids["cancelled"])])
        for job_id in ids.values():
            cluster.wait(job_id)
        hooked = Hooked(cluster, hooks, jobs, ids)
        wait_for(lambda: not any(hooked.notes(name) for name in ids), "the task epilogs have run")
        yield hooked


def test_of_a_wrapper_that_was_killed_slurm_says_how_it_ended(hooked: Hooked) -> None:
    job = hooked.jobs["killed"]
    job.merge()
    assert job.ask("SELECT exit_code, slurm_state, slurm_exit_code, slurm_reason FROM task") == [
        (None, "FAILED", "0:9", "jobcomp")
    ]
    tasks = job.folder / "out" / "tasks"  # Slurm has told the end of the job; its epilog may still be at work
    (record,) = wait_for(lambda: list(tasks.glob("*.slurm.json")), "the record of the epilog")
    assert record.stem.removesuffix(".slurm") == job.databases[0].stem
    told = json.loads(record.read_text())
    assert (told["job_id"], told["array_index"], told["node"]) == (str(hooked.ids["killed"]), 3, "gpu0")
    assert told["gpus"] == told["job_gpus"] == job.ask("SELECT token FROM device")[0][0]
    assert told["started_at_s"] <= told["ended_at_s"]


def test_of_a_cancelled_task_both_say_how_it_ended(hooked: Hooked) -> None:
    job = hooked.jobs["cancelled"]
    job.merge()
    assert job.ask("SELECT verdict, exit_code, slurm_state FROM task") == [("stopped", 75, "CANCELLED")]


def test_a_job_without_badcjobs_leaves_nothing_anywhere(hooked: Hooked) -> None:
    name = "other"
    assert "BADCJOBS_SLURM_NOTES=" in (hooked.jobs[name].folder / "env.txt").read_text(), "the prolog did not run"
    assert hooked.notes(name) == [] == hooked.hooks.ends(hooked.ids[name])
    assert not list(hooked.jobs[name].folder.glob("**/*.slurm.json"))


def test_a_user_may_name_them_on_srun_where_nobody_has_installed_them(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = SlurmJob(slurm_cluster, tmp_path / "job")
    hooks = [f"--task-prolog={SCRIPTS}/task_prolog.sh", f"--task-epilog={SCRIPTS}/task_epilog.sh"]
    step = ["srun", "-N1", "-n2", "--gpus-per-task=1", *hooks, *job.run_words.split()]
    done = slurm_cluster.run(step, cwd=job.folder, check=False)
    assert done.returncode == 0, done.stderr
    job.check_that_every_chunk_is_done_once(job.merge())
    ended = ("ENDED", None, "task_epilog")  # it is not told how
    assert job.ask("SELECT procid, slurm_state, slurm_exit_code, slurm_reason FROM task ORDER BY 1") == [
        (0, *ended), (1, *ended),
    ]  # fmt: skip


# --- by themselves, without a cluster ---------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["task_prolog.sh", "task_epilog.sh", "jobcomp.sh", "epilog.d/50-badcjobs.sh"])
@pytest.mark.parametrize("env", [BARE, {**BARE, "SLURM_JOB_ID": "no number"}, {}], ids=["bare", "odd", "no PATH"])
def test_whatever_is_missing_they_are_silent_and_exit_with_0(script: str, env: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(["/bin/bash", SCRIPTS / script], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_the_controllers_hook_writes_for_jobs_that_asked_and_follows_no_link(tmp_path: Path) -> None:
    hooks = Hooks.install(tmp_path)
    asked, linked, stranger = hooks.spool / "wanted" / "7", hooks.spool / "wanted" / "8", hooks.spool / "wanted" / "9"
    asked.touch()
    linked.symlink_to(asked)
    stranger.touch()
    me = asked.owner()
    for job, user in (("7", me), ("8", me), ("9", "somebody-else"), ("../7", me)):
        end_hook(hooks, JOBID=job, USERNAME=user, JOBSTATE='TIMEOUT"}')
    assert [path.name for path in (hooks.spool / "ends").iterdir()] == ["7.jsonl"]
    (told,) = hooks.ends(7)
    assert (told["state"], told["array_index"], told["exit_code"]) == ("TIMEOUT", None, "0:15")


def test_a_requeued_job_is_not_called_pending(tmp_path: Path) -> None:
    hooks = Hooks.install(tmp_path)
    (hooks.spool / "wanted" / "7").touch()
    end_hook(hooks, JOBID="12", ARRAYJOBID="7", ARRAYTASKID="3", JOBSTATE="PENDING")
    assert [(told["state"], told["array_index"]) for told in hooks.ends(7)] == [("REQUEUED", 3)]


def end_hook(hooks: Hooks, **told: str) -> None:
    slurm_says = {"ARRAYJOBID": "0", "ARRAYTASKID": "4294967294", "EXITCODE": "0:15", "START": "1", "END": "2"}
    user = {"USERNAME": hooks.spool.owner(), "NODES": "gpu0"}
    script = hooks.folder / "slurm" / "jobcomp.sh"
    subprocess.run([script], env={**BARE, **slurm_says, **user, **told}, check=True, timeout=60)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can read; those of pytest are private."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_the_nodes_epilog_finishes_what_the_task_epilog_could_not_and_never_as_root(open_folder: Path) -> None:
    uid = 65534 if os.getuid() == 0 else os.getuid()  # root becomes somebody
    notes, tasks = Path(f"/tmp/badcjobs-slurm-{uid}"), open_folder / "out" / "tasks"
    hooks = Hooks.install(open_folder)
    for folder in (notes, tasks):
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, uid, -1)
    left = notes / "4242.batch.0.r0.gpu9"
    left.write_text(f'{{"node": "gpu9"}}\n{tasks}/4242_0.r0.gpu9.sqlite\n/etc/tasks.sqlite\n')
    os.chown(left, uid, -1)
    told = {"SLURM_JOB_ID": "4242", "SLURM_JOB_UID": str(uid), "SLURM_JOB_GID": str(os.getgid() or 65534)}
    env = {**BARE, **told, "SLURMD_NODENAME": "gpu9", "SLURM_JOB_EXIT_CODE2": "0:9"}
    done = subprocess.run([hooks.epilog], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (record,) = tasks.iterdir()
    assert record.stat().st_uid == uid
    written = json.loads(record.read_text())
    assert (written["node"], written["exit_code"], written["written_by"]) == ("gpu9", "0:9", "epilog")
    assert not left.exists()
    notes.rmdir()
