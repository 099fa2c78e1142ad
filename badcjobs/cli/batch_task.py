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
        self._child = os.posix_spawn(self._argv[0], self._argv, os.environ)
        try:
            code = self._wait()
            if code == ExitCode.RUN_ME_AGAIN and not self._ended:  # it stopped by the clock, before the warning
                signal.raise_signal(_warning())
        except _Over as over:
            code = over.code
        except (OSError, subprocess.SubprocessError) as error:
            print(f"badcjobs: Slurm does not start this task again: {error}", file=sys.stderr)
            code = ExitCode.RUN_ME_AGAIN
        if code:
            sys.exit(int(code))

    def checkpoint(self) -> Any:
        """Stop the child in order and return what is to be done after the requeue; runs inside a signal handler."""
        from submitit.helpers import DelayedSubmission

        signal.signal(_warning(), signal.SIG_IGN)
        code: int = ExitCode.RUN_ME_AGAIN
        if self._child is not None:
            os.kill(self._child, signal.SIGUSR1)  # to a zombie it does nothing: nobody has reaped the child
            code = self._wait()
        if code != ExitCode.RUN_ME_AGAIN or self._ended or self._requeues < 1:
            raise _Over(code)
        return DelayedSubmission(BatchTask(self._argv, self._requeues - 1))

    def _wait(self) -> int:
        """Return the child's exit code, as often as somebody asks: a handler may interrupt us at any point."""
        assert self._child is not None
        while (end := os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            time.sleep(_LOOK_EVERY_S)
        return end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status

    def _note_end(self, _signum: int, _frame: object) -> None:
        """Remember TERM: whoever cancels a task does not want it back, and a requeue by Slurm needs no second one."""
        self._ended = True


class _Over(Exception):
    """The child has ended for good; raised through submitit's signal handler to whoever called the task."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _warning() -> signal.Signals:
    from submitit import JobEnvironment

    return signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
