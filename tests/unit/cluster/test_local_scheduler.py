"""The emulation with small shell scripts: variables, order, limits, signals, requeues and what is left afterwards."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from rooms.cluster import LocalScheduler, LocalSettings, TaskRow, parse_array, read_request
from rooms.model import ArrayOrder, StandIn, Submitted
from rooms.root import BadInput, Clock, Scheduler, SystemClock
from rooms.task import StopRequest, World

# Of what a real Slurm 22.05 set for a task of an array with GPUs, cores and --ntasks: what scripts read.
RECORDED = {
    "CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_COUNT",
    "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP",
    "SLURM_CLUSTER_NAME", "SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_JOBID",
    "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_GPUS", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION", "SLURM_JOB_USER", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_NODEID",
    "SLURM_NODELIST", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST",
    "SLURM_TASKS_PER_NODE",
}  # fmt: skip


class JobEnd(NamedTuple):
    """A job that is over."""

    job_id: str
    rows: tuple[TaskRow, ...]


@dataclass
class Place:
    """A machine of four devices for one test."""

    folder: Path
    said: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    clock: Clock = field(default_factory=SystemClock)
    settings: LocalSettings = field(default_factory=lambda: LocalSettings(StandIn(simulate=4), kill_wait_s=10.0))

    def __post_init__(self) -> None:
        (self.folder / "tmp").mkdir()
        self.stop = StopRequest(self.clock.monotonic_s)
        self.environ |= {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(self.folder / "tmp"),
            "MINE": "yes",
            "BADCJOBS_LOCK_DIR": str(self.folder.parent / "locks"),
        }

    def scheduler(self, **settings: Any) -> LocalScheduler:
        world = World(self.environ, self.clock, self.stop, "here", os.getpid(), self.folder, 8)
        return LocalScheduler(replace(self.settings, **settings), world, self.said.append, self.folder / "run")

    def run(self, *lines: str, options: tuple[str, ...] = (), **settings: Any) -> JobEnd:
        script = "\n".join(["#!/bin/sh", *lines, ""])
        done = JobEnd(*self.scheduler(**settings).run(script, "job.sh", options))
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
    place.environ |= {"SLURM_STEP_NUM_TASKS": "9", "SBATCH_ACCOUNT": "x", "HIP_VISIBLE_DEVICES": "0,1,2,3"}
    done = place.run(
        "#SBATCH --array=3-9:3 --gpus-per-node=2 -c2 -n1 -J probe --time=60",
        "env > $SLURM_ARRAY_TASK_ID.env; test -d $SLURM_TMPDIR && touch $SLURM_TMPDIR/x; pwd",
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
    assert log == f"{place.folder}\n"


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
    place.settings = replace(place.settings, share_gpus=True)
    done = place.run("#SBATCH --array=0-5 --gpus-per-node=1 -c2 -n2", "sleep 0.1")
    assert states(done) == ["COMPLETED"] * 6
    assert place.most_running == 2
    (line,) = [line for line in place.said if "at a time: each task asks for" in line]
    assert line == "at most 2 at a time: each task asks for 4 of 8 cores; --cpus 1 lets 6 run"


@pytest.mark.parametrize(("array", "told"), [("0-5%2", False), ("0-5%3", True), ("0-5", False)])
def test_cores_are_said_to_be_the_limit_only_where_more_tasks_at_a_time_were_asked_for(
    place: Place, array: str, told: bool
) -> None:
    place.run(f"#SBATCH --array={array} -c4", "true")
    assert any("at a time: each task asks for" in line for line in place.said) == told


@pytest.mark.parametrize("share", [False, True])
def test_a_task_that_asks_for_more_cores_than_there_are_runs_with_all_of_them(place: Place, share: bool) -> None:
    place.settings = replace(place.settings, share_gpus=share)
    done = place.run("#SBATCH --array=0-1 --gpus-per-node=1 -c99", "echo $SLURM_CPUS_PER_TASK $SLURM_CPUS_ON_NODE")
    assert [row.log.read_text() for row in done.rows] == ["8 8\n"] * 2
    assert any("99 CPUs and gets 8" in line for line in place.said)


def test_a_device_that_one_task_gives_back_is_free_for_the_next_at_once(place: Place) -> None:
    done = place.run("#SBATCH --array=0-5 --gpus-per-node=1", "true", stand_in=StandIn(simulate=1))
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


def test_a_task_inherits_no_open_file(place: Place) -> None:
    with (place.folder / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        done = place.run("readlink /proc/$$/fd/*")
    files = done.rows[0].log.read_text().splitlines()
    assert "/dev/null" in files
    assert str(place.folder / "open") not in files


def test_two_jobs_of_the_same_second_in_one_run_folder_have_different_numbers(place: Place) -> None:
    script = "#!/bin/sh\n#SBATCH --array=0-1 -o %A.log\n"
    jobs = [int(place.scheduler().run(script, "x", state_folder=place.folder)[0]) for _ in range(3)]
    assert len(set(jobs)) == 3 and sorted(jobs) == jobs


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
        ("", {"max_requeues": 2}, 2, "already restarted 2 times"),
        ("", {"max_requeues": 1}, 1, "already restarted 1 time"),
        ("", {"max_requeues": 0}, 0, "not restarted: [submit] requeues = 0"),
        ("#SBATCH --no-requeue", {}, 0, "--no-requeue"),
    ],
    ids=["too often", "once too often", "never", "not wanted"],
)
def test_nothing_is_started_again_for_ever(
    place: Place, line: str, terms: dict[str, Any], restarts: int, words: str
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
        kill_wait_s=30.0,
    )  # fmt: skip
    (row,) = done.rows
    assert (row.state, row.exit_code) == ("TIMEOUT", 137)
    assert row.log.read_text().split("\n")[0] == "warned"
    assert {"told", "child told"} <= set(row.log.read_text().splitlines())
    assert (place.folder / "deaf").exists()
    assert time.monotonic() - started_s >= 3


def test_an_attempt_that_got_nothing_done_is_not_started_again(place: Place) -> None:
    tasks = place.folder / "run" / "tasks"
    tasks.mkdir(parents=True)
    for name, status in (("0", "done"), ("1", "pending")):
        with closing(sqlite3.connect(place.folder / f"{name}.sqlite")) as db:
            db.execute("CREATE TABLE chunk (status)")
            db.execute("INSERT INTO chunk VALUES (?)", (status,))
            db.commit()
    publish = f"r=${{SLURM_RESTART_COUNT:-0}}; cp {place.folder}/$r.sqlite {tasks}/${{SLURM_JOB_ID}}_0.r$r.here.sqlite"
    (row,) = place.run(publish, "exit 75").rows
    assert (row.state, row.exit_code, row.restarts) == ("FAILED", 75, 1)
    assert "no chunk was done" in row.note


def test_what_a_script_leaves_running_is_ended_with_it(place: Place) -> None:
    done = place.run("setsid sleep 300 &", "env -i setsid sleep 300 & sleep 0.2; env -i sleep 300 &", "exit 0")
    assert states(done) == ["COMPLETED"]


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
    assert any("SIGINT: stopping 2 tasks" in line for line in place.said)
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
    _, (row,) = place.scheduler().run("#!/no/such/shell\n", "x")
    assert row.state == "FAILED"
    assert "/no/such/shell" in row.note


def test_what_nobody_has_asked_for_is_not_said_to_be_without_effect(place: Place) -> None:
    for asked in (True, False):
        place.scheduler().run("#!/bin/sh\n#SBATCH --mem=4G\n", "x", tell_mem=asked)
    assert [line for line in place.said if "without effect" in line] == ["without effect outside Slurm: --mem"]


def test_the_folder_of_the_logs_is_named_as_it_is(place: Place) -> None:
    (place.folder / "50%a").mkdir()
    place.run("true", options=("-o", f"{place.folder}/50%%a/%j.out"))
    assert place.said[0].endswith(f"logs in {place.folder}/50%a")


def test_what_this_machine_cannot_do_is_said_before_anything_starts(place: Place) -> None:
    place.run("#SBATCH --mem=4G -A x -c 99 --signal=USR1@60 --time=5", "echo $SLURM_CPUS_PER_TASK")
    said = "\n".join(place.said[:4])
    assert "--account, --mem" in said
    assert "99 CPUs and gets 8" in said
    assert "--signal without B:" in said


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
    world = World(place.environ, place.clock, place.stop, "here", os.getpid(), place.folder, 8)
    scheduler: Scheduler = LocalScheduler(place.settings, world, place.said.append, out)
    request = read_request(scheduler.script(order))
    assert request.array == parse_array("1-5:2%2")
    assert (request.gpus, request.time_s, request.given["open-mode"]) == (2, 43_200, "append")
    assert scheduler.script(order).splitlines()[-2] == "export X='a b'"
    job = scheduler.submit(order)
    assert scheduler.states(job).array == {1: "COMPLETED", 3: "COMPLETED", 5: "COMPLETED"}
    assert (job.indices, job.merge_job_id) == ((1, 3, 5), None)
    assert (out / "logs" / f"{job.job_id}_5.out").read_text().startswith("badcjobs ")
    assert scheduler.states(Submitted("1", None, (0,))).array == {}
