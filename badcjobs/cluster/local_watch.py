"""Find and end the processes of an emulated job, even if the emulation itself is killed.

A process belongs to a task if it has the task's mark in its environment, is in the task's session, or descends from
such a process, as the tasks of a nested emulation do.

The watcher is a separate process, which acts when its stdin is closed: the emulation has ended, or was killed.
PDEATHSIG would reach only a task's first process; a shell that did not ``exec`` has children. Devices stay locked
meanwhile, because the tasks inherit the open lock files.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
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


def processes_of(mark: str, session: int | None = None) -> list[psutil.Process]:
    """Return the running processes with this mark or in this session, with their children."""
    marked: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            value = process.environ().get(MARK, "")
            belongs = value == mark or value.startswith(f"{mark}/") or os.getsid(process.pid) == session
            if belongs and process.pid not in marked:
                marked |= {member.pid: member for member in (process, *process.children(recursive=True))}
    marked.pop(os.getpid(), None)
    living = []
    for process in marked.values():
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
    """The watcher process, as the emulation uses it: it acts when it is released, or the emulation was killed."""

    def __init__(self, mark: str, grace_s: float, folder: Path, environ: Environ) -> None:
        self._process = subprocess.Popen(
            [*PYTHON, "-m", __name__, mark, str(grace_s), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(environ),
            start_new_session=True,  # Ctrl-C in the terminal must not end it
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    def keep_run(self, run: Path) -> None:
        """Name the run folder, which then stays locked after a kill."""
        with suppress(OSError):  # it was killed; the tasks also have PDEATHSIG
            self._pipe.write(os.fsencode(run))
            self._pipe.flush()

    def release(self) -> None:
        """Let it end the processes that are left, and remove the folder."""
        self._pipe.close()
        self._process.wait()


def main() -> None:
    """Wait for the end of the emulation; end its remaining processes and remove its folder."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    mark, grace_s, folder = sys.argv[1:]
    run = sys.stdin.buffer.read()  # until the emulation has ended
    with ExitStack() as locks:
        if run and processes_of(mark):
            _lock_run(Path(os.fsdecode(run)), locks)
        _end_processes(mark, float(grace_s))
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
