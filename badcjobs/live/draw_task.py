"""Draw the page of a task, and alerts."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.text import Text

from badcjobs.live.snapshot import Snapshot
from badcjobs.live.text_fit import Lines, Part, bar_line, flow, joined, labelled, sparkline, wrap
from badcjobs.model import load_word, not_none
from badcjobs.paths import shell_line
from badcjobs.store.read_model import DeviceFacts, TaskAlert, TaskFacts
from badcjobs.words import UNKNOWN, count, duration, fixed, power, share_words, speed, temperature

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
MORE_METRICS = {
    "sm_activity_percent": "SM act",
    "sm_occupancy_percent": "SM occ",
    "encoder_percent": "encoder",
    "decoder_percent": "decoder",
    "fan_percent": "fan",
}
_MAX_ALERT_LINES = 4
_MAX_BAR = 40
_MAX_CHART = 120
_DOT = " · "
_INDENT = 10  # the width of labels
_VALUES = 15  # the width of values


def task_page(snapshot: Snapshot, name: str, width: int) -> Lines:
    """Return the page of a task, below the head."""
    task = next((task for task in snapshot.tasks if task.name == name), None)
    if task is None:
        return [Text(f"{name} is no longer the newest attempt of its array task", "yellow")]
    devices = [device for device in snapshot.devices if device.task == name]
    parts = [Part(task.label, "bold"), Part(task.state, STYLES[task.state])]
    parts += [Part(fact) for fact in _facts(task)]
    lines = [joined(row, _DOT) for row in flow(parts, width, _DOT)]
    lines += _progress_lines(snapshot, task, width)
    for alert in snapshot.alerts:
        if alert.task == name:
            lines += alert_lines(snapshot, alert, width, _MAX_ALERT_LINES)
    lines += [*failure_lines(task.errors, width), Text()]
    for device in devices:
        lines += _device_lines(snapshot, device, width)
    if task.working_on and not any(device.chunks for device in devices):
        lines += labelled("on", ", ".join(task.working_on), width, indent=_INDENT)
    if task.node and not snapshot.title.endswith(".sqlite"):
        log = shell_line("tail", "-f", Path(snapshot.title, "tasks", f"{task.name}.log"))
        lines += [Text(), *labelled("log", log, width, indent=_INDENT)]
    return lines


def _facts(task: TaskFacts) -> list[str]:
    facts = []
    if task.node:
        facts.append(f"on {task.node}")
    if task.engine:
        facts.append(task.engine)
    if task.devices is not None:
        facts.append(count(task.devices, "GPU"))
    if task.workers is not None:
        facts.append(count(task.workers, "worker"))
    if task.restart:
        facts.append(f"restart {task.restart}")
    if task.exit_code is not None:
        facts.append(f"exit code {task.exit_code}")
    return facts


def _progress_lines(snapshot: Snapshot, task: TaskFacts, width: int) -> Lines:
    parts = [Part(f"{task.settled:,}/{task.chunks:,} chunks")]
    if task.failed_for_good:
        parts.append(Part(f"{task.failed_for_good:,} failed", rank=2))
    if task.before:
        parts.append(Part(f"{task.before:,} done before", rank=4))
    parts.append(Part(speed(task.rate), rank=3))
    if task.alive:
        parts.append(Part(f"ETA {duration(snapshot.eta_s(task.ends_at_ms))}"))
    machine = f"CPU {share_words(task.cpu_percent)}, memory {share_words(task.memory_percent)}"
    if not task.alive:
        machine += ", at its last reading"
    style = STYLES[task.state]
    failed = failed_share(task)
    return [
        bar_line(settled_share(task), parts, width, max_width=_MAX_BAR, style=style, failed=failed),
        *labelled("started", _started(snapshot, task), width, indent=_INDENT),
        *labelled("machine", machine, width, indent=_INDENT),
    ]


def _started(snapshot: Snapshot, task: TaskFacts) -> str:
    """Return when a task started, and when it ended or gave its last sign."""
    if not task.started_at_ms:
        return "not yet"
    started = time.strftime("%d %b %H:%M:%S", time.localtime(task.started_at_ms / 1000))
    if task.ended_at_ms is not None:
        return f"{started}, ended after {_between(task.started_at_ms, task.ended_at_ms)}"
    ago = _between(task.started_at_ms, snapshot.at_ms)
    silence = _between(task.heard_at_ms or 0, snapshot.at_ms)
    return f"{started}, {ago} ago; last published {silence} ago"


def _between(from_ms: int, to_ms: int) -> str:
    return duration(max(0, to_ms - from_ms) / 1000)


def failure_lines(errors: Sequence[tuple[str, int, str | None]], width: int) -> Lines:
    """Return what failed: each file without audio, and one example of each other error."""
    lines = []
    for error_class, chunks, example in errors:
        what = error_class.replace("_", " ")
        if chunks > 1:
            what += f" ({count(chunks, 'chunk')})"
        last_line = "".join((example or "").strip().splitlines()[-1:])
        # Uncut, also a long path.
        wrapped = textwrap.wrap(f"  failed  {what}: {last_line}", width, subsequent_indent=" " * _INDENT)
        lines += [Text(line, "red") for line in wrapped]
    return lines


def alert_lines(snapshot: Snapshot, alert: TaskAlert, width: int, most: int) -> Lines:
    """Return an alert: its severity, where, its message, its duration so far, and what to do if there is room."""
    style = "yellow"
    severity = alert.severity
    if severity == "critical":
        style = "bold red"
        severity = "problem"  # as in the report
    if snapshot.of_run and alert.node is None:
        message = f"! {severity} {alert.message}"
        lines = [Text(line, style) for line in wrap(message, width)[:most]]
        if most == 1:
            lines = [Text(message, style)]
    else:
        lasted = _between(alert.started_at_ms, snapshot.at_ms)
        place = _place(alert)
        line = Text(f"! {severity} {place}{': ' if place else ''}{alert.message}", style)
        line.truncate(width - len(lasted) - 1, overflow="ellipsis", pad=True)
        lines = [line.append(f" {lasted}")]
    if alert.fix and most > 1:
        lines += [Text(f"  {line}") for line in wrap(f"→ {alert.fix}", width - 2)]
    return lines


def _place(alert: TaskAlert) -> str:
    """Return the task, node and device of an alert; a device that its message names is not repeated."""
    parts = []
    if alert.task:
        parts.append(alert.task.partition(".")[0])
    if alert.node:
        parts.append(alert.node)
    if alert.device_index is not None and not alert.message.startswith(f"device {alert.device_index} "):
        parts.append(f"GPU {alert.device_index}")
    return " ".join(parts)


# --- tasks and devices, also in lists ---------------------------------------------------------------------------------


def settled_share(task: TaskFacts) -> float | None:
    """Return the progress of a task from 0 to 1."""
    return task.settled / task.chunks if task.chunks else None


def failed_share(task: TaskFacts) -> float:
    """Return the share of its chunks that failed for good."""
    return task.failed_for_good / task.chunks if task.chunks else 0.0


def device_number(device: DeviceFacts) -> str:
    """Return the index of a device, or its token."""
    if device.index is None:
        return device.token or UNKNOWN
    return str(device.index)


def memory_of(device: DeviceFacts) -> str:
    """Return the memory of a device, used and in total, in GiB."""
    sizes = (device.shown.memory_used_bytes, device.memory_total_bytes)
    return "/".join(UNKNOWN if size is None else fixed(size / 2**30, 1) for size in sizes)


def power_of(device: DeviceFacts) -> str:
    """Return the power of a device and its limit."""
    if device.shown.power_w is None or not device.power_limit_w:
        return power(device.shown.power_w)
    return f"{fixed(device.shown.power_w, 0)}/{fixed(device.power_limit_w, 0)} W"


def age_of(device: DeviceFacts, now_ms: int) -> str:
    """Return how long ago a device was read; nothing if its task has ended."""
    if not device.alive:
        return ""
    if device.read_at_ms is None:
        return UNKNOWN
    return _between(device.read_at_ms, now_ms)


def _device_lines(snapshot: Snapshot, device: DeviceFacts, width: int) -> Lines:
    """Return a device on the page of its task: each metric with its value (now, or the mean) and its chart."""
    shown = device.shown
    trail = device.trail
    parts = [Part(f"GPU {device_number(device)}", "bold")]
    if device.name:
        parts.append(Part(device.name, "bold"))
    parts.append(Part(f"{count(device.work.done, 'chunk')}, {speed(device.rate)}", "dim"))
    parts.append(Part(f"read {age_of(device, snapshot.at_ms)} ago" if device.alive else "means", "dim"))
    lines = [joined(row) for row in flow(parts, width, "  ")]

    room = min(_MAX_CHART, max(1, width - _INDENT - _VALUES - 2))
    metrics: list[tuple[str, str, Sequence[float | None], float | None]] = [
        ("busy", share_words(shown.utilization_percent), trail.utilization_percent, 100),
        ("memory", f"{memory_of(device)} GiB", trail.memory_used_bytes, device.memory_total_bytes),
        ("temp", temperature(shown.temperature_c), trail.temperature_c, 100),
        ("power", power_of(device), trail.power_w, device.power_limit_w),
    ]
    style = "green" if device.alive else "dim"
    for name, value, values, top in metrics:
        highest = top or max(not_none(values), default=1)
        chart = sparkline(values, room, highest, over=not device.alive)
        gap = " " * (_VALUES - cell_len(value))
        lines.append(Text.assemble((f"  {name:<{_INDENT - 2}}", "dim"), f"{gap}{value}  ", (chart, style)))

    more = _more_metrics(device)
    if more:
        lines += labelled("more", ", ".join(more), width, indent=_INDENT)
    if device.chunks:
        lines += labelled("on", ", ".join(device.chunks), width, indent=_INDENT)
    return lines


def _more_metrics(device: DeviceFacts) -> list[str]:
    load = load_word(device.shown.utilization_percent)
    more = [f"{load} load"] if load else []
    if device.alive:
        for metric, title in MORE_METRICS.items():
            percent = getattr(device.reading, metric)
            if percent is not None:
                more.append(f"{title} {share_words(percent)}")
    return more
