"""What Slurm does to jobs on bad days: nothing is lost, nothing is counted twice."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from support.databases import query
from support.needs import missing
from support.slurm_cluster import JobEnd, SlurmCluster
from support.slurm_stories import HEARD, SCRIPTS, SPANK_HEADER, Desk, Hooks, story
from support.waiting import wait_for

ONE = ("--array=0", "--gpus-per-node=1", "--cpus-per-task=1")
DONE = {JobEnd("COMPLETED", 0)}


@story
def test_a_task_at_its_time_limit_says_so_and_is_finished_by_the_same_command(desk):
    job = desk.job(quick=4)
    job_id = job.sbatch_template(*ONE)
    job.hangs(1)
    desk.cluster.run("scontrol", "update", f"jobid={job_id}", "EndTime=now+2seconds")  # seen within half a minute
    assert {end.state for end in job.wait(job_id)} == {"TIMEOUT"}
    assert job.left() == 8
    job.open()
    assert job.wait(job.sbatch_template(*ONE)) == DONE, job.log
    job.all_done()
    ends = job.ask("SELECT verdict, exit_code, slurm_state FROM task ORDER BY started_at_ms")
    assert ends == [("stopped", 75, "TIMEOUT"), ("done", 0, "COMPLETED")]


@story
def test_of_a_node_that_goes_dark_a_task_is_done_elsewhere_and_its_old_process_stops_without_another_result(desk):
    """One job is started again, one is given up; then the node comes back."""
    cluster, job, given_up = desk.cluster, desk.job("restarted", quick=4), desk.job("given-up", quick=4)
    fragile = ("--partition=fragile", "--nodelist=gpu4", "--gpus-per-node=1", "--cpus-per-task=1")
    job_id = job.sbatch_template("--array=0-1", *fragile)
    lost = given_up.sbatch_template("--array=0", "--no-requeue", *fragile)
    job.hangs(2)
    given_up.hangs(1)
    cluster.kill_node("gpu4")
    cluster.run("scontrol", "update", "nodename=gpu4", "state=down", "reason=dark")
    assert {end.state for end in given_up.wait(lost)} == {"NODE_FAIL"}
    wait_for(lambda: len(desk.hooks.ends(job_id)) == 2, "Slurm has written how the other one ended")
    assert (job.left(), given_up.left()) == (8, 8)
    assert given_up.ask("SELECT restart, slurm_state FROM task") == [(0, "NODE_FAIL")]
    cluster.start_again(job_id, lambda: sum(".r1." in path.name for path in job.databases) == 2, "ReqNodeList=")
    assert job.wait(job_id) == DONE, job.log
    job.all_done()
    (old,) = (path for path in job.databases if path.name.endswith("_0.r0.gpu4.sqlite"))
    wait_for(lambda: query(old, "SELECT verdict, exit_code FROM task") == [("stopped", 75)], "the old process stops")
    job.open("go-c4")
    cluster.start_node("gpu4")
    wait_for(lambda: not job.processes + given_up.processes, "Slurm ends what it had given up", 100)
    job.all_done()
    gone, done = ("gpu4", "NODE_FAIL"), ("gpu3", "COMPLETED")
    attempts = job.ask("SELECT array_index, restart, node, slurm_state FROM task ORDER BY 1, 2")
    assert attempts == [(0, 0, *gone), (0, 1, *done), (1, 0, *gone), (1, 1, *done)]


@story
def test_a_preempted_task_stops_in_order_and_goes_on_when_slurm_starts_it_again(desk):
    job = desk.job(quick=4)
    job_id = job.sbatch_template(*ONE, "--partition=low")
    job.hangs(1)
    important = "touch important; until [ -e over ]; do sleep 0.1; done"
    job.sbatch_lines(important, options=("--partition=high", "--gpus-per-node=1"))
    wait_for((job.folder / "important").exists, "it was preempted", 100)
    wait_for(lambda: desk.hooks.ends(job_id), "Slurm has written so")
    assert job.left() == 8
    job.open("over")
    desk.cluster.start_again(job_id, lambda: any(".r1." in path.name for path in job.databases))
    assert job.wait(job_id) == DONE, job.log
    job.all_done()
    ends = job.ask("SELECT restart, verdict, exit_code, slurm_state FROM task ORDER BY restart")
    assert ends == [(0, "stopped", 75, "PREEMPTED"), (1, "done", 0, "COMPLETED")]


@story
def test_every_node_and_step_works_with_the_devices_it_was_given(desk):
    uneven, exclusive, own, side = (desk.job(name) for name in ("uneven", "exclusive", "own", "side"))
    options, whole = ("--partition=odd", "--cpus-per-task=1"), ("--partition=odd", "--nodelist=gpu6", "--exclusive")
    record = f"{side.folder}/badcjobs record --simulate 4 --interval 0.2 --out side.sqlite"
    record = f"srun --overlap {record} & recorder=$!"
    ids = {
        uneven: uneven.sbatch_template(*options, name="multinode", edit=("--gpus-per-node=4", "--gpus=5")),
        exclusive: exclusive.sbatch_lines(f"exec {exclusive.run_words}", options=whole),
        own: own.sbatch_lines(f"exec srun {own.run_words}", options=("-N1", "-n3", "--gpus-per-task=1")),
        side: side.sbatch_lines(
            record, "while [ ! -e side.sqlite ]; do sleep 0.1; done", side.run_words,
            "code=$?; kill -USR1 $recorder; wait; exit $code",  # of a TERM srun would make a KILL
            options=("-N1", "-n1", "--gpus-per-node=2"),
        ),
    }  # fmt: skip
    for job, job_id in ids.items():
        assert job.wait(job_id) == DONE, job.log
        job.all_done()
    ordered = "SELECT node, device_index FROM device JOIN task USING (task_id) ORDER BY 1, 2"
    for job, devices in {uneven: {"gpu5": "0,1,2,3", "gpu6": "0"}, exclusive: {"gpu6": "0,1"}}.items():
        assert job.ask(f"SELECT node, group_concat(device_index) FROM ({ordered}) GROUP BY 1") == [*devices.items()]
        shards = job.ask("SELECT shard_index, shard_count FROM task ORDER BY 1")
        assert shards == [(number, len(devices)) for number in range(len(devices))]
    tasks = own.ask("SELECT procid, devices, count(*) FROM task JOIN chunk USING (task_id) GROUP BY 1, 2")
    assert tasks == [(0, 1, 4), (1, 1, 4), (2, 1, 4)]
    assert own.ask("SELECT count(DISTINCT uuid) FROM device") == [(3,)]
    sql = "SELECT uuid FROM device WHERE device_id IN (SELECT device_id FROM sample) ORDER BY 1"
    assert query(side.folder / "side.sqlite", sql) == side.ask("SELECT uuid FROM device ORDER BY 1")
    assert query(side.folder / "side.sqlite", "SELECT verdict FROM task") != [("killed",)]


# TERM reaches every process of a job; these do not obey it, like a program deep in a driver.
DEAF = f"""if [ ${{BADCJOBS_CHUNK_ID#c}} -ge 6 ]; then trap '' TERM; : > hangs-$BADCJOBS_CHUNK_ID; sleep 300; fi
{HEARD}"""


@story
def test_what_was_finished_is_kept_whether_the_kill_comes_after_the_grace_or_before(desk):
    short, long = (desk.job(name, engine=DEAF, quick=6) for name in ("short", "long"))
    long.run_words += f" --config run.grace_s={4 * desk.cluster.kill_wait_s}"
    ids = {job: job.sbatch_lines(f"exec {job.run_words}", options=("--gpus-per-node=2",)) for job in (short, long)}
    sent_ms = {}
    for job, job_id in ids.items():
        job.hangs(2)
        sent_ms[job] = int(time.time() * 1000)
        desk.cluster.run("scancel", job_id)
    for job, end in ((short, ("stopped", 75)), (long, (None, None))):
        wait_for(lambda job=job: not job.processes, "everybody is gone", 100)
        (database,) = job.databases
        assert query(database, "PRAGMA integrity_check") == [("ok",)]
        states = query(database, "SELECT status, count(*), min(chunk_id), max(chunk_id) FROM chunk GROUP BY 1")
        assert states == [("done", 6, "c0", "c5"), ("pending", 6, "c10", "c9")], job.log
        assert query(database, "SELECT label FROM detection ORDER BY 1") == [(f"c{number}",) for number in range(6)]
        assert query(database, "SELECT max(at_ms) > ? FROM sample", sent_ms[job] - 3000) == [(1,)]
        assert query(database, "SELECT verdict, exit_code FROM task") == [end]
    assert "SIGTERM: ending what is still running" in short.log and "task ends" not in long.log
    assert list((short.folder / "local").iterdir()) == [], "nothing stays on the node"


@story
def test_with_our_scripts_installed_slurm_says_how_a_killed_wrapper_and_a_cancelled_one_ended(desk):
    killed, cancelled, other = (desk.job(name, quick=4) for name in ("killed", "cancelled", "other"))
    ids = {job: job.sbatch_template("--array=3", *ONE[1:]) for job in (killed, cancelled)}
    ids[other] = other.sbatch_lines("env > env.txt", options=ONE[1:])
    for job in (killed, cancelled):
        job.hangs(1)
    for process in killed.processes:
        with suppress(psutil.Error):  # gone with another of them
            process.kill()
    desk.cluster.run("scancel", ids[cancelled])
    for job, job_id in ids.items():
        job.wait(job_id)
    (record, *_) = wait_for(lambda: list(killed.out.glob("tasks/*.slurm.json")), "the record of the epilog", 100)
    killed.merge()
    ends = killed.ask("SELECT exit_code, slurm_state, slurm_exit_code, slurm_reason FROM task")
    assert ends == [(None, "FAILED", "0:9", "jobcomp")]
    reported = json.loads(record.read_text())
    assert record.name == f"{killed.databases[0].stem}.slurm.json"
    assert (reported["job_id"], reported["array_index"]) == (str(ids[killed]), 3)
    assert reported["gpus"] == reported["job_gpus"] == killed.ask("SELECT token FROM device")[0][0]
    assert reported["started_at_s"] <= reported["ended_at_s"]
    cancelled.merge()
    assert cancelled.ask("SELECT verdict, exit_code, slurm_state FROM task") == [("stopped", 75, "CANCELLED")]
    assert "BADCJOBS_SLURM_NOTES=" in (other.folder / "env.txt").read_text(), "the prolog did not run"
    assert desk.hooks.ends(ids[other]) == [] == list(other.folder.glob("**/*.slurm.json"))


# No driver is behind these devices: what may be opened is not there, what may not be is forbidden.
LOOK = """for card in ROOT/nvidia{0,1,2,3}; do LC_ALL=C bash -c ": <> $card" 2>&1 | sed 's/.*: //'; done > look
echo $CUDA_VISIBLE_DEVICES $SLURM_JOB_GPUS >> look"""
SEEN = ["Operation not permitted"] * 2 + ["No such device or address"] * 2 + ["0,1 2,3"]
EATS = f"""[ $BADCJOBS_CHUNK_ID != c11 ] || {sys.executable} -c 'b"x" * (400 << 20)' || exit 9
{HEARD}"""


@story
def test_in_a_cgroup_a_job_has_its_own_cards_and_no_more_memory_than_it_asked_for(desk):
    """Cards 2 and 3 of a node are called 0 and 1 there; who uses more memory says so and is finished with more."""
    if why := SlurmCluster.missing_for_cgroups():
        missing("cgroup", why)
    hooks = Hooks(desk.folder / "hooks")
    conf = [*hooks.conf, "FirstJobId=5000"]  # notes of both clusters lie in one folder
    with SlurmCluster((4, 4), conf, cgroups=True) as cluster:
        guarded, there = Desk(cluster, hooks, desk.folder), ("--nodelist=gpu0", "--gpus-per-node=2")
        hungry, holder = guarded.job("hungry", engine=EATS), guarded.job("holder")
        cards = guarded.job("cards", devices=2)  # inside the cgroup the driver shows two cards; so does the simulation
        first = hungry.sbatch_template(*ONE, "--nodelist=gpu1", "--mem=300M")
        holder.sbatch_lines("touch holds; sleep 100", options=there)
        wait_for((holder.folder / "holds").exists, "someone holds the first two cards", 100)
        look = LOOK.replace("ROOT", str(cluster.root))
        assert cards.wait(cards.sbatch_lines(look, f"exec {cards.run_words}", options=there)) == DONE, cards.log
        assert (cards.folder / "look").read_text().splitlines() == SEEN
        cards.all_done()
        assert cards.ask("SELECT token, device_index FROM device ORDER BY 1") == [("0", 0), ("1", 1)]
        assert {end.state for end in hungry.wait(first)} == {"OUT_OF_MEMORY"}, hungry.log
        then = hungry.merge()
        assert (then["verdict"], then["done"], then["failed"]) == ("failed", 11, 1), hungry.log
        assert hungry.wait(hungry.sbatch_template(*ONE, "--nodelist=gpu1", "--mem=2G")) == DONE, hungry.log
        hungry.all_done()
        ends = hungry.ask("SELECT verdict, exit_code, slurm_state FROM task ORDER BY started_at_ms")
        assert ends == [("failed", 1, "OUT_OF_MEMORY"), ("done", 0, "COMPLETED")]


BARE = {"PATH": "/usr/bin:/bin"}
# array → its indices, and the MIN, MAX, STEP and COUNT that every task gets: STEP is the first `:n` of the text, or
# 1, whatever the indices are; MAX is the last index, not the end of the range.
SHAPES = {
    "1-9:4": ([1, 5, 9], "1 9 4 3"), "0-7:3%1": ([0, 3, 6], "0 6 3 3"), "5": ([5], "5 5 1 1"),
    "1,2,5": ([1, 2, 5], "1 5 1 3"), "0-2:2,3,6": ([0, 2, 3, 6], "0 6 2 4"),
}  # fmt: skip


@story
def test_arrays_exit_codes_and_signals_are_as_we_believe(desk):
    cluster, folder = desk.cluster, desk.folder

    def sbatch(line, *options):
        (folder / "job.sh").write_text(f"#!/bin/bash\n{line}\n")
        return cluster.sbatch(folder / "job.sh", *options, cwd=folder)

    reported = "eval echo \\$SLURM_ARRAY_TASK_{MIN,MAX,STEP,COUNT} ${CUDA_VISIBLE_DEVICES-unset}"
    reported += " > ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    arrays = {array: sbatch(reported, f"--array={array}") for array in SHAPES}
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
def test_a_job_that_asks_the_plugin_for_telemetry_finds_a_recording_of_its_own_gpus(desk):
    if not SPANK_HEADER.exists():
        missing("spank", f"no {SPANK_HEADER}")
    cluster = desk.cluster
    names = ("asked", "quiet", "without", "step", "short")
    asked, quiet, without, step, short = (desk.job(name, chunks=1) for name in names)
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
    short.program("badcjobs", "exec sleep 60")  # a recorder that takes long to start
    ids[short] = short.sbatch_lines("exit 7", options=("--gpus-per-node=1", "--badc-telemetry"))
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
    (said,) = (path.read_text() for path in short.folder.glob("badc-telemetry-*"))
    assert "nothing was recorded: the job ended after" in said and "before the recorder was ready" in said
    each = [query(path, "SELECT uuid FROM device") for path in step.folder.glob("badc-telemetry-*.s0.p?.sqlite")]
    assert len(each) == 2 and each[0] != each[1], each
    refused = cluster.run("sbatch", "--badc-telemetry=often", asked.folder / "job.sh", check=False)
    assert refused.returncode != 0
    assert "--badc-telemetry=often: must be a number of seconds between samples" in refused.stderr


def test_whatever_is_missing_the_scripts_are_silent_and_exit_with_0(tmp_path):
    for script in ("task_prolog.sh", "task_epilog.sh", "jobcomp.sh", "epilog.d/50-badcjobs.sh"):
        for env in (BARE, {**BARE, "SLURM_JOB_ID": "no number"}, {}):
            words = ["/bin/bash", str(SCRIPTS / script)]
            done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), script
    assert list(tmp_path.iterdir()) == []


def test_the_controllers_hook_writes_for_jobs_that_asked_and_follows_no_link(tmp_path):
    hooks = Hooks(tmp_path)
    asked, linked, stranger = (hooks.spool / "wanted" / name for name in "789")
    asked.touch()
    linked.symlink_to(asked)
    stranger.touch()
    me, array = asked.owner(), {"ARRAYJOBID": "7", "ARRAYTASKID": "3", "JOBSTATE": "PENDING"}
    jobs = {"7": (me, {}), "8": (me, {}), "9": ("someone-else", {}), "../7": (me, {}), "12": (me, array)}
    for job, (user, more) in jobs.items():
        reported = {"ARRAYJOBID": "0", "ARRAYTASKID": "4294967294", "EXITCODE": "0:15", "START": "1", "END": "2"}
        reported |= {"JOBID": job, "USERNAME": user, "NODES": "gpu0", "JOBSTATE": 'TIMEOUT"}', **more}
        subprocess.run([hooks.scripts / "jobcomp.sh"], env={**BARE, **reported}, check=True)
    assert [path.name for path in (hooks.spool / "ends").iterdir()] == ["7.jsonl"]
    assert [(one["state"], one["array_index"], one["exit_code"]) for one in hooks.ends(7)] == [
        ("TIMEOUT", None, "0:15"), ("REQUEUED", 3, "0:15"),
    ]  # fmt: skip


def test_the_nodes_epilog_finishes_what_the_task_epilog_could_not_and_never_as_root():
    uid = 65534 if os.getuid() == 0 else os.getuid()  # root becomes someone
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
        reported = {"SLURM_JOB_ID": "4242", "SLURM_JOB_UID": str(uid), "SLURM_JOB_GID": str(os.getgid() or 65534)}
        env = {**BARE, **reported, "SLURMD_NODENAME": "gpu9", "SLURM_JOB_EXIT_CODE2": "0:9"}
        done = subprocess.run([hooks.epilog], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        (record,) = tasks.iterdir()
        assert record.stat().st_uid == uid
        written = json.loads(record.read_text())
        assert (written["node"], written["exit_code"], written["written_by"]) == ("gpu9", "0:9", "epilog")
        assert not left.exists()
        notes.rmdir()
