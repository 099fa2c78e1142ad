"""Alerts that call somebody: once for a begin and once for its end, not too often, and nobody waits for it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.hand_clock import HandClock
from support.hook_server import DrippingServer, HookServer
from support.waiting import wait_for

from badcjobs.handbook import read_topic
from badcjobs.telemetry.alert_hooks import AlertHooks, CallBudget, news_of, variables_of
from badcjobs.telemetry.alert_webhook import Webhook, proxies_for
from badcjobs.telemetry.alerts import Alert
from badcjobs.telemetry.hook_calls import HookCalls
from badcjobs.watch import read_alert_settings

START_MS = 1_800_000_000_000
HOT = Alert(
    "thermal", "warning", 7, 0, "GPU-7", START_MS, None, 91.5, 83.0, "device 0 is at 91.5 °C; the limit is 83 °C"
)
OVER = replace(HOT, ended_at_ms=START_MS + 60_000)
TASK = "4821_7.r0.gpu-01"
SECRET = "/services/T0123/xyzzy"
Caller = Callable[..., HookCalls]


def later(alert: Alert, seconds: float) -> Alert:
    moved = replace(alert, started_at_ms=alert.started_at_ms + round(1000 * seconds))
    return moved if alert.ended_at_ms is None else replace(moved, ended_at_ms=alert.ended_at_ms + round(1000 * seconds))


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    made: list[HookCalls] = []

    def make(clock: HandClock | None = None, environ: dict[str, str] | None = None, **hooks: object) -> HookCalls:
        settings = AlertHooks(**hooks)  # type: ignore[arg-type]
        assert settings.problems() == []
        made.append(HookCalls(settings, TASK, clock or HandClock(), environ or {"PATH": "/usr/bin:/bin"}, tmp_path))
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
    assert news_of(OVER, TASK, 0) == {
        "text": f"badcjobs {TASK}: warning alert over after 60 s (thermal; at worst 91.5):"
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
    assert str(news_of(HOT, TASK, 3)["text"]).endswith("the limit is 83 °C (3 more were held back)")


def test_a_message_cannot_call_the_whole_channel() -> None:
    news = news_of(replace(HOT, kind="fault", message="Xid <!channel> & more"), TASK, 0)
    assert str(news["text"]).endswith("Xid &lt;!channel&gt; &amp; more")
    assert news["message"] == "Xid <!channel> & more"


def test_what_is_unknown_is_empty_in_a_variable_and_null_in_json() -> None:
    news = news_of(replace(HOT, peak=None, threshold=None, device_index=None, message="a\0b"), TASK, 0)
    assert (news["peak"], news["threshold"], news["device"]) == (None, None, "GPU-7")
    assert variables_of(news) == {
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
        (AlertHooks(command="say 'it"), "command cannot be taken apart into words: no closing quotation"),
        (AlertHooks(command=3), "command must be a text"),  # type: ignore[arg-type]
        (AlertHooks(webhook="ftp://host" + SECRET), "webhook must be a whole http:// or https:// URL"),
        (AlertHooks(webhook="file:///etc/passwd"), "webhook must be a whole http:// or https:// URL"),
        (AlertHooks(webhook="https://" + SECRET), "webhook must be a whole http:// or https:// URL"),
        (AlertHooks(webhook="https://host:x" + SECRET), "webhook must be a whole http:// or https:// URL"),
        (AlertHooks(webhook="https://[::1" + SECRET), "webhook must be a whole http:// or https:// URL"),
        (AlertHooks(webhook="https://host /" + SECRET), "webhook must be a URL of plain characters, without blanks"),
        (AlertHooks(webhook="https://me:xyzzy@host/"), "webhook must not hold a name and a password"),
        (AlertHooks(webhook=False), "webhook must be a text"),  # type: ignore[arg-type]
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
    hooks = AlertHooks("curl -d @- https://chat" + SECRET, "https://chat.example:8443" + SECRET)
    assert hooks.problems() == []
    assert hooks.without_secrets() == {
        "command": "curl …",
        "webhook": "https://chat.example:8443/…",
        "min_interval_s": 600.0,
    }
    assert "xyzzy" not in repr(hooks)
    assert AlertHooks().without_secrets() == {"command": None, "webhook": None, "min_interval_s": 600.0}
    assert not AlertHooks().wanted


# --- a webhook --------------------------------------------------------------------------------------------------------


def test_a_webhook_gets_the_begin_and_the_end_as_json(caller: Caller) -> None:
    with HookServer() as server:
        calls = caller(webhook=server.url + SECRET)
        calls.add(HOT)
        calls.add(OVER)
        calls.finish()
    assert [news["state"] for news in server.got] == ["begin", "end"]
    assert server.got[0] == news_of(HOT, TASK, 0)
    assert server.calls == [("POST", SECRET, "application/json; charset=utf-8")] * 2


def test_five_hundred_at_once_are_twenty_calls_and_nobody_waits(caller: Caller) -> None:
    with HookServer() as server:
        clock = HandClock()
        calls = caller(clock, webhook=server.url, min_interval_s=0)
        began_s = time.monotonic()
        for number in range(500):
            calls.add(replace(HOT, device_id=number))
        took_s = time.monotonic() - began_s
        wait_for(lambda: len(server.got) == 20, "twenty calls")
        clock.sleep(3600)
        calls.add(replace(HOT, kind="memory"))
        calls.finish()
    assert took_s < 5
    assert len(server.got) == 21
    assert server.got[-1]["held_back"] == 480


def test_a_server_that_hangs_makes_nobody_wait_and_is_given_up_at_the_end(
    caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    with HookServer(hangs=True) as server:
        calls = caller(webhook=server.url + SECRET)
        began_s = time.monotonic()
        calls.add(HOT)
        wait_for(lambda: server.got, "the call")
        calls.add(OVER)
        added_s = time.monotonic() - began_s
        calls.finish()
        assert time.monotonic() - began_s < added_s + 9
    assert added_s < 9
    assert "calls about alerts were still under way at the end: they are given up" in caplog.text
    assert "xyzzy" not in caplog.text


@pytest.mark.parametrize("status", [500, 404, 302])
def test_a_server_that_refuses_is_complained_of_once_and_without_the_secret(
    caller: Caller, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    caplog.set_level(logging.INFO)
    with HookServer(status, location="/elsewhere" if status == 302 else None) as server:
        calls = caller(webhook=server.url + SECRET)
        calls.add(HOT)
        calls.add(OVER)
        calls.finish()
    assert len(server.got) == 2, "a failure does not end it"
    assert [method for method, _, _ in server.calls] == ["POST", "POST"], "and nobody is sent elsewhere"
    said = f"[alerts] webhook: the server answered {status}; this is said once, the work goes on"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_a_server_that_is_not_there_is_complained_of_without_the_secret(caller: Caller) -> None:
    with HookServer() as server:
        gone = server.url
    assert Webhook(gone + SECRET, {}).tell(news_of(HOT, TASK, 0)) == "the server cannot be reached: Connection refused"
    assert Webhook("http://host/bl ank" + SECRET, {}).tell({}) == "the server cannot be reached: InvalidURL"


def test_a_server_that_answers_letter_by_letter_is_not_called_again_meanwhile() -> None:
    with DrippingServer() as server:
        webhook = Webhook(server.url + SECRET, {})
        began_s = time.monotonic()
        threading.Thread(target=webhook.tell, args=(news_of(HOT, TASK, 0),), daemon=True).start()
        wait_for(lambda: server.calls, "the call")
        assert webhook.tell(news_of(OVER, TASK, 0)) == "the server did not answer in 10 s"
        assert time.monotonic() - began_s < 9, "one that is overdue is enough"
        assert server.calls == 1


def test_tls_that_does_not_work_is_said_in_words_without_the_secret() -> None:
    with HookServer() as server:
        said = Webhook(server.url.replace("http:", "https:") + SECRET, {}).tell(news_of(HOT, TASK, 0))
    assert said is not None
    assert "the server cannot be reached: [SSL" in said
    assert "xyzzy" not in said


@pytest.mark.parametrize(
    ("proxy", "problem"),
    [
        ("{url}", "the proxy answered 501"),
        ("socks5://127.0.0.1:1", "neither the URL nor the proxy for it is of a kind that can be called"),
        ("http://127.0.0.1:port", "the server cannot be reached: InvalidURL"),
    ],
)
def test_a_proxy_that_does_not_help_is_said_in_words_without_the_secret(proxy: str, problem: str) -> None:
    with HookServer() as server:
        environ = {"https_proxy": proxy.format(url=server.url), "http_proxy": proxy.format(url=server.url)}
        scheme = "http" if "socks" in proxy else "https"
        assert Webhook(f"{scheme}://chat.example{SECRET}", environ).tell(news_of(HOT, TASK, 0)) == problem


def test_a_proxy_is_used_where_the_environment_names_one(caller: Caller) -> None:
    with HookServer() as proxy:
        environ = {"PATH": "/bin", "http_proxy": proxy.url, "no_proxy": "localhost,.lab.example"}
        calls = caller(webhook="http://chat.example" + SECRET, environ=environ)
        calls.add(HOT)
        calls.finish()
        assert proxy.calls == [("POST", "http://chat.example" + SECRET, "application/json; charset=utf-8")]


@pytest.mark.parametrize(
    ("url", "environ", "proxies"),
    [
        ("https://a.example/x", {"HTTPS_PROXY": "http://p:1"}, {"https": "http://p:1"}),
        ("https://a.example/x", {"http_proxy": "http://p:1"}, {}),
        ("http://a.example/x", {"http_proxy": "http://p:1", "no_proxy": "b.example, a.example"}, {}),
        ("http://a.lab.example/x", {"http_proxy": "http://p:1", "NO_PROXY": ".lab.example"}, {}),
        ("http://notlab.example/x", {"http_proxy": "http://p:1", "NO_PROXY": "lab.example"}, {"http": "http://p:1"}),
        ("http://a.example/x", {"http_proxy": "http://p:1", "no_proxy": "*"}, {}),
        ("http://a.example:80/x", {"http_proxy": "http://p:1", "no_proxy": "a.example:80"}, {}),
        ("http://a.example:81/x", {"http_proxy": "http://p:1", "no_proxy": "a.example:80"}, {"http": "http://p:1"}),
        ("http://a.example/x", {}, {}),
    ],
)
def test_the_variables_of_proxies_are_understood(url: str, environ: dict[str, str], proxies: dict[str, str]) -> None:
    assert proxies_for(url, environ) == proxies


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
    assert json.loads(begin_json) == news_of(HOT, TASK, 0)
    assert json.loads(end_json) == news_of(OVER, TASK, 0)


def test_a_command_that_fails_is_complained_of_once_with_its_last_words(
    caller: Caller, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = caller(command=f"'{program(tmp_path, 'echo first >&2; echo no such channel >&2; exit 3')}'")
    calls.add(HOT)
    calls.add(OVER)
    calls.finish()
    said = "[alerts] command: it ended with 3: no such channel; this is said once, the work goes on"
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
    assert "[alerts] command: it ended with -9;" in caplog.text


def test_the_example_of_the_guide_works_as_it_is_pasted(caller: Caller, tmp_path: Path) -> None:
    section = read_topic("telemetry").partition("## Alerts that call somebody")[2]
    config = tmp_path / "lab.toml"
    config.write_text(section.split("\n\n")[2])
    _, hooks = read_alert_settings(config)
    assert hooks.webhook is not None
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    calls = caller(environ=environ, command=hooks.command, min_interval_s=hooks.min_interval_s)
    calls.add(HOT)
    calls.finish()
    assert (tmp_path / "alerts.txt").read_text() == f"begin {TASK}: {HOT.message}\n"


def test_a_program_that_does_not_exist_is_named_before_anything_happens(
    caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    calls = caller(command="no-such-program --token xyzzy")
    assert "there is no program no-such-program here, so alerts are not told to it" in caplog.text  # others are called
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
from badcjobs.telemetry.alert_hooks import AlertHooks
from badcjobs.telemetry.alerts import Alert
from badcjobs.telemetry.hook_calls import HookCalls
alert = Alert("lost", "critical", 1, 0, None, 1, None, None, None, "gone")
HookCalls(AlertHooks(sys.argv[1]), "1", SystemClock(), {"PATH": "/bin"}, Path(sys.argv[2])).add(alert)
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


def test_command_and_webhook_are_both_called(caller: Caller, tmp_path: Path) -> None:
    with HookServer() as server:
        calls = caller(command=f"'{program(tmp_path, 'cat > said; exit 1')}'", webhook=server.url)
        calls.add(HOT)
        calls.finish()
    assert json.loads((tmp_path / "said").read_text()) == server.got[0]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
