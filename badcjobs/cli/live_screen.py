"""A live view on this terminal: looks now and then from a thread of its own, obeys keys at once, leaves no trace."""

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from badcjobs.cli.output import say
from badcjobs.errors import BadcjobsError
from badcjobs.live.draw import Page, as_plain_text, draw
from badcjobs.live.ui_state import UiState, parse_keys, press

if TYPE_CHECKING:
    from badcjobs.live.run_view import View
    from badcjobs.live.snapshot import Snapshot

_SHARE = 0.04  # of the time, at most, for looking again; of a thousand tasks that publish, a few have their turn
_FIRST_PATIENCE_S = 1.0
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
_ALL_ANEW_EVERY = 30  # somebody else may have written across the screen: wall, a message of the kernel


def can_show() -> bool:
    """Say whether there is a terminal that a live view can be drawn on."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


def shows_only_ascii() -> bool:
    """Say whether this terminal's language has nothing but ASCII; Python itself speaks UTF-8 also where C was asked."""
    asked = os.environ.get("LC_ALL") or os.environ.get("LANG") or ""
    return asked in ("C", "POSIX") or not (sys.stdout.encoding or "").lower().startswith("utf")


def print_snapshot(snapshot: Snapshot, ui: UiState, *, ascii_only: bool) -> None:
    """Print one snapshot: in colour and as wide as the terminal, or plain where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        say(as_plain_text(snapshot, ui, ascii_only=ascii_only))
        return
    page = draw(snapshot, ui, width=console.width, ascii_only=ascii_only)
    console.print(Text("\n").join(page.lines), no_wrap=True, overflow="crop")


def show(view: View, ui: UiState, *, interval_s: float, ascii_only: bool) -> int:
    """Show a live view until somebody quits; return the exit code."""
    logging.getLogger("badcjobs").addHandler(logging.NullHandler())  # a warning would stand across the screen
    console = Console(highlight=False)
    with _Bell() as bell:
        looker = _Looker(view, interval_s, bell)
        looker.start()
        while not ui.left and bell.ended_by is None:
            try:
                with _own_terminal(), Painter(console) as painter:
                    ui = _Screen(console, painter, bell, looker, ascii_only).run(ui)
            except OSError:
                return 128 + signal.SIGHUP  # the terminal is gone
            if bell.suspended:
                bell.suspended = False
                os.kill(os.getpid(), signal.SIGSTOP)  # Ctrl-Z, with the terminal as it was; fg goes on here
    return 0 if bell.ended_by is None else 128 + bell.ended_by


class _Screen:
    """Draws what the looker brings and what the keys ask for."""

    def __init__(self, console: Console, painter: Painter, bell: _Bell, looker: _Looker, ascii_only: bool) -> None:
        self._console, self._painter, self._bell, self._looker = console, painter, bell, looker
        self._ascii_only = ascii_only

    def run(self, ui: UiState) -> UiState:
        """Draw until somebody quits, stops us (Ctrl-Z) or ends us."""
        page = self._draw(ui)
        while not ui.left and not self._bell.suspended and self._bell.ended_by is None:
            for key in self._bell.wait():
                ui = press(ui, key, rows=page.rows, names=list(page.names))
            page = self._draw(ui)
        return ui

    def _draw(self, ui: UiState) -> Page:
        width, height = self._console.size
        snapshot = self._looker.snapshot
        if snapshot is None:
            waiting = Text("badcjobs: reading the task databases" + ("" if self._ascii_only else " …"))
            self._painter.paint([waiting], (width, height))
            return Page((waiting,), (), 1)
        page = draw(snapshot, ui, width=width, height=height, ascii_only=self._ascii_only)
        self._painter.paint(page.lines, (width, height))
        return page


class _Looker(threading.Thread):
    """Looks again and again, so that keys never wait for a slow filesystem."""

    def __init__(self, view: View, interval_s: float, bell: _Bell) -> None:
        super().__init__(name="looker", daemon=True)
        self._view, self._interval_s, self._bell = view, interval_s, bell
        self._snapshot: Snapshot | None = None
        self._error: Exception | None = None

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest snapshot; None: not yet. Raises what looking has raised."""
        if self._error is not None:
            raise self._error
        return self._snapshot

    def run(self) -> None:
        """Look until the program ends; at a large run first in parts, so that what there is can be seen meanwhile."""
        patience_s = _FIRST_PATIENCE_S
        seen: Snapshot | None = None
        while self._error is None:
            try:
                self._snapshot = seen = self._view.look(patience_s)
            except (BadcjobsError, OSError) as error:  # the folder is gone, or its filesystem for a while
                self._keep(seen, error)
            except Exception as error:
                self._error = error
            self._bell.ring()
            if self._snapshot is not None and not self._snapshot.unread:
                patience_s = _SHARE * self._interval_s
                time.sleep(self._interval_s)

    def _keep(self, seen: Snapshot | None, error: BadcjobsError | OSError) -> None:
        """Go on with what was seen last, and say why there is nothing newer; give up where there was never anything."""
        if seen is None:
            self._error = error
            return
        what = error.what if isinstance(error, BadcjobsError) else str(error)
        self._snapshot = replace(seen, remarks=(f"{what}; this was read before", *seen.remarks))


class _Bell:
    """Wakes whoever waits for keys: by a key, a new snapshot, another size of the terminal, or a signal."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._before: dict[signal.Signals, Any] = {}
        self._keys_from = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self.ended_by: int | None = None
        self.suspended = False

    def __enter__(self) -> _Bell:
        for number in (*_ENDINGS, signal.SIGWINCH, signal.SIGTSTP):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def ring(self) -> None:
        """Wake the one who waits."""
        try:
            os.write(self._write_end, b"!")
        except BlockingIOError:
            pass  # it rings already

    def wait(self) -> list[str]:
        """Wait for something to happen; return the keys that were pressed."""
        sources = [self._read_end] + ([] if self._keys_from is None else [self._keys_from])
        ready, _, _ = select.select(sources, [], [])
        if self._read_end in ready:
            os.read(self._read_end, 4096)
        if self._keys_from not in ready or self._keys_from is None:
            return []
        pressed = os.read(self._keys_from, 4096)
        return parse_keys(pressed.decode(errors="ignore")) if pressed else ["q"]  # nobody is there any more

    def _receive(self, number: int, _frame: object) -> None:
        if number in _ENDINGS:
            self.ended_by = number
        elif number == signal.SIGTSTP:
            self.suspended = True
        self.ring()


@contextmanager
def _own_terminal() -> Iterator[None]:
    """Get keys one by one and unseen; put everything back afterwards."""
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


class Painter:
    """The screen for the length of a block; what stood there before comes back."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._there: list[Text] = []
        self._size = (0, 0)
        self._painted = 0

    def __enter__(self) -> Painter:
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._console.show_cursor(True)
        self._console.set_alt_screen(False)

    def paint(self, lines: Sequence[Text], size: tuple[int, int]) -> None:
        """Bring the screen, so many columns and lines large, in line with these lines."""
        self._painted += 1
        if size != self._size or self._painted % _ALL_ANEW_EVERY == 0:
            self._there, self._size = [], size
            self._console.control(Control.clear())
        there = self._there + [Text("")] * (len(lines) - len(self._there))
        changed = [(row, line) for row, line in enumerate(lines) if not _same(line, there[row])]
        with self._console:  # all of it in one piece
            for row, line in changed:
                self._console.control(Control.move_to(0, row), Control((ControlType.ERASE_IN_LINE, 2)))
                self._console.print(line, end="", no_wrap=True, overflow="crop", soft_wrap=True)
        self._there = list(lines)


def _same(one: Text, other: Text) -> bool:
    """Say whether two lines look the same; Text's own comparison leaves the style of the whole line out."""
    return one == other and one.style == other.style
