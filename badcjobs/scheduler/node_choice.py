"""Where a job of so many GPUs would start: on one node now, on one later, or spread over several. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from badcjobs.scheduler.sinfo import Cluster, Partition, add_up, natural_order


@dataclass(frozen=True, slots=True)
class Best:
    """Where a job would start soonest; ``node`` is None when it has to wait, or to spread over several."""

    partition: str
    node: str | None
    free: int  # there, of the kind
    why: str
    nodes: int = 1
    gpus_per_node: int | None = None  # on each of several nodes; None: all on one


def choose_best(cluster: Cluster, gpus: int, kind: str | None = None) -> Best | None:
    """Return where a job of so many GPUs would start; None: it could not, on one node or on several.

    A whole job on one node is quickest: on the fullest node where it still fits, so that larger ones keep their room.
    Otherwise it waits in the partition with the most free GPUs among those whose nodes have so many at all, or is
    spread over as few nodes as can be.
    """
    open_ones = [partition for partition in cluster.partitions if partition.up]
    reached = {one.name for one in open_ones}
    fitting = [n for n in cluster.nodes if n.free(kind) >= gpus and reached.intersection(n.partitions)]
    if fitting:
        node = min(fitting, key=lambda n: (n.free(kind), natural_order(n.name)))
        at = _most_free([p for p in open_ones if p.name in node.partitions], cluster, kind)
        free = node.free(kind)
        return Best(at.name, node.name, free, f"the fullest node with room: {free} of {node.total(kind)} free")
    large_enough = [p for p in open_ones if any(node.total(kind) >= gpus for node in cluster.members(p))]
    if large_enough:
        at = _most_free(large_enough, cluster, kind)
        total, _, free = add_up(cluster.members(at), kind)
        why = f"no node has {gpus} free now, so the job waits; most are free there: {free} of {total}"
        return Best(at.name, None, free, why)
    return _choose_several(cluster, open_ones, gpus, kind)


def most_on_a_node(cluster: Cluster, kind: str | None = None) -> int:
    """Return how many GPUs the largest node has, of those that a job can reach at all."""
    return max((node.total(kind) for node in cluster.nodes if node.reachable), default=0)


@dataclass(frozen=True, slots=True)
class NodeSize:
    """The most that any of some nodes has, each for itself; None: sinfo does not say."""

    gpus: int
    cores: int | None
    memory_mib: int | None


def largest_size(cluster: Cluster, partitions: str | None = None) -> NodeSize | None:
    """Return what a job can ask for on one node, in these partitions (with commas between) or anywhere.

    None where there is no such node: sinfo does not show partitions that are hidden.
    """
    nodes = cluster.reached(partitions)
    if not nodes or (partitions and not {*partitions.split(",")} <= {one.name for one in cluster.partitions}):
        return None
    return NodeSize(
        gpus=max(node.total() for node in nodes),
        cores=_largest([node.cores for node in nodes]),
        memory_mib=_largest([node.memory_mib for node in nodes]),
    )


def _largest(numbers: Sequence[int | None]) -> int | None:
    """Return the largest; None where one is not known, for it may be larger."""
    known = [number for number in numbers if number is not None]
    return max(known) if len(known) == len(numbers) else None


def _choose_several(cluster: Cluster, open_ones: Sequence[Partition], gpus: int, kind: str | None) -> Best | None:
    """Return the partition that gives so many GPUs on the fewest nodes, with the same number on each."""
    choices = []
    for partition in open_ones:
        totals = sorted((node.total(kind) for node in cluster.members(partition)), reverse=True)
        for number, least in enumerate(totals, 1):
            each = -(-gpus // number)
            if least >= each:
                choices.append((number, -add_up(cluster.members(partition), kind)[2], partition.name, each))
                break
    if not choices:
        return None
    nodes, free, name, each = min(choices)
    why = f"no node has {gpus}, so the job takes {nodes}; {-free} are free there"
    return Best(name, None, -free, why, nodes, each)


def _most_free(partitions: Sequence[Partition], cluster: Cluster, kind: str | None) -> Partition:
    return max(partitions, key=lambda one: (add_up(cluster.members(one), kind)[2], one.default))
