"""The wrapper's hand on its recorder: starts it as a process of its own, restarts it once, stops it in order.

They talk in words over pipes. ``stop``: take a last sample; the recorder answers ``stopped`` and stays, ready to
publish both files should the wrapper die before it has. ``published``: go. A pipe that closes without a word: the
wrapper is dead.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger(__name__)

STOP, STOPPED, PUBLISHED = "stop", "stopped", "published"


@dataclass(frozen=True, slots=True)
class SidecarOrder:
    """Everything the recorder's process needs to know; travels as JSON."""

    task_name: str
    task_id: int
    devices: list[tuple[int, str | None]]
    interval_s: float
    simulate: int | None
    simulate_script: str | None
    started_at_ms: int
    recorder_file: str
    wrapper_file: str
    publish_to: str
    local_folder: str

    @classmethod
    def read(cls, path: Path) -> SidecarOrder:
        """Read the order that the wrapper wrote."""
        return cls(**json.loads(path.read_text()))


class Sidecar:
    """One recorder process, or (after its first death) the second."""

    def __init__(self, order: SidecarOrder) -> None:
        self._order_file = Path(order.local_folder) / "recorder.json"
        self._order_file.write_text(json.dumps(asdict(order)))
        self._log_file = Path(order.local_folder) / "recorder.log"
        self._restarts_left = 1
        self._process = self._start()
        self.failure: str | None = None
        self.failed_at_ms = 0

    def check(self, now_ms: int) -> None:
        """Restart a dead recorder once; after that, go on without."""
        if self.failure is not None or self._process.poll() is None:
            return
        how = f"the recorder ended with {self._process.returncode}: {self._last_words()}"
        if self._restarts_left == 0:
            self.failure, self.failed_at_ms = how, now_ms
            log.warning("%s; the job goes on without telemetry", how)
            return
        self._restarts_left -= 1
        log.warning("%s; starting it again", how)
        self._process = self._start()

    def stop(self, timeout_s: float) -> None:
        """Ask for a last sample and wait until it is written."""
        if self._process.poll() is None:
            self._say(STOP)
            self._wait_for(STOPPED, timeout_s)

    def release(self, timeout_s: float) -> None:
        """Tell the recorder that everything is published, and see it off."""
        self._say(PUBLISHED)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("the recorder did not end in %.0f s: killing it", timeout_s)
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass  # it died with our word unread

    @property
    def pid(self) -> int:
        """The recorder's process id."""
        return self._process.pid

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log_file.open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "badcjobs.recording", str(self._order_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # a Ctrl-C in the terminal is the wrapper's business
            )

    def _say(self, word: str) -> None:
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is dead; check() or the last publication deals with that

    def _wait_for(self, word: str, timeout_s: float) -> None:
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        heard = b""
        while word.encode() not in heard:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                log.warning("the recorder did not answer in %.0f s", timeout_s)
                return
            part = os.read(self._process.stdout.fileno(), 4096)
            if not part:
                log.warning("the recorder ended before it was asked to: %s", self._last_words())
                return
            heard += part

    def _last_words(self) -> str:
        lines = self._log_file.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "(it said nothing)"
