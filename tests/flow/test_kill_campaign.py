"""kill -9 of anybody at any moment, again and again: whatever was finished stays finished, and is never done twice."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Sequence

import psutil
from support.badcjobs_program import Program, Site, rows, wait_for

CHUNKS, KILLS = 60, 6
ENGINE = ("--engine", "demo", "--engine-arg=--burn-s=0.06", "--simulate", 2, "--retries", 4)


def test_whoever_is_killed_whenever_finished_chunks_stay_finished_and_are_done_once(site: Site) -> None:
    seed = int(os.environ.get("BADCJOBS_TEST_SEED") or random.randrange(10**6))
    print(f"BADCJOBS_TEST_SEED={seed} repeats this campaign")
    chance = random.Random(seed)
    manifest = site.manifest(CHUNKS)
    done: set[str] = set()
    for _ in range(KILLS):
        for left in site.local.iterdir():  # of a wrapper that was killed before it had a recorder
            shutil.rmtree(left)
        program = site.start_run(manifest, *ENGINE)
        time.sleep(chance.uniform(0.0, 1.2))  # the moment itself is what is tried here
        victim = chance.choice(["wrapper", "worker", "recorder"])
        print(f"killing the {victim}")
        kill(site, program, victim, chance)
        check_databases(site)
        assert done <= (done := finished(site)), "a finished chunk is not finished any more"
    assert site.run(manifest, *ENGINE).exit_code == 0
    job = site.merged()
    assert rows(job, "SELECT status, count(*) FROM chunk GROUP BY status") == [("done", CHUNKS)]
    tries = rows(job, "SELECT chunk_id, count(*) FROM attempt WHERE outcome = 'done' GROUP BY chunk_id ORDER BY 1")
    assert tries == [(f"c{i:03d}", 1) for i in range(CHUNKS)], "a chunk was done twice"
    heard = dict(rows(job, "SELECT chunk_id, count(*) FROM detection GROUP BY chunk_id"))
    assert heard == {f"c{i:03d}": i % 3 for i in range(CHUNKS) if i % 3}


def kill(site: Site, program: Program, victim: str, chance: random.Random) -> None:
    """Kill one process of a run, see that the others do what they must, and end the run if it goes on."""
    if victim == "wrapper":
        program.kill()
        wait_for(lambda: not site.processes(), "everybody else is gone", timeout_s=10)
        return
    candidates = wait_for(lambda: not program.running or choose(site, victim), f"there is a {victim}")
    if isinstance(candidates, Sequence):
        target = chance.choice(candidates)
        try:
            target.kill()
        except psutil.NoSuchProcess:
            pass  # the run was quicker
    before = site.count_now("chunk", "status = 'done'")
    wait_for(lambda: not program.running or site.count_now("chunk", "status = 'done'") > before, "the run goes on")
    program.send(signal.SIGTERM)
    ended = program.wait()
    assert ended.exit_code in (0, 75), ended.stderr
    assert list(site.local.iterdir()) == []


def choose(site: Site, victim: str) -> list[psutil.Process]:
    return site.workers() if victim == "worker" else site.recorders()


def finished(site: Site) -> set[str]:
    return {chunk for (chunk,) in site.rows("SELECT chunk_id FROM chunk WHERE status = 'done'")}


def check_databases(site: Site) -> None:
    for database in site.task_databases():
        assert rows(database, "PRAGMA integrity_check") == [("ok",)]
        # Every sample and every attempt can still be joined to its device.
        for table in ("sample", "attempt"):
            lost = f"SELECT count(*) FROM {table} WHERE device_id NOT IN (SELECT device_id FROM device)"
            assert rows(database, lost) == [(0,)]
