"""What Slurm does to jobs on bad days, side by side on one real cluster: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.databases import query
from support.needs import missing
from support.slurm_cluster import JobEnd, SlurmCluster
from support.slurm_hooks import Hooks
from support.slurm_job import SlurmJob
from support.waiting import wait_for

GPUS = (4, 4, 4, 2, 1, 1)  # by node
PARTITIONS = [
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=steady Nodes=gpu[0-1,3]",
    "PartitionName=fragile Nodes=gpu[1-2]",
    "PartitionName=low Nodes=gpu4 PriorityTier=1 PreemptMode=REQUEUE",
    "PartitionName=high Nodes=gpu4 PriorityTier=10 PreemptMode=OFF",
    "PartitionName=short Nodes=gpu5",
]


@dataclass
class BadDay:
    """A cluster, and the jobs that ran on it; by the time a test looks all have ended."""

    cluster: SlurmCluster
    folder: Path

    def __post_init__(self) -> None:
        self.jobs: dict[str, SlurmJob] = {}
        self.ids: dict[str, int] = {}
        self.merges: list[int] = []

    def job(self, name: str, *, quick: int = 12) -> SlurmJob:
        self.jobs[name] = SlurmJob(self.cluster, self.folder / name.replace(" ", "-"), quick=quick)
        return self.jobs[name]

    def submit_again(self, name: str) -> None:
        """Submit a job that has left something, where nothing is wrong."""
        job = self.jobs[name]
        (job.folder / "go-gpu0").touch()
        again = ("--array=0", "--nodelist=gpu0", "--gpus-per-node=1", "--cpus-per-task=1")
        self.merges.append(job.submit_merge(job.submit_template(*again)))

    def wait_for_all(self) -> None:
        for merge in self.merges:
            ends = self.cluster.wait(merge, 90)
            assert ends == {str(merge): JobEnd("COMPLETED", 0)}, self.cluster.log_tails()

    def begin(self) -> None:
        """Submit the jobs to which something will happen, then those that only have odd allocations."""
        one = ("--gpus-per-node=1", "--cpus-per-task=1")
        fragile = ("--partition=fragile", "--nodelist=gpu2", *one)
        self.ids["restarted"] = self.job("restarted", quick=4).submit_template("--array=0-1", *fragile)
        self.ids["given up"] = self.job("given up", quick=4).submit_template("--array=0", "--no-requeue", *fragile)
        self.ids["preempted"] = self.job("preempted", quick=4).submit_template("--array=0", "--partition=low", *one)
        self.ids["out of time"] = self.job("out of time", quick=4).submit_template(
            "--array=0", "--partition=short", *one
        )
        for name, nodes, gpus in (("uneven", "gpu[0-1]", 5), ("odd nodes", "gpu[0,3]", 6)):
            self.ids[name] = self.job(name).submit_template(
                f"--nodelist={nodes}", name="multinode", edit=("--gpus-per-node=4", f"--gpus={gpus}")
            )
        steps, exclusive = self.job("own gpus"), self.job("exclusive")
        self.ids["own gpus"] = steps.submit_script(
            f"exec srun {steps.run_words}", options=("--partition=steady", "-N1", "-n3", "--gpus-per-task=1")
        )
        self.ids["exclusive"] = exclusive.submit_script(
            f"exec {exclusive.run_words}", options=("--nodelist=gpu3", "-N1", "--exclusive")
        )
        side = self.job("sidecar")
        self.ids["sidecar"] = side.submit_script(
            f"srun --overlap {side.folder}/badcjobs record --simulate 4 --interval 0.2 --out side.sqlite & recorder=$!",
            "while [ ! -e side.sqlite ]; do sleep 0.1; done",
            side.run_words,
            "code=$?; kill -USR1 $recorder; wait; exit $code",  # of a TERM srun would make a KILL
            options=("--partition=steady", "-N1", "-n1", "--gpus-per-node=2"),
        )
        self.merges = [job.submit_merge(self.ids[name]) for name, job in self.jobs.items()]

    def run_out(self) -> None:
        """Let the time of a job, which may have begun just now, be over; Slurm sees it within half a minute."""
        self.jobs["out of time"].hangs(1)
        self.cluster.run(["scontrol", "update", f"jobid={self.ids['out of time']}", "EndTime=now+2seconds"])

    def preempt(self) -> None:
        """Let somebody with more right take the one GPU."""
        self.jobs["preempted"].hangs(1)
        script = self.folder / "important.sh"
        script.write_text("#!/bin/bash\nsleep 0.5\n")
        important = self.cluster.sbatch(script, "--partition=high", "--gpus-per-node=1", cwd=self.folder)
        self.cluster.wait(important)

    def darken(self) -> None:
        """Let a node go dark with all its jobs: one is started again elsewhere, one is given up."""
        self.jobs["restarted"].hangs(2)
        self.jobs["given up"].hangs(1)
        self.cluster.kill_node("gpu2")
        self.cluster.run(["scontrol", "update", "nodename=gpu2", "state=down", "reason=dark"])
        wait_for(lambda: self.state("given up") == {"NODE_FAIL"}, "the node is given up")

    def restart(self, name: str, *nodes: str) -> None:
        """Spare us the quarter of a minute that Slurm lets pass before it starts a job again."""
        tasks, job = self.cluster.query_ends(self.ids[name]), self.jobs[name]

        def has_begun() -> bool:
            for task in tasks:  # refused before the job waits again, and after it has begun
                self.cluster.run(["scontrol", "update", f"jobid={task}", "StartTime=now", *nodes], check=False)
            time.sleep(0.3)
            return sum(".r1." in database.name for database in job.databases) == len(tasks)

        wait_for(has_begun, f"{name} begins again: {job.log}", 90)

    def state(self, name: str) -> set[str]:
        return {end.state for end in self.cluster.query_ends(self.ids[name]).values()}

    def heal(self) -> None:
        """Bring the node back, on which the old attempt is still at work: it has even done a chunk once more."""
        job = self.jobs["restarted"]
        (old,) = (path for path in job.databases if path.name.endswith("_0.r0.gpu2.sqlite"))
        wait_for(lambda: job.published("done") >= job.chunks, f"all is done elsewhere: {job.log}", 90)
        (job.folder / "go-c4").touch()
        wait_for(
            lambda: query(old, "SELECT status FROM chunk WHERE chunk_id = 'c4'") == [("done",)],
            f"the old process goes on: {job.log}",
        )
        self.cluster.heal_node("gpu2")
        wait_for(lambda: not job.processes, "Slurm ends what it had given up", 60)


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BadDay]:
    if programs := SlurmCluster.missing():
        missing("slurm", f"no Slurm here, {', '.join(programs)} not found")
    folder = tmp_path_factory.mktemp("bad-day")
    hooks = Hooks.install(folder)
    with SlurmCluster(nodes=len(GPUS), gpus=GPUS, extra_conf=[*PARTITIONS, *hooks.conf]) as cluster:
        day = BadDay(cluster, folder)
        day.begin()
        day.run_out()
        day.preempt()
        assert day.jobs["preempted"].check_what_is_left() == 8
        day.restart("preempted")
        day.darken()
        assert day.jobs["restarted"].check_what_is_left() == 8
        day.restart("restarted", "ReqNodeList=")
        assert day.jobs["given up"].check_what_is_left() == 8
        day.submit_again("given up")
        wait_for(lambda: day.state("out of time") == {"TIMEOUT"}, "Slurm ends it", 60)
        assert day.jobs["out of time"].check_what_is_left() == 8
        day.submit_again("out of time")
        day.heal()
        day.wait_for_all()
        yield day


def test_a_task_whose_node_went_dark_is_done_elsewhere_while_its_old_process_still_works(day: BadDay) -> None:
    job = day.jobs["restarted"]
    job.check_that_every_chunk_is_done_once()
    later = job.merge()  # the old process has done something once more since the merge job, or this proves nothing
    assert later["conflicts"] >= 1
    job.check_that_every_chunk_is_done_once(later)
    attempts = job.ask("SELECT array_index, restart, node, slurm_state FROM task ORDER BY 1, 2")
    gone, done = ("gpu2", "NODE_FAIL"), ("gpu1", "COMPLETED")
    assert attempts == [(0, 0, *gone), (0, 1, *done), (1, 0, *gone), (1, 1, *done)]


def test_a_task_that_slurm_gives_up_with_its_node_is_finished_by_the_same_command(day: BadDay) -> None:
    job = day.jobs["given up"]
    job.check_that_every_chunk_is_done_once()
    assert job.ask("SELECT restart, node, slurm_state FROM task ORDER BY started_at_ms") == [
        (0, "gpu2", "NODE_FAIL"), (0, "gpu0", "COMPLETED"),
    ]  # fmt: skip
    assert job.ask("SELECT count(*) FROM attempt WHERE outcome = 'done'") == [(job.chunks,)], "nothing was done twice"


def test_a_task_that_slurm_ends_at_its_time_limit_says_so_and_is_finished_by_the_same_command(day: BadDay) -> None:
    job = day.jobs["out of time"]
    job.check_that_every_chunk_is_done_once()
    assert job.ask("SELECT verdict, exit_code, slurm_state, node FROM task ORDER BY started_at_ms") == [
        ("stopped", 75, "TIMEOUT", "gpu5"), ("done", 0, "COMPLETED", "gpu0"),
    ]  # fmt: skip
    assert job.ask("SELECT count(*) FROM attempt WHERE outcome = 'done'") == [(job.chunks,)], "nothing was done twice"


def test_a_preempted_task_stops_in_order_and_goes_on_when_slurm_starts_it_again(day: BadDay) -> None:
    job = day.jobs["preempted"]
    job.check_that_every_chunk_is_done_once()
    assert job.ask("SELECT restart, verdict, exit_code, slurm_state FROM task ORDER BY restart") == [
        (0, "stopped", 75, "PREEMPTED"), (1, "done", 0, "COMPLETED"),
    ]  # fmt: skip
    assert job.ask("SELECT count(*) FROM attempt WHERE outcome = 'done'") == [(job.chunks,)], "nothing was done twice"


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("uneven", {"gpu0": "0,1,2,3", "gpu1": "0"}),  # -N2 -G5: as Slurm fills these nodes
        ("odd nodes", {"gpu0": "0,1,2,3", "gpu3": "0,1"}),
        ("exclusive", {"gpu3": "0,1"}),
    ],
)
def test_every_node_works_with_the_devices_it_was_given(day: BadDay, name: str, devices: dict[str, str]) -> None:
    job = day.jobs[name]
    job.check_that_every_chunk_is_done_once()
    ordered = "SELECT node, device_index FROM device JOIN task USING (task_id) ORDER BY 1, 2"
    assert job.ask(f"SELECT node, group_concat(device_index) FROM ({ordered}) GROUP BY 1") == sorted(devices.items())
    shards = job.ask("SELECT shard_index, shard_count FROM task ORDER BY 1")
    assert shards == [(number, len(devices)) for number in range(len(devices))]
    used = "SELECT count(DISTINCT task_id) FROM worker JOIN device USING (task_id, device_id)"
    assert job.ask(used) == [(len(devices),)]  # on a busy machine the work is over before every device has its worker


def test_tasks_of_a_step_with_a_gpu_each_share_the_work_and_no_device(day: BadDay) -> None:
    job = day.jobs["own gpus"]
    job.check_that_every_chunk_is_done_once()
    assert job.ask("SELECT procid, devices FROM task ORDER BY 1") == [(0, 1), (1, 1), (2, 1)]
    assert job.ask("SELECT count(DISTINCT uuid), count(DISTINCT node) FROM device JOIN task USING (task_id)") == [
        (3, 1)
    ]
    assert job.ask("SELECT task_id, count(*) FROM chunk GROUP BY 1 HAVING count(*) != 4") == []


def test_a_recorder_beside_the_job_in_a_step_of_its_own_sees_the_same_devices(day: BadDay) -> None:
    job = day.jobs["sidecar"]
    job.check_that_every_chunk_is_done_once()
    sql = "SELECT uuid FROM device WHERE device_id IN (SELECT device_id FROM sample) ORDER BY 1"
    assert query(job.folder / "side.sqlite", sql) == job.ask("SELECT uuid FROM device ORDER BY 1")
    assert query(job.folder / "side.sqlite", "SELECT verdict FROM task") != [("killed",)]


def test_the_node_that_came_back_is_used_again(day: BadDay) -> None:
    script = day.folder / "where.sh"
    script.write_text("#!/bin/bash\n")
    job_id = day.cluster.sbatch(script, "--nodelist=gpu2", "--gpus-per-node=4", cwd=day.folder)
    assert day.cluster.wait(job_id) == {str(job_id): JobEnd("COMPLETED", 0)}
