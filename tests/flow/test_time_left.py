"""The end of the time, known beforehand: what is running comes to its end, the rest stays for the next run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.badcjobs_program import Outcome, Site, array_task, assert_refused

SLOW = ("--engine", "demo", "--cpu-workers", "2", "--no-emit-gpu-telemetry", "--engine-arg=--burn-s=0.3")
CHUNKS = 60


def assert_stopped_in_order(site: Site, stopped: Outcome) -> None:
    assert stopped.exit_code == 75, stopped.stderr
    assert "the time limit is near: starting only chunks that can finish" in stopped.stderr
    assert "the time limit is near; run the same command again" in stopped.stdout
    assert site.rows("SELECT verdict, exit_code FROM task") == [("stopped", 75)]
    ((done, left),) = site.rows("SELECT sum(status = 'done'), sum(status = 'pending') FROM chunk")
    assert done >= 2
    assert done + left == CHUNKS
    assert site.rows("SELECT outcome, count(*) FROM attempt GROUP BY 1") == [("done", done)], "killed in flight"


def fake_squeue(site: Site, answer: str) -> dict[str, str]:
    """Put a squeue on PATH; return the environment of an array task that finds it."""
    program = site.script("squeue", f'echo "$*" >> {site.folder}/asked\n{answer}')
    path = f"{program.parent}:{site.environ()['PATH']}"
    return {**array_task(0, (0,)), "PATH": path}


def asked(site: Site) -> list[str]:
    calls = site.folder / "asked"
    return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def manifest(site: Site) -> Path:
    return site.manifest(CHUNKS)


def test_a_task_stops_in_order_before_its_time_is_over_and_the_same_command_finishes_it(
    site: Site, manifest: Path
) -> None:
    stopped = site.run(manifest, *SLOW, "--config", "run.stop_after=0:05")
    assert site.rows("SELECT ended_at_ms - started_at_ms < 5000 FROM task") == [(1,)], "its time was over"
    assert_stopped_in_order(site, stopped)
    assert "time: until " in stopped.stderr
    assert "0:00:05 from now (run.stop_after)" in stopped.stderr
    finished = site.run(manifest, *SLOW, "--config", "run.stop_after=1:00:00")
    assert finished.exit_code == 0, finished.stderr
    assert site.count("attempt", "outcome = 'done'") == CHUNKS, "each was done once"


def test_the_end_of_the_job_is_asked_of_squeue_once(site: Site, manifest: Path) -> None:
    stopped = site.run(manifest, *SLOW, env=fake_squeue(site, "echo $(($(date +%s) + 5))"))
    assert_stopped_in_order(site, stopped)
    assert "from now (squeue)" in stopped.stderr
    assert asked(site) == ["-h -j 4821_0 -o %e"]


def test_slurms_own_variable_saves_the_question(site: Site, manifest: Path) -> None:
    env = fake_squeue(site, "echo 1")
    stopped = site.run(manifest, *SLOW, env={**env, "SLURM_JOB_END_TIME": str(int(time.time()) + 7)})
    assert_stopped_in_order(site, stopped)
    assert "from now (SLURM_JOB_END_TIME)" in stopped.stderr
    assert asked(site) == []


def test_a_job_whose_end_nobody_knows_works_until_all_is_done(site: Site) -> None:
    done = site.run(site.manifest(2), *SLOW, env=fake_squeue(site, "echo NONE"))
    assert done.exit_code == 0, done.stderr
    assert "time: no time limit is known" in done.stderr
    assert len(asked(site)) == 1


def test_without_any_time_nothing_is_started(site: Site) -> None:
    stopped = site.run(site.manifest(2), *SLOW, "--config", "run.stop_after=0")
    assert stopped.exit_code == 75, stopped.stderr
    assert (site.count("chunk", "status = 'pending'"), site.count("worker")) == (2, 0)


def test_with_nothing_left_to_do_a_task_is_done_however_late_it_is(site: Site) -> None:
    manifest = site.manifest(2)
    assert site.run(manifest, *SLOW).exit_code == 0
    assert site.run(manifest, *SLOW, "--config", "run.stop_after=0").exit_code == 0


def test_a_time_that_is_no_time_is_refused(site: Site) -> None:
    refused = site.run(site.manifest(1), *SLOW, "--config", "run.stop_after=abc")
    assert_refused(refused, 2, '--config run.stop_after = "abc" must be minutes, H:M:S', "badcjobs guide settings")
    assert not site.out.exists()
