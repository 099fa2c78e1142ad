"""What the suite itself promises on a busy machine."""

import os
import subprocess
import sys
from pathlib import Path

SETTINGS = Path(__file__).parents[2] / "pyproject.toml"
TESTS = """
import time
import pytest

@pytest.mark.flaky(reruns=1)
def test_slow():
    time.sleep(30)

def test_quick():
    pass
"""


def test_a_time_limit_ends_each_try_of_one_test_and_not_the_run(tmp_path):
    (tmp_path / "test_both.py").write_text(TESTS)
    words = [sys.executable, "-m", "pytest", "-n1", "-c", SETTINGS, "--rootdir", tmp_path, "--timeout=1", tmp_path]
    environ = {**os.environ, "PYTEST_ADDOPTS": ""}  # not those of this run
    done = subprocess.run([*map(str, words)], env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert "1 failed, 1 passed, 1 rerun in" in done.stdout, done.stdout + done.stderr
