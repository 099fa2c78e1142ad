"""``badcjobs demo``: the whole path on this machine, with nothing installed."""

from __future__ import annotations

import os
import random
import time
from array import array
from pathlib import Path

import pytest
from rooms.cli import write_chunk
from support.badcjobs_program import Outcome, Site, rows


@pytest.fixture(scope="module")
def demo(shared_site: Site) -> tuple[Outcome, float]:
    start_s = time.monotonic()
    done = shared_site.badcjobs("demo", "--out", shared_site.out)
    return done, time.monotonic() - start_s


def test_it_ends_well_within_a_minute_even_beside_other_tests(demo: tuple[Outcome, float]) -> None:
    done, seconds = demo
    assert done.exit_code == 0, done.stderr
    assert seconds < 60


def test_it_ends_with_the_merged_summary(demo: tuple[Outcome, float]) -> None:
    stdout = demo[0].stdout
    assert "all done" in stdout
    for word in ("4 (4 done)", "audio-hours per GPU-hour", "× real time", "report.html", "badcjobs run "):
        assert word in stdout
    whole = ("  database ", "  report ", "    badcjobs ")  # paths, and a command to paste: never folded
    own = [line for line in stdout.splitlines() if not line.startswith(whole)]
    assert max(map(len, own)) <= 100


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


def test_it_leaves_a_run_that_can_be_looked_at(demo: tuple[Outcome, float], shared_site: Site) -> None:
    shown = shared_site.badcjobs("monitor", shared_site.out)
    assert "4 done" in shown.stdout
    assert "100%  96/96 chunks" in shown.stdout


def test_a_second_one_in_the_same_folder_leaves_the_audio_alone_so_that_what_is_done_stays_done(tmp_path: Path) -> None:
    def written(said: str = "") -> int:
        path = tmp_path / "site01.wav"
        path.write_text(said) if said else None
        write_chunk(path, array("h", range(8100)), random.Random(2026))
        os.utime(path, ns=(10**18, 10**18)) if said else None
        return path.stat().st_mtime_ns

    assert written("half a file") == written() == 10**18
    assert (tmp_path / "site01.wav").stat().st_size > 16_000
