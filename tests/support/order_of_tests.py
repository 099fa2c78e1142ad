"""Which tests run where and in which order: files stay together, and all that runs on the one Slurm cluster does.

The group marks of pytest-xdist 3.8 are not seen with pytest 9.2; the path of a test always is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_TESTS = Path(__file__).parents[1]
_REAL_PROCESSES = ("slurm", "flow", "faults", "browser", "contract")
_FOLDERS = ("slurm", "flow", "faults", "contract", "unit")  # the longest first, so that no worker ends alone with it


class OneFileOneWorker(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out whole files in the order of collection, and the folder slurm/ as if it were one."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "tests/slurm" if path.startswith("tests/slurm/") else path


def by_folder(item: pytest.Item) -> int:
    """Return the place of a test in the order of the folders; within one they keep theirs."""
    return _FOLDERS.index(ring(item)) if ring(item) in _FOLDERS else len(_FOLDERS)


def runs_against_the_clock(item: pytest.Item) -> bool:
    """Return whether a test watches real processes, which a busy machine may delay."""
    return ring(item) in _REAL_PROCESSES


def ring(item: pytest.Item) -> str:
    """Return the folder of tests/ that a test stands in."""
    return item.path.relative_to(_TESTS).parts[0]
