"""Fixtures of the whole suite; its options are in the conftest.py above."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test outside any allocation, wherever the suite itself was started."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_", "CUDA_VISIBLE", "BADCJOBS_")) and not name.startswith("BADCJOBS_TEST"):
            monkeypatch.delenv(name)
