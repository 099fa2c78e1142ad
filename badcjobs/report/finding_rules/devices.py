"""Devices that nobody used, that slowed themselves down, that broke, or that somebody else used as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from badcjobs.model import NOTE, PROBLEM, WARNING, DeviceFacts, Finding, JobFacts
from badcjobs.report.cards import cards, rows_words
from badcjobs.report.finding_rules.device_time import (
    after_start_up,
    by_task,
    each_once,
    gpu_time,
    labels,
    share,
    total_s,
    was_used,
)
from badcjobs.report.finding_rules.nodes import exclude_lines, too_many
from badcjobs.report.finding_rules.ran_on_cpu import judge_cpu
from badcjobs.report.summarize import Summary
from badcjobs.report.task_states import is_running
from badcjobs.report.words import count, duration, memory, number, plain

_UNUSED_S = 60.0  # each; a task that finds nothing to do is over before
_THROTTLED_S, _THROTTLED = 60.0, 0.05
_CAPPED, _CAPPED_CLOCK = 0.3, 0.8  # big cards touch their limit all the time; it matters where the clock falls far
_FOREIGN_S = 10.0
_HARDWARE = {
    "lost": ("device_lost", "stopped answering",
             "A node where this happens needs mending: tell the site, and leave it out until then."),
    "fault": ("device_fault", "reported errors", "Tell the site, with the node and the number; leave the node out."),
    "ecc": ("ecc_errors", "had uncorrected memory errors",
            "What was computed there may be wrong: do these chunks again on another node, and tell the site."),
}  # fmt: skip


def judge_devices(facts: JobFacts, summary: Summary) -> Iterator[Finding]:
    """Yield what is to be said about devices."""
    yield from _broken(facts)
    yield from judge_cpu(facts)
    yield from _unused(facts, summary)
    yield from _throttled(facts, "throttled_thermal", _hot, "because of heat")
    yield from _throttled(facts, "throttled_power", _hungry, "to save power")
    yield from _foreign(facts)


def _unused(facts: JobFacts, summary: Summary) -> Iterator[Finding]:
    devices, unused = by_task(facts.devices), list[DeviceFacts]()
    granted, silent = list[DeviceFacts](), frozenset(summary.tasks_silent)
    for task in facts.tasks:
        own = devices[task.name]
        if task.engine is not None and (task.pending or any(was_used(device) for device in own)):
            granted += own
            had_s = _ready_s if is_running(task, silent) else total_s
            unused += [device for device in own if not was_used(device) and had_s(device) >= _UNUSED_S]
    if not unused:
        return
    gpu_s, started = sum(total_s(device) for device in unused), sum(device.work.workers for device in unused)
    workers = f"{count(started, 'worker')} started there" if started else "no worker was started there"
    per_task = max(sum(map(was_used, devices[name])) for name in {device.task for device in unused})
    yield Finding(
        "unused_gpus", PROBLEM if gpu_s >= 36_000 else WARNING,
        f"{len(unused):,} of {rows_words(granted, 'GPU')} never had a chunk to work on.",
        (f"{gpu_time(gpu_s)} granted for nothing", f"{workers}, no chunk was tried", *_served(unused)),
        "Look into the log of the task why their workers did nothing." if started
        else "Ask for as many GPUs as are used. To use them all, leave --max-gpus out and have more chunks than GPUs.",
        () if started or not per_task else (f"#SBATCH --gpus-per-node={per_task}",),
        labels(unused), gpu_s / 3600,
    )  # fmt: skip


def _ready_s(device: DeviceFacts) -> float:
    """Return for how long it could have had a chunk: engines of a task that runs may still be starting."""
    return total_s(after_start_up(device))


def _served(devices: Sequence[DeviceFacts]) -> list[str]:
    """Say how many devices these are, where some are counted for several tasks."""
    many = cards(devices)
    return [] if many == len(devices) else [f"{count(many, 'different device')}, each counted for every task"]


def _hot(device: DeviceFacts) -> int:
    return max(device.throttled.get("sw_thermal_slowdown", 0), device.throttled.get("hw_thermal_slowdown", 0))


def _hungry(device: DeviceFacts) -> int:
    # hw_slowdown stands beside the reason that it has; without heat it protects the power supply.
    alone = device.throttled.get("hw_slowdown", 0) - device.throttled.get("hw_thermal_slowdown", 0)
    braked = max(device.throttled.get("hw_power_brake", 0), alone)
    capped, clock = device.throttled.get("sw_power_cap", 0), device.metrics.get("sm_clock_mhz")
    slow = clock is not None and clock.p50 < _CAPPED_CLOCK * clock.maximum and capped >= _CAPPED * device.samples
    return max(braked, capped if slow else 0)


def _throttled(facts: JobFacts, kind: str, count_of: Callable[[DeviceFacts], int], why: str) -> Iterator[Finding]:
    slowed = [d for d in facts.devices if _slowed_s(d, count_of) >= max(_THROTTLED_S, _THROTTLED * (d.span_s or 0.0))]
    if not slowed:
        return
    slowed_s, seen_s = sum(_slowed_s(d, count_of) for d in slowed), sum(d.span_s or 0.0 for d in slowed)
    evidence = [f"{share(slowed_s, seen_s)} of their {gpu_time(seen_s)} with a lowered clock"]
    clocks = [(clock, d.name) for d in slowed if (clock := d.metrics.get("sm_clock_mhz"))]
    if clocks:
        worst, model = min(clocks, key=lambda pair: pair[0].p50)
        most = max(d.metrics["sm_clock_mhz"].maximum for d in facts.devices
                   if d.name == model and "sm_clock_mhz" in d.metrics)  # fmt: skip
        evidence.append(f"median clock of the slowest {worst.p50:,.0f} MHz; this model reached {most:,.0f} MHz here")
    hottest = max((d.temperature_max_c for d in slowed if d.temperature_max_c is not None), default=None)
    if kind == "throttled_thermal" and hottest is not None:
        evidence.append(f"up to {hottest} °C")
    limits = [d.power_limit_w for d in slowed if d.power_limit_w]
    if kind == "throttled_power" and limits:
        evidence.append(f"power limit {min(limits):.0f} W")
    nodes, many = {device.node for device in slowed}, cards(slowed)
    those = "the node" if len(nodes) == 1 else "these nodes"
    yield Finding(
        kind, WARNING, f"{count(many, 'GPU')} lowered {'its' if many == 1 else 'their'} clock {why}.",
        (*evidence, *too_many(nodes, facts)),
        f"Tell the site to look at the fans and the cooling of {those}; leave {those} out meanwhile."
        if kind == "throttled_thermal"
        else "The site has set a low power limit, or the power supply is at its end: ask them.",
        exclude_lines(nodes, facts), labels(slowed),
    )  # fmt: skip


def _slowed_s(device: DeviceFacts, count_of: Callable[[DeviceFacts], int]) -> float:
    return count_of(device) / device.samples * (device.span_s or 0.0) if device.samples else 0.0


def _broken(facts: JobFacts) -> Iterator[Finding]:
    told = {alert.kind for alert in facts.alerts}
    for alert in facts.alerts:
        if alert.kind in _HARDWARE:
            kind, words, advice = _HARDWARE[alert.kind]
            nodes = facts.alert_nodes.get(alert.kind, ())
            longest = f", the longest of {duration(alert.longest_s)}" if alert.longest_s else ""
            yield Finding(
                kind, PROBLEM, f"{count(alert.devices, 'GPU')} {words}.",
                (f"{count(alert.alerts, 'alert')}{longest}, on {count(len(nodes), 'node')}", plain(alert.example),
                 *too_many(nodes, facts)),
                advice, exclude_lines(nodes, facts), each_once(plain(node) for node in nodes),
            )  # fmt: skip
    lost = [device for device in facts.devices if device.work.gave_up == "gpu_lost"]
    if lost and "lost" not in told:
        kind, _, advice = _HARDWARE["lost"]
        lost_nodes = {device.node for device in lost}
        yield Finding(
            kind, PROBLEM, f"CUDA lost {count(cards(lost), 'GPU')}; the workers there were ended.",
            (f"{count(sum(d.work.lost for d in lost), 'try', 'tries')} lost there", *too_many(lost_nodes, facts)),
            advice, exclude_lines(lost_nodes, facts), labels(lost),
        )  # fmt: skip


def _foreign(facts: JobFacts) -> Iterator[Finding]:
    others = [process for process in facts.foreign if process.seconds >= _FOREIGN_S]
    if not others:
        return
    longest = others[0]
    held = max((p.memory_peak_bytes for p in others if p.memory_peak_bytes is not None), default=None)
    who = f"{longest.name or 'a process'} of {longest.user or 'somebody'} (pid {longest.pid})"
    yield Finding(
        "foreign_process", WARNING if held is None or held >= 2**30 else NOTE,
        f"{count(len({(p.node, p.pid) for p in others}), 'process', 'processes')} of others used our GPUs.",
        (
            plain(f"{who} for {duration(longest.seconds)} on {longest.node}"),
            f"{number(sum(p.seconds for p in others) / 60, 1)} minutes in all, on all devices together",
            *([f"device memory held: up to {memory(held)}"] if held is not None else []),
        ),
        "Under Slurm this should not be: tell the site. On a shared machine take a free device: run --free N.",
        (), each_once(plain(f"{p.node}: device {p.device_index}, pid {p.pid}") for p in others),
    )  # fmt: skip
