"""kill -9 of merge at any moment, again and again: the job database has the old content or the new, never between.

By hand: ``pytest tests/flow/test_kill_merge.py --count 100 -s``.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest
from support.badcjobs_program import Site
from support.databases import canonical, names_in, query
from support.task_files import TaskFile

OLD, SAMPLES = 12, 800


def content(job: Path) -> int:
    assert query(job, "PRAGMA integrity_check") == [("ok",)]
    return hash(canonical(job))


def copied(start: Path, run: Path) -> Path:
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(start, run)  # with the times of the files
    return run


@pytest.mark.parametrize("new", [4, 12], ids=["a few more: changed in place", "many more: drafted and renamed"])
def test_a_killed_merge_leaves_the_old_content_or_the_new(
    site: Site, new: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    seed = int(os.environ.get("BADCJOBS_TEST_SEED") or random.randrange(10**6))
    kills = max(1, request.config.getoption("--count") // 4)
    print(f"BADCJOBS_TEST_SEED={seed} repeats this campaign of {kills} kills")
    chance, start, job = random.Random(seed), tmp_path / "start", site.out / "job.sqlite"
    for n in range(OLD + new):
        if n == OLD:
            assert site.badcjobs("merge", start).exit_code == 0
        TaskFile(start, index=n, states={f"c{n}": "done", "all": "done"}, samples=SAMPLES).write()
    copied(start, site.out)
    started_s = time.monotonic()
    assert site.start("merge", site.out).wait().exit_code == 0
    duration_s = time.monotonic() - started_s
    old, finished = content(start / "job.sqlite"), content(job)
    seen = {old: 0, finished: 0}
    assert len(seen) == 2
    for _ in range(kills):
        program = site.start("merge", copied(start, site.out))
        time.sleep(chance.uniform(0.3, 1.05) * duration_s)  # the moment itself is what is tried here
        program.kill()
        if job.with_name("job.sqlite-journal").exists():
            assert site.badcjobs("report", site.out).exit_code == 0  # opened by us, it is as it was
        seen[content(job)] += 1
        assert content(site.merged()) == finished
        assert names_in(site.out) == ["job.sqlite", "report.html", "tasks"]
    print(f"killed {kills} times: {seen[old]} times the old content, {seen[finished]} times the new")
