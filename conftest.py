"""Options of the test suite; here, because ``--require slurm`` also names the folder slurm/ to pytest."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        action="append",
        default=[],
        metavar="NAME",
        help="fail, not skip, tests that need NAME (slurm, cc, hawkears, mount, shm, wheel) where missing; repeatable",
    )
    parser.addoption("--count", type=int, default=10, metavar="N", help="how many kills a kill campaign has")


def pytest_configure(config: pytest.Config) -> None:
    from support import needs

    unknown = set(config.getoption("--require")) - needs.KNOWN
    if unknown:
        raise pytest.UsageError(f"--require {', '.join(sorted(unknown))}: known are {', '.join(sorted(needs.KNOWN))}")
    needs.required.update(config.getoption("--require"))
