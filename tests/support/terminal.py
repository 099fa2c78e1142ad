"""A real terminal for programs under test: a pty, and on our side an emulator that knows what is on the screen."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyte
from support.waiting import wait_for


class Terminal:
    """A program at a terminal; its keyboard and its screen are ours."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, *, columns: int = 80, lines: int = 24
    ) -> None:
        self._ours, self._theirs = pty.openpty()
        self.screen = pyte.Screen(columns, lines)
        self._stream, self.raw = pyte.ByteStream(self.screen), b""
        self.resize(columns, lines)
        self.before = self.settings
        self.process = subprocess.Popen(
            argv, stdin=self._theirs, stdout=self._theirs, stderr=self._theirs, env={"TERM": "xterm-256color", **env},
            cwd=cwd, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that a new size reaches it as a signal
        )  # fmt: skip
        self.send = self.process.send_signal

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
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self, patience_s: float) -> str:
        """Take what comes next; wait no longer than this for it. Return what is on the screen."""
        if select.select([self._ours], [], [], patience_s)[0]:
            found = os.read(self._ours, 65536)
            self.raw += found
            self._stream.feed(found)
        return self.text

    def wait_for(self, look: Callable[[str], object], what: str, timeout_s: float = 60) -> str:
        """Wait until the screen shows something, and return what is on it."""
        try:
            wait_for(lambda: look(self.read(0.05)), what, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; on the screen:\n{self.text}") from None
        return self.text

    def end(self) -> int:
        """Wait for the program's end and return its exit code."""
        self.wait_for(lambda text: self.process.poll() is not None, "its end")
        while select.select([self._ours], [], [], 0.05)[0]:
            self.read(0.0)
        return self.process.returncode

    def hang_up(self) -> None:
        """Close the terminal under the program."""
        os.close(self._ours)
        os.close(self._theirs)
        self._ours = self._theirs = -1

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._ours >= 0:
            self.hang_up()
