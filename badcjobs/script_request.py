"""Puts together what sbatch options ask for: nodes, GPUs, cores, memory, time; of each array task. Pure.

Single options are read by ``scheduler/``; what the numbers mean for a site is ``preflight/``'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from badcjobs.errors import BadInput
from badcjobs.preflight.facts import Asked
from badcjobs.scheduler.array_range import range_instead
from badcjobs.scheduler.array_spec import parse_array
from badcjobs.scheduler.local_gpus import count_gpus, count_tasks
from badcjobs.scheduler.local_values import parse_limit, parse_memory

# What sbatch takes from its environment; it goes before the lines of the script.
INPUT_VARIABLES = {
    "SBATCH_ACCOUNT": "account", "SBATCH_ARRAY_INX": "array", "SBATCH_GPUS": "gpus", "SBATCH_GRES": "gres",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node", "SBATCH_GPUS_PER_TASK": "gpus-per-task", "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_OPEN_MODE": "open-mode", "SBATCH_PARTITION": "partition", "SBATCH_SIGNAL": "signal",
    "SBATCH_TIMELIMIT": "time",
}  # fmt: skip
_WAYS_TO_GPUS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
_OF_A_NODE = ("gres", "gpus-per-node", "gpus-per-socket", "sockets-per-node")


def read_asked(given: Mapping[str, str], mistakes: list[str]) -> Asked:
    """Return what sbatch options ask for, each under its long name."""
    asked: dict[str, Any] = {"account": given.get("account"), "exclusive": "exclusive" in given}
    asked |= _names(given)
    for part in (_array, _time, _size):
        try:
            asked |= part(given)
        except BadInput as error:
            mistakes.append(f"{error.what}: {error.why}")
        except ValueError as error:
            mistakes.append(str(error))
    return Asked(**asked)


def parse_memory_gb(text: str, name: str = "mem") -> float:
    """Read a size as sbatch does: megabytes unless a K, M, G or T follows; 0 is all of the node."""
    return parse_memory(text, name) / 1024


def _array(given: Mapping[str, str]) -> dict[str, Any]:
    if not given.get("array"):
        return {}
    array = parse_array(given["array"])
    return {
        "tasks": len(array.indices),
        "last_index": array.indices[-1],
        "array": given["array"],
        "array_range": range_instead(array),
    }


def _time(given: Mapping[str, str]) -> dict[str, Any]:
    if "time" not in given:
        return {}
    time_s = parse_limit(given["time"])
    return {"time_s": time_s, "no_time_limit": time_s is None}


def _size(given: Mapping[str, str]) -> dict[str, Any]:
    """Return nodes, GPUs, cores and memory."""
    nodes = _whole(given.get("nodes", "").partition("-")[0])
    processes = count_tasks(given) or 1  # that srun would start
    gpus, on_a_node = _gpus(given, nodes, processes)
    each = _whole(given.get("cpus-per-task"))
    cpus = None if each is None else each * processes
    if "cpus-per-gpu" in given and gpus:
        cpus = (_whole(given["cpus-per-gpu"]) or 0) * gpus or None
    # Where nobody says how many nodes, Slurm takes as many as it needs: only what cannot be parted is on one of them.
    if nodes or processes == 1 or "ntasks-per-node" in given:
        cpus_on_a_node = None if cpus is None else -(-cpus // (nodes or 1))
    else:
        cpus_on_a_node = each
    return {
        "nodes": nodes,
        "gpus_per_task": gpus,
        "gpus_per_node": on_a_node,
        "cpus": cpus,
        "cpus_per_node": cpus_on_a_node,
        "memory_gb_per_node": _memory_gb(given, on_a_node or gpus, cpus_on_a_node),
    }


def _gpus(given: Mapping[str, str], nodes: int | None, processes: int) -> tuple[int | None, int | None]:
    """Return how many GPUs there are in all and on one node, as far as the options say it."""
    asked = count_gpus(given)
    if not asked:
        unsaid = {"tres-per-task", "exclusive"} & given.keys()  # a whole node comes with its GPUs
        return (None, None) if unsaid else (0, 0)
    by_node = count_gpus({name: value for name, value in given.items() if name in _OF_A_NODE})
    if not {"gpus", "gpus-per-task"} & given.keys():
        return asked * (nodes or 1), asked
    if by_node or ("gpus-per-task" in given and processes == 1):
        return asked, by_node or asked
    return asked, -(-asked // nodes) if nodes else None


def _memory_gb(given: Mapping[str, str], gpus: int | None, cores: int | None) -> float | None:
    if "mem" in given:
        return parse_memory_gb(given["mem"])
    if "mem-per-gpu" in given and gpus:
        return parse_memory_gb(given["mem-per-gpu"], "mem-per-gpu") * gpus
    if "mem-per-cpu" in given:
        return parse_memory_gb(given["mem-per-cpu"], "mem-per-cpu") * (cores or 1)
    return None


def _names(given: Mapping[str, str]) -> dict[str, Any]:
    """Return what is asked for by its name; nothing where another cluster is to know the names."""
    if given.get("clusters"):
        return {}
    gpus = tuple(f"--{name}={given[name]}" for name in _WAYS_TO_GPUS if given.get(name))
    nodes = tuple(name for option in ("nodelist", "exclude") for name in _node_names(given.get(option)))
    words = {name: given.get(name) for name in ("partition", "constraint")}
    return {**words, "gpu_options": gpus, "node_names": nodes}


def _node_names(text: str | None) -> list[str]:
    """Return the names in a list without brackets; with a stroke it is the file of such a list."""
    return [] if not text or set("[/") & set(text) else [name for name in text.split(",") if name]


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None
