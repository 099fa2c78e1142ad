"""``badcjobs submit`` on a real Slurm without accounting: arrays throttled, warned, cancelled, requeued, nested."""

import json
import signal
import sys
from pathlib import Path

from support.slurm_cluster import JobEnd
from support.slurm_stories import HEARD, story
from support.waiting import wait_for

DONE = {JobEnd("COMPLETED", 0)}


@story
def test_a_warned_task_is_requeued_as_often_as_was_allowed_and_then_ends_with_75(desk):
    """Its time limit warns it first, as near the end as Slurm's clock allows; then someone else does.

    Between the two the time limit is long again: no signal comes before the task is seen to work.
    """
    gate = "while [ ${BADCJOBS_CHUNK_ID#c} -ge %s ] && [ ! -e %s ]; do : >> at-%s; sleep 0.1; done"
    gates = [gate % (number, name, name) for number, name in ((3, "first"), (6, "second"))]
    job = desk.job(devices=0, engine="\n".join([*gates, HEARD]))
    options = ("--tasks", 1, "--time", "60", "--config", "submit.requeues=1")
    job_id = job.submit("--json", *options).json["job_id"]
    wait_for((job.folder / "at-first").exists, "some chunks are done", 150)
    desk.cluster.run("scontrol", "update", f"jobid={job_id}_0", "EndTime=now+90")  # the warning is 180 s before
    wait_for(lambda: "starting nothing new" in job.log, f"it is warned: {job.log}", 150)
    desk.cluster.run("scontrol", "update", f"jobid={job_id}_0", "TimeLimit=60")
    job.open("first")
    desk.cluster.start_again(job_id, (job.folder / "at-second").exists)
    desk.cluster.run("scancel", "--signal=USR2", f"{job_id}_0")  # once too often
    wait_for(lambda: job.log.count("starting nothing new") == 2, f"it is warned again: {job.log}", 150)
    job.open("second")
    stopped = job.submit("--wait", "--json", *options, expect=75)
    assert [(end["state"], end["exit_code"]) for end in stopped.json["task_ends"]] == [("FAILED", 75)]
    job.submit("--again", "--wait", *options)
    job.all_done()
    assert job.ask("SELECT restart, exit_code FROM task ORDER BY started_at_ms") == [(0, 75), (1, 75), (0, 0)]


@story
def test_after_an_interrupted_wait_a_cancelled_and_a_requeued_task_only_the_rest_is_submitted(desk):
    job, three = desk.job(devices=0, quick=6), ("--tasks", 3)
    waiting = job.start(*job.submit_words, *three, "--wait")
    job.hangs(3)
    waiting.send(signal.SIGINT)
    interrupted = waiting.wait()
    said = interrupted.stdout + interrupted.stderr
    assert (interrupted.exit_code, "the same command waits for it again" in said) == (130, True)
    other = job.submit(*three, "--config", "run.backoff_s=9", expect=2)
    assert "which was submitted with other options" in other.stderr
    assert "has not ended yet" in job.submit("--again", *three, expect=2).stderr
    there = job.submit("--json", *three).json
    desk.cluster.run("scancel", f"{there['job_id']}_1")
    desk.cluster.run("scontrol", "requeue", f"{there['job_id']}_2")
    wait_for(lambda: job.log.count("starting nothing new") == 2, "both are asked to stop")
    job.open()
    desk.cluster.start_again(there["job_id"], lambda: any("_2.r1." in path.name for path in job.databases))
    stopped = job.submit("--wait", *three, expect=75)
    assert "exists already" in stopped.stdout
    left = job.left()
    merged = (job.out / "logs" / f"{there['merge_job_id']}_merge.out").read_text()
    for text in (stopped.stdout, merged):
        assert f"of 12 chunks done, {left} left" in text
    assert "--again" in job.submit(*three, expect=75).stdout  # it says how the job ended, and submits nothing
    three = ("--sbatch=--begin=now+1hour", *three)
    again = job.submit("--again", "--json", *three).json
    assert (again["array"], again["tasks"], again["left"]) == ("1", 1, left)
    total = job.badcjobs("monitor", job.out, "--once", "--json").json["total"]
    assert (total["standstill"], total["go_on"]) == ("no task is publishing: 1 task waits in the queue", [])
    assert "1 task waits in the queue" in job.badcjobs("report", job.out).stdout
    desk.cluster.run("scontrol", "update", f"jobid={again['job_id']}", "StartTime=now")
    job.submit("--wait", *three)
    job.all_done()
    tasks = job.ask("SELECT array_index, restart, exit_code, job_id FROM task ORDER BY array_index, started_at_ms")
    first, second = there["job_id"], again["job_id"]
    assert tasks == [(0, 0, 0, first), (1, 0, 75, first), (1, 0, 0, second), (2, 0, 75, first), (2, 1, 0, first)]
    assert "all done" in job.submit("--again", *three).stdout


@story
def test_a_throttled_array_inside_another_job_has_nothing_of_it_and_one_line_for_each_change(desk):
    job = desk.job(devices=0)
    script = job.folder / "outer.sbatch"
    words = " ".join([*job.submit_words, "--sbatch=--array=1-9:2%2", "--wait", "--json"])
    script.write_text(
        "#!/bin/bash\n#SBATCH --array=7-9:2 --gpus-per-node=1\n#SBATCH --output=outer-%a.out --error=outer-%a.err\n"
        f'[ "$SLURM_ARRAY_TASK_ID" = 7 ] || exit 0\nexec badcjobs {words}\n'
    )
    outer = job.sbatch(script)
    assert job.wait(outer) == DONE, job.log
    job.all_done()
    document = json.loads((job.folder / "outer-7.out").read_text())
    assert (document["verdict"], document["tasks"], document["exit_code"]) == ("done", 5, 0)
    tasks = job.ask("SELECT array_index, job_id, started_at_ms, ended_at_ms FROM task ORDER BY 1")
    assert [index for index, *_ in tasks] == [1, 3, 5, 7, 9]
    assert {one for _, one, *_ in tasks} == {document["job_id"]} != {str(outer)}
    assert max(sum(start <= at < end for *_, start, end in tasks) for *_, at, _ in tasks) <= 2
    assert job.ask("SELECT count(*) FROM device") == [(0,)]  # not even the outer job's GPU
    said = (job.folder / "outer-7.err").read_text().splitlines()
    lines = [line for line in said if " chunks; tasks: " in line]
    assert lines == list(dict.fromkeys(lines))
    full = "12 of 12 chunks; tasks: 5 completed; merge completed"
    assert lines[-1] == f"badcjobs: {document['job_id']}: {full}"


@story
def test_what_slurm_refuses_is_told_in_its_words_and_without_a_merge_job_whoever_waits_merges(desk):
    job = desk.job(devices=0, chunks=3)
    assert "invalid partition specified: none" in job.submit("--sbatch=--partition=none", expect=5).stderr
    assert not job.out.exists()
    done = job.submit("--wait", "--json", "--config", "submit.merge_mem=999999G")
    assert "but not its merge job" in done.stderr
    assert done.json["merge_job_id"] is None
    assert job.ask("SELECT status, count(*) FROM chunk GROUP BY 1") == [("done", 3)]


# What each worker sees, in what it hears; one chunk fails until someone repairs it.
SPY = """[ $BADCJOBS_CHUNK_ID != c5 ] || [ -e go ] || exit 1
printf 'start_time,end_time,label,score\\n0,1,%s %s,0.5\\n' $CUDA_VISIBLE_DEVICES $BADCJOBS_DEVICE_UUID > "$2"
"""
# Like badcjobs, but it also writes down which variables it was given.
NOTES = 'env | grep -E "^(SLURM|CUDA|SOURCE|OUT)" > env-$SLURM_ARRAY_TASK_ID; exec {python} -m badcjobs "$@"'
OF_THE_EMULATION = {"CUDA_DEVICE_ORDER", "SLURM_JOB_END_TIME", "SLURM_JOB_START_TIME", "SLURM_TMPDIR"}
SAME_VARIABLES = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "STEP", "COUNT")]
SAME_VARIABLES += [f"SLURM_{name}" for name in ("JOB_NAME", "NTASKS", "PROCID", "GPUS_ON_NODE", "MEM_PER_NODE")]
SAME_ROWS = (
    "recording_id, chunk_id, source_path, start_ms, end_ms, status, attempts, detections, error_class FROM chunk",
    "recording_id, chunk_id, start_ms, end_ms, score FROM detection",
    "recording_id, chunk_id, try_number, outcome, error_class FROM attempt",
    "array_index, restart, exit_code, verdict, devices FROM task",
    "array_index, chunk_id FROM chunk JOIN task USING (task_id)",
    "array_index, count(DISTINCT uuid), min(backend) FROM device JOIN task USING (task_id) GROUP BY 1",
    "count(DISTINCT device_id) FROM worker",
    "name, sql FROM sqlite_master",
)
HEARD_AND_SEEN = """SELECT label, uuid || ' ' || uuid FROM detection JOIN chunk USING (recording_id, chunk_id)
    JOIN device USING (device_id)"""
TOGETHER = """SELECT count(*) FROM task a JOIN task b ON a.task_id < b.task_id AND a.node = b.node
    AND a.started_at_ms < b.ended_at_ms AND b.started_at_ms < a.ended_at_ms
    JOIN device x ON x.task_id = a.task_id JOIN device y ON y.task_id = b.task_id AND y.uuid = x.uuid"""


@story
def test_template_submit_and_emulation_lead_to_the_same_rows_and_variables(desk):
    template, submit, local = jobs = [desk.job(name, engine=SPY) for name in ("template", "submit", "local")]
    options = ("--array=1-5:2", "--gpus-per-node=2", "--cpus-per-task=2")
    for job in (template, local):
        job.program("badcjobs", NOTES.replace("{python}", sys.executable))
    by_sbatch = template.sbatch_template(*options)
    words = ("submit", "--cluster", "local", template.folder / "array.sbatch", "manifest.csv", "--out", "out")
    sbatch = [f"--sbatch={option}" for option in options]
    here = local.start(*words, *sbatch, "--config", "run.toml", "--", "--simulate", 4)

    same = ("--sbatch=--array=1-5:2", "--gpus-per-task", 2, "--cpus", 2, "--mem", "16G")
    shown = submit.submit("--dry-run", *same).stdout
    assert not submit.out.exists()
    failed = submit.submit("--wait", "--json", *same, expect=1).json
    logs, number = submit.out / "logs", failed["job_id"]
    array, merge = ((logs / f"{number}_{name}.sh").read_text() for name in ("submission", "merge"))
    assert (shown.startswith(array), shown.endswith(merge)) == (True, True), "the dry run shows what is submitted"
    kept = desk.cluster.run("scontrol", "write", "batch_script", f"{number}_1", "-", check=False).stdout
    assert kept.rstrip("\n") == array.rstrip("\n"), "and Slurm has it"
    ends = [JobEnd(end["state"], end["exit_code"]) for end in failed["task_ends"]]
    assert ends == [JobEnd("COMPLETED", 0), JobEnd("COMPLETED", 0), JobEnd("FAILED", 1)]
    assert [*desk.cluster.wait(by_sbatch).values()] == ends, template.log
    template.merge()
    assert here.wait(170).exit_code == 1
    for rows in SAME_ROWS:
        by_template, *others = (sorted(job.ask(f"SELECT {rows}"), key=repr) for job in jobs)
        assert by_template and others == [by_template] * 2, rows
    frozen = [(job.out / "run.toml").read_text().replace(str(job.folder), "") for job in (template, local)]
    assert frozen[0] == frozen[1] and "[array]" in frozen[0]
    for job in jobs:
        seen = job.ask(HEARD_AND_SEEN)
        assert len(seen) == 11 and all(label == own for label, own in seen), "a worker sees its own device alone"
        assert job.ask(TOGETHER) == [(0,)], "tasks that run side by side on a node share no device"
    for index in (1, 3, 5):
        check_variables(*((job.folder / f"env-{index}").read_text() for job in (template, local)))
    for job in (template, local):
        assert sorted(path.name.partition("_")[2] for path in job.folder.glob("*.log")) == ["1.log", "3.log", "5.log"]

    submit.open()  # repaired: only the task that has something left
    again = submit.submit("--again", "--wait", "--json", *same).json
    assert (again["array"], again["verdict"]) == ("5", "done")
    assert submit.ask("SELECT status, count(*) FROM chunk GROUP BY 1") == [("done", 12)]


def check_variables(*texts):
    """See that the emulation sets only what Slurm sets, and to the same."""
    slurm, local = (dict(line.split("=", 1) for line in text.splitlines()) for text in texts)
    assert set(local) - set(slurm) <= OF_THE_EMULATION
    assert {name: local[name] for name in SAME_VARIABLES} == {name: slurm[name] for name in SAME_VARIABLES}
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS"):
        assert len(local[name].split(",")) == len(slurm[name].split(",")) == 2
    own = [env["SLURM_JOB_ID"] == env["SLURM_ARRAY_JOB_ID"] for env in (slurm, local)]
    assert own[0] == own[1], "the last task of an array has its number"


@story
def test_cluster_and_check_know_this_slurms_free_gpus_its_nodes_and_limits(desk):
    job = desk.job(chunks=1)

    def ask(command, *words):
        done = job.badcjobs(command, "--json", *words)
        assert done.exit_code in (0, 1), done.stderr
        return dict(done.json)

    holder = job.sbatch_lines("echo > up; exec sleep 600", options=("--nodelist=gpu0", "--gpus-per-node=1"))
    wait_for((job.folder / "up").exists, "the job runs", 150)
    said = ask("cluster", "--gpus-per-task", 2)
    nodes = {one["name"]: one for one in said["nodes"]}
    assert set(nodes) == set(desk.cluster.gpus)
    known = [(nodes[name]["total"], nodes[name]["partitions"]) for name in ("gpu6", "gpu7")]
    assert known == [(2, ["odd"]), (1, ["high", "low"])]
    assert nodes["gpu0"]["used"] >= 1
    # Other stories' jobs come and go: each answer is judged by the free GPUs that it shows itself.
    room = [one for one in said["nodes"] if one["free"] >= 2]
    assert said["best"]["node"] == min(room, key=lambda one: one["free"])["name"]
    assert said["best"]["partition"] in nodes[said["best"]["node"]]["partitions"]
    reported = job.badcjobs("cluster", "--gpus-per-task", 2).stdout.splitlines()
    lines = [
        line.split() for line in reported if line.strip().startswith(tuple(desk.cluster.gpus))
    ]  # …, free, used, total
    assert [line[0] for line in lines] == [*desk.cluster.gpus]
    fullest = min((line for line in lines if int(line[-3]) >= 2), key=lambda line: int(line[-3]))
    *_, best, on_node, _, following = reported
    partition = best.removeprefix("  best for 2 GPUs: partition ")
    assert on_node == f"    on node {fullest[0]}" and partition in fullest[-4].split(",")
    assert following == f"next: badcjobs submit --gpus-per-task 2 --sbatch=--partition={partition} SOURCE"
    desk.cluster.run("scancel", str(holder))
    found = {
        (one["severity"], one["subject"]): one
        for one in ask("check", "--tasks", 20000, "--out", "out", "--", "--engine", "demo")["findings"]
    }
    assert found["problem", "array"]["fix"] == "--tasks 10001"
    assert f"Slurm waits {desk.cluster.kill_wait_s} s between TERM and KILL" in str(found["warning", "grace"]["text"])
    for asked, partition, problems in ((5, "gpu", 1), (4, "gpu", 0), (5, "none", 1)):
        head = f"#SBATCH --gpus-per-node={asked}\n#SBATCH --partition={partition}"
        (job.folder / "size.sbatch").write_text(f"#!/bin/bash\n{head}\n# SBATCH --x\nhostname\n")
        fixes = [str(one["fix"]) for one in ask("check", "size.sbatch")["findings"] if one["severity"] == "problem"]
        assert [fix.partition("   (")[0] for fix in fixes] == ["sbatch --test-only size.sbatch"] * problems
        refused = desk.cluster.run("sbatch", "--test-only", "size.sbatch", cwd=job.folder, check=False).returncode
        assert bool(refused) == bool(problems)


def fill(job, name, *settings):
    """Make a script of a template."""
    given = [f"source={job.folder}/manifest.csv", f"args={job.arguments}"] if name != "merge" else []
    words = [f"--set={one}" for one in (*given, f"out={job.out}", *settings)]
    done = job.badcjobs("template", name, *words, "-o", f"{name}.sbatch")
    assert done.exit_code == 0, done.stderr
    return job.folder / f"{name}.sbatch"


@story
def test_a_warning_reaches_every_node_of_the_multinode_template_and_75_is_the_jobs_exit_code(desk):
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
def test_single_and_sockeye_do_all_after_their_set_up_and_a_read_only_folder_is_refused(desk):
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
def test_apptainer_runs_badcjobs_in_the_image_and_the_merge_template_merges_what_is_there(desk):
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
    assert "2 of 4 chunks done, 2 left" in summary and "sbatch --array=1" in summary  # what is left is named
    called = (job.folder / "called").read_text()
    assert called.startswith("exec --nv --bind /data")
    assert f"birds.sif badcjobs run {job.folder}/manifest.csv --out {job.out}" in called
