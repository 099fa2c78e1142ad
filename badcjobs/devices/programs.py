"""Run the programs of GPU vendors, nvidia-smi and dcgmi: once, or as a stream of lines.

A program may hang in the driver, crash, or print something unexpected. This must not delay a reading, and no program
may outlive us.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

_MOST_LINES = 10_000  # of the output of run_program
_LONGEST_LINE = 2**16  # of a stream; a longer one counts as several
_LONGEST_REASON = 500  # characters


class ProgramFailed(Exception):
    """A program failed; the text is the reason, with the program's own message if it has one."""


def find_program(name: str, search_path: str | None) -> str | None:
    """Return the path of a program; None if it is not found, or without a search path."""
    if not search_path:
        return None  # which() takes None for our own PATH
    return shutil.which(name, path=search_path)


def one_line(text: str) -> str:
    """Return the output of a program as one printable line of limited length."""
    printable = "".join(c if c.isprintable() else " " for c in text[: 2 * _LONGEST_REASON])
    line = " ".join(printable.split())
    if len(line) <= _LONGEST_REASON:
        return line
    return line[:_LONGEST_REASON] + "…"


def run_program(argv: Sequence[str], timeout_s: float = 5) -> str:
    """Run a program to its end and return its output.

    Raises ProgramFailed if it fails, takes too long or prints too much.
    """
    lines: list[str] = []

    def on_line(line: str) -> bool:
        lines.append(line)
        return True

    stream = Stream(lambda: argv, on_line)
    answered = stream.wait(lambda: len(lines) > _MOST_LINES, timeout_s)
    stream.close()
    if len(lines) > _MOST_LINES:
        raise ProgramFailed(f"it printed more than {_MOST_LINES} lines")
    if not answered:
        raise ProgramFailed(f"no answer in {timeout_s:.2g} s")
    text = "\n".join(lines)
    if stream.exit_code != 0:
        raise ProgramFailed(one_line(text) or stream.last_message)
    return text


@dataclass(eq=False)
class Stream:
    """Runs a program in a thread and passes on each line of its output.

    ``prepare`` returns the command line; it runs in the thread too and may be slow. ``on_line`` gets a line and returns
    whether it could parse it; other lines are kept for ``last_message``.
    """

    prepare: Callable[[], Sequence[str]]
    on_line: Callable[[str], bool]
    ended: bool = False
    exit_code: int | None = None  # None: it has not started, or not ended
    _process: subprocess.Popen[bytes] | None = None
    _closing: bool = False

    def __post_init__(self) -> None:
        self._messages: deque[str] = deque(maxlen=8)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="badcjobs-stream", daemon=True)
        self._thread.start()

    @property
    def last_message(self) -> str:
        """The last lines that could not be parsed, or how the program ended."""
        return " ".join(self._messages)

    def wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the condition is true or the program has ended; return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: until() or self.ended, timeout_s)

    def close(self) -> None:
        """Kill the program if it runs."""
        with self._changed:
            self._closing = True
            process = self._process
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children, which have our pipe too
        self._thread.join(timeout=2)  # do not wait for a program that hangs in the driver

    def _run(self) -> None:
        try:
            argv = self.prepare()
            with self._changed:  # else close() could miss a program that is just starting
                if self._closing:
                    return
                self._process = _start(argv)
            self._read_lines(self._process)
        except OSError as error:
            self._messages.append(f"it does not start: {error.strerror}")
        except ProgramFailed as error:
            self._messages.append(str(error))
        finally:
            with self._changed:
                self.ended = True
                self._changed.notify_all()

    def _read_lines(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as pipe:
            while line := pipe.readline(_LONGEST_LINE):
                text = line.decode(errors="replace").strip()
                if text and not self.on_line(text) and one_line(text) not in self._messages:
                    self._messages.append(one_line(text))
                with self._changed:
                    self._changed.notify_all()
        self.exit_code = process.wait()
        if not self._messages:
            self._messages.append(f"ended with exit code {self.exit_code}")


def _start(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    from badcjobs.processes import bind_to_parent  # late: a recorder that starts no program stays smaller

    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C must not reach it
        # It ignores Slurm's signals, to record the last seconds too. nvidia-smi ends with TERM anyway; it is restarted.
        preexec_fn=bind_to_parent,  # takes no locks
    )
