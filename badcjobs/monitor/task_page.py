"""The page of one task: who it is, how far, and each of its devices with the course of four metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.text import Text

from badcjobs.monitor import words
from badcjobs.monitor.columns import Paper, bar, shorten
from badcjobs.monitor.fitting import Part, fit, flow, joined, width_of, wrap
from badcjobs.monitor.frame import DeviceLine, Frame, TaskLine
from badcjobs.monitor.sparkline import sparkline
from badcjobs.monitor.tables import STYLES, alert_line, metric_lines

_NAMES, _VALUES = 10, 15  # widths of two columns
_BAR = 40  # at most


def task_lines(frame: Frame, name: str, paper: Paper) -> list[Text]:
    """Return the lines of a task's page."""
    task = next((task for task in frame.tasks if task.name == name), None)
    if task is None:
        return [Text(paper.text(f"{name} is no longer the newest attempt of its array task"), "yellow", end="")]
    lines = [*_who(task, paper), *_work(frame, task, paper)]
    lines += [alert_line(frame, alert, paper) for alert in frame.alerts if alert.task == name]
    lines.append(Text("", end=""))
    for device in frame.devices:
        if device.task == name:
            lines += _device(device, paper)
    if task.working_on and not any(device.chunks for device in frame.devices if device.task == name):
        lines += _fact("on", ", ".join(task.working_on), paper)
    if not frame.title.endswith(".sqlite") and task.node is not None:
        lines += [Text("", end=""), *_fact("log", f"tail -f {frame.title}/tasks/{task.name}.log", paper)]
    return lines


def _who(task: TaskLine, paper: Paper) -> list[Text]:
    facts = [task.node and f"on {task.node}", task.engine, _count(task.devices, "GPU"), _count(task.workers, "worker")]
    facts += [f"start number {task.restart + 1}" if task.restart else None]
    facts += [None if task.exit_code is None else f"exit code {task.exit_code}"]
    parts = [Part(task.label, "bold"), Part(task.state, STYLES[task.state]), *[Part(fact) for fact in facts if fact]]
    return [joined(line, " · ", paper) for line in flow(parts, paper.width, " · ")]


def _count(many: int | None, what: str) -> str | None:
    return None if many is None else f"{many} {what}{'' if many == 1 else 's'}"


def _work(frame: Frame, task: TaskLine, paper: Paper) -> list[Text]:
    share = task.settled / task.chunks if task.chunks else None
    parts = [Part(f"{task.settled:,}/{task.chunks:,} chunks")]
    parts += [Part(f"{task.failed:,} failed", rank=2)] if task.failed else []
    parts += [Part(f"{task.before:,} done before", rank=4)] if task.before else []
    parts += [Part(words.rate(task.rate), rank=3)]
    parts += [Part(f"ETA {words.span(frame.eta_s(task.ends_at_ms))}")] if task.alive else []
    parts = fit(parts, paper.width, "  ")
    progress, room = Text(end=""), min(_BAR, paper.width - width_of(parts, "  ") - 1)
    if room >= 4:
        full, empty = bar(share, room, paper)
        progress.append(full, STYLES[task.state]).append(empty, "dim").append(" ")
    progress.append_text(joined(parts, "  ", paper))
    return [progress, *_fact("began", _times(frame, task), paper), *_fact("machine", _machine(task), paper)]


def _times(frame: Frame, task: TaskLine) -> str:
    if task.started_at_ms is None:
        return "not yet, as far as we know"
    began = time.strftime("%d %b %H:%M:%S", time.localtime(task.started_at_ms / 1000))
    end_ms = frame.at_ms if task.ended_at_ms is None else task.ended_at_ms
    took = words.span(max(0, end_ms - task.started_at_ms) / 1000)
    if task.ended_at_ms is not None:
        return f"{began}, ended after {took}"
    silence = words.span(max(0, frame.at_ms - (task.heard_at_ms or 0)) / 1000)
    return f"{began}, {took} ago; last heard of {silence} ago"


def _machine(task: TaskLine) -> str:
    when = "" if task.alive else ", when it was last read"
    return f"CPU {words.percent(task.cpu_percent)}, memory {words.percent(task.memory_percent)}{when}"


def _device(device: DeviceLine, paper: Paper) -> list[Text]:
    index = device.token if device.index is None else device.index
    parts = [Part(f"GPU {index}", "bold"), *([Part(device.name, "bold")] if device.name else [])]
    parts.append(Part(f"{device.chunks_done or 0:,} chunks, {words.rate(device.rate)}", "dim"))
    parts += [] if device.alive else [Part("means", "dim")]
    lines = [joined(line, "  ", paper) for line in flow(parts, paper.width, "  ")]
    for name, value, course, top in metric_lines(device, paper):
        lines.append(_metric(name, value, course, top, paper, over=not device.alive))
    if device.chunks:
        lines += _fact("on", ", ".join(device.chunks), paper)
    return lines


def _metric(name: str, value: str, course: Sequence[float | None], top: float, paper: Paper, *, over: bool) -> Text:
    width = min(120, max(0, paper.width - _NAMES - _VALUES - 2))
    line = Text(end="").append(f"  {name:<{_NAMES - 2}}", "dim").append(f"{paper.text(value):>{_VALUES}}  ")
    bars = sparkline(course, width, top, ascii_only=paper.ascii_only, over=over)
    return line.append(bars, "dim" if over else "green")


def _fact(name: str, value: str, paper: Paper) -> list[Text]:
    """Return a name and what belongs to it, on as many lines as that takes."""
    lines = []
    for number, said in enumerate(wrap(paper.text(value), paper.width - _NAMES)):
        first = f"  {name}" if number == 0 else ""
        text = shorten(said, paper.width - _NAMES, paper).rstrip()
        lines.append(Text(end="").append(first.ljust(_NAMES), "dim").append(text))
    return lines
