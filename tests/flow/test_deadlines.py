"""Emulated ends of the time, again and again: nothing is killed in flight, and no device stands idle for long before.

Each run has another end (``stop_after``, or a warning in the middle of the work), another number of devices and
chunks of another length each; how long a chunk takes follows from its length, not quite evenly, as with real engines.

What is measured: the *last moment* is the one after which a device need not work any more. With ``stop_after`` it is
the end of the time, less what is reserved for publishing and less the margin for chunks that take longer than
predicted (a tenth of the time each, where the time is as short as here; the table shows what a device lost to these,
too). With a signal it is the signal: what is running then comes to its end, and nothing is begun. The *idle tail* of a
device reaches from the end of its last chunk to the last moment. It may be as long as one chunk of median length, of
those that were done: another one of them would not have fitted in.

By hand, 50 deadlines: pytest tests/flow/test_deadlines.py --count 100 -s
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.badcjobs_program import MANIFEST_HEADER, Site, rows
from support.waiting import wait_for

AT_ONCE = 5  # runs side by side: they sleep most of the time
SHARE = 0.1  # of the time, for the reserve and for the margin
SHORTEST_S, LONGEST_S = 0.3, 1.2  # of a chunk
UNEVEN = 0.1  # chunks of the same length differ by so much
LENGTH_FACTOR = 100  # seconds of audio per second of work
ENDS = ("stop-after", signal.SIGTERM, "stop-after", signal.SIGUSR1, "stop-after", signal.SIGUSR2)


@dataclass(frozen=True)
class Plan:
    """One emulated deadline."""

    number: int
    devices: int
    end: str | signal.Signals
    after_s: float  # from its beginning to its end
    chunks_s: list[float]  # how long each takes


def make_plan(number: int, chance: random.Random) -> Plan:
    devices, after_s = chance.randint(1, 4), chance.uniform(5, 8)
    work_s, chunks_s = devices * after_s * chance.uniform(1.2, 2.5), []
    while sum(chunks_s) < work_s:
        chunks_s.append(min(LONGEST_S, SHORTEST_S * chance.lognormvariate(0.5, 0.5)))
    return Plan(number, devices, ENDS[number % len(ENDS)], after_s, [max(SHORTEST_S, each) for each in chunks_s])


def write_manifest(site: Site, plan: Plan, chance: random.Random) -> Path:
    """Write chunks whose length in the manifest tells, nearly, how long they take; their files say it exactly."""
    lines = [MANIFEST_HEADER]
    (site.folder / "audio").mkdir()
    for number, chunk_s in enumerate(plan.chunks_s):
        audio = site.folder / "audio" / f"c{number:03d}.wav"
        audio.write_text(f"{chunk_s * chance.uniform(1 - UNEVEN, 1 + UNEVEN):.3f}\n")
        lines.append(f"rec,c{number:03d},{audio},0,{round(chunk_s * LENGTH_FACTOR * 1000)},0,,")
    manifest = site.folder / "manifest.csv"
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


@dataclass(frozen=True)
class Seen:
    """What came of a plan; tails are per device, in seconds."""

    plan: Plan
    exit_code: int
    stderr: str
    outcomes: dict[str | None, int]
    median_s: float
    tails_s: list[float]
    late_s: float  # how long after the end of the time the task was over; negative: before
    begun_after_the_signal: int

    @property
    def line(self) -> str:
        end = self.plan.end if isinstance(self.plan.end, str) else self.plan.end.name
        over = f";  over {-self.late_s:.2f} s before the end" if end == "stop-after" else ""
        return (
            f"  {self.plan.number:>3} {end:<9} {self.plan.after_s:5.1f} s  {self.plan.devices} devices"
            f"  {sum(self.outcomes.values()):>3} of {len(self.plan.chunks_s):>3} chunks, median {self.median_s:.2f} s;"
            f"  longest idle tail {max(self.tails_s):.2f} s{over}"
        )


def live_through(plan: Plan, folder: Path, seed: int) -> Seen:
    site, chance = Site(folder / f"site-{plan.number}"), random.Random(seed + plan.number)
    script = site.script("work.sh", 'read s < "$1"\nsleep $s\necho start_time,end_time,label,score > "$2"')
    options = ["--command", f"{script} {{input}} {{output}}", "--simulate", plan.devices, "--no-emit-gpu-telemetry"]
    if plan.end == "stop-after":
        options += ["--config", f"run.stop_after={plan.after_s / 60:.5f}"]
    program = site.start_run(write_manifest(site, plan, chance), *options)
    signal_ms = None
    if isinstance(plan.end, signal.Signals):
        wait_for(lambda: site.count_now("attempt", "ended_at_ms IS NULL") == plan.devices, "every device is at work")
        time.sleep(plan.after_s / 2)  # in the middle of the work
        signal_ms = int(time.time() * 1000)
        program.send(plan.end)
    ended = program.wait()
    seen = look_at(plan, site.task_database(), ended.exit_code, ended.stderr, signal_ms)
    site.close()
    shutil.rmtree(site.folder)
    return seen


def look_at(plan: Plan, database: Path, exit_code: int, stderr: str, signal_ms: int | None) -> Seen:
    ((started_ms, ended_ms),) = rows(database, "SELECT started_at_ms, ended_at_ms FROM task")
    over_ms = started_ms + 1000 * plan.after_s if signal_ms is None else ended_ms
    last_moment_ms = over_ms - 2 * SHARE * 1000 * plan.after_s if signal_ms is None else signal_ms
    last_ends = rows(database, "SELECT device_id, max(ended_at_ms) FROM attempt GROUP BY device_id")
    took = rows(database, "SELECT (ended_at_ms - started_at_ms) / 1000.0 FROM attempt WHERE outcome = 'done'")
    return Seen(
        plan,
        exit_code,
        stderr,
        dict(rows(database, "SELECT outcome, count(*) FROM attempt GROUP BY outcome")),
        statistics.median(took_s for (took_s,) in took),
        [max(0.0, last_moment_ms - (end_ms or 0)) / 1000 for _, end_ms in last_ends],
        (ended_ms - over_ms) / 1000,
        rows(database, "SELECT count(*) FROM attempt WHERE started_at_ms > ?", (signal_ms or ended_ms) + 500)[0][0],
    )


@pytest.mark.timeout(0)
def test_nothing_is_killed_in_flight_and_no_device_stands_idle_for_long(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    seed = int(os.environ.get("BADCJOBS_TEST_SEED") or random.randrange(10**6))
    count = max(2, pytestconfig.getoption("--count") // 2)
    print(f"\n{count} deadlines; BADCJOBS_TEST_SEED={seed} repeats them")
    chance = random.Random(seed)
    plans = [make_plan(number, chance) for number in range(count)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        deadlines = list(pool.map(lambda plan: live_through(plan, tmp_path, seed), plans))
    print("\n".join(one.line for one in deadlines))
    for one in deadlines:
        assert one.exit_code == 75, f"it stops in order, with work left: {one.stderr}"
        assert set(one.outcomes) == {"done"}, f"killed in flight: {one.line}"
        assert one.late_s <= 0, f"it was not over before its time was: {one.line}"
        assert one.begun_after_the_signal == 0, one.line
        assert len(one.tails_s) == one.plan.devices, f"a device has done nothing at all: {one.line}"
        assert max(one.tails_s) <= one.median_s, f"idle for longer than a median chunk: {one.line}"
