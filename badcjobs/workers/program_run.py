"""Runs one program to its end for a session: started unless it is too late, watched, ended with all it has started."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from badcjobs.seams import Clock, Launcher, Process, SessionBroken
from badcjobs.workers.failures import HANG, NO_PROGRAM
from badcjobs.workers.patience import Watchdog


class ProgramRunner:
    """Starts one program after the other; ``kill`` comes from another thread and is for good."""

    def __init__(self, launcher: Launcher, clock: Clock) -> None:
        self._launcher = launcher
        self._clock = clock
        self._lock = threading.Lock()
        self._running: Process | None = None
        self.killed = False

    @property
    def pid(self) -> int | None:
        """The program that was started last."""
        return None if self._running is None else self._running.pid

    @property
    def exit_code(self) -> int | None:
        """How the last program ended."""
        return None if self._running is None else self._running.returncode

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None,
        log: Path,
        limit_s: float,
        hears_term: bool,
    ) -> int | None:
        """Return the exit code; None: killed before it began. Silence in its log for ``limit_s`` ends it as a hang."""
        with self._lock:
            if self.killed:
                return None
            try:
                process = self._launcher.start(argv, env=env, cwd=cwd, stderr=log, hears_term=hears_term)
            except OSError as error:
                raise SessionBroken(NO_PROGRAM, f"{argv[0]}: {error}", at_start=True) from error
            self._running = process
        with Watchdog(self._clock, limit_s, self._end, lambda: _size(log)) as dog:
            code = process.wait()
        self._end()  # whatever it left running in its group
        if dog.has_bitten:
            raise SessionBroken(HANG, f"no word from the program for {limit_s:.0f} s")
        return code

    def kill(self) -> None:
        """End the program now, and start no other."""
        with self._lock:
            self.killed = True
        self._end()

    def _end(self) -> None:
        if self._running is not None:
            self._launcher.signal(self._running, signal.SIGKILL)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # not there yet
