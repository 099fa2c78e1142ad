"""A process beside an emulation that ends its tasks if it is killed: the kernel tells it by closing a pipe.

The kernel's own help (PDEATHSIG) reaches a task's first process only; a shell that did not ``exec`` has others.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from badcjobs.scheduler.local_processes import processes_of, send

_POLL_S = 0.2


class Watch:
    """The process, seen from the emulation: ``dismiss`` lets it go, the end of the emulation sets it to work."""

    def __init__(self, mark: str, grace_s: float, folder: Path, environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(environ),
            start_new_session=True,  # a Ctrl-C in the terminal is not for it
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([mark, grace_s, str(folder)]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it was killed; the tasks have PDEATHSIG besides

    def release(self) -> None:
        """Set it to work now."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def dismiss(self) -> None:
        """Let it go: the emulation has come to its own end."""
        self._process.kill()
        self._process.wait()
        self.release()


def main() -> None:
    """Wait for the end of the emulation; end what it leaves, in order, and remove its folder."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    mark, grace_s, folder = json.loads(sys.stdin.readline())
    sys.stdin.read()  # nothing comes but the end
    end_all(mark, grace_s)
    shutil.rmtree(folder, ignore_errors=True)


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
