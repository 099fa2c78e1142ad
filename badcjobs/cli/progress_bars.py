"""Progress bars of ``badcjobs run`` on a terminal: one per device and one for all, with the log above them."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from badcjobs.cli.bar_rows import BarTable
    from badcjobs.task.progress import TaskProgress

_EVERY_S = 0.5
_SHARE = 0.01  # of a core, at most; what takes longer is drawn less often
_NO_CURSOR = ("", "dumb", "unknown")  # terminals that cannot draw anew what stands there


class ProgressBars:
    """Bars on stderr; without a terminal there, nothing."""

    def __init__(self, *, wanted: bool = True) -> None:
        can_draw = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "") not in _NO_CURSOR
        self._wanted = wanted and can_draw
        self._live: Live | None = None
        self._ascii_only = False
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._next_s = 0.0

    def show(self, look: Callable[[], TaskProgress]) -> None:
        """Draw how far the work is, if it is time to; ``look`` is asked only then."""
        if not self._wanted or time.monotonic() < self._next_s:
            return
        try:
            live = self._live or self._begin()
            before_s = time.thread_time()
            self._draw(live, look())
        except OSError:
            self._wanted = False  # the terminal is gone; the work goes on
            return
        self._next_s = time.monotonic() + max(_EVERY_S, (time.thread_time() - before_s) / _SHARE)

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._live is not None:
                self._live.stop()
        except OSError:
            pass  # the terminal is gone
        for handler, stream in self._moved:
            handler.setStream(stream)
        _see_to_stderr()

    def _begin(self) -> Live:
        from rich.console import Console
        from rich.live import Live

        from badcjobs.cli.live_screen import shows_only_ascii

        self._ascii_only = shows_only_ascii()
        self._live = Live(console=Console(stderr=True, highlight=False), auto_refresh=False, transient=True)
        before = sys.stderr
        self._live.start()  # from here on sys.stderr writes above the bars
        for handler in logging.getLogger("badcjobs").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                self._moved.append((handler, handler.setStream(sys.stderr)))
        return self._live

    def _draw(self, live: Live, work: TaskProgress) -> None:
        from badcjobs.cli.bar_rows import bar_table

        columns, lines = live.console.size
        table = bar_table(work, columns=columns, lines=lines, ascii_only=self._ascii_only)
        live.update(_drawn(table, ascii_only=self._ascii_only), refresh=True)


def _drawn(table: BarTable, *, ascii_only: bool) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1, 0, 0))
    for width in (table.label_width, table.bar_width, None):
        grid.add_column(width=width, no_wrap=True)
    for row in table.rows:
        filled = round(row.share * table.bar_width)
        bar = Text("#" * filled + "-" * (table.bar_width - filled)) if ascii_only else ProgressBar(1, row.share)
        grid.add_row(Text(row.label), bar, Text(row.words))
    return grid


def _see_to_stderr() -> None:
    """Let nothing that a closed terminal did not take change our exit code: Python flushes a last time on leaving."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
