"""A job on a machine without Slurm: the scenarios of the cluster, emulated. Nothing is lost, nothing is done twice.

The first ones run side by side; after each the merge has run, every chunk is accounted for exactly once, what is left
is named, and a command finishes it.
"""

import re
import shlex
import signal
import sys
from collections import Counter
from contextlib import ExitStack, closing

import psutil
import pytest
from rooms.devices import DeviceLocks, simulated_uuid
from rooms.root import SystemClock
from support.badcjobs_program import Site, rows
from support.fake_nvml import fake_nvml_environ, fake_uuid
from support.login_node import LoginNode
from support.waiting import wait_for

LOCAL = ("submit", "--cluster", "local")
HEARD = "printf 'start_time,end_time,label,score\\n0,0.5,%s,0.5\\n' $BADCJOBS_CHUNK_ID > \"$2\""
KEYS = ("--config=run.publish_every_s=0.1", "--config=run.backoff_s=0.05")
SHORT, LONG = ("--config=run.grace_s=0.5",), ("--config=run.grace_s=100", "--config=submit.kill_wait_s=120")
PYTHON = f"{sys.executable} -m badcjobs"
# What happens to a chunk, by the array index that has it; once `finish` is there, all is well.
MISFORTUNES = """
[ -e {folder}/finish ] || case $SLURM_ARRAY_TASK_ID-$BADCJOBS_CHUNK_ID in
1-c001) exit 1 ;;
2-c002) kill -USR1 $PPID; until grep -q 'starting nothing new' {folder}/run/logs/*_2.out; do sleep 0.05; done ;;
3-c007) kill -KILL $PPID; sleep 60 ;;
esac
"""
# Deaf to TERM, like a program deep in a driver.
HANGS = """
[ $BADCJOBS_CHUNK_ID = c000 ] || { trap '' TERM; touch {folder}/hangs; }
while [ $BADCJOBS_CHUNK_ID != c000 ] && [ ! -e {folder}/finish ]; do sleep 0.1; done
"""


class Scenario:
    """One emulated job, from its start to whatever its end leaves."""

    def __init__(self, site, chunks, *arguments, cards=0):
        self.site, self.chunks, self.arguments, self.ends = site, chunks, arguments, []
        self.cards = fake_nvml_environ(cards) if cards else {}  # real ones; simulated ones are not locked

    def start(self, *words):
        locks = {"BADCJOBS_LOCK_DIR": str(self.site.folder.parent / f"locks-{self.chunks}")}
        return self.site.start(*(words or self.arguments), env=locks | self.cards)

    def finish(self, *words):
        """Take what was in the way out of it, and give the same command again, or another one."""
        (self.site.folder / "finish").touch()
        return self.start(*words).wait()

    def job(self, sql):
        return rows(self.site.out / "job.sqlite", sql)

    def all_done(self, outcome):
        """See that a try has left every chunk done, once, and nothing on the machine."""
        assert (outcome.exit_code, outcome.json["verdict"]) == (0, "done"), outcome.stderr
        done = self.job("SELECT chunk_id, count(*) FROM chunk WHERE status = 'done' GROUP BY 1")
        assert done == [(f"c{number:03d}", 1) for number in range(self.chunks)]
        assert outcome.json["summary"]["completeness"]["complete"] is True
        wait_for(lambda: not self.site.processes(), "everybody has ended")
        assert [path.name for path in self.site.local.iterdir()] == []


def array(site, chunks, *options, simulate=8, cards=0, what=""):
    script = site.script("engine.sh", what.replace("{folder}", str(site.folder)) + HEARD)
    lean = ("--no-emit-gpu-telemetry", "--retries", 0, "--interval", 0.1, *(() if cards else ("--simulate", simulate)))
    words = (*LOCAL, site.manifest(chunks), "--out", site.out, "--json", *options, *KEYS)
    return Scenario(site, chunks, *words, "--", "--command", f"{script} {{input}} {{output}}", *lean, cards=cards)


def template(site, chunks):
    """A filled template, of which one task cannot begin; the source comes from the command line."""
    refuses = f"[ -e {site.folder}/finish ] || [ $SLURM_ARRAY_TASK_ID != 2 ] || exit 9"
    program = site.script("badcjobs", f'exec {PYTHON} "$@"')
    arguments = ("--engine demo --interval 0.1", *KEYS)
    settings = ("array=0-2%2", f"setup={refuses}", f"badcjobs={program}", *(f"args={one}" for one in arguments))
    words = [f"--set={one}" for one in (f"source={site.manifest(chunks)}", *settings)]
    assert site.badcjobs("template", "array", *words, "-o", "filled.sbatch").exit_code == 0
    options = ("--gpus-per-task", 1, "--sbatch=--comment='two words'", "--config=run.simulate=4")
    return Scenario(site, chunks, *LOCAL, "filled.sbatch", "--out", site.out.name, "--json", *options)


def nested(site, chunks):
    """A job that submits an array from inside, on what it was granted itself."""
    inner = array(site, chunks, "--tasks", 2, simulate=4, what="echo $CUDA_VISIBLE_DEVICES >> {folder}/seen\n")
    (site.folder / "outer.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --array=5 --gpus-per-node=2\n"
        f"echo $CUDA_VISIBLE_DEVICES > {site.folder}/granted\nexec {PYTHON} {shlex.join(map(str, inner.arguments))}\n"
    )
    return Scenario(site, chunks, *LOCAL, "outer.sbatch", "--json", "--", "--simulate", 4)


ASKED = ("--time", 90, "--config=submit.requeues=2", *SHORT)


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    """All of them, over; each with locks of its own, by its number of chunks."""
    parent = tmp_path_factory.mktemp("emulation")
    with ExitStack() as stack:
        names = ("misfortunes", "stopped", "killed", "nested", "template")
        sites = {name: stack.enter_context(closing(Site(parent / name))) for name in names}
        found = {
            "misfortunes": array(sites["misfortunes"], 12, "--tasks", 4, *ASKED, what=MISFORTUNES),
            "stopped": array(sites["stopped"], 3, *SHORT, what=HANGS),
            "killed": array(sites["killed"], 2, *LONG, what=HANGS),
            "nested": nested(sites["nested"], 4),
            "template": template(sites["template"], 6),
        }
        begun = {name: scenario.start() for name, scenario in found.items()}
        for name in ("stopped", "killed"):
            wait_for((sites[name].folder / "hangs").exists, f"a chunk of {name} hangs", 120)
        begun["stopped"].send(signal.SIGINT)
        begun["killed"].kill()
        killed, stopped = found["killed"], found["stopped"]
        killed.ends = [killed.start().wait()]  # while the task of the killed emulation still ends
        (killed.site.folder / "finish").touch()
        wait_for(lambda: not killed.site.processes(), "the task of the killed emulation has ended", 100)
        killed.ends.append(killed.finish())
        stopped.ends = [begun["stopped"].wait(), stopped.finish()]
        found["nested"].ends = [begun["nested"].wait()]
        for name in ("misfortunes", "template"):
            first = begun[name].wait()
            (command,) = first.json["summary"]["completeness"]["finish"]
            found[name].ends = [first, found[name].finish("submit", "--json", *shlex.split(command)[2:])]
        yield found


def test_a_filled_template_names_log_and_command_of_what_is_left(scenarios):
    job = scenarios["template"]
    first, second = job.ends
    states = [(task["state"], task["exit_code"], task["restarts"]) for task in first.json["tasks"]]
    assert states == [("COMPLETED", 0, 0), ("COMPLETED", 0, 0), ("FAILED", 9, 0)]
    proof, job_id = first.json["summary"]["completeness"], first.json["job_id"]
    logs = [job.site.folder / f"badcjobs-{job_id}_{index}.log" for index in range(3)]
    assert (first.exit_code, proof["missing_indices"], proof["missing_logs"]) == (75, [2], [str(logs[2])])
    assert all(log.exists() for log in logs)
    assert shlex.split(proof["finish"][0])[2:] == [
        str(job.site.folder / "filled.sbatch"), "--cluster=local", f"--out={job.site.out}", "--sbatch=--gres=",
        "--sbatch=--gpus=", "--sbatch=--gpus-per-task=", "--sbatch=--gpus-per-node=1",
        "--sbatch='--comment=two words'", "--", "--simulate=4",
    ]  # fmt: skip
    job.all_done(second)
    placed = job.job("SELECT c.chunk_id, t.array_index FROM chunk c JOIN task t USING (task_id)")
    assert sorted(placed) == [(f"c{number:03d}", number % 3) for number in range(6)]
    ends = job.job("SELECT DISTINCT restart, slurm_state, slurm_exit_code, slurm_reason FROM task")
    assert ends == [(0, "COMPLETED", "0:0", "emulation")]
    devices = second.json["summary"]["devices"]  # its badcjobs knows the simulated devices of the emulation
    assert {device["backend"] for device in devices} == {"simulated"} and any(device["samples"] for device in devices)


def test_each_task_ends_as_in_slurm_and_the_command_that_is_named_finishes_it(scenarios):
    job = scenarios["misfortunes"]
    first, second = job.ends
    states = [(task["state"], task["exit_code"], task["restarts"]) for task in first.json["tasks"]]
    assert states == [("COMPLETED", 0, 0), ("FAILED", 1, 0), ("COMPLETED", 0, 1), ("FAILED", 137, 0)]
    mine = f"job_id = '{first.json['job_id']}' AND array_index = 2"
    done = "(SELECT count(*) FROM chunk WHERE status = 'done')"
    attempts = sorted(job.site.rows(f"SELECT restart, verdict, {done} FROM task WHERE {mine}"))
    assert [one[:2] for one in attempts] == [(0, "stopped"), (1, "done")]
    assert sum(one[2] for one in attempts) == 3 and min(one[2] for one in attempts) > 0
    assert (first.exit_code, first.json["verdict"]) == (75, "stopped"), first.stderr
    summary = first.json["summary"]
    assert [chunk["chunk_id"] for chunk in summary["failed_chunks"]] == ["c001"]
    assert summary["done"] + summary["failed"] + summary["left"] == 12 and summary["left"] >= 1
    assert summary["completeness"]["left_indices"] == [3]
    (command,) = summary["completeness"]["finish"]  # no sbatch: there is none here
    before, after = (shlex.split(part) for part in command.split(" -- "))
    assert before[:3] == ["badcjobs", "submit", str(job.site.folder / "manifest.csv")]
    assert {"--cluster=local", "--sbatch=--array=0-3", "--time=90", *ASKED[2:]} <= {*before}
    assert "--simulate=8" in after
    reported = [line.split()[2] for line in first.stderr.splitlines() if f": {first.json['job_id']}_" in line]
    assert Counter(reported) == {"RUNNING": 5, "PENDING": 1, "COMPLETED": 2, "FAILED": 2}
    job.all_done(second)


def test_ctrl_c_ends_the_tasks_in_order_and_a_killed_emulation_keeps_its_run(scenarios):
    first, second = scenarios["stopped"].ends
    assert first.exit_code == 130, first.stderr
    assert [(task["state"], task["exit_code"]) for task in first.json["tasks"]] == [("CANCELLED", 75)]
    assert (first.json["summary"]["done"], first.json["summary"]["left"]) == (1, 2)
    assert re.search(r"job \d+: [01] of 3 chunks done; 1 running, 0 waiting\n", first.stderr), first.stderr
    scenarios["stopped"].all_done(second)
    refused, finished = scenarios["killed"].ends
    assert (refused.exit_code, "another emulation" in refused.stderr) == (2, True), refused
    scenarios["killed"].all_done(finished)


def test_nested_arrays_run_on_what_the_outer_job_was_granted(scenarios):
    outer = scenarios["nested"]
    (end,) = outer.ends
    assert end.exit_code == 0, end.stderr
    granted = (outer.site.folder / "granted").read_text().strip().split(",")
    seen = set((outer.site.folder / "seen").read_text().split())
    assert len(granted) == 2 and seen == {simulated_uuid(int(index)) for index in granted}
    assert outer.job("SELECT count(DISTINCT job_id), count(DISTINCT array_index) FROM task") == [(1, 2)]
    assert outer.job("SELECT status, count(*) FROM chunk GROUP BY 1") == [("done", 4)]
    assert outer.job(f"SELECT count(*) FROM task WHERE job_id = '{end.json['job_id']}'") == [(0,)]


def test_two_emulations_never_take_the_same_card_and_a_second_one_of_a_run_is_refused(tmp_path):
    site, other = Site(tmp_path / "one"), Site(tmp_path / "other")
    busy = f"{tmp_path}/busy-$CUDA_VISIBLE_DEVICES"
    alone = f"mkdir {busy} || exit 1; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; rmdir {busy}\n"
    both = [array(one, 2, "--gpus-per-task", 2, cards=2, what=alone) for one in (site, other)]
    first = both[0].start()
    wait_for(lambda: len(list(tmp_path.glob("busy-*"))) == 2, "it has both cards")
    second = both[1].start()
    wait_for(lambda: "waiting for GPUs that other runs use: GPU" in second.stderr, "it waits")
    waiting = "tasks are waiting for GPUs that other runs use: GPU 0 is locked by run of "
    assert waiting in other.badcjobs("monitor", other.out, "--once").stdout
    node = LoginNode(site)
    to_slurm = tuple(word for word in both[0].arguments if word not in ("--cluster", "local"))
    again = both[0].start().wait()
    refused = site.badcjobs(*to_slurm, env=node.env())
    for outcome in (again, refused):
        assert outcome.exit_code == 2 and f"another emulation, process {first.pid}" in outcome.stderr, outcome.stderr
    assert node.calls == ""
    (tmp_path / "go").touch()
    assert [first.wait().exit_code, second.wait().exit_code] == [0, 0], second.stderr
    site.close()
    other.close()


def test_the_cards_of_a_killed_emulation_stay_locked_until_its_last_process_is_gone(site):
    """Not even what a script without exec has set free is left."""
    up = site.folder / "up"
    deaf = f"setsid sleep 300 &\nsh -c 'trap \"\" TERM; echo $$ > {up}; while :; do sleep 0.1; done'; true"
    script = site.script("job.sbatch", deaf)
    program = Scenario(site, 0, *LOCAL, script, "--gpus-per-task", 1, "--config=submit.kill_wait_s=1", cards=1).start()
    wait_for(lambda: up.exists() and up.read_text(), "it runs")
    deaf_process = psutil.Process(int(up.read_text()))
    locks = DeviceLocks(site.folder.parent / "locks-0", SystemClock(), "the next run")
    program.kill()
    assert locks.claim(fake_uuid(0)) is not None, "it is locked"
    wait_for(lambda: locks.claim(fake_uuid(0)) is None, "the card is free")
    locks.release()
    assert not deaf_process.is_running() or deaf_process.status() == psutil.STATUS_ZOMBIE
    wait_for(lambda: not site.processes() and not list(site.local.iterdir()), "everybody has ended")


def test_ctrl_c_is_130_for_a_script_without_a_run_folder(site):
    program = site.start(*LOCAL, site.script("job.sbatch", "touch up; while :; do sleep 0.05; done"))
    wait_for((site.folder / "up").exists, "it runs")
    program.send(signal.SIGINT)
    assert program.wait().exit_code == 130
