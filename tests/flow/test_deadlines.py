"""Emulated ends of the time, again and again: nothing is killed in flight, and no device stands idle for long before.

Each run has another end (``stop_after``, or a warning in the middle of the work), another number of devices and chunks
of another length each. The *last moment* is the one after which a device need not work any more: the signal, or the end
of the time less what is reserved for publishing and the margin (a tenth of the time each, where it is as short as
here). The *idle tail* of a device reaches from the end of its last chunk to the last moment. It may be as long as one
chunk of median length, of those that were done: another one of them would not have fitted in. On a busy machine all
takes longer: by as much as the slowest chunk of the same run took longer than it had to.

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
from pathlib import Path

import pytest
from support.badcjobs_program import MANIFEST_HEADER, Site, rows
from support.waiting import wait_for

AT_ONCE = 5  # runs side by side: they sleep most of the time
SHORTEST_S, LONGEST_S = 0.3, 1.2  # of a chunk
UNEVEN = 0.1  # chunks of the same length differ by so much
ENDS = ("stop-after", signal.SIGTERM, "stop-after", signal.SIGUSR1, "stop-after", signal.SIGUSR2)


def live_through(number: int, folder: Path, seed: int) -> list[str]:
    """Run one emulated deadline; return what went wrong."""
    chance, end, site = random.Random(seed + number), ENDS[number % len(ENDS)], Site(folder / f"site-{number}")
    devices, after_s = chance.randint(1, 4), chance.uniform(5, 7)
    works_s, sleeps_s, lines = devices * after_s * chance.uniform(1.2, 2.5), list[float](), [MANIFEST_HEADER]
    while sum(sleeps_s) < works_s:  # the length in the manifest tells, nearly, how long a chunk takes
        chunk_s = min(LONGEST_S, max(SHORTEST_S, SHORTEST_S * chance.lognormvariate(0.5, 0.5)))
        sleeps_s.append(chunk_s * chance.uniform(1 - UNEVEN, 1 + UNEVEN))
        audio = site.folder / f"c{len(lines)}.wav"
        audio.write_text(f"{sleeps_s[-1]:.3f}\n")
        lines.append(f"rec,{len(sleeps_s) - 1},{audio},0,{round(chunk_s * 100_000)},0,,")
    manifest = site.folder / "manifest.csv"
    manifest.write_text("\n".join(lines) + "\n")
    script = site.script("work.sh", 'read s < "$1"\nsleep $s\necho start_time,end_time,label,score > "$2"')
    options = ["--command", f"{script} {{input}} {{output}}", "--simulate", devices, "--no-emit-gpu-telemetry"]
    options += ["--config", f"run.stop_after={after_s / 60:.5f}"] * (end == "stop-after")
    program, signal_ms = site.start_run(manifest, *options), None
    if isinstance(end, signal.Signals):
        wait_for(lambda: site.count_now("attempt", "ended_at_ms IS NULL") == devices, "every device is at work")
        wait_for(lambda: site.count_now("chunk", "status = 'done'") >= 2 * devices, "the middle of the work")
        signal_ms = time.time() * 1000
        program.send(end)
    ended, database = program.wait(), site.task_database()
    ((started_ms, ended_ms),) = rows(database, "SELECT started_at_ms, ended_at_ms FROM task")
    attempts = rows(database, "SELECT chunk_id, outcome, started_at_ms, ended_at_ms, device_id FROM attempt")
    done_s = {int(chunk): (to_ms - from_ms) / 1000 for chunk, end, from_ms, to_ms, _ in attempts if end == "done"}
    late_s = max(took_s - sleeps_s[chunk] for chunk, took_s in done_s.items())  # on this machine, at this moment
    last_moment_ms = started_ms + 800 * after_s if signal_ms is None else signal_ms
    last_ends = rows(database, "SELECT max(ended_at_ms) FROM attempt GROUP BY device_id")
    tails_s = [max(0.0, last_moment_ms - (end_ms or 0)) / 1000 for (end_ms,) in last_ends]
    median_s = statistics.median(done_s.values())
    line = (
        f"{number:>3} {end!s:<9} {after_s:.1f} s  {devices} devices  {len(done_s)} of {len(sleeps_s)} chunks, median"
        f" {median_s:.2f} s, late by {late_s:.2f} s; longest idle tail {max(tails_s):.2f} s; took"
        f" {(ended_ms - started_ms) / 1000:.2f} s"
    )
    print(line)
    site.close()
    shutil.rmtree(site.folder)
    last_end_s = max((ended_at_ms or 0) - started_ms for *_, ended_at_ms, _ in attempts) / 1000
    begun_late = [one for one in attempts if one[2] > (signal_ms or ended_ms) + 500 + 1000 * late_s]
    wrong = {
        f"it did not stop in order, with work left: {ended.stderr}": ended.exit_code != 75,
        "a chunk was killed in flight": len(done_s) != len(attempts),
        "a chunk ended in the time for publishing": signal_ms is None and last_end_s > 0.9 * after_s + late_s,
        "a chunk was begun after the signal": begun_late != [],
        "a device has done nothing at all": len(tails_s) != devices,
        "a device was idle for longer than a median chunk": max(tails_s) > median_s + late_s,
    }
    return [f"{what}: {line}" for what, is_wrong in wrong.items() if is_wrong]


@pytest.mark.timeout(0)
def test_nothing_is_killed_in_flight_and_no_device_stands_idle_for_long(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    seed = int(os.environ.get("BADCJOBS_TEST_SEED") or random.randrange(10**6))
    count = max(2, pytestconfig.getoption("--count") // 2)
    print(f"\n{count} deadlines; BADCJOBS_TEST_SEED={seed} repeats them")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = list(pool.map(lambda number: live_through(number, tmp_path, seed), range(count)))
    assert [what for each in wrong for what in each] == []
