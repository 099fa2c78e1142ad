"""Other people's programs that know something about devices: found, asked once, or listened to.

A program may hang in the driver, die, or say something unexpected; none of that may hold up a reading, and none of
them may outlive us."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from badcjobs.processes import bind_to_parent

_MOST_BYTES = 2**20  # of an answer
_LONGEST_LINE = 2**16  # of a stream; what comes after is not kept
_LONGEST_WORDS = 500  # of a reason


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
    """Run a program to its end and return its output.

    Raises ProgramFailed when it failed, took too long or would not stop talking.
    """
    lines: list[str] = []
    room = _MOST_BYTES

    def hear(line: str) -> bool:
        nonlocal room
        room -= len(line) + 1
        if room >= 0:
            lines.append(line)
        return True

    stream = Stream(lambda: argv, hear)
    answered = stream.wait(lambda: room < 0, timeout_s)
    stream.close()
    if room < 0:
        raise ProgramFailed(f"it said more than {_MOST_BYTES // 2**20} MiB")
    if not answered:
        raise ProgramFailed(f"no answer in {timeout_s:.2g} s")
    text = "\n".join(lines)
    if stream.exit_code != 0:
        raise ProgramFailed(in_short(text) or stream.last_words)
    return text


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
        self.exit_code: int | None = None  # None: it has not started, or not ended
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
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it has started, which has our pipe too
        self._thread.join(timeout=2)  # a program that hangs in the driver is left to it

    def _listen(self) -> None:
        try:
            argv = self._prepare()
            with self._changed:  # or close() would miss a program that is just being started
                self._process = None if self._closing else _start(argv)
            if self._process is not None:
                self._hear_out(self._process)
        except OSError as error:
            self._words.append(f"it does not start: {error.strerror}")
        except ProgramFailed as error:
            self._words.append(str(error))
        finally:
            with self._changed:
                self.ended = True
                self._changed.notify_all()

    def _hear_out(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        begins = True
        with process.stdout as pipe:
            while piece := pipe.readline(_LONGEST_LINE):
                text = piece.decode(errors="replace").strip() if begins else ""  # of a line without end, its beginning
                begins = piece.endswith(b"\n")
                if text and not self._hear(text) and (words := in_short(text)) not in self._words:
                    self._words.append(words)
                with self._changed:
                    self._changed.notify_all()
        self.exit_code = code = process.wait()
        if not self._words:
            self._words.append(f"ended with exit code {code}" if code >= 0 else f"ended by signal {-code}")


def _start(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for us
        # Slurm's signals are ignored: the last seconds count. nvidia-smi ends with TERM all the same, and is restarted.
        preexec_fn=bind_to_parent,  # takes no locks
    )
