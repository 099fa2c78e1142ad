"""``badcjobs demo``: the whole path on this machine, with nothing installed."""

from __future__ import annotations

import os
import random
from array import array
from pathlib import Path

from rooms.cli import write_chunk
from support.badcjobs_program import Site, rows


def test_it_ends_with_the_merged_summary_and_leaves_a_whole_run(site: Site) -> None:
    done = site.badcjobs("demo", "--out", site.out)
    assert done.exit_code == 0, done.stderr
    words = ("all done", "4 (4 done)", "audio-hours per GPU-hour", "× real time", "report.html", "badcjobs run ")
    assert [word for word in words if word not in done.stdout] == []
    whole = ("  database ", "  report ", "    badcjobs ")  # paths, and a command to paste: never folded
    assert max(len(line) for line in done.stdout.splitlines() if not line.startswith(whole)) <= 100
    assert (site.out / "report.html").read_text().startswith("<!doctype html>")
    job = site.out / "job.sqlite"
    assert rows(job, "SELECT chunks, done, detections > 0 FROM job_summary") == [(96, 96, 1)]
    assert rows(job, "SELECT count(DISTINCT uuid), count(*) FROM device") == [(4, 8)]
    assert (len(site.task_databases()), list(site.local.iterdir()), site.processes()) == (4, [], [])


def test_a_second_one_in_the_same_folder_leaves_the_audio_alone_so_that_what_is_done_stays_done(tmp_path: Path) -> None:
    path = tmp_path / "site01.wav"
    path.write_text("half a file")
    for _ in range(2):
        write_chunk(path, array("h", range(8100)), random.Random(2026))
        os.utime(path, ns=(10**18, 10**18))
        write_chunk(path, array("h", range(8100)), random.Random(2026))
        assert (path.stat().st_mtime_ns, path.stat().st_size > 16_000) == (10**18, True)
