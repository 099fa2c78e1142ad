"""Signals as a request to stop, in three degrees: drain, drain before a deadline, stop now."""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SAME_BREATH_S = 5.0  # Slurm may send TERM twice; that is one message


class StopRequest:
    """What the signals so far ask for.

    A warning (USR1, USR2) drains: nothing new is started. TERM, INT and HUP drain with a deadline. Another of
    these, not in the same breath, means now.
    """

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self.warned_by: signal.Signals | None = None
        self.ended_by: signal.Signals | None = None
        self.ended_at_s = 0.0
        self.cut_short_by: signal.Signals | None = None

    def receive(self, signum: int, _frame: object = None) -> None:
        """Take note of a signal; safe as a signal handler."""
        number = signal.Signals(signum)
        if number in WARNINGS:
            self.warned_by = number
        elif self.ended_by is None:
            self.ended_by, self.ended_at_s = number, self._monotonic_s()
        elif number is signal.SIGINT or self._monotonic_s() - self.ended_at_s > _SAME_BREATH_S:
            self.cut_short_by = number

    def install(self) -> None:
        """Receive the signals of this process."""
        for number in (*WARNINGS, *ENDINGS):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the work is to outlive the terminal
            signal.signal(number, self.receive)
        atexit.register(self._ignore_all)

    @property
    def requested(self) -> bool:
        """Whether to start nothing new."""
        return self.warned_by is not None or self.ended_by is not None

    def overdue(self, grace_s: float) -> bool:
        """Whether what is still running must be ended now."""
        if self.cut_short_by is not None:
            return True
        return self.ended_by is not None and self._monotonic_s() - self.ended_at_s > grace_s

    @property
    def name(self) -> str:
        """The signal, for the log."""
        last = self.cut_short_by or self.ended_by or self.warned_by
        return last.name if last else "no signal"

    @staticmethod
    def _ignore_all() -> None:
        """Let no late signal change the exit code: a leaving Python gives its handlers back."""
        for number in (*WARNINGS, *ENDINGS):
            signal.signal(number, signal.SIG_IGN)
