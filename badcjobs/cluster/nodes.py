"""The GPUs of a cluster from one call of ``sinfo``: which are free, and where a job would start.

``badcjobs cluster`` prints the result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from badcjobs.cluster.sbatch_options import parse_gpus
from badcjobs.cluster.slurm import SlurmRefused
from badcjobs.devices.slurm_programs import list_nodes
from badcjobs.errors import NotHere
from badcjobs.report.tables import Table, columns, table_text
from badcjobs.report.text import wrap
from badcjobs.seams import Environ, Unanswered
from badcjobs.words import count, natural, plain

# The suffix | separates values that fill their fields; sinfo cuts a value that is wider.
_FIELDS = {
    "NodeList": 100,
    "Partition": 100,
    "Available": 20,
    "StateLong": 40,
    "Time": 30,
    "CPUsState": 40,
    "Features": 500,
    "Gres": 500,
    "GresUsed": 1000,
    "Memory": 20,
}

# A node in any other state, or with another mark, starts no job now: drained, down, reserved, completing, …
_TAKING_JOBS = frozenset({"idle", "mixed", "planned"})
_HARMLESS_MARKS = frozenset({"~", "#", "-"})  # powered down, powering up, planned for a later job
Cells = Mapping[str, str]  # of a line of sinfo
Document = dict[str, Any]  # of ``badcjobs cluster --json``, or a part of it
UNTYPED = "gpu"  # the kind of a GPU without a type


@dataclass(frozen=True)
class GpuCount:
    """The GPUs of one kind in one node."""

    kind: str
    total: int
    used: int


class Partition(NamedTuple):
    """One partition."""

    name: str
    default: bool
    up: bool
    time_limit: str


@dataclass(frozen=True)
class Node:
    """One node with its partitions."""

    name: str
    state: str  # of sinfo, with its marks
    partitions: tuple[str, ...]
    gpus: tuple[GpuCount, ...]
    cores_idle: int | None
    features: tuple[str, ...] = ()  # --constraint is case-sensitive
    reachable: bool = True  # in a partition that is up
    cores: int | None = None
    memory_mib: int | None = None  # the most that a job can request

    @property
    def why_not(self) -> str | None:
        """Why Slurm starts no job on it now; None: it does."""
        base = self.state.rstrip("*~#!%$@^-")  # mixed- is a state with a mark
        if base.lower() not in _TAKING_JOBS or not _HARMLESS_MARKS.issuperset(self.state[len(base) :]):
            return self.state
        if self.cores_idle == 0:
            return f"{self.state}, no core"
        return None if self.reachable else f"{self.state}, closed"

    def total(self, kind: str | None) -> int:
        return sum(count.total for count in self.of_kind(kind))

    def free(self, kind: str | None = None) -> int:
        """Return how many GPUs a job could get now; 0 if no job would start there."""
        if self.why_not is not None:
            return 0
        return sum(count.total - count.used for count in self.of_kind(kind))

    def of_kind(self, kind: str | None) -> list[GpuCount]:
        """Return the counts of a kind; it may also be a feature of the node, because some sites name the GPUs there."""
        named = [count for count in self.gpus if kind is None or count.kind == kind]
        if not named and kind in [feature.lower() for feature in self.features]:
            return list(self.gpus)
        return named


class Cluster(NamedTuple):
    """All nodes and partitions, each once and always in the same order; that of sinfo differs from call to call."""

    nodes: Sequence[Node]
    partitions: Sequence[Partition]

    def nodes_in(self, partition: str) -> list[Node]:
        return [node for node in self.nodes if partition in node.partitions]

    def gpu_nodes(self, kind: str | None) -> list[Node]:
        return [node for node in self.nodes if node.total(kind)]

    @property
    def kinds(self) -> list[str]:
        return sorted({count.kind for node in self.nodes for count in node.gpus})


def query_sinfo(environ: Environ) -> str:
    """Run sinfo once and return its output."""
    try:
        return list_nodes(",".join(f"{name}:{width}|" for name, width in _FIELDS.items()), environ)
    except Unanswered as error:
        raise SlurmRefused("sinfo does not answer", why=str(error), fix="sinfo   (shows its message)") from error


def parse_sinfo(text: str) -> Cluster:
    """Parse the output of ``query_sinfo``; other lines are left out."""
    lines = [line.split("|")[:-1] for line in text.splitlines()]
    rows: list[Cells] = [
        dict(zip(_FIELDS, map(str.strip, line), strict=True)) for line in lines if len(line) == len(_FIELDS)
    ]
    rows.sort(key=lambda cells: (not cells["Partition"].endswith("*"), cells["Partition"]))
    partitions = {}
    rows_of_nodes: dict[str, list[Cells]] = {}  # sinfo lists a node once for each of its partitions
    for cells in rows:
        name = cells["Partition"]
        partition = Partition(name.rstrip("*"), name.endswith("*"), cells["Available"] == "up", cells["Time"])
        partitions[name] = partition
        rows_of_nodes.setdefault(cells["NodeList"], []).append(cells)
    nodes = [_make_node(rows_of_nodes[name]) for name in sorted(rows_of_nodes, key=natural)]
    return Cluster(nodes, list(partitions.values()))


def _make_node(rows: Sequence[Cells]) -> Node:
    cells = rows[-1]
    counts = re.fullmatch(r"\d+/(\d+)/\d+/(\d+)", cells["CPUsState"])  # allocated/idle/other/total
    features = cells["Features"].split(",")
    memory = cells["Memory"]
    return Node(
        name=cells["NodeList"],
        state=cells["StateLong"],
        partitions=tuple(row["Partition"].rstrip("*") for row in rows),
        gpus=gpus_of_node(cells["Gres"], cells["GresUsed"]),
        cores_idle=int(counts[1]) if counts else None,
        features=tuple(feature for feature in features if feature not in ("", "(null)")),
        reachable=any(row["Available"] == "up" for row in rows),
        cores=int(counts[2]) if counts else None,
        memory_mib=int(memory) if memory.isdecimal() else None,
    )


def gpus_of_node(gres: str, gres_used: str) -> tuple[GpuCount, ...]:
    """Count a node's GPUs by kind, from ``gpu:a100:3,gpu:v100:1`` and ``gpu:a100:2(IDX:0-1),gpu:v100:0(IDX:N/A)``.

    Shards and MPS shares are parts of GPUs, which are already counted.
    """
    total = +_count_kinds(gres)
    used = _count_kinds(gres_used)
    # Only one of the two texts may have the type: these may be of any kind.
    untyped = sum(many for kind, many in used.items() if kind not in total)
    return tuple(GpuCount(kind, many, min(many, used[kind] + untyped)) for kind, many in sorted(total.items()))


def _count_kinds(gres: str) -> Counter[str]:
    counts = Counter[str]()
    for kind, number in parse_gpus(gres):
        counts[(kind or UNTYPED).lower()] += number
    return counts


def sum_gpus(nodes: Collection[Node], kind: str | None) -> dict[str, int]:
    """Return the total, used, free and unreachable GPUs of nodes; unreachable: no job would start there."""
    total = sum(node.total(kind) for node in nodes)
    free = sum(node.free(kind) for node in nodes)
    used = sum(count.used for node in nodes for count in node.of_kind(kind))
    return {"total": total, "used": used, "free": free, "unreachable": total - used - free}


# --- where a job would start ----------------------------------------------------------------------------------------


def choose_best(cluster: Cluster, gpus: int, kind: str | None = None) -> Document | None:
    """Return where a job with this many GPUs on one node would start; None: no node has so many.

    ``node`` is None if the job waits; ``free`` is the number of free GPUs of the kind there.

    The best place is the fullest node with enough free GPUs, which leaves emptier nodes for larger jobs. Otherwise the
    job waits in the partition with the most free GPUs.
    """
    nodes_of = {partition.name: cluster.nodes_in(partition.name) for partition in cluster.partitions if partition.up}
    free = {name: sum_gpus(nodes, kind)["free"] for name, nodes in nodes_of.items()}
    fitting = [node for node in cluster.nodes if node.free(kind) >= gpus]
    if fitting:
        node = min(fitting, key=lambda node: node.free(kind))
        partition = max((name for name in node.partitions if name in free), key=free.__getitem__)
        why = f"the fullest node with room: {node.free(kind)} of {node.total(kind)} free"
        return {"partition": partition, "node": node.name, "free": node.free(kind), "why": why}

    large = [name for name, nodes in nodes_of.items() if any(node.total(kind) >= gpus for node in nodes)]
    if not large:
        return None
    partition = max(large, key=free.__getitem__)
    why = f"no node has {gpus} free now, so the job waits; {free[partition]} are free in this partition"
    return {"partition": partition, "node": None, "free": free[partition], "why": why}


# --- badcjobs cluster -----------------------------------------------------------------------------------------------


def look_at_cluster(environ: Environ, *, gpus: int, kind: str | None) -> Document:
    """Call sinfo and describe the cluster; raise NotHere without Slurm or without such a GPU."""
    cluster = parse_sinfo(query_sinfo(environ))
    kind_name = kind and kind.lower()
    if cluster.gpu_nodes(kind_name):
        return describe(cluster, gpus, kind_name)
    if not cluster.kinds:
        why = "sinfo shows no GPU under Gres"
        raise NotHere("no node of this cluster has a GPU", why=why, fix="sinfo -N -O NodeList,Gres")
    raise NotHere(
        f"no node here has a GPU of kind {kind!r}",
        why=f"kinds are {', '.join(cluster.kinds)}",
        fix=f"badcjobs cluster --constraint {cluster.kinds[0]}",
    )


def describe(cluster: Cluster, gpus: int, kind: str | None) -> Document:
    """Return the JSON document of ``badcjobs cluster --json``; with ``kind`` it counts only these GPUs."""
    best = choose_best(cluster, gpus, kind)
    nodes = cluster.gpu_nodes(kind)
    most_on_a_node = max((node.total(kind) for node in cluster.nodes if node.reachable), default=0)
    partitions = []
    for partition in cluster.partitions:
        members = [node for node in nodes if partition.name in node.partitions]
        if members:
            partitions.append({**partition._asdict(), "nodes": len(members), **sum_gpus(members, kind)})
    rows = []
    for node in nodes:
        why_not = {"takes_jobs": node.why_not is None, "why_not": node.why_not}
        rows.append({**asdict(node), **why_not, **sum_gpus([node], kind)})
    return {
        "asked": {"gpus": gpus, "kind": kind},
        **sum_gpus(nodes, kind),
        "kinds": cluster.kinds,
        "fits": best is not None,  # one node has this many, free or not
        "most_on_a_node": most_on_a_node,
        "best": best,
        "partitions": partitions,
        "nodes": rows,
    }


_COUNTS = ("free", "used", "total")


def cluster_text(view: Document, width: int) -> str:
    """Return partitions, nodes and advice of a document as text; commands are not cut."""
    partitions = [_partition_row(partition) for partition in view["partitions"]]
    nodes = [_node_row(node) for node in view["nodes"]]
    of_kind = ""
    if view["asked"]["kind"]:
        of_kind = f" of kind {view['asked']['kind']}"
    of_partitions = columns("<partition", "<", "<time limit", "nodes", *_COUNTS)
    of_nodes = columns("<node", "<state", "<kinds", "<partitions", *_COUNTS)
    headline = (
        f"{view['free']} of {view['total']} GPUs{of_kind} are free on {count(len(nodes), 'node')}:"
        f" {view['used']} used, {view['unreachable']} on nodes that start no job now"
    )
    lines = [
        *wrap(headline, indent=2, width=width),
        "",
        *table_text(Table("partitions", "Partitions", of_partitions, partitions), width),
        "",
        *table_text(Table("nodes", "Nodes", of_nodes, nodes), width),
        "",
        *_advice(view, count(view["asked"]["gpus"], "GPU") + of_kind, width),
    ]
    return "\n".join(plain(line) for line in lines)


def _partition_row(partition: Document) -> tuple[str, ...]:
    note = "default" if partition["default"] else ""
    if not partition["up"]:
        note = "down"
    return (partition["name"], note, *_texts(partition, "time_limit", "nodes", *_COUNTS))


def _node_row(node: Document) -> tuple[str, ...]:
    kinds = "+".join(f"{count['kind']}×{count['total']}" for count in node["gpus"])
    state = node["why_not"] or node["state"]
    return (node["name"], state, kinds, ",".join(node["partitions"]), *_texts(node, *_COUNTS))


def _texts(row: Document, *keys: str) -> list[str]:
    return [str(row[key]) for key in keys]


def _advice(view: Document, wanted: str, width: int) -> list[str]:
    """Return where a job would start, or how to change it."""
    best = view["best"]
    most = view["most_on_a_node"]
    if not most:
        return [f"  best for {wanted}: every partition with such GPUs is down"]
    if best is not None:
        lines = [f"  best for {wanted}: partition {best['partition']}"]
        if best["node"]:
            lines.append(f"    on node {best['node']}")
        return [*lines, *wrap(f"    {best['why']}", indent=4, width=width)]
    try_fewer = f"badcjobs template array --set gpus-per-node={most}   (more tasks, each on one node)"
    return [f"  no node has {wanted}; the largest has {most}", f"    try: {try_fewer}"]
