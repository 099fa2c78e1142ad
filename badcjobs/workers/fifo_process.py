"""Talks to a program past the one that has started it, through two named pipes in a folder."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import IO

from badcjobs.seams import Process

_FINISH_S = 300.0  # a profiler writes its report when the program has ended, and that may be large


class Fifos:
    """The two pipes of a program that is started by somebody else, from its folder.

    Our own copies of its ends are kept open until the profiler has ended: without them a pipe that nobody has opened
    yet would look like one that everybody has left.
    """

    def __init__(self, place: Path) -> None:
        for name in ("in", "out"):
            os.mkfifo(place / name)
        read_out = os.open(place / "out", os.O_RDONLY | os.O_NONBLOCK)
        read_in = os.open(place / "in", os.O_RDONLY | os.O_NONBLOCK)
        self._kept = [os.open(place / "out", os.O_WRONLY), read_in]
        os.set_blocking(read_out, True)
        self.stdin: IO[bytes] = os.fdopen(os.open(place / "in", os.O_WRONLY), "wb")
        self.stdout: IO[bytes] = os.fdopen(read_out, "rb")

    def let_go(self) -> None:
        """Close our copies of the program's ends."""
        while self._kept:
            os.close(self._kept.pop())

    def close(self) -> None:
        """Close everything."""
        self.let_go()
        self.stdin.close()
        self.stdout.close()


class FifoProcess:
    """A profiler whose program talks to us past it (seams.Process)."""

    def __init__(self, process: Process, fifos: Fifos) -> None:
        self._process = process
        self._fifos = fifos
        self.pid = process.pid
        self.stdin: IO[bytes] | None = fifos.stdin
        self.stdout: IO[bytes] | None = fifos.stdout
        self.returncode: int | None = None
        threading.Thread(target=self._see_it_end, name="profiler", daemon=True).start()

    def poll(self) -> int | None:
        """Return the exit code; None: still at it."""
        self.returncode = self._process.poll()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; whoever has no patience gets some: a profiler writes its report when all is over."""
        self.returncode = self._process.wait(None if timeout is None else timeout + _FINISH_S)
        return self.returncode

    def _see_it_end(self) -> None:
        self._process.wait()
        self._fifos.let_go()
