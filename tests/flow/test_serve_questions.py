"""What ``badcjobs serve`` answers: a real server in its own process, asked in right and in wrong ways."""

from __future__ import annotations

import shutil
import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from rooms.live import ENDPOINTS, Endpoint
from rooms.report import METRIC_BY_NAME
from support import needs
from support.badcjobs_program import Site
from support.live_run import write_live_run
from support.live_server import LiveServer
from support.task_files import TaskFile
from support.waiting import wait_for

SECRET = "this line is none of your business"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run in the middle of its work: 20 tasks of 4 devices, 3 that wait, some with alerts."""
    folder = tmp_path_factory.mktemp("serve") / "july"
    write_live_run(folder, 20, now_ms=time.time_ns() // 10**6, waiting=3, seconds=120)
    (folder.parent / "secret.log").write_text(SECRET)
    (folder / "tasks" / "4821_0.r0.gpu0.log").write_text("".join(f"line {n}\n" for n in range(300)))
    (folder / "tasks" / "4821_1.r0.gpu1.log").symlink_to(folder.parent / "secret.log")
    elsewhere = TaskFile(folder.parent / "june", job_id="666", states={"z": "done"}).write()
    (folder / "tasks" / elsewhere.name).symlink_to(elsewhere)
    return folder


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[LiveServer]:
    """Serve that run to all tests that change nothing."""
    with LiveServer(run.parent, run, interval_s=0.2) as server:
        yield server


# --- what is answered -------------------------------------------------------------------------------------------------


def test_it_says_where_it_is_as_one_line_of_json(server: LiveServer) -> None:
    assert server.ready == {
        "url": f"{server.url}/",
        "host": "127.0.0.1",
        "port": server.ready["port"],
        "pid": server.pid,
    }
    assert server.ready["port"] > 1024


def test_whoever_asks_after_its_health_alone_hears_that_it_is_well(tmp_path: Path) -> None:
    with LiveServer(tmp_path, "--simulate", 1) as server:
        wait_for(lambda: server.get("/api/health").json()["status"] == "ok", "it has looked, though nobody else asks")


def test_its_health_can_be_asked_and_looks_are_shared(server: LiveServer) -> None:
    server.get("/api/tasks")
    health = server.get("/api/health").json()
    assert (health["status"], health["of_run"], health["trouble"]) == ("ok", True, None)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: server.get("/api/gpu/summary"), range(64)))
    later = server.get("/api/health").json()
    most = 2 + (later["uptime_s"] - health["uptime_s"]) / health["interval_s"]
    assert later["looks"] - health["looks"] <= most


def test_tasks_have_their_state_and_progress(server: LiveServer) -> None:
    told = server.get("/api/tasks").json()
    assert told["total"]["states"] == {"running": 16, "done": 2, "failed": 1, "silent": 1, "waiting": 3}
    assert told["matched"] == 23
    assert {task["state"] for task in told["tasks"]} == set(told["total"]["states"])
    some = server.get("/api/tasks?state=running&limit=2&offset=1").json()
    running = [task for task in told["tasks"] if task["state"] == "running"]
    assert (some["matched"], some["tasks"]) == (len(running), running[1:3])


def test_one_task_comes_with_its_devices_and_the_end_of_its_log(server: LiveServer) -> None:
    told = server.get("/api/tasks/4821_0.r0.gpu0").json()
    assert told["task"]["label"] == "4821_0"
    assert [device["index"] for device in told["devices"]] == [0, 1, 2, 3]
    log = server.get("/api/tasks/4821_0.r0.gpu0/log?lines=2").json()
    assert log == {"task": "4821_0.r0.gpu0", "lines": ["line 298", "line 299"], "whole": False}


def test_devices_come_together_and_one_by_one(server: LiveServer) -> None:
    summary = server.get("/api/gpu/summary").json()
    assert summary["devices"] == summary["models"][0]["devices"] == summary["readable"]
    assert 0 < summary["utilization_percent"] <= 100
    wanted = server.get("/api/gpu/metrics?task=4821_0.r0.gpu0&device=2&trail=false").json()["devices"]
    assert [(device["index"], device["trail"]) for device in wanted] == [(2, None)]
    assert len(server.get("/api/gpu/metrics?alive=false").json()["devices"]) == summary["ended"]


def test_alerts_that_go_on_are_told(server: LiveServer) -> None:
    (alert,) = server.get("/api/alerts").json()["alerts"]
    assert (alert["kind"], alert["task"], alert["device_index"]) == ("thermal", "4821_2.r0.gpu2", 2)


ON_IT = "[[device]]\nindex = 0\nprocesses = [[1, 900]]\n"


def test_devices_of_this_machine_come_with_their_processes(tmp_path: Path) -> None:
    (tmp_path / "devices.toml").write_text(ON_IT)
    with LiveServer(tmp_path, "--simulate", "devices.toml", interval_s=0.1) as server:
        (device,) = server.get("/api/gpu/metrics").json()["devices"]
        (process,) = device["processes"]
        assert (process["pid"], process["memory_used_bytes"]) == (1, 900 * 2**20)
        assert process["program"]
        assert server.get("/api/tasks").json()["tasks"] == []
        # It looks also while nobody asks, so that there is a past to show.
        wait_for(lambda: server.get("/api/health").json()["looks"] > 5, "it looks by itself")


def test_devices_of_a_task_come_with_their_processes_while_it_runs(site: Site) -> None:
    (site.folder / "devices.toml").write_text(ON_IT)
    site.run(site.manifest(3), "--engine", "demo", "--simulate", "devices.toml")
    with closing(sqlite3.connect(site.task_database())) as db, db:
        db.execute("UPDATE task SET verdict = NULL, ended_at_ms = NULL")
    with LiveServer(site.folder, site.out) as server:
        (device,) = server.get("/api/gpu/metrics").json()["devices"]
        assert [(p["pid"], p["memory_used_bytes"]) for p in device["processes"]] == [(1, 900 * 2**20)]


def test_without_listeners_nobody_looks_at_the_folder(run: Path) -> None:
    with LiveServer(run.parent, run, interval_s=0.1) as server:
        time.sleep(1)
        assert server.get("/api/health").json()["looks"] == 0


# --- prometheus -------------------------------------------------------------------------------------------------------


def test_promtool_is_content_and_every_name_is_in_the_one_table(server: LiveServer) -> None:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {line.split("{")[0].split(" ")[0] for line in answer.text.splitlines() if not line.startswith("#")}
    assert names <= METRIC_BY_NAME.keys()
    assert {"badcjobs_gpu_temperature_celsius", "badcjobs_task_chunks", "badcjobs_chunks"} <= names
    assert 'badcjobs_tasks_missing{run="july"} 3' in answer.text
    if shutil.which("promtool") is None:
        needs.missing("promtool", "promtool (Debian package prometheus) is not installed")
    checked = subprocess.run(["promtool", "check", "metrics"], input=answer.text, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


# --- wrong questions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/api", 404),
        ("GET", "/api/tasks/", 404),
        ("GET", "/api/tasks/4821_99.r0.gpu9", 404),
        ("GET", "/api/tasks/4821_3.r0.gpu3/log", 404),
        ("GET", "/api/tasks/666_0.r0.gpu1", 404),  # a link that leads out of the run folder
        ("GET", "/api/tasks?limit=0", 400),
        ("GET", "/api/tasks?limit=x", 400),
        ("GET", "/api/tasks?offset=-1", 400),
        ("GET", "/api/tasks?state=asleep", 400),
        ("GET", "/api/tasks?state=done&state=failed", 400),
        ("GET", "/api/tasks?colour=red", 400),
        ("GET", "/api/gpu/metrics?device=77", 404),
        ("GET", "/api/gpu/metrics?task=none", 404),
        ("GET", "/api/events?token=x", 400),
        ("GET", "/api/health?%ff=%ff", 400),
        ("POST", "/api/tasks", 405),
        ("DELETE", "/", 405),
        ("PUT", "/api/events", 405),
        ("PATCH", "/metrics", 405),
        ("OPTIONS", "/api/health", 405),
        ("TRACE", "/", 405),
        ("BREW", "/api/tasks", 405),
        ("OPTIONS", "/nothing", 404),
        ("GET", "/api/tasks?" + "&".join(f"x{n}=1" for n in range(5000)), 400),
        ("GET", "/api/tasks?state=" + "d" * 50_000, 400),
        ("GET", "/api/gpu/metrics?device=" + "%F0%9F%90%A6" * 500, 400),
        ("GET", "/api/tasks/" + "x" * 5000, 404),
        ("GET", "/api/tasks?limit=%00", 400),
        ("GET", "/api/tasks?%", 400),
    ],
)
def test_a_wrong_question_gets_a_4xx_in_json(server: LiveServer, method: str, path: str, status: int) -> None:
    answer = server.ask(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["status"] == status
    assert answer.json()["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.log",
        "/..%2fsecret.log",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/api/tasks/../../secret.log",
        "/api/tasks/..%2f..%2fsecret/log",
        "/api/tasks/%2e%2e%2fsecret/log",
        "/api/tasks//etc/passwd/log",
        "/api/tasks/%2fetc%2fpasswd/log",
        "/api/tasks/4821_1.r0.gpu1/log",
        "/assets/live.js/../../app.py",
        "/api/tasks/..%5c..%5csecret/log",
        "/api/tasks/4821_0.r0.gpu0%00/log",
    ],
)
def test_no_path_leaves_the_run_folder(server: LiveServer, path: str) -> None:
    with socket.create_connection(("127.0.0.1", server.ready["port"])) as line:  # a client would tidy the path up
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: line.recv(65536), b"")).decode()
    assert answer.startswith("HTTP/1.1 4")
    assert SECRET not in answer
    assert "root:" not in answer


@pytest.mark.parametrize(
    "request_text",
    [
        b"GET / HTTP/1.1\r\n\r\n",  # nobody is asked for
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"G\x01T / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/one\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a browser that wants https\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /%zz%2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /api/tasks/%ff%fe/log HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"POST /api/tasks HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n",
        b"GET /api/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_what_is_hardly_http_gets_a_4xx_too(server: LiveServer, request_text: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.ready["port"]), timeout=60) as line:
        line.sendall(request_text)
        head = b"".join(iter(lambda: line.recv(65536), b""))
    assert 400 <= int(head.split()[1]) < 500
    assert "Traceback" not in server.stderr


def test_head_is_answered_without_a_body_also_for_the_stream(server: LiveServer) -> None:
    for path in ("/", "/api/tasks", "/api/events", "/metrics"):
        answer = server.ask("HEAD", path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_everything_carries_the_headers_that_keep_others_away(server: LiveServer) -> None:
    for path in ("/", "/live.js", "/api/tasks", "/nothing", "/metrics"):
        headers = server.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers
    assert server.get("/live.js").headers["content-type"] == "text/javascript; charset=utf-8"


def test_a_name_that_somebody_made_point_here_is_refused(server: LiveServer) -> None:
    assert server.get("/api/tasks", headers={"Host": "evil.example"}).status_code == 403
    assert server.get("/api/tasks", headers={"Host": "localhost:1234"}).status_code == 200


STRANGE = (
    "",
    "0",
    "-1",
    "true",
    "1.5",
    "9" * 5000,
    "\u0663",
    "%00",
    "a b",
    "\U0001f426",
    "../../etc/passwd",
    "<script>",
)


@pytest.mark.parametrize("question", [one for one in ENDPOINTS if one.name != "events"], ids=lambda one: one.name)
def test_whatever_is_asked_the_answer_is_a_result_or_says_what_would_be_right(
    server: LiveServer, question: Endpoint
) -> None:
    asked = [(question.path.replace("{name}", value or "x"), {}) for value in STRANGE if "{name}" in question.path]
    names = ["nothing", *(parameter.name for parameter in question.parameters)]
    path = question.path.replace("{name}", "4821_0.r0.gpu0")
    asked += [(path, {name: value}) for name in names for value in STRANGE]
    for address, query in asked:
        answer = server.get(address, params=query)
        assert answer.status_code in (200, 400, 401, 404), (address, query)
        if answer.status_code != 200:
            assert answer.json()["error"]
