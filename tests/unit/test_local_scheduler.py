"""The emulation with small shell scripts: variables, order, limits, signals, requeues and what is left afterwards."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from support.waiting import wait_for

from badcjobs.clock import SystemClock
from badcjobs.device_locks import DeviceLocks
from badcjobs.errors import BadInput, NotHere
from badcjobs.job_numbers import claim_numbers
from badcjobs.model import ArrayOrder, Device, Submitted
from badcjobs.scheduler.device_pool import DevicePool, Locks
from badcjobs.scheduler.job_script import read_request
from badcjobs.scheduler.local import JobEnd, LocalScheduler, Machine
from badcjobs.scheduler.local_environment import Identity, Node, inherited, log_path
from badcjobs.scheduler.local_job import Terms
from badcjobs.seams import Clock, Scheduler
from badcjobs.stop import StopRequest
from badcjobs.this_machine import NoLocks

# What a real Slurm 22.05 set for a task of an array with GPUs, cores and --ntasks; less what is the site's own.
RECORDED = {
    "CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_COUNT",
    "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP",
    "SLURM_CLUSTER_NAME", "SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE",
    "SLURM_GTIDS", "SLURM_JOBID", "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_GPUS", "SLURM_JOB_ID", "SLURM_JOB_NAME",
    "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION", "SLURM_JOB_USER", "SLURM_LOCALID",
    "SLURM_NNODES", "SLURM_NODEID", "SLURM_NODELIST", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_PROCID",
    "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST", "SLURM_TASKS_PER_NODE",
}  # fmt: skip


@dataclass
class Place:
    """A machine of four devices for one test."""

    folder: Path
    said: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    clock: Clock = field(default_factory=SystemClock)
    new_locks: Callable[[], Locks] = field(default_factory=lambda: NoLocks)
    share: bool = False
    devices: int = 4

    def __post_init__(self) -> None:
        (self.folder / "tmp").mkdir()
        self.stop = StopRequest(self.clock.monotonic_s)
        self.environ |= {"PATH": os.environ["PATH"], "TMPDIR": str(self.folder / "tmp"), "MINE": "yes"}

    def scheduler(self, **terms: object) -> LocalScheduler:
        node = Node("here", 8, "me", self.folder)
        machine = Machine(self.environ, self.clock, self.stop, node, self.open_pool, self.said.append, self.numbers)
        return LocalScheduler(machine, Terms(**{"grace_s": 10.0, **terms}))  # type: ignore[arg-type]

    def open_pool(self, count: int) -> DevicePool:
        devices = [Device(str(i), "", index=i, uuid=f"GPU-{i}") for i in range(self.devices)]
        pool = DevicePool(devices, self.new_locks, share=self.share)
        pool.check(count, "")
        return pool

    def numbers(self, count: int) -> int:
        return claim_numbers(self.folder.parent / "locks", count, self.clock)

    def run(self, *lines: str, options: tuple[str, ...] = (), **terms: object) -> JobEnd:
        script = "\n".join(["#!/bin/sh", *lines, ""])
        done = self.scheduler(**terms).run_script(script, name="job.sh", options=options, arguments=("a b", "c"))
        assert list((self.folder / "tmp").iterdir()) == [], "nothing stays in the machine's folder"
        assert self.processes() == [], "nobody is left"
        return done

    @property
    def most_running(self) -> int:
        return max(int(many) for line in self.said for many in re.findall(r"(\d+) running", line))

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("TMPDIR") == self.environ["TMPDIR"] and process.status() != "zombie"
        except psutil.Error:
            return False

    def meanwhile(self, when: Callable[[], object], do: Callable[[], object]) -> threading.Thread:
        """Do something as soon as something is so."""

        def wait() -> None:
            end_s = time.monotonic() + 60
            while not when() and time.monotonic() < end_s:
                time.sleep(0.02)
            do()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path / "machine")


def make_place(folder: Path) -> Place:
    folder.mkdir()
    return Place(folder)


def states(done: JobEnd) -> list[str]:
    return [row.state for row in done.rows]


def variables(file: Path) -> dict[str, str]:
    lines = (line.partition("=") for line in file.read_text().splitlines())
    return {name: value for name, _, value in lines}


# --- what a task sees -------------------------------------------------------------------------------------------------


def test_a_task_has_slurms_own_variables_and_nothing_of_an_outer_job(place: Place) -> None:
    place.environ |= {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "9", "SBATCH_ACCOUNT": "x", "SLURMD_NODENAME": "old"}
    place.environ |= {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "1"}
    done = place.run(
        "#SBATCH --array=3-9:3 --gpus-per-node=2 -c2 -n1 -J probe --time=60",
        'env > $SLURM_ARRAY_TASK_ID.env; test -d $SLURM_TMPDIR && touch $SLURM_TMPDIR/x; pwd; echo "$1/$2"',
    )
    job = int(done.job_id)
    assert states(done) == ["COMPLETED"] * 3
    seen = {index: variables(place.folder / f"{index}.env") for index in (3, 6, 9)}
    assert set(seen[3]) >= RECORDED
    assert [seen[i]["SLURM_JOB_ID"] for i in (3, 6, 9)] == [str(job + 1), str(job + 2), str(job)]
    assert {seen[i]["SLURM_ARRAY_JOB_ID"] for i in seen} == {str(job)}
    numbers = [seen[6][f"SLURM_ARRAY_TASK_{name}"] for name in ("ID", "MIN", "MAX", "STEP", "COUNT")]
    assert numbers == ["6", "3", "9", "3", "3"]
    assert (seen[3]["SLURMD_NODENAME"], seen[3]["SLURM_JOB_NAME"], seen[3]["MINE"]) == ("here", "probe", "yes")
    assert (seen[3]["SLURM_CPUS_PER_TASK"], seen[3]["SLURM_GPUS_ON_NODE"]) == ("2", "2")
    assert 3500 < int(seen[3]["SLURM_JOB_END_TIME"]) - time.time() <= 3600
    assert not {"SBATCH_ACCOUNT", "SLURM_STEP_NUM_TASKS", "HIP_VISIBLE_DEVICES", "SLURM_RESTART_COUNT"} & set(seen[3])
    assert len({seen[i]["SLURM_TMPDIR"] for i in seen}) == 3
    log = (place.folder / f"slurm-{job}_3.out").read_text()
    assert log == f"{place.folder}\na b/c\n"


def test_tasks_that_run_together_have_different_devices_and_four_are_enough_for_two_at_a_time(place: Place) -> None:
    done = place.run(
        "#SBATCH --array=0-4 --gpus-per-node=2",
        "mkdir at-$(echo $CUDA_VISIBLE_DEVICES | tr , -) || exit 9; sleep 0.2; rmdir at-*${CUDA_VISIBLE_DEVICES##*,}",
    )
    assert states(done) == ["COMPLETED"] * 5


def test_a_job_without_an_array_and_without_gpus_is_known_by_its_number_and_sees_no_device(place: Place) -> None:
    done = place.run("env > one.env", options=("-o", "%x-%j.log"))
    seen = variables(place.folder / "one.env")
    assert states(done) == ["COMPLETED"]
    assert seen["SLURM_JOB_ID"] == done.job_id
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
    assert not [name for name in seen if name.startswith(("SLURM_ARRAY", "SLURM_GPUS", "SLURM_JOB_GPUS"))]
    assert (place.folder / f"job.sh-{done.job_id}.log").exists()


def test_no_more_tasks_run_at_a_time_than_the_array_allows(place: Place) -> None:
    done = place.run("#SBATCH --array=0-5%2", "sleep 0.1")
    assert states(done) == ["COMPLETED"] * 6
    assert place.most_running == 2


def test_tasks_without_a_gpu_share_the_cores(place: Place) -> None:
    done = place.run("#SBATCH --array=0-3 -c4", "sleep 0.1")
    assert states(done) == ["COMPLETED"] * 4
    assert place.most_running == 2


def test_tasks_that_share_gpus_share_the_cores_too_and_it_is_said_that_these_are_the_limit(place: Place) -> None:
    place.share = True
    done = place.run("#SBATCH --array=0-5 --gpus-per-node=1 -c2 -n2", "sleep 0.1")
    assert states(done) == ["COMPLETED"] * 6
    assert place.most_running == 2
    (line,) = [line for line in place.said if "for want of cores" in line]
    assert line == "no more than 2 at a time, for want of cores: each task asks for 4 of 8; --cpus 1 lets 6 run"


@pytest.mark.parametrize(("array", "told"), [("0-5%2", False), ("0-5%3", True), ("0-5", False)])
def test_cores_are_said_to_be_the_limit_only_where_more_tasks_at_a_time_were_asked_for(
    place: Place, array: str, told: bool
) -> None:
    place.run(f"#SBATCH --array={array} -c4", "true")
    assert any("for want of cores" in line for line in place.said) == told


@pytest.mark.parametrize("share", [False, True])
def test_a_task_that_asks_for_more_cores_than_there_are_runs_with_all_of_them(place: Place, share: bool) -> None:
    place.share = share
    done = place.run("#SBATCH --array=0-1 --gpus-per-node=1 -c99", "echo $SLURM_CPUS_PER_TASK $SLURM_CPUS_ON_NODE")
    assert [row.log.read_text() for row in done.rows] == ["8 8\n"] * 2
    assert any("99 CPUs, this machine has 8" in line for line in place.said)


def test_an_exclusive_task_has_the_whole_machine(place: Place) -> None:
    done = place.run("#SBATCH --array=0-1 --exclusive -c3", "sleep 0.1; echo $CUDA_VISIBLE_DEVICES $SLURM_CPUS_ON_NODE")
    assert [row.log.read_text() for row in done.rows] == ["0,1,2,3 8\n"] * 2
    assert place.most_running == 1
    assert any("--exclusive: one task at a time" in line for line in place.said)


def test_a_machine_without_gpus_can_be_had_exclusively_too_unless_gpus_are_asked_for(place: Place) -> None:
    place.devices = 0
    assert states(place.run("#SBATCH --exclusive", "[ -z $CUDA_VISIBLE_DEVICES ]")) == ["COMPLETED"]
    with pytest.raises(NotHere, match="asks for 1 GPU, but this machine has none"):
        place.run("#SBATCH --exclusive --gpus-per-node=1", "true")


def test_a_device_that_one_task_gives_back_is_free_for_the_next_at_once(place: Place, tmp_path: Path) -> None:
    place.devices = 1
    place.new_locks = lambda: DeviceLocks(tmp_path / "locks", SystemClock(), "this run")
    done = place.run("#SBATCH --array=0-5 --gpus-per-node=1", "true")
    assert states(done) == ["COMPLETED"] * 6
    assert not [line for line in place.said if "other runs" in line]


def test_a_script_runs_where_chdir_says_and_relative_logs_are_there_too(place: Place) -> None:
    (place.folder / "sub").mkdir()
    options = ("-D", "sub", "-o", "%j.log", "-e", str(place.folder / "%j.err"))
    done = place.run("pwd; echo $PWD $SLURM_SUBMIT_DIR; echo no >&2", options=options)
    log = place.folder / "sub" / f"{done.job_id}.log"
    assert log.read_text() == f"{log.parent}\n{log.parent} {place.folder}\n"
    assert (place.folder / f"{done.job_id}.err").read_text() == "no\n"
    assert place.said[0].endswith(f"logs in {log.parent}")


def test_a_task_knows_its_own_number_and_inherits_no_open_file(place: Place) -> None:
    with (place.folder / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        done = place.run(
            "echo $SLURM_TASK_PID-$$ $SLURM_JOB_UID-$(id -u) $SLURM_JOB_GID-$(id -g)", "readlink /proc/$$/fd/*"
        )
    numbers, *files = done.rows[0].log.read_text().splitlines()
    assert [len(set(pair.split("-"))) for pair in numbers.split()] == [1, 1, 1]
    assert "/dev/null" in files
    assert str(place.folder / "open") not in files


def test_a_tmpdir_that_is_not_there_is_made_and_where_it_cannot_be_it_is_tmp(place: Place) -> None:
    wanted = place.folder / "later"
    made = place.run("[ -d $TMPDIR ] && echo $TMPDIR", options=(f"--export=ALL,TMPDIR={wanted}",))
    assert made.rows[0].log.read_text() == f"{wanted}\n"
    other = place.run("echo $TMPDIR", options=("--export=ALL,TMPDIR=/proc/no/such",))
    assert other.rows[0].log.read_text() == "/tmp\n"


def test_two_jobs_of_the_same_second_have_different_numbers_and_so_have_their_tasks(tmp_path: Path) -> None:
    places = [make_place(tmp_path / name) for name in ("one", "other")]
    script = "#!/bin/sh\n#SBATCH --array=0-4 -o %j.log\n"
    jobs = [int(place.scheduler().run_script(script, name="x").job_id) for place in places for _ in range(2)]
    logs = sorted(int(log.stem) for place in places for log in place.folder.glob("*.log"))
    assert len(set(jobs)) == 4 and jobs[0] < jobs[1] and jobs[2] < jobs[3]
    assert len(set(logs)) == 20


# --- how tasks end ----------------------------------------------------------------------------------------------------


def test_every_task_ends_with_its_own_exit_code(place: Place) -> None:
    done = place.run("#SBATCH --array=0-2", "[ $SLURM_ARRAY_TASK_ID = 2 ] && kill -9 $$; exit $SLURM_ARRAY_TASK_ID")
    assert [(row.state, row.exit_code) for row in done.rows] == [("COMPLETED", 0), ("FAILED", 1), ("FAILED", 137)]
    assert "3 of 3 ended (1 completed, 2 failed), 0 running, 0 waiting" in place.said[-1]


def test_a_task_that_asks_to_be_run_again_is_with_a_restart_count_and_a_fresh_folder(place: Place) -> None:
    done = place.run(
        "#SBATCH --array=4 --open-mode=append",
        "echo restart ${SLURM_RESTART_COUNT:-unset} $(ls $SLURM_TMPDIR | wc -l) on $SLURMD_NODENAME",
        "touch $SLURM_TMPDIR/x",
        "[ ${SLURM_RESTART_COUNT:-0} -ge 2 ] || exit 75",
    )
    (row,) = done.rows
    assert (row.state, row.restarts) == ("COMPLETED", 2)
    assert row.log.read_text() == "restart unset 0 on here\nrestart 1 0 on here\nrestart 2 0 on here\n"


def test_without_append_a_second_attempt_writes_over_the_first_log(place: Place) -> None:
    done = place.run("echo ${SLURM_RESTART_COUNT:-0}", "[ ${SLURM_RESTART_COUNT:-0} = 1 ] || exit 75")
    assert done.rows[0].log.read_text() == "1\n"


@pytest.mark.parametrize(
    ("line", "terms", "restarts", "words"),
    [
        ("", {"max_requeues": 2}, 2, "it was, 2 times"),
        ("", {"max_requeues": 1}, 1, "it was, 1 time"),
        ("", {"max_requeues": 0}, 0, "not started again: --requeues 0"),
        ("", {"progress": lambda job_id, index, restart: restart < 1}, 1, "it got nothing done"),
        ("#SBATCH --no-requeue", {}, 0, "--no-requeue"),
    ],
    ids=["too often", "once too often", "never", "no progress", "not wanted"],
)
def test_nothing_is_started_again_for_ever(
    place: Place, line: str, terms: dict[str, object], restarts: int, words: str
) -> None:
    (row,) = place.run(line, "exit 75", **terms).rows
    assert (row.state, row.exit_code, row.restarts) == ("FAILED", 75, restarts)
    assert words in row.note


class QuickClock(SystemClock):
    """A clock of which a minute takes two seconds: no time limit of Slurm is shorter than a minute."""

    def monotonic_s(self) -> float:
        return super().monotonic_s() * 30


def test_a_time_limit_warns_the_script_then_terminates_everybody_then_kills(place: Place) -> None:
    place.clock = QuickClock()
    started_s = time.monotonic()
    done = place.run(
        "#SBATCH --time=0:02 --signal=B:USR1@30",
        "trap 'echo warned' USR1; trap 'echo told' TERM",
        "(trap 'echo child told; exit' TERM; while :; do sleep 0.1; done) &",
        "setsid sh -c \"trap '' TERM; echo deaf > deaf; while :; do sleep 0.1; done\" &",
        "while :; do sleep 0.1; done",
        grace_s=30.0,
    )  # fmt: skip
    (row,) = done.rows
    assert (row.state, row.exit_code) == ("TIMEOUT", 137)
    assert row.log.read_text().split("\n")[0] == "warned"
    assert {"told", "child told"} <= set(row.log.read_text().splitlines())
    assert (place.folder / "deaf").exists()
    assert time.monotonic() - started_s >= 3


def test_what_a_script_leaves_running_is_ended_with_it(place: Place) -> None:
    done = place.run("setsid sleep 300 &", "env -i setsid sleep 300 & sleep 0.2; env -i sleep 300 &", "exit 0")
    assert states(done) == ["COMPLETED"]


def test_a_file_beside_the_log_cancels_one_task_whether_it_runs_or_waits(place: Place) -> None:
    job = itertools.count()

    def cancel() -> None:
        for log in place.folder.glob("slurm-*_0.out"):
            log.with_name(log.name + ".cancel").touch()
            log.with_name(log.name.replace("_0.", "_2.") + ".cancel").touch()
            next(job)

    thread = place.meanwhile(lambda: (place.folder / "up").exists(), cancel)
    done = place.run("#SBATCH --array=0-2%1", "[ $SLURM_ARRAY_TASK_ID = 0 ] || exit 0; touch up; exec sleep 60")
    thread.join()
    assert states(done) == ["CANCELLED", "COMPLETED", "CANCELLED"]
    assert next(job) == 1
    assert list(place.folder.glob("*.cancel")) == []


def order(place: Place, word: str, index: int = 0) -> None:
    """Make the file beside a task's log that does to it what scancel, scontrol requeue or a preemption would."""
    (log,) = place.folder.glob("slurm-*_0.out")
    log.with_name(log.name.replace("_0.", f"_{index}.") + f".{word}").touch()


@pytest.mark.parametrize(
    ("word", "when_told", "grace_s", "end"),
    [("requeue", "touch told; exit 0", 1800, ("REQUEUED", 0, "0:0")), ("preempt", "", 9, ("PREEMPTED", 137, "0:9"))],
    ids=["requeued, in order", "preempted, deaf"],
)
def test_a_task_that_is_sent_back_gets_slurms_signals_and_is_started_again_behind_those_that_wait(
    place: Place, word: str, when_told: str, grace_s: float, end: tuple[str, int, str]
) -> None:
    place.clock = QuickClock()
    (place.folder / "tasks").mkdir()
    up = place.meanwhile(lambda: (place.folder / "up").exists(), lambda: order(place, word))
    done = place.run(
        "#SBATCH --array=0-1%1 --open-mode=append",
        "echo $SLURM_ARRAY_TASK_ID ${SLURM_RESTART_COUNT:-unset} >> order",
        "[ $SLURM_ARRAY_TASK_ID$SLURM_RESTART_COUNT = 0 ] || exit 0",
        "echo $PWD/tasks/x.sqlite >> $BADCJOBS_SLURM_NOTES",
        f"trap '{when_told}' TERM; touch up; while :; do sleep 0.05; done",
        grace_s=grace_s,
        max_requeues=0,  # of those that ask for it themselves
    )
    up.join()
    first, second = done.rows[0].ends
    assert (states(done), [row.restarts for row in done.rows]) == (["COMPLETED"] * 2, [1, 0])
    assert (place.folder / "order").read_text().splitlines() == ["0 unset", "1 unset", "0 1"]
    assert (first.state, first.exit_code, first.slurm_exit_code) == end
    assert (second.restart, second.state, second.exit_code) == (1, "COMPLETED", 0)
    assert (place.folder / "told").exists() == bool(when_told)
    assert any(f"_0 PENDING {end[0]}, exit code {end[1]}" in line for line in place.said)
    record = json.loads((place.folder / "tasks" / "x.slurm.json").read_text())
    assert [record[name] for name in ("state", "exit_code", "restart", "array_index")] == [end[0], end[2], 0, 0]
    assert list(place.folder.glob(f"*.{word}")) == []


def test_what_waits_or_forbids_it_is_not_requeued_and_preempted_it_is_over(place: Place) -> None:
    place.clock = QuickClock()

    def preempt() -> None:
        order(place, "preempt")
        order(place, "requeue", index=1)

    ups = [
        place.meanwhile(lambda: (place.folder / "up").exists(), lambda: order(place, "requeue")),
        place.meanwhile(lambda: any("not requeued" in line for line in place.said), preempt),
    ]
    done = place.run(
        "#SBATCH --array=0-1%1 --no-requeue",
        "[ $SLURM_ARRAY_TASK_ID = 0 ] || exit 0; trap 'exit 75' TERM; touch up; while :; do sleep 0.05; done",
        grace_s=1800,
    )
    for up in ups:
        up.join()
    assert [(row.state, row.exit_code, row.restarts) for row in done.rows] == [
        ("PREEMPTED", 75, 0),
        ("COMPLETED", 0, 0),
    ]
    assert "not started again: --no-requeue" in done.rows[0].note
    refused = [line.split("_")[1] for line in place.said if "not requeued" in line]
    assert refused == ["0 is not requeued: --no-requeue forbids it", "1 is not requeued: it does not run yet"]


def test_a_task_that_is_cancelled_while_it_makes_way_is_not_started_again(place: Place) -> None:
    place.clock = QuickClock()

    def cancel() -> None:
        order(place, "cancel")
        wait_for(lambda: not list(place.folder.glob("*.cancel")), "it is read")
        (place.folder / "go").touch()

    ups = [
        place.meanwhile((place.folder / "up").exists, lambda: order(place, "preempt")),
        place.meanwhile((place.folder / "told").exists, cancel),
    ]
    done = place.run(
        "#SBATCH --array=0-0",
        "trap 'touch told' TERM; touch up; until [ -e go ]; do sleep 0.05; done; exit 75",
        grace_s=1800,
    )
    for up in ups:
        up.join()
    assert [(row.state, row.exit_code, row.restarts) for row in done.rows] == [("CANCELLED", 75, 0)]


# --- signals to the emulation -----------------------------------------------------------------------------------------


def test_one_signal_ends_every_task_in_order_and_starts_nothing_new(place: Place) -> None:
    up = place.meanwhile(lambda: len(list(place.folder.glob("up-*"))) == 2, lambda: place.stop.receive(signal.SIGINT))
    done = place.run(
        "#SBATCH --array=0-3%2",
        "trap 'echo in order; exit 75' TERM; touch up-$SLURM_ARRAY_TASK_ID; while :; do sleep 0.05; done",
    )
    up.join()
    assert states(done) == ["CANCELLED"] * 4
    assert [row.exit_code for row in done.rows] == [75, 75, None, None]
    assert all("in order\n" in row.log.read_text() for row in done.rows[:2])
    assert any("SIGINT: ending 2 tasks in order" in line for line in place.said)
    assert not done.rows[2].log.exists()


def test_a_second_signal_ends_them_at_once(place: Place) -> None:
    def twice() -> None:
        place.stop.receive(signal.SIGINT)
        time.sleep(0.3)
        place.stop.receive(signal.SIGINT)

    up = place.meanwhile(lambda: (place.folder / "up").exists(), twice)
    started_s = time.monotonic()
    done = place.run("trap '' TERM; touch up; while :; do sleep 0.05; done")
    up.join()
    assert [(row.state, row.exit_code) for row in done.rows] == [("CANCELLED", 137)]
    assert time.monotonic() - started_s < 9, "the grace is 10 s"


def test_a_warning_is_passed_on_and_nothing_is_started_again(place: Place) -> None:
    up = place.meanwhile(lambda: (place.folder / "up").exists(), lambda: place.stop.receive(signal.SIGUSR1))
    done = place.run("#SBATCH --array=0-1%1", "trap 'exit 75' USR1; touch up; while :; do sleep 0.05; done")
    up.join()
    assert [(row.state, row.exit_code) for row in done.rows] == [("FAILED", 75), ("CANCELLED", None)]
    assert "being stopped" in done.rows[0].note
    assert any(line.endswith("passing it on to 1 task") for line in place.said)


# --- refusals and remarks ---------------------------------------------------------------------------------------------


def test_a_folder_of_logs_that_is_not_there_is_refused_because_slurm_would_not_make_it(place: Place) -> None:
    with pytest.raises(BadInput) as refused:
        place.run("#SBATCH --output=logs/%A_%a.out", "true")
    assert refused.value.fix == f"mkdir -p {place.folder / 'logs'}"
    assert list((place.folder / "tmp").iterdir()) == []


def test_a_script_that_cannot_be_started_fails_with_its_reason(place: Place) -> None:
    (row,) = place.scheduler().run_script("#!/no/such/shell\n", name="x").rows
    assert row.state == "FAILED"
    assert "/no/such/shell" in row.note


def test_what_nobody_has_asked_for_is_not_said_to_be_without_effect(place: Place) -> None:
    for unasked in ((), ("mem",)):
        place.scheduler().run_script("#!/bin/sh\n#SBATCH --mem=4G\n", name="x", unasked=unasked)
    assert [line for line in place.said if "left to Slurm" in line] == ["left to Slurm, without effect here: --mem"]


def test_the_folder_of_the_logs_is_named_as_it_is(place: Place) -> None:
    (place.folder / "50%a").mkdir()
    place.run("true", options=("-o", f"{place.folder}/50%%a/%j.out"))
    assert place.said[0].endswith(f"logs in {place.folder}/50%a")


def test_what_this_machine_cannot_do_is_said_before_anything_starts(place: Place) -> None:
    place.run("#SBATCH --mem=4G -A x -c 99 --signal=USR1@60 --time=5", "echo $SLURM_CPUS_PER_TASK")
    said = "\n".join(place.said[:4])
    assert "--account, --mem" in said
    assert "99 CPUs, this machine has 8" in said
    assert "--signal without B:" in said


# --- pure parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("export", "expected"),
    [
        ("ALL", {"A": "1", "PATH": "p"}),
        ("ALL,B=2,C='x,y'", {"A": "1", "PATH": "p", "B": "2", "C": "x,y"}),
        ("NONE", {"PATH": "p"}),
        ("A", {"A": "1", "PATH": "p"}),
        ("B=--simulate 4 --engine demo", {"PATH": "p", "B": "--simulate 4 --engine demo"}),
    ],
)
def test_export_decides_what_a_job_takes_over(export: str, expected: dict[str, str]) -> None:
    environ = {"A": "1", "PATH": "p", "SLURM_JOB_ID": "7", "SALLOC_X": "1", "ROCR_VISIBLE_DEVICES": "0"}
    assert inherited(environ, export) == expected


def test_patterns_of_log_names_are_filled_in_as_slurm_does(tmp_path: Path) -> None:
    request = read_request("#!/bin/sh\n#SBATCH --array=0-1\n")
    node = Node("vm", 1, "root", tmp_path)
    name = log_path("%x-%3a-%A-%j-%N-%u-%%-%n-%s-%t.out", Identity(34, 0, request.array), node, name="n.sh")
    assert name.name == "n.sh-000-34-35-vm-root-%-0-batch-0.out"  # as a real 22.05 named it
    assert log_path(None, Identity(34, 1, request.array), node, name="x").name == "slurm-34_1.out"
    assert log_path(None, Identity(34, None, None), node, name="x").name == "slurm-34.out"


# --- the seam ---------------------------------------------------------------------------------------------------------


def test_an_order_becomes_a_script_that_a_slurm_would_take_and_its_states_can_be_asked(place: Place) -> None:
    out = place.folder / "a run 100%"
    order = ArrayOrder(
        out,
        ("--version",),
        3,
        first=1,
        step=2,
        parallel=2,
        gpus_per_task=2,
        cpus=1,
        mem="4G",
        setup=("export X='a b'",),
    )
    scheduler: Scheduler = place.scheduler()
    request = read_request(scheduler.script(order))
    assert (str(request.array), request.gpus, request.time_s, request.append) == ("1-5:2%2", 2, 43_200, True)
    assert scheduler.script(order).splitlines()[-2] == "export X='a b'"
    assert "merge" in scheduler.merge_script(order).splitlines()[-1]
    job = scheduler.submit(order)
    assert scheduler.states(job).array == {1: "COMPLETED", 3: "COMPLETED", 5: "COMPLETED"}
    assert (job.indices, job.merge_job_id) == ((1, 3, 5), None)
    assert (out / "logs" / f"{job.job_id}_5.out").read_text().startswith("badcjobs ")
    assert scheduler.states(Submitted("1", None, (0,))).array == {}
    assert str(os.getpid()) in scheduler.cancel_line(job)
    assert all(str(out) in line for line in scheduler.follow_lines(job, order))
