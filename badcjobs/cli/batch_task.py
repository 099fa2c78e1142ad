"""What submitit runs in each array task: ``badcjobs run`` as a child, requeued when it stopped with work left.

A program's outermost part on a compute node, so it stands with the command line: its exit code is Slurm's.
Slurm sends its signals to every process of the step, so the child hears of them by itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from badcjobs.errors import ExitCode

_LOOK_EVERY_S = 0.2
_LOOKS_PER_WORD = 10
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


class BatchTask:
    """One array task; submitit pickles it, calls it, and calls ``checkpoint`` when Slurm's warning comes."""

    def __init__(self, argv: tuple[str, ...], requeues: int) -> None:
        self._argv = argv
        self._requeues = requeues
        self._child: int | None = None
        self._ended = False

    def __call__(self) -> None:
        """Run the task; leave with its exit code."""
        signal.signal(signal.SIGTERM, self._note_end)
        self._child = _spawn_deaf_to_warnings(self._argv)
        try:
            code = self._wait()
            if code == ExitCode.RUN_ME_AGAIN and not self._ended:  # it stopped by the clock, before the warning
                signal.raise_signal(_warning())
        except _Over as over:
            code = over.code
        except (OSError, subprocess.SubprocessError) as error:
            from badcjobs.cli.output import remark

            remark(f"Slurm does not start this task again: {error}")
            code = ExitCode.RUN_ME_AGAIN
        if code:
            sys.exit(int(code))

    def checkpoint(self) -> Any:
        """Stop the child in order and return what is to be done after the requeue; runs inside a signal handler."""
        from submitit.helpers import DelayedSubmission

        signal.signal(_warning(), signal.SIG_IGN)
        code: int = ExitCode.RUN_ME_AGAIN
        if self._child is not None:
            code = self._wait(tell=signal.SIGUSR1)
        if code != ExitCode.RUN_ME_AGAIN or self._ended or self._requeues < 1:
            raise _Over(code)
        return DelayedSubmission(BatchTask(self._argv, self._requeues - 1))

    def _wait(self, tell: signal.Signals | None = None) -> int:
        """Return the child's exit code, as often as somebody asks: a handler may interrupt us at any point.

        ``tell``: a signal that it gets meanwhile, again and again, for it may not have learned yet what that means.
        """
        assert self._child is not None
        looks = 0
        while (end := os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            if tell is not None and looks % _LOOKS_PER_WORD == 0:
                os.kill(self._child, tell)
            looks += 1
            time.sleep(_LOOK_EVERY_S)
        return end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status

    def _note_end(self, _signum: int, _frame: object) -> None:
        """Remember TERM: whoever cancels a task does not want it back, and a requeue by Slurm needs no second one."""
        self._ended = True


def _spawn_deaf_to_warnings(argv: tuple[str, ...]) -> int:
    """Start a program that ignores Slurm's warnings until it has handlers of its own; without, they would end it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WARNINGS)  # one that comes just now waits for our own handler
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _WARNINGS}
    try:
        return os.posix_spawn(argv[0], argv, os.environ, setsigmask=mask)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Over(Exception):
    """The child has ended for good; raised through submitit's signal handler to whoever called the task."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _warning() -> signal.Signals:
    from submitit import JobEnvironment

    return signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
