"""A real terminal for programs under test: a pty, and on our side an emulator that knows what is on the screen."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyte


class Terminal:
    """A program at a terminal; its keyboard and its screen are ours."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, *, columns: int = 80, lines: int = 24
    ) -> None:
        self._ours, theirs = pty.openpty()
        self._theirs = theirs
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._set_size(columns, lines)
        self.before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, env={"TERM": "xterm-256color", **env}, cwd=cwd,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that a new size reaches it as a signal
        )  # fmt: skip

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    @property
    def settings(self) -> list[Any]:
        """How the terminal treats keys now."""
        return termios.tcgetattr(self._theirs)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        self.screen.resize(lines, columns)
        self._set_size(columns, lines)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self, patience_s: float) -> None:
        """Take what comes next; wait no longer than this for it."""
        if not select.select([self._ours], [], [], patience_s)[0]:
            return
        try:
            found = os.read(self._ours, 65536)
        except OSError:
            return  # the last one to write has gone
        self.raw += found
        self._stream.feed(found)

    def wait_for(self, look: Callable[[str], object], what: str, timeout_s: float = 60) -> str:
        """Wait until the screen shows something, and return what is on it."""
        deadline_s = time.monotonic() + timeout_s
        while not look(self.text):
            assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}; on the screen:\n{self.text}"
            self.read(0.05)
        return self.text

    def end(self, timeout_s: float = 60) -> int:
        """Wait for the program's end and return its exit code."""
        self.wait_for(lambda text: self.process.poll() is not None, "its end", timeout_s)
        while select.select([self._ours], [], [], 0.05)[0]:
            self.read(0.0)
        return self.process.returncode

    def hang_up(self) -> None:
        """Close the terminal under the program."""
        os.close(self._ours)
        os.close(self._theirs)
        self._ours = self._theirs = -1

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._ours >= 0:
            self.hang_up()
