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

from badcjobs.cli.options import (
    JsonWanted,
    Sources,
    check_run_folder,
    other_command,
    read_project,
    require_out,
    with_settings,
)
from badcjobs.cli.output import answer, log_to_file, log_to_stderr, read_world, say_next, shows_only_ascii, this_command
from badcjobs.devices.allocation import is_in_slurm
from badcjobs.errors import ExitCode
from badcjobs.live.text_fit import GAP, bar, finished
from badcjobs.paths import user_cache
from badcjobs.settings import RunSettings
from badcjobs.task.progress import DeviceWorkNow, TaskProgress
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


@with_settings("run")
def run(context: typer.Context, source: Sources = None, json_wanted: JsonWanted = False, **settings: Any) -> int:
    """Run one array task, inside sbatch or outside.

    It continues a run that stopped.

    Example:
      badcjobs run july.csv --out runs/july --engine-arg=--region=CA-NT
    """
    keep_bytecode()
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
        if stopped:
            say_next(*this_command())
        else:
            say_next(*other_command("merge", Path(end["out"])))
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
        self._next_s = 0.0
        self._ascii_only = shows_only_ascii()  # the bars replace sys.stderr, whose encoding is then not known

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
            if sys.stderr is not None:
                sys.stderr.flush()
        except OSError:  # the terminal is closed; Python, which flushes at exit, would change the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def _begin(self) -> Live:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(stderr=True, highlight=False), auto_refresh=False, transient=True)
        self._live.start()  # from here on sys.stderr writes above the bars
        return self._live


def bar_rows(work: TaskProgress, *, columns: int, lines: int, ascii_only: bool = False) -> list[Text]:
    """Return a line for each device and one for all, with aligned bars.

    In a narrow terminal the ends of the lines are cut, in one with few lines the last devices are left out.
    """
    width = max(1, min(columns - 1, _WIDEST))
    share = 1.0
    if work.chunks_total:
        share = work.chunks_settled / work.chunks_total
    # Devices share one queue: the bar of the fastest device equals that of the task, and one that hangs falls behind.
    most = max((device.done for device in work.devices), default=0) or 1
    bars = []
    for device in work.devices[: max(0, lines - 3)]:
        label = device.label
        if width < _NARROW:
            label = label.partition("  ")[0]  # without its model
        bars.append((plain(label), share * device.done / most, _device_text(device, work)))
    bars.append(("all", share, _text_of_all(work)))

    label_width = min(_LONGEST_LABEL, width // 3, max(cell_len(label) for label, _, _ in bars))
    rows = []
    for label, filled, text in bars:
        name = Text(label)
        name.truncate(label_width, overflow="ellipsis", pad=True)
        row = Text.assemble(name, f" {bar(filled, width // 5)} ", text)
        rows.append(finished(row, width, ascii_only=ascii_only))
    return rows


def _device_text(device: DeviceWorkNow, work: TaskProgress) -> str:
    """Return what a device has done and does now."""
    rate = None
    if device.audio_done_s > 0 and work.elapsed_s > 0:
        rate = device.audio_done_s / work.elapsed_s
    parts = [count(device.done, "chunk"), speed(rate)]
    if device.working_on:
        parts.append(", ".join(device.working_on))
    elif not work.chunks_settled:
        parts.append("starting")
    return GAP.join(parts)


def _text_of_all(work: TaskProgress) -> str:
    parts = [f"{work.chunks_settled:,}/{work.chunks_total:,}", f"ETA {duration(work.eta_s)}", speed(work.rate)]
    if work.failed:
        parts.append(f"{work.failed:,} failed")
    if work.retrying:
        parts.append(f"{work.retrying:,} to retry")
    return GAP.join(parts)
