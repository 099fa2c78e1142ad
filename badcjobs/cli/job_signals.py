"""Signals around a Slurm job: delayed while sbatch submits the script, passed on in each array task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from badcjobs.errors import ExitCode
from badcjobs.task.startup import ENDINGS, NO_RESTART_VARIABLE, WARNINGS

_SUDDEN = (signal.SIGTERM, signal.SIGHUP)  # Python raises an exception for SIGINT
_LOOK_EVERY_S = 0.2
_LOOKS_PER_SIGNAL = 10


@dataclass
class DelayedSignals:
    """Delays TERM, INT and HUP from ``begin`` to the end of the block; the first of them then ends the program.

    The message ``meanwhile`` says why the program does not end yet. Before ``begin`` a signal leaves the block
    immediately. A signal mask would not work: other threads of libraries would receive the signal.
    """

    meanwhile: str = ""
    delays: bool = False  # else the first signal interrupts the running code
    came: signal.Signals | None = None
    before: dict[signal.Signals, object] = field(default_factory=dict)  # the handlers to restore

    def __enter__(self) -> DelayedSignals:
        for number in _SUDDEN:
            if signal.getsignal(number) is signal.SIG_DFL:
                self._receive(number)
        return self

    def begin(self) -> None:
        """Delay signals from now on; ignored ones (nohup) stay ignored."""
        self.delays = True
        for number in ENDINGS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._receive(number)

    def _receive(self, number: signal.Signals) -> None:
        before = signal.signal(number, self._note)
        self.before.setdefault(number, before)

    def _note(self, signum: int, _frame: object) -> None:
        if self.came is not None:
            return  # a second one would interrupt the cleanup
        self.came = signal.Signals(signum)
        if not self.delays:
            raise KeyboardInterrupt  # so that the running code cleans up
        with suppress(OSError):  # not print, which this handler may have interrupted
            os.write(2, f"badcjobs: {self.came.name}: {self.meanwhile}\n".encode())

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        # Another error ends the program anyway.
        said_elsewhere = error is not None and not isinstance(error, KeyboardInterrupt)
        if self.came is not None and not said_elsewhere:
            signal.raise_signal(self.came)


@dataclass
class BatchTask:
    """One array task: runs ``badcjobs run`` as a child, exits with its code, and is requeued if work is left for it.

    submitit pickles it, calls it, and calls ``checkpoint`` at Slurm's warning. Slurm sends its signals to every process
    of the step, so the child receives them itself.
    """

    argv: tuple[str, ...]
    requeues: int
    child: int | None = None  # its process id
    said: int | None = None  # a file in memory: the child writes here if another task has its work
    ended: bool = False  # by TERM

    def __call__(self) -> None:
        """Run the task; exit with its code."""
        signal.signal(signal.SIGTERM, self._note_end)
        # The child ignores Slurm's warnings until it installs its handlers; otherwise they would end it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)  # a warning that comes now waits for our handler
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in WARNINGS}
        self.said = os.memfd_create("no-restart")
        environ = {**os.environ, NO_RESTART_VARIABLE: f"/proc/{os.getpid()}/fd/{self.said}"}
        try:
            self.child = os.posix_spawn(self.argv[0], self.argv, environ, setsigmask=mask)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            code = self._wait()
            if code == ExitCode.RUN_ME_AGAIN and self._may_requeue:  # it stopped before the warning came
                signal.raise_signal(_warning())
        except SystemExit as over:  # raised by checkpoint, in submitit's signal handler
            code = int(over.code or 0)
        except (OSError, subprocess.SubprocessError) as error:
            from badcjobs.cli.output import remark

            remark(f"this task cannot be requeued: {error}")
            code = ExitCode.RUN_ME_AGAIN
        if code:
            sys.exit(code)

    def checkpoint(self) -> Any:
        """Stop the child and return the work for the requeued task; runs inside a signal handler."""
        from submitit.helpers import DelayedSubmission

        signal.signal(_warning(), signal.SIG_IGN)
        code: int = ExitCode.RUN_ME_AGAIN
        if self.child is not None:
            code = self._wait(tell=signal.SIGUSR1)
        if code != ExitCode.RUN_ME_AGAIN or self.requeues < 1 or not self._may_requeue:
            raise SystemExit(code)  # done, failed, no requeue is left, cancelled, or another task has its work
        os.umask(0o077)  # submitit writes it to a file, and the command may have a secret
        return DelayedSubmission(BatchTask(self.argv, self.requeues - 1))

    @property
    def _may_requeue(self) -> bool:
        return not self.ended and (self.said is None or os.fstat(self.said).st_size == 0)

    def _wait(self, tell: signal.Signals | None = None) -> int:
        """Wait for the child and return its exit code; can be called repeatedly, because handlers interrupt it.

        ``tell``: send this signal repeatedly meanwhile, because the child may not have installed its handler yet.
        """
        assert self.child is not None
        looks = 0
        while (end := os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            if tell is not None and looks % _LOOKS_PER_SIGNAL == 0:
                os.kill(self.child, tell)
            looks += 1
            time.sleep(_LOOK_EVERY_S)
        return end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status

    def _note_end(self, _signum: int, _frame: object) -> None:
        """Remember TERM: a cancelled task must not be requeued."""
        self.ended = True


def _warning() -> signal.Signals:
    from submitit import JobEnvironment

    return signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
