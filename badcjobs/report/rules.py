"""How findings work: a rule is a row of text templates, filled with the figures of a case.

``rules_*.py`` hold the rows by topic, ``find`` in job.py applies them; ``badcjobs guide report`` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from string import Formatter
from typing import Any, NamedTuple

from badcjobs import words
from badcjobs.model import not_none
from badcjobs.report.summary import Summary, ratio
from badcjobs.store.connect import grouped
from badcjobs.store.figures import StateTime
from badcjobs.store.read_model import DeviceFacts, JobFacts, TaskFacts
from badcjobs.store.read_tasks import parse_settings
from badcjobs.words import count, number, plain, share_words

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
SEVERITIES = (PROBLEM, WARNING, NOTE)
# The figures of one case. ``subjects``, ``exclude`` (nodes) and ``cost_s`` (GPU time) go into the finding as they are.
# In the texts there are also ``s``, the summary; ``many``, the number of subjects; ``of_time``, the share of the cost.
Figures = Mapping[str, Any]
_SERIOUS_S = 10 * 3600.0  # of GPU time
LOW = 0.5  # a GPU that is busy for a smaller share of the time has too little to do
_MOST_NODES = 4  # exclude at most so many; one is always possible
_MOST_NODES_SHARE = 0.1


class Rule(NamedTuple):
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
    for template in templates:
        fields = [(name, form or "") for _, name, form, _ in Formatter().parse(template) if name]
        lists = [name for name, _ in fields if isinstance(figures.get(name), list)]
        if lists:
            for item in figures[lists[0]]:
                yield say(template, {**figures, lists[0]: item})
        elif all(_is_known(name, form, figures) for name, form in fields):
            yield say(template, figures)


def _is_known(name: str, form: str, figures: Figures) -> bool:
    """Say whether a figure, which may be an attribute of another one, is known; with '?' also that it is not 0."""
    first, *attributes = name.split(".")
    value = figures[first]
    for attribute in attributes:
        if value is None:
            return False
        value = getattr(value, attribute)
    return bool(value) if form.endswith("?") else value is not None


class _Words(Formatter):
    """Formats figures as described in ``say``."""

    def format_field(self, value: Any, format_spec: str) -> str:
        form = format_spec.rstrip("?")
        if form.startswith("count "):
            return count(value, *(noun.replace("_", " ") for noun in form.split()[1:]))
        if "|" in form:
            singular, plural = form.split("|")
            return singular if value == 1 else plural
        return _FORMS[form](value)


_FORMS: Mapping[str, Callable[[Any], str]] = {
    "": str,
    "whole": lambda value: f"{value:,}",
    "one": lambda value: number(value, 1),  # one decimal
    "two": lambda value: number(value, 2),
    "round": lambda value: number(value, 0),
    "hours": lambda seconds: number(seconds / 3600, 1),
    "gpu_time": words.gpu_time,
    "duration": words.duration,
    "memory": words.memory,
    "energy": words.energy,
    "percent": share_words,
    "moment": words.moment,
    "indices": words.indices,
    "list": ", ".join,
    "last_line": lambda text: (text.strip().splitlines() or ["nothing"])[-1][:200],
}


def say(template: str, figures: Figures) -> str:
    """Return a template filled with its figures.

    ``{many:count try tries}`` counts, ``{many:was|were}`` selects singular or plural, ``{seconds:duration}`` and the
    other forms in _FORMS add a unit, ``{name}`` is inserted as it is.
    """
    return plain(_Words().vformat(template, (), figures))


class _GeneralWords(_Words):
    """Formats without figures: N is a number, … are words that depend on the job."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        return 2, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if " " in format_spec or "|" in format_spec:
            return super().format_field(value, format_spec).replace("2", "N")
        return "N" if format_spec else "…"


def general_words(template: str) -> str:
    """Return a template without figures, in the plural."""
    return _GeneralWords().format(template).replace(" ….", " …")


# --- figures ----------------------------------------------------------------------------------------------------------


def severity_of(cost_s: float) -> str:
    """Return how bad it is to lose so much GPU time."""
    return PROBLEM if cost_s >= _SERIOUS_S else WARNING


def middle(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are known; None: there is none."""
    measured = not_none(values)
    return median(measured) if measured else None


def share(part: float, whole: float) -> str:
    """Return a share as a percentage."""
    return share_words(ratio(100 * part, whole))


def seen_s(time: StateTime) -> float:
    """Return for how many seconds of a state it is known how busy the device was."""
    if time.busy_s is None:
        return 0.0
    return time.measured_s or time.total_s  # measured_s is 0 if the device has no power readings


def busy_share(devices: Iterable[DeviceFacts]) -> float | None:
    """Return the share of the measured time in which they were busy; None: nothing was measured."""
    times = [time for device in devices for time in device.states.values()]
    return ratio(sum(time.busy_s or 0.0 for time in times), sum(map(seen_s, times)))


def busy_percent(summary: Summary) -> float | None:
    """Return the same for all devices of a job, in percent."""
    busy = busy_share(summary.devices)
    return busy and 100 * busy


def has_tried(device: DeviceFacts) -> bool:
    """Say whether any try of a chunk has ended on it, done or not."""
    return device.work.done + device.work.failed + device.work.lost > 0


def was_used(device: DeviceFacts) -> bool:
    """Say whether any chunk ran on it, including one in progress."""
    return has_tried(device) or any(device.state_s.get(state) for state in ("working", "failed", "lost"))


def by_task(devices: Iterable[DeviceFacts]) -> dict[str, list[DeviceFacts]]:
    """Return the devices of each task, by task name."""
    return grouped((device.task, device) for device in devices)


def without_unused(facts: JobFacts) -> JobFacts:
    """Return the job without devices and workers that had no chunk, in tasks whose other devices had some."""
    used = by_task(filter(was_used, facts.devices))
    tasks = tuple(_with_devices(task, len(used[task.name])) for task in facts.tasks)
    devices = tuple(device for device in facts.devices if was_used(device) or not used[device.task])
    return replace(facts, tasks=tasks, devices=devices)


def _with_devices(task: TaskFacts, used: int) -> TaskFacts:
    """Return a task with the devices that were used, and their workers."""
    if not used:
        return task
    granted = task.devices or 0
    most = parse_settings(task.settings).get("max_gpus") or granted
    with_workers = max(used, min(most, granted))
    workers = round((task.workers or 0) * used / with_workers)
    return replace(task, devices=used, workers=workers or None)


def labels(devices: Iterable[DeviceFacts]) -> list[str]:
    """Return a short name for each device; a device that served several tasks is listed once."""
    names = []
    for rows in grouped((device.card, device) for device in devices).values():
        first = rows[0]
        tasks = first.task if len(rows) == 1 else f"in {len(rows):,} tasks"
        names.append(f"{first.node} device {first.label} ({tasks})")
    return names


def node_figures(nodes: Iterable[str], facts: JobFacts) -> Figures:
    """Return how many nodes these are, and those to exclude; if there are many, none: they have a common cause."""
    at = frozenset(nodes)
    everywhere = len({task.node for task in facts.tasks} | {device.node for device in facts.devices})
    are_few = len(at) <= max(1, min(_MOST_NODES, _MOST_NODES_SHARE * everywhere))
    return {"nodes": len(at), "exclude": at if are_few else frozenset()}
