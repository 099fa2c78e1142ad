"""The processes of an emulated job: how they are found and ended, also if the emulation itself is killed.

A process belongs to a task if it carries the task's mark, is in its session, or descends from one that is. A nested
emulation adds its own mark behind the outer one, so that ending the outer task reaches the inner ones, too.

The watcher is a process of its own, which notices by a closed socket that the emulation is gone. The kernel's own help
(PDEATHSIG) reaches a task's first process only; a shell that did not ``exec`` has others.
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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "BADCJOBS_EMULATION"
_POLL_S = 0.2
_MOST_BYTES, _MOST_FILES = 65_536, 253  # more files than that no message of Linux carries


def processes_of(mark: str, session: int | None = None) -> list[psutil.Process]:
    """Return the living processes with this mark, or of this session, and whatever they have started."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # gone meanwhile, or of another user
            value = process.environ().get(MARK, "")
            belongs = value == mark or value.startswith(f"{mark}/") or os.getsid(process.pid) == session
            if belongs and process.pid not in found:
                found |= {one.pid: one for one in (process, *process.children(recursive=True))}
    found.pop(os.getpid(), None)
    living = []
    for process in found.values():
        with suppress(psutil.Error):
            living += [process] if process.status() != psutil.STATUS_ZOMBIE else []
    return living


def send(processes: Iterable[psutil.Process], *signums: signal.Signals) -> None:
    """Send signals to processes that may have ended."""
    for process in processes:
        for signum in signums:
            try:
                process.send_signal(signum)
            except (psutil.Error, OSError):
                break  # gone meanwhile


class Watcher:
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
    with suppress(ConnectionError):
        while (message := socket.recv_fds(line, _MOST_BYTES, _MOST_FILES))[0]:
            for file in kept:
                os.close(file)
            kept = message[1]
    kill_at_s = time.monotonic() + grace_s
    send(processes_of(mark), signal.SIGCONT, signal.SIGTERM)
    while left := processes_of(mark):
        if time.monotonic() >= kill_at_s:
            send(left, signal.SIGKILL)
        time.sleep(_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
