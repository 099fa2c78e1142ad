"""The benchmark of plan and the rehearsal of the campaign, tiny: they run, and keep their promises with much slack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench"
NO_CHARTS = Path(__file__).parents[1] / "support" / "no_charts"


def run(name: str, *words: str, folder: Path) -> str:
    command = [sys.executable, BENCH / name, *words, "--slack", "20", "--folder", folder]
    environ = {**os.environ, "PYTHONPATH": str(NO_CHARTS)}  # which take longer than all the rest
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(folder.iterdir()) == []
    return done.stdout


def test_the_benchmark_of_plan_runs(tmp_path: Path) -> None:
    said = run("plan.py", "--rows", "2000", "--files", "100", folder=tmp_path)
    assert "a manifest of 2,000 rows" in said
    assert "a folder of 100 WAV files" in said
    assert "times as fast as one after another" in said
    assert said.count(" kept") == 7


def test_the_rehearsal_prints_its_scales_and_how_the_cost_grows(tmp_path: Path) -> None:
    said = run("rehearsal.py", "--scales", "1/10000,1/5000", folder=tmp_path)
    assert "rehearsal at 1/5000: 4,000 of 20,000,000 chunks, 2 of 10,000 tasks" in said
    assert "from 1/10000 to 1/5000: 2 times the work" in said
    assert "at full scale, if that goes on" in said
    assert said.count(" kept") == 6
