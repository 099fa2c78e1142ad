"""Devices and nodes that are slower than their peers: the same model, at the same work."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from badcjobs.model import NOTE, WARNING, DeviceFacts, Finding, JobFacts
from badcjobs.report.cards import card
from badcjobs.report.finding_rules.device_time import each_once, labels
from badcjobs.report.finding_rules.nodes import exclude_lines, too_many
from badcjobs.report.summarize import Summary
from badcjobs.report.words import count, number, plain

_LEAST_PEERS = 4  # with fewer, nobody knows who is the odd one
_LEAST_NODES = 3
_LEAST_CHUNKS, _LEAST_S = 10, 60.0
_SLOW = 0.75  # of the median
_SPREADS = 3.5 * 1.4826  # of the median distance from the median: farther than chance
_LONGER = 1.1
_VERY_SLOW = 0.5


@dataclass(frozen=True, slots=True)
class _Peer:
    """A device over all tasks of one shape that had it."""

    rows: tuple[DeviceFacts, ...]

    @property
    def node(self) -> str:
        return self.rows[0].node

    @property
    def working_s(self) -> float:
        return sum(row.states["working"].total_s for row in self.rows if "working" in row.states)

    @property
    def done(self) -> int:
        return sum(row.work.done for row in self.rows)

    @property
    def audio_s(self) -> float:
        return sum(row.work.audio_s for row in self.rows)

    @property
    def chunk_p50_s(self) -> float:
        return median([row.work.chunk_p50_s or 0.0 for row in self.rows])

    @property
    def label(self) -> str:
        return labels(self.rows)[0]


@dataclass(frozen=True, slots=True)
class _Group:
    """Devices that can be compared, and how fast each of them was."""

    peers: Sequence[_Peer]

    @property
    def by_audio(self) -> bool:
        return all(peer.audio_s > 0 for peer in self.peers)

    @property
    def unit(self) -> str:
        return "× real time" if self.by_audio else "chunks per minute"

    def rate(self, peer: _Peer) -> float:
        """Return seconds of audio per second of work; where not all lengths are known, chunks per minute."""
        return (peer.audio_s if self.by_audio else 60 * peer.done) / peer.working_s


def judge_stragglers(facts: JobFacts, summary: Summary) -> Iterator[Finding]:
    """Yield nodes whose devices are all slow, then devices that are slow alone."""
    for group in _groups(facts):
        rates = [group.rate(peer) for peer in group.peers]
        middle, usual_s = median(rates), median(peer.chunk_p50_s for peer in group.peers)
        slow_from = min(_SLOW * middle, middle - _SPREADS * median(abs(rate - middle) for rate in rates))
        slow = [
            peer for peer, rate in zip(group.peers, rates, strict=True)
            # Who is left alone with the last, long chunk is not slow: its other chunks took no longer than usual.
            if rate < slow_from and peer.chunk_p50_s > _LONGER * usual_s
        ]  # fmt: skip
        whole = _whole_nodes(slow, group.peers)
        on_nodes = [peer for peer in slow if peer.node in whole]
        if on_nodes:
            yield _finding("straggler_node", on_nodes, group, middle, facts)
        alone = [peer for peer in slow if peer.node not in whole]
        if alone:
            yield _finding("straggler_device", alone, group, middle, facts)


def _whole_nodes(slow: Sequence[_Peer], peers: Sequence[_Peer]) -> set[str]:
    """Return the nodes of which all devices, two at least, are slow; of two nodes nobody knows which is the odd one."""
    of_node, slow_of_node = Counter(peer.node for peer in peers), Counter(peer.node for peer in slow)
    if len(of_node) < _LEAST_NODES:
        return set()
    return {node for node, many in slow_of_node.items() if many == of_node[node] > 1}


def _groups(facts: JobFacts) -> Iterator[_Group]:
    """Yield devices that can be compared: the same model and engine, the same company on it and around it."""
    tasks = {task.name: task for task in facts.tasks}
    found: dict[tuple[object, ...], dict[tuple[str, str], list[DeviceFacts]]] = defaultdict(lambda: defaultdict(list))
    for device in facts.devices:
        task = tasks[device.task]
        if "working" in device.states and device.work.done:
            found[device.name, task.engine, task.devices, task.workers, task.cpus][card(device)].append(device)
    for rows in found.values():
        peers = [_Peer(tuple(of_one)) for of_one in rows.values()]
        known = [peer for peer in peers if peer.working_s >= _LEAST_S and peer.done >= _LEAST_CHUNKS]
        if len(known) >= _LEAST_PEERS:
            yield _Group(known)


def _finding(kind: str, slow: Sequence[_Peer], group: _Group, middle: float, facts: JobFacts) -> Finding:
    worst, nodes = min(slow, key=group.rate), sorted({peer.node for peer in slow})
    whole = kind == "straggler_node"
    what = count(len(nodes), "node") if whole else count(len(slow), "device")
    one = (len(nodes) if whole else len(slow)) == 1
    reasons = sorted({reason for peer in slow for row in peer.rows for reason in row.throttled if reason != "gpu_idle"})
    lowered = ", ".join(reason.replace("_", " ") for reason in reasons)
    model, digits = worst.rows[0].name or "same model", 1 if middle >= 10 else 2
    return Finding(
        kind, WARNING if group.rate(worst) < _VERY_SLOW * middle else NOTE,
        f"{what} {'is' if one else 'are'} slower than {'its' if one else 'their'} peers:"
        f" {number(group.rate(worst) / middle * 100, 0)} % of the median speed at worst.",
        (
            plain(f"the slowest, {worst.label}: {number(group.rate(worst), digits)} {group.unit}"),
            plain(f"median of {count(len(group.peers), 'device')} ({model}): {number(middle, digits)} {group.unit}"),
            *([f"lowered clocks there: {lowered}"] if reasons else []), *too_many(nodes, facts),
        ),
        "If it is so again, leave the node out and tell the site; look for heat, a busy disk, other people's jobs.",
        exclude_lines(nodes, facts),
        each_once(map(plain, nodes)) if whole else each_once(peer.label for peer in slow),
        sum(peer.working_s * (1 - group.rate(peer) / middle) for peer in slow) / 3600,
    )  # fmt: skip
