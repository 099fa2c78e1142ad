"""A run in the middle of its work, as its folder looks; and a real ``badcjobs serve`` that shows it, on a free port."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import wsproto
from support.badcjobs_program import KEPT, Program
from support.synthetic_job import DEVICES, EVEN_CHUNKS, write_tasks
from support.task_files import START_MS
from support.waiting import wait_for

SECONDS = 600
_SILENT, _SILENCE_S = 15, 1800
_BEGIN = """INSERT INTO attempt (task_id, attempt_id, recording_id, chunk_id, try_number, device_id, started_at_ms)
            SELECT task_id, 100000 + rowid, recording_id, chunk_id, 1,
                   (SELECT device_id FROM device WHERE device_index = c.rowid % ?), ?
            FROM chunk c WHERE status = 'pending' ORDER BY rowid LIMIT ?"""
_WARN = """INSERT INTO alert SELECT task_id, device_id, 'thermal', 'warning', ?, NULL, 86, 83,
           'device 2 is at 86 °C, above 83 °C' FROM device WHERE device_index = 2"""


def write_live_run(folder: Path, tasks: int, *, now_ms: int, waiting: int = 0, seconds: int = SECONDS) -> list[Path]:
    """Write a run of so many tasks that began ``seconds`` ago, and say in run.toml that more of them wait.

    Of twenty tasks one has failed, one is silent and two are done; the others run, some with an alert.
    """

    def late_s(index: int) -> int:
        return _SILENCE_S if index % 20 == _SILENT else 0

    chance, now_s = random.Random(7), now_ms / 1000
    begin_s = now_s - START_MS / 1000 - seconds
    files = write_tasks(folder, range(tasks), seconds, lambda index: begin_s - late_s(index))
    for index, path in enumerate(files):
        with closing(sqlite3.connect(path)) as db, db:
            _tell(db, index % 20, chance, now_ms - 1000 * late_s(index))
            db.execute("UPDATE task SET shard_index = ?, shard_count = ?", (index, tasks + waiting))
        if late_s(index):
            os.utime(path, (now_s - late_s(index),) * 2)
    array = f"[array]\nfirst = 0\nstep = 1\ncount = {tasks + waiting}\n"
    (folder / "run.toml").write_text(f'[run]\nsource = ["/data/manifest.csv"]\n\n{array}')
    return files


def _tell(db: sqlite3.Connection, kind: int, chance: random.Random, now_ms: int) -> None:
    if kind in (4, 11):
        return  # done
    left = chance.randrange(EVEN_CHUNKS // 10, EVEN_CHUNKS * 7 // 10)
    rows = "rowid > (SELECT max(rowid) FROM chunk) - ?"
    db.execute(f"UPDATE chunk SET status = 'pending', device_id = NULL, audio_s = 30.0 WHERE {rows}", (left,))
    if kind == 7:
        db.execute("UPDATE task SET exit_code = 1, verdict = 'failed'")
        db.execute("UPDATE chunk SET status = 'failed', error_class = 'bad_audio' WHERE status = 'pending'")
        return
    db.execute("UPDATE task SET ended_at_ms = NULL, exit_code = NULL, verdict = NULL")
    db.execute("DELETE FROM attempt WHERE attempt_id > ?", (EVEN_CHUNKS - left,))
    db.execute(_BEGIN, (DEVICES, now_ms - 20_000, DEVICES))
    if kind == 2:
        db.execute(_WARN, (now_ms - 190_000,))


class LiveServer(Program):
    """Runs for the length of a block; ``get`` asks it."""

    def __init__(
        self, folder: Path, *args: object, env: dict[str, str] | None = None, interval_s: float | None = None
    ) -> None:
        environ = {name: os.environ[name] for name in KEPT if name in os.environ} | {"LANG": "C.UTF-8", **(env or {})}
        environ |= {} if interval_s is None else {"BADCJOBS_POLL_S": str(interval_s)}
        said = folder / f"serve-{time.monotonic_ns()}"
        super().__init__(["serve", *args, "--port", "0", "--json"], environ, folder, said)
        wait_for(lambda: self.stdout.endswith("\n") or not self.running, "it is ready")
        assert self.stdout, f"it never became ready; it said:\n{self.stderr}"
        self.ready: dict[str, Any] = json.loads(self.stdout.splitlines()[0])
        self.url = str(self.ready["url"]).rstrip("/")
        # No certificates to load: that takes longer than all tests.
        self._client = httpx.Client(timeout=30, verify=False)

    def get(self, path: str, **more: Any) -> httpx.Response:
        self._client.cookies.clear()
        return self._client.get(self.url + path, **more)

    def events(self, timeout_s: float = 60) -> Iterator[tuple[str, Any]]:
        """Yield name and data of one message after the other."""
        with socket.create_connection(("127.0.0.1", self.ready["port"]), timeout=timeout_s) as wire:
            messages = websocket(wire, "/ws")
            assert next(messages) == 101
            for message in messages:
                if not isinstance(message, dict):
                    return
                yield message["event"], message["data"]

    def end(self, signum: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.send(signum)
        return self.wait(40).exit_code

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()
        if self.running:
            self.end()


def websocket(wire: socket.socket, path: str = "/ws", **headers: str) -> Iterator[Any]:
    """Open a WebSocket and yield what the server says: the status of its answer, then each message."""
    line, text = wsproto.WSConnection(wsproto.ConnectionType.CLIENT), ""
    extra = [(name.encode(), value.encode()) for name, value in headers.items()]
    wire.sendall(line.send(wsproto.events.Request(host="localhost", target=path, extra_headers=extra)))
    while data := wire.recv(65536):
        line.receive_data(data)
        for event in line.events():
            if isinstance(event, wsproto.events.TextMessage):
                text += event.data
                if event.message_finished:
                    yield json.loads(text)
                    text = ""
            elif isinstance(event, wsproto.events.Ping):
                wire.sendall(line.send(event.response()))
            else:
                yield (
                    101 if isinstance(event, wsproto.events.AcceptConnection) else getattr(event, "status_code", event)
                )


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Callable[[str], dict[str, str]]]:
    """Scrape a server five times a second; give a function that returns the value of each series of a query."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        here = f"127.0.0.1:{free.getsockname()[1]}"
    config = folder / "prometheus.yml"
    targets = f"[{{targets: ['{target.rpartition('/')[2]}']}}]"
    config.write_text(f"scrape_configs: [{{job_name: run, scrape_interval: 200ms, static_configs: {targets}}}]")
    places = (f"--config.file={config}", f"--storage.tsdb.path={folder}/tsdb", f"--web.listen-address={here}")
    process = subprocess.Popen(["prometheus", *places], stderr=subprocess.DEVNULL)

    def ask(query: str) -> dict[str, str]:
        with suppress(httpx.HTTPError):  # it has not started, or reads its own files first
            answer = httpx.get(f"http://{here}/api/v1/query", params={"query": query}).raise_for_status().json()
            return {str(one["metric"]): one["value"][1] for one in answer["data"]["result"]}
        return {}

    try:
        yield ask
    finally:
        process.terminate()
        process.wait()
