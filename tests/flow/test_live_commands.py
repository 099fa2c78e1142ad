"""``badcjobs monitor``, the bars of ``badcjobs run`` and ``badcjobs serve``, each in a process of its own."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from itertools import islice

import httpx
import psutil
import pytest
from rooms.report import METRIC_BY_NAME
from support import needs
from support.badcjobs_program import ON_CPU, QUICK, assert_refused
from support.cases import read_data
from support.live_run import LiveServer, prometheus, websocket, write_live_run
from support.task_files import TaskFile
from support.terminal import Terminal
from support.waiting import wait_for

SLOW = ("--engine", "demo", "--engine-arg=--burn-s=0.2", "--simulate", "2", *QUICK)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Write a run of twenty tasks in the middle of its work, one of which has failed and one is silent."""
    folder = tmp_path_factory.mktemp("run") / "july"
    write_live_run(folder, 20, now_ms=time.time_ns() // 10**6, waiting=4, seconds=30)
    (folder.parent / "secret.log").write_text("this line is none of your business")
    return folder


@pytest.fixture
def terminal(site):
    with ExitStack() as stack:

        def start(*args, env=None, **size):
            argv = [sys.executable, "-m", "badcjobs", *map(str, args)]
            return stack.enter_context(closing(Terminal(argv, site.environ(env), site.folder, **size)))

        yield start


def test_without_a_terminal_one_frame_is_printed_as_plain_text_or_json(site, run):
    (site.folder / "badcjobs.toml").write_text(f'[run]\nout = "{run}"\n')
    one = next((run / "tasks").glob("*_7.*.sqlite"))
    commands = [("--once",), (run, "--json", "--config", "run.simulate=2"), (one,), (run,), ("--simulate", 3, "--once")]
    done = site.badcjobs_each([("monitor", *words) for words in commands], [{}, {}, {}, {"LC_ALL": "C"}, {}])
    assert [one.exit_code for one in done] == [0] * 5
    named, document, file, ascii_only, machine = done
    assert f"showing {run}: [run] out in {site.folder}/badcjobs.toml" in named.stderr
    assert "1 failed · 1 silent · 16 running · 4 waiting · 2 done" in named.stdout
    assert (max(map(len, named.stdout.splitlines())) <= 100, "\x1b" in named.stdout) == (True, False)
    assert sum("4821_" in line for line in named.stdout.splitlines()) >= 24
    assert (len(document.json["tasks"]), len(document.json["devices"])) == (24, 80)
    assert ("1 failed" in file.stdout, machine.stdout.count("Simulated GPU")) == (True, 3)
    assert (ascii_only.stdout.isascii(), "====" in ascii_only.stdout) == (True, True)


def test_keys_sizes_and_ctrl_z_are_obeyed_and_the_terminal_is_as_before(terminal, run):
    screen = terminal("monitor", run)
    shown = screen.wait_for(lambda text: "4821_3" in text and "? help" in text, "the tasks").splitlines()
    assert "july" in shown[0] and shown[-1].startswith("by state  q quit") and screen.screen.cursor.hidden
    assert screen.settings != screen.before
    for keys, look in (
        ("", lambda text: "▸  4821_7 " in text),  # it has failed
        ("s", lambda text: "by task" in text and "▸  4821_0 " in text),
        ("/silent\r", lambda text: "only 'silent'" in text and "4821_15" in text and "4821_3 " not in text),
        ("\r", lambda text: "last published 3" in text and "memory GiB" in text),
        ("\x1b", lambda text: "only 'silent'" in text),
        ("\x1b", lambda text: "4821_3 " in text),
        ("d", lambda text: "memory GiB" in text and "d tasks" in text),
        ("d", lambda text: "by state" in text and "memory GiB" not in text),
    ):
        screen.type(keys)
        screen.wait_for(look, repr(keys))
    screen.resize(200, 50)
    screen.wait_for(lambda text: "working on" in text and text.splitlines()[49:], "a wide list")
    screen.resize(60, 12)
    screen.wait_for(lambda text: text.splitlines()[-1].startswith("by state  q"), "a small one")
    process, sent = psutil.Process(screen.process.pid), len(screen.raw)
    screen.type("\x1a")
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "it has stopped")
    screen.wait_for(lambda text: b"\x1b[?1049l" in screen.raw[sent:], "the terminal is given back")
    assert screen.settings == screen.before
    sent = len(screen.raw)
    screen.send(signal.SIGCONT)
    screen.wait_for(lambda text: b"4821_7" in screen.raw[sent:], "fg takes it again")
    screen.type("?")
    screen.wait_for(lambda text: "move between lines" in text, "the help")
    screen.type("q")
    assert (screen.end(), screen.settings) == (0, screen.before)
    assert screen.raw.endswith(b"\x1b[?1049l\x1b[?25h")  # what stood there before is back, and the cursor


@pytest.mark.parametrize("words", [("report",), ("monitor", "--once"), ("check",), ("gpus", "--simulate", "2")])
def test_text_fits_its_terminal_lines_to_paste_are_whole_and_in_the_locale_c_signs_are_ascii(terminal, tmp_path, words):
    task = TaskFile(tmp_path, states={"a": "done", "b": "failed"}, verdict="failed").write()
    shown = terminal(*words, *([] if "gpus" in words else [task]), env={"LC_ALL": "C", "NO_COLOR": "1"}, columns=84)
    shown.end()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.raw.decode()).split("\r\n")
    assert len(lines) > 4 and "".join(lines).isascii()
    assert not [line for line in lines if len(line.rstrip()) > 84 and "/" not in line], "only a path is not cut"


def test_a_signal_ends_it_with_the_terminal_as_before_and_a_dumb_one_gets_one_frame(terminal, run):
    ends = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: 130}
    screens = {number: terminal("monitor", run, env={"NO_COLOR": "1"}) for number in ends}
    dumb = terminal("monitor", run, env={"TERM": "dumb"}, lines=60)
    for number, screen in screens.items():
        screen.wait_for(lambda text: "4821_3" in text and "running" in text, "the tasks")
        assert {cell.fg for row in screen.screen.buffer.values() for cell in row.values()} == {"default"}
        screen.send(number)
        assert (screen.end(), screen.settings) == (ends[number], screen.before)
        assert (b"\x1b[?1049l" in screen.raw, b"Traceback" in screen.raw) == (True, False)
    assert (dumb.end(), b"\x1b[" in dumb.raw, "4821_19" in dumb.text) == (0, False, True)


def test_a_run_is_followed_from_its_first_chunk_to_its_end_by_bars_and_monitor(site, terminal):
    """The folder is written while it is looked at; bars are drawn below the log, and are gone in the end."""
    site.out.mkdir()
    monitor = terminal("monitor", site.out, "--interval", "0.2", columns=160)
    monitor.wait_for(lambda text: "no task has published anything yet" in text, "an empty run")
    often = ("--config", "run.heartbeat_every_s=0.5")
    bars = terminal("run", site.manifest(36), "--out", site.out, *SLOW, *often, columns=120, lines=40)
    shown = bars.wait_for(lambda text: "ETA " in text and "heartbeat" in text, "bars").splitlines()
    rows = [number for number, line in enumerate(shown) if line.startswith(("GPU 0  Sim", "GPU 1  Sim", "all "))]
    assert (len(rows), rows[-1] - rows[0]) == (3, 2)
    assert all("INFO" not in line for line in shown[rows[0] :])
    assert ("chunk" in shown[rows[0]], "/36" in shown[rows[2]]) == (True, True)
    monitor.wait_for(lambda text: "1 running" in text and "2 GPUs" in text and "ETA " in text, "a task that runs")
    assert (bars.end(), bars.settings) == (0, bars.before)
    assert ("ETA" in bars.text, "36 done of 36" in bars.text) == (False, True)
    assert "all done – 36 chunks" in monitor.wait_for(lambda text: "1 done" in text, "a task that is done")
    site.out.rename(site.folder / "elsewhere")
    gone = monitor.wait_for(lambda text: "run is gone; showing the last reading" in text, "a remark")
    assert "all done – 36 chunks" in gone
    (site.folder / "elsewhere").rename(site.out)
    monitor.wait_for(lambda text: "is gone" not in text, "the run again")
    monitor.type("q")
    assert monitor.end() == 0


def test_bars_fit_their_window_and_are_not_drawn_with_json_or_where_the_terminal_cannot(site, terminal):
    """And the run stops in order when its terminal is closed."""
    screen = terminal("run", site.manifest(90), "--out", site.out, *SLOW, env={"NO_COLOR": "1"})
    few = (site.manifest(4, name="few.csv"), *ON_CPU, "--engine-arg=--burn-s=0.15", *QUICK)
    beat = ("--config", "run.heartbeat_every_s=0.1")
    dumb = terminal("run", *few, "--out", site.folder / "dumb", *beat, env={"TERM": "dumb"})
    as_json = terminal("run", *few, "--out", site.folder / "json", "--json", columns=200)
    screen.wait_for(lambda text: "ETA " in text and "rec" in text, "wide bars")
    screen.resize(40, 24)
    heads = ("GPU 0 ━", "GPU 1 ━", "all   ━")
    narrow = screen.wait_for(lambda text: all(head in text for head in heads), "narrow bars").splitlines()
    first, _, both = (line for line in narrow if line.startswith(heads))
    assert "chunk" in first and "ETA" in both
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9][0-9;]*m", screen.raw), "no colour"
    screen.hang_up()
    for other in (dumb, as_json):
        assert (other.end(), b"\x1b[" in other.raw, b"ETA" in other.raw) == (0, False, False)
    assert b"heartbeat cpu=" in dumb.raw
    assert screen.process.wait(60) == 75
    assert site.rows("SELECT verdict, exit_code FROM task") == [("stopped", 75)]


# Requests with escapes as in Python; ``{x}`` is a word of 70,000 letters, and a path alone is asked for properly.
HARDLY_HTTP = read_data("hardly_http.txt").splitlines()
PROPERLY = r"GET PATH HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
TOKEN = "a+token/with&signs=and%more"


def test_looks_are_shared_and_what_is_hardly_http_gets_a_4xx(run):
    """No one looks at the folder before someone asks."""
    with LiveServer(run.parent, run, interval_s=0.1) as server:
        place = {"url": f"{server.url}/", "host": "127.0.0.1", "port": server.ready["port"], "pid": server.pid}
        assert server.ready == place
        assert server.get("/api/health").json()["looks"] == 0
        wait_for(lambda: server.get("/api/health").json()["status"] == "ok", "who asks after its health makes it look")
        with ExitStack() as stack:
            for _ in range(30):
                wire = stack.enter_context(socket.create_connection(("127.0.0.1", place["port"])))
                assert next(websocket(wire)) == 101
            wait_for(lambda: server.get("/api/health").json()["listeners"] == 30, "all listen")
            before = server.get("/api/health").json()
            for _ in range(20):
                assert server.get("/api/gpu/summary").json()["devices"] == 64
            after = server.get("/api/health").json()
            assert after["looks"] - before["looks"] <= 2 + (after["uptime_s"] - before["uptime_s"]) / 0.1
        wait_for(lambda: server.get("/api/health").json()["listeners"] == 0, "all have left")
        for line in HARDLY_HTTP:
            text = line if " " in line else PROPERLY.replace("PATH", line)
            request = text.encode().decode("unicode_escape").encode("latin-1").replace(b"{x}", b"x" * 70_000)
            with socket.create_connection(("127.0.0.1", place["port"]), timeout=60) as wire:
                wire.sendall(request)
                answer = b"".join(iter(lambda wire=wire: wire.recv(65536), b""))
            assert 400 <= int(answer.split()[1]) < 500, request[:60]
            assert b"your business" not in answer and b"root:" not in answer
        assert server.stderr == ""
        lines = [line for line in server.get("/metrics").text.splitlines() if line[0] != "#"]
    assert {re.split("[{ ]", line)[0] for line in lines} <= METRIC_BY_NAME.keys()


def test_a_websocket_begins_with_everything_and_strange_slow_or_too_many_connections_are_closed(run):
    with LiveServer(run.parent, run, interval_s=0.1) as server, ExitStack() as stack:

        def dial(data=b""):
            wire = stack.enter_context(socket.create_connection(("127.0.0.1", server.ready["port"]), timeout=60))
            wire.sendall(data)
            return wire

        began_s = time.monotonic()
        slow = [
            dial(),
            dial(b"GET / HTTP/1.1\r\nHost: lo"),
            dial(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"),
        ]
        wait_for(lambda: server.get("/api/tasks").json()["reading"] is None, "every task is read")
        status, first = islice(websocket(dial(), origin="http://LOCALHOST"), 2)
        assert (status, first["event"], len(first["data"]["tasks"])) == (101, "snapshot", 24)
        following = websocket(dial(), "/ws")
        assert (next(following), next(following)["event"]) == (101, "snapshot")
        strangers = ("http://evil.example", "null", "http://localhost.evil.example", "http://localhost:1")
        assert [next(websocket(dial(), origin=origin)) for origin in strangers] == [403] * 4
        assert next(websocket(dial(), "/other")) == 404
        assert server.get("/ws").status_code == 426
        for wire in slow:
            while wire.recv(65536):
                pass
        assert 9 < time.monotonic() - began_s < 25
        while time.monotonic() - began_s < 12:
            assert next(following)["event"] in ("beat", "change"), "a WebSocket stays open"
        lines = [dial() for _ in range(520)]
        assert lines[-1].recv(65536).startswith(b"HTTP/1.1 503 ") and server.stderr == ""
        for line in lines:
            line.close()
        wait_for(lambda: server.get("/api/health").status_code == 200, "it answers again")


def test_a_token_opens_the_page_for_people_and_is_never_written_down(run):
    """On all addresses: it prints one that a browser can open, and how to get there from outside."""

    def get(address, **headers):
        return httpx.get(address, headers=headers, verify=False, timeout=60)

    said = {}
    for host, env in (("127.0.0.1", {}), ("0.0.0.0", {"BADCJOBS_TOKEN": TOKEN})):
        words = [sys.executable, "-m", "badcjobs", "serve", str(run), "--port", "0", "--host", host]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(words, env={**os.environ, **env}, **pipes) as process:
            address, guarded = process.stdout.readline().strip(), host == "0.0.0.0"
            page, opened = address.partition("?")[0], get(address)
            cookie = opened.headers.get("set-cookie", "").partition(";")[0]
            again, stranger = get(page, Cookie=cookie), get(page)
            process.send_signal(signal.SIGTERM)
            said[host] = process.communicate(timeout=60)[1]
        assert [one.status_code for one in (opened, again, stranger)] == [200, 200, 401 if guarded else 200]
        assert ("live.js" in again.text, bool(cookie), process.returncode) == (True, guarded, 0)
        assert "server" not in opened.headers, "nor which program answers"
        name, port = page.removeprefix("http://").rstrip("/").rsplit(":", 1)
        assert f"ssh -N -L {port}:{name}:{port} {'YOU@LOGIN_NODE' if guarded else ''}" in said[host]
    assert "0.0.0.0" not in address and TOKEN not in said["0.0.0.0"]
    assert "every user of this machine can open it" in said["127.0.0.1"]


@pytest.mark.parametrize("package", ["uvicorn", "starlette", "wsproto"])
def test_without_the_extra_it_says_what_to_install(site, package):
    (site.folder / package).mkdir()
    (site.folder / package / "__init__.py").write_text(f"raise ImportError('No module named {package}')")
    refused = site.badcjobs("serve", "--simulate", "1", env={"PYTHONPATH": str(site.folder)})
    assert_refused(refused, 3, "pip install 'badcjobs[serve]'")


def test_a_listener_hears_of_every_change_and_of_a_run_that_is_gone_until_it_is_back(tmp_path):
    run = tmp_path / os.fsdecode(b"j\xfcly")  # as a file system of old times would have it
    task = TaskFile(run, states={"a": "done", "b": "pending"}, ended_at_ms=None)
    task.write()
    with LiveServer(tmp_path, run, interval_s=0.1) as server:
        events = server.events()
        name, data = next(events)
        assert (name, [t["done"] for t in data["tasks"]]) == ("snapshot", [1])
        task.states = {"a": "done", "b": "done"}
        task.write()
        name, data = next(events)
        assert (name, [t["done"] for t in data["tasks"]], data["total"]["done"]) == ("change", [2], 2)
        TaskFile(run, index=1, states={"c": "pending"}, ended_at_ms=None).write()
        name, data = next(events)
        assert [t["label"] for t in data["tasks"]] == ["4821_1"]
        again = server.events()  # who lost the connection gets everything
        assert next(again)[0] == "snapshot"
        again.close()
        run.rename(tmp_path / "elsewhere")
        name, heard = next(event for event in events if event[1].get("trouble"))
        assert (name, heard["trouble"].endswith("ly is gone")) == ("beat", True)
        assert [server.get(path).status_code for path in ("/api/tasks", "/metrics", "/api/gpu/metrics")] == [503] * 3
        (tmp_path / "elsewhere").rename(run)
        wait_for(lambda: server.get("/api/tasks").status_code == 200, "it is back")
        task.path.unlink()
        assert next(data for _, data in events if data.get("gone_tasks"))["gone_tasks"] == [task.key.name]
        assert (server.end(signal.SIGINT), server.stderr, list(events)) == (130, "", [])


def test_devices_of_this_machine_come_with_their_processes_and_a_past(tmp_path):
    (tmp_path / "devices.toml").write_text("[[device]]\nindex = 0\nprocesses = [[1, 900]]\n")
    with LiveServer(tmp_path, "--simulate", "devices.toml", interval_s=0.1) as server:
        wait_for(lambda: server.get("/api/health").json()["looks"] > 5, "it looks by itself, so that there is a past")
        (device,) = server.get("/api/gpu/metrics").json()["devices"]
        (process,) = device["processes"]
        assert (process["pid"], process["memory_used_bytes"], bool(process["program"])) == (1, 900 * 2**20, True)
        assert len(device["trail"]["power_w"]) > 5
        assert server.get("/api/tasks").json()["tasks"] == []
        events = server.events()
        next(events)
        assert (server.end(), "Traceback" in server.stderr) == (0, False)
        assert "beat" not in [name for name, _ in events]


NEVER_HERE = {"badcjobs_gpu_throttled_samples_total", "badcjobs_alerts_total"}


def test_no_counter_falls_while_tries_fail_a_task_is_killed_and_another_goes_on(site):
    if shutil.which("prometheus") is None:
        needs.missing("promtool", "prometheus is not installed")
    waits = 'while [ -e "$0.3.done" ] && [ ! -e "$0.go" ]; do sleep 0.1; done'
    fails_first = '[ -e "$0.$1" ] && echo start_time,end_time,label,score > "$3"'
    counts = '[ -e "$3" ] && touch "$0.$(ls "$0".*.done | wc -l).done"; touch "$0.$1"'
    detector, source = site.script("detector", f"{waits}; sleep 0.1; {fails_first}; {counts}"), site.manifest(12)
    order = (source, "--command", f"{detector} {{chunk_id}} {{input}} {{output}}", "--simulate", 2)
    site.out.mkdir()
    with LiveServer(site.folder, site.out, interval_s=0.1) as server, prometheus(site.folder, server.url) as ask:
        killed = site.start_run(*order)
        wait_for(lambda: ask('badcjobs_gpu_tries_total{outcome="done"} > 1'), "some chunks are done")
        killed.kill()
        detector.with_suffix(".go").touch()
        assert site.run(*order).exit_code == 0
        assert site.badcjobs("merge", site.out, "--remove-merged").exit_code == 0
        wait_for(lambda: ask('badcjobs_tasks{verdict="done"} == 1'), "the end")
        time.sleep(1)
        counters = [name for name in METRIC_BY_NAME if name.endswith("_total")]
        falls = {name: ask(f"resets({name}[1h])").values() for name in counters}
        assert {name for name, values in falls.items() if set(values) != {"0"}} == NEVER_HERE
        assert ask("badcjobs_tries_total >= 24"), "nothing is forgotten when its file is removed"
        assert not ask('{__name__=~"badcjobs_gpu_.+",__name__!~".+_total"}'), "no task runs"
