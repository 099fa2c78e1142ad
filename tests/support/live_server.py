"""A real ``badcjobs serve`` in a process of its own, on a free port, and what one hears from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

_KEPT = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH")


class LiveServer:
    """Runs for the length of a block; ``get`` asks it."""

    def __init__(
        self, folder: Path, *args: object, env: dict[str, str] | None = None, interval_s: float | None = None
    ) -> None:
        environ = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environ |= {} if interval_s is None else {"BADCJOBS_POLL_S": str(interval_s)}
        environ |= {"LANG": "C.UTF-8", **(env or {})}
        words = [sys.executable, "-m", "badcjobs", "serve", *map(str, args), "--port", "0", "--json"]
        self._said = folder / f"serve-{time.monotonic_ns()}.stderr"
        with self._said.open("wb") as stderr:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": stderr}
            self._process = subprocess.Popen(words, env=environ, cwd=folder, text=True, **pipes)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"it never became ready; it said:\n{self.stderr}"
        self.ready: dict[str, Any] = json.loads(line)
        self.url = str(self.ready["url"]).rstrip("/")
        self.pid = self._process.pid
        # No certificates to load: that takes longer than all tests.
        self._client = httpx.Client(timeout=30, verify=False)

    @property
    def stderr(self) -> str:
        return self._said.read_text(errors="replace")

    def get(self, path: str, **more: Any) -> httpx.Response:
        self._client.cookies.clear()
        return self._client.get(self.url + path, **more)

    def events(self, last_id: str | None = None, timeout_s: float = 60) -> Iterator[tuple[str, str, Any]]:
        """Yield id, name and data of one event after the other."""
        headers = {} if last_id is None else {"Last-Event-ID": last_id}
        event: dict[str, str] = {}
        with self._client.stream("GET", self.url + "/api/events", headers=headers, timeout=timeout_s) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line:
                    name, _, value = line.partition(": ")
                    event[name] = value
                elif "event" in event:
                    yield event.get("id", ""), event["event"], json.loads(event["data"])
                    event = {}

    def end(self, signum: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self._process.send_signal(signum)
        return self._process.wait(40)

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._client.close()
            if self._process.poll() is None:
                self.end()
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
