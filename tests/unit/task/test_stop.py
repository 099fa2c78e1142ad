"""Signals as a request to stop: drain, drain before a deadline, stop now."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rooms.task import ENDINGS, WARNINGS, StopRequest
from support.hand_clock import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def stop(clock: HandClock) -> StopRequest:
    return StopRequest(clock.monotonic_s)


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Give the process back its own handlers."""
    before = {number: signal.getsignal(number) for number in (*WARNINGS, *ENDINGS)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_without_a_signal_nothing_is_asked_for(stop: StopRequest, clock: HandClock) -> None:
    clock.sleep(1e6)
    assert not stop.requested
    assert not stop.overdue(0.0)
    assert stop.name == "no signal"


@pytest.mark.parametrize("number", WARNINGS)
def test_a_warning_drains_without_a_deadline(stop: StopRequest, clock: HandClock, number: int) -> None:
    stop.receive(number)
    clock.sleep(1e6)
    assert stop.requested
    assert not stop.overdue(20)
    assert stop.name == signal.Signals(number).name


def test_a_warning_may_come_often(stop: StopRequest, clock: HandClock) -> None:
    for _ in range(5):
        stop.receive(signal.SIGUSR1)
        clock.sleep(30)
    assert stop.cut_short_by is None
    assert not stop.overdue(0.0)


@pytest.mark.parametrize("number", ENDINGS)
def test_an_ending_drains_with_a_deadline(stop: StopRequest, clock: HandClock, number: int) -> None:
    stop.receive(number)
    assert stop.requested
    clock.sleep(20)
    assert not stop.overdue(20)
    clock.sleep(0.001)
    assert stop.overdue(20)
    assert stop.cut_short_by is None


def test_the_deadline_counts_from_the_ending_not_from_the_warning(stop: StopRequest, clock: HandClock) -> None:
    stop.receive(signal.SIGUSR1)
    clock.sleep(100)
    stop.receive(signal.SIGTERM)
    assert not stop.overdue(20)
    assert stop.name == "SIGTERM"


def test_term_twice_in_one_breath_is_one_message(stop: StopRequest, clock: HandClock) -> None:
    stop.receive(signal.SIGTERM)
    clock.sleep(4.9)
    stop.receive(signal.SIGTERM)
    assert stop.cut_short_by is None
    clock.sleep(15)
    assert not stop.overdue(20)
    clock.sleep(0.2)
    assert stop.overdue(20)


def test_term_again_later_means_now(stop: StopRequest, clock: HandClock) -> None:
    stop.receive(signal.SIGTERM)
    clock.sleep(5.1)
    stop.receive(signal.SIGTERM)
    assert stop.cut_short_by == signal.SIGTERM
    assert stop.overdue(1e6)


@pytest.mark.parametrize("first", ENDINGS)
def test_ctrl_c_after_any_ending_means_now_at_once(stop: StopRequest, first: int) -> None:
    stop.receive(first)
    stop.receive(signal.SIGINT)
    assert stop.cut_short_by == signal.SIGINT
    assert stop.ended_by == first
    assert stop.overdue(1e6)


def test_ctrl_c_after_a_warning_is_the_first_ending(stop: StopRequest) -> None:
    stop.receive(signal.SIGUSR2)
    stop.receive(signal.SIGINT)
    assert (stop.ended_by, stop.cut_short_by) == (signal.SIGINT, None)


def test_a_warning_after_an_ending_changes_nothing(stop: StopRequest, clock: HandClock) -> None:
    stop.receive(signal.SIGTERM)
    clock.sleep(10)
    stop.receive(signal.SIGUSR1)
    assert stop.cut_short_by is None
    assert stop.name == "SIGTERM"


@pytest.mark.parametrize("number", [*WARNINGS, *ENDINGS])
def test_once_installed_real_signals_arrive(stop: StopRequest, own_signals: None, number: int) -> None:
    stop.install()
    os.kill(os.getpid(), number)
    assert stop.requested
    assert stop.name == signal.Signals(number).name


def test_under_nohup_a_terminal_that_closes_is_no_reason_to_stop(stop: StopRequest, own_signals: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop.install()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not stop.requested
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.name == "SIGTERM"


LEAVING = """
import os, sys, time
from badcjobs.task.startup import StopRequest
class Slow:
    def __del__(self, sleep=time.sleep, write=os.write):
        write(1, b"leaving\\n")
        sleep(0.5)
slow = Slow()
StopRequest(time.monotonic).install()
sys.exit(75)
"""


@pytest.mark.parametrize("number", [*WARNINGS, *ENDINGS], ids=lambda number: number.name)
def test_a_signal_to_a_process_that_is_leaving_does_not_change_its_exit_code(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", LEAVING], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"leaving\n"
        process.send_signal(number)
    assert process.returncode == 75
