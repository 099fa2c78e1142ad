"""``badcjobs run``, one array task; in a terminal with progress bars below the log: one per device and one for all."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len, set_cell_size

from badcjobs.cli.options import JsonWanted, Sources, announce_project, read_project, require_out, with_settings
from badcjobs.cli.output import answer, log_to_file, log_to_stderr, read_world
from badcjobs.live.text_fit import in_ascii, rate, span
from badcjobs.report.words import count, plain
from badcjobs.settings import RunSettings
from badcjobs.task.progress import TaskProgress

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_EVERY_S = 0.5
_SHARE = 0.01  # of a core, at most; slow bars are drawn less often
_NO_CURSOR = ("", "dumb", "unknown")  # terminals that cannot redraw a line
_WIDEST = 100  # lines shorter than the window do not wrap when it shrinks
_NARROW = 60
_LONGEST_LABEL = 28
_SHORTEST_NAME = 12  # a shorter part of a chunk's name is useless

BarRow = tuple[str, float, str]  # a label, the filled share of its bar (0 to 1), and a text


@with_settings("run")
def run(context: typer.Context, source: Sources = None, json_wanted: JsonWanted = False, **settings: Any) -> int:
    """Run one array task, inside sbatch or outside.

    It runs the engine on each of its GPUs and writes to DIR/tasks/. It continues where an earlier run stopped.

    Example:
      badcjobs run july.csv --out runs/july --engine-arg=--region=CA-NT
    """
    from badcjobs.report.text import task_end_text
    from badcjobs.task.run_task import run_task

    project = read_project(context)
    chosen = project.make(RunSettings, {"source": source, **settings}, "run")
    require_out(chosen.out, "run")
    log_to_stderr()

    def log_to(path: Path) -> None:
        log_to_file(path)
        announce_project(project, settings["simulate"])  # in the task's own log, too

    with ProgressBars(wanted=not json_wanted) as bars:
        end = run_task(chosen, replace(read_world(), show=bars.show, log_to=log_to))
    answer(json_wanted, lambda: end, lambda: task_end_text(end))
    return int(end["exit_code"])


# --- progress bars ----------------------------------------------------------------------------------------------------


class ProgressBars:
    """Progress bars on stderr, if it is a terminal."""

    def __init__(self, *, wanted: bool = True) -> None:
        can_draw = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "") not in _NO_CURSOR
        self._wanted = wanted and can_draw
        self._live: Live | None = None
        self._ascii_only = False
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._next_s = 0.0

    def show(self, look: Callable[[], TaskProgress]) -> None:
        """Draw the bars if it is time to; ``look`` is called only then."""
        if not self._wanted or time.monotonic() < self._next_s:
            return
        try:
            live = self._live or self._begin()
            before_s = time.thread_time()
            columns, lines = live.console.size
            rows, widths = bar_rows(look(), columns=columns, lines=lines, ascii_only=self._ascii_only)
            live.update(_draw_rows(rows, widths, ascii_only=self._ascii_only), refresh=True)
        except OSError:
            self._wanted = False  # the terminal is closed; the work continues
            return
        self._next_s = time.monotonic() + max(_EVERY_S, (time.thread_time() - before_s) / _SHARE)

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._live is not None:
                self._live.stop()
        except OSError:
            pass  # the terminal is closed
        for handler, stream in self._moved:
            handler.setStream(stream)
        try:
            if sys.stderr is not None:
                sys.stderr.flush()
        except OSError:  # else Python, which flushes at exit, would change the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

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


def _draw_rows(rows: Sequence[BarRow], widths: tuple[int, int], *, ascii_only: bool) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1, 0, 0))
    for width in (*widths, None):
        grid.add_column(width=width, no_wrap=True)
    for label, share, words in rows:
        filled = round(share * widths[1])
        bar = Text("#" * filled + "-" * (widths[1] - filled)) if ascii_only else ProgressBar(1, share)
        grid.add_row(Text(label), bar, Text(words))
    return grid


# --- the text of the bars ---------------------------------------------------------------------------------------------


def bar_rows(
    work: TaskProgress, *, columns: int, lines: int, ascii_only: bool = False
) -> tuple[list[BarRow], tuple[int, int]]:
    """Return a row for each device and one for all, and the widths of labels and bars.

    The bars are aligned; in a terminal with few lines the last devices are left out.
    """
    width = max(1, min(columns - 1, _WIDEST))
    share = work.chunks_settled / work.chunks_total if work.chunks_total else 1.0
    # Devices share one queue: the bar of the fastest device equals that of the task, and one that hangs falls behind.
    most = max((device.done for device in work.devices), default=0) or 1
    only_retries = work.retrying and work.chunks_total - work.chunks_settled <= work.retrying
    pause = "waiting for a retry" if only_retries else "" if work.chunks_settled or work.retrying else "starting"
    said = []
    for device in work.devices[: max(0, lines - 3)]:
        label = device.label.split("  ")[0] if width < _NARROW else device.label
        seconds = device.audio_done_s / work.elapsed_s if device.audio_done_s > 0 and work.elapsed_s > 0 else None
        doing = ", ".join(device.working_on) or pause
        said.append((label, share * device.done / most, [count(device.done, "chunk"), rate(seconds)], doing))
    said.append(("all", share, _all_parts(work), ""))
    show = in_ascii if ascii_only else plain
    labels = [_cut(show(label), min(_LONGEST_LABEL, width // 3), ascii_only) for label, *_ in said]
    widths = max(map(cell_len, labels)), width // 5
    room = width - sum(widths) - 2
    rows = [
        (label, share, _fit([show(part) for part in parts], show(name), room, ascii_only))
        for label, (_, share, parts, name) in zip(labels, said, strict=True)
    ]
    return rows, widths


def _all_parts(now: TaskProgress) -> list[str]:
    """Return the parts, the most important first: the last ones are left out in a narrow terminal."""
    rests = [f"{now.retrying:,} to retry"] if now.retrying else []
    end = [f"ETA {span(now.eta_s)}"] if now.eta_s is not None or not rests else rests
    failed = [f"{now.failed:,} failed"] if now.failed else []
    said = [f"{now.chunks_settled:,}/{now.chunks_total:,}", *end, rate(now.rate), *failed]
    return said if end is rests else [*said, *rests]


def _fit(parts: Sequence[str], name: str, room: int, ascii_only: bool) -> str:
    """Return as many parts as fit, and then as much of the name."""
    said = _cut(parts[0], room, ascii_only)
    for part in parts[1:]:
        if cell_len(said) + 2 + cell_len(part) > room:
            return said
        said += f"  {part}"
    left = room - cell_len(said) - 2
    enough = left >= min(_SHORTEST_NAME, cell_len(name))
    return f"{said}  {_cut(name, left, ascii_only)}" if name and enough else said


def _cut(text: str, room: int, ascii_only: bool) -> str:
    """Cut a text to a number of columns; a Chinese character has two."""
    if cell_len(text) <= room:
        return text
    return set_cell_size(text, max(0, room - 1)).rstrip() + ("~" if ascii_only else "…") * (room > 0)
