"""Warnings, TERM, Ctrl-C and the end of the time: what is running comes to its end, the rest is for the next run."""

from __future__ import annotations

import re
import signal
import time

import psutil
from support.badcjobs_program import Outcome, Program, Site, array_task, rows
from support.waiting import wait_for

CHUNKS = 6


class Stage:
    """A run on two devices whose chunks wait until the test lets them finish."""

    def __init__(self, site: Site, *args: object, chunks: int = CHUNKS) -> None:
        self.site, self.gate = site, site.folder / "gate"
        self.gate.unlink(missing_ok=True)
        gated = f'while [ ! -e {self.gate} ]; do sleep 0.02; done\necho start_time,end_time,label,score > "$2"'
        script = site.script("gated.sh", f'[ "$BADCJOBS_CHUNK_ID" = bad ] && exit 1\n{gated}')
        manifest = site.manifest(chunks)
        manifest.write_text(manifest.read_text().replace("rec0,c000", "rec0,bad"))
        self.command = ("--command", f"{script} {{input}} {{output}}", "--simulate", 2, "--retries", 0, *args)
        self.program: Program = site.start_run(manifest, *self.command)
        wait_for(lambda: self.running == 2 and len(self.programs()) == 2, "two chunks are running")

    @property
    def running(self) -> int:
        return self.site.count_now("attempt", "ended_at_ms IS NULL")

    def programs(self) -> list[psutil.Process]:
        """Return the programs of the chunks; the wrapper has their name on its command line, too."""
        return [process for process in self.site.processes("gated.sh") if process.name() == "gated.sh"]

    def send(self, signum: signal.Signals) -> None:
        self.program.send(signum)
        wait_for(lambda: f"{signum.name}: starting nothing new" in self.program.stderr, f"{signum.name} was heard")

    def finish(self) -> Outcome:
        """Let the running chunks finish and wait for the end of the run."""
        self.gate.touch()
        return self.program.wait()

    def assert_left(self, exit_code: int, outcomes: list[tuple[str | None, int]], verdict: str = "stopped") -> None:
        """Check the last state of the task; the bad chunk has failed in any case."""
        assert self.site.rows("SELECT verdict, exit_code FROM task") == [(verdict, exit_code)]
        assert self.site.rows("SELECT outcome, count(*) FROM attempt GROUP BY 1") == outcomes
        assert self.site.processes() == []
        assert list(self.site.local.iterdir()) == []


def test_running_chunks_finish_and_the_next_run_does_exactly_what_is_left(site: Site) -> None:
    """TERM twice in the same breath is one message; a chunk that has failed is named all the same."""
    stage = Stage(site)
    stage.send(signal.SIGTERM)
    stage.program.send(signal.SIGTERM)
    stopped = stage.finish()
    assert stopped.exit_code == 75, stopped.stderr
    assert "run the same command again" in stopped.stdout
    assert "bad" in stopped.stdout
    stage.assert_left(75, [("done", 2), ("failed", 1)])
    again = site.run(site.folder / "manifest.csv", *stage.command, "--json")
    assert (again.exit_code, again.json["chunks"]) == (1, {"done": 3, "failed": 1, "skipped": 2})
    job = site.merged()
    assert rows(job, "SELECT status, count(*) FROM chunk GROUP BY 1") == [("done", 5), ("failed", 1)]
    assert rows(job, "SELECT count(*), count(DISTINCT chunk_id) FROM attempt") == [(7, 6)]


def test_a_stop_that_comes_when_all_that_is_left_is_running_is_no_stop(site: Site) -> None:
    """And TERM to the programs of chunks is not held against them: they are started again."""
    stage = Stage(site, chunks=3)
    for program in stage.programs():
        program.terminate()
    wait_for(lambda: site.count_now("attempt") == 5 and len(stage.programs()) == 2, "both are running again")
    stage.send(signal.SIGTERM)
    assert stage.finish().exit_code == 1
    stage.assert_left(1, [(None, 2), ("done", 2), ("failed", 1)], "failed")


def test_ctrl_c_drains_and_the_second_one_stops_at_once(site: Site) -> None:
    stage = Stage(site)
    stage.send(signal.SIGINT)
    stage.program.send(signal.SIGINT)
    assert stage.program.wait().exit_code == 130
    stage.assert_left(130, [(None, 2), ("failed", 1)])


def test_a_warning_gives_all_the_time_that_is_needed_and_a_term_after_it_only_the_grace(site: Site) -> None:
    stage = Stage(site, "--config", "run.grace_s=0")
    stage.send(signal.SIGUSR1)
    samples = site.count_now("sample")
    wait_for(lambda: site.count_now("sample") > samples + 4, "time goes by")
    assert stage.running == 2
    stage.program.send(signal.SIGTERM)
    assert stage.program.wait().exit_code == 75
    stage.assert_left(75, [(None, 2), ("failed", 1)])


def test_term_to_every_process_of_the_job_loses_no_chunk_and_no_telemetry(site: Site) -> None:
    program = site.start_run(site.manifest(CHUNKS), "--engine", "demo", "--engine-arg=--burn-s=0.8", "--simulate", 2)
    wait_for(
        lambda: site.count_now("sample") and site.count_now("attempt", "ended_at_ms IS NULL") == 2, "two chunks run"
    )
    sent_ms = time.time() * 1000
    for process in site.processes():
        process.terminate()
    stopped = program.wait()
    assert stopped.exit_code == 75, stopped.stderr
    assert site.count("attempt", "outcome IS NOT 'done'") == 0
    assert site.count("chunk", "status = 'done'") >= 2
    assert site.gaps() == [], "the recorder must not obey it either"
    assert site.count("sample", f"at_ms > {sent_ms}") > 0


# --- the end of the time, known beforehand ----------------------------------------------------------------------------


def test_a_task_asks_for_its_end_and_stops_before_it_with_nothing_killed(site: Site) -> None:
    slow = ("--engine", "demo", "--cpu-workers", 2, "--no-emit-gpu-telemetry", "--engine-arg=--burn-s=0.3")
    squeue = site.script("squeue", f'echo "$*" >> {site.folder}/asked\necho $(($(date +%s) + 4))')
    env = {**array_task(0, (0,)), "PATH": f"{squeue.parent}:{site.environ()['PATH']}"}
    manifest = site.manifest(60)
    stopped = site.run(manifest, *slow, env=env)
    assert stopped.exit_code == 75, stopped.stderr
    assert re.search(r"time: until \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ, 0:00:0[234] from now \(squeue\)", stopped.stderr)
    assert "the time limit is near; run the same command again" in stopped.stdout
    assert (site.folder / "asked").read_text() == "-h -j 4821_0 -o %e\n", "once"
    assert site.rows("SELECT verdict, exit_code, ended_at_ms - started_at_ms < 5000 FROM task") == [("stopped", 75, 1)]
    ((done, left),) = site.rows("SELECT sum(status = 'done'), sum(status = 'pending') FROM chunk")
    assert (done >= 1, done + left) == (True, 60)
    assert site.rows("SELECT outcome, count(*) FROM attempt GROUP BY 1") == [("done", done)], "killed in flight"
    late = site.run(manifest, *slow, "--config", "run.stop_after=0", env=array_task(0, (0,), job_id=4900))
    assert late.exit_code == 75, "without any time nothing is started"
    assert site.count("worker", "task_id = (SELECT task_id FROM task WHERE job_id = '4900')") == 0
    env = {**array_task(0, (0,), job_id=5000), "PATH": "/usr/bin:/bin"}
    left = site.run(manifest, *slow, "--shard", "0/30", env=env)
    assert (left.exit_code, "time: no time limit is known" in left.stderr) == (0, True)
