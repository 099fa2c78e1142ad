"""Find and end the processes of an emulated job, even if the emulation itself is killed.

A process belongs to a task if it has the task's mark in its environment, is in the task's session, or descends from
such a process. A nested emulation appends its mark to the outer one, so that ending the outer task ends the inner ones.

The watcher is a separate process. A closed socket shows it that the emulation has ended. PDEATHSIG would reach only a
task's first process; a shell that did not ``exec`` has children.
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
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from badcjobs.errors import BadInput
from badcjobs.processes import PYTHON
from badcjobs.seams import Environ
from badcjobs.store.run_lock import emulated_command, emulation_lock

MARK = "BADCJOBS_EMULATION"
_POLL_S = 0.2
_TRIES = 20
_MOST_BYTES, _MOST_FILES = 65_536, 253  # Linux passes at most 253 files in one message


def processes_of(mark: str, session: int | None = None) -> list[psutil.Process]:
    """Return the running processes with this mark or in this session, with their children."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            value = process.environ().get(MARK, "")
            belongs = value == mark or value.startswith(f"{mark}/") or os.getsid(process.pid) == session
            if belongs and process.pid not in found:
                found |= {one.pid: one for one in (process, *process.children(recursive=True))}
    found.pop(os.getpid(), None)
    living = []
    for process in found.values():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def send(processes: Iterable[psutil.Process], *signums: signal.Signals) -> None:
    """Send signals to processes that may have ended."""
    for process in processes:
        for signum in signums:
            try:
                process.send_signal(signum)
            except (psutil.Error, OSError):
                break  # it has ended


class Watcher:
    """The watcher process, as the emulation uses it: it acts when the emulation ends, unless it is dismissed."""

    def __init__(self, mark: str, grace_s: float, folder: Path, environ: Environ) -> None:
        # SEQPACKET keeps messages separate and can pass open files.
        self._line, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            self._process = subprocess.Popen(
                [*PYTHON, "-m", __name__],
                stdin=its_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(environ),
                start_new_session=True,  # Ctrl-C in the terminal must not end it
            )
        self._line.setblocking(False)
        self._send(json.dumps([mark, grace_s, str(folder)]).encode())

    def keep(self, files: Sequence[int], run: Path | None) -> None:
        """Pass it these open files, in place of earlier ones, and the run folder: both stay locked after a kill."""
        self._send(json.dumps(None if run is None else str(run)).encode(), files)

    def release(self) -> None:
        """Let it end all processes now."""
        self._line.close()

    def dismiss(self) -> None:
        """End it: the emulation has ended normally."""
        self._process.kill()
        self._process.wait()
        self.release()

    def _send(self, words: bytes, files: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._line, [words], list(files))
        except OSError:
            pass  # it was killed or stopped; the tasks also have PDEATHSIG


def main() -> None:
    """Wait for the end of the emulation; end its remaining processes and remove its folder.

    Devices and run folder stay locked until the last process has ended, because this process locks them.
    """
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    line = socket.socket(fileno=sys.stdin.fileno())
    mark, grace_s, folder = json.loads(line.recv(_MOST_BYTES))
    kept: list[int] = []
    run = None
    with suppress(ConnectionError):
        while (message := socket.recv_fds(line, _MOST_BYTES, _MOST_FILES))[0]:
            for file in kept:
                os.close(file)
            kept = message[1]
            run = json.loads(message[0])
    with ExitStack() as locks:
        if run is not None:
            _lock_run(Path(run), locks)
        _end_processes(mark, grace_s)
    shutil.rmtree(folder, ignore_errors=True)


def _lock_run(run: Path, locks: ExitStack) -> None:
    """Take the lock of the run over from the emulation, which may need a moment to end."""
    for _ in range(_TRIES):
        try:
            locks.enter_context(emulation_lock(run, emulated_command(run)))
            return
        except BadInput:  # it has not ended, or another emulation is at work already
            time.sleep(_POLL_S / _TRIES)


def _end_processes(mark: str, grace_s: float) -> None:
    kill_at_s = time.monotonic() + grace_s
    send(processes_of(mark), signal.SIGCONT, signal.SIGTERM)
    while left := processes_of(mark):
        if time.monotonic() >= kill_at_s:
            send(left, signal.SIGKILL)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
