"""The bench of the write path runs, and its promises hold here too, with room for a busy machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import needs

BENCH = Path(__file__).parents[1] / "bench" / "writing.py"


@pytest.fixture(scope="module")
def figures() -> Any:
    if shutil.which("cc") is None:
        needs.missing("cc", "no compiler for the library that counts fsyncs")
    done = subprocess.run(
        [sys.executable, str(BENCH), "--seconds", "2", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_store_costs_at_most_two_percent_of_a_core_at_eight_devices_and_ten_hertz(figures: Any) -> None:
    for mode in ("local", "shared"):
        assert figures["cpu_percent"][mode] + figures["publishing"][mode]["percent_of_a_core"] <= 2.0


def test_an_hour_of_one_device_is_at_most_a_third_of_a_megabyte(figures: Any) -> None:
    assert figures["size"]["mb_per_gpu_hour"] <= 0.35
    assert figures["size"]["bytes_per_sample"] <= 90


def test_commits_cost_no_fsync_on_local_disk_and_a_few_each_in_the_safe_mode(figures: Any) -> None:
    """Opening and closing a file costs some; a run of two seconds has little else."""
    local, shared = figures["fsyncs_per_minute"]["local"], figures["fsyncs_per_minute"]["shared"]
    in_all = {mode: sum(v for k, v in told.items() if k != "minutes") for mode, told in (("l", local), ("s", shared))}
    assert in_all["l"] * local["minutes"] < 25
    assert shared["recorder"] > 2 * local["recorder"]
    assert shared["wrapper"] > 2 * local["wrapper"]
    assert in_all["s"] > in_all["l"]
