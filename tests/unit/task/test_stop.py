"""Signals as a request to stop: drain, drain before a deadline, stop now."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rooms.task import StopRequest
from support.hand_clock import HandClock

USR1, USR2, TERM, INT, HUP = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP
GRACE_S = 20

# What arrives, and after how many seconds the next; then: whether to drain, how many seconds from the last signal until
# running work is ended (None: never), and the name for the log.
STORIES: list[tuple[list[object], bool, float | None, str]] = [
    ([], False, None, "no signal"),
    ([USR1], True, None, "SIGUSR1"),
    ([USR2], True, None, "SIGUSR2"),
    ([USR1, 30, USR1, 30, USR2], True, None, "SIGUSR2"),  # a warning may come often
    ([TERM], True, GRACE_S, "SIGTERM"),
    ([INT], True, GRACE_S, "SIGINT"),
    ([HUP], True, GRACE_S, "SIGHUP"),
    ([USR1, 100, TERM], True, GRACE_S, "SIGTERM"),  # counted from the ending, not from the warning
    ([USR2, INT], True, GRACE_S, "SIGINT"),
    ([TERM, 10, USR1], True, GRACE_S - 10, "SIGTERM"),  # a warning after an ending changes nothing
    ([TERM, 5, TERM], True, GRACE_S - 5, "SIGTERM"),  # Slurm repeats itself in the same breath
    ([TERM, 5.001, TERM], True, 0, "SIGTERM"),
    ([TERM, 5.001, HUP], True, 0, "SIGHUP"),
    ([TERM, INT], True, 0, "SIGINT"),  # Ctrl-C means it
    ([INT, INT], True, 0, "SIGINT"),
    ([HUP, INT], True, 0, "SIGINT"),
]


@pytest.mark.parametrize(("arrives", "drains", "ends_after_s", "name"), STORIES)
def test_a_warning_drains_an_ending_sets_a_deadline_and_another_one_means_now(
    arrives: list[object], drains: bool, ends_after_s: float | None, name: str
) -> None:
    clock = HandClock()
    stop = StopRequest(clock.monotonic_s)
    for one in arrives:
        if isinstance(one, signal.Signals):
            stop.receive(one)
        else:
            clock.sleep(float(str(one)))
    assert (stop.requested, stop.name) == (drains, name)
    assert stop.overdue(GRACE_S) == (ends_after_s == 0)
    clock.sleep(ends_after_s or 0)
    assert stop.overdue(GRACE_S) == (ends_after_s == 0), "not before it is over"
    clock.sleep(0.001)
    assert stop.overdue(GRACE_S) == (ends_after_s is not None)
    clock.sleep(1e6)
    assert stop.overdue(GRACE_S) == (ends_after_s is not None)


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Give the process back its own handlers."""
    before = {number: signal.getsignal(number) for number in (USR1, USR2, TERM, INT, HUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("nohup", [False, True])
def test_once_installed_real_signals_arrive_but_under_nohup_a_closed_terminal_is_no_reason_to_stop(
    own_signals: None, nohup: bool
) -> None:
    heard = []
    for number in (USR1, USR2, TERM, INT, HUP):
        signal.signal(HUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        stop = StopRequest(HandClock().monotonic_s)
        stop.install()
        os.kill(os.getpid(), number)
        heard.append(stop.name)
    assert heard == ["SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "no signal" if nohup else "SIGHUP"]


LEAVING = """
import os, sys
from rooms.task import StopRequest
class Last:
    def __del__(self, write=os.write, read=os.read):
        write(1, b"leaving")
        read(0, 1)
last = Last()
StopRequest(lambda: 0.0).install()
sys.exit(75)
"""


def test_signals_to_a_process_that_is_leaving_do_not_change_its_exit_code() -> None:
    """Python gives up its handlers before its last objects are gone."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", LEAVING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(7) == b"leaving"
        for number in (USR1, USR2, TERM, INT, HUP):
            process.send_signal(number)
        process.communicate(b"go")
    assert process.returncode == 75
