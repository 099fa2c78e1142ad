"""Other people's programs that know something about devices: found, asked once, or listened to.

A program may hang in the driver, die, or say something unexpected; none of that may hold up a reading, and none of
them may outlive us.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_IGNORED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class ProgramFailed(Exception):
    """A program did not answer; the text says why, in its own words where it had any."""


def find_program(name: str, search_path: str | None) -> str | None:
    """Return where a program lies; without a search path nothing is found."""
    return shutil.which(name, path=search_path) if search_path else None  # None would mean our own PATH


def ask(argv: Sequence[str], timeout_s: float = 20) -> str:
    """Run a program to its end and return what it said; raise ProgramFailed when it failed or took too long."""
    try:
        process = _start(argv)
    except OSError as error:
        raise ProgramFailed(f"it does not start: {error.strerror}") from error
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        process.kill()  # not waited for: one that hangs in the driver does not even die of this
        raise ProgramFailed(f"no answer in {timeout_s:g} s") from error
    if process.returncode != 0:
        raise ProgramFailed(_one_line(text) or _how_it_ended(process.returncode))
    return text


class Stream:
    """A program that keeps talking, heard line by line in a thread of its own.

    ``prepare`` returns its command line, and may take its time: it runs in that thread too. ``hear`` takes a line and
    says whether it understood it; what it did not is kept for ``last_words``.
    """

    def __init__(self, prepare: Callable[[], Sequence[str]], hear: Callable[[str], bool]) -> None:
        self._prepare = prepare
        self._hear = hear
        self._process: subprocess.Popen[str] | None = None
        self._words: deque[str] = deque(maxlen=8)
        self._changed = threading.Condition()
        self._closing = False
        self.ended = False
        self._thread = threading.Thread(target=self._listen, name="badcjobs-listener", daemon=True)
        self._thread.start()

    @property
    def last_words(self) -> str:
        """What it said last that was no reading, or how it ended."""
        return " ".join(self._words)

    def wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the condition holds or the program has ended; return whether one of them is so."""
        with self._changed:
            return self._changed.wait_for(lambda: until() or self.ended, timeout_s)

    def close(self) -> None:
        """End the program, if it runs."""
        with self._changed:
            self._closing = True
            process = self._process
        if process is not None:
            process.kill()
        self._thread.join(timeout=2)  # a program that hangs in the driver is left to it

    def _listen(self) -> None:
        try:
            argv = self._prepare()
            process = self._begin(argv)
            if process is not None:
                self._hear_out(process)
        except OSError as error:
            self._words.append(f"it does not start: {error.strerror}")
        except ProgramFailed as error:
            self._words.append(str(error))
        finally:
            with self._changed:
                self.ended = True
                self._changed.notify_all()

    def _begin(self, argv: Sequence[str]) -> subprocess.Popen[str] | None:
        with self._changed:  # or close() would miss a program that is just being started
            if not self._closing:
                self._process = _start(argv)
            return self._process

    def _hear_out(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                text = line.strip()
                if text and not self._hear(text) and text not in self._words:
                    self._words.append(text)
                with self._changed:
                    self._changed.notify_all()
        code = process.wait()
        if not self._words:
            self._words.append(_how_it_ended(code))


def _start(argv: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for us
        preexec_fn=_die_with_us,  # no locks
    )


def _die_with_us() -> None:
    """Die with the thread that started us, even by SIGKILL, and not by Slurm's TERM: the last seconds count.

    nvidia-smi listens to TERM all the same, and is started again.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)


def _how_it_ended(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"ended by signal {-code}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
