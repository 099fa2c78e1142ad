"""Tasks with the same part of a source in one folder: only one works, whichever is killed, suspended or restarted."""

import signal

import pytest
from support.badcjobs_program import array_task, assert_refused, rows
from support.waiting import wait_for

BEAT_S = 0.4
OPTIONS = ("--cpu-workers", 1, "--no-emit-gpu-telemetry", "--config", f"run.heartbeat_every_s={BEAT_S}")
DONE = "SELECT chunk_id, count(*) FROM attempt WHERE outcome = 'done' GROUP BY 1"


@pytest.fixture
def start(site):
    """Start tasks whose chunks wait for the file gate."""
    heard = f'while [ ! -e {site.folder}/gate ]; do sleep 0.02; done; echo start_time,end_time,label,score > "$2"'
    command = f"{site.script('gated.sh', heard)} {{input}} {{output}}"
    manifest = site.manifest(6)
    return lambda *words, **env: site.start_run(manifest, "--command", command, *OPTIONS, *words, env=env)


def working(site, tasks=1):
    """Wait until so many tasks have begun a chunk."""
    wait_for(lambda: site.count_now("attempt") >= tasks, "a chunk is begun")


def assert_each_done_once(site):
    assert sorted(rows(site.merged(), DONE)) == [(f"c{i:03d}", 1) for i in range(6)]
    assert not list(site.out.glob("tasks/.claim*")), "all are given back"


def test_a_live_twin_is_refused_with_the_name_of_the_holder_and_leaves_nothing(site, start):
    first = start("--shard", "1/2")
    working(site)
    before = sorted(site.out.rglob("*"))
    for shard in ("1/2", "0/1", "3/4"):
        refused = start("--shard", shard, **array_task(0, (0,), job_id=5000)).wait()
        (log,) = site.out.glob("tasks/*.log")
        job = log.stem.partition("_")[0]
        words = (log.stem, f"shard {shard}", f"job {job}, array index 0, node ", "since 20", "last heartbeat 20")
        assert_refused(refused, 75, *words)
        assert sorted(site.out.rglob("*")) == before
    other = start("--shard", "2/4")
    working(site, 2)
    (site.folder / "gate").touch()
    assert [task.wait().exit_code for task in (first, other, start())] == [0, 0, 0]
    assert_each_done_once(site)


def test_of_three_identical_tasks_at_once_one_works_and_the_rest_is_not_started_again(site, start):
    said = [site.folder / f"no-restart-{number}" for number in range(3)]
    tasks = [start(BADCJOBS_NO_RESTART=str(path), **array_task(0, (0,), job_id=i)) for i, path in enumerate(said, 5000)]
    wait_for(lambda: sum(task.running for task in tasks) == 1, "two are refused")
    (site.folder / "gate").touch()
    ends = [task.wait().exit_code for task in tasks]
    assert (sorted(ends), [path.exists() for path in said]) == ([0, 75, 75], [code == 75 for code in ends])
    assert_each_done_once(site)


@pytest.mark.parametrize("how", ["killed", "suspended", "lost with its node"])
def test_a_silent_claim_is_taken_over_and_its_holder_stops_without_another_result(site, start, how):
    said = {"BADCJOBS_NO_RESTART": str(site.folder / "said")}
    first = start(**array_task(0, (0,)), **said)
    working(site)
    first.send(signal.SIGSTOP if how == "suspended" else signal.SIGKILL if how == "killed" else signal.SIGCONT)
    restarted = {**array_task(0, (0,)), "SLURM_RESTART_COUNT": "1"}
    second = start(**(restarted if how == "lost with its node" else array_task(0, (0,), job_id=5000)))
    wait_for(lambda: "taking over the work of task 4821_0.r0.gpu-01" in second.stderr, "it takes over")
    of_second = ("attempt JOIN task USING (task_id)", "(job_id, restart) != ('4821', 0)")
    wait_for(lambda: site.count_now(*of_second), "the second has begun a chunk")
    if how == "suspended":
        (site.folder / "gate").touch()
        assert second.wait().exit_code == 0, "the result of the first waits for its wrapper"
    first.send(signal.SIGCONT)
    ended = first.wait()
    (site.folder / "gate").touch()
    assert second.wait().exit_code == 0, second.stderr
    if how != "killed":
        assert (ended.exit_code, (site.folder / "said").exists()) == (75, True), ended.stderr
        assert "another task has taken over" in ended.stdout
        assert rows(site.task_databases()[0], "SELECT DISTINCT status FROM chunk") == [("pending",)]
    assert_each_done_once(site)
    begun = "SELECT min(a.started_at_ms) FROM attempt a JOIN task USING (task_id) WHERE restart = 1"
    ended = "SELECT ended_at_ms FROM task WHERE restart = 0"
    if how == "lost with its node":
        assert rows(site.out / "job.sqlite", begun) >= rows(site.out / "job.sqlite", ended), "it waited for its results"
