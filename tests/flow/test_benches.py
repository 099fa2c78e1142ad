"""Every bench that needs no GPU runs at a small scale, and keeps its promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.browser import chromium

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize("name", ["dispatch", "merge", "monitor", "plan", "report_page", "writing"])
def test_a_bench_keeps_its_promises_at_a_small_scale(name: str, tmp_path: Path) -> None:
    if name == "report_page":
        chromium()
    command = [sys.executable, BENCH / f"{name}.py", "--small", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BROKEN" not in done.stdout
    assert " kept" in done.stdout
    assert list(tmp_path.iterdir()) == []
