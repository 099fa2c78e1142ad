"""``badcjobs demo``: the whole path on this machine, with nothing installed."""

from __future__ import annotations

import time

import pytest
from support.badcjobs_program import Outcome, Site, rows


@pytest.fixture(scope="module")
def demo(shared_site: Site) -> tuple[Outcome, float]:
    start_s = time.monotonic()
    done = shared_site.badcjobs("demo", "--out", shared_site.out)
    return done, time.monotonic() - start_s


def test_it_ends_well_in_less_than_half_a_minute(demo: tuple[Outcome, float]) -> None:
    done, seconds = demo
    assert done.exit_code == 0, done.stderr
    assert seconds < 30


def test_it_ends_with_the_merged_summary(demo: tuple[Outcome, float]) -> None:
    stdout = demo[0].stdout
    assert "all done" in stdout
    for word in ("4 (4 done)", "audio-hours per GPU-hour", "× real time", "report.html", "badcjobs run "):
        assert word in stdout
    assert max(len(line) for line in stdout.splitlines() if "Simulated GPU" in line) <= 100


def test_it_leaves_a_whole_run(demo: tuple[Outcome, float], shared_site: Site) -> None:
    assert (shared_site.out / "report.html").read_text().startswith("<!doctype html>")
    assert len(shared_site.task_databases()) == 4
    job = shared_site.out / "job.sqlite"
    ((chunks, done, detections),) = rows(job, "SELECT chunks, done, detections FROM job_summary")
    assert chunks == done > 50
    assert detections > 0
    assert rows(job, "SELECT count(DISTINCT uuid), count(*) FROM device") == [(4, 8)]


def test_it_leaves_nothing_on_the_node(demo: tuple[Outcome, float], shared_site: Site) -> None:
    assert list(shared_site.local.iterdir()) == []
    assert shared_site.processes() == []
