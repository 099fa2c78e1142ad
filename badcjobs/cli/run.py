"""``badcjobs run``, one array task; in a terminal with progress bars below the log: one per device and one for all."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len
from rich.text import Text

from badcjobs.cli.options import JsonWanted, Sources, check_run_folder, read_project, require_out, with_settings
from badcjobs.cli.output import answer, log_to_file, log_to_stderr, read_world, say_next, shows_only_ascii, this_command
from badcjobs.errors import ExitCode
from badcjobs.live.text_fit import GAP, bar, finished
from badcjobs.paths import user_cache
from badcjobs.settings import RunSettings
from badcjobs.task.progress import TaskProgress
from badcjobs.words import count, duration, plain, speed

if TYPE_CHECKING:
    from rich.live import Live

log = logging.getLogger(__name__)

_EVERY_S = 0.5
_SHARE = 0.01  # of a core, at most; slow bars are drawn less often
_NO_CURSOR = ("", "dumb", "unknown")  # terminals that cannot redraw a line
_WIDEST = 100  # lines shorter than the window do not wrap when it shrinks
_NARROW = 60
_LONGEST_LABEL = 28
_SHORTEST_NAME = 12  # a shorter part of a chunk's name is useless


@with_settings("run")
def run(context: typer.Context, source: Sources = None, json_wanted: JsonWanted = False, **settings: Any) -> int:
    """Run one array task, inside sbatch or outside.

    It continues a run that stopped.

    Example:
      badcjobs run july.csv --out runs/july --engine-arg=--region=CA-NT
    """
    keep_bytecode()
    from badcjobs.devices.allocation import is_in_slurm
    from badcjobs.planning.site import find_billing
    from badcjobs.report.text import task_end_text
    from badcjobs.task.run_task import run_task

    log_to_stderr(quiet=False)
    project = read_project(context, "run", "alerts")
    chosen = project.make(RunSettings, {"source": source, **settings}, "run")
    chosen = replace(chosen, billing=find_billing(project, Path.cwd()))
    check_run_folder(require_out(chosen.out, "run"), project)

    def log_to(path: Path) -> None:
        log_to_file(path)
        if project.file is not None:
            log.info("settings: %s", project.origin)  # in the task's own log, too
        if settings["simulate"] is None and (simulate := project.get("run", "simulate")) is not None:
            log.warning("simulated GPUs: [run] simulate = %s", simulate)

    with ProgressBars(wanted=not json_wanted) as bars:
        end = run_task(chosen, replace(read_world(), show=bars.show, log_to=log_to))
    answer(json_wanted, end, task_end_text(end))
    if not json_wanted:
        stopped = end["exit_code"] == ExitCode.RUN_ME_AGAIN and not is_in_slurm(os.environ)
        say_next(*(this_command() if stopped else ["badcjobs", "merge", Path(end["out"])]))
    return int(end["exit_code"])


def keep_bytecode() -> None:
    """Write bytecode to our cache if NVML's binding has none beside it: the recorder needs 15 MiB to compile it."""
    spec = importlib.util.find_spec("pynvml")
    cache = user_cache(os.environ)
    if spec is not None and cache is not None and not Path(spec.cached or "").exists():
        sys.dont_write_bytecode = False
        sys.pycache_prefix = str(cache / "python-cache")


class ProgressBars:
    """Progress bars on stderr, if it is a terminal."""

    def __init__(self, *, wanted: bool) -> None:
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
            rows = bar_rows(look(), columns=columns, lines=lines, ascii_only=self._ascii_only)
            live.update(Text("\n", no_wrap=True, overflow="crop").join(rows), refresh=True)
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

        self._ascii_only = shows_only_ascii()
        self._live = Live(console=Console(stderr=True, highlight=False), auto_refresh=False, transient=True)
        before = sys.stderr
        self._live.start()  # from here on sys.stderr writes above the bars
        for handler in logging.getLogger("badcjobs").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                self._moved.append((handler, handler.setStream(sys.stderr)))
        return self._live


def bar_rows(work: TaskProgress, *, columns: int, lines: int, ascii_only: bool = False) -> list[Text]:
    """Return a line for each device and one for all, with aligned bars.

    In a narrow terminal the last parts are left out, in one with few lines the last devices.
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
        said.append((label, share * device.done / most, [count(device.done, "chunk"), speed(seconds)], doing))
    rests = [f"{work.retrying:,} to retry"] if work.retrying else []
    end = [f"ETA {duration(work.eta_s)}"] if work.eta_s is not None or not rests else rests
    failed = [f"{work.failed:,} failed"] if work.failed else []
    of_all = [f"{work.chunks_settled:,}/{work.chunks_total:,}", *end, speed(work.rate), *failed]
    said.append(("all", share, of_all if end is rests else [*of_all, *rests], ""))
    of_labels = min(_LONGEST_LABEL, width // 3, max(cell_len(plain(label)) for label, *_ in said))
    of_bars = width // 5
    room = width - of_labels - of_bars - 2
    rows = []
    for label, filled, texts, name in said:
        shown = [*texts]
        while len(shown) > 1 and cell_len(GAP.join(shown)) > room:
            shown.pop()
        left = room - cell_len(GAP.join(shown)) - len(GAP)
        if name and len(shown) == len(texts) and left >= min(_SHORTEST_NAME, cell_len(name)):
            shown.append(name)
        name_of_row = Text(plain(label))
        name_of_row.truncate(of_labels, overflow="ellipsis", pad=True)
        row = Text.assemble(name_of_row, f" {bar(filled, of_bars)} {GAP.join(shown)}")
        rows.append(finished(row, width, ascii_only=ascii_only))
    return rows
