"""The server under bad conditions: listeners that do not read, disks that hang, looks that fail, and our own bugs."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from rooms.live import Connection, Documents, Guard, Hub, Item, Server, Snapshot, json_text, make_app
from rooms.root import DatabaseProblem, SystemClock
from support.waiting import wait_for

EMPTY = Documents(Snapshot(1000, "july", True))


class Source:
    """Something to look at that does what a test wants."""

    def __init__(self) -> None:
        self.look: Callable[[], Documents] = lambda: EMPTY

    def prometheus(self, look: Documents) -> str:
        return ""

    def processes(self, look: Documents) -> dict[str, Any]:
        return {}

    def log_end(self, task: str, lines: int) -> None:
        return None


class Running:
    """A server in a thread, on a free port."""

    def __init__(self, source: Source, *, patience_s: float) -> None:
        look = lambda: source.look()  # noqa: E731 - what it does may change later
        self.hub = Hub(look, SystemClock(), interval_s=0.02, patience_s=patience_s)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        self.port = self._socket.getsockname()[1]
        ready = threading.Event()
        app = make_app(self.hub, source, Guard(None, True, self.port))
        config = uvicorn.Config(app, http=Connection, ws="none", lifespan="off", log_config=None, log_level="critical")
        self._server = Server(config, started=ready.set, ending=self.hub.close)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert ready.wait(20)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, verify=False)

    async def _run(self) -> None:
        looking = asyncio.ensure_future(self.hub.run())
        await self._server.serve(sockets=[self._socket])
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)

    def listen(self, *, buffer: int | None = None) -> socket.socket:
        line = socket.socket()
        if buffer is not None:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        line.settimeout(20)
        line.connect(("127.0.0.1", self.port))
        line.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return line

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def running(source: Source) -> Iterator[Running]:
    running = Running(source, patience_s=0.6)
    yield running
    running.close()


def read_until(line: socket.socket, word: bytes) -> bytes:
    heard = b""
    while word not in heard:
        block = line.recv(1 << 20)
        assert block, f"it ended before it said {word!r}"
        heard = heard[-100:] + block
    return heard


def test_who_does_not_read_is_cut_off_and_nobody_else_notices(source: Source, running: Running) -> None:
    started = time.monotonic()

    def growing() -> Documents:
        moment = round(1000 * (time.monotonic() - started))
        document = {"name": "t", "moment": moment, "weight": "x" * 200_000}
        return Documents(Snapshot(moment, "july", True), tasks={"t": Item(document, json_text(document))})

    source.look = growing
    with running.listen(buffer=4096) as lazy, running.listen() as keen:
        wait_for(lambda: len(running.hub.listeners) == 2, "both listen")
        longest_s, last_s = 0.0, time.monotonic()
        while len(running.hub.listeners) == 2:
            read_until(keen, b"event: change")
            longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
        assert longest_s < 30
        read_until(keen, b"event: change")
        rest = b"".join(iter(lambda: lazy.recv(1 << 20), b""))
        assert len(rest) < 2_000_000
        assert not rest.endswith(b"0\r\n\r\n")  # cut in the middle: an orderly end would still wait to be read


def test_a_disk_that_hangs_stops_answers_but_not_the_server(source: Source, running: Running) -> None:
    assert running.client.get("/api/tasks").status_code == 200
    go_on = threading.Event()

    def hanging() -> Documents:
        go_on.wait(20)
        return EMPTY

    source.look = hanging
    time.sleep(0.05)
    answer = running.client.get("/api/tasks")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "hangs" in answer.json()["error"]
    began_s = time.monotonic()
    for _ in range(20):
        assert running.client.get("/api/gpu/summary").status_code == 503
    assert time.monotonic() - began_s < 10, "one has waited for all"
    health = running.client.get("/api/health").json()
    assert (health["status"], health["at_ms"]) == ("stale", 1000)
    go_on.set()
    wait_for(lambda: running.client.get("/api/tasks").status_code == 200, "it goes on")
    assert running.client.get("/api/health").json()["status"] == "ok"


def test_who_listens_from_the_beginning_gets_all_when_the_first_look_is_done(source: Source, running: Running) -> None:
    go_on = threading.Event()

    def slow() -> Documents:
        go_on.wait(20)
        return EMPTY

    source.look = slow
    with running.listen() as line:
        read_until(line, b"retry: ")
        assert running.client.get("/api/health").json()["status"] == "starting"
        go_on.set()
        read_until(line, b"event: snapshot")


def test_listeners_hear_why_nothing_is_new_and_that_it_goes_on(source: Source, running: Running) -> None:
    with running.listen() as line:
        read_until(line, b"event: snapshot")

        def failing() -> Documents:
            raise DatabaseProblem("the folder is gone")

        source.look = failing
        heard = read_until(line, b"the folder is gone")
        assert b"event: beat" in heard
        source.look = lambda: EMPTY
        read_until(line, b'"trouble":null')


def test_a_bug_of_ours_is_a_500_in_json_that_tells_nothing(source: Source, running: Running) -> None:
    def wrong() -> Documents:
        raise ZeroDivisionError("the secret of the universe")

    source.look = wrong
    answer = running.client.get("/api/tasks")
    assert (answer.status_code, answer.json()["status"]) == (500, 500)
    assert "secret" not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_more_listeners_than_anybody_needs_are_refused(source: Source, running: Running) -> None:
    lines = [running.hub.join(None) for _ in range(256)]
    answer = running.client.get("/api/events")
    assert (answer.status_code, json.loads(answer.text)["error"]) == (503, "too many listeners (256)")
    for line in lines:
        running.hub.listeners.discard(line)
