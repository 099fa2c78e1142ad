"""``badcjobs serve`` in a process of its own: how it starts, whom it lets in, what it pushes, and how it ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from rooms.report import METRIC_BY_NAME
from support import needs
from support.badcjobs_program import Site, assert_refused
from support.live_run import LiveServer, write_live_run
from support.task_files import TaskFile
from support.waiting import wait_for

PATHS = (
    "/../secret.log", "/api/tasks/../../../secret/log", "/api/tasks/%2e%2e%2fsecret/log", "/api/tasks//etc/passwd/log",
    "/api/tasks/%2fetc%2fpasswd/log", "/assets/live.js/../../app.py", "/api/tasks/..%5c..%5csecret/log",
    "/api/tasks/4821_0.r0.gpu0%00/log", "/%zz%2", "/api/tasks/%ff%fe/log", "http://evil.example/",
)  # fmt: skip
HARDLY_HTTP = (
    b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", b"G\x01T / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/one\r\nHost: localhost\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000,
    b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a browser that wants https\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"POST /api/tasks HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n",
    b"GET /api/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    *(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode() for path in PATHS),
)  # fmt: skip
TOKEN = "a+token/with&signs=and%more"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run in the middle of its work."""
    folder = tmp_path_factory.mktemp("serve") / "july"
    write_live_run(folder, 3, now_ms=time.time_ns() // 10**6, waiting=1, seconds=60)
    (folder.parent / "secret.log").write_text("this line is none of your business")
    return folder


def test_looks_are_shared_promtool_is_content_and_what_is_hardly_http_gets_a_4xx(run: Path) -> None:
    """Nobody looks at the folder before someone asks."""
    with LiveServer(run.parent, run, interval_s=0.1) as server:
        place = {"url": f"{server.url}/", "host": "127.0.0.1", "port": server.ready["port"], "pid": server.pid}
        assert server.ready == place
        assert server.get("/api/health").json()["looks"] == 0
        wait_for(lambda: server.get("/api/health").json()["status"] == "ok", "who asks after its health makes it look")
        with ExitStack() as stack:
            lines = [stack.enter_context(socket.create_connection(("127.0.0.1", place["port"]))) for _ in range(30)]
            for line in lines:
                line.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_for(lambda: server.get("/api/health").json()["listeners"] == 30, "all listen")
            before = server.get("/api/health").json()
            for _ in range(20):
                assert server.get("/api/gpu/summary").json()["devices"] == 12
            after = server.get("/api/health").json()
            assert after["looks"] - before["looks"] <= 2 + (after["uptime_s"] - before["uptime_s"]) / 0.1
        wait_for(lambda: server.get("/api/health").json()["listeners"] == 0, "all have left")
        for request in HARDLY_HTTP:
            with socket.create_connection(("127.0.0.1", place["port"]), timeout=60) as line:
                line.sendall(request)
                answer = b"".join(iter(lambda line=line: line.recv(65536), b""))
            assert 400 <= int(answer.split()[1]) < 500, request[:60]
            assert b"your business" not in answer and b"root:" not in answer
        assert server.stderr == ""
        text = server.get("/metrics").text
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[0] != "#"}
    assert names <= METRIC_BY_NAME.keys()
    if shutil.which("promtool") is None:
        needs.missing("promtool", "promtool (Debian package prometheus) is not installed")
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_a_token_opens_the_page_for_people_and_is_never_written_down(run: Path) -> None:
    """On all addresses: it prints one that a browser can open, and how to get there from outside."""
    servers, said = {}, {}
    for host, env in (("127.0.0.1", {}), ("0.0.0.0", {"BADCJOBS_TOKEN": TOKEN})):
        words = [sys.executable, "-m", "badcjobs", "serve", str(run), "--port", "0", "--host", host]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        servers[host] = subprocess.Popen(words, env={**os.environ, **env}, **pipes)
    for host, process in servers.items():
        with process:
            address, guarded = process.stdout.readline().strip(), host == "0.0.0.0"
            page = address.partition("?")[0]
            opened = httpx.get(address, verify=False, timeout=60)
            cookie = opened.headers.get("set-cookie", "").partition(";")[0]
            again, stranger = (
                httpx.get(page, headers=one, verify=False, timeout=60) for one in ({"Cookie": cookie}, {})
            )
            process.send_signal(signal.SIGTERM)
            said[host] = process.communicate(timeout=60)[1]
        assert [one.status_code for one in (opened, again, stranger)] == [200, 200, 401 if guarded else 200]
        assert ("live.js" in again.text, bool(cookie), process.returncode) == (True, guarded, 0)
        name, port = page.removeprefix("http://").rstrip("/").rsplit(":", 1)
        assert f"ssh -N -L {port}:{name}:{port} {'YOU@LOGIN_NODE' if guarded else ''}" in said[host]
    assert "0.0.0.0" not in address and TOKEN not in said["0.0.0.0"]
    assert "every user of this machine can open it" in said["127.0.0.1"]


def test_without_the_extra_it_says_what_to_install(site: Site) -> None:
    (site.folder / "uvicorn").mkdir()
    (site.folder / "uvicorn" / "__init__.py").write_text("raise ImportError('No module named uvicorn')")
    refused = site.badcjobs("serve", "--simulate", "1", env={"PYTHONPATH": str(site.folder)})
    assert_refused(refused, 3, "pip install 'badcjobs[serve]'")


def test_a_listener_hears_of_every_change_and_of_a_run_that_is_gone_until_it_is_back(tmp_path: Path) -> None:
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
        _, name, data = next(events)
        assert [t["label"] for t in data["tasks"]] == ["4821_1"]
        again = server.events(last_id=first_id)  # who lost the connection gets only what was missed
        assert [next(again)[1] for _ in range(2)] == ["change", "change"]
        again.close()
        run.rename(tmp_path / "elsewhere")
        _, name, heard = next(event for event in events if event[2].get("trouble"))
        assert (name, heard["trouble"].endswith("ly is gone")) == ("beat", True)
        assert [server.get(path).status_code for path in ("/api/tasks", "/metrics", "/api/gpu/metrics")] == [503] * 3
        (tmp_path / "elsewhere").rename(run)
        wait_for(lambda: server.get("/api/tasks").status_code == 200, "it is back")
        task.path.unlink()
        assert next(event[2] for event in events if event[2].get("gone_tasks"))["gone_tasks"] == [task.key.name]
        assert (server.end(signal.SIGINT), server.stderr, list(events)) == (130, "", [])


def test_devices_of_this_machine_come_with_their_processes_and_a_past(tmp_path: Path) -> None:
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
        assert "beat" not in [name for _, name, _ in events]
