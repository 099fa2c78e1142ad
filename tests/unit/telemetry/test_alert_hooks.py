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
SECRET = "/services/T0123/xyzzy"
Caller = Callable[..., AlertCommand]


def later(alert: Alert, seconds: float) -> Alert:
    moved = replace(alert, started_at_ms=alert.started_at_ms + round(1000 * seconds))
    return moved if alert.ended_at_ms is None else replace(moved, ended_at_ms=alert.ended_at_ms + round(1000 * seconds))


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    made: list[AlertCommand] = []

    def make(clock: HandClock | None = None, environ: dict[str, str] | None = None, **hooks: object) -> AlertCommand:
        settings = AlertHooks(**hooks)  # type: ignore[arg-type]
        assert settings.problems() == []
        made.append(AlertCommand(settings, TASK, clock or HandClock(), environ or {"PATH": "/usr/bin:/bin"}, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.finish()


# --- how often --------------------------------------------------------------------------------------------------------


def test_a_begin_and_its_end_are_called_and_the_same_trouble_again_only_after_a_while() -> None:
    calls = CallBudget(600)
    course = [
        (HOT, 0, True), (OVER, 1, True), (OVER, 2, False),  # each once, however soon
        (later(HOT, 599), 599, False), (later(OVER, 599), 599.5, False),  # no end without its begin
        (later(HOT, 600), 600, True), (later(OVER, 600), 660, True),
        (replace(HOT, kind="memory"), 660, True), (replace(HOT, device_id=8), 660, True),  # others do not wait
    ]  # fmt: skip
    assert [calls.allows(alert, at_s) for alert, at_s, _ in course] == [allowed for _, _, allowed in course]


def test_there_are_at_most_twenty_calls_in_any_hour() -> None:
    calls = CallBudget(0)
    made = [minute for minute in range(240) if calls.allows(later(HOT, 60 * minute), 60 * minute)]
    assert made == [*range(20), *range(60, 80), *range(120, 140), *range(180, 200)]
    calls = CallBudget(0)
    assert all(calls.allows(replace(HOT, device_id=second), second) for second in range(20, 40))
    assert not calls.allows(HOT, 40), "no room"
    assert not calls.allows(OVER, 4000), "so its end is not told, either"
    assert calls.allows(replace(OVER, device_id=23), 4000)


# --- what is said -----------------------------------------------------------------------------------------------------


def test_the_document_and_the_variables_say_everything_that_the_log_says(pages: Pages) -> None:
    """Unknown is empty in a variable and null in JSON; a message cannot call the whole channel of a chat."""
    unknown = replace(HOT, peak=None, threshold=None, device_index=None, message="a\0b")
    alerts = [(HOT, 3), (OVER, 0), (unknown, 0), (replace(HOT, kind="fault", message="Xid <!channel> & more"), 0)]
    documents = [alert_document(alert, TASK, held_back) for alert, held_back in alerts]
    pages({
        "documents.json": json.dumps(documents, indent=1, ensure_ascii=False),
        "variables.json": json.dumps([alert_variables(one) for one in documents], indent=1, ensure_ascii=False),
    })  # fmt: skip


# --- settings and secrets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hooks", "problem"),
    [
        (AlertHooks(command=""), "command must name a program"),
        (AlertHooks(command="say 'xyzzy"), "command cannot be split into words: no closing quotation"),
        (AlertHooks(command=3), "command must be a string"),  # type: ignore[arg-type]
        (AlertHooks(min_interval_s=-1), "min_interval_s = -1 must be a number, 0 or above"),
        (AlertHooks(min_interval_s=float("nan")), "min_interval_s = nan must be a number, 0 or above"),
        (AlertHooks(min_interval_s="1"), "min_interval_s = '1' must be a number, 0 or above"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_named_without_the_secret(hooks: AlertHooks, problem: str) -> None:
    (said,) = hooks.problems()
    assert said.startswith(problem)
    assert "xyzzy" not in said


def test_what_may_be_shown_has_no_secret_in_it() -> None:
    hooks = AlertHooks("curl -d @- https://chat" + SECRET)
    assert hooks.problems() == []
    assert hooks.without_secrets() == {"command": "curl …", "min_interval_s": 600.0}
    assert "xyzzy" not in repr(hooks)
    assert AlertHooks().without_secrets() == {"command": None, "min_interval_s": 600.0}


# --- a command --------------------------------------------------------------------------------------------------------


def program(folder: Path, text: str) -> Path:
    path = folder / "tell me.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_command_gets_the_alert_on_its_input_and_in_its_variables(caller: Caller, tmp_path: Path) -> None:
    script = program(
        tmp_path, 'echo "$1 $BADCJOBS_ALERT_STATE $BADCJOBS_ALERT_PEAK" >> said; cat >> said; echo >> said; sleep 77 &'
    )
    calls = caller(command=f"'{script}' '$HOME;'")
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
    calls = caller(clock, command=f"'{program(tmp_path, 'cat >> said; echo >> said')}'", min_interval_s=0)
    for number in range(500):
        calls.add(replace(HOT, device_id=number))
    wait_for(lambda: len(said.read_text().splitlines()) == 20, "twenty calls")
    clock.sleep(3600)
    calls.add(replace(HOT, kind="memory"))
    calls.finish()
    made = [json.loads(line) for line in said.read_text().splitlines()]
    assert (len(made), made[-1]["held_back"]) == (21, 480)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo first >&2; echo no such channel >&2; exit 3", "it exited with 3: no such channel"),
        ("kill -9 $$", "it exited with -9"),
        ("exec <&-; exit 0", None),  # to leave the input unread is no failure
    ],
)
def test_a_command_that_fails_is_logged_once_with_its_last_line(
    caller: Caller, tmp_path: Path, caplog: pytest.LogCaptureFixture, script: str, said: str | None
) -> None:
    calls = caller(command=f"'{program(tmp_path, script)}'")
    calls.add(HOT)
    calls.add(OVER)
    calls.finish()
    text = f"[alerts] command: {said}; further failures are not logged; the work continues"
    assert [record.getMessage() for record in caplog.records] == ([] if said is None else [text])


def test_the_example_of_the_guide_works_as_it_is_pasted(caller: Caller, tmp_path: Path) -> None:
    section = read_topic("telemetry").partition("## Alerts that run a command")[2]
    config = tmp_path / "lab.toml"
    config.write_text(section.split("\n\n")[2])
    hooks = Project.read([str(config)], config.parent).hooks
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    calls = caller(environ=environ, command=hooks.command, min_interval_s=hooks.min_interval_s)
    calls.add(HOT)
    calls.finish()
    assert (tmp_path / "alerts.txt").read_text() == f"begin {TASK}: {HOT.message}\n"


def test_a_program_that_does_not_exist_is_named_before_anything_happens(
    caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    calls = caller(command="no-such-program --token xyzzy")
    assert "program no-such-program not found; alerts are not sent to it" in caplog.text
    calls.add(HOT)
    calls.finish()
    assert "it cannot be started: No such file or directory" in caplog.text
    assert "xyzzy" not in caplog.text


def test_a_command_that_never_ends_is_killed_at_the_end_with_all_that_it_has_started(
    caller: Caller, tmp_path: Path
) -> None:
    calls = caller(command=f"'{program(tmp_path, 'sleep 77 & echo $! $$ > pids; exec yes loud >&2')}'")
    calls.add(HOT)
    said = tmp_path / "pids"
    pids = wait_for(lambda: [int(word) for word in said.read_text().split()] if said.exists() else [], "both run")
    assert len(pids) == 2
    calls.finish()
    wait_for(lambda: not any(is_running(pid) for pid in pids), "both are gone")


def test_a_command_does_not_outlive_a_wrapper_that_is_killed(tmp_path: Path) -> None:
    script = program(tmp_path, "echo $$ > pid; exec sleep 77")
    pid = os.fork()
    if pid == 0:
        AlertCommand(AlertHooks(f"'{script}'"), "1", HandClock(), {"PATH": "/bin"}, tmp_path).add(HOT)
        signal.pause()
    said = tmp_path / "pid"
    command = wait_for(lambda: said.exists() and said.read_text().strip(), "the command runs")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: not is_running(int(command)), "it is gone", timeout_s=40)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
