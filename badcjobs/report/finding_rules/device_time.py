"""What the rules want to know about a device's time; see store/accounting.py for what the states are."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from badcjobs.model import DeviceFacts, JobFacts, StateTime, TaskFacts
from badcjobs.report.cards import card
from badcjobs.report.words import UNKNOWN, number, plain

_TOOK_BACK = re.compile(r"per device did \S+ against \d+$")  # as workers/ramp.py says it
_NO_MEMORY = re.compile(r"main memory .*were granted")


def total_s(device: DeviceFacts) -> float:
    """Return for how long the task had the device."""
    return sum(time.total_s for time in device.states.values())


def seen_s(time: StateTime) -> float:
    """Return for how much of a state it is known how busy the device was."""
    if time.busy_s is None:
        return 0.0
    return time.measured_s or time.total_s  # where no power is read, nobody counts these seconds


def busy_share(devices: Iterable[DeviceFacts]) -> float | None:
    """Return which share of the time that was measured they were busy; None: nothing was."""
    times = [time for device in devices for time in device.states.values()]
    measured_s = sum(seen_s(time) for time in times)
    return sum(time.busy_s or 0.0 for time in times) / measured_s if measured_s else None


def has_tried(device: DeviceFacts) -> bool:
    """Say whether a try of a chunk has come to an end on it, a good one or not."""
    return device.work.done + device.work.failed + device.work.lost > 0


def was_used(device: DeviceFacts) -> bool:
    """Say whether any chunk was worked on on it, also one that is still under way."""
    worked = (device.states.get(state) for state in ("working", "failed", "lost"))
    return has_tried(device) or any(time is not None and time.total_s > 0 for time in worked)


def after_start_up(device: DeviceFacts) -> DeviceFacts:
    """Return the device without the time its engines took to start."""
    return replace(device, states={state: time for state, time in device.states.items() if state != "start_up"})


def workers_of(task: TaskFacts, facts: JobFacts) -> float | None:
    """Return how many workers a task had; where badcjobs chose the number, what it came to."""
    chosen = [decision.value for decision in facts.decisions if decision.kind == "workers_per_gpu"]
    if chosen and chosen[0] is not None and task.devices:
        return max(value for value in chosen if value is not None) * task.devices
    return float(task.workers) if task.workers else None


def took_back(facts: JobFacts) -> list[str]:
    """Return the reasons for which ``--workers-per-gpu auto`` has tried one worker more and taken it back."""
    reasons = [decision.reason for decision in facts.decisions if decision.kind == "workers_per_gpu"]
    return [reason for reason in reasons if _TOOK_BACK.search(reason)]


def short_of_memory(facts: JobFacts) -> list[str]:
    """Return the reasons for which ``--workers-per-gpu auto`` has not tried more: the main memory of the job."""
    reasons = [decision.reason for decision in facts.decisions if decision.kind == "workers_per_gpu"]
    return [reason for reason in reasons if _NO_MEMORY.search(reason)]


def by_task(devices: Iterable[DeviceFacts]) -> dict[str, list[DeviceFacts]]:
    """Return the devices of each task, by its name."""
    found: dict[str, list[DeviceFacts]] = defaultdict(list)
    for device in devices:
        found[device.task].append(device)
    return found


def gpu_time(seconds: float) -> str:
    """Return GPU time as people say it."""
    if seconds < 6000:
        return f"{number(seconds / 60, 1)} GPU-minutes"
    return f"{number(seconds / 3600, 1)} GPU-hours"


def share(part: float, whole: float) -> str:
    """Return a share as a whole percentage, as exact as it is small."""
    if whole <= 0:
        return UNKNOWN
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 1 or percent == 0 else f"{percent:.1g} %"


def label(device: DeviceFacts) -> str:
    """Return the device in a few words."""
    return plain(f"{device.node} device {name_of(device)} ({device.task})")


def name_of(device: DeviceFacts) -> str:
    """Return what people call it on its node."""
    return device.token if device.index is None else str(device.index)


def labels(devices: Iterable[DeviceFacts]) -> tuple[str, ...]:
    """Return the devices in a few words each; one that served several tasks stands there once."""
    by_card: dict[tuple[str, str], list[DeviceFacts]] = defaultdict(list)
    for device in devices:
        by_card[card(device)].append(device)
    return tuple(
        label(rows[0]) if len(rows) == 1
        else plain(f"{rows[0].node} device {name_of(rows[0])} (in {len(rows):,} tasks)")
        for rows in by_card.values()
    )  # fmt: skip


def each_once(subjects: Iterable[str]) -> tuple[str, ...]:
    """Return all subjects, each once; the texts show the first of them and say how many more there are."""
    return tuple(dict.fromkeys(subjects))
