"""A live view in this terminal: a thread reads snapshots, keys act immediately, the terminal is restored at the end."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from badcjobs.cli.output import say
from badcjobs.errors import BadcjobsError
from badcjobs.live.draw import Page, as_plain_text, draw
from badcjobs.live.ui_state import UiState, parse_keys, press

if TYPE_CHECKING:
    from badcjobs.live.snapshot import Snapshot
    from badcjobs.live.views import View

_SHARE = 0.04  # of the interval, at most, for reading; with a thousand tasks only a few are read each time
_FIRST_PATIENCE_S = 1.0
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
_LINE_END = Text("\n", no_wrap=True, overflow="crop")


def can_show() -> bool:
    """Say whether stdout is a terminal that can show a live view."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


def shows_only_ascii() -> bool:
    """Say whether the locale allows only ASCII; Python uses UTF-8 even in the locale C."""
    asked = os.environ.get("LC_ALL") or os.environ.get("LANG") or ""
    return asked in ("C", "POSIX") or not (sys.stdout.encoding or "").lower().startswith("utf")


def print_snapshot(snapshot: Snapshot, ui: UiState, *, ascii_only: bool) -> None:
    """Print one snapshot: in colour and as wide as the terminal, or as plain text without a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        say(as_plain_text(snapshot, ui, ascii_only=ascii_only))
        return
    page = draw(snapshot, ui, width=console.width, ascii_only=ascii_only)
    console.print(_LINE_END.join(page.lines))


def show(view: View, ui: UiState, *, interval_s: float, ascii_only: bool) -> int:
    """Show a live view until the user quits; return the exit code."""
    logging.getLogger("badcjobs").addHandler(logging.NullHandler())  # a warning would spoil the screen
    console = Console(highlight=False)
    with _Wakeup() as wakeup:
        reader = _SnapshotReader(view, interval_s, wakeup)
        reader.start()
        while not ui.quitting and wakeup.ended_by is None:
            try:
                with _own_terminal(), console.screen():
                    ui = _interact(console, wakeup, reader, ui, ascii_only)
            except OSError:
                return 128 + signal.SIGHUP  # the terminal is gone
            if wakeup.suspended:
                wakeup.suspended = False
                os.kill(os.getpid(), signal.SIGSTOP)  # Ctrl-Z, with the terminal restored; fg continues here
    return 0 if wakeup.ended_by is None else 128 + wakeup.ended_by


def _interact(console: Console, wakeup: _Wakeup, reader: _SnapshotReader, ui: UiState, ascii_only: bool) -> UiState:
    """Draw snapshots and handle keys until the user quits or suspends the program, or a signal ends it."""
    while True:
        width, height = console.size
        snapshot = reader.snapshot
        if snapshot is None:
            page = Page((Text("badcjobs: reading the task databases" + ("" if ascii_only else " …")),), (), 1)
        else:
            page = draw(snapshot, ui, width=width, height=height, ascii_only=ascii_only)
        console.update_screen(_LINE_END.join(page.lines))
        if ui.quitting or wakeup.suspended or wakeup.ended_by is not None:
            return ui
        for key in wakeup.wait():
            ui = press(ui, key, rows=page.rows, names=list(page.names))


class _SnapshotReader(threading.Thread):
    """Reads snapshots in a thread, so that keys never wait for a slow filesystem."""

    def __init__(self, view: View, interval_s: float, wakeup: _Wakeup) -> None:
        super().__init__(name="reader", daemon=True)
        self._view, self._interval_s, self._wakeup = view, interval_s, wakeup
        self._snapshot: Snapshot | None = None
        self._error: Exception | None = None

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest snapshot; None: not read yet. Raises the error of the thread."""
        if self._error is not None:
            raise self._error
        return self._snapshot

    def run(self) -> None:
        """Read until the program ends; a large run first in parts, so that the first tasks appear soon."""
        patience_s = _FIRST_PATIENCE_S
        seen: Snapshot | None = None
        while self._error is None:
            try:
                self._snapshot = seen = self._view.look(patience_s)
            except Exception as error:
                if seen is None or not isinstance(error, BadcjobsError | OSError):
                    self._error = error
                else:  # the folder or its filesystem is not available: keep the last snapshot
                    what = error.what if isinstance(error, BadcjobsError) else str(error)
                    self._snapshot = replace(seen, remarks=(f"{what}; showing the last reading", *seen.remarks))
            self._wakeup.wake()
            if self._snapshot is not None and not self._snapshot.unread:
                patience_s = _SHARE * self._interval_s
                time.sleep(self._interval_s)


class _Wakeup:
    """Wakes the thread that waits for keys: at a key, a new snapshot, a new size of the terminal, or a signal."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._before: dict[signal.Signals, Any] = {}
        self._keys_from = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self.ended_by: int | None = None
        self.suspended = False

    def __enter__(self) -> _Wakeup:
        for number in (*_ENDINGS, signal.SIGWINCH, signal.SIGTSTP):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def wake(self) -> None:
        """Wake the waiting thread."""
        try:
            os.write(self._write_end, b"!")
        except BlockingIOError:
            pass  # it is already awake

    def wait(self) -> list[str]:
        """Wait for an event; return the keys that were pressed."""
        sources = [self._read_end] + ([] if self._keys_from is None else [self._keys_from])
        ready, _, _ = select.select(sources, [], [])
        if self._read_end in ready:
            os.read(self._read_end, 4096)
        if self._keys_from not in ready or self._keys_from is None:
            return []
        pressed = os.read(self._keys_from, 4096)
        return parse_keys(pressed.decode(errors="ignore")) if pressed else ["q"]  # the terminal is closed

    def _receive(self, number: int, _frame: object) -> None:
        if number in _ENDINGS:
            self.ended_by = number
        elif number == signal.SIGTSTP:
            self.suspended = True
        self.wake()


@contextmanager
def _own_terminal() -> Iterator[None]:
    """Read keys one by one without echo; restore the terminal afterwards."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
