"""kill -9 of merge at any moment, again and again: the job database has the old content or the new, never between.

By hand: ``pytest tests/flow/test_kill_merge.py --count 100 -s``.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from support.badcjobs_program import Site
from support.databases import canonical
from support.task_files import TaskFile

OLD, SAMPLES = 12, 1500


def content(job: Path) -> str:
    """Return a digest of all that is in a job database, opened as anybody would open it."""
    with closing(sqlite3.connect(job)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    return hashlib.sha256(canonical(job).encode()).hexdigest()


@pytest.mark.parametrize("new", [4, 20], ids=["a few more: changed in place", "many more: drafted and renamed"])
def test_a_killed_merge_leaves_the_old_content_or_the_new(
    site: Site, new: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    seed = int(os.environ.get("BADCJOBS_TEST_SEED") or random.randrange(10**6))
    kills = max(1, request.config.getoption("--count") // 2)
    print(f"BADCJOBS_TEST_SEED={seed} repeats this campaign of {kills} kills")
    chance = random.Random(seed)
    start = tmp_path / "start"
    tasks = [
        TaskFile(start, index=n, states={f"c{n}": "done", "all": "done"}, samples=SAMPLES) for n in range(OLD + new)
    ]
    for task in tasks[:OLD]:
        task.write()
    assert site.badcjobs("merge", start).exit_code == 0
    for task in tasks[OLD:]:
        task.write()
    whole = copied(start, site.out)
    started_s = time.monotonic()
    assert site.start("merge", whole).wait().exit_code == 0
    duration_s = time.monotonic() - started_s
    old, finished = content(start / "job.sqlite"), content(whole / "job.sqlite")
    assert old != finished
    seen, in_the_middle = {old: 0, finished: 0}, 0
    for _ in range(kills):
        run = copied(start, site.out)
        program = site.start("merge", run)
        time.sleep(chance.uniform(0.3, 1.05) * duration_s)  # the moment itself is what is tried here
        program.kill()
        in_the_middle += any(path.name.endswith(("-journal", ".tmp")) for path in run.iterdir())
        seen[content(run / "job.sqlite")] += 1
        again = site.badcjobs("merge", run)
        assert again.exit_code == 0, again.stderr
        assert content(run / "job.sqlite") == finished
        assert sorted(path.name for path in run.iterdir()) == ["job.sqlite", "report.html", "tasks"]
    print(
        f"killed {kills} times, {in_the_middle} of them while it was writing:"
        f" {seen[old]} times the old content, {seen[finished]} times the new"
    )


def copied(start: Path, run: Path) -> Path:
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(start, run)  # with the times of the files
    return run
