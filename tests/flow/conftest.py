"""What every flow test starts from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.badcjobs_program import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Give a test a site of its own; a process it leaves behind is a failure."""
    site = Site(tmp_path / "site")
    yield site
    site.close()


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Give the tests of one file a common site, for a run that many of them look at."""
    site = Site(tmp_path_factory.mktemp("shared") / "site")
    yield site
    site.close()
