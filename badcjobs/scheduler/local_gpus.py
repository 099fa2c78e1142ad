"""How many GPUs and tasks the options of sbatch ask for together, and which of them sbatch does not take together.

Pure; all raise ValueError, with a sentence for people. The rules were tried on a real 22.05.
"""

from __future__ import annotations

from collections.abc import Mapping


def count_gpus(given: Mapping[str, str]) -> int:
    """Return the GPUs that options ask for: of the whole job by --gpus or --gpus-per-task, else of each node."""
    total, per_node, per_task = _gpus(given, "gpus"), _per_node(given), _gpus(given, "gpus-per-task")
    if per_task:
        return _by_task(given, total, per_node, per_task)
    if total and per_node and total < per_node:
        raise ValueError(f"--gpus={total} is less than the {per_node} GPUs of a node")
    if total and per_node and total % per_node:
        raise ValueError(f"--gpus={total} is no multiple of the {per_node} GPUs of a node")
    return total or per_node or 0


def count_tasks(given: Mapping[str, str]) -> int | None:
    """Return what sbatch takes for --ntasks, which other options may decide; None: nothing does."""
    total, per_task, per_gpu = _gpus(given, "gpus"), _gpus(given, "gpus-per-task"), whole(given, "ntasks-per-gpu")
    by_gpus = total // per_task if total and per_task else None
    by_tasks_on_gpus = total * per_gpu if total and per_gpu else None
    by_node = (whole(given, "ntasks-per-node") or 0) * _nodes(given) or None
    one_per_node = _nodes(given) if per_task and "nodes" in given else None
    return whole(given, "ntasks") or by_gpus or by_tasks_on_gpus or by_node or one_per_node


def count_cores(given: Mapping[str, str]) -> int:
    """Return the cores that options ask for."""
    if "cpus-per-gpu" in given:
        return (whole(given, "cpus-per-gpu") or 1) * max(1, count_gpus(given))
    return (whole(given, "cpus-per-task") or 1) * (count_tasks(given) or 1)


def needs_other_nodes(given: Mapping[str, str]) -> str | None:
    """Return which options ask for more than one node without saying so; None: none does."""
    total, per_node = count_gpus(given), _per_node(given)
    if per_node and total > per_node:
        return f"{total} GPUs with {per_node} on each node"
    tasks, on_node = whole(given, "ntasks"), whole(given, "ntasks-per-node")
    return f"--ntasks={tasks} with {on_node} on each node" if tasks and on_node and tasks > on_node else None


def whole(given: Mapping[str, str], name: str) -> int | None:
    """Return an option that is a number above 0; None: it is not given."""
    text = given.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ValueError(f"--{name}={text} is no number above 0")
    return int(text)


def _by_task(given: Mapping[str, str], total: int | None, per_node: int | None, per_task: int) -> int:
    tasks = count_tasks(given)
    if tasks is None:
        raise ValueError(f"--gpus-per-task={per_task} needs --ntasks (or --gpus) beside it")
    if total and total != tasks * per_task:
        raise ValueError(f"--gpus={total} is not --gpus-per-task={per_task} for {tasks} tasks")
    if per_node and (per_node % per_task or per_node > tasks * per_task):
        raise ValueError(f"{per_node} GPUs of a node do not go with --gpus-per-task={per_task} for {tasks} tasks")
    return tasks * per_task


def _per_node(given: Mapping[str, str]) -> int | None:
    """Return the GPUs of each node; --gres goes before --gpus-per-node, whichever stands first."""
    asked = [one.removeprefix("gres").lstrip("/:") for one in given.get("gres", "").split(",")]
    in_gres = ",".join(one[4:] or "1" for one in asked if one == "gpu" or one.startswith("gpu:"))
    if in_gres:
        return _typed_sum(in_gres, "gres")
    per_socket = _gpus(given, "gpus-per-socket")
    if per_socket and "sockets-per-node" not in given:
        raise ValueError(f"--gpus-per-socket={per_socket} needs --sockets-per-node beside it")
    return _gpus(given, "gpus-per-node") or per_socket  # of the one socket that a job without many cores gets


def _gpus(given: Mapping[str, str], name: str) -> int | None:
    return _typed_sum(given[name], name) if given.get(name) else None


def _typed_sum(text: str, name: str) -> int:
    """Return 2 for ``2``, ``a100:2`` and ``v100:1,a100:1``; of one kind the last number counts."""
    counts: dict[str, int] = {}
    for one in filter(None, text.split(",")):
        kind, _, count = one.rpartition(":")
        if not count.isdecimal() and name != "gres":
            raise ValueError(f"--{name}={text} is no number of GPUs")
        counts.update({kind: int(count)} if count.isdecimal() else {one: 1})  # --gres=gpu:a100 asks for one
    return sum(counts.values())


def _nodes(given: Mapping[str, str]) -> int:
    text = given.get("nodes", "").partition("-")[0]
    return max(1, int(text)) if text.isdecimal() else 1
