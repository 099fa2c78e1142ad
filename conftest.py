"""Options of the test suite; here, because ``--require slurm`` also names the folder slurm/ to pytest."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        action="append",
        default=[],
        metavar="NAME",
        help="turn the skip of tests that need NAME (slurm, cc, hawkears, wheel) into a failure; repeatable",
    )
