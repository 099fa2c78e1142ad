"""What one ``sinfo`` says about the GPUs of a cluster: which are used, and which are free.

All pure: the question as words, the answer as text. Who asks is ``badcjobs/cluster.py``, where a job fits best is
``node_choice.py``'s business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

# A suffix, because nothing else parts a value that fills its field from the next; a width for those without suffixes.
_FIELDS = (
    ("NodeList", 100), ("Partition", 100), ("Available", 20), ("StateLong", 40), ("Time", 30), ("CPUsState", 40),
    ("Features", 500), ("Gres", 500), ("GresUsed", 1000), ("Memory", 20),
)  # fmt: skip
QUESTION = ("sinfo", "-N", "-h", "-O", ",".join(f"{name}:{width}|" for name, width in _FIELDS))

# A node in another state, or with another mark, starts no job now: drained, down, reserved, completing, …
_TAKING_JOBS = frozenset({"idle", "mixed", "planned"})
_WORKING = _TAKING_JOBS | {"allocated", "completing"}
_HARMLESS_MARKS = frozenset({"~", "#", "-"})  # asleep, waking up, planned for a job that may come later
UNTYPED = "gpu"  # the kind of a GPU whose type the site does not name


@dataclass(frozen=True, slots=True)
class GpuCount:
    """The GPUs of one kind in one node."""

    kind: str
    total: int
    used: int


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition, as sinfo shows it."""

    name: str
    default: bool
    up: bool
    time_limit: str


@dataclass(frozen=True, slots=True)
class Node:
    """One node with the partitions it is in."""

    name: str
    state: str  # as sinfo says it, with its mark
    partitions: tuple[str, ...]
    gpus: tuple[GpuCount, ...]
    cores_idle: int | None
    features: tuple[str, ...] = ()  # in large and small letters, which --constraint tells apart
    reachable: bool = True  # in a partition that is up
    cores: int | None = None
    memory_mib: int | None = None  # what jobs can ask for, at most

    @property
    def why_not(self) -> str | None:
        """Why Slurm would start no job there now; None: it would."""
        base, marks = parse_state(self.state)
        if base not in _TAKING_JOBS or not marks <= _HARMLESS_MARKS:
            return self.state
        if self.cores_idle == 0:
            return f"{self.state}, no core"
        return None if self.reachable else f"{self.state}, closed"

    @property
    def works(self) -> bool:
        """Whether it runs jobs at all, be it full or not."""
        base, marks = parse_state(self.state)
        return base in _WORKING and marks <= _HARMLESS_MARKS

    @property
    def takes_jobs(self) -> bool:
        """Whether Slurm would start another job there now."""
        return self.why_not is None

    def total(self, kind: str | None = None) -> int:
        return sum(count.total for count in self._of(kind))

    def used(self, kind: str | None = None) -> int:
        return sum(count.used for count in self._of(kind))

    def free(self, kind: str | None = None) -> int:
        """Return how many GPUs a job could get now; none where no job would be started."""
        return max(0, self.total(kind) - self.used(kind)) if self.takes_jobs else 0

    def _of(self, kind: str | None) -> list[GpuCount]:
        """Return the counts of a kind, which may also be a feature of the node: some sites name the cards there."""
        named = [one for one in self.gpus if kind is None or one.kind == kind]
        return named or (list(self.gpus) if kind in [word.lower() for word in self.features] else [])


@dataclass(frozen=True, slots=True)
class Cluster:
    """All nodes and partitions, each once."""

    nodes: tuple[Node, ...]
    partitions: tuple[Partition, ...]

    def members(self, partition: Partition) -> list[Node]:
        return [node for node in self.nodes if partition.name in node.partitions]

    def reached(self, partitions: str | None) -> list[Node]:
        """Return the nodes of these partitions (with commas between), or all that a job can reach."""
        wanted = set(partitions.split(",")) if partitions else None
        return [one for one in self.nodes if (one.reachable if wanted is None else wanted & {*one.partitions})]

    def gpu_nodes(self, kind: str | None = None) -> list[Node]:
        return [node for node in self.nodes if node.total(kind)]

    @property
    def kinds(self) -> list[str]:
        return sorted({count.kind for node in self.nodes for count in node.gpus})


def parse_sinfo(text: str) -> Cluster:
    """Read the answer to ``QUESTION``; a line that does not look like one is left out."""
    partitions: dict[str, Partition] = {}
    nodes: dict[str, Node] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in (line.split("|")[:-1] if "|" in line else line.split())]
        if len(cells) != len(_FIELDS):
            continue  # a banner of the site
        name, partition, available, state, time_limit, cores, features, gres, gres_used, memory = cells
        part = Partition(partition.rstrip("*"), partition.endswith("*"), available == "up", time_limit)
        partitions[part.name] = part
        before = nodes.get(name)
        there = (*before.partitions, part.name) if before else (part.name,)
        words = tuple(word for word in features.split(",") if word and word != "(null)")
        up = part.up or (before is not None and before.reachable)
        gpus = count_gpus(gres, gres_used)
        idle, all_cores = _cores(cores)
        memory_mib = int(memory) if memory.isdecimal() else None
        there = tuple(dict.fromkeys(there))
        nodes[name] = Node(name, state, there, gpus, idle, words, up, all_cores, memory_mib)
    in_order = sorted(partitions.values(), key=lambda one: (not one.default, one.name))
    rank = {one.name: place for place, one in enumerate(in_order)}  # sinfo's own order changes from call to call
    listed = (replace(node, partitions=tuple(sorted(node.partitions, key=rank.__getitem__))) for node in nodes.values())
    return Cluster(tuple(sorted(listed, key=lambda node: natural_order(node.name))), tuple(in_order))


def count_gpus(gres: str, gres_used: str) -> tuple[GpuCount, ...]:
    """Count a node's GPUs by kind, from ``gpu:a100:3,gpu:v100:1`` and ``gpu:a100:2(IDX:0-1),gpu:v100:0(IDX:N/A)``.

    Shards and MPS shares are parts of GPUs that are counted already.
    """
    total, used = _counts(gres), _counts(gres_used)
    strange = sum(many for kind, many in used.items() if kind not in total)  # one side names the type, the other not
    counts = []
    for kind, many in sorted(total.items()):
        known = min(many, used.get(kind, 0))
        more = min(many - known, strange)
        strange -= more
        counts += [GpuCount(kind, many, known + more)] if many else []
    return tuple(counts)


def _counts(gres: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    # Some versions write gpu:(null):2 for no type. What else stands in brackets (indices, sockets) has its own commas.
    for word in re.sub(r"\([^()]*\)", "", gres.replace(":(null)", "")).split(","):
        found = re.fullmatch(r"gpu(?::([^:]+))??(?::(\d+))?", word.strip())
        if found:
            kind = (found[1] or UNTYPED).lower()
            counts[kind] = counts.get(kind, 0) + (1 if found[2] is None else int(found[2]))
    return counts


def parse_state(state: str) -> tuple[str, frozenset[str]]:
    """Split ``mixed-`` into the state and its marks."""
    base = state.rstrip("*~#!%$@^-")
    return base.lower(), frozenset(state[len(base) :])


def _cores(text: str) -> tuple[int | None, int | None]:
    """Read idle and total out of allocated/idle/other/total; None: it says something else."""
    parts = text.split("/")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        return None, None
    return int(parts[1]), int(parts[3])


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort gpu2 before gpu10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d+)", name)]


def add_up(nodes: Iterable[Node], kind: str | None) -> tuple[int, int, int]:
    """Return total, used and free GPUs."""
    listed = list(nodes)
    return (
        sum(node.total(kind) for node in listed),
        sum(node.used(kind) for node in listed),
        sum(node.free(kind) for node in listed),
    )


def sum_gpus(nodes: Iterable[Node], kind: str | None = None) -> dict[str, int]:
    """Return total, used, free and (where no job would be started) unreachable GPUs of some nodes."""
    total, used, free = add_up(nodes, kind)
    return {"total": total, "used": used, "free": free, "unreachable": total - used - free}
