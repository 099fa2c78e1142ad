"""The options of ``badcjobs submit`` that shape an array → the order; every mistake is named at once. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from badcjobs.cluster.sbatch_options import ArraySpec, parse_array, parse_memory, parse_minutes, range_instead
from badcjobs.errors import BadInput
from badcjobs.model import ArrayOrder, ArrayShape, usual_cpus, usual_mem

_ASKS_FOR_GPUS = re.compile(r"--(gres|gpus|tres-per)")  # --exclusive is not: srun, by which tasks start, sees none
_WARNING_S = 180
_SHORTEST_WARNING_S = 30  # Slurm looks at its clock every 30 seconds only
_OURS = ("array", "output", "error", "signal", "open-mode", "requeue", "job-name", "dependency")
_OF_ONE_NODE = ("nodes", "ntasks", "ntasks-per-node")


@dataclass(frozen=True, slots=True)
class ArrayOptions:
    """The options of ``submit``, as they were written; None: not given."""

    tasks: int | None = None
    array: str | None = None
    parallel: int | None = None
    gpus_per_task: int | None = None  # 1
    cpus: int | None = None
    mem: str | None = None
    time: str | None = None  # 12:00:00
    account: str | None = None
    partition: str | None = None
    constraint: str | None = None
    sbatch: tuple[str, ...] = ()
    job_name: str | None = None  # badcjobs
    setup: tuple[str, ...] = ()
    requeues: int = 10
    merge_account: str | None = None
    merge_mem: str | None = None  # 4G
    merge_time: str | None = None  # 1:00:00


@dataclass(frozen=True, slots=True)
class Known:
    """What stands already: the shape in run.toml, and how many manifests a list of manifests has."""

    began: bool = False  # there is a run.toml
    shape: ArrayShape | None = None
    listed: int | None = None


def make_order(
    options: ArrayOptions, known: Known, *, out: Path, run_arguments: Sequence[str], mistakes: Sequence[str] = ()
) -> ArrayOrder:
    """Return the order; ``mistakes`` are those that somebody else has found in the same command."""
    found, right = list(mistakes), list[str]()
    spec = _parse_spec(options, found)
    shape, only = _choose_array(options, spec, known, found, right)
    time_min = _minutes("--time", options.time, "12:00:00", found)
    merge_time_min = _minutes("--merge-time", options.merge_time, "1:00:00", found)
    found += _problems(options)
    if "\n" in str(out):
        found.append(f"--out {str(out)!r} has a line break in its name, which no line of a script can hold")
    if _lacks_gpus(options, run_arguments):
        found.append("--gpus-per-task 0: no task could begin, for without a GPU it needs --cpu-workers")
        right.append("--cpu-workers 2")
    if found:
        more = len(found) > 1
        raise BadInput(
            "these options cannot be used" if more else found[0],
            why="\n".join(found) if more else None,
            fix=f"the same command with {' '.join(right)}" if len(right) == len(found) else "badcjobs submit --help",
        )
    gpus = 1 if options.gpus_per_task is None else options.gpus_per_task
    return ArrayOrder(
        out=out,
        run_arguments=tuple(run_arguments),
        tasks=shape.count,
        first=shape.first,
        step=shape.step,
        only=only,
        parallel=options.parallel or (spec.parallel if spec else None),
        gpus_per_task=gpus,
        cpus=options.cpus or usual_cpus(gpus),
        mem=_memory(options.mem) or usual_mem(gpus),
        time_min=time_min,
        warning_s=min(_WARNING_S, max(_SHORTEST_WARNING_S, time_min * 60 // 4)),
        requeues=options.requeues,
        account=options.account,
        partition=options.partition,
        constraint=options.constraint,
        extra_sbatch=options.sbatch,
        name=options.job_name or "badcjobs",
        setup=options.setup,
        merge_account=options.merge_account,
        merge_mem=_memory(options.merge_mem) or "4G",
        merge_time_min=merge_time_min,
    )


def _memory(text: str | None) -> str | None:
    """Return an amount of memory in the one way of several in which sbatch and the emulation take it: 16GB is 16G."""
    return text and text.upper().removesuffix("B")


def _minutes(option: str, text: str | None, usual: str, mistakes: list[str]) -> int:
    try:
        return parse_minutes(usual if text is None else text)
    except ValueError:
        mistakes.append(f"{option} {text} is no time; write minutes, H:M:S or D-H:M:S, such as 12:00:00")
        return 1


def _parse_spec(options: ArrayOptions, mistakes: list[str]) -> ArraySpec | None:
    if options.array is None:
        return None
    if options.tasks is not None:
        mistakes.append("--tasks and --array say the same thing twice")
    try:
        spec = parse_array(options.array)
    except ValueError as error:
        mistakes.append(str(error))
        return None
    if spec.parallel and options.parallel and spec.parallel != options.parallel:
        mistakes.append(f"--array={options.array} and --parallel {options.parallel} differ")
    return spec


def _choose_array(
    options: ArrayOptions, spec: ArraySpec | None, known: Known, mistakes: list[str], right: list[str]
) -> tuple[ArrayShape, tuple[int, ...]]:
    """Return the array's shape and, where only a part of it is wanted, the indices of that part.

    ``right`` gets the option as it should be, for each mistake of which that is known.
    """
    shape = known.shape or ArrayShape(0, 1, max(options.tasks or known.listed or 1, 1))
    only: tuple[int, ...] = ()
    if spec is not None:
        shape, only = _from_spec(spec, known, mistakes, right)
    if options.tasks is not None and options.tasks < 1:
        mistakes.append(f"--tasks {options.tasks} must be at least 1")
    elif options.tasks is not None and options.tasks != shape.count:
        mistakes.append(f"--tasks {options.tasks}, but this run began as an array of {shape.count} ({shape})")
        right.append(f"--tasks {shape.count}")
    if known.began and known.shape is None:
        mistakes.append("this run began without an array; use another --out, or badcjobs run without Slurm")
    if known.listed is not None and shape.count != known.listed:
        mistakes.append(f"the list names {known.listed} manifests, one for each task: --tasks {known.listed}")
        right.append(f"--tasks {known.listed}")
    return shape, only


def _from_spec(
    spec: ArraySpec, known: Known, mistakes: list[str], right: list[str]
) -> tuple[ArrayShape, tuple[int, ...]]:
    own = ArrayShape(spec.indices[0], spec.step, len(spec.indices))
    shape = known.shape or own
    positions = [shape.position_of(index) for index in spec.indices]
    if None in positions:
        new = f"Slurm hides the spacing of a list from its tasks, so a new run needs a range: {range_instead(spec)}"
        mistakes.append(f"--array={spec}: " + (f"not in this run's array {shape}" if known.shape else new))
        right += [] if known.shape else [f"--array={range_instead(spec)}"]
    return shape, () if len(positions) == shape.count else spec.indices


def _lacks_gpus(options: ArrayOptions, run_arguments: Sequence[str]) -> bool:
    """Say whether all tasks would end at once; --simulate stands in for GPUs that are granted, and none would be."""
    if options.gpus_per_task != 0 or any(_ASKS_FOR_GPUS.match(option) for option in options.sbatch):
        return False
    named = dict(word.partition("=")[::2] for word in run_arguments)
    return "--config" not in named and named.get("--cpu-workers", "0") == "0"  # a file may say it, too


def _problems(options: ArrayOptions) -> list[str]:
    """Return what is wrong with single options."""
    smallest = {"parallel": 1, "gpus_per_task": 0, "cpus": 1, "requeues": 0}
    found = []
    for name, least in smallest.items():
        value = getattr(options, name)
        if value is not None and value < least:
            found.append(f"--{name.replace('_', '-')} {value} must be at least {least}")
    for name in ("mem", "merge_mem"):
        value = getattr(options, name)
        try:
            parse_memory("0" if value is None else value)
        except ValueError:
            found.append(f"--{name.replace('_', '-')} {value} is no amount of memory; write 16G or 16000M")
    for name in ("account", "partition", "constraint", "job_name", "merge_account"):
        value = getattr(options, name)
        if value is not None and (not value or not value.isprintable()):
            found.append(f"--{name.replace('_', '-')} {value!r} is nothing that a line of a script can hold")
    try:
        extra_options(options.sbatch)
    except ValueError as error:
        found.append(f"--sbatch: {error}")
    return found


def extra_options(given: Sequence[str]) -> dict[str, str | bool]:
    """Return options of sbatch by name: ``--qos=high`` and ``--exclusive``; raise ValueError for what cannot be."""
    options: dict[str, str | bool] = {}
    for text in given:
        name, equals, value = text.removeprefix("--").partition("=")
        if not text.startswith("--") or not name or any(letter.isspace() for letter in name):
            raise ValueError(f"{text!r} is no option of sbatch in its long form; write --name=value")
        if name in _OURS:
            raise ValueError(f"--{name} is set by badcjobs itself")
        if name in _OF_ONE_NODE and value != "1":
            several = "for several nodes: badcjobs template multinode"
            raise ValueError(f"{text}: each array task is one badcjobs on one node; {several}")
        options[name] = value if equals else True
    return options
