"""Asks Slurm once which GPUs are free; what ``badcjobs cluster`` shows."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from badcjobs.errors import ExitCode, NotHere
from badcjobs.report.as_text import table
from badcjobs.report.words import count, plain
from badcjobs.scheduler.node_choice import Best, choose_best, most_on_a_node
from badcjobs.scheduler.sinfo import QUESTION, Cluster, Node, parse_sinfo, sum_gpus
from badcjobs.scheduler.slurm import SlurmRefused

_PATIENCE_S = 60.0  # a controller under load answers late


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster as it is now, and where a job of so many GPUs would go."""

    cluster: Cluster
    gpus: int
    kind: str | None
    best: Best | None
    most_on_a_node: int

    @property
    def fits(self) -> bool:
        """Whether there is a node that has so many GPUs, be they free or not."""
        return self.best is not None and self.gpus <= self.most_on_a_node

    @property
    def exit_code(self) -> int:
        """3 where no node has what was asked for: it is not here, however long one waits."""
        return ExitCode.DONE if self.fits else ExitCode.NOT_HERE

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of ``badcjobs cluster --json``; ``kind`` narrows every number in it."""
        return {
            "asked": {"gpus": self.gpus, "kind": self.kind},
            **sum_gpus(self.cluster.gpu_nodes(self.kind), self.kind),
            "kinds": self.cluster.kinds,
            "fits": self.fits,
            "most_on_a_node": self.most_on_a_node,
            "best": None if self.best is None else asdict(self.best),
            "partitions": [
                {**asdict(one), "nodes": len(members), **sum_gpus(members, self.kind)}
                for one in self.cluster.partitions
                if (members := [node for node in self.cluster.members(one) if node.total(self.kind)])
            ],
            "nodes": [
                {**asdict(node), "takes_jobs": node.takes_jobs, **sum_gpus([node], self.kind)}
                for node in self.cluster.gpu_nodes(self.kind)
            ],
        }


def look_at_cluster(environ: Mapping[str, str], *, gpus: int, kind: str | None) -> ClusterView:
    """Ask sinfo and choose; raise NotHere without Slurm or without any such GPU."""
    cluster = parse_sinfo(query_sinfo(environ))
    wanted = None if kind is None else kind.lower()
    if not cluster.gpu_nodes(wanted):
        known = ", ".join(cluster.kinds)
        raise NotHere(
            f"no node here has a GPU of kind {kind!r}" if kind and known else "no node of this cluster has a GPU",
            why=f"kinds are {known}" if known else "sinfo lists none under Gres",
            fix=f"badcjobs cluster --kind {cluster.kinds[0]}" if known else "sinfo -N -O NodeList,Gres",
        )
    return view_cluster(cluster, gpus, wanted)


def view_cluster(cluster: Cluster, gpus: int, kind: str | None) -> ClusterView:
    """Choose where a job of so many GPUs would go."""
    return ClusterView(cluster, gpus, kind, choose_best(cluster, gpus, kind), most_on_a_node(cluster, kind))


def query_sinfo(environ: Mapping[str, str]) -> str:
    """Run sinfo once and return what it prints."""
    program = shutil.which(QUESTION[0], path=environ.get("PATH"))
    if program is None:
        raise NotHere(
            "there is no Slurm here",
            why="the program sinfo is not on PATH",
            fix="badcjobs gpus --all   (the devices of this machine)",
        )
    # What a user has set for sinfo, a format or one partition, is not meant for us.
    env = {name: value for name, value in environ.items() if not name.startswith("SINFO_")}
    try:
        done = subprocess.run(
            [program, *QUESTION[1:]], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_PATIENCE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise _refusal(f"sinfo did not answer in {_PATIENCE_S:.0f} s", None) from error
    except OSError as error:
        raise _refusal("sinfo cannot be run", str(error)) from error
    if done.returncode:
        raise _refusal(f"sinfo ended with exit code {done.returncode}", done.stderr.strip())
    return done.stdout


def _refusal(what: str, why: str | None) -> SlurmRefused:
    return SlurmRefused(what, why=why or None, fix="sinfo   (what does it say?)")


def cluster_text(view: ClusterView) -> str:
    """Return partitions, nodes and the advice, in at most 100 columns."""
    cluster, kind = view.cluster, view.kind
    nodes = cluster.gpu_nodes(kind)
    sums = sum_gpus(nodes, kind)
    of_kind = f" of kind {kind}" if kind else ""
    lines = [
        f"{sums['free']} of {sums['total']} GPUs{of_kind} are free on {count(len(nodes), 'node')}:"
        f" {sums['used']} used, {sums['unreachable']} where no job would start",
        "",
        *_partition_lines(view),
        "",
        *table([("node", "state", "kinds", "partitions", "free", "used", "total"), *_node_rows(nodes, kind)], left=4),
        "",
        *_advice(view),
    ]
    return "\n".join(plain(line) for line in lines)


def _partition_lines(view: ClusterView) -> list[str]:
    rows = [("partition", "", "time limit", "nodes", "free", "used", "total")]
    for one in view.to_dict()["partitions"]:
        remark = "down" if not one["up"] else "default" if one["default"] else ""
        numbers = (str(one[key]) for key in ("nodes", "free", "used", "total"))
        rows.append((_cut(one["name"], 32), remark, one["time_limit"], *numbers))
    return table(rows, left=3)


def _node_rows(nodes: Sequence[Node], kind: str | None) -> list[tuple[str, ...]]:
    return [
        (
            _cut(node.name, 20),
            _cut(node.why_not or node.state, 18),
            _cut("+".join(f"{one.kind}×{one.total}" for one in node.gpus), 18),
            _cut(",".join(node.partitions), 16),
            *(str(number) for number in (node.free(kind), node.used(kind), node.total(kind))),
        )
        for node in nodes
    ]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _advice(view: ClusterView) -> list[str]:
    of_kind = f" of kind {view.kind}" if view.kind else ""
    wanted, best = count(view.gpus, "GPU") + of_kind, view.best
    if not view.most_on_a_node:
        return [f"  best for {wanted}: none; every partition with such GPUs is down"]
    if not view.fits:
        return [f"  no node has {wanted}; the most on one is {view.most_on_a_node}", *_instead(view)]
    assert best is not None
    lines = [f"  best for {wanted}: partition {_cut(best.partition, 60)}"]
    if best.node:
        lines.append(f"    on node {_cut(best.node, 80)}")
    return [*lines, f"    {best.why}"]


def _instead(view: ClusterView) -> list[str]:
    smaller = f"badcjobs template array --set gpus-per-node={view.most_on_a_node}   (more tasks, each on one node)"
    if view.best is None:
        return [f"    and no partition has so many on several nodes; try: {smaller}"]
    several = f"--set nodes={view.best.nodes} --set gpus-per-node={view.best.gpus_per_node}"
    return [
        f"    {view.best.nodes} nodes of partition {_cut(view.best.partition, 50)} have them together",
        f"    try: badcjobs template multinode {several}   (one badcjobs on each)",
        f"    or:  {smaller}",
    ]
