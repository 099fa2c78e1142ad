"""Warnings, TERM and Ctrl-C: what is running comes to its end, the rest stays for the next run."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.badcjobs_program import Outcome, Program, Site, rows
from support.waiting import wait_for

CHUNKS = 6


@dataclass
class Stage:
    """A run on two devices whose chunks wait until the test lets them finish."""

    site: Site
    program: Program
    gate: Path

    def send_and_hear(self, signum: signal.Signals) -> None:
        self.program.send(signum)
        wait_for(lambda: f"{signum.name}: starting nothing new" in self.program.stderr, f"{signum.name} was heard")

    def programs(self) -> list[psutil.Process]:
        """Return the programs of the chunks; the wrapper has their name on its command line, too."""
        return [process for process in self.site.processes("gated.sh") if process.name() == "gated.sh"]

    def finish(self) -> Outcome:
        """Let the running chunks finish and wait for the end of the run."""
        self.gate.touch()
        return self.program.wait()

    @property
    def statuses(self) -> dict[str, int]:
        return dict(self.site.rows("SELECT status, count(*) FROM chunk GROUP BY status"))

    @property
    def outcomes(self) -> list[tuple[object, ...]]:
        return self.site.rows("SELECT outcome, count(*) FROM attempt GROUP BY outcome")


def set_up(site: Site, *args: object, chunks: int = CHUNKS) -> Stage:
    """Start a run and wait until both workers are at a chunk."""
    stage = Stage(site, start(site, site.manifest(chunks), *args), site.folder / "gate")
    wait_for(lambda: running(site) == 2 and len(stage.programs()) == 2, "two chunks are running")
    return stage


def start(site: Site, manifest: Path, *args: object) -> Program:
    gated = f'while [ ! -e {site.folder}/gate ]; do sleep 0.02; done\necho start_time,end_time,label,score > "$2"'
    script = site.script("gated.sh", gated)
    return site.start_run(manifest, "--command", f"{script} {{input}} {{output}}", "--simulate", 2, *args)


def running(site: Site) -> int:
    return site.count_now("attempt", "ended_at_ms IS NULL")


@pytest.mark.parametrize(
    ("signum", "exit_code"),
    [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_running_chunks_finish_and_the_rest_stays_pending(site: Site, signum: signal.Signals, exit_code: int) -> None:
    stage = set_up(site)
    stage.send_and_hear(signum)
    stopped = stage.finish()
    assert stopped.exit_code == exit_code, stopped.stderr
    assert "run the same command again" in stopped.stdout
    assert site.rows("SELECT verdict, exit_code FROM task") == [("stopped", exit_code)]
    assert stage.statuses == {"done": 2, "pending": CHUNKS - 2}
    assert stage.outcomes == [("done", 2)], "only what was running when the signal came, and that to its end"
    assert list(site.local.iterdir()) == []


def test_the_next_run_does_exactly_what_a_stop_has_left(site: Site) -> None:
    stage = set_up(site)
    stage.send_and_hear(signal.SIGTERM)
    assert stage.finish().exit_code == 75
    again = start(site, site.folder / "manifest.csv", "--json").wait()
    assert again.exit_code == 0, again.stderr
    assert again.json["chunks"] == {"done": CHUNKS - 2, "skipped": 2}
    job = site.merged()
    assert rows(job, "SELECT status, count(*) FROM chunk GROUP BY status") == [("done", CHUNKS)]
    assert rows(job, "SELECT count(*), count(DISTINCT chunk_id) FROM attempt") == [(CHUNKS, CHUNKS)]


def test_a_stop_that_comes_when_all_that_is_left_is_running_is_no_stop(site: Site) -> None:
    stage = set_up(site, chunks=2)
    stage.send_and_hear(signal.SIGTERM)
    assert stage.finish().exit_code == 0
    assert stage.statuses == {"done": 2}
    assert site.rows("SELECT verdict FROM task") == [("done",)]


def test_a_stop_with_failed_chunks_behind_it_still_says_run_me_again(site: Site) -> None:
    script = site.script("failing.sh", '[ "$BADCJOBS_CHUNK_ID" = c000 ] && exit 1\nexec sleep 60')
    program = site.start_run(
        site.manifest(3),
        "--command",
        f"{script} {{input}} {{output}}",
        "--simulate",
        1,
        "--retries",
        0,
        "--config",
        "run.grace_s=0",
    )
    wait_for(lambda: site.count_now("chunk", "status = 'failed'") and running(site), "one has failed, one is running")
    program.send(signal.SIGTERM)
    stopped = program.wait()
    assert stopped.exit_code == 75
    assert "c000" in stopped.stdout, "it is named all the same"


def test_a_second_ctrl_c_cuts_a_long_chunk_short(site: Site) -> None:
    stage = set_up(site)
    stage.send_and_hear(signal.SIGINT)
    stage.program.send(signal.SIGINT)
    sent_s = time.monotonic()
    stopped = stage.program.wait()
    assert time.monotonic() - sent_s < 40
    assert stopped.exit_code == 130, stopped.stderr
    assert stage.statuses == {"pending": CHUNKS}
    assert stage.outcomes == [(None, 2)]
    assert site.processes() == []


def test_two_terms_in_the_same_breath_are_one_message(site: Site) -> None:
    stage = set_up(site)
    stage.send_and_hear(signal.SIGTERM)
    stage.program.send(signal.SIGTERM)
    assert stage.finish().exit_code == 75
    assert stage.statuses == {"done": 2, "pending": CHUNKS - 2}


def test_a_chunk_that_outlasts_the_grace_is_ended_and_stays_pending(site: Site) -> None:
    stage = set_up(site, "--config", "run.grace_s=0.5")
    sent_s = time.monotonic()
    stage.send_and_hear(signal.SIGTERM)
    assert stage.program.wait().exit_code == 75
    assert 0.4 < time.monotonic() - sent_s < 25
    assert stage.statuses == {"pending": CHUNKS}
    assert site.rows("SELECT verdict, exit_code FROM task") == [("stopped", 75)]


def test_a_warning_alone_gives_running_chunks_all_the_time_they_need(site: Site) -> None:
    stage = set_up(site, "--config", "run.grace_s=0")
    stage.send_and_hear(signal.SIGUSR1)
    samples = site.count_now("sample")
    wait_for(lambda: site.count_now("sample") > samples + 8, "time goes by")
    assert stage.finish().exit_code == 75
    assert stage.outcomes == [("done", 2)]


def test_term_after_a_warning_sets_the_deadline_that_the_warning_has_not(site: Site) -> None:
    stage = set_up(site, "--config", "run.grace_s=0")
    stage.send_and_hear(signal.SIGUSR1)
    stage.program.send(signal.SIGTERM)
    assert stage.program.wait().exit_code == 75
    assert stage.statuses == {"pending": CHUNKS}


def test_term_to_every_process_of_the_job_loses_no_chunk_and_no_telemetry(site: Site) -> None:
    program = site.start_run(site.manifest(CHUNKS), "--engine", "demo", "--engine-arg=--burn-s=0.8", "--simulate", 2)
    wait_for(lambda: site.count_now("sample") and running(site) == 2, "two chunks are running")
    sent_ms = time.time() * 1000
    for process in site.processes():
        process.terminate()
    stopped = program.wait()
    assert stopped.exit_code == 75, stopped.stderr
    assert site.count("attempt", "outcome IS NOT 'done'") == 0
    assert site.count("chunk", "status = 'done'") >= 2
    assert site.gaps() == [], "the recorder must not obey it either"
    assert site.count("sample", f"at_ms > {sent_ms}") > 0


def test_term_to_the_programs_of_chunks_is_not_held_against_them(site: Site) -> None:
    stage = set_up(site, "--retries", 0, chunks=2)
    for program in stage.programs():
        program.terminate()
    done = stage.finish()
    assert done.exit_code == 0, done.stderr
    assert stage.statuses == {"done": 2}
