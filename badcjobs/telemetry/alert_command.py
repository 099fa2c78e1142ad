"""The program that is run when an alert begins or ends: its input, its variables, and its end in any case."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from badcjobs.telemetry.alert_hooks import TIMEOUT_S, News, variables_of

log = logging.getLogger(__name__)

_DYING_S = 0.5
_LOOK_S = 0.02
_HEARD_AT_ONCE = 65536  # at each look: one that shouts without end costs us next to nothing
_KEPT = 4096  # the last words are enough
_LONGEST_COMPLAINT = 200
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class Command:
    """A program that gets the news as JSON on its input, and as variables; without a shell."""

    name = "command"

    def __init__(self, words: list[str], environ: Mapping[str, str], cwd: Path) -> None:
        self._words = words
        self._environ = environ
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        if shutil.which(cwd / words[0] if os.sep in words[0] else words[0], path=environ.get("PATH")) is None:
            log.warning("[alerts] command: there is no program %s here, so alerts are not told to it", words[0])

    def tell(self, news: News) -> str | None:
        """Run it to its end, or for as long as we wait for anybody."""
        try:
            process = subprocess.Popen(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**self._environ, **variables_of(news)},
                cwd=self._cwd,
                start_new_session=True,  # a Ctrl-C is not meant for it, and all it starts can be ended with it
                preexec_fn=_die_with_us,  # no locks
            )
        except (OSError, ValueError) as error:
            return f"it cannot be started: {getattr(error, 'strerror', None) or error}"
        self._process = process
        if self._stopped:
            self.stop()
        _hand_over(process, json.dumps(news).encode())
        said = _listen(process, time.monotonic() + TIMEOUT_S)
        return self._end(process, said)

    def stop(self) -> None:
        """Kill it, with all that it has started."""
        self._stopped = True
        process = self._process  # the other thread may be done with it at any moment
        if process is not None:
            _kill_group(process.pid)

    def _end(self, process: subprocess.Popen[bytes], said: bytes) -> str | None:
        ended = _has_ended(process)
        _kill_group(process.pid)  # before it is waited for: until then nobody else gets its number
        self._process = None
        try:
            process.wait(_DYING_S)
        except subprocess.TimeoutExpired:
            pass  # deep in a filesystem that hangs
        if process.stderr is not None:
            process.stderr.close()
        code = process.returncode
        if not ended:
            return f"it did not end in {TIMEOUT_S:.0f} s and was killed"
        words = said.decode(errors="replace").strip().splitlines()[-1:]
        return None if code == 0 else ": ".join([f"it ended with {code}", *(w[:_LONGEST_COMPLAINT] for w in words)])


def _hand_over(process: subprocess.Popen[bytes], news: bytes) -> None:
    """Write the news; they are far shorter than a pipe holds, so nobody waits for somebody to read them."""
    assert process.stdin is not None
    try:
        process.stdin.write(news)
        process.stdin.close()
    except OSError:
        pass  # it does not want to know


def _listen(process: subprocess.Popen[bytes], until_s: float) -> bytes:
    """Return the last words of a program that has ended, or whose time is over, whoever still holds its output."""
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    heard = b""
    while True:
        over = _has_ended(process) or time.monotonic() >= until_s  # asked first: then nothing is said any more
        try:
            heard = (heard + os.read(process.stderr.fileno(), _HEARD_AT_ONCE))[-_KEPT:]
        except BlockingIOError:
            pass
        if over:
            return heard
        time.sleep(_LOOK_S)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Say whether it has, and leave its number to it."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True  # somebody who waits for every child was quicker


def _die_with_us() -> None:
    """Die with the thread that started us, even by SIGKILL."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except OSError:
        pass  # nobody is left
