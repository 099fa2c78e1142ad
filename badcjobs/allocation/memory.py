"""How much memory was asked of Slurm on this node, and which part is ours, from the variables that say so.

What it is compared with is what the task's processes hold. Whether it was enough is the report's business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_MIB = 2**20
# Each kind of request has its variable, in MiB; the second says how many of those there are on this node.
_REQUESTS = (
    ("SLURM_MEM_PER_NODE", None),
    ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
    ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # 2(x3),1: two tasks on each of three nodes, one on the fourth


def requested_memory_bytes(facts: Mapping[str, str]) -> int | None:
    """Return the memory of the first request that was made; None: nobody knows, or all that the node has (--mem=0)."""
    for size_name, count_name in _REQUESTS:
        size_mib = _number(facts.get(size_name, ""))
        if size_mib is not None:
            many = 1 if count_name is None else _number(facts.get(count_name, ""))
            return size_mib * _MIB * many if size_mib and many else None
    return None


def own_memory_bytes(facts: Mapping[str, str]) -> int | None:
    """Return this task's part of the memory that was asked for: the tasks of a step share it on each node."""
    asked_bytes = requested_memory_bytes(facts)
    return None if asked_bytes is None else asked_bytes // _tasks_on_this_node(facts)


def _tasks_on_this_node(facts: Mapping[str, str]) -> int:
    """Return how many tasks our step has here; outside of steps, and where nobody says, we are alone."""
    groups = _TASKS.findall(facts.get("SLURM_STEP_TASKS_PER_NODE", ""))
    by_node = [int(tasks) for tasks, nodes in groups for _ in range(int(nodes or 1))]
    node = _number(facts.get("SLURM_NODEID", "")) or 0
    return max(1, by_node[node]) if node < len(by_node) else 1


def _number(text: str) -> int | None:
    """Read a number; anything else is no reason to end a job, it is only not known then."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() else None
