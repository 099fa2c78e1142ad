"""Findings about devices: broken, throttled, slower than others, used by other processes, or not measured."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from badcjobs.model import not_none
from badcjobs.report.rules import NOTE, PROBLEM, WARNING, Cases, Rule, labels, node_figures, say, share, topic
from badcjobs.report.summary import Summary, count_devices, devices_words
from badcjobs.report.words import count, number
from badcjobs.store.read_model import DeviceFacts, JobFacts, TaskFacts

_EXCLUDE = ("#SBATCH --exclude={exclude}",)

# --- hardware that failed ---------------------------------------------------------------------------------------------

_LOST = Rule(
    "device_lost", PROBLEM,
    when="lost",
    says="{alert.devices:count GPU} stopped answering.",
    evidence=("{alert.alerts:count alert}{longest} on {nodes:count node}", "{alert.example}", "{spread}"),
    fix="Report {nodes:this node|these nodes} to the site{avoid}.",
    lines=_EXCLUDE,
)  # fmt: skip


@topic(
    _LOST,
    replace(
        _LOST, kind="device_fault", when="fault",
        says="{alert.devices:count GPU} reported errors.",
        fix="Report {nodes:the node|these nodes} and the error number to the site{avoid}.",
    ),
    replace(
        _LOST, kind="ecc_errors", when="ecc",
        says="{alert.devices:count GPU} had uncorrected memory errors.",
        fix="Results from there may be wrong. Run these chunks again on another node, and report the node to the site.",
    ),
    replace(
        _LOST, when="cuda",
        says="CUDA lost {devices:count GPU}; the workers on {devices:it|them} were stopped.",
        evidence=("{tries:count try tries} lost", "{spread}"),
    ),
)  # fmt: skip
def _broken(facts: JobFacts, summary: Summary) -> Cases:
    where = {kind: frozenset(facts.alert_nodes.get(kind, ())) for kind in ("lost", "ecc", "fault")}
    for alert in facts.alerts:
        if alert.kind in where:
            nodes = facts.alert_nodes.get(alert.kind, ())
            if alert.kind == "fault" and nodes and where["fault"] <= where["lost"] | where["ecc"]:
                continue  # a lost GPU, or one with memory errors, reports them, too
            longest = say(" (longest {s:duration})", {"s": alert.longest_s}) if alert.longest_s else ""
            yield {
                alert.kind: True,
                "alert": alert,
                "longest": longest,
                "subjects": nodes,
                **node_figures(nodes, facts),
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

_THROTTLED_S, _THROTTLED = 60.0, 0.05
_CAPPED, _CAPPED_CLOCK = 0.3, 0.8  # large GPUs often reach their power limit; it matters if the clock falls far
_CLOCKS = (
    "{of_time} of {seen_s:gpu_time} with a reduced clock",
    "median clock of the slowest GPU: {clock} MHz; highest clock of this model in the job: {reached} MHz",
)


@topic(Rule(
    "throttled_thermal", WARNING,
    says="{many:count GPU} reduced {many:its|their} clock because of heat.",
    evidence=(*_CLOCKS, "highest temperature: {hottest} °C", "{spread}"),
    fix="Ask the site to check the cooling of {nodes:the node|these nodes}{avoid}.",
    lines=_EXCLUDE,
))  # fmt: skip
def _overheated(facts: JobFacts, summary: Summary) -> Cases:
    reasons = ("sw_thermal_slowdown", "hw_thermal_slowdown")
    return _throttled(facts, lambda device: max(device.throttled.get(reason, 0) for reason in reasons))


@topic(Rule(
    "throttled_power", WARNING,
    says="{many:count GPU} reduced {many:its|their} clock to save power.",
    evidence=(*_CLOCKS, "power limit: {limit} W", "{spread}"),
    fix="Either the site has set a low power limit, or the power supply is overloaded. Ask the site.",
    lines=_EXCLUDE,
))  # fmt: skip
def _power_limited(facts: JobFacts, summary: Summary) -> Cases:
    def samples(device: DeviceFacts) -> int:
        # hw_slowdown is set together with its reason; without heat it protects the power supply.
        alone = device.throttled.get("hw_slowdown", 0) - device.throttled.get("hw_thermal_slowdown", 0)
        capped, clock = device.throttled.get("sw_power_cap", 0), device.metrics.get("sm_clock_mhz")
        slow = clock is not None and clock.p50 < _CAPPED_CLOCK * clock.maximum and capped >= _CAPPED * device.samples
        return max(device.throttled.get("hw_power_brake", 0), alone, capped if slow else 0)

    return _throttled(facts, samples)


def _throttled(facts: JobFacts, count_of: Callable[[DeviceFacts], int]) -> Cases:
    def slowed_s(device: DeviceFacts) -> float:
        return count_of(device) / device.samples * (device.span_s or 0.0) if device.samples else 0.0

    slowed = [d for d in facts.devices if slowed_s(d) >= max(_THROTTLED_S, _THROTTLED * (d.span_s or 0.0))]
    if not slowed:
        return
    seen_s = sum(d.span_s or 0.0 for d in slowed)
    clocks = [(clock.p50, d.name) for d in slowed if (clock := d.metrics.get("sm_clock_mhz"))]
    slowest, model = min(clocks, key=lambda pair: pair[0], default=(None, None))
    same = [d.metrics["sm_clock_mhz"] for d in facts.devices if d.name == model and "sm_clock_mhz" in d.metrics]
    yield {
        "many": count_devices(slowed),
        "of_time": share(sum(map(slowed_s, slowed)), seen_s),
        "seen_s": seen_s,
        "clock": slowest if slowest is None else f"{slowest:,.0f}",
        "reached": f"{max((clock.maximum for clock in same), default=0.0):,.0f}",
        "hottest": max(not_none(d.temperature_max_c for d in slowed), default=None),
        "limit": min((round(d.power_limit_w) for d in slowed if d.power_limit_w), default=None),
        "subjects": labels(slowed),
        **node_figures((device.node for device in slowed), facts),
    }


# --- other processes --------------------------------------------------------------------------------------------------

_FOREIGN_S = 10.0


@topic(Rule(
    "foreign_process", "{severity}",
    says="{many:count other_process other_processes} used the GPUs of this job.",
    evidence=(
        "{program} of {user} (pid {longest.pid}) for {longest.seconds:duration} on {longest.node}",
        "{minutes:one} minutes in total, on all devices",
        "device memory used: up to {held:memory}",
    ),
    fix="In Slurm this should not happen: report it to the site. On a shared machine, pick a free GPU: run --max-gpus"
        " N.",
))  # fmt: skip
def _foreign(facts: JobFacts, summary: Summary) -> Cases:
    others = [process for process in facts.foreign if process.seconds >= _FOREIGN_S]
    held = max(not_none(p.memory_peak_bytes for p in others), default=None)
    if others:
        yield {
            "severity": WARNING if held is None or held >= 2**30 else NOTE,
            "many": len({(p.node, p.pid) for p in others}),
            "longest": others[0],
            "program": others[0].name or "a process",
            "user": others[0].user or "an unknown user",
            "minutes": sum(p.seconds for p in others) / 60,
            "held": held,
            "subjects": [f"{p.node}: device {p.device_index}, pid {p.pid}" for p in others],
        }


# --- devices and nodes that are slower than their peers (same model, same work) ---------------------------------------

LEAST_PEERS = 4  # with fewer it is not clear which device is the slow one
_LEAST_NODES = 3
LEAST_TRIES, _LEAST_S = 10, 60.0
_SLOW = 0.75  # of the median
_SPREADS = 3.5 * 1.4826  # of the median absolute deviation: more than chance
_LONGER = 1.1
_VERY_SLOW = 0.5


@dataclass(frozen=True, slots=True)
class Peer:
    """A device, over all tasks of one shape that used it."""

    rows: list[DeviceFacts]
    node: str
    label: str
    working_s: float
    rate: float  # its speed while working
    unit: str
    chunk_p50_s: float
    held_back: str | None  # why its clock was reduced


def peer_groups(tasks: Iterable[TaskFacts], devices: Iterable[DeviceFacts]) -> list[list[Peer]]:
    """Return groups of comparable devices: the same model, engine, workers and cores, and enough work each."""
    by_name = {task.name: task for task in tasks}
    found: dict[tuple[object, ...], dict[tuple[str, str], list[DeviceFacts]]] = defaultdict(lambda: defaultdict(list))
    for device in devices:
        task = by_name[device.task]
        if "working" in device.states and device.work.done:
            found[device.name, task.engine, task.devices, task.workers, task.cpus][device.card].append(device)
    groups = []
    for cards in found.values():
        known = [rows for rows in cards.values() if sum(row.work.done for row in rows) >= LEAST_TRIES]
        known = [rows for rows in known if _working_s(rows) >= _LEAST_S]
        by_audio = all(sum(row.work.audio_s for row in rows) > 0 for rows in known)
        groups += [[_peer(rows, by_audio=by_audio) for rows in known]] if len(known) >= LEAST_PEERS else []
    return groups


def _working_s(rows: Iterable[DeviceFacts]) -> float:
    return sum(row.states["working"].total_s for row in rows)


def _peer(rows: list[DeviceFacts], *, by_audio: bool) -> Peer:
    """Return a device; its speed is audio per time or, because some lengths are unknown, chunks per time."""
    working_s, reasons = _working_s(rows), {reason for row in rows for reason in row.held_back}
    rate = sum(row.work.audio_s if by_audio else 60.0 * row.work.done for row in rows) / working_s
    p50_s = median(row.work.chunk_p50_s or 0.0 for row in rows)
    held_back = ", ".join(reason.replace("_", " ") for reason in sorted(reasons)) or None
    unit = "× real time" if by_audio else "chunks per minute"
    return Peer(rows, rows[0].node, labels(rows)[0], working_s, rate, unit, p50_s, held_back)


def find_stragglers(peers: Sequence[Peer]) -> list[Peer]:
    """Return the devices that are slower than the others by more than chance, slowest first."""
    middle = median(peer.rate for peer in peers)
    usual_s = median(peer.chunk_p50_s for peer in peers)
    slow_from = min(_SLOW * middle, middle - _SPREADS * median(abs(peer.rate - middle) for peer in peers))
    # A device that works on the last, long chunk is not slow: its other chunks took no longer than usual.
    slow = [peer for peer in peers if peer.rate < slow_from and peer.chunk_p50_s > _LONGER * usual_s]
    return sorted(slow, key=lambda peer: peer.rate)


_SLOW_DEVICE = Rule(
    "straggler_device", "{severity}",
    says="{devices:count device} {devices:is|are} slower than {devices:its|their} peers: the slowest reaches"
         " {percent:round} % of the median speed.",
    evidence=(
        "slowest: {worst.label}, {rate} {worst.unit}",
        "median of {peers:count device} ({model}): {middle} {worst.unit}",
        "reason for its reduced clock: {worst.held_back:?}",
        "{spread}",
    ),
    fix="If this happens again, exclude the node and report it to the site. Look for heat, a busy disk, or other jobs.",
    lines=_EXCLUDE,
)  # fmt: skip


@topic(
    replace(
        _SLOW_DEVICE, kind="straggler_node", when="of_node",
        says="{nodes:count node} {nodes:is|are} slower than {nodes:its|their} peers: the slowest device reaches"
             " {percent:round} % of the median speed.",
    ),
    _SLOW_DEVICE,
)  # fmt: skip
def _slow(facts: JobFacts, summary: Summary) -> Cases:
    """Yield nodes whose devices are all slow, then single slow devices."""
    for peers in peer_groups(facts.tasks, facts.devices):
        stragglers, middle = find_stragglers(peers), median(peer.rate for peer in peers)
        of_node, slow_of_node = Counter(peer.node for peer in peers), Counter(peer.node for peer in stragglers)
        # All devices of a node (two or more) are slow; with two nodes it is not clear which one is.
        whole = {node for node, many in slow_of_node.items() if many == of_node[node] > 1}
        whole = whole if len(of_node) >= _LEAST_NODES else set()
        for of_whole in (True, False):
            slow = [peer for peer in stragglers if (peer.node in whole) == of_whole]
            if not slow:
                continue
            worst, nodes, digits = slow[0], sorted({peer.node for peer in slow}), 1 if middle >= 10 else 2
            yield {
                "of_node": of_whole,
                "severity": WARNING if worst.rate < _VERY_SLOW * middle else NOTE,
                "peers": len(peers),
                "model": worst.rows[0].name or "same model",
                "devices": len(slow),
                "percent": worst.rate / middle * 100,
                "worst": worst,
                "rate": number(worst.rate, digits),
                "middle": number(middle, digits),
                "subjects": nodes if of_whole else [peer.label for peer in slow],
                "cost_s": sum(peer.working_s * (1 - peer.rate / middle) for peer in slow),
                **node_figures(nodes, facts),
            }


# --- measurements that are missing, or disagree -----------------------------------------------------------------------

_GAP, _GAP_S = 0.05, 60.0
_ENERGY, _ENERGY_S = 0.05, 120.0


@topic(Rule(
    "telemetry_gaps", "{severity}",
    says="There are no readings for {of_time} of the GPU time.",
    evidence=(
        "{total_s:gpu_time} of {all_s:gpu_time} without readings",
        "{blind:whole} of {followed} without any reading",
        "{reasons}",
    ),
    fix="The numbers of these devices cover only the rest of the time.{library}",
    lines=("{gpus}",),
))  # fmt: skip
def _gaps(facts: JobFacts, summary: Summary) -> Cases:
    tasks = {task.name: task for task in facts.tasks}
    followed = [device for device in facts.devices if tasks[device.task].telemetry]
    gap_s = {device.device_id: min(device.gap_s, tasks[device.task].wall_s) for device in followed}
    total_s, all_s = sum(gap_s.values()), sum(tasks[device.task].wall_s for device in followed)
    if total_s < max(_GAP_S, _GAP * all_s):
        return
    blind = sum(not device.samples for device in followed)
    reasons = [gap for gap in facts.gaps if gap.metric is None][:3]
    no_library = any("library" in gap.reason for gap in reasons)
    worst = sorted(followed, key=lambda device: -gap_s[device.device_id])
    yield {
        "severity": WARNING if blind or total_s > 0.5 * all_s else NOTE,
        "of_time": share(total_s, all_s),
        "total_s": total_s,
        "all_s": all_s,
        "blind": blind or None,
        # Without the driver's library a container may be the cause; never where the recorder was only slow to start.
        "library": " In a container, use --nv to make GPUs readable." if no_library else "",
        "gpus": "badcjobs gpus" if no_library or blind else None,
        "followed": devices_words(followed),
        "reasons": [f"{count(g.gaps, 'gap')}, {number(g.seconds, 0)} s: {g.reason}" for g in reasons],
        "subjects": labels(device for device in worst if gap_s[device.device_id] > 0),
    }


@topic(Rule(
    "energy_disagrees", NOTE,
    says="On {devices:count device} the energy counter and the power readings disagree.",
    evidence=(
        "largest difference: the counter shows {percent:round} % {more} than the sum of the power readings",
        "{worst}: {counted_wh:one} Wh by the counter, {added_wh:one} Wh by power readings",
    ),
    fix="Treat the energy of this job as an estimate; on healthy GPUs both agree within 1 %.",
))  # fmt: skip
def _energy(facts: JobFacts, summary: Summary) -> Cases:
    odd = []
    for device in facts.devices:
        span_s, counter_j, added_j = device.energy_counter_span_s, device.energy_counter_j, device.energy_integrated_j
        measured_s = sum(device.measured_s.values())
        of_card = (device.uuid or "").startswith("MIG-")  # the counter is that of the GPU, with all its slices
        if of_card or not span_s or not counter_j or not added_j or min(span_s, measured_s) < _ENERGY_S:
            continue
        off = (counter_j / span_s) / (added_j / measured_s) - 1
        unlike = abs(span_s - measured_s) / span_s  # the two were read for different times
        if abs(off) > _ENERGY + unlike:
            odd.append((device, off))
    if odd:
        worst, off = max(odd, key=lambda pair: abs(pair[1]))
        yield {
            "devices": count_devices(device for device, _ in odd),
            "percent": abs(off) * 100,
            "more": "more" if off > 0 else "less",
            "worst": labels([worst])[0],
            "counted_wh": (worst.energy_counter_j or 0.0) / 3600,
            "added_wh": (worst.energy_integrated_j or 0.0) / 3600,
            "subjects": labels(device for device, _ in odd),
        }


TOPICS = (_broken, _overheated, _power_limited, _foreign, _slow, _gaps, _energy)
