"""Findings about devices: broken, throttled, slower than others, used by other processes, or not measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median
from typing import NamedTuple

from badcjobs.model import not_none
from badcjobs.report.rules import NOTE, PROBLEM, WARNING, Cases, Rule, labels, node_figures, share, topic
from badcjobs.report.summary import Summary, count_devices
from badcjobs.store.connect import grouped
from badcjobs.store.read_model import DeviceFacts, JobFacts, TaskFacts

# --- hardware that failed ---------------------------------------------------------------------------------------------

_LOST = Rule(
    "device_lost",
    PROBLEM,
    when="lost",
    says="{alert.devices:count GPU} stopped answering.",
    evidence=("{alert.alerts:count alert} on {nodes:count node}", "{alert.example}"),
    fix="Report {nodes:this node|these nodes} to the site, and exclude {nodes:it|them} until the site has fixed this.",
)


@topic(
    _LOST,
    _LOST._replace(
        kind="device_fault",
        when="fault",
        says="{alert.devices:count GPU} reported errors.",
        fix="Report {nodes:this node|these nodes} and the error number to the site, and exclude {nodes:it|them} until"
        " the site has fixed this.",
    ),
    _LOST._replace(
        kind="ecc_errors",
        when="ecc",
        says="{alert.devices:count GPU} had uncorrected memory errors.",
        fix="Results from there may be wrong. Run these chunks again on another node, and report the node to the site.",
    ),
    _LOST._replace(
        when="cuda",
        says="CUDA lost {devices:count GPU}; the workers on {devices:it|them} were stopped.",
        evidence=("{tries:count try tries} lost on {nodes:count node}",),
    ),
)
def _broken(facts: JobFacts, summary: Summary) -> Cases:
    nodes = {kind: facts.alert_nodes.get(kind, ()) for kind in ("lost", "ecc", "fault")}
    for alert in facts.alerts:
        if alert.kind not in nodes:
            continue
        at = nodes[alert.kind]
        if alert.kind == "fault" and at and {*at} <= {*nodes["lost"], *nodes["ecc"]}:
            continue  # a lost GPU, or one with memory errors, reports them, too
        yield {
            alert.kind: True,
            "alert": alert,
            "subjects": at,
            **node_figures(at, facts),
        }
    lost = [device for device in facts.devices if device.work.gave_up == "gpu_lost"]
    if lost and all(alert.kind != "lost" for alert in facts.alerts):
        yield {
            "cuda": True,
            "devices": count_devices(lost),
            "tries": sum(device.work.lost for device in lost),
            "subjects": labels(lost),
            **node_figures((device.node for device in lost), facts),
        }


# --- lowered clocks ---------------------------------------------------------------------------------------------------

_THROTTLED_S = 60.0
_THROTTLED_SHARE = 0.05
# Large GPUs often reach their power limit; it matters if the clock falls far.
_CAPPED = 0.3
_CAPPED_CLOCK = 0.8
_THROTTLED = Rule(
    "throttled_thermal",
    WARNING,
    when="heat",
    says="{many:count GPU} reduced {many:its|their} clock because of heat.",
    evidence=(
        "{of_time} of {seen_s:gpu_time} with a reduced clock",
        "highest temperature: {hottest} °C",
        "power limit: {limit} W",
    ),
    fix="Ask the site to check the cooling of {nodes:this node|these nodes}.",
)


@topic(
    _THROTTLED,
    _THROTTLED._replace(
        kind="throttled_power",
        when="",
        says="{many:count GPU} reduced {many:its|their} clock to save power.",
        fix="Either the site has set a low power limit, or the power supply is overloaded. Ask the site.",
    ),
)
def _throttled(facts: JobFacts, summary: Summary) -> Cases:
    for samples_of in (_samples_slowed_by_heat, _samples_slowed_to_save_power):
        slowed = []
        slowed_s = 0.0
        for device in facts.devices:
            span_s = device.span_s or 0.0
            its_s = samples_of(device) / max(1, device.samples) * span_s
            if its_s >= max(_THROTTLED_S, _THROTTLED_SHARE * span_s):
                slowed.append(device)
                slowed_s += its_s
        if not slowed:
            continue
        seen_s = sum(device.span_s or 0.0 for device in slowed)
        yield {
            "heat": samples_of is _samples_slowed_by_heat,
            "many": count_devices(slowed),
            "of_time": share(slowed_s, seen_s),
            "seen_s": seen_s,
            "hottest": max(not_none(device.temperature_max_c for device in slowed), default=None),
            "limit": min((round(device.power_limit_w) for device in slowed if device.power_limit_w), default=None),
            "subjects": labels(slowed),
            **node_figures((device.node for device in slowed), facts),
        }


def _samples_slowed_by_heat(device: DeviceFacts) -> int:
    slowed = device.throttled
    return max(slowed.get("sw_thermal_slowdown", 0), slowed.get("hw_thermal_slowdown", 0))


def _samples_slowed_to_save_power(device: DeviceFacts) -> int:
    slowed = device.throttled
    # hw_slowdown is set together with its reason; without heat it protects the power supply.
    without_heat = slowed.get("hw_slowdown", 0) - slowed.get("hw_thermal_slowdown", 0)
    samples = max(slowed.get("hw_power_brake", 0), without_heat)
    capped = slowed.get("sw_power_cap", 0)
    clock = device.metrics.get("sm_clock_mhz")
    if clock is None or clock.p50 >= _CAPPED_CLOCK * clock.maximum or capped < _CAPPED * device.samples:
        return samples
    return max(samples, capped)


# --- other processes --------------------------------------------------------------------------------------------------

_FOREIGN_S = 10.0


@topic(
    Rule(
        "foreign_process",
        "{severity}",
        says="{many:count other_process other_processes} used the GPUs of this job.",
        evidence=(
            "{program} of {user} (pid {longest.pid}) for {longest.seconds:duration} on {longest.node}",
            "device memory used: up to {held:memory}",
        ),
        fix="In Slurm this should not happen: report it to the site. On a shared machine, pick a free GPU:"
        " run --max-gpus N.",
    )
)
def _foreign(facts: JobFacts, summary: Summary) -> Cases:
    foreign = [process for process in facts.foreign if process.seconds >= _FOREIGN_S]
    if not foreign:
        return
    longest = foreign[0]
    held = max(not_none(process.memory_peak_bytes for process in foreign), default=None)
    yield {
        "severity": WARNING if held is None or held >= 2**30 else NOTE,
        "many": len({(process.node, process.pid) for process in foreign}),
        "longest": longest,
        "program": longest.name or "a process",
        "user": longest.user or "an unknown user",
        "held": held,
        "subjects": [f"{process.node}: device {process.device_index}, pid {process.pid}" for process in foreign],
    }


# --- devices and nodes that are slower than their peers (same model, same work) ---------------------------------------

_LEAST_PEERS = 4  # with fewer it is not clear which device is the slow one
_LEAST_TRIES = 10
_LEAST_S = 60.0
_SLOW = 0.75  # of the median
_SPREADS = 3.5 * 1.4826  # of the median absolute deviation: more than chance
_LONGER = 1.1
_VERY_SLOW = 0.5


class _Peer(NamedTuple):
    """A device, over all tasks of one shape that used it."""

    label: str
    node: str
    working_s: float
    rate: float  # audio per working time
    chunk_p50_s: float


def _peer_groups(tasks: Iterable[TaskFacts], devices: Iterable[DeviceFacts]) -> Iterator[list[_Peer]]:
    """Yield groups of comparable devices: the same model, engine, workers and cores, and enough work each."""
    by_name = {task.name: task for task in tasks}

    def shape(device: DeviceFacts) -> tuple[object, ...]:
        task = by_name[device.task]
        return device.name, task.engine, task.devices, task.workers, task.cpus

    used = [device for device in devices if "working" in device.states and device.work.done]
    for alike in grouped((shape(device), device) for device in used).values():
        cards = grouped((device.card, device) for device in alike)
        peers = not_none(map(_peer, cards.values()))
        if len(peers) >= _LEAST_PEERS:
            yield peers


def _peer(rows: list[DeviceFacts]) -> _Peer | None:
    """Return a device; None: it had too little work, or audio of unknown length."""
    working_s = sum(row.states["working"].total_s for row in rows)
    audio_s = sum(row.work.audio_s for row in rows)
    if working_s < _LEAST_S or not audio_s or sum(row.work.done for row in rows) < _LEAST_TRIES:
        return None
    return _Peer(
        label=labels(rows)[0],
        node=rows[0].node,
        working_s=working_s,
        rate=audio_s / working_s,
        chunk_p50_s=median(row.work.chunk_p50_s or 0.0 for row in rows),
    )


@topic(
    Rule(
        "straggler_device",
        "{severity}",
        says="{many:count device} {many:is|are} slower than {many:its|their} peers: the slowest reaches"
        " {percent:round} % of the median speed.",
        evidence=(
            "slowest: {worst.label}, {worst.rate:one} × real time",
            "median of {peers:count device} of the same model: {median:one} × real time",
        ),
        fix="If this happens again, exclude the node and report it to the site. Look for heat, a busy disk, or other"
        " jobs.",
    )
)
def _slow(facts: JobFacts, summary: Summary) -> Cases:
    """Yield the devices of each group that are slower than the others by more than chance."""
    for peers in _peer_groups(facts.tasks, facts.devices):
        middle = median(peer.rate for peer in peers)
        spread = median(abs(peer.rate - middle) for peer in peers)
        slow_from = min(_SLOW * middle, middle - _SPREADS * spread)
        usual_s = median(peer.chunk_p50_s for peer in peers)
        # A device that works on the last, long chunk is not slow: its other chunks took no longer than usual.
        slow = [peer for peer in peers if peer.rate < slow_from and peer.chunk_p50_s > _LONGER * usual_s]
        if not slow:
            continue
        worst = min(slow, key=lambda peer: peer.rate)
        yield {
            "severity": WARNING if worst.rate < _VERY_SLOW * middle else NOTE,
            "peers": len(peers),
            "percent": worst.rate / middle * 100,
            "worst": worst,
            "median": middle,
            "cost_s": sum(peer.working_s * (1 - peer.rate / middle) for peer in slow),
            "subjects": [peer.label for peer in slow],
            **node_figures((peer.node for peer in slow), facts),
        }


# --- measurements that are missing ------------------------------------------------------------------------------------

_GAP = 0.05
_GAP_S = 60.0


_GAPS = Rule(
    "telemetry_gaps",
    "{severity}",
    says="There are no readings for {of_time} of the GPU time.",
    evidence=(
        "{total_s:gpu_time} of {all_s:gpu_time} without readings",
        "{blind:whole?} of {followed:count device} of the tasks without any reading",
    ),
    fix="The numbers of these devices cover only the rest of the time.",
)


@topic(
    _GAPS._replace(
        when="blind",
        fix="The numbers do not cover devices without readings. In a container, use --nv to make GPUs readable.",
        lines=("badcjobs gpus",),
    ),
    _GAPS,
)
def _gaps(facts: JobFacts, summary: Summary) -> Cases:
    tasks = {task.name: task for task in facts.tasks}
    followed = [device for device in facts.devices if tasks[device.task].telemetry]
    gap_s = {device.device_id: min(device.gap_s, tasks[device.task].wall_s) for device in followed}
    total_s = sum(gap_s.values())
    all_s = sum(tasks[device.task].wall_s for device in followed)
    if total_s < max(_GAP_S, _GAP * all_s):
        return
    blind = sum(not device.samples for device in followed)
    yield {
        "severity": WARNING if blind or total_s > 0.5 * all_s else NOTE,
        "of_time": share(total_s, all_s),
        "total_s": total_s,
        "all_s": all_s,
        "blind": blind,
        "followed": len(followed),
        "subjects": labels(device for device in followed if gap_s[device.device_id] > 0),
    }


TOPICS = (_broken, _throttled, _foreign, _slow, _gaps)
