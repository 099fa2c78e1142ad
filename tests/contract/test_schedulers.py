"""What every Scheduler promises: an array that it was given can be followed, from its queue to the end of each task."""

import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from rooms import cluster
from rooms.model import ArrayOrder, StandIn, Submitted
from rooms.root import RunFolder, SystemClock
from rooms.task import StopRequest, World
from support.stand_ins import install
from support.waiting import wait_for

# Each task waits until it may go on; then the second one fails.
TASK = "while [ ! -e {folder}/go ]; do sleep 0.02; done; [ $SLURM_ARRAY_TASK_ID != 3 ] || exit 3; exit 0"


@dataclass
class Bench:
    """A scheduler that has begun an array of the tasks 1, 3 and 5, one at a time."""

    scheduler: cluster.Scheduler
    job: Submitted
    run: RunFolder
    let_go: Callable[[], object]

    def has_ended(self):
        return cluster.has_ended(self.scheduler.states(self.job))


def order_in(folder: Path) -> ArrayOrder:
    setup = (TASK.format(folder=folder),)
    return ArrayOrder(folder / "run", ("run",), 3, first=1, step=2, parallel=1, gpus_per_task=0, cpus=1, setup=setup)


SQUEUE = """case "$*" in
*%r*) awk '{split($1, name, "_"); print name[1] "|" $2 "|" $4}' STATES; echo '77|RUNNING|None' ;;
*%o*) ;;
*) cat STATES ;;
esac"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Stand-ins for Slurm's programs, which know the states of one job."""
    states = tmp_path / "states"

    def say(*rows):
        states.write_text("".join(f"{row}\n" for row in rows))

    programs = {
        "sbatch": "echo Submitted batch job 4821", "srun": "", "squeue": SQUEUE, "sacct": "exit 1",
        "scancel": "[ $1 != 4821 ] || sed -i 's/ [A-Z]* 0 /  CANCELLED 0 /' STATES",
    }  # fmt: skip
    for name, text in programs.items():
        install(tmp_path / "bin" / name, f"#!/bin/sh\n{text}\n".replace("STATES", str(states)))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    order = order_in(tmp_path)
    scheduler = cluster.Slurm(lambda command, requeues: print)
    job = scheduler.submit(order)
    say("4821_1 RUNNING 0 None", "4821_3 PENDING 0 JobArrayTaskLimit", "4821_5 PENDING 0 JobArrayTaskLimit")
    ended = ("4821_1 COMPLETED 0 None", "4821_3 FAILED 768 NonZeroExitCode", "4821_5 COMPLETED 0 None")
    return Bench(scheduler, job, RunFolder(order.out), lambda: say(*ended))


@pytest.fixture
def local(tmp_path):
    """This machine, which runs the array in a thread; a TERM to this process stops it."""
    order, clock = order_in(tmp_path), SystemClock()
    stop = StopRequest(clock.monotonic_s)
    environ = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    world = World(environ, clock, stop, "here", os.getpid(), tmp_path, 4)
    settings = cluster.LocalSettings(StandIn(simulate=1))
    before = signal.signal(signal.SIGTERM, stop.receive)
    with cluster.run_folder_locks(("badcjobs", "submit"), again=False) as lock:
        scheduler = cluster.LocalMachine(settings, world, lambda line: None, lock)
        thread = threading.Thread(target=scheduler.submit, args=(order,))
        thread.start()
        wait_for(lambda: any(row.state == "RUNNING" for row in scheduler.rows), "the first task runs")
        wait_for(lambda: [*order.logs.glob("*.json")], "the job has a number")
        job = Submitted(next(order.logs.glob("*.json")).stem, None, order.indices)
        yield Bench(scheduler, job, RunFolder(order.out), (tmp_path / "go").touch)
        (tmp_path / "go").touch()
        thread.join()
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(params=["slurm", "local"])
def bench(request):
    return request.getfixturevalue(request.param)


def test_a_running_job_has_states(bench):
    assert bench.scheduler.states(bench.job).array == {1: "RUNNING", 3: "PENDING", 5: "PENDING"}
    assert not bench.has_ended()


def test_a_job_of_slurm_has_a_queue_and_other_jobs_are_not_counted(slurm):
    queue = cluster.query_queue(slurm.run.path, {slurm.job.job_id}, None)
    assert (queue.known, queue.jobs, queue.waiting, queue.running) == (True, (slurm.job.job_id,), 2, 1)
    other = cluster.query_queue(slurm.run.path, {"4000"}, None)
    assert (other.known, other.jobs, other.waiting, other.running) == (True, (), 0, 0)


def test_each_task_has_an_end_and_one_that_failed_its_exit_code(bench):
    bench.let_go()
    wait_for(bench.has_ended, "the job has ended")
    states = bench.scheduler.states(bench.job)
    ends = bench.scheduler.ends(bench.job, states, bench.run)
    assert [(end.index, end.state, end.well) for end in ends] == [
        (1, "COMPLETED", True), (3, "FAILED", False), (5, "COMPLETED", True),
    ]  # fmt: skip
    assert (ends[1].exit_code, cluster.verdict_of(ends)) == (3, "failed")
    assert {end.log.parent for end in ends} == {bench.run.path / "logs"}


def test_the_line_that_cancels_a_job_ends_all_its_tasks(bench):
    subprocess.run(shlex.split(bench.scheduler.cancel_line(bench.job)), check=True)
    wait_for(bench.has_ended, "the job has ended")
    ends = bench.scheduler.ends(bench.job, bench.scheduler.states(bench.job), bench.run)
    assert [(end.index, end.state) for end in ends] == [(index, "CANCELLED") for index in (1, 3, 5)]
    assert cluster.verdict_of(ends) == "stopped"
