"""A process beside an emulation that ends its tasks if it is killed: the kernel tells it by closing a socket.

The kernel's own help (PDEATHSIG) reaches a task's first process only; a shell that did not ``exec`` has others.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from badcjobs.scheduler.local_processes import processes_of, send

_POLL_S = 0.2
_MOST_BYTES, _MOST_FILES = 65_536, 253  # more files than that no message of Linux carries


class Watch:
    """The process, seen from the emulation: ``dismiss`` lets it go, the end of the emulation sets it to work."""

    def __init__(self, mark: str, grace_s: float, folder: Path, environ: Mapping[str, str]) -> None:
        # Messages stay apart (SEQPACKET) and may carry open files.
        self._line, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=its_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(environ),
                start_new_session=True,  # a Ctrl-C in the terminal is not for it
            )
        self._line.setblocking(False)
        self._send(json.dumps([mark, grace_s, str(folder)]).encode())

    def keep(self, files: Sequence[int]) -> None:
        """Have it hold these open files, and none of those before: the locks in them outlive this process."""
        self._send(b"keep", files)

    def release(self) -> None:
        """Set it to work now."""
        self._line.close()

    def dismiss(self) -> None:
        """Let it go: the emulation has come to its own end."""
        self._process.kill()
        self._process.wait()
        self.release()

    def _send(self, words: bytes, files: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._line, [words], list(files))
        except OSError:
            pass  # it was killed, or stopped; the tasks have PDEATHSIG besides


def main() -> None:
    """Wait for the end of the emulation; end what it leaves, in order, and remove its folder.

    Until the last process of its tasks is gone their devices stay locked: this process has the open files.
    """
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    line = socket.socket(fileno=sys.stdin.fileno())
    mark, grace_s, folder = json.loads(line.recv(_MOST_BYTES))
    kept: list[int] = []
    while words := _receive(line):
        for file in kept:
            os.close(file)
        kept = words[1]
    end_all(mark, grace_s)
    shutil.rmtree(folder, ignore_errors=True)


def _receive(line: socket.socket) -> tuple[bytes, list[int]] | None:
    """Return the next message and the files in it; None: there is nobody any more."""
    try:
        words, files, _, _ = socket.recv_fds(line, _MOST_BYTES, _MOST_FILES)
    except ConnectionError:
        return None
    return (words, files) if words else None


def end_all(mark: str, grace_s: float) -> None:
    """Send CONT and TERM to everybody with this mark, after a grace KILL, until nobody is left."""
    kill_at_s = time.monotonic() + grace_s
    send(processes_of(mark), signal.SIGCONT, signal.SIGTERM)
    while left := processes_of(mark):
        if time.monotonic() >= kill_at_s:
            send(left, signal.SIGKILL)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
