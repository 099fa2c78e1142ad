"""The options of sbatch: their names, their values, and what they request from a cluster. Pure.

Parsers of values raise ValueError with a message for the user.
"""

from __future__ import annotations

import math
import re
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from badcjobs.model import ArrayShape, parse_stop_after
from badcjobs.settings import SubmitSettings

T = TypeVar("T")
Options = Mapping[str, str]  # by their long names; a flag has an empty value

SHORT = {
    "a": "array", "A": "account", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task", "C": "constraint",
    "d": "dependency", "D": "chdir", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "i": "input",
    "J": "job-name", "k": "no-kill", "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes",
    "n": "ntasks", "o": "output", "O": "overcommit", "p": "partition", "q": "qos", "Q": "quiet", "s": "oversubscribe",
    "S": "core-spec", "t": "time", "v": "verbose", "w": "nodelist", "W": "wait", "x": "exclude",
}  # fmt: skip

FLAGS = {
    "contiguous", "hold", "ignore-pbs", "no-requeue", "overcommit", "oversubscribe", "parsable", "quiet", "reboot",
    "requeue", "spread-job", "test-only", "use-min-nodes", "verbose", "wait",
}  # fmt: skip

# Options with an optional value: --nice or --nice=10.
OPTIONAL = {"exclusive", "get-user-env", "nice", "no-kill", "propagate"}

VALUES = {
    "account", "acctg-freq", "array", "batch", "bb", "bbf", "begin", "chdir", "cluster-constraint", "clusters",
    "comment", "constraint", "container", "context", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu",
    "cpus-per-task", "deadline", "delay-boot", "dependency", "distribution", "error", "exclude", "export",
    "export-file", "extra", "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node",
    "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint", "input", "job-name", "kill-on-invalid-dep",
    "licenses", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus",
    "network", "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node",
    "ntasks-per-socket", "ntasks-per-tres", "open-mode", "output", "partition", "power", "prefer", "priority",
    "profile", "qos", "reservation", "segment", "signal", "sockets-per-node", "switches", "thread-spec",
    "threads-per-core", "time", "time-min", "tmp", "tres-bind", "tres-per-task", "uid", "wait-all-nodes", "wckey",
    "wrap",
}  # fmt: skip

# Options whose values are also keys of [submit].
OF_SUBMIT = {
    "account": "account", "constraint": "constraint", "mem": "mem", "time": "time", "cpus-per-task": "cpus",
    "gpus-per-node": "gpus_per_task",
}  # fmt: skip

_PART = re.compile(r"(?P<first>[0-9]+)(-(?P<last>[0-9]+)(:(?P<step>[0-9]+))?)?")
_LARGEST = 4_000_001  # the largest possible MaxArraySize
_UNLIMITED = ("unlimited", "infinite", "-1")
_SIGNAL = re.compile(r"(?:(?P<who>B|R|BR|RB):)?(?:SIG)?(?P<name>[A-Z0-9]+)(?:@(?P<lead>[0-9]{1,5}))?", re.IGNORECASE)
# The names that sbatch knows, and its longest lead.
_SIGNALS = ("HUP", "INT", "QUIT", "ABRT", "KILL", "ALRM", "TERM", "USR1", "USR2", "URG", "CONT", "STOP", "TSTP", "TTIN",
            "TTOU")  # fmt: skip
_LONGEST_LEAD_S = 65535
_LONGEST_LIMIT_S = 2**32 - 1  # sbatch counts seconds in 32 bits: a longer limit becomes a short one
_MEMORY = re.compile(r"\+?(?P<number>[0-9]+)(?:(?P<unit>[KMGT])B?)?", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_GPUS = re.compile(r"(?:(?P<type>[^:,]+):)?(?P<number>[0-9]+)")
_GRES = re.compile(r"(?:gres[/:])?gpu(?::(?P<type>[^:]+))??(?::(?P<number>[0-9]+))?")
_EXPORTED = re.compile(r"""((?:[^,'"]|'[^']*'|"[^"]*")+)(?:,|$)""")
_OURS = ("output", "error", "signal", "open-mode", "requeue", "dependency")
_OF_ONE_NODE = ("nodes", "ntasks", "ntasks-per-node")
GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")


def read_options(words: Sequence[str], mistakes: list[str]) -> dict[str, str]:
    """Return options by their long names; the last one of a name wins, and a flag has an empty value.

    Forms: ``--name=value``, ``--name value``, ``--name``, ``-c4`` and ``-c 4``.
    """
    given: dict[str, str] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word[2:].partition("=")
        if not word.startswith("--"):
            name, value = SHORT.get(word[1:2], "") if word.startswith("-") else "", word[2:]
        if name not in VALUES | FLAGS | OPTIONAL:
            mistakes.append(f"sbatch has no option {word}")
            continue
        if name in VALUES and not (equals or value) and left:
            value = left.pop(0)
        given[name] = value
    return given


def submit_words(settings: SubmitSettings) -> list[str]:
    """Return the settings of ``badcjobs submit`` as options of sbatch; those of --sbatch come last and win."""
    words = [word for option in settings.sbatch for word in shlex.split(option)]
    array = next((word.partition("=")[2] for word in words if word.startswith("--array=")), None)
    array = array or (None if settings.tasks is None else f"0-{settings.tasks - 1}")
    if array is not None and settings.parallel is not None:
        array = f"{array.partition('%')[0]}%{settings.parallel}"
    given = {
        "array": array,
        "cpus-per-task": settings.cpus,
        "mem": settings.mem,
        "time": settings.time,
        "account": settings.account,
        "constraint": settings.constraint,
    }
    if settings.gpus_per_task is not None:  # replaces every way in which a script may ask for GPUs
        given |= {"gres": "", "gpus": "", "gpus-per-task": "", "gpus-per-node": settings.gpus_per_task}
    others = [word for word in words if not word.startswith("--array=")]
    return [*(f"--{name}={value}" for name, value in given.items() if value is not None), *others]


def extra_options(given: Sequence[str]) -> dict[str, str | bool]:
    """Return options of sbatch by name: ``--qos=high``, ``--exclusive``; raise ValueError for those not allowed."""
    options: dict[str, str | bool] = {}
    for text in given:
        name, equals, value = text.removeprefix("--").partition("=")
        if not text.startswith("--") or not name or any(letter.isspace() for letter in name):
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
    written = [
        f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}")
        for name, value in options.items()
        if value is not None
    ]
    return "\n".join(["#!/bin/bash", *about, *written, "", *lines, ""])


# --- arrays ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """The indices of an array in ascending order, and how many of its tasks may run at a time (None: all)."""

    indices: tuple[int, ...]
    step: int = 1  # as in SLURM_ARRAY_TASK_STEP: that of a range, and 1 for a list
    parallel: int | None = None


def parse_array(text: str) -> ArraySpec:
    """Parse an array specification; a repeated index counts once, as in Slurm."""
    parts, percent, limit = text.strip().partition("%")
    wrong = f"--array={text} is not an array"
    if percent and not (limit.isascii() and limit.isdecimal() and int(limit)):
        raise ValueError(f"{wrong}: after % there must be a number above 0, not {limit!r}")
    indices: set[int] = set()
    step = 1
    for part in parts.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{wrong}: {part!r} is neither a number nor a range")
        chosen = range(int(found["first"]), int(found["last"] or found["first"]) + 1, int(found["step"] or 1) or -1)
        if not chosen or chosen.stop > _LARGEST + 1:
            raise ValueError(f"{wrong}: {part!r} is empty, has step 0, or has an index above {_LARGEST:,}")
        indices.update(chosen)
        step = chosen.step if len(chosen) > 1 else step
    return ArraySpec(tuple(sorted(indices)), step, int(limit or 0) or None)


def suggest_range(spec: ArraySpec) -> str | None:
    """Return the range to write instead of a list; None: the array is a range.

    A task cannot find its position in a list: for ``1,3,5,7`` Slurm passes the first and last index, a step of 1 and a
    count of 4, as for ``1,2,6,7``. The range has the same indices if they are evenly spaced, otherwise as many.
    """
    first, count = spec.indices[0], len(spec.indices)
    steps = [spec.step, *(spec.indices[1:2] and [spec.indices[1] - first])]
    fitting = [step for step in steps if spec.indices == tuple(range(first, first + count * step, step))]
    if spec.step in fitting:
        return None
    shape = ArrayShape(first, fitting[0], count) if fitting else ArrayShape(0, 1, count)
    return f"{shape}%{spec.parallel}" if spec.parallel else str(shape)


# --- single values --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EarlySignal:
    """The early signal: ``--signal=B:USR1@180``."""

    signum: signal.Signals
    lead_s: int
    to_script: bool  # False: no B:, only srun steps receive it


def parse_limit(text: str) -> int | None:
    """Return the seconds of ``--time``; None: no limit. Raises ValueError.

    Slurm rounds up to full minutes; 0 means no limit.
    """
    if text.lower() in _UNLIMITED:
        return None
    seconds = None if "." in text else parse_stop_after(text)
    if seconds is None or seconds > _LONGEST_LIMIT_S:
        raise ValueError(f"--time={text} is not a time limit; write minutes, H:M:S or D-H:M:S")
    return math.ceil(seconds / 60) * 60 or None


def parse_minutes(text: str) -> int:
    """Return a time limit in minutes; raise ValueError if it is not one, or unlimited."""
    seconds = parse_limit(text)
    if seconds is None:
        raise ValueError(f"--time={text} sets no limit; write minutes, H:M:S or D-H:M:S")
    return seconds // 60


def parse_memory(text: str, name: str = "mem") -> int:
    """Return the MiB of ``--mem``: 4096, 4096M, 4G, 4gb; kilobytes are rounded up, 0 is all memory of the node."""
    found = _MEMORY.fullmatch(text)
    if found is None:
        raise ValueError(f"--{name}={text} is not an amount of memory; write 4G")
    return math.ceil(int(found["number"]) * _MIB[(found["unit"] or "M").upper()])


def parse_signal(text: str) -> EarlySignal:
    """Parse ``--signal``: ``[B:]NAME-or-number[@seconds]``; the default is 60 seconds."""
    found = _SIGNAL.fullmatch(text)
    name, lead_s = (found["name"].upper(), int(found["lead"] or 60)) if found else ("", 0)
    numbers = {one: signal.Signals[f"SIG{one}"] for one in _SIGNALS} | {str(one.value): one for one in signal.Signals}
    if found is None or name not in numbers or lead_s > _LONGEST_LEAD_S:
        raise ValueError(f"--signal={text} is not a signal and its seconds, at most 65535; write B:USR1@180")
    return EarlySignal(numbers[name], lead_s, "B" in (found["who"] or "").upper())


def parse_export(text: str) -> tuple[list[str], dict[str, str]]:
    """Return the names of ``--export=ALL,NAME,NAME=VALUE,…`` without a value, and the variables that it sets."""
    words = [word.strip() for word in _EXPORTED.findall(text)]
    pairs = (word.partition("=") for word in words if "=" in word)
    values = {name: re.sub(r"""^(['"])(.*)\1$""", r"\2", value) for name, _, value in pairs}
    return [word for word in words if "=" not in word], values


# --- what all of them request ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
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
    merge_account: str | None = None  # of submit's merge job; None: the same
    partition: str | None = None  # one, or several separated by commas
    constraint: str | None = None
    gpu_options: tuple[str, ...] = ()  # as written: --gres=gpu:a100:2
    node_names: tuple[str, ...] = ()  # of --nodelist and --exclude, unless they are patterns or files


def try_parse(mistakes: list[str], read: Callable[..., T], *arguments: Any) -> T | None:
    """Return the parsed value; after a ValueError, add its message to the mistakes and return None."""
    try:
        return read(*arguments)
    except ValueError as error:
        mistakes.extend([] if str(error) in mistakes else [str(error)])
        return None


def read_values(given: Options, mistakes: list[str]) -> dict[str, Any]:
    """Return the values of --array, --time and --signal; add wrong ones to ``mistakes`` instead."""
    readers: dict[str, Callable[[str], object]] = {"array": parse_array, "time": parse_limit, "signal": parse_signal}
    values: dict[str, Any] = {}
    for name, read in readers.items():
        try:
            values |= {name: read(given[name])} if name in given else {}
        except ValueError as error:
            mistakes.append(str(error))
    return values


def read_asked(given: Options, values: Mapping[str, Any], mistakes: list[str]) -> Asked:
    """Return what sbatch options request; ``values`` are those of ``read_values``."""
    asked: dict[str, Any] = {"account": given.get("account"), "exclusive": "exclusive" in given}
    if not given.get("clusters"):  # else the names belong to another cluster
        lists = [given.get(option, "") for option in ("nodelist", "exclude")]  # / is a file, [ a pattern
        asked |= {
            "partition": given.get("partition"),
            "constraint": given.get("constraint"),
            "gpu_options": tuple(f"--{name}={given[name]}" for name in GPU_OPTIONS if given.get(name)),
            "node_names": tuple(one for text in lists if not set("[/") & {*text} for one in text.split(",") if one),
        }
    if (array := values.get("array")) is not None:
        asked |= {"tasks": len(array.indices), "last_index": array.indices[-1], "array": given["array"]}
        asked["array_range"] = suggest_range(array)
    if "time" in values:
        asked |= {"time_s": values["time"], "no_time_limit": values["time"] is None}
    return Asked(**asked, **(try_parse(mistakes, _size, given) or {}))


def _size(given: Options) -> dict[str, Any]:
    """Return nodes, GPUs, cores and memory."""
    nodes = _nodes(given) if "nodes" in given else None
    processes = count_tasks(given) or 1  # of srun
    gpus: int | None = count_gpus(given)
    on_a_node: int | None = _gpus(given, "gres") or _gpus(given, "gpus-per-node")
    if not gpus and {"tres-per-task", "exclusive"} & given.keys():  # a complete node includes its GPUs
        gpus = on_a_node = None
    elif gpus and not {"gpus", "gpus-per-task"} & given.keys():
        gpus, on_a_node = gpus * (nodes or 1), gpus
    elif gpus and not on_a_node:
        alone = "gpus-per-task" in given and processes == 1
        on_a_node = gpus if alone else -(-gpus // nodes) if nodes else None
    each = parse_positive(given, "cpus-per-task")
    cpus = None if each is None else each * processes
    if "cpus-per-gpu" in given and gpus:
        cpus = (parse_positive(given, "cpus-per-gpu") or 0) * gpus
    # Without --nodes Slurm uses as many nodes as needed: only one process is certainly on one node.
    cpus_on_a_node = each
    if nodes or processes == 1 or "ntasks-per-node" in given:
        cpus_on_a_node = None if cpus is None else -(-cpus // (nodes or 1))
    memory_mib = None
    for name, times in (("mem", 1), ("mem-per-gpu", on_a_node or gpus), ("mem-per-cpu", cpus_on_a_node or 1)):
        if name in given and times and memory_mib is None:
            memory_mib = parse_memory(given[name], name) * times
    return {
        "nodes": nodes,
        "gpus_per_task": gpus,
        "gpus_per_node": on_a_node,
        "cpus": cpus,
        "cpus_per_node": cpus_on_a_node,
        "memory_gb_per_node": None if memory_mib is None else memory_mib / 1024,
    }


def count_gpus(given: Options) -> int:
    """Return the number of requested GPUs: of the job with --gpus or --gpus-per-task, else of each node."""
    total, per_task = _gpus(given, "gpus"), _gpus(given, "gpus-per-task")
    if per_task and not total:
        tasks = count_tasks(given) or (_nodes(given) if "nodes" in given else None)
        if tasks is None:
            raise ValueError(f"--gpus-per-task={per_task} needs --ntasks (or --gpus) as well")
        return tasks * per_task
    return total or _gpus(given, "gres") or _gpus(given, "gpus-per-node")


def parse_gpus(text: str, *, gres: bool) -> list[tuple[str | None, int]]:
    """Return type (None: not named) and number of each part: ``2``, ``a100:2`` or ``v100:1,a100:1``.

    With ``gres`` the parts are ``gpu``, ``gpu:2``, ``gpu:a100`` or ``gpu:a100:2``, and others are left out.
    """
    found: list[tuple[str | None, int]] = []
    # sinfo writes gpu:(null):2 for no type, and indices or sockets in brackets, with commas of their own.
    for part in filter(None, re.sub(r"\([^()]*\)", "", text.replace(":(null)", "")).split(",")):
        one = (_GRES if gres else _GPUS).fullmatch(part.strip())
        if one is not None:
            found.append((one["type"], int(one["number"] or 1)))
        elif not gres:
            raise ValueError(text)
    return found


def _gpus(given: Options, name: str) -> int:
    try:
        return sum(number for _, number in parse_gpus(given.get(name, ""), gres=name == "gres"))
    except ValueError:
        raise ValueError(f"--{name}={given[name]} is not a number of GPUs") from None


def count_tasks(given: Options) -> int | None:
    """Return how many processes srun would start; None: not specified."""
    return parse_positive(given, "ntasks") or (parse_positive(given, "ntasks-per-node") or 0) * _nodes(given) or None


def _nodes(given: Options) -> int:
    least = given.get("nodes", "").partition("-")[0]
    return max(1, int(least)) if least.isdecimal() else 1


def parse_positive(given: Options, name: str) -> int | None:
    """Return the value of an option that takes a number above 0; None: not given."""
    text = given.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ValueError(f"--{name}={text} is not a number above 0")
    return int(text)
