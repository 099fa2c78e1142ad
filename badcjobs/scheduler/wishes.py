"""What ``badcjobs submit`` was told about the array → the order; every mistake is named at once. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import BadInput
from badcjobs.model import ArrayOrder, ArrayShape
from badcjobs.scheduler.array_range import range_instead
from badcjobs.scheduler.array_spec import ArraySpec, parse_array
from badcjobs.scheduler.slurm import extra_options

_MEMORY = re.compile(r"0|[1-9][0-9]*([KMGT]B?)?", re.ASCII)
_CLOCK = re.compile(r"(?:(?P<days>\d+)-(?=\d))?(?P<parts>\d+(?::\d{1,2}){0,2})", re.ASCII)
_ASKS_FOR_GPUS = re.compile(r"--(gres|gpus|tres-per)")  # --exclusive is not: srun, by which tasks start, sees none
_WARNING_S = 180
_SHORTEST_WARNING_S = 30  # Slurm looks at its clock every 30 seconds only


@dataclass(frozen=True, slots=True)
class Wishes:
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
    wishes: Wishes, known: Known, *, out: Path, run_arguments: Sequence[str], mistakes: Sequence[str] = ()
) -> ArrayOrder:
    """Return the order; ``mistakes`` are those that somebody else has found in the same command."""
    found, right = list(mistakes), list[str]()
    spec = _parse_spec(wishes, found)
    shape, only = _choose_array(wishes, spec, known, found, right)
    time_min = _minutes("--time", wishes.time, "12:00:00", found)
    merge_time_min = _minutes("--merge-time", wishes.merge_time, "1:00:00", found)
    found += _problems(wishes)
    if "\n" in str(out):
        found.append(f"--out {str(out)!r} has a line break in its name, which no line of a script can hold")
    if _lacks_gpus(wishes, run_arguments):
        found.append("--gpus-per-task 0: no task could begin, for without a GPU it needs --cpu-workers")
        right.append("--cpu-workers 2")
    if found:
        more = len(found) > 1
        raise BadInput(
            "these options cannot be used" if more else found[0],
            why="\n".join(found) if more else None,
            fix=f"the same command with {' '.join(right)}" if len(right) == len(found) else "badcjobs submit --help",
        )
    gpus = 1 if wishes.gpus_per_task is None else wishes.gpus_per_task
    return ArrayOrder(
        out=out,
        run_arguments=tuple(run_arguments),
        tasks=shape.count,
        first=shape.first,
        step=shape.step,
        only=only,
        parallel=wishes.parallel or (spec.parallel if spec else None),
        gpus_per_task=gpus,
        cpus=wishes.cpus or 2 * max(gpus, 1),
        # Memory is billed, on some sites dearer than the GPUs: what an engine process or two need, and no more.
        mem=_memory(wishes.mem) or f"{4 * max(gpus, 1)}G",
        time_min=time_min,
        warning_s=min(_WARNING_S, max(_SHORTEST_WARNING_S, time_min * 60 // 4)),
        requeues=wishes.requeues,
        account=wishes.account,
        partition=wishes.partition,
        constraint=wishes.constraint,
        extra_sbatch=wishes.sbatch,
        name=wishes.job_name or "badcjobs",
        setup=wishes.setup,
        merge_account=wishes.merge_account,
        merge_mem=_memory(wishes.merge_mem) or "4G",
        merge_time_min=merge_time_min,
    )


def count_idle(order: ArrayOrder, chunks: int) -> int:
    """Return how many tasks of a new array have nothing to do."""
    return 0 if order.only or not chunks else max(0, order.tasks - chunks)


def parse_minutes(text: str) -> int:
    """Read a time as sbatch does: minutes, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``; rounded up.

    Raises ValueError for anything else, and for no time at all.
    """
    found = _CLOCK.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    parts = [int(part) for part in found["parts"].split(":")]
    if found["days"]:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    total_s = ((int(found["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total_s == 0:
        raise ValueError(text)
    return -(-total_s // 60)


def _memory(text: str | None) -> str | None:
    """Return an amount of memory in the one way of several in which sbatch and the emulation take it: 16GB is 16G."""
    return text and text.upper().removesuffix("B")


def _minutes(option: str, text: str | None, usual: str, mistakes: list[str]) -> int:
    try:
        return parse_minutes(usual if text is None else text)
    except ValueError:
        mistakes.append(f"{option} {text} is no time; write minutes, H:M:S or D-H:M:S, such as 12:00:00")
        return 1


def _parse_spec(wishes: Wishes, mistakes: list[str]) -> ArraySpec | None:
    if wishes.array is None:
        return None
    if wishes.tasks is not None:
        mistakes.append("--tasks and --array say the same thing twice")
    try:
        spec = parse_array(wishes.array)
    except BadInput as error:
        mistakes.append(f"{error.what}: {error.why}")
        return None
    if spec.parallel and wishes.parallel and spec.parallel != wishes.parallel:
        mistakes.append(f"--array={wishes.array} and --parallel {wishes.parallel} differ")
    return spec


def _choose_array(
    wishes: Wishes, spec: ArraySpec | None, known: Known, mistakes: list[str], right: list[str]
) -> tuple[ArrayShape, tuple[int, ...]]:
    """Return the array's shape and, where only a part of it is wanted, the indices of that part.

    ``right`` gets the option as it should be, for each mistake of which that is known.
    """
    shape = known.shape or ArrayShape(0, 1, max(wishes.tasks or known.listed or 1, 1))
    only: tuple[int, ...] = ()
    if spec is not None:
        shape, only = _from_spec(spec, known, mistakes, right)
    if wishes.tasks is not None and wishes.tasks < 1:
        mistakes.append(f"--tasks {wishes.tasks} must be at least 1")
    elif wishes.tasks is not None and wishes.tasks != shape.count:
        mistakes.append(f"--tasks {wishes.tasks}, but this run began as an array of {shape.count} ({shape})")
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


def _lacks_gpus(wishes: Wishes, run_arguments: Sequence[str]) -> bool:
    """Say whether all tasks would end at once; --simulate stands in for GPUs that are granted, and none would be."""
    if wishes.gpus_per_task != 0 or any(_ASKS_FOR_GPUS.match(option) for option in wishes.sbatch):
        return False
    named = dict(word.partition("=")[::2] for word in run_arguments)  # none: asked.py only wants to know what is usual
    return bool(named) and "--config" not in named and named.get("--cpu-workers", "0") == "0"  # a file may say it, too


def _problems(wishes: Wishes) -> list[str]:
    """Return what is wrong with single options."""
    smallest = {"parallel": 1, "gpus_per_task": 0, "cpus": 1, "requeues": 0}
    found = []
    for name, least in smallest.items():
        value = getattr(wishes, name)
        if value is not None and value < least:
            found.append(f"--{name.replace('_', '-')} {value} must be at least {least}")
    for name in ("mem", "merge_mem"):
        value = getattr(wishes, name)
        if value is not None and not _MEMORY.fullmatch(value.upper()):
            found.append(f"--{name.replace('_', '-')} {value} is no amount of memory; write 16G or 16000M")
    for name in ("account", "partition", "constraint", "job_name", "merge_account"):
        value = getattr(wishes, name)
        if value is not None and (not value or not value.isprintable()):
            found.append(f"--{name.replace('_', '-')} {value!r} is nothing that a line of a script can hold")
    try:
        extra_options(wishes.sbatch)
    except ValueError as error:
        found.append(f"--sbatch: {error}")
    return found
