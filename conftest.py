"""Options of the test suite; here, because ``--require slurm`` also names the folder slurm/ to pytest."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

# The tests start badcjobs a thousand times: it is compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        action="append",
        default=[],
        metavar="NAME",
        help="fail, not skip, tests that need NAME (slurm, cc, hawkears, …; all) where it is missing; repeatable",
    )
    parser.addoption("--count", type=int, default=6, metavar="N", help="how many kills a kill campaign has")
    parser.addoption("--update-pages", action="store_true", help="rewrite the pages that tests compare")


def pytest_configure(config: pytest.Config) -> None:
    from support import needs

    needs.require(config.getoption("--require"))


@pytest.hookimpl(optionalhook=True)  # there may be no pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """Use one worker more than cores: the tests on the Slurm cluster wait more than they compute."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole files in the order of collection, and the folder slurm/ as if it were one: it has one cluster.

    The group marks of pytest-xdist 3.8 are not seen with pytest 9.2; the path of a test always is.
    """
    from xdist.scheduler import LoadScopeScheduling

    class OneFileOneWorker(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "tests/slurm" if nodeid.startswith("tests/slurm/") else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return OneFileOneWorker(config, log)
