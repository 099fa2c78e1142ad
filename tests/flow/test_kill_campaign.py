"""kill -9 of anybody, or of all at once, at any moment, on local disk and in the shared mode, again and again.

By hand: pytest tests/flow/test_kill_campaign.py --count 100 -s
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from rooms.model import publish_interval_s
from support.badcjobs_program import Program, Site, rows
from support.databases import seal_is_broken
from support.live_files import committed, halves, live_folders
from support.waiting import wait_for

CHUNKS, KILLS_IN_A_ROUND = 90, 10
BASE_INTERVAL_S = 0.1  # as the tests' runs are started with
A_PUBLICATION_MS = 2000  # may take this long while everybody else is busy
VICTIMS = ("recorder", "wrapper", "worker", "all at once")
ENGINE = ("--engine", "demo", "--engine-arg=--burn-s=0.12", "--simulate", 2, "--retries", 6)

# What must not be lost, each row with the time at which it came about.
PRECIOUS = {
    "sample": "SELECT at_ms, device_id, utilization_percent, power_w FROM sample",
    "host_sample": "SELECT at_ms, cpu_percent, memory_used_bytes FROM host_sample",
    "attempt": "SELECT ended_at_ms, attempt_id, chunk_id, outcome FROM attempt WHERE outcome IS NOT NULL",
    "chunk": "SELECT ended_at_ms, chunk_id, status, detections FROM chunk WHERE status IN ('done', 'failed', 'poison')",
    "detection": """SELECT c.ended_at_ms, d.chunk_id, d.start_ms, d.end_ms, d.label
                    FROM detection d JOIN chunk c USING (recording_id, chunk_id)""",
    "worker": "SELECT started_at_ms, worker_id, pid FROM worker",
}
Rows = dict[str, Counter[tuple[Any, ...]]]


class Campaign:
    """Kills, and what they have cost so far."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.kills: Counter[tuple[str, str]] = Counter()
        self.kept: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.oldest_lost_ms = 0

    def strike(self, site: Site, manifest: Path, mode: str) -> None:
        """Start a run, kill somebody in it, and compare what was committed with what is published in the end."""
        known = set(site.task_databases())
        program = site.start_run(manifest, *ENGINE, "--config", f"run.live_mode={mode}")
        time.sleep(self.chance.uniform(0.3, 2.6))  # the moment itself is what is tried here
        victim = self.chance.choice(VICTIMS)
        self.kills[mode, victim] += 1
        wait_for(lambda: not program.running or candidates(site, program, victim), f"there is a {victim}")
        everybody = stand_still(site)
        targets = candidates(site, program, victim)
        if victim == "worker":
            targets = self.chance.sample(targets, min(1, len(targets)))
        alone = victim == "wrapper" and not site.recorders()  # nobody is there yet who could publish for it
        for target in targets:
            end(target)
        before = live_state(site)
        for process in everybody:
            go_on(process)
        self.see_it_end(site, program, victim)
        for database in set(site.task_databases()) - known:
            check_database(database)
            self.compare(before, database, all_dead=alone or victim == "all at once")
        for left in live_folders(site):
            assert alone or victim == "all at once", f"{left} was left behind"
            shutil.rmtree(left)

    def see_it_end(self, site: Site, program: Program, victim: str) -> None:
        if victim in ("worker", "recorder") and program.running:
            time.sleep(self.chance.uniform(0.0, 0.3))  # it may start the recorder again, or not come to that
            wait_for(lambda: program.stderr or not program.running, "it hears signals")
            program.send(signal.SIGTERM)
            ended = program.wait()
            over = "task ends: " in ended.stderr  # then the signal may have met a Python that was leaving already
            assert ended.exit_code in ((0, 75, -signal.SIGTERM) if over else (0, 75)), ended.stderr
        program.wait()
        wait_for(lambda: not site.processes(), "everybody is gone", timeout_s=40)

    def compare(self, before: Rows, database: Path, *, all_dead: bool) -> None:
        for table, sql in PRECIOUS.items():
            lost = before[table] - Counter(rows(database, sql))
            self.kept[table] += (before[table] - lost).total()
            self.lost[table] += lost.total()
            assert all_dead or not lost, f"{database.name}: {table} lost {lost.most_common(3)}"
            for row in lost:
                self.note_age(before, row[0], database)

    def note_age(self, before: Rows, at_ms: int, database: Path) -> None:
        newest_ms = max(row[0] for table in before.values() for row in table)
        interval_ms = 1000 * publish_interval_s(database.stat().st_size, BASE_INTERVAL_S)
        self.oldest_lost_ms = max(self.oldest_lost_ms, newest_ms - at_ms)
        assert newest_ms - at_ms <= interval_ms + A_PUBLICATION_MS, "more than one publish interval is lost"

    def finish(self, site: Site, manifest: Path) -> None:
        """Run to the end: everything is done, nothing is missing, nothing was done twice."""
        assert site.run(manifest, *ENGINE).exit_code == 0
        states = Counter(site.rows("SELECT chunk_id FROM chunk WHERE status = 'done'"))
        assert states == Counter({(f"c{i:03d}",): 1 for i in range(CHUNKS)}), "a chunk is missing or was done twice"
        heard = Counter(site.rows("SELECT chunk_id FROM detection"))
        assert heard == Counter({(f"c{i:03d}",): i % 3 for i in range(CHUNKS) if i % 3})

    def __str__(self) -> str:
        lines = [f"{many:4d} × {victim} ({mode})" for (mode, victim), many in sorted(self.kills.items())]
        lines += [f"{self.kept[name]:8d} rows of {name} kept, {self.lost[name]} lost" for name in PRECIOUS]
        return "\n".join([*lines, f"oldest row lost to a kill of all at once: {self.oldest_lost_ms} ms before the end"])


def candidates(site: Site, program: Program, victim: str) -> list[psutil.Process]:
    """Return the processes that a kill of this kind means."""
    if victim == "wrapper":
        return [psutil.Process(program.pid)] if program.running else []
    return {"worker": site.workers, "recorder": site.recorders, "all at once": site.processes}[victim]()


def stand_still(site: Site) -> list[psutil.Process]:
    """Stop the time for all processes of a site, so that what is committed at this moment can be seen."""
    everybody = site.processes()
    for process in everybody:
        try:
            process.suspend()
        except psutil.NoSuchProcess:
            continue
    return everybody


def go_on(process: psutil.Process) -> None:
    try:
        process.resume()
    except psutil.NoSuchProcess:
        pass


def end(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
    wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "it is dead")


def live_state(site: Site) -> Rows:
    """Return what the live files hold that nobody may lose."""
    files = [file for folder in live_folders(site) for file in halves(folder) if file.exists()]
    return {table: Counter(row for file in files for row in committed(file, sql)) for table, sql in PRECIOUS.items()}


def check_database(database: Path) -> None:
    assert rows(database, "PRAGMA integrity_check") == [("ok",)]
    assert seal_is_broken(database) is False
    # Every sample and every attempt can still be joined to its device.
    for table in ("sample", "attempt"):
        lost = f"SELECT count(*) FROM {table} WHERE device_id NOT IN (SELECT device_id FROM device)"
        assert rows(database, lost) == [(0,)]


@pytest.mark.timeout(0)
def test_whoever_is_killed_whenever_nothing_committed_is_lost_and_nothing_is_done_twice(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    seed = int(os.environ.get("BADCJOBS_TEST_SEED") or random.randrange(10**6))
    print(f"\nBADCJOBS_TEST_SEED={seed} repeats this campaign")
    campaign, left = Campaign(seed), pytestconfig.getoption("--count")
    start_s = time.monotonic()
    while left > 0:
        site = Site(tmp_path / f"round-{left}")
        manifest = site.manifest(CHUNKS)
        for number in range(min(left, KILLS_IN_A_ROUND)):
            campaign.strike(site, manifest, ("local", "shared")[number % 2])
        left -= KILLS_IN_A_ROUND
        campaign.finish(site, manifest)
        site.close()
        shutil.rmtree(site.folder)
    print(campaign)
    print(f"{sum(campaign.kills.values())} kills in {time.monotonic() - start_s:.0f} s")
    assert sum(campaign.kills.values()) == pytestconfig.getoption("--count")
