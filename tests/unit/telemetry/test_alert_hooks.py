"""Alerts that call somebody: once for a begin and once for its end, not too often, and nobody waits for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
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


def test_a_begin_and_its_end_are_told_however_soon_one_follows_the_other() -> None:
    budget = CallBudget(600)
    assert budget.allows(HOT, 0)
    assert budget.allows(OVER, 1)
    assert not budget.allows(OVER, 2), "once"


def test_the_same_trouble_on_the_same_device_is_told_again_only_after_a_while() -> None:
    budget = CallBudget(600)
    assert budget.allows(HOT, 0)
    assert budget.allows(OVER, 60)
    assert not budget.allows(later(HOT, 599), 599)
    assert not budget.allows(later(OVER, 599), 599.5), "nobody heard of its begin"
    assert budget.allows(later(HOT, 600), 600)
    assert budget.allows(later(OVER, 600), 660)


def test_other_trouble_and_other_devices_do_not_wait_for_each_other() -> None:
    budget = CallBudget(600)
    alerts = [HOT, replace(HOT, kind="memory"), replace(HOT, device_id=8), replace(HOT, device_id=8, kind="memory")]
    assert [budget.allows(alert, 0) for alert in alerts] == [True] * 4


def test_there_are_at_most_twenty_calls_in_any_hour() -> None:
    budget = CallBudget(0)
    told = [minute for minute in range(240) if budget.allows(later(HOT, 60 * minute), 60 * minute)]
    assert told == [*range(20), *range(60, 80), *range(120, 140), *range(180, 200)]


def test_who_was_not_told_of_a_begin_for_want_of_room_is_not_told_of_its_end() -> None:
    budget = CallBudget(0)
    for second in range(20):
        assert budget.allows(replace(HOT, device_id=second), second)
    assert not budget.allows(HOT, 20)
    assert not budget.allows(OVER, 4000)
    assert budget.allows(replace(OVER, device_id=3), 4000)


# --- what is told -----------------------------------------------------------------------------------------------------


def test_the_news_say_everything_that_the_log_says() -> None:
    assert alert_document(OVER, TASK, 0) == {
        "text": f"badcjobs {TASK}: warning alert ended after 60 s (thermal; worst value 91.5):"
        " device 0 is at 91.5 °C; the limit is 83 °C",
        "state": "end",
        "kind": "thermal",
        "severity": "warning",
        "device": 0,
        "uuid": "GPU-7",
        "task": TASK,
        "message": "device 0 is at 91.5 °C; the limit is 83 °C",
        "peak": 91.5,
        "threshold": 83.0,
        "started_at_ms": START_MS,
        "ended_at_ms": START_MS + 60_000,
        "held_back": 0,
    }
    assert str(alert_document(HOT, TASK, 3)["text"]).endswith("the limit is 83 °C (3 more held back)")


def test_a_message_cannot_call_the_whole_channel() -> None:
    news = alert_document(replace(HOT, kind="fault", message="Xid <!channel> & more"), TASK, 0)
    assert str(news["text"]).endswith("Xid &lt;!channel&gt; &amp; more")
    assert news["message"] == "Xid <!channel> & more"


def test_what_is_unknown_is_empty_in_a_variable_and_null_in_json() -> None:
    news = alert_document(replace(HOT, peak=None, threshold=None, device_index=None, message="a\0b"), TASK, 0)
    assert (news["peak"], news["threshold"], news["device"]) == (None, None, "GPU-7")
    assert alert_variables(news) == {
        "BADCJOBS_ALERT_KIND": "thermal",
        "BADCJOBS_ALERT_SEVERITY": "warning",
        "BADCJOBS_ALERT_DEVICE": "GPU-7",
        "BADCJOBS_ALERT_TASK": TASK,
        "BADCJOBS_ALERT_MESSAGE": "ab",
        "BADCJOBS_ALERT_PEAK": "",
        "BADCJOBS_ALERT_THRESHOLD": "",
        "BADCJOBS_ALERT_STATE": "begin",
    }


# --- settings and secrets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hooks", "problem"),
    [
        (AlertHooks(command=""), "command must name a program"),
        (AlertHooks(command="say 'it"), "command cannot be split into words: no closing quotation"),
        (AlertHooks(command=3), "command must be a string"),  # type: ignore[arg-type]
        (AlertHooks(min_interval_s=-1), "min_interval_s = -1 must be a number, 0 or above"),
        (AlertHooks(min_interval_s=float("nan")), "min_interval_s = nan must be a number, 0 or above"),
        (AlertHooks(min_interval_s="1"), "min_interval_s = '1' must be a number, 0 or above"),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_with_them_is_said_without_the_secret(hooks: AlertHooks, problem: str) -> None:
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
        tmp_path, 'echo "$1 $BADCJOBS_ALERT_STATE $BADCJOBS_ALERT_PEAK" >> said; cat >> said; echo >> said'
    )
    calls = caller(command=f"'{script}' '$HOME;'")
    calls.add(HOT)
    calls.add(OVER)
    calls.finish()
    begin, begin_json, end, end_json = (tmp_path / "said").read_text().splitlines()
    assert (begin, end) == ("$HOME; begin 91.5", "$HOME; end 91.5"), "no shell has touched it"
    assert json.loads(begin_json) == alert_document(HOT, TASK, 0)
    assert json.loads(end_json) == alert_document(OVER, TASK, 0)


def test_five_hundred_alerts_at_once_are_twenty_calls_and_adding_them_does_not_wait(
    caller: Caller, tmp_path: Path
) -> None:
    clock, said = HandClock(), tmp_path / "said"
    said.touch()
    calls = caller(clock, command=f"'{program(tmp_path, 'cat >> said; echo >> said')}'", min_interval_s=0)
    began_s = time.monotonic()
    for number in range(500):
        calls.add(replace(HOT, device_id=number))
    assert time.monotonic() - began_s < 5
    wait_for(lambda: len(said.read_text().splitlines()) == 20, "twenty calls")
    clock.sleep(3600)
    calls.add(replace(HOT, kind="memory"))
    calls.finish()
    told = [json.loads(line) for line in said.read_text().splitlines()]
    assert (len(told), told[-1]["held_back"]) == (21, 480)


def test_a_command_that_fails_is_complained_of_once_with_its_last_words(
    caller: Caller, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = caller(command=f"'{program(tmp_path, 'echo first >&2; echo no such channel >&2; exit 3')}'")
    calls.add(HOT)
    calls.add(OVER)
    calls.finish()
    said = "[alerts] command: it exited with 3: no such channel; further failures are not logged; the work continues"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_a_command_that_shouts_without_end_takes_neither_memory_nor_time_from_us(
    caller: Caller, tmp_path: Path
) -> None:
    calls = caller(command=f"'{program(tmp_path, 'echo $$ > pid; exec yes loud >&2')}'")
    calls.add(HOT)
    pid = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), "it shouts"))
    before_bytes, before_s = psutil.Process().memory_info().rss, time.process_time()
    time.sleep(1)
    assert psutil.Process().memory_info().rss - before_bytes < 20e6
    assert time.process_time() - before_s < 0.3
    os.kill(pid, signal.SIGKILL)


def test_who_keeps_the_output_of_a_command_open_does_not_hold_up_the_next_call(caller: Caller, tmp_path: Path) -> None:
    calls = caller(command=f"'{program(tmp_path, 'echo $BADCJOBS_ALERT_STATE >> said; sleep 77 &')}'")
    began_s = time.monotonic()
    calls.add(HOT)
    calls.add(OVER)
    calls.finish()
    assert (tmp_path / "said").read_text().split() == ["begin", "end"]
    assert time.monotonic() - began_s < 60


def test_a_command_that_does_not_read_its_input_is_no_failure(
    caller: Caller, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = caller(command=f"'{program(tmp_path, 'exec <&-; exit 0')}'")
    calls.add(HOT)
    calls.finish()
    assert caplog.text == ""


def test_a_command_that_is_killed_says_so(caller: Caller, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = caller(command=f"'{program(tmp_path, 'kill -9 $$')}'")
    calls.add(HOT)
    calls.finish()
    assert "[alerts] command: it exited with -9;" in caplog.text


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
    assert "program no-such-program not found; alerts are not sent to it" in caplog.text  # others are called
    calls.add(HOT)
    calls.finish()
    assert "it cannot be started: No such file or directory" in caplog.text
    assert "xyzzy" not in caplog.text


def test_a_command_that_never_ends_is_killed_at_the_end_with_all_that_it_has_started(
    caller: Caller, tmp_path: Path
) -> None:
    calls = caller(command=f"'{program(tmp_path, 'sleep 77 & echo $! $$ > pids; wait')}'")
    calls.add(HOT)
    said = tmp_path / "pids"
    pids = wait_for(lambda: [int(word) for word in said.read_text().split()] if said.exists() else [], "both run")
    assert len(pids) == 2
    began_s = time.monotonic()
    calls.finish()
    assert 1.2 < time.monotonic() - began_s < 60, "it had its two seconds"
    wait_for(lambda: not any(is_running(pid) for pid in pids), "both are gone")


CALLER = """
import sys, time
from pathlib import Path
from badcjobs.clock import SystemClock
from badcjobs.telemetry.alert_command import AlertHooks
from badcjobs.telemetry.alerts import Alert
from badcjobs.telemetry.alert_command import AlertCommand
alert = Alert("lost", "critical", 1, 0, None, 1, None, None, None, "gone")
AlertCommand(AlertHooks(sys.argv[1]), "1", SystemClock(), {"PATH": "/bin"}, Path(sys.argv[2])).add(alert)
time.sleep(77)
"""


def test_a_command_does_not_outlive_a_wrapper_that_is_killed(tmp_path: Path) -> None:
    script = program(tmp_path, "echo $$ > pid; exec sleep 77")
    with subprocess.Popen([sys.executable, "-c", CALLER, f"'{script}'", str(tmp_path)]) as wrapper:
        said = tmp_path / "pid"
        pid = wait_for(lambda: said.exists() and said.read_text().strip(), "the command runs")
        wrapper.kill()
    wait_for(lambda: not is_running(int(pid)), "it is gone", timeout_s=40)


def test_what_a_command_leaves_in_the_background_ends_with_it(caller: Caller, tmp_path: Path) -> None:
    calls = caller(command=f"'{program(tmp_path, 'sleep 77 2>/dev/null & echo $! > child')}'")
    calls.add(HOT)
    calls.finish()
    wait_for(lambda: not is_running(int((tmp_path / "child").read_text())), "it is gone", timeout_s=40)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
