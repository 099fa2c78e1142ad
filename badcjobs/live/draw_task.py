"""Draw the page of a task, and alerts."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from badcjobs.live.draw_lists import STYLES, device_columns, failed_share, settled_share
from badcjobs.live.snapshot import Snapshot
from badcjobs.live.text_fit import DOT, Lines, bar_line, flow, labelled, table_lines, wrap
from badcjobs.paths import shell_line
from badcjobs.store.read_model import TaskAlert, TaskFacts
from badcjobs.words import count, duration, share_words, speed

_INDENT = 10  # the width of labels


def task_page(snapshot: Snapshot, name: str, width: int) -> Lines:
    """Return the page of a task, below the head."""
    task = next((task for task in snapshot.tasks if task.name == name), None)
    if task is None:
        return [Text(f"{name} is no longer the newest attempt of its array task", "yellow")]
    title = Text(task.label, "bold")
    state = Text(task.state, STYLES[task.state])
    facts = map(Text, _facts(task))
    lines = flow([title, state, *facts], width, DOT)
    lines.append(_progress(snapshot, task, width))
    for label, text in _labels(snapshot, task):
        lines += labelled(label, text, width, indent=_INDENT)
    for alert in snapshot.alerts:
        if alert.task == name:
            lines += alert_lines(snapshot, alert, width)
    lines += failure_lines(task.errors, width)
    if task.its_devices:
        columns = device_columns(snapshot, task.its_devices, of_one_task=True)
        lines += [Text(), *table_lines(columns, width)]
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


def _progress(snapshot: Snapshot, task: TaskFacts, width: int) -> Text:
    facts = [f"{task.settled:,}/{task.chunks:,} chunks"]
    if task.alive:
        facts.append(f"ETA {duration(snapshot.eta_s(task.ends_at_ms))}")
    facts.append(speed(task.rate))
    if task.failed_for_good:
        facts.append(f"{task.failed_for_good:,} failed")
    if task.before:
        facts.append(f"{task.before:,} done before")
    return bar_line(
        settled_share(task),
        facts,
        width,
        style=STYLES[task.state],
        failed=failed_share(task),
    )


def _labels(snapshot: Snapshot, task: TaskFacts) -> list[tuple[str, str]]:
    """Return what else is known of a task, each with its label."""
    machine = f"CPU {share_words(task.cpu_percent)}, memory {share_words(task.memory_percent)}"
    labels = [("started", _started(snapshot, task)), ("machine", machine)]
    if task.working_on:
        labels.append(("on", ", ".join(task.working_on)))
    if task.node and not snapshot.title.endswith(".sqlite"):
        labels.append(("log", shell_line("tail", "-f", Path(snapshot.title, "tasks", f"{task.name}.log"))))
    return labels


def _started(snapshot: Snapshot, task: TaskFacts) -> str:
    """Return when a task started, and when it ended or gave its last sign."""
    if not task.started_at_ms:
        return "not yet"
    started = time.strftime("%d %b %H:%M:%S", time.localtime(task.started_at_ms / 1000))
    if task.ended_at_ms is not None:
        return f"{started}, ended after {_between(task.started_at_ms, task.ended_at_ms)}"
    return f"{started}; last published {_between(task.heard_at_ms or 0, snapshot.at_ms)} ago"


def _between(from_ms: int, to_ms: int) -> str:
    return duration(max(0, to_ms - from_ms) / 1000)


def failure_lines(errors: Sequence[tuple[str, int, str | None]], width: int) -> Lines:
    """Return what failed: each file without audio, and one example of each other error."""
    lines = []
    for error_class, chunks, example in errors:
        error = error_class.replace("_", " ")
        last_line = "".join((example or "").strip().splitlines()[-1:])
        text = f"  failed  {error} ({count(chunks, 'chunk')}): {last_line}"
        wrapped = textwrap.wrap(text, width, subsequent_indent=" " * _INDENT)  # uncut, also a long path
        lines += [Text(line, "red") for line in wrapped]
    return lines


def alert_lines(snapshot: Snapshot, alert: TaskAlert, width: int) -> Lines:
    """Return an alert: its severity, where, its message, its duration so far, and what to do."""
    style = "yellow"
    severity = alert.severity
    if severity == "critical":
        style = "bold red"
        severity = "problem"  # as in the report
    task = (alert.task or "").partition(".")[0]
    place = " ".join(filter(None, [task, alert.node]))
    text = f"! {severity} {alert.message}"
    if place:
        text = f"! {severity} {place}: {alert.message} (for {_between(alert.started_at_ms, snapshot.at_ms)})"
    lines = wrap(text, width, style)
    if alert.fix:
        lines += [Text(f"  {line.plain}") for line in wrap(f"→ {alert.fix}", width - 2)]
    return lines
