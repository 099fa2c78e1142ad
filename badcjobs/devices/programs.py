"""Other people's programs that know something about devices: found, asked once, or listened to.

A program may hang in the driver, die, or say something unexpected; none of that may hold up a reading, and none of
them may outlive us."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import IO

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_MOST_BYTES = 2**20  # of an answer
_LONGEST_LINE = 2**16  # of a stream; what comes after is not kept
_LONGEST_WORDS = 500  # of a reason
_IGNORED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class ProgramFailed(Exception):
    """A program did not answer; the text says why, in its own words where it had any."""


def find_program(name: str, search_path: str | None) -> str | None:
    """Return where a program lies; without a search path nothing is found."""
    return shutil.which(name, path=search_path) if search_path else None  # None would mean our own PATH


def in_short(text: str) -> str:
    """Return what a program said as one line for a log: printable, and not without end."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * _LONGEST_WORDS]).split())
    return line if len(line) <= _LONGEST_WORDS else line[:_LONGEST_WORDS] + "…"


def ask(argv: Sequence[str], timeout_s: float = 5) -> str:
    """Run a program to its end and return what it said.

    Raises ProgramFailed when it failed, took too long or would not stop talking.
    """
    try:
        process = _start(argv)
    except OSError as error:
        raise ProgramFailed(f"it does not start: {error.strerror}") from error
    try:
        text = _hear_to_the_end(process, timeout_s)
    except ProgramFailed:
        process.kill()
        _has_ended(process, time.monotonic())  # hardly waited for: one that hangs in the driver does not die of this
        raise
    if process.returncode != 0:
        raise ProgramFailed(in_short(text) or _how_it_ended(process.returncode))
    return text


def _hear_to_the_end(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    assert process.stdout is not None
    end_s = time.monotonic() + timeout_s
    said = bytearray()
    with process.stdout as pipe:
        ready = select.poll()
        ready.register(pipe, select.POLLIN)
        while ready.poll(max(0.0, end_s - time.monotonic()) * 1000):
            piece = os.read(pipe.fileno(), _LONGEST_LINE)
            said += piece
            if len(said) > _MOST_BYTES:
                raise ProgramFailed(f"it said more than {_MOST_BYTES // 2**20} MiB")
            if not piece and _has_ended(process, end_s):
                return said.decode(errors="replace")
            if not piece:
                break
    raise ProgramFailed(f"no answer in {timeout_s:.3g} s")


def _has_ended(process: subprocess.Popen[bytes], end_s: float) -> bool:
    try:
        process.wait(max(0.05, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


class Stream:
    """A program that keeps talking, heard line by line in a thread of its own.

    ``prepare`` returns its command line, and may take its time: it runs in that thread too. ``hear`` takes a line and
    says whether it understood it; what it did not is kept for ``last_words``.
    """

    def __init__(self, prepare: Callable[[], Sequence[str]], hear: Callable[[str], bool]) -> None:
        self._prepare = prepare
        self._hear = hear
        self._process: subprocess.Popen[bytes] | None = None
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

    def _begin(self, argv: Sequence[str]) -> subprocess.Popen[bytes] | None:
        with self._changed:  # or close() would miss a program that is just being started
            if not self._closing:
                self._process = _start(argv)
            return self._process

    def _hear_out(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as pipe:
            for text in _lines(pipe):
                if text and not self._hear(text) and (words := in_short(text)) not in self._words:
                    self._words.append(words)
                with self._changed:
                    self._changed.notify_all()
        code = process.wait()
        if not self._words:
            self._words.append(_how_it_ended(code))


def _lines(pipe: IO[bytes]) -> Iterator[str]:
    """Yield what is said line by line; of a line without end, its beginning."""
    begins = True
    while piece := pipe.readline(_LONGEST_LINE):
        if begins:
            yield piece.decode(errors="replace").strip()
        begins = piece.endswith(b"\n")


def _start(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
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
