"""Call a Python function, or run the user's alert command, when an alert starts or ends."""

from __future__ import annotations

import json
import logging
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from badcjobs.model import AlertHooks
from badcjobs.processes import die_with_parent
from badcjobs.seams import Clock, Environ
from badcjobs.telemetry.alerts import Alert

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0  # for each call
Document = Mapping[str, object]

_MOST_PER_HOUR = 20
_HOUR_S = 3600.0
_FINISH_TIMEOUT_S = 1.75  # at the end of a task
_KILL_TIMEOUT_S = 0.25
_PIPE_BYTES = 65536
_LONGEST_ERROR = 200
_CHAT_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})  # a chat would read them as links and mentions
_COPIED = ("kind", "severity", "message", "peak", "threshold", "started_at_ms", "ended_at_ms")
_VARIABLES = ("kind", "severity", "device", "task", "message", "peak", "threshold", "state")


@dataclass(eq=False)
class AlertCalls:
    """Calls a function for one alert after another, in a separate thread that starts with the first alert."""

    call: Callable[[Any], object]
    name: str = "on_alert"
    _thread: threading.Thread | None = None  # most tasks never have an alert

    def __post_init__(self) -> None:
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def add(self, alert: Any) -> None:
        """Call the function for this alert soon, without waiting for it."""
        self._waiting.put(alert)
        if self._thread is None:
            self._thread = threading.Thread(target=self._call_each, name=f"badcjobs {self.name}", daemon=True)
            self._thread.start()

    def finish(self, timeout_s: float = 5.0) -> bool:
        """Wait some seconds for the pending calls; return whether all were made."""
        self._waiting.put(None)
        if self._thread is None or threading.current_thread() is self._thread:  # on_alert may stop the recorder itself
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _call_each(self) -> None:
        while True:
            alert = self._waiting.get()
            if alert is None:
                return
            try:
                self.call(alert)
            except BaseException:  # broad: user code; exit() in it must not end the program
                if sys.is_finalizing():
                    raise
                log.exception("%s failed; the recording continues", self.name)


@dataclass(eq=False)
class AlertCommand:
    """Runs the user's program for one alert after another, without a shell; it gets a JSON document on stdin.

    Calls beyond the limit are left out, and the next call has their number.
    """

    hooks: AlertHooks
    task: str
    clock: Clock
    environ: Environ
    cwd: Path
    _process: subprocess.Popen[bytes] | None = None  # the last one
    _held_back: int = 0
    _failed: bool = False  # a failure is logged once
    _stopped: bool = False

    def __post_init__(self) -> None:
        self._budget = CallBudget(self.hooks.min_interval_s)
        self._calls = AlertCalls(self._call, "[alerts] command")
        program = shlex.split(self.hooks.command or "")[0]
        if os.sep in program:
            program = str(self.cwd / program)
        if shutil.which(program, path=self.environ.get("PATH")) is None:
            log.warning("[alerts] command: program %s not found; alerts are not sent to it", program)

    def add(self, alert: Alert) -> None:
        """Run the program for this alert soon, unless that would be too often; do not wait for it."""
        if not self._budget.allows(alert, self.clock.monotonic_s()):
            self._held_back += 1
            return
        self._calls.add(alert_document(alert, self.task, self._held_back))
        self._held_back = 0

    def finish(self) -> None:
        """Wait a moment for the pending calls; then kill the program and all processes that it has started."""
        if not self._calls.finish(_FINISH_TIMEOUT_S):
            log.warning("alert calls were still running at the end and were cancelled")
            self._stopped = True
            if self._process is not None:
                _kill_group(self._process)
            self._calls.finish(_KILL_TIMEOUT_S)

    def _call(self, document: Document) -> None:
        if self._stopped:
            return
        trouble = self._run(document)
        if trouble is not None and not self._failed and not self._stopped:
            self._failed = True
            log.warning("[alerts] command: %s; further failures are not logged; the work continues", trouble)

    def _run(self, document: Document) -> str | None:
        """Run the program to its end, or for TIMEOUT_S; return what went wrong."""
        try:
            process = self._process = subprocess.Popen(
                shlex.split(self.hooks.command or ""),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,  # a program that fills the pipe waits, and is killed
                env={**self.environ, **alert_variables(document)},
                cwd=self.cwd,
                start_new_session=True,  # Ctrl-C does not reach it, and all its processes can be killed together
                preexec_fn=die_with_parent,  # safe with threads: it takes no locks
            )
        except (OSError, ValueError) as error:
            return f"it cannot be started: {getattr(error, 'strerror', None) or error}"
        assert process.stdin is not None and process.stderr is not None
        with suppress(OSError):  # it does not read its input
            process.stdin.write(json.dumps(document).encode())  # shorter than the buffer of a pipe: never blocks
            process.stdin.close()
        exit_code = None
        with suppress(subprocess.TimeoutExpired):
            exit_code = process.wait(TIMEOUT_S)
        _kill_group(process)
        os.set_blocking(process.stderr.fileno(), False)
        output = b""
        with suppress(BlockingIOError), process.stderr as errors:
            output = os.read(errors.fileno(), _PIPE_BYTES)
        if exit_code == 0:
            return None
        if exit_code is None:
            return f"it did not exit within {TIMEOUT_S:.0f} s and was killed"
        last_line = output.decode(errors="replace").strip().rpartition("\n")[2]
        return f"it exited with {exit_code}: {last_line[:_LONGEST_ERROR] or 'no error message'}"


class CallBudget:
    """Limits the number of calls: people ignore alerts that come too often."""

    def __init__(self, min_interval_s: float) -> None:
        self._min_interval_s = min_interval_s
        self._last_begin_s: dict[tuple[int, str], float] = {}  # by device and kind
        self._announced: set[tuple[int, str, int, str]] = set()
        self._calls_s: deque[float] = deque(maxlen=_MOST_PER_HOUR)

    def allows(self, alert: Alert, at_s: float) -> bool:
        """Return whether to call for this alert, and count it; its end is sent only if its start was."""
        name = (alert.device_id, alert.kind, alert.started_at_ms, alert.message)
        place = (alert.device_id, alert.kind)
        if alert.over:
            is_due = name in self._announced
        else:
            is_due = at_s - self._last_begin_s.get(place, -inf) >= self._min_interval_s
        self._announced.discard(name)
        is_full = len(self._calls_s) == _MOST_PER_HOUR and at_s - self._calls_s[0] < _HOUR_S
        if not is_due or is_full:
            return False
        self._calls_s.append(at_s)
        if not alert.over:
            self._announced.add(name)
            self._last_begin_s[place] = at_s
        return True


def alert_document(alert: Alert, task: str, held_back: int) -> dict[str, object]:
    """Return the JSON document of a call; ``held_back``: calls that were left out since the last one."""
    text = f"badcjobs {task}: {alert.severity} {alert.text}"
    if held_back:
        text += f" ({held_back} more held back)"
    return {
        "text": text.translate(_CHAT_ESCAPES),
        "state": "end" if alert.over else "begin",
        "device": alert.device_uuid if alert.device_index is None else alert.device_index,
        "uuid": alert.device_uuid,
        "task": task,
        **{name: getattr(alert, name) for name in _COPIED},
        "held_back": held_back,
    }


def alert_variables(document: Document) -> dict[str, str]:
    """Return the document as environment variables; unknown values are empty."""
    variables = {}
    for name in _VARIABLES:
        value = "" if document[name] is None else str(document[name])
        variables[f"BADCJOBS_ALERT_{name.upper()}"] = value.replace("\0", "")
    return variables


def _kill_group(leader: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):  # all have exited
        os.killpg(leader.pid, signal.SIGKILL)
