"""``badcjobs serve`` as people use it: how it starts, whom it lets in, what it pushes, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from support.badcjobs_program import Site, assert_refused
from support.live_run import write_live_run
from support.live_server import LiveServer
from support.task_files import TaskFile
from support.waiting import wait_for

TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run in the middle of its work."""
    folder = tmp_path_factory.mktemp("serve") / "july"
    write_live_run(folder, 3, now_ms=time.time_ns() // 10**6, waiting=1, seconds=60)
    return folder


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(run: Path) -> Iterator[LiveServer]:
    """Serve the run on all addresses to those who know the token."""
    with LiveServer(run.parent, run, "--host", "0.0.0.0", env={"BADCJOBS_TOKEN": TOKEN}) as server:
        server.url = f"http://127.0.0.1:{server.ready['port']}"
        yield server


def test_without_the_token_nothing_is_told(guarded: LiveServer) -> None:
    for path in ("/", "/api/health", "/api/events", "/metrics", "/live.js", "/nothing"):
        answer = guarded.get(path)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Bearer realm="badcjobs"')
    for wrong in (TOKEN[:-1], TOKEN + "x", "x", "\xff"):
        header = {"Authorization": b"Bearer " + wrong.encode("latin-1")}
        assert guarded.get("/api/tasks", headers=header).status_code == 401
        assert guarded.get("/", params={"token": wrong}).status_code == 401
    assert guarded.get("/?token=").status_code == 401
    assert guarded.get(f"/api/tasks?token={TOKEN}").status_code == 401  # only the page takes it from the address


def test_with_the_token_as_a_header_all_is_told_whatever_the_host_is_called(guarded: LiveServer) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Host": "gpu1.cluster.example"}
    assert guarded.get("/api/tasks", headers=headers).json()["matched"] == 4


def test_a_token_in_the_address_of_the_page_becomes_a_cookie_and_is_never_written_down(guarded: LiveServer) -> None:
    opened = guarded.get(f"/?token={TOKEN}")
    assert opened.status_code == 200
    assert TOKEN not in opened.text
    cookie = opened.headers["set-cookie"]
    assert cookie.endswith("HttpOnly; SameSite=Strict; Path=/")
    assert guarded.get("/api/tasks", headers={"Cookie": cookie.partition(";")[0]}).status_code == 200
    assert guarded.get("/", headers={"Cookie": cookie.partition(";")[0]}).status_code == 200
    assert TOKEN not in guarded.stderr


def test_wrong_wishes_are_refused_with_the_fix(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        machine = ("serve", "--simulate", "1")
        refused = site.badcjobs_each(
            [
                (*machine, "--host", "0.0.0.0", "--port", "0"),
                (*machine, "--host", "::", "--port", "0"),
                (*machine, "--port", port),
                (*machine, "--host", "192.0.2.1"),
                (*machine, "--host", "not.a.host.invalid"),
                (*machine, "--host", "0.0.0.0", "--port", "0", "--json"),
                ("serve", site.folder / "nothing", "--port", "0"),
                ("serve", site.folder, "--simulate", "1", "--port", "0"),
            ],
            [{}, {}, {}, {"BADCJOBS_TOKEN": TOKEN}, {"BADCJOBS_TOKEN": TOKEN}, {"BADCJOBS_TOKEN": "my secret"}, {}, {}],
        )
    assert_refused(refused[0], 2, "--host 0.0.0.0 without BADCJOBS_TOKEN")
    told = r"try: BADCJOBS_TOKEN=[0-9a-f]{32} badcjobs serve --simulate=1 --host 0\.0\.0\.0 --port 0\n"
    assert re.search(told, refused[0].stderr)  # whole, and nothing that ps would show
    assert_refused(refused[1], 2, "--host :: without BADCJOBS_TOKEN")
    assert_refused(refused[2], 2, f"port {port} is in use", "try: badcjobs serve --simulate=1 --port 0")
    assert_refused(refused[3], 2, "cannot listen on --host 192.0.2.1")
    assert_refused(refused[4], 2, "is not an address of this machine", "badcjobs serve --simulate=1 --port 8765")
    assert_refused(refused[5], 2, "BADCJOBS_TOKEN must be")
    assert "my secret" not in refused[5].stderr
    told = r"=[0-9a-f]{32} badcjobs serve --simulate=1 --host=0\.0\.0\.0 --port=0 --json\n"
    assert re.search(told, refused[5].stderr)
    assert_refused(refused[6], 4, "does not exist")
    assert_refused(refused[7], 2, "cannot be combined")


def test_without_the_extra_it_says_what_to_install(site: Site) -> None:
    hidden = site.folder / "hidden"
    (hidden / "uvicorn").mkdir(parents=True)
    (hidden / "uvicorn" / "__init__.py").write_text("raise ImportError('No module named uvicorn')")
    refused = site.badcjobs("serve", "--simulate", "1", env={"PYTHONPATH": str(hidden)})
    assert_refused(refused, 3, "pip install 'badcjobs[serve]'")


# --- what is pushed ---------------------------------------------------------------------------------------------------


def test_a_listener_hears_of_a_task_database_that_is_replaced_and_of_one_that_is_new(tmp_path: Path) -> None:
    run = tmp_path / os.fsdecode(b"j\xfcly")  # as a file system of old times would have it
    task = TaskFile(run, states={"a": "done", "b": "pending"}, ended_at_ms=None)
    task.write()
    with LiveServer(tmp_path, run, interval_s=0.1) as server:
        events = server.events()
        first_id, name, data = next(events)
        assert (name, [t["done"] for t in data["tasks"]]) == ("snapshot", [1])
        task.states = {"a": "done", "b": "done"}
        task.write()
        _, name, data = next(events)
        assert (name, [t["done"] for t in data["tasks"]], data["total"]["done"]) == ("change", [2], 2)
        TaskFile(run, index=1, states={"c": "pending"}, ended_at_ms=None).write()
        last_id, name, data = next(events)
        assert [t["label"] for t in data["tasks"]] == ["4821_1"]
        events.close()
        # Who lost the connection gets only what was missed.
        missed = server.events(last_id=first_id)
        assert [next(missed)[1] for _ in range(2)] == ["change", "change"]
        missed.close()
        again = server.events(last_id="of-another-server-1")
        assert next(again)[1] == "snapshot"
        again.close()
        task.path.unlink()
        late = server.events(last_id=last_id)
        assert next(late)[2]["gone_tasks"] == [task.key.name]
        late.close()


def test_fifty_listeners_hear_the_same_and_cost_one_look(tmp_path: Path) -> None:
    task = TaskFile(tmp_path / "run", states={"a": "done", "b": "pending"}, ended_at_ms=None)
    task.write()
    with LiveServer(tmp_path, tmp_path / "run", interval_s=0.3) as server, ExitStack() as stack:
        lines = [socket.create_connection(("127.0.0.1", server.ready["port"])) for _ in range(50)]
        for line in lines:
            stack.enter_context(line)
            line.settimeout(20)
            line.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        heard = [b""] * 50

        def wait_for_word(word: bytes) -> None:
            for number, line in enumerate(lines):
                while word not in heard[number]:
                    heard[number] += line.recv(1 << 20)

        wait_for_word(b"event: snapshot")
        before = server.get("/api/health").json()
        assert before["listeners"] == 50
        task.states = {"a": "done", "b": "done"}
        task.write()
        wait_for_word(b"event: change")
        after = server.get("/api/health").json()
        assert after["looks"] - before["looks"] <= 2 + (after["uptime_s"] - before["uptime_s"]) / 0.3
        for line in lines:
            line.shutdown(socket.SHUT_RDWR)
        wait_for(lambda: server.get("/api/health").json()["listeners"] == 0, "all have left")


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_it_ends_at_once_and_quietly_while_others_listen(run: Path, signum: signal.Signals, code: int) -> None:
    with LiveServer(run.parent, run) as server:
        events = server.events()
        assert next(events)[1] == "snapshot"
        exit_code, seconds = server.end(signum)
        assert exit_code == code
        assert seconds < 2
        assert list(events) == []
        assert "Traceback" not in server.stderr


def test_for_people_it_prints_the_address_and_how_to_get_there(run: Path) -> None:
    words = [sys.executable, "-m", "badcjobs", "serve", str(run), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert "Ctrl-C ends it" in said
    assert "ssh -N -L " in said
    assert process.returncode == 0


def test_on_all_addresses_it_prints_one_that_a_browser_can_open_with_the_token_in_it(run: Path) -> None:
    token = "a+token/with&signs=and%more"
    words = [sys.executable, "-m", "badcjobs", "serve", str(run), "--port", "0", "--host", "0.0.0.0"]
    environ = {**os.environ, "BADCJOBS_TOKEN": token}
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        opened = httpx.get(address, verify=False, timeout=60)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert "0.0.0.0" not in address
    assert opened.status_code == 200
    assert "set-cookie" in opened.headers
    host, port = address.removeprefix("http://").split("/")[0].rsplit(":", 1)
    assert f"ssh -N -L {port}:{host}:{port} YOU@LOGIN_NODE" in said
    assert token not in said


def test_a_run_that_is_removed_while_it_is_served_is_gone_until_it_is_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    TaskFile(run, states={"a": "done", "b": "pending"}, ended_at_ms=None).write()
    with LiveServer(tmp_path, run, interval_s=0.1) as server:
        events = server.events()
        assert next(events)[1] == "snapshot"
        run.rename(tmp_path / "elsewhere")
        heard = next(event for event in events if event[2].get("trouble"))
        assert (heard[1], heard[2]["trouble"]) == ("beat", f"{run} is gone")
        for path in ("/api/tasks", "/metrics", "/api/gpu/metrics", "/api/tasks/4821_0.r0.gpu1/log"):
            answer = server.get(path)
            assert (answer.status_code, answer.json()["error"]) == (503, f"{run} is gone")
        assert server.get("/api/health").json()["status"] == "stale"
        (tmp_path / "elsewhere").rename(run)
        wait_for(lambda: server.get("/api/tasks").status_code == 200, "it is back")
        events.close()
        assert "Traceback" not in server.stderr
