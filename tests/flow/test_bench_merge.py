"""The benchmark of merge, at a hundredth of its size: it runs, and its promises hold with slack for a busy machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench" / "merge.py"


def test_the_promises_of_merge_hold_at_a_hundredth(tmp_path: Path) -> None:
    command = [sys.executable, BENCH, "--scale", "1/100", "--slack", "3", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" kept") == 7
    assert "BROKEN" not in done.stdout
    assert list(tmp_path.iterdir()) == []
