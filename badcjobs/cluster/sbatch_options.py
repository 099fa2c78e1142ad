"""The options of sbatch: their names, their values, and what they request from a cluster. Pure.

Parsers of values raise ValueError with a message for the user.
"""

from __future__ import annotations

import math
import re
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from badcjobs.model import parse_stop_after
from badcjobs.settings import SubmitSettings

T = TypeVar("T")
Options = Mapping[str, str]  # by their long names; a flag has an empty value
Mistakes = list[str]

# The short options whose values matter here.
_SHORT = {
    "a": "array",
    "A": "account",
    "c": "cpus-per-task",
    "d": "dependency",
    "D": "chdir",
    "e": "error",
    "G": "gpus",
    "J": "job-name",
    "n": "ntasks",
    "N": "nodes",
    "o": "output",
    "t": "time",
}

# Options whose values are also keys of [submit].
OF_SUBMIT = {
    "account": "account",
    "constraint": "constraint",
    "mem": "mem",
    "time": "time",
    "cpus-per-task": "cpus",
    "gpus-per-node": "gpus_per_task",
}

_PART = re.compile(r"(?P<first>[0-9]+)(-(?P<last>[0-9]+)(:(?P<step>0*[1-9][0-9]*))?)?")
_ABOVE_0 = re.compile(r"0*[1-9][0-9]*")
_LARGEST = 4_000_001  # the largest possible MaxArraySize
_UNLIMITED = ("unlimited", "infinite", "-1")
_SIGNAL = re.compile(r"(?:(?P<who>B|R|BR|RB):)?(?:SIG)?(?P<name>[A-Z0-9]+)(?:@(?P<lead>[0-9]{1,5}))?")
_MEMORY = re.compile(r"\+?(?P<number>[0-9]+)(?:(?P<unit>[KMGT])B?)?", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_GPUS = re.compile(r"(?:(?P<type>[^:,]+):)?(?P<number>[0-9]+)")
_GRES = re.compile(r"(?:gres[/:])?gpu(?::(?P<type>[^:]+))??(?::(?P<number>[0-9]+))?")
_OURS = ("output", "error", "signal", "open-mode", "requeue", "dependency")
_OF_ONE_NODE = ("nodes", "ntasks", "ntasks-per-node")


def read_options(words: Sequence[str]) -> dict[str, str]:
    """Return options by their long names; the last one of a name wins, and a flag has an empty value.

    Forms: ``--name=value``, ``--name value``, ``--name``, ``-c4`` and ``-c 4``.
    """
    options: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            options[name] = value
        elif word.startswith("-"):
            name = _SHORT.get(word[1:2], word[1:2])
            options[name] = word[2:]
        elif name:
            options[name] = options[name] or word
    return options


def submit_words(settings: SubmitSettings) -> list[str]:
    """Return the settings of ``badcjobs submit`` as options of sbatch; those of --sbatch come last and win."""
    own = {
        "array": None if settings.tasks is None else range_of(settings.tasks, settings.parallel),
        "cpus-per-task": settings.cpus,
        "mem": settings.mem,
        "time": settings.time,
        "account": settings.account,
        "constraint": settings.constraint,
    }
    if settings.gpus_per_task is not None:  # replaces every way in which a script may ask for GPUs
        own |= {"gres": "", "gpus": "", "gpus-per-task": "", "gpus-per-node": settings.gpus_per_task}
    options = [f"--{name}={value}" for name, value in own.items() if value is not None]
    return options + [word for option in settings.sbatch for word in shlex.split(option)]


def extra_options(given: Sequence[str]) -> dict[str, str | bool]:
    """Return options of sbatch by name: ``--qos=high``, ``--exclusive``; raise ValueError for those not allowed."""
    options: dict[str, str | bool] = {}
    for text in given:
        name, equals, value = text.removeprefix("--").partition("=")
        if not text.startswith("--") or name.split() != [name]:
            raise ValueError(f"{text!r} is not a long option of sbatch; write --name=value")
        if name in _OURS:
            raise ValueError(f"--{name} is set by badcjobs itself")
        if name in _OF_ONE_NODE and value != "1":
            several = "for several nodes: badcjobs template multinode"
            raise ValueError(f"{text}: each array task is one badcjobs on one node; {several}")
        options[name] = value if equals else True
    return options


def batch_text(options: Mapping[str, object], lines: Sequence[str], about: Sequence[str] = ()) -> str:
    """Return a batch script: comments, options (None: left out, True: a flag), shell lines."""
    lines_of_options = []
    for name, value in options.items():
        if value is True:
            lines_of_options.append(f"#SBATCH --{name}")
        elif value is not None:
            lines_of_options.append(f"#SBATCH --{name}={shlex.quote(str(value))}")
    return "\n".join(["#!/bin/bash", *about, *lines_of_options, "", *lines, ""])


# --- arrays ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArraySpec:
    """The indices of an array in ascending order, and how many of its tasks may run at a time (None: all)."""

    indices: tuple[int, ...]
    step: int = 1  # as in SLURM_ARRAY_TASK_STEP: that of a range, and 1 for a list
    parallel: int | None = None


def parse_array(text: str) -> ArraySpec:
    """Parse an array specification; a repeated index counts once, as in Slurm."""
    forms = f"write 0-9, 1,3,7-9 or 10-100:10%4, with indices up to {_LARGEST:,}"
    wrong = ValueError(f"--array={text} is not an array; {forms}")
    parts, percent, limit = text.strip().partition("%")
    if percent and not _ABOVE_0.fullmatch(limit):
        raise wrong
    indices: set[int] = set()
    step = 1
    for part in parts.split(","):
        numbers = _PART.fullmatch(part.strip())
        if numbers is None:
            raise wrong
        first = int(numbers["first"])
        last = int(numbers["last"] or first)
        part_step = int(numbers["step"] or 1)
        if last < first or last > _LARGEST:
            raise wrong
        part_indices = range(first, last + 1, part_step)
        indices.update(part_indices)
        if len(part_indices) > 1:
            step = part_step
    return ArraySpec(tuple(sorted(indices)), step, int(limit) if limit else None)


def suggest_range(spec: ArraySpec) -> str | None:
    """Return the range with as many tasks to write instead of a list; None: the array is a range.

    A task cannot find its position in a list: for ``1,3,5,7`` Slurm passes the first and last index, a step of 1 and a
    count of 4, as for ``1,2,6,7``.
    """
    first = spec.indices[0]
    count = len(spec.indices)
    if spec.indices == tuple(range(first, first + count * spec.step, spec.step)):
        return None
    return range_of(count, spec.parallel)


def range_of(tasks: int, parallel: int | None) -> str:
    """Return the array from 0 that has this many tasks."""
    limit = f"%{parallel}" if parallel else ""
    return f"0-{tasks - 1}{limit}"


# --- single values --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EarlySignal:
    """The early signal: ``--signal=B:USR1@180``."""

    signum: signal.Signals
    lead_s: int
    to_script: bool  # False: no B:, only srun steps receive it


def parse_limit(text: str) -> int:
    """Return the seconds of ``--time``, which Slurm rounds up to full minutes; 0: no limit. Raises ValueError."""
    if text.lower() in _UNLIMITED:
        return 0
    seconds = None if "." in text else parse_stop_after(text)
    if seconds is None:
        raise ValueError(f"--time={text} is not a time limit; write minutes, H:M:S or D-H:M:S")
    return math.ceil(seconds / 60) * 60


def parse_minutes(text: str) -> int:
    """Return a time limit in minutes; raise ValueError if it is not one, or unlimited."""
    seconds = parse_limit(text)
    if not seconds:
        raise ValueError(f"--time={text} sets no limit; write minutes, H:M:S or D-H:M:S")
    return seconds // 60


def parse_memory(text: str, name: str = "mem") -> int:
    """Return the MiB of ``--mem``: 4096, 4096M, 4G, 4gb; kilobytes are rounded up, 0 is all memory of the node."""
    amount = _MEMORY.fullmatch(text)
    if amount is None:
        raise ValueError(f"--{name}={text} is not an amount of memory; write 4G")
    unit = (amount["unit"] or "M").upper()
    return math.ceil(int(amount["number"]) * _MIB[unit])


def parse_signal(text: str) -> EarlySignal:
    """Parse ``--signal``: ``[B:]NAME-or-number[@seconds]``; the default is 60 seconds."""
    parts = _SIGNAL.fullmatch(text.upper())
    for number in signal.Signals:
        names = (number.name.removeprefix("SIG"), str(number.value))
        if parts is not None and parts["name"] in names:
            return EarlySignal(number, int(parts["lead"] or 60), to_script="B" in (parts["who"] or ""))
    raise ValueError(f"--signal={text} is not a signal and its seconds; write B:USR1@180")


# --- what all of them request ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What a job requests from Slurm; None: not specified."""

    tasks: int | None = None  # None: no array
    last_index: int | None = None
    array: str | None = None  # as written
    array_range: str | None = None  # the range to write instead of a list
    nodes: int | None = None  # of each task; None: not specified, as many as needed
    gpus_per_task: int | None = None  # on all its nodes
    gpus_per_node: int | None = None  # the largest number on one node
    cpus: int | None = None  # on all its nodes
    cpus_per_node: int | None = None
    memory_gb_per_node: float | None = None  # 0: all of the node
    time_s: int | None = None
    no_time_limit: bool = False  # --time=unlimited; otherwise a time_s of None means not specified
    exclusive: bool = False  # complete nodes
    account: str | None = None


def try_parse(mistakes: Mistakes, read: Callable[..., T], *arguments: Any) -> T | None:
    """Return the parsed value; after a ValueError, add its message to the mistakes and return None."""
    try:
        return read(*arguments)
    except ValueError as error:
        if str(error) not in mistakes:
            mistakes.append(str(error))
        return None


@dataclass(frozen=True)
class Request:
    """The options of a job and their values; None: not given."""

    options: Options
    asked: Asked = Asked()
    array: ArraySpec | None = None
    signal: EarlySignal | None = None


def read_request(options: Options, mistakes: Mistakes) -> Request:
    """Return what sbatch options request; wrong values are added to ``mistakes`` instead."""

    def value_of(name: str, read: Callable[[str], T]) -> T | None:
        return try_parse(mistakes, read, options[name]) if name in options else None

    array = value_of("array", parse_array)
    limit_s = value_of("time", parse_limit)
    signal_of_job = value_of("signal", parse_signal)
    asked = Asked(
        **(try_parse(mistakes, _read_size, options) or {}),
        time_s=limit_s or None,
        no_time_limit=limit_s == 0,
        exclusive="exclusive" in options,
        account=options.get("account"),
    )
    if array is not None:
        asked = replace(
            asked,
            tasks=len(array.indices),
            last_index=array.indices[-1],
            array=options["array"],
            array_range=suggest_range(array),
        )
    return Request(options, asked, array, signal_of_job)


def _read_size(given: Options) -> dict[str, Any]:
    """Return nodes, GPUs, cores and memory."""
    nodes = _nodes(given) if "nodes" in given else None
    processes = count_processes(given)
    gpus, gpus_per_node = _read_gpus(given, nodes, processes)

    each = parse_positive(given, "cpus-per-task")
    cpus = each and each * (processes or 1)
    if "cpus-per-gpu" in given and gpus:
        cpus = (parse_positive(given, "cpus-per-gpu") or 0) * gpus
    # Without --nodes Slurm uses as many nodes as needed: only one process is certainly on one node.
    cpus_per_node = each
    if nodes or processes in (None, 1) or "ntasks-per-node" in given:
        cpus_per_node = cpus and math.ceil(cpus / (nodes or 1))

    memory_mib = None
    units = {"mem": 1, "mem-per-gpu": gpus_per_node or gpus, "mem-per-cpu": cpus_per_node or 1}
    for name, number in units.items():
        if name in given and number and memory_mib is None:
            memory_mib = parse_memory(given[name], name) * number
    return {
        "nodes": nodes,
        "gpus_per_task": gpus,
        "gpus_per_node": gpus_per_node,
        "cpus": cpus,
        "cpus_per_node": cpus_per_node,
        "memory_gb_per_node": None if memory_mib is None else memory_mib / 1024,
    }


def _read_gpus(given: Options, nodes: int | None, processes: int | None) -> tuple[int | None, int | None]:
    """Return the GPUs of a task on all its nodes, and the largest number on one node."""
    total = _gpus(given, "gpus")
    per_process = _gpus(given, "gpus-per-task")
    per_node = _gpus(given, "gres") or _gpus(given, "gpus-per-node")
    if per_process and not total:
        count = processes or nodes
        if count is None:
            raise ValueError(f"--gpus-per-task={per_process} needs --ntasks (or --gpus) as well")
        total = count * per_process
    if total and per_node:
        return total, per_node
    if total and per_process and processes in (None, 1):
        return total, total
    if total:
        return total, math.ceil(total / nodes) if nodes else None
    if not per_node and ("exclusive" in given or "tres-per-task" in given):  # a complete node includes its GPUs
        return None, None
    return per_node * (nodes or 1), per_node


def count_processes(given: Options) -> int | None:
    """Return how many processes srun would start; None: not specified."""
    number = parse_positive(given, "ntasks")
    if number is not None:
        return number
    per_node = parse_positive(given, "ntasks-per-node")
    return None if per_node is None else per_node * _nodes(given)


def _nodes(given: Options) -> int:
    least = given.get("nodes", "").partition("-")[0]
    return max(1, int(least)) if least.isdecimal() else 1


def parse_gpus(text: str, option: str = "gres") -> list[tuple[str | None, int]]:
    """Return type (None: not named) and number of each part: ``2``, ``a100:2`` or ``v100:1,a100:1``.

    Those of ``--gres`` are ``gpu``, ``gpu:2``, ``gpu:a100`` or ``gpu:a100:2``, and others are left out.
    """
    # sinfo writes gpu:(null):2 for no type, and indices or sockets in brackets, with commas of their own.
    plain = re.sub(r"\([^()]*\)", "", text.replace(":(null)", ""))
    pattern = _GRES if option == "gres" else _GPUS
    counts = []
    for part in filter(None, plain.split(",")):
        match = pattern.fullmatch(part.strip())
        if match is not None:
            counts.append((match["type"], int(match["number"] or 1)))
        elif option != "gres":
            raise ValueError(f"--{option}={text} is not a number of GPUs")
    return counts


def _gpus(given: Options, name: str) -> int:
    return sum(number for _, number in parse_gpus(given.get(name, ""), name))


def parse_positive(given: Options, name: str) -> int | None:
    """Return the value of an option that takes a number above 0; None: not given."""
    text = given.get(name)
    if text is None:
        return None
    if not _ABOVE_0.fullmatch(text):
        raise ValueError(f"--{name}={text} is not a number above 0")
    return int(text)
