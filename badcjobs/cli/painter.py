"""Draws lines on a terminal of our own, and only those that are not there already: over ssh each of them costs."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

_ALL_ANEW_EVERY = 30  # somebody else may have written across the screen: wall, a message of the kernel


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
