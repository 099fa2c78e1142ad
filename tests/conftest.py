"""Fixtures of the whole suite; its options are in the conftest.py above."""

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from support.badcjobs_program import Site
from support.pages import Pages

# The longest first, so that no worker of the suite ends alone with it; whether a test watches real processes.
RINGS = {"slurm": True, "flow": True, "faults": True, "contract": True, "unit": False, "browser": True}
MOST_RETRIES = 2  # of a run: more than that is not a busy machine, but a test that is not steady


def pytest_configure(config: pytest.Config) -> None:
    """Let HUP and Ctrl-C have their effect, even if the suite was started with nohup and ``&``.

    Hypothesis tries the same examples in every run, so that a change is judged by itself alone. To look for new ones,
    give ``--hypothesis-profile new``.
    """
    os.environ["TZ"] = "UTC"  # of the times on pages
    time.tzset()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("same", derandomize=True, deadline=None)
    settings.register_profile("new", deadline=None)
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first; give a second try to those that watch real processes."""
    rings = {item: item.path.relative_to(Path(__file__).parent).parts[0] for item in items}
    items.sort(key=lambda item: [*RINGS].index(rings[item]))
    for item in items:
        if RINGS[rings[item]]:
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which many tests needed their second try."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and len(tried_again(reporter)) > MOST_RETRIES and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why a test needed its second try: it may be more than a busy machine."""
    for name, texts in tried_again(terminalreporter).items():
        terminalreporter.section(f"first try of {name}")
        terminalreporter.write_line("\n".join(texts))
    if (tests := len(tried_again(terminalreporter))) > MOST_RETRIES:
        terminalreporter.section(f"FAILED: {tests} tests needed a second try, at most {MOST_RETRIES} may")


def tried_again(reporter: pytest.TerminalReporter) -> dict[str, list[str]]:
    """Return the tests that needed their second try, with what failed in the first: the test, its end, or both."""
    texts: dict[str, list[str]] = {}
    for report in reporter.stats.get("rerun", ()):
        texts.setdefault(report.nodeid, []).append(report.longreprtext)
    return texts


@pytest.fixture
def pages(request: pytest.FixtureRequest) -> Pages:
    """Compare texts with the files of this test in tests/pages; ``--update-pages`` rewrites them."""
    return Pages(request.path.stem, request.node.name, update=request.config.getoption("--update-pages"))


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


@pytest.fixture
def seed() -> int:
    """Give a number for what is chosen at random, and print how to choose the same again."""
    seed = int(os.environ.get("BADCJOBS_TEST_SEED") or random.randrange(10**6))
    print(f"BADCJOBS_TEST_SEED={seed} repeats this")
    return seed


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Give a folder whose path always has the same length: texts with it are then wrapped at the same words."""
    folder = Path(tempfile.mkdtemp(prefix="badcjobs", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test outside any allocation, wherever the suite itself was started."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_", "CUDA_VISIBLE", "BADCJOBS_")) and not name.startswith("BADCJOBS_TEST"):
            monkeypatch.delenv(name)
