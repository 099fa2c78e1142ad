"""What a test needs from the machine: where it is missing the test is skipped, or fails if ``--require`` names it."""

from __future__ import annotations

from typing import NoReturn

import pytest

KNOWN = frozenset({"slurm", "cc", "hawkears", "mount", "shm", "wheel", "cgroup", "spank", "promtool", "chromium"})
required: set[str] = set()  # filled from the command line


def missing(name: str, reason: str) -> NoReturn:
    """End the test that needs ``name``."""
    if name in required:
        pytest.fail(f"--require {name}: {reason}")
    pytest.skip(reason)
