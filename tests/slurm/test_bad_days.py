"""What Slurm does to jobs on bad days: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress

import psutil
from support.databases import query
from support.needs import missing
from support.slurm_cluster import JobEnd, SlurmCluster
from support.slurm_stories import HEARD, Desk, Hooks, story
from support.waiting import wait_for

ONE = ("--array=0", "--gpus-per-node=1", "--cpus-per-task=1")
DONE = {JobEnd("COMPLETED", 0)}


@story
def test_a_task_at_its_time_limit_says_so_and_is_finished_by_the_same_command(desk: Desk) -> None:
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
def test_of_a_node_that_goes_dark_a_task_is_done_elsewhere_while_its_old_process_still_works(desk: Desk) -> None:
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
    assert (job.left(), given_up.left()) == (8, 8)
    assert given_up.ask("SELECT restart, slurm_state FROM task") == [(0, "NODE_FAIL")]
    cluster.start_again(job_id, lambda: sum(".r1." in path.name for path in job.databases) == 2, "ReqNodeList=")
    assert job.wait(job_id) == DONE, job.log
    job.all_done()
    (old,) = (path for path in job.databases if path.name.endswith("_0.r0.gpu4.sqlite"))
    job.open("go-c4")
    again = "SELECT status FROM chunk WHERE chunk_id = 'c4'"
    wait_for(lambda: query(old, again) == [("done",)], f"the old process goes on: {job.log}")
    cluster.start_node("gpu4")
    wait_for(lambda: not job.processes + given_up.processes, "Slurm ends what it had given up", 100)
    later = job.merge()
    assert later["conflicts"] >= 1
    job.all_done(later, twice=1)
    gone, done = ("gpu4", "NODE_FAIL"), ("gpu3", "COMPLETED")
    attempts = job.ask("SELECT array_index, restart, node, slurm_state FROM task ORDER BY 1, 2")
    assert attempts == [(0, 0, *gone), (0, 1, *done), (1, 0, *gone), (1, 1, *done)]


@story
def test_a_preempted_task_stops_in_order_and_goes_on_when_slurm_starts_it_again(desk: Desk) -> None:
    job = desk.job(quick=4)
    job_id = job.sbatch_template(*ONE, "--partition=low")
    job.hangs(1)
    important = "touch important; until [ -e over ]; do sleep 0.1; done"
    job.sbatch_lines(important, options=("--partition=high", "--gpus-per-node=1"))
    wait_for((job.folder / "important").exists, "it was preempted", 100)
    assert job.left() == 8
    job.open("over")
    desk.cluster.start_again(job_id, lambda: any(".r1." in path.name for path in job.databases))
    assert job.wait(job_id) == DONE, job.log
    job.all_done()
    ends = job.ask("SELECT restart, verdict, exit_code, slurm_state FROM task ORDER BY restart")
    assert ends == [(0, "stopped", 75, "PREEMPTED"), (1, "done", 0, "COMPLETED")]


@story
def test_every_node_and_step_works_with_the_devices_it_was_given(desk: Desk) -> None:
    uneven, exclusive, own, side = (desk.job(name) for name in ("uneven", "exclusive", "own", "side"))
    options, whole = ("--partition=odd", "--cpus-per-task=1"), ("--partition=odd", "--nodelist=gpu6", "--exclusive")
    ids = {
        uneven: uneven.sbatch_template(*options, name="multinode", edit=("--gpus-per-node=4", "--gpus=5")),
        exclusive: exclusive.sbatch_lines(f"exec {exclusive.run_words}", options=whole),
        own: own.sbatch_lines(f"exec srun {own.run_words}", options=("-N1", "-n3", "--gpus-per-task=1")),
        side: side.sbatch_lines(
            f"srun --overlap {side.folder}/badcjobs record --simulate 4 --interval 0.2 --out side.sqlite & recorder=$!",
            "while [ ! -e side.sqlite ]; do sleep 0.1; done",
            side.run_words,
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
def test_what_was_finished_is_kept_whether_the_kill_comes_after_the_grace_or_before(desk: Desk) -> None:
    short = desk.job("short", engine=DEAF, quick=6, grace_s=1)
    long = desk.job("long", engine=DEAF, quick=6, grace_s=20)  # longer than KillWait
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
def test_with_our_scripts_installed_slurm_says_how_a_killed_wrapper_and_a_cancelled_one_ended(desk: Desk) -> None:
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
    told = json.loads(record.read_text())
    assert record.name == f"{killed.databases[0].stem}.slurm.json"
    assert (told["job_id"], told["array_index"]) == (str(ids[killed]), 3)
    assert told["gpus"] == told["job_gpus"] == killed.ask("SELECT token FROM device")[0][0]
    assert told["started_at_s"] <= told["ended_at_s"]
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
def test_in_a_cgroup_a_job_has_its_own_cards_and_no_more_memory_than_it_asked_for(desk: Desk) -> None:
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
        wait_for((holder.folder / "holds").exists, "somebody holds the first two cards", 100)
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
