"""One attempt of one emulated array task: its start, its warning, its time limit, and its end with all it has started.

The sequence is Slurm's: the early signal to the script, at the limit CONT and TERM to every process, KILL after a
grace. What the script leaves running when it ends is ended the same way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from badcjobs.scheduler.local_processes import processes_of, send
from badcjobs.scheduler.local_values import EarlySignal
from badcjobs.seams import Clock, Process

TIMEOUT, CANCELLED, REQUEUED, PREEMPTED = "TIMEOUT", "CANCELLED", "REQUEUED", "PREEMPTED"
SENT_BACK = frozenset({REQUEUED, PREEMPTED})  # into the queue, whatever the script ends with

_SCAN_EVERY_S = 0.25  # a look at all processes of the machine takes a few milliseconds
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


@dataclass(frozen=True, slots=True)
class Launch:
    """How an attempt is started."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    output: Path
    error: Path | None  # None: into the output
    append: bool


def launch(how: Launch) -> subprocess.Popen[bytes]:
    """Start the script in a session of its own; raises OSError where that cannot be done."""
    mode = "ab" if how.append else "wb"
    with how.output.open(mode) as output, (how.error or how.output).open("ab" if how.error is None else mode) as error:
        return subprocess.Popen(
            list(how.argv),
            env=dict(how.env),
            cwd=how.cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if how.error is None else error,
            start_new_session=True,
            preexec_fn=lambda: _become(how),
        )


def _become(how: Launch) -> None:
    """Turn the new process into the script; only here is its number known, which belongs into its environment."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    for file in list(Path("/proc/self/fd").iterdir()):
        try:
            os.set_inheritable(int(file.name), int(file.name) < 3)
        except OSError:
            pass  # that of the list itself is closed by now
    try:
        os.execvpe(how.argv[0], how.argv, {**how.env, "SLURM_TASK_PID": str(os.getpid())})
    except OSError:
        pass  # subprocess tries the same in a moment, and can tell its parent why it failed


def interpreter(script: str) -> list[str]:
    """Return what a script's first line names; run by hand, for a disk may forbid to execute its files."""
    words = script.partition("\n")[0].removeprefix("#!").strip().split(None, 1)
    return [word.strip() for word in words] or ["/bin/sh"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The time an attempt has; None: as long as it likes."""

    time_s: float | None
    warning: EarlySignal | None
    grace_s: float  # Slurm's KillWait


class Attempt:
    """A script that runs; ``look`` drives it and says when all of it is over."""

    def __init__(self, process: Process, mark: str, limits: Limits, clock: Clock) -> None:
        self.process = process
        self.started_s = clock.monotonic_s()
        self.ended_by: str | None = None  # TIMEOUT, CANCELLED, …; None: it ended by itself
        self._mark = mark
        self._limits = limits
        self._clock = clock
        self._warned = False
        self._kill_at_s: float | None = None
        self._next_scan_s = 0.0

    @property
    def exit_code(self) -> int | None:
        """What the script ended with, 128 + n for signal n; None: it runs."""
        code = self.process.returncode
        return code if code is None or code >= 0 else 128 - code

    @property
    def slurm_exit_code(self) -> str:
        """The same as Slurm writes it: code and signal."""
        code = self.process.returncode or 0
        return f"{max(code, 0)}:{max(-code, 0)}"

    def look(self) -> bool:
        """Do what the time asks for; return True when the script and everything it has started is gone."""
        now_s = self._clock.monotonic_s()
        if self.process.poll() is None:
            self._obey_time(now_s)
            return False
        if now_s < self._next_scan_s:
            return False
        return self._clear_up(now_s)

    def warn(self, signum: signal.Signals) -> None:
        """Send a signal to the script alone."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signum)  # not reaped yet, so the number is still its own

    def end(self, why: str) -> None:
        """Ask everybody to end, and give them the grace; of a second time only a cancel counts, after a requeue."""
        if self._kill_at_s is None:
            self.ended_by = self.ended_by or why
            self._kill_at_s = self._clock.monotonic_s() + self._limits.grace_s
            send(self._everybody(), signal.SIGCONT, signal.SIGTERM)
        elif why == CANCELLED and self.ended_by in SENT_BACK:
            self.ended_by = why  # it is not to be started again

    def kill(self, why: str) -> None:
        """End everybody at once."""
        self.ended_by = self.ended_by or why
        self._kill_at_s = self._clock.monotonic_s()
        send(self._everybody(), signal.SIGKILL)

    def _obey_time(self, now_s: float) -> None:
        limit_s, warning = self._limits.time_s, self._limits.warning
        age_s = now_s - self.started_s
        if limit_s is not None and warning is not None and not self._warned and age_s >= limit_s - warning.lead_s:
            self._warned = True
            if warning.to_script:
                self.warn(warning.signum)
        if limit_s is not None and age_s >= limit_s:
            self.end(TIMEOUT)
        self._kill_when_due(now_s)

    def _kill_when_due(self, now_s: float) -> None:
        if self._kill_at_s is not None and now_s >= max(self._kill_at_s, self._next_scan_s):
            self._next_scan_s = now_s + _SCAN_EVERY_S
            send(self._everybody(), signal.SIGKILL)

    def _clear_up(self, now_s: float) -> bool:
        self._next_scan_s = now_s + _SCAN_EVERY_S
        left = self._everybody()
        if left and self._kill_at_s is None:
            self._kill_at_s = now_s + self._limits.grace_s
            send(left, signal.SIGCONT, signal.SIGTERM)
        elif left and self._kill_at_s is not None and now_s >= self._kill_at_s:
            send(left, signal.SIGKILL)
        return not left

    def _everybody(self) -> list[psutil.Process]:
        return processes_of(self._mark, session=self.process.pid)
