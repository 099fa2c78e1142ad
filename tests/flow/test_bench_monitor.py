"""The bench of the live view runs, and its promise of 3 % of a core for a hundred tasks holds here too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench" / "monitor.py"


def test_a_hundred_tasks_that_publish_every_half_minute_cost_next_to_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--tasks", "100", "--seconds", "10"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["core_percent"] < 3.0
    assert figures["memory_mib"] <= 100
    assert figures["idle_look_ms"] <= 20
