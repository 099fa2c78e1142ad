"""One browser for all tests in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.browser import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one
