"""The wrapper's side of the recorder: start it as a separate process, restart it once, stop it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from badcjobs.paths import file_version
from badcjobs.processes import PYTHON
from badcjobs.seams import Clock
from badcjobs.telemetry import recorder as protocol
from badcjobs.telemetry.alerts import Alert
from badcjobs.telemetry.recorder import SidecarOrder, Unwritten

log = logging.getLogger(__name__)

_POLL_S = 0.02
_ORPHAN_POLL_S = 0.1
_EXIT_TIMEOUT_S = 2.0
_SEND_TIMEOUT_S = 1.0


@dataclass(eq=False)
class Sidecar:
    """The recorder process, restarted once if it dies; ``failure``: why there is no recorder any more."""

    order: SidecarOrder
    listeners: Sequence[Callable[[Alert], None]]  # get each alert when it starts and when it ends
    failure: str | None = None
    unwritten: Unwritten = field(default_factory=Unwritten)
    over: bool = False  # the recorder no longer writes to its file
    _work: str = protocol.WORK_NONE
    _was_restarted: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _pipe: protocol.LinePipe | None = None

    def __post_init__(self) -> None:
        folder = Path(self.order.local_folder)
        self._order_file = folder / "recorder.json"
        self._log_file = folder / "recorder.log"
        self._answers: dict[str, str] = {}  # message → its last text
        self._start()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for the first sample, so that the work is recorded from its start."""
        if self._is_alive() and self._wait_for(protocol.READY, timeout_s) is None:
            log.warning("the recorder has no reading after %.0f s; continuing", timeout_s)

    def check(self) -> None:
        """Restart a dead recorder once; after that, continue without a recorder."""
        while self._receive(0.0):
            pass
        if self.failure is not None or self._is_alive():
            return
        if self._was_restarted:
            self._give_up(self._exit_reason())
            return
        self._was_restarted = True
        log.warning("%s; restarting it", self._exit_reason())
        self._start(protocol.AGAIN)
        if self._work != protocol.WORK_NONE and self._process is not None:
            self._send(self._work)

    def set_work_waits(self, waits: bool) -> None:
        """Send whether work waits for the devices, if that has changed."""
        message = protocol.WORK_WAITS if waits else protocol.WORK_NONE
        if message != self._work:
            self._work = message
            self._send(message)

    def request_snapshot(self, target: Path, timeout_s: float) -> None:
        """Have the recorder write ``target`` again, and wait for it. May be called by any thread."""
        before = file_version(target)
        deadline_s = time.monotonic() + timeout_s
        self._send(f"{protocol.SNAPSHOT} {target}")
        while self._is_alive() and time.monotonic() < deadline_s:
            if file_version(target) != before:
                return
            time.sleep(_POLL_S)

    def stop(self, timeout_s: float, *, last_copy: Path | None) -> None:
        """Request a last sample (and a last snapshot) and wait for it; a recorder without one has failed."""
        if self.failure is None:
            self._send(f"{protocol.STOP} {last_copy or ''}".strip())
            answer = self._wait_for(protocol.STOPPED, timeout_s)
            if answer is not None:
                self.unwritten = Unwritten(**json.loads(answer))
                log.info("recorder: %s", self._answers.get(protocol.COST, "its cost is not known"))
            elif self._is_alive():
                self._give_up(f"the recorder did not answer within {timeout_s:.0f} s")
            else:
                self._give_up(self._exit_reason())
        self.over = True

    def release(self) -> None:
        """Notify the recorder that everything is published: it exits, and does not use the live files any more."""
        self._send(protocol.PUBLISHED)

    def wait(self, timeout_s: float) -> None:
        """Wait for the exit of a released recorder; kill it if it takes too long."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("the recorder did not exit within %.0f s: killing it", timeout_s)
            self._kill()
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with suppress(OSError):  # it died before it read the message
                pipe.close()

    def _start(self, *options: str) -> None:
        python = list(PYTHON)
        if sys.pycache_prefix:
            python += ["-X", f"pycache_prefix={sys.pycache_prefix}"]
        try:
            self.order.write(self._order_file)
            with self._log_file.open("ab") as errors:
                self._answers = {}
                self._process = subprocess.Popen(
                    [*python, "-m", protocol.MODULE, *options, str(self._order_file)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,  # the wrapper handles Ctrl-C
                )
            assert self._process.stdin is not None and self._process.stdout is not None
            self._pipe = protocol.LinePipe(self._process.stdout.fileno(), self._process.stdin.fileno())
        except OSError as error:
            self._give_up(f"the recorder cannot be started: {error}")

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _give_up(self, why: str) -> None:
        self.failure = why
        self._kill()  # it may hang in a driver; the rows on disk are published
        self.over = True
        log.warning("%s; the job continues without telemetry", why)

    def _kill(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # blocked in a driver: it cannot be killed, but writes no more
            self._process.wait(_EXIT_TIMEOUT_S)

    def _send(self, message: str) -> None:
        if self._pipe is not None:  # a dead recorder is noticed by check() or at the last publication
            self._pipe.send(message, _SEND_TIMEOUT_S)

    def _wait_for(self, message: str, timeout_s: float) -> str | None:
        """Wait for a message of the recorder and return its text; None: timeout, or the pipe is closed."""
        deadline_s = time.monotonic() + timeout_s
        while message not in self._answers:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._receive(left_s):
                return None
        return self._answers[message]

    def _receive(self, timeout_s: float) -> bool:
        """Read and handle one message of the recorder; False: timeout, or the pipe is closed."""
        line = self._pipe and self._pipe.receive(timeout_s)
        if line == protocol.CLOSED and self._process is not None:
            self._process.wait()
        if not line:
            return False
        message, _, text = line.partition(" ")
        self._answers[message] = text
        if message == protocol.TROUBLE:
            log.warning("%s", text)
        elif message == protocol.ALERT:
            self._pass_on_alert(text)
        return True

    def _pass_on_alert(self, text: str) -> None:
        alert = Alert(**json.loads(text))
        log.log(logging.INFO if alert.over else logging.WARNING, "%s", alert.text)
        with suppress(OSError):  # the terminal is closed
            for listener in self.listeners:
                listener(alert)

    def _exit_reason(self) -> str:
        """Return why the recorder exited: its exit code, and the last line of its log."""
        log_text = ""
        with suppress(OSError):  # our folder was removed
            log_text = self._log_file.read_text(errors="replace")
        last_line = log_text.strip().rpartition("\n")[2]
        return f"the recorder exited with {self._process and self._process.returncode}: {last_line or 'no message'}"


def wait_for_orphans(tasks_folder: Path, clock: Clock, timeout_s: float) -> None:
    """Wait until no recorder of a killed wrapper on this machine is about to publish into the folder."""
    if not _orphan_in(tasks_folder):
        return
    log.info("an earlier task was killed; waiting for its recorder to publish its results")
    deadline_s = clock.monotonic_s() + timeout_s
    while _orphan_in(tasks_folder) and clock.monotonic_s() < deadline_s:
        clock.sleep(_ORPHAN_POLL_S)


def _orphan_in(tasks_folder: Path) -> bool:
    for process in psutil.process_iter(["cmdline"]):
        argv = process.info["cmdline"] or []
        if protocol.MODULE in argv:
            with suppress(OSError, ValueError, TypeError, KeyError):  # its folder was removed: it has published
                order = SidecarOrder.read(Path(argv[-1]))
                if Path(order.publish_to).parent == tasks_folder and not psutil.pid_exists(order.wrapper_pid):
                    return True
    return False
