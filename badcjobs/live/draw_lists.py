"""The columns of the lists of tasks and of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from rich.text import Text

from badcjobs.live.snapshot import Snapshot, mean_of_known, mean_utilization
from badcjobs.live.text_fit import Column, bar, downsample, sparkline
from badcjobs.model import load_word
from badcjobs.report.tables import ending
from badcjobs.store.read_model import DeviceFacts, TaskFacts
from badcjobs.words import UNKNOWN, duration, fixed, power, share_words, speed, temperature

STYLES = {
    "running": "green",
    "done": "cyan",
    "waiting": "dim",
    "stopped": "yellow",
    "unbegun": "yellow",
    "silent": "bold yellow",
    "failed": "bold red",
    "killed": "bold red",
}
# Metrics that only some devices report, and their titles.
_MORE_METRICS = {
    "sm_activity_percent": "SM act",
    "sm_occupancy_percent": "SM occ",
    "encoder_percent": "encoder",
    "decoder_percent": "decoder",
    "fan_percent": "fan",
}
Row = TypeVar("Row", TaskFacts, DeviceFacts)
_MAX_NAME = 18
_MAX_MODEL = 22
_MAX_TOKEN = 12
_MIN_DRAWN = 8
_MAX_CHART = 60
_MAX_PROGRESS = 30
_MIN_WORK = 14
_MAX_WORK = 50


@dataclass
class _Columns(Generic[Row]):
    """Builds the columns of a list from the rows on the screen; one without any text is left out."""

    rows: Sequence[Row]
    style: Callable[[Row], str]  # of a whole row
    columns: list[Column] = field(default_factory=list)

    def texts(
        self, title: str, text: Callable[[Row], str], rank: int = 0, *, most: int = 0, right: bool = False
    ) -> None:
        """Add a column as wide as its longest text; with ``most``, it is cut where there is no room for it."""
        cells = [Text(text(row), self.style(row)) for row in self.rows]
        widest = max((cell.cell_len for cell in cells), default=0)
        if not widest:
            return
        width = max(widest, len(title))
        least = min(width, _MIN_WORK) if most else width
        self.columns.append(Column(title, least, lambda _: cells, rank, min(width, most), right))

    def numbers(self, title: str, text: Callable[[Row], str], rank: int = 0) -> None:
        """Add a column that is aligned to the right."""
        self.texts(title, text, rank, right=True)

    def drawn(self, title: str, draw: Callable[[Row, int], Text], rank: int = 0, *, most: int = 0) -> None:
        """Add a column whose cells are drawn for a width, as wide as there is room for."""
        if self.rows:
            cells = [partial(draw, row) for row in self.rows]
            self.columns.append(Column(title, _MIN_DRAWN, lambda width: [cell(width) for cell in cells], rank, most))


# --- tasks ------------------------------------------------------------------------------------------------------------


def task_columns(snapshot: Snapshot, tasks: Sequence[TaskFacts]) -> list[Column]:
    """Return the columns of the task list; ``tasks`` are the tasks on the screen."""
    table = _Columns(tasks, _task_style)
    table.texts("task", lambda task: ending(task.label, _MAX_NAME))
    table.texts("node", lambda task: ending(task.node, _MAX_NAME), 3)
    table.drawn("state", lambda task, _: Text(task.state, STYLES[task.state]))
    table.drawn("progress", _progress_bar, 2, most=_MAX_PROGRESS)
    table.numbers("chunks", lambda task: f"{task.settled:,}/{task.chunks:,}" if task.chunks else UNKNOWN, 1)
    table.numbers("rate", lambda task: speed(task.rate), 1)
    table.numbers("ETA", lambda task: duration(snapshot.eta_s(task.ends_at_ms)) if task.alive else "", 1)
    table.numbers("GPU", lambda task: share_words(mean_utilization(task.its_devices)) if task.its_devices else "", 1)
    table.texts("load", lambda task: load_word(mean_utilization(task.its_devices)) or "", 3)
    table.drawn("history", _mean_history, 4, most=_MAX_CHART)
    table.texts("working on", lambda task: ", ".join(task.working_on), 6, most=_MAX_WORK)
    return table.columns


def _task_style(task: TaskFacts) -> str:
    return "" if task.state == "running" else "dim"  # values of tasks that have ended are means


def _progress_bar(task: TaskFacts, width: int) -> Text:
    return Text(bar(settled_share(task), width, failed_share(task)), STYLES[task.state])


def settled_share(task: TaskFacts) -> float | None:
    """Return the progress of a task from 0 to 1."""
    return task.settled / task.chunks if task.chunks else None


def failed_share(task: TaskFacts) -> float:
    """Return the share of its chunks that failed for good."""
    return task.failed_for_good / max(1, task.chunks)


def _mean_history(task: TaskFacts, width: int) -> Text:
    """Return a chart of the mean utilization of a task's devices."""
    trails = [downsample(device.trail.utilization_percent, width) for device in task.its_devices]
    means = [mean_of_known(values) for values in zip(*trails, strict=False)]
    return Text(sparkline(means, width, over=not task.alive), _task_style(task))


# --- devices ----------------------------------------------------------------------------------------------------------


def device_columns(snapshot: Snapshot, devices: Sequence[DeviceFacts], *, of_one_task: bool = False) -> list[Column]:
    """Return the columns of the device list; ``devices`` are the devices on the screen."""
    of_run = snapshot.of_run
    table = _Columns(devices, _device_style)
    if of_run and not of_one_task:
        table.texts("task", lambda device: ending(device.task.partition(".")[0], _MAX_NAME))
        table.texts("node", lambda device: ending(device.node, _MAX_NAME), 5)
    table.numbers("GPU", lambda device: device.label[:_MAX_TOKEN])
    table.texts("model", lambda device: (device.name or UNKNOWN)[:_MAX_MODEL], 6 if of_run else 3)
    table.numbers("busy", lambda device: share_words(device.shown.utilization_percent))
    table.texts("load", lambda device: load_word(device.shown.utilization_percent) or "", 1)
    table.drawn("history", _device_history, 2, most=_MAX_CHART)
    table.numbers("memory GiB", _memory, 1)
    table.numbers("temp", lambda device: temperature(device.shown.temperature_c), 1)
    table.numbers("power", _power, 1)
    for metric, title in _MORE_METRICS.items():
        table.numbers(title, partial(_more_metric, metric), 8)
    if of_run:
        table.numbers("rate", lambda device: speed(device.rate), 4)
        table.numbers("age", lambda device: _age(device, snapshot.at_ms), 7)
        table.texts("working on", lambda device: device.trouble or ", ".join(device.chunks), 3, most=_MAX_WORK)
    else:
        table.texts("processes", _processes, 3, most=_MAX_WORK)
    return table.columns


def _device_style(device: DeviceFacts) -> str:
    if device.trouble:
        return "yellow"
    return "" if device.alive else "dim"


def _device_history(device: DeviceFacts, width: int) -> Text:
    chart = sparkline(device.trail.utilization_percent, width, over=not device.alive)
    return Text(chart, _device_style(device))


def _memory(device: DeviceFacts) -> str:
    """Return the memory of a device, used and in total, in GiB."""
    sizes = (device.shown.memory_used_bytes, device.memory_total_bytes)
    return "/".join(UNKNOWN if size is None else fixed(size / 2**30, 1) for size in sizes)


def _power(device: DeviceFacts) -> str:
    """Return the power of a device and its limit."""
    if device.shown.power_w is None or not device.power_limit_w:
        return power(device.shown.power_w)
    return f"{fixed(device.shown.power_w, 0)}/{fixed(device.power_limit_w, 0)} W"


def _age(device: DeviceFacts, now_ms: int) -> str:
    """Return how long ago a device was read; nothing if its task has ended."""
    if not device.alive:
        return ""
    if device.read_at_ms is None:
        return UNKNOWN
    return duration(max(0, now_ms - device.read_at_ms) / 1000)


def _more_metric(metric: str, device: DeviceFacts) -> str:
    percent = getattr(device.reading, metric)
    return "" if percent is None else share_words(percent)


def _processes(device: DeviceFacts) -> str:
    """Return the processes on a device of this machine."""
    if device.trouble:
        return device.trouble
    return ", ".join(f"{process.program or '?'} ({process.pid})" for process in device.processes or ())
