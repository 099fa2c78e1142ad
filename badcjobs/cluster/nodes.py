"""The GPUs of a cluster from one call of ``sinfo``: which are free, and where a job would start.

``badcjobs cluster`` prints the result; ``badcjobs check`` uses the sizes of the nodes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from badcjobs.cluster.sbatch_options import parse_gpus
from badcjobs.cluster.slurm import SlurmRefused, ask
from badcjobs.errors import NotHere
from badcjobs.report.tables import Table, columns, table_text
from badcjobs.report.words import count, natural, plain
from badcjobs.seams import Unanswered

# The suffix | separates values that fill their fields; the width is for versions of sinfo without suffixes.
_FIELDS = (
    ("NodeList", 100), ("Partition", 100), ("Available", 20), ("StateLong", 40), ("Time", 30), ("CPUsState", 40),
    ("Features", 500), ("Gres", 500), ("GresUsed", 1000), ("Memory", 20),
)  # fmt: skip
QUESTION = ("sinfo", "-N", "-h", "-O", ",".join(f"{name}:{width}|" for name, width in _FIELDS))

# A node in any other state, or with another mark, starts no job now: drained, down, reserved, completing, …
_TAKING_JOBS = frozenset({"idle", "mixed", "planned"})
_WORKING = _TAKING_JOBS | {"allocated", "completing"}
_HARMLESS_MARKS = frozenset({"~", "#", "-"})  # powered down, powering up, planned for a later job
Document = dict[str, Any]  # of ``badcjobs cluster --json``, or a part of it
UNTYPED = "gpu"  # the kind of a GPU without a type


@dataclass(frozen=True, slots=True)
class GpuCount:
    """The GPUs of one kind in one node."""

    kind: str
    total: int
    used: int


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition."""

    name: str
    default: bool
    up: bool
    time_limit: str


@dataclass(frozen=True, slots=True)
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
        if not self._is(_TAKING_JOBS):
            return self.state
        if self.cores_idle == 0:
            return f"{self.state}, no core"
        return None if self.reachable else f"{self.state}, closed"

    @property
    def works(self) -> bool:
        """Whether it runs jobs, also if it is full."""
        return self._is(_WORKING)

    def _is(self, states: frozenset[str]) -> bool:
        base = self.state.rstrip("*~#!%$@^-")  # mixed- is a state with a mark
        return base.lower() in states and _HARMLESS_MARKS.issuperset(self.state[len(base) :])

    def total(self, kind: str | None = None) -> int:
        return sum(count.total for count in self.of_kind(kind))

    def free(self, kind: str | None = None) -> int:
        """Return how many GPUs a job could get now; 0 if no job would start there."""
        return sum(count.total - count.used for count in self.of_kind(kind)) if self.why_not is None else 0

    def of_kind(self, kind: str | None) -> list[GpuCount]:
        """Return the counts of a kind; it may also be a feature of the node, because some sites name the GPUs there."""
        named = [one for one in self.gpus if kind is None or one.kind == kind]
        return named or (list(self.gpus) if kind in [word.lower() for word in self.features] else [])


@dataclass(frozen=True, slots=True)
class Cluster:
    """All nodes and partitions, each once."""

    nodes: tuple[Node, ...]
    partitions: tuple[Partition, ...]

    def reached(self, partitions: str | None) -> list[Node]:
        """Return the nodes of these partitions (separated by commas), or all that a job can reach."""
        wanted = set(partitions.split(",")) if partitions else None
        return [one for one in self.nodes if (one.reachable if wanted is None else wanted & {*one.partitions})]

    def gpu_nodes(self, kind: str | None) -> list[Node]:
        return [node for node in self.nodes if node.total(kind)]

    @property
    def kinds(self) -> list[str]:
        return sorted({count.kind for node in self.nodes for count in node.gpus})


def query_sinfo(environ: Mapping[str, str]) -> str:
    """Run sinfo once and return its output."""
    # A user's SINFO_FORMAT or SINFO_PARTITION would change the output.
    env = {name: value for name, value in environ.items() if not name.startswith("SINFO_")}
    try:
        return ask(QUESTION, env, instead="badcjobs gpus --all   (the devices of this machine)")
    except Unanswered as error:
        raise SlurmRefused("sinfo does not answer", why=str(error), fix="sinfo   (shows its message)") from error


def parse_sinfo(text: str) -> Cluster:
    """Parse the output of ``QUESTION``; other lines are left out."""
    partitions: dict[str, Partition] = {}
    nodes: dict[str, Node] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in (line.split("|")[:-1] if "|" in line else line.split())]
        if len(cells) != len(_FIELDS):
            continue  # a banner of the site
        name, partition, available, state, time_limit, cores, features, gres, gres_used, memory = cells
        part = Partition(partition.rstrip("*"), partition.endswith("*"), available == "up", time_limit)
        partitions[part.name] = part
        counts = re.fullmatch(r"\d+/(\d+)/\d+/(\d+)", cores)  # allocated/idle/other/total
        before = nodes.get(name)
        nodes[name] = Node(
            name=name,
            state=state,
            partitions=tuple(dict.fromkeys((*(before.partitions if before else ()), part.name))),
            gpus=gpus_of_node(gres, gres_used),
            cores_idle=int(counts[1]) if counts else None,
            features=tuple(word for word in features.split(",") if word and word != "(null)"),
            reachable=part.up or (before is not None and before.reachable),
            cores=int(counts[2]) if counts else None,
            memory_mib=int(memory) if memory.isdecimal() else None,
        )
    in_order = sorted(partitions.values(), key=lambda one: (not one.default, one.name))
    rank = {one.name: place for place, one in enumerate(in_order)}  # the order of sinfo differs from call to call
    listed = (replace(node, partitions=tuple(sorted(node.partitions, key=rank.__getitem__))) for node in nodes.values())
    return Cluster(tuple(sorted(listed, key=lambda node: natural(node.name))), tuple(in_order))


def gpus_of_node(gres: str, gres_used: str) -> tuple[GpuCount, ...]:
    """Count a node's GPUs by kind, from ``gpu:a100:3,gpu:v100:1`` and ``gpu:a100:2(IDX:0-1),gpu:v100:0(IDX:N/A)``.

    Shards and MPS shares are parts of GPUs, which are already counted.
    """
    total, used = Counter[str](), Counter[str]()
    for text, counter in ((gres, total), (gres_used, used)):
        for kind, number in parse_gpus(text, gres=True):
            counter[(kind or UNTYPED).lower()] += number
    strange = sum(many for kind, many in used.items() if kind not in total)  # only one of the two texts has the type
    counts = []
    for kind, many in sorted(total.items()):
        known = min(many, used[kind])
        more = min(many - known, strange)
        strange -= more
        counts += [GpuCount(kind, many, known + more)] if many else []
    return tuple(counts)


def sum_gpus(nodes: Collection[Node], kind: str | None) -> dict[str, int]:
    """Return the total, used, free and unreachable GPUs of nodes; unreachable: no job would start there."""
    total, free = (sum(count(node, kind) for node in nodes) for count in (Node.total, Node.free))
    used = sum(count.used for node in nodes for count in node.of_kind(kind))
    return {"total": total, "used": used, "free": free, "unreachable": total - used - free}


# --- where a job would start ----------------------------------------------------------------------------------------


def choose_best(cluster: Cluster, gpus: int, kind: str | None = None) -> Document | None:
    """Return where a job with this many GPUs would start; None: the cluster cannot run it.

    ``node`` is None if the job waits or needs several nodes; ``free`` is the number of free GPUs of the kind there;
    ``gpus_per_node`` is the number on each of several nodes, None: all on one node.

    The best place is the fullest node with enough free GPUs, which leaves emptier nodes for larger jobs. Otherwise the
    job waits in the partition with the most free GPUs whose nodes are large enough, or uses as few nodes as possible.
    """
    members = {one.name: [node for node in cluster.nodes if one.name in node.partitions] for one in cluster.partitions}
    sums = {one.name: sum_gpus(members[one.name], kind) for one in cluster.partitions if one.up}
    default = {one.name for one in cluster.partitions if one.default}
    fitting = [n for n in cluster.nodes if n.free(kind) >= gpus and not sums.keys().isdisjoint(n.partitions)]
    if fitting:
        node = min(fitting, key=lambda n: (n.free(kind), natural(n.name)))
        there = [name for name in node.partitions if name in sums]
        name, free = max(there, key=lambda one: (sums[one]["free"], one in default)), node.free(kind)
        why = f"the fullest node with room: {free} of {node.total(kind)} free"
        return {"partition": name, "node": node.name, "free": free, "why": why, "nodes": 1, "gpus_per_node": None}
    choices = []  # the fewest nodes with the same number of GPUs on each, then the most free ones
    for name in sums:
        totals = sorted((node.total(kind) for node in members[name]), reverse=True)
        number = next((number for number, least in enumerate(totals, 1) if least * number >= gpus), None)
        if number is not None:
            choices.append((number, -sums[name]["free"], name not in default, name))
    if not choices:
        return None
    number, _, _, name = min(choices)
    free, total = sums[name]["free"], sums[name]["total"]
    each, why = None, f"no node has {gpus} free now, so the job waits; this partition has the most: {free} of {total}"
    if number > 1:
        each, why = -(-gpus // number), f"no node has {gpus}, so the job takes {number}; {free} are free there"
    return {"partition": name, "node": None, "free": free, "why": why, "nodes": number, "gpus_per_node": each}


def largest_size(cluster: Cluster, partitions: str | None = None) -> tuple[int, int | None, int | None] | None:
    """Return the most GPUs, cores and MiB of a node, in these partitions (separated by commas) or anywhere.

    None: there is no such node. sinfo does not show hidden partitions.
    """
    nodes = cluster.reached(partitions)
    if not nodes or (partitions and not {*partitions.split(",")} <= {one.name for one in cluster.partitions}):
        return None
    sizes = [node.cores for node in nodes], [node.memory_mib for node in nodes]
    # A node of unknown size may be the largest.
    cores, memory_mib = (None if None in one else max(filter(None, one), default=None) for one in sizes)
    return max(node.total() for node in nodes), cores, memory_mib


# --- badcjobs cluster -----------------------------------------------------------------------------------------------


def look_at_cluster(environ: Mapping[str, str], *, gpus: int, kind: str | None) -> Document:
    """Call sinfo and describe the cluster; raise NotHere without Slurm or without such a GPU."""
    cluster = parse_sinfo(query_sinfo(environ))
    wanted = None if kind is None else kind.lower()
    if not cluster.gpu_nodes(wanted):
        known = ", ".join(cluster.kinds)
        raise NotHere(
            f"no node here has a GPU of kind {kind!r}" if kind and known else "no node of this cluster has a GPU",
            why=f"kinds are {known}" if known else "sinfo shows no GPU under Gres",
            fix=f"badcjobs cluster --constraint {cluster.kinds[0]}" if known else "sinfo -N -O NodeList,Gres",
        )
    return describe(cluster, gpus, wanted)


def describe(cluster: Cluster, gpus: int, kind: str | None) -> Document:
    """Return the JSON document of ``badcjobs cluster --json``; with ``kind`` it counts only these GPUs."""
    best, nodes = choose_best(cluster, gpus, kind), cluster.gpu_nodes(kind)
    most_on_a_node = max((node.total(kind) for node in cluster.nodes if node.reachable), default=0)
    return {
        "asked": {"gpus": gpus, "kind": kind},
        **sum_gpus(nodes, kind),
        "kinds": cluster.kinds,
        "fits": best is not None and gpus <= most_on_a_node,  # one node has this many, free or not
        "most_on_a_node": most_on_a_node,
        "best": best,
        "partitions": [
            {**asdict(one), "nodes": len(members), **sum_gpus(members, kind)}
            for one in cluster.partitions
            if (members := [node for node in nodes if one.name in node.partitions])
        ],
        "nodes": [
            {**asdict(node), "takes_jobs": node.why_not is None, "why_not": node.why_not, **sum_gpus([node], kind)}
            for node in nodes
        ],
    }


def cluster_text(found: Document) -> str:
    """Return partitions, nodes and advice of a document as text, at most 100 columns wide."""
    counts = ("free", "used", "total")
    partitions = [
        (
            _cut(one["name"], 32),
            "down" if not one["up"] else "default" if one["default"] else "",
            *(str(one[key]) for key in ("time_limit", "nodes", *counts)),
        )
        for one in found["partitions"]
    ]
    rows = [
        (
            _cut(node["name"], 20),
            _cut(node["why_not"] or node["state"], 18),
            _cut("+".join(f"{one['kind']}×{one['total']}" for one in node["gpus"]), 18),
            _cut(",".join(node["partitions"]), 16),
            *(str(node[key]) for key in counts),
        )
        for node in found["nodes"]
    ]
    kind = f" of kind {found['asked']['kind']}" if found["asked"]["kind"] else ""
    of_partitions = columns("<partition", "<", "<time limit", "nodes", *counts)
    of_nodes = columns("<node", "<state", "<kinds", "<partitions", *counts)
    lines = [
        f"{found['free']} of {found['total']} GPUs{kind} are free on {count(len(rows), 'node')}:"
        f" {found['used']} used, {found['unreachable']} on nodes that start no job now",
        "",
        *table_text(Table("partitions", "Partitions", of_partitions, partitions)),
        "",
        *table_text(Table("nodes", "Nodes", of_nodes, rows)),
        "",
        *_advice(found, count(found["asked"]["gpus"], "GPU") + kind),
    ]
    return "\n".join(plain(line) for line in lines)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _advice(found: Document, wanted: str) -> list[str]:
    best, most = found["best"], found["most_on_a_node"]
    if not most:
        return [f"  best for {wanted}: every partition with such GPUs is down"]
    if found["fits"]:
        node = [f"    on node {_cut(best['node'], 80)}"] if best["node"] else []
        return [f"  best for {wanted}: partition {_cut(best['partition'], 60)}", *node, f"    {best['why']}"]
    smaller = f"badcjobs template array --set gpus-per-node={most}   (more tasks, each on one node)"
    lines = [f"  no node has {wanted}; the largest has {most}"]
    if best is None:
        return [*lines, f"    and no partition has as many on several nodes; try: {smaller}"]
    several = f"--set nodes={best['nodes']} --set gpus-per-node={best['gpus_per_node']}"
    return [
        *lines,
        f"    {best['nodes']} nodes of partition {_cut(best['partition'], 50)} have them together",
        f"    try: badcjobs template multinode {several}   (one badcjobs on each)",
        f"    or:  {smaller}",
    ]
