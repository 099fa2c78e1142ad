"""Fixtures of the whole suite; its options are in the conftest.py above."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

_ONE_CLUSTER = Path(__file__).parent / "slurm"


def pytest_configure() -> None:
    """Hear of a terminal that closes, also where the suite itself was started with nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep together what shares a fixture: the tests of a file, and all that run on the one Slurm cluster."""
    for item in items:
        group = "slurm" if _ONE_CLUSTER in item.path.parents else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test outside any allocation, wherever the suite itself was started."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_", "CUDA_VISIBLE", "BADCJOBS_")) and not name.startswith("BADCJOBS_TEST"):
            monkeypatch.delenv(name)
