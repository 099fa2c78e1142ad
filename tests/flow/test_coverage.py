"""Every moment of a recording is covered by a sample or by a gap that says why not, however busy the machine is.

``BADCJOBS_TEST_COVERAGE_S=60 python -m pytest -s tests/flow/test_coverage.py`` records for the full minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from support.badcjobs_program import Site, rows
from support.databases import change

SECONDS = float(os.environ.get("BADCJOBS_TEST_COVERAGE_S", "3"))
START_MS, INTERVAL_MS = 2000, 500


def covered_ms(database: Path, device: int) -> tuple[int, int]:
    """Return (covered, all) milliseconds of a recording, from its first moment to the recorder's last.

    Two neighbouring samples cover the time between them when they are at most one and a half intervals apart; until the
    first sample it is the moment that any program takes to start. Whatever lies in a gap is covered by its reason.
    """
    ((began_ms, ended_ms),) = rows(database, "SELECT t.started_at_ms, max(r.last_at_ms) FROM task t, recorder r")
    sampled = [at for (at,) in rows(database, "SELECT at_ms FROM sample WHERE device_id = ? ORDER BY at_ms", device)]
    stretches = [(one, next_) for one, next_ in pairwise([*sampled, ended_ms]) if next_ - one <= 1.5 * INTERVAL_MS]
    stretches += [(began_ms, first) for first in sampled[:1] if first - began_ms <= START_MS]
    of_device = "(device_id IS NULL OR device_id = ?) AND metric IS NULL"
    stretches += rows(database, f"SELECT from_ms, to_ms FROM gap WHERE {of_device}", device)
    covered, reached = 0, began_ms
    for from_ms, to_ms in sorted(stretches):
        covered += max(0, min(to_ms, ended_ms) - max(from_ms, reached))
        reached = max(reached, to_ms)
    return covered, ended_ms - began_ms


def test_under_full_load_99_percent_of_the_time_is_covered_by_samples_or_named_gaps(site: Site) -> None:
    out = site.folder / "recording.sqlite"
    words = ("--simulate", 2, "--interval", INTERVAL_MS / 1000, "--duration", SECONDS)
    with ExitStack() as stack:
        for _ in range(2 * len(os.sched_getaffinity(0))):  # two processes per core compute as fast as they can
            burning = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(burning.kill)
        done = site.badcjobs("record", "--out", out, *words, timeout_s=SECONDS + 60)
    assert done.exit_code == 0, done.stderr
    devices = [device for (device,) in rows(out, "SELECT device_id FROM device")]
    assert len(devices) == 2
    for device in devices:
        covered, all_ms = covered_ms(out, device)
        print(f"{covered} of {all_ms} ms covered: {100 * covered / all_ms:.2f} %")
        assert all_ms >= 1000 * SECONDS
        assert covered >= 0.99 * all_ms
    assert rows(out, "SELECT count(*) FROM gap WHERE length(reason) <= 5") == [(0,)]
    # The measure itself: what was taken away is not covered.
    change(out, "DELETE FROM sample WHERE at_ms - (SELECT min(at_ms) FROM sample) > 900")
    change(out, "DELETE FROM gap")
    covered, all_ms = covered_ms(out, devices[0])
    assert covered < 0.6 * all_ms
