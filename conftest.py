"""Options of the test suite; here, because ``--require slurm`` also names the folder slurm/ to pytest."""

from __future__ import annotations

from typing import Any

import pytest


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


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep together what shares a fixture, on whatever number of cores."""
    from support.order_of_tests import OneFileOneWorker

    return OneFileOneWorker(config, log)
