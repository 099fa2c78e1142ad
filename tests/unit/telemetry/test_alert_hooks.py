"""Alerts that run a command: once for a begin and once for its end, not too often, and nothing waits for it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rooms.cli import read_topic
from rooms.model import AlertHooks
from rooms.root import Project
from rooms.telemetry import Alert, AlertCommand, CallBudget, alert_document, alert_variables
from support.hand_clock import HandClock
from support.pages import Pages
from support.waiting import wait_for

START_MS = 1_800_000_000_000
HOT = Alert(
    "thermal", "warning", 7, 0, "GPU-7", START_MS, None, 91.5, 83.0, "device 0 is at 91.5 °C; the limit is 83 °C"
)
OVER = replace(HOT, ended_at_ms=START_MS + 60_000)
TASK = "4821_7.r0.gpu-01"
Caller = Callable[..., AlertCommand]


def later(alert: Alert, seconds: float) -> Alert:
    return replace(alert, started_at_ms=alert.started_at_ms + round(1000 * seconds))


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    made: list[AlertCommand] = []

    def make(command: str, clock: HandClock | None = None, min_interval_s: float = 600) -> AlertCommand:
        environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        made.append(AlertCommand(AlertHooks(command, min_interval_s), TASK, clock or HandClock(), environ, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.finish()


def program(folder: Path, text: str) -> str:
    """Write a script and return the command for it; its name has a space."""
    path = folder / "tell me.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return f"'{path}'"


def test_a_begin_and_its_end_are_called_and_the_same_trouble_again_only_after_a_while() -> None:
    calls = CallBudget(600)
    course = [
        (HOT, 0, True), (OVER, 1, True), (OVER, 2, False),  # each once, however soon
        (later(HOT, 599), 599, False), (later(OVER, 599), 599.5, False),  # no end without its begin
        (later(HOT, 600), 600, True), (later(OVER, 600), 660, True),
        (replace(HOT, kind="memory"), 660, True), (replace(HOT, device_id=8), 660, True),  # others do not wait
    ]  # fmt: skip
    assert [calls.allows(alert, at_s) for alert, at_s, _ in course] == [allowed for _, _, allowed in course]
    calls = CallBudget(0)
    made = [minute for minute in range(240) if calls.allows(later(HOT, 60 * minute), 60 * minute)]
    assert made == [*range(20), *range(60, 80), *range(120, 140), *range(180, 200)], "twenty in any hour"
    calls = CallBudget(0)
    assert all(calls.allows(replace(HOT, device_id=second), second) for second in range(20, 40))
    assert not calls.allows(HOT, 40), "no room"
    assert not calls.allows(OVER, 4000), "so its end is not told, either"
    assert calls.allows(replace(OVER, device_id=23), 4000)


def test_the_document_and_the_variables_say_everything_that_the_log_says(pages: Pages) -> None:
    """Unknown is empty in a variable and null in JSON; a message cannot call the whole channel of a chat."""
    unknown = replace(HOT, peak=None, threshold=None, device_index=None, message="a\0b")
    alerts = [(HOT, 3), (OVER, 0), (unknown, 0), (replace(HOT, kind="fault", message="Xid <!channel> & more"), 0)]
    documents = [alert_document(alert, TASK, held_back) for alert, held_back in alerts]
    pages({
        "documents.json": json.dumps(documents, indent=1, ensure_ascii=False),
        "variables.json": json.dumps([alert_variables(one) for one in documents], indent=1, ensure_ascii=False),
    })  # fmt: skip


def test_a_command_gets_the_alert_on_its_input_and_in_its_variables(caller: Caller, tmp_path: Path) -> None:
    script = 'echo "$1 $BADCJOBS_ALERT_STATE $BADCJOBS_ALERT_PEAK" >> said; cat >> said; echo >> said; sleep 77 &'
    calls = caller(f"{program(tmp_path, script)} '$HOME;'")
    calls.add(HOT)
    calls.add(OVER)
    calls.finish()
    begin, begin_json, end, end_json = (tmp_path / "said").read_text().splitlines()
    assert (begin, end) == ("$HOME; begin 91.5", "$HOME; end 91.5"), "no shell has touched it"
    assert json.loads(begin_json) == alert_document(HOT, TASK, 0)
    assert json.loads(end_json) == alert_document(OVER, TASK, 0)


def test_five_hundred_alerts_at_once_are_twenty_calls(caller: Caller, tmp_path: Path) -> None:
    clock, said = HandClock(), tmp_path / "said"
    said.touch()
    calls = caller(program(tmp_path, "cat >> said; echo >> said"), clock, min_interval_s=0)
    for number in range(500):
        calls.add(replace(HOT, device_id=number))
    wait_for(lambda: len(said.read_text().splitlines()) == 20, "twenty calls")
    clock.sleep(3600)
    calls.add(replace(HOT, kind="memory"))
    calls.finish()
    made = [json.loads(line) for line in said.read_text().splitlines()]
    assert (len(made), made[-1]["held_back"]) == (21, 480)


FAILURES = {
    "echo first >&2; echo no such channel >&2; exit 3": ["it exited with 3: no such channel"],
    "kill -9 $$": ["it exited with -9"],
    "exec <&-; exit 0": [],  # to leave the input unread is no failure
}


def test_a_command_that_fails_is_logged_once_with_its_last_line_and_never_its_arguments(
    caller: Caller, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def logged(command: str) -> list[str]:
        caplog.clear()
        calls = caller(command)
        calls.add(HOT)
        calls.add(OVER)
        calls.finish()
        return caplog.messages

    once = "[alerts] command: {}; further failures are not logged; the work continues"
    for script, said in FAILURES.items():
        assert logged(program(tmp_path, script)) == [once.format(words) for words in said]
    assert logged("no-such-program --token xyzzy") == [
        "[alerts] command: program no-such-program not found; alerts are not sent to it",
        once.format("it cannot be started: No such file or directory"),
    ]


def test_the_example_of_the_guide_works_as_it_is_pasted(caller: Caller, tmp_path: Path) -> None:
    section = read_topic("telemetry").partition("## Alerts that run a command")[2]
    config = tmp_path / "lab.toml"
    config.write_text(section.split("\n\n")[2])
    hooks = Project.read([str(config)], config.parent).hooks
    assert hooks.command is not None and hooks.problems() == []
    calls = caller(hooks.command, min_interval_s=hooks.min_interval_s)
    calls.add(HOT)
    calls.finish()
    assert (tmp_path / "alerts.txt").read_text() == f"begin {TASK}: {HOT.message}\n"


def test_a_command_that_never_ends_is_killed_with_all_that_it_has_started_also_with_its_wrapper(
    caller: Caller, tmp_path: Path
) -> None:
    command = program(tmp_path, "sleep 77 & echo $! $$ > pids; exec yes loud >&2")

    def pids() -> list[int]:
        said = tmp_path / "pids"
        return wait_for(lambda: [int(word) for word in said.read_text().split()] if said.exists() else [], "it runs")

    calls = caller(command)
    calls.add(HOT)
    both = pids()
    calls.finish()
    wait_for(lambda: not any(is_running(pid) for pid in both), "both are gone")
    (tmp_path / "pids").unlink()
    wrapper = os.fork()
    if wrapper == 0:
        caller(command).add(HOT)
        signal.pause()
    child, leader = pids()
    os.kill(wrapper, signal.SIGKILL)
    os.waitpid(wrapper, 0)
    wait_for(lambda: not is_running(leader), "it is gone", timeout_s=40)
    os.kill(child, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
