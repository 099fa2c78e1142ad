"""Signals as a request to stop: drain, drain before a deadline, stop now; and the exit code in the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rooms.devices import EndTime
from rooms.model import Chunk, ChunkResult, TaskKey
from rooms.store import TaskWriter
from rooms.task import StopRequest, TimeBudget, decide_verdict
from rooms.workers import Tally
from support.hand_clock import HandClock
from support.task_files import TaskFile

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


# --- the exit code ----------------------------------------------------------------------------------------------------

AGAIN = "run the same command again to continue"
LATE = EndTime(0, "run.stop_after")
# The chunks by state, the signals (9 s apart), the tally, the end of the time; the exit code, the verdict, the note.
VERDICTS: list[tuple[str, list[signal.Signals], Tally, EndTime | None, int, str, str | None]] = [
    ("done done", [], Tally(), None, 0, "done", None),
    ("skipped", [TERM], Tally(), LATE, 0, "done", None),
    ("done failed", [], Tally(), None, 1, "failed", None),
    ("done poison", [TERM], Tally(), LATE, 1, "failed", None),
    ("done failed-before", [], Tally(), None, 1, "failed", None),
    ("done", [], Tally(retired=["lost", "gone"]), None, 0, "done", "workers that stopped early: 2; the last one: gone"),
    ("done pending", [USR1], Tally(), None, 75, "stopped", AGAIN),
    ("failed pending", [TERM], Tally(gave_up="no model"), LATE, 75, "stopped", AGAIN),
    ("pending", [HUP], Tally(), None, 75, "stopped", AGAIN),
    ("pending", [INT], Tally(), None, 130, "stopped", AGAIN),
    ("pending", [TERM, INT], Tally(), None, 130, "stopped", AGAIN),
    ("pending", [TERM, TERM], Tally(), None, 143, "stopped", AGAIN),
    ("pending", [], Tally(), LATE, 75, "stopped", f"the time limit is near; {AGAIN}"),
    ("pending", [], Tally(gave_up="no model"), LATE, 3, "failed", "no model"),
    ("done pending", [], Tally(retired=["lost", "gone"]), None, 3, "failed", "lost"),
    ("pending", [], Tally(), None, 3, "failed", "no worker could be started; see the log"),
]


@pytest.mark.parametrize(("states", "signals", "tally", "end", "exit_code", "verdict", "note"), VERDICTS)
def test_the_exit_code_follows_from_what_is_left_and_who_stopped_it(
    tmp_path: Path, states: str, signals: list[signal.Signals], tally: Tally, end: EndTime | None,
    exit_code: int, verdict: str, note: str | None,
) -> None:  # fmt: skip
    clock, chunks = HandClock(), [Chunk("rec", f"c{n}", "a", "/a") for n, _ in enumerate(states.split())]
    before = TaskFile(tmp_path, states={"c1": "failed"}, job_id="4000")
    writer = TaskWriter(tmp_path / "wrapper.sqlite", TaskKey("4821", 0, 0, "gpu1"))
    writer.fill(chunks, lambda rows: None)
    for chunk, state in zip(chunks, states.split(), strict=True):
        if state == "failed-before":
            writer.skip_done_in(before.write(), retry_failed=False)
        elif state != "pending":
            writer.attempt_ended(ChunkResult(chunk, 1, 2), status=state, try_number=1, worker_id=1, device_id=None)
    stop = StopRequest(clock.monotonic_s)
    for number in signals:
        stop.receive(number)
        clock.sleep(9)
    time = TimeBudget(end, clock)
    assert time.over == (end is not None)
    task = SimpleNamespace(world=SimpleNamespace(stop=stop), writer=writer, time=time)
    assert decide_verdict(task, tally) == (exit_code, verdict, note)
