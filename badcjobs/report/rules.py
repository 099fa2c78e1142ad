"""How findings work: a rule is a row of text templates, filled with the figures of a case.

``rules_*.py`` hold the rows by topic, ``find`` in job.py applies them; ``badcjobs guide report`` lists them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import Any

from badcjobs.paths import shell_line
from badcjobs.report.summary import Summary
from badcjobs.report.words import UNKNOWN, count, data_size, duration, indices, memory, moment, number, plain
from badcjobs.store.accounting import StateTime
from badcjobs.store.read_model import DeviceFacts, JobFacts, TaskFacts
from badcjobs.store.read_tasks import parse_settings

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
SEVERITIES = (PROBLEM, WARNING, NOTE)
# The figures of one case. ``subjects`` and ``cost_s`` (GPU time) go into the finding as they are; ``s`` is the summary.
Figures = Mapping[str, Any]
SERIOUS_S = 10 * 3600.0  # of GPU time
LOW = 0.5  # a GPU that is busy for a smaller share of the time has too little to do
EXCLUDE = "#SBATCH --exclude="
_MOST_NODES, _MOST_NODES_SHARE = 4, 0.1  # exclude at most so many; one is always possible


@dataclass(frozen=True, slots=True)
class Rule:
    """The finding for a case that has all figures named in ``when``; all texts are templates, see ``say``.

    A line of evidence, or a line to paste, is left out if one of its figures is None; see ``known_texts``.
    """

    kind: str
    severity: str
    says: str
    evidence: tuple[str, ...]
    fix: str
    lines: tuple[str, ...] = ()  # to paste
    when: str = ""  # figures that must be set, by name
    wants: tuple[str, ...] = ()  # the direction of its advice: "+memory", "-workers"; see ``find`` in job.py


Cases = Iterable[Figures]
FindCases = Callable[[JobFacts, Summary], Cases]
Topic = tuple[FindCases, tuple[Rule, ...]]  # the first rule that holds for a case is used


def topic(*rules: Rule) -> Callable[[FindCases], Topic]:
    """Make a topic of these rules and the decorated function, which yields the figures of each case."""
    return lambda cases: (cases, rules)


def known_texts(templates: Iterable[str], figures: Figures) -> Iterator[str]:
    """Yield the texts whose figures are known; a figure that is a list gives one text for each of its items.

    A figure whose form ends in '?' must not be 0 or empty.
    """
    words = _Words()
    for template in templates:
        parts = [(name, form or "") for _, name, form, _ in Formatter().parse(template) if name]
        roots = [figures[name.partition(".")[0]] for name, _ in parts]
        several = next((name for name, _ in parts if isinstance(figures.get(name), list)), None)
        if several is not None:
            yield from (say(template, {**figures, several: item}) for item in figures[several])
        elif None not in roots and all(words.get_field(name, (), figures)[0] for name, form in parts if "?" in form):
            yield say(template, figures)


class _Words(Formatter):
    """Formats figures as described in ``say``."""

    def format_field(self, value: Any, format_spec: str) -> str:
        form = format_spec.rstrip("?")
        if not form:
            return str(value)
        kind, *words = form.split()
        if kind == "count":
            return count(value, *(word.replace("_", " ") for word in words))
        if "|" in form:
            one, more = form.split("|")
            return one if value == 1 else more
        return _FORMS[kind](value) if kind in _FORMS else format(value, format_spec)


_FORMS: Mapping[str, Callable[[Any], str]] = {
    "whole": lambda value: f"{value:,}",
    "one": lambda value: number(value, 1),  # one decimal
    "two": lambda value: number(value, 2),
    "round": lambda value: number(value, 0),
    "hours": lambda seconds: number(seconds / 3600, 1),
    "gpu_time": lambda seconds: gpu_time(seconds),
    "duration": duration,
    "memory": memory,
    "size": data_size,
    "moment": moment,
    "indices": indices,
    "before": lambda value: f"{value - 1}",  # the last index of that many tasks
    "quoted": lambda path: shell_line(Path(path)),  # for a shell
    "and": " and ".join,
    "or": " or ".join,
    "list": ", ".join,
    "words": " ".join,
    "last_line": lambda text: (text.strip().splitlines() or ["nothing"])[-1][:200],
}


def say(template: str, figures: Figures) -> str:
    """Return a template filled with its figures.

    ``{many:count try tries}`` counts, ``{many:was|were}`` selects singular or plural, ``{seconds:duration}`` and the
    other forms in _FORMS add a unit, ``{name}`` is inserted as it is; any other form is a Python format.
    """
    return plain(_Words().vformat(template, (), figures))


def general_words(template: str) -> str:
    """Return a template without figures, in the plural: N is a number, … are words that depend on the job."""

    def word(match: re.Match[str]) -> str:
        space, form = match[1], match[2].partition(":")[2].rstrip("?")
        if form.startswith("count "):
            return space + count(2, *(noun.replace("_", " ") for noun in form.split()[1:])).replace("2", "N")
        if "|" in form:
            return space + form.partition("|")[2]
        return f"{space}N" if form else space and f"{space}…"  # without a space it is an optional part

    return re.sub(r"( ?)\{([^}]*)\}", word, template).replace(" ….", " …")


# --- figures ----------------------------------------------------------------------------------------------------------


def gpu_time(seconds: float) -> str:
    """Return GPU time in minutes or hours."""
    return f"{number(seconds / 60, 1)} GPU-minutes" if seconds < 6000 else f"{number(seconds / 3600, 1)} GPU-hours"


def share(part: float, whole: float) -> str:
    """Return a share as a percentage; below 1 % with one digit."""
    if whole <= 0:
        return UNKNOWN
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 1 or percent == 0 else f"{percent:.1g} %"


def seen_s(time: StateTime) -> float:
    """Return for how many seconds of a state it is known how busy the device was."""
    if time.busy_s is None:
        return 0.0
    return time.measured_s or time.total_s  # measured_s is 0 if the device has no power readings


def busy_share(devices: Iterable[DeviceFacts]) -> float | None:
    """Return the share of the measured time in which they were busy; None: nothing was measured."""
    times = [time for device in devices for time in device.states.values()]
    measured_s = sum(seen_s(time) for time in times)
    return sum(time.busy_s or 0.0 for time in times) / measured_s if measured_s else None


def has_tried(device: DeviceFacts) -> bool:
    """Say whether any try of a chunk has ended on it, done or not."""
    return device.work.done + device.work.failed + device.work.lost > 0


def was_used(device: DeviceFacts) -> bool:
    """Say whether any chunk ran on it, including one in progress."""
    worked = (device.states.get(state) for state in ("working", "failed", "lost"))
    return has_tried(device) or any(time is not None and time.total_s > 0 for time in worked)


def after_start_up(device: DeviceFacts) -> DeviceFacts:
    """Return the device without the time its engines took to start."""
    return replace(device, states={state: time for state, time in device.states.items() if state != "start_up"})


def by_task(devices: Iterable[DeviceFacts]) -> dict[str, list[DeviceFacts]]:
    """Return the devices of each task, by task name."""
    found: dict[str, list[DeviceFacts]] = defaultdict(list)
    for device in devices:
        found[device.task].append(device)
    return found


def without_unused(facts: JobFacts) -> JobFacts:
    """Return the job without devices and workers that had no chunk, in tasks whose other devices had some."""
    used, tasks = by_task(filter(was_used, facts.devices)), list[TaskFacts]()
    for task in facts.tasks:
        if gpus := len(used[task.name]):
            most = parse_settings(task.settings).get("max_gpus") or task.devices or 0  # that had workers
            workers = round((task.workers or 0) * gpus / max(gpus, min(most, task.devices or 0)))
            task = replace(task, devices=gpus, workers=workers or None)
        tasks.append(task)
    devices = (one for one in facts.devices if was_used(one) or not used[one.task])
    return replace(facts, tasks=tuple(tasks), devices=tuple(devices))


def labels(devices: Iterable[DeviceFacts]) -> list[str]:
    """Return a short name for each device; a device that served several tasks is listed once."""
    by_card: dict[tuple[str, str], list[DeviceFacts]] = defaultdict(list)
    for device in devices:
        by_card[device.card].append(device)
    return [
        f"{rows[0].node} device {rows[0].label} ({rows[0].task if len(rows) == 1 else f'in {len(rows):,} tasks'})"
        for rows in by_card.values()
    ]


def node_figures(nodes: Iterable[str], facts: JobFacts) -> dict[str, Any]:
    """Return how many nodes there are, and those to exclude; if there are too many, a remark instead."""
    those = sorted(set(nodes))
    everywhere = len({task.node for task in facts.tasks} | {device.node for device in facts.devices})
    if len(those) <= max(1, min(_MOST_NODES, _MOST_NODES_SHARE * everywhere)):
        avoid = f", and exclude {'it' if len(those) == 1 else 'them'} until the site has fixed this"
        return {"nodes": len(those), "exclude": ",".join(those) or None, "spread": None, "avoid": avoid}
    spread = f"{len(those):,} of {everywhere:,} nodes are affected: this points to a common cause, not to single nodes"
    return {"nodes": len(those), "exclude": None, "spread": spread, "avoid": ""}
