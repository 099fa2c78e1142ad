"""The columns of the lists of tasks and of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, TypeVar

from rich.cells import cell_len

from badcjobs.live.draw_task import (
    MORE_METRICS,
    STYLES,
    age_of,
    device_number,
    failed_share,
    memory_of,
    power_of,
    settled_share,
)
from badcjobs.live.snapshot import Snapshot, mean_of_known, mean_utilization, total_power_w
from badcjobs.live.text_fit import Column, Part, bar, downsample, sparkline
from badcjobs.live.ui_state import DevicesOf
from badcjobs.model import load_word, not_none
from badcjobs.report.tables import ending
from badcjobs.store.read_model import DeviceFacts, TaskFacts
from badcjobs.words import UNKNOWN, duration, power, share_words, speed, temperature

Row = TypeVar("Row")
_MAX_NAME = 18
_MAX_MODEL = 22
_MAX_TOKEN = 12
_MIN_CHART = 8
_MAX_CHART = 60
_MAX_PROGRESS = 30
_MIN_SPEED = 8  # columns of numbers that change keep their width
_MIN_DURATION = 11
_LOAD = 8
_MIN_WORK = 14
_MAX_WORK = 50


class _Columns(Generic[Row]):
    """Builds the columns of a list from the rows on the screen; one without any text is left out."""

    def __init__(self, rows: Sequence[Row], style: Callable[[Row], str]) -> None:
        self._rows: Sequence[Row] = rows
        self._style: Callable[[Row], str] = style  # of a whole row
        self.columns: list[Column] = []

    def texts(self, title: str, text: Callable[[Row], str], rank: int = 0, *, least: int = 0, most: int = 0) -> None:
        """Add a column as wide as its longest text, or with ``most``, as there is room for."""
        cells = [Part(text(row), self._style(row)) for row in self._rows]
        widths = [cell_len(cell.text) for cell in cells]
        if not any(widths):
            return
        width = max(least, len(title))
        if not most:
            width = max(width, *widths)
        self.columns.append(Column(title, width, lambda _: cells, rank, most))

    def numbers(self, title: str, text: Callable[[Row], str], rank: int = 0, *, least: int = 0) -> None:
        """Add a column that is aligned to the right."""
        before = len(self.columns)
        self.texts(title, text, rank, least=least)
        self.columns[before:] = [column._replace(right=True) for column in self.columns[before:]]

    def drawn(self, title: str, draw: Callable[[Row, int], Part], rank: int = 0, *, most: int = 0) -> None:
        """Add a column whose parts are drawn for a width, as wide as there is room for."""

        def cells(width: int) -> list[Part]:
            return [draw(row, width) for row in self._rows]

        if self._rows:
            self.columns.append(Column(title, _MIN_CHART, cells, rank, most))


# --- tasks ------------------------------------------------------------------------------------------------------------


def task_columns(snapshot: Snapshot, tasks: Sequence[TaskFacts], devices_of: DevicesOf) -> list[Column]:
    """Return the columns of the task list; ``tasks`` are the tasks on the screen."""

    def of_devices(text: Callable[[Sequence[DeviceFacts]], str]) -> Callable[[TaskFacts], str]:
        """Return the text of a task's devices; a task without devices has none."""
        return lambda task: text(devices_of[task.name]) if task.name in devices_of else ""

    def history(task: TaskFacts, width: int) -> Part:
        return Part(_mean_history(devices_of.get(task.name, ()), width), _task_style(task))

    def eta(task: TaskFacts) -> str:
        return duration(snapshot.eta_s(task.ends_at_ms)) if task.alive else ""

    table = _Columns(tasks, _task_style)
    table.texts("task", lambda task: ending(task.label, _MAX_NAME))
    table.texts("node", lambda task: ending(task.node, _MAX_NAME), 3)
    table.drawn("state", lambda task, _: Part(task.state, STYLES[task.state]))
    table.drawn("progress", _progress_bar, 2, most=_MAX_PROGRESS)
    table.numbers("chunks", _chunks, 1)
    table.numbers("rate", lambda task: speed(task.rate), 1, least=_MIN_SPEED)
    table.numbers("ETA", eta, 1, least=_MIN_DURATION)
    table.numbers("GPU", of_devices(lambda devices: share_words(mean_utilization(devices))), 1)
    table.texts("load", of_devices(lambda devices: load_word(mean_utilization(devices)) or ""), 3, least=_LOAD)
    table.drawn("history", history, 4, most=_MAX_CHART)
    table.numbers("mem", of_devices(lambda devices: share_words(_highest(d.memory_percent for d in devices))), 7)
    table.numbers("temp", of_devices(lambda devices: temperature(_highest(d.shown.temperature_c for d in devices))), 5)
    table.numbers("power", of_devices(lambda devices: power(total_power_w(devices))), 8)
    table.texts("working on", lambda task: ", ".join(task.working_on), 6, least=_MIN_WORK, most=_MAX_WORK)
    return table.columns


def _task_style(task: TaskFacts) -> str:
    return "" if task.state == "running" else "dim"  # values of tasks that have ended are means


def _progress_bar(task: TaskFacts, width: int) -> Part:
    return Part(bar(settled_share(task), width, failed_share(task)), STYLES[task.state])


def _chunks(task: TaskFacts) -> str:
    return f"{task.settled:,}/{task.chunks:,}" if task.chunks else UNKNOWN


def _highest(values: Iterable[float | None]) -> float | None:
    return max(not_none(values), default=None)


def _mean_history(devices: Sequence[DeviceFacts], width: int) -> str:
    """Return a chart of the mean utilization of a task's devices."""
    trails = [downsample(device.trail.utilization_percent, width) for device in devices if device.trail.step_ms]
    means = [mean_of_known(values) for values in zip(*trails, strict=False)]
    return sparkline(means, width, 100, over=not any(device.alive for device in devices))


# --- devices ----------------------------------------------------------------------------------------------------------


def device_columns(snapshot: Snapshot, devices: Sequence[DeviceFacts]) -> list[Column]:
    """Return the columns of the device list; ``devices`` are the devices on the screen."""
    of_run = snapshot.of_run
    table = _Columns(devices, _device_style)
    table.texts("task", lambda device: ending(device.task.partition(".")[0], _MAX_NAME))
    if of_run:
        table.texts("node", lambda device: ending(device.node, _MAX_NAME), 5)
    table.numbers("GPU", lambda device: device_number(device)[:_MAX_TOKEN])
    table.texts("model", lambda device: (device.name or UNKNOWN)[:_MAX_MODEL], 6 if of_run else 3)
    table.numbers("busy", lambda device: share_words(device.shown.utilization_percent))
    table.texts("load", lambda device: load_word(device.shown.utilization_percent) or "", 1, least=_LOAD)
    table.drawn("history", _device_history, 2, most=_MAX_CHART)
    table.numbers("memory GiB", memory_of, 1)
    table.numbers("temp", lambda device: temperature(device.shown.temperature_c), 1)
    table.numbers("power", power_of, 1)
    if of_run:
        table.numbers("rate", lambda device: speed(device.rate), 4, least=_MIN_SPEED)
    for metric, title in MORE_METRICS.items():
        table.numbers(title, partial(_more_metric, metric), 8)
    if of_run:
        table.numbers("age", lambda device: age_of(device, snapshot.at_ms), 7, least=_MIN_DURATION)
        table.texts("working on", _work, 3, least=_MIN_WORK, most=_MAX_WORK)
    else:
        table.texts("processes", _processes, 3, least=_MIN_WORK, most=_MAX_WORK)
    return table.columns


def _device_style(device: DeviceFacts) -> str:
    if device.trouble:
        return "yellow"
    return "" if device.alive else "dim"


def _device_history(device: DeviceFacts, width: int) -> Part:
    chart = sparkline(device.trail.utilization_percent, width, 100, over=not device.alive)
    return Part(chart, _device_style(device))


def _more_metric(metric: str, device: DeviceFacts) -> str:
    percent = getattr(device.reading, metric)
    return "" if percent is None else share_words(percent)


def _work(device: DeviceFacts) -> str:
    """Return what a device of a run works on."""
    if device.trouble or device.chunks:
        return device.trouble or ", ".join(device.chunks)
    return "" if device.alive else "ended"


def _processes(device: DeviceFacts) -> str:
    """Return the processes on a device of this machine."""
    if device.trouble:
        return device.trouble
    return ", ".join(f"{process.program or '?'} ({process.pid})" for process in device.processes or ())
