"""Holds back the signals that end a program while it does something that must not be left half done."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from badcjobs.stop import ENDINGS

_SUDDEN = (signal.SIGTERM, signal.SIGHUP)  # INT is an exception anyway


class Told(BaseException):
    """A signal ends the program: whoever is at work takes away what it has half done, as for KeyboardInterrupt."""


class HeldSignals:
    """From ``begin`` to the end of its block, TERM, INT and HUP wait; the first of them then ends the program.

    When it comes, ``meanwhile`` says why nothing happens yet. Before ``begin`` the block is left at once.
    Handlers, and not the mask of a thread: libraries have threads of their own, which would be hit instead.
    """

    def __init__(self, meanwhile: str = "") -> None:
        self._meanwhile = meanwhile
        self.came: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> HeldSignals:
        for number in _SUDDEN:
            if signal.getsignal(number) is signal.SIG_DFL:
                self._receive(number, self._leave)
        return self

    def begin(self) -> None:
        """Hold them back from now on; those that are ignored (nohup) still are."""
        for number in ENDINGS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._receive(number, self._hold)

    def _receive(self, number: signal.Signals, handler: Callable[[int, object], None]) -> None:
        before = signal.signal(number, handler)
        self._before.setdefault(number, before)

    def _leave(self, signum: int, _frame: object) -> None:
        self.came = signal.Signals(signum)
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)  # a second one would end the tidying
        raise Told

    def _hold(self, signum: int, _frame: object) -> None:
        if self.came is not None:
            return
        self.came = signal.Signals(signum)
        with suppress(OSError):  # not print: it may be interrupted by this in the midst of a line
            os.write(2, f"badcjobs: {self.came.name}: {self._meanwhile}\n".encode())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        said_elsewhere = error is not None and not isinstance(error, Told)  # an error ends the program, too
        if self.came is not None and not said_elsewhere:
            signal.raise_signal(self.came)
