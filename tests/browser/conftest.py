"""One browser for all tests in it."""

from collections.abc import Iterator

import pytest
from support.browser import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one
