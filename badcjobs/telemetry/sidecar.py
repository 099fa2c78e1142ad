"""The wrapper's hand on its recorder: starts it as a process of its own, restarts it once, stops it in order.

They talk in words over pipes. ``ready``: the first sample is taken. ``stop``: take a last sample; the recorder answers
``stopped`` and stays, ready to publish both files should the wrapper die before it has. ``published``: go. A pipe that
closes without a word: the wrapper is dead.
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

MODULE, AGAIN = "badcjobs.recording", "--again"
READY, STOP, STOPPED, PUBLISHED = "ready", "stop", "stopped", "published"


@dataclass(frozen=True, slots=True)
class SidecarOrder:
    """Everything the recorder's process needs to know; travels as JSON."""

    mark: str
    task_id: int
    wrapper_pid: int
    devices: list[tuple[int, str | None]]
    interval_s: float
    simulate: int | None
    simulate_script: str | None
    started_at_ms: int
    asked_at_ms: int
    recorder_file: str
    wrapper_file: str
    publish_to: str
    local_folder: str

    @classmethod
    def read(cls, path: Path) -> SidecarOrder:
        """Read the order that the wrapper wrote."""
        return cls(**json.loads(path.read_text()))


class Sidecar:
    """One recorder process, or (after its first death) the second; ``failure`` says why there is none any more."""

    def __init__(self, order: SidecarOrder) -> None:
        self._order_file = Path(order.local_folder) / "recorder.json"
        self._order = order
        self._log_file = Path(order.local_folder) / "recorder.log"
        self._restarts_left = 1
        self.failure: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._heard = b""
        self._start()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for the first sample, so that what comes next is recorded from its beginning."""
        if self._is_alive() and not self._hear(READY, timeout_s):
            log.warning("the recorder had no reading after %.0f s; going on", timeout_s)

    def check(self) -> None:
        """Restart a dead recorder once; after that, go on without."""
        if self.failure is not None or self._is_alive():
            return
        if self._restarts_left == 0:
            self._give_up(self._obituary())
            return
        self._restarts_left -= 1
        log.warning("%s; starting it again", self._obituary())
        self._start(AGAIN)

    def stop(self, timeout_s: float) -> None:
        """Ask for a last sample and wait until it is written; a recorder that cannot give one has failed."""
        if self.failure is None and self._is_alive():
            self._say(STOP)
            if not self._hear(STOPPED, timeout_s):
                self._give_up(
                    f"the recorder did not answer in {timeout_s:.0f} s" if self._is_alive() else self._obituary()
                )
        elif self.failure is None:
            self._give_up(self._obituary())

    def release(self, timeout_s: float) -> None:
        """Tell the recorder that everything is published, and see it off."""
        if self._process is None:
            return
        if self.failure is not None:
            self._process.kill()  # it may hang in a driver; what it has written is published
        self._say(PUBLISHED)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("the recorder did not end in %.0f s: killing it", timeout_s)
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass  # it died with our word unread

    def _start(self, *options: str) -> None:
        try:
            self._order_file.write_text(json.dumps(asdict(self._order)))
            with self._log_file.open("ab") as errors:
                self._heard = b""
                self._process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, *options, str(self._order_file)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,  # a Ctrl-C in the terminal is the wrapper's business
                )
        except OSError as error:
            self._give_up(f"the recorder cannot be started: {error}")

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _give_up(self, why: str) -> None:
        self.failure = why
        log.warning("%s; the job goes on without telemetry", why)

    def _say(self, word: str) -> None:
        try:
            assert self._process is not None and self._process.stdin is not None
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is dead; check() or the last publication deals with that

    def _hear(self, word: str, timeout_s: float) -> bool:
        """Wait for a word of the recorder; False when it did not come in time, or never will."""
        assert self._process is not None and self._process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while word.encode() not in self._heard.split():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                return False
            part = os.read(self._process.stdout.fileno(), 4096)
            if not part:
                self._process.wait()
                return False
            self._heard += part
        return True

    def _obituary(self) -> str:
        code = None if self._process is None else self._process.returncode
        return f"the recorder ended with {code}: {self._last_words()}"

    def _last_words(self) -> str:
        try:
            lines = self._log_file.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []  # somebody has tidied up our folder
        return lines[-1] if lines else "(it said nothing)"
