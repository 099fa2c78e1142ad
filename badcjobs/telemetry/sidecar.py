"""The wrapper's side of the recorder: starts it as a process of its own, restarts it once, stops it in order."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from badcjobs.paths import file_version
from badcjobs.seams import Clock
from badcjobs.telemetry import recorder as protocol
from badcjobs.telemetry.alerts import Alert
from badcjobs.telemetry.recorder import SidecarOrder, Unwritten

log = logging.getLogger(__name__)

_POLL_S = 0.02
_ORPHAN_POLL_S = 0.1
_DYING_S = 2.0
_FULL_PIPE_S = 1.0
_SMALLEST_FILE = 65536
_ERROR = re.compile(
    r" recorder (ERROR|CRITICAL) |badcjobs: error: |^(Fatal Python error|[\w.]*(Error|Exception|Interrupt|Exit))\b"
)
_BEFORE_WORDS = re.compile(r"^\S+ \S+ recorder [A-Z]+ |^.*(?=badcjobs: error: )")


class Sidecar:
    """One recorder process, or (after its first death) the second; ``failure`` says why there is none any more."""

    def __init__(self, order: SidecarOrder, on_alert: Callable[[Alert], None] = lambda alert: None) -> None:
        self._order_file = Path(order.local_folder) / "recorder.json"
        self._order = order
        self._on_alert = on_alert
        self._work = protocol.WORK_NONE
        self._log_file = Path(order.local_folder) / "recorder.log"
        self._restarts_left = 1
        self.failure: str | None = None
        self.unwritten = Unwritten()
        self.over = False  # the recorder's file is not written any more
        self._process: subprocess.Popen[bytes] | None = None
        self._log_before = 0  # how much of the log an earlier recorder has written
        self._pipe: protocol.LinePipe | None = None
        self._warned = False
        self._answers: dict[str, str] = {}  # what it has said so far, by its first word
        self._start()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for the first sample, so that what comes next is recorded from its beginning."""
        if self._is_alive() and self._hear(protocol.READY, timeout_s) is None:
            log.warning("the recorder had no reading after %.0f s; going on", timeout_s)

    def check(self) -> None:
        """Restart a dead recorder once; after that, go on without."""
        while self._listen(0.0):
            pass
        if self.failure is not None or self._is_alive():
            return
        if self._restarts_left == 0:
            self._give_up(self._obituary())
            return
        self._restarts_left -= 1
        log.warning("%s; starting it again", self._obituary())
        self._start(protocol.AGAIN)
        if self._work != protocol.WORK_NONE and self._process is not None:
            self._say(self._work)

    def tell_of_work(self, waits: bool) -> None:
        """Say whether work waits for the devices, if that is news."""
        word = protocol.WORK_WAITS if waits else protocol.WORK_NONE
        if word != self._work:
            self._work = word
            self._say(word)

    def ask_for_snapshot(self, target: Path, timeout_s: float) -> bool:
        """Wait until the recorder has written ``target`` anew, and say whether it has; for any thread."""
        before, deadline_s = file_version(target), time.monotonic() + timeout_s
        self._say(f"{protocol.SNAPSHOT} {target}")
        while self._is_alive() and time.monotonic() < deadline_s:
            if file_version(target) != before:
                return True
            time.sleep(_POLL_S)
        return False

    def stop(self, timeout_s: float, *, last_copy: Path | None = None) -> None:
        """Ask for a last sample (and a last snapshot) and wait for it; a recorder that cannot give one has failed."""
        if self.failure is None:
            answer = None
            if self._is_alive():
                self._say(protocol.STOP if last_copy is None else f"{protocol.STOP} {last_copy}")
                answer = self._hear(protocol.STOPPED, timeout_s)
            if answer is not None:
                self.unwritten = Unwritten(**json.loads(answer))
                log.info("recorder: %s", self._answers.get(protocol.COST, "its cost is not known"))
            elif self._is_alive():
                self._give_up(f"the recorder did not answer in {timeout_s:.0f} s")
            else:
                self._give_up(self._obituary())
        self.over = True

    def release(self, timeout_s: float) -> None:
        """Tell the recorder that everything is published, and wait for its end."""
        if self._process is None:
            return
        self._say(protocol.PUBLISHED)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("the recorder did not end in %.0f s: killing it", timeout_s)
            self._kill()
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with suppress(OSError):  # it died with our word unread
                pipe.close()

    def _start(self, *options: str) -> None:
        try:
            self._order.write(self._order_file)
            with self._log_file.open("ab") as errors:
                self._log_before = errors.tell()
                self._answers = {}
                self._process = subprocess.Popen(
                    [sys.executable, "-m", protocol.MODULE, *options, str(self._order_file)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,  # a Ctrl-C in the terminal is the wrapper's business
                )
            assert self._process.stdin is not None and self._process.stdout is not None
            self._pipe = protocol.LinePipe(self._process.stdout.fileno(), self._process.stdin.fileno())
        except OSError as error:
            self._give_up(f"the recorder cannot be started: {error}")

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _give_up(self, why: str) -> None:
        self.failure = why
        self._kill()  # it may hang in a driver; what it has written is published
        self.over = True
        log.warning("%s; the job goes on without telemetry", why)

    def _kill(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # deep in a driver: it cannot even die, but writes no more
            self._process.wait(_DYING_S)

    def _say(self, word: str) -> None:
        if self._pipe is not None:  # a dead recorder is noticed by check() or at the last publication
            self._pipe.say(word, _FULL_PIPE_S)

    def _hear(self, word: str, timeout_s: float) -> str | None:
        """Wait for a word of the recorder and return what it adds; None: it did not come in time, or never will."""
        deadline_s = time.monotonic() + timeout_s
        while word not in self._answers:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._listen(left_s):
                return None
        return self._answers[word]

    def _listen(self, timeout_s: float) -> bool:
        """Read one line of the recorder; False: none came, or none will come any more."""
        line = None if self._pipe is None else self._pipe.next(timeout_s)
        if line == protocol.CLOSED and self._process is not None:
            self._process.wait()
        if not line:
            return False
        word, _, more = line.partition(" ")
        self._answers[word] = more
        if word == protocol.REFUSED and not self._warned:  # once: a disk on the brink refuses every other tick
            self._warned = True
            log.warning("readings cannot be written: %s; a gap will tell", more)
        elif word == protocol.TROUBLE:
            log.warning("%s", more)
        elif word == protocol.ALERT:
            try:
                alert = Alert(**json.loads(more))
            except (ValueError, TypeError):
                return True  # half a line: the database has it
            log.log(logging.INFO if alert.over else logging.WARNING, "%s", alert.words)
            with suppress(OSError):  # no terminal any more to say it on
                self._on_alert(alert)
        return True

    def _obituary(self) -> str:
        """Return why it ended, from its exit code and its log."""
        said, is_full = b"", False
        with suppress(OSError):  # our folder was removed
            said = self._log_file.read_bytes()[self._log_before :]
            disk = os.statvfs(self._log_file.parent)
            is_full = disk.f_bavail * disk.f_frsize < _SMALLEST_FILE
        why = parse_last_words(said.decode(errors="replace"))
        if is_full and not said:
            why = "there is no space left on its disk, not even for last words"
        return f"the recorder ended with {self._process and self._process.returncode}: {why}"


def parse_last_words(text: str) -> str:
    """Return the line of a recorder's log that says why it ended: its last error, else the last that is no INFO."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and " recorder INFO " not in line]
    errors = [line for line in lines if _ERROR.search(line)]
    line = (errors or lines or ["no last words"])[-1]
    return _BEFORE_WORDS.sub("", line)


def wait_for_orphans(tasks_folder: Path, clock: Clock, timeout_s: float) -> None:
    """Wait until no orphaned recorder of this machine is about to publish into the folder."""
    deadline_s = clock.monotonic_s() + timeout_s
    announced = False
    while _orphan_in(tasks_folder) and clock.monotonic_s() < deadline_s:
        if not announced:
            log.info("an earlier task was killed; waiting for its recorder to publish what it had done")
            announced = True
        clock.sleep(_ORPHAN_POLL_S)


def _orphan_in(tasks_folder: Path) -> bool:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if protocol.MODULE not in words:
            continue
        try:
            order = SidecarOrder.read(Path(words[-1]))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # its folder is gone: it has published
        if Path(order.publish_to).parent == tasks_folder and not psutil.pid_exists(order.wrapper_pid):
            return True
    return False
