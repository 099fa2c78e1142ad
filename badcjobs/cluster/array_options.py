"""The options of ``badcjobs submit`` that shape an array → the order; every mistake is named at once. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from badcjobs.cluster.sbatch_options import ArraySpec, parse_array, parse_memory, parse_minutes, range_instead
from badcjobs.errors import BadInput
from badcjobs.model import ArrayOrder, ArrayShape, default_cpus, default_mem
from badcjobs.settings import FrozenRun, is_config_file

_ASKS_FOR_GPUS = re.compile(r"--(gres|gpus|tres-per)")  # --exclusive is not: srun, by which tasks start, sees none
_WARNING_S = 180
_SHORTEST_WARNING_S = 30  # Slurm looks at its clock every 30 seconds only
_OURS = ("array", "output", "error", "signal", "open-mode", "requeue", "job-name", "dependency")
_OF_ONE_NODE = ("nodes", "ntasks", "ntasks-per-node")
Wrong = list[tuple[str, str | None]]  # mistakes, each with the option as it should be, where that is known


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


def make_order(
    options: ArrayOptions,
    frozen: FrozenRun | None = None,
    listed: int | None = None,
    *,
    out: Path,
    run_arguments: Sequence[str],
    mistakes: Sequence[str] = (),
) -> ArrayOrder:
    """Return the order; ``mistakes`` were found in the same command before.

    ``frozen``: the run as it has begun; ``listed``: how many manifests a list of manifests has.
    """
    wrong: Wrong = [(one, None) for one in mistakes]
    spec, shape, only = _choose_array(options, frozen, listed, wrong)
    times = {"--time": (options.time, "12:00:00"), "--merge-time": (options.merge_time, "1:00:00")}
    minutes = {}
    for name, (text, usual) in times.items():
        try:
            minutes[name] = parse_minutes(usual if text is None else text)
        except ValueError:
            wrong.append((f"{name} {text} is no time; write minutes, H:M:S or D-H:M:S, such as 12:00:00", None))
    _check_options(options, wrong)
    if "\n" in str(out):
        wrong.append((f"--out {str(out)!r} has a line break in its name, which no line of a script can hold", None))
    words = [word.partition("=")[::2] for word in run_arguments]
    by_file = any(name == "--config" and is_config_file(value) for name, value in words)  # it may say it, too
    on_cpu = by_file or dict(words).get("--cpu-workers", "0") != "0"
    if options.gpus_per_task == 0 and not on_cpu and not any(map(_ASKS_FOR_GPUS.match, options.sbatch)):
        # --simulate stands in for GPUs that are granted, and none would be.
        lacking = "--gpus-per-task 0: no task could begin, for without a GPU it needs --cpu-workers"
        wrong.append((lacking, "--cpu-workers 2"))
    if wrong:
        right = [option for _, option in wrong if option is not None]
        raise BadInput(
            "these options cannot be used" if len(wrong) > 1 else wrong[0][0],
            why="\n".join(text for text, _ in wrong) if len(wrong) > 1 else None,
            fix=f"the same command with {' '.join(right)}" if len(right) == len(wrong) else "badcjobs submit --help",
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
        cpus=options.cpus or default_cpus(gpus),
        mem=_memory(options.mem) or default_mem(gpus),
        time_min=minutes["--time"],
        warning_s=min(_WARNING_S, max(_SHORTEST_WARNING_S, minutes["--time"] * 60 // 4)),
        requeues=options.requeues,
        account=options.account,
        partition=options.partition,
        constraint=options.constraint,
        extra_sbatch=options.sbatch,
        name=options.job_name or "badcjobs",
        setup=options.setup,
        merge_account=options.merge_account,
        merge_mem=_memory(options.merge_mem) or "4G",
        merge_time_min=minutes["--merge-time"],
    )


def _memory(text: str | None) -> str | None:
    """Return an amount of memory in the one way of several in which sbatch and the emulation take it: 16GB is 16G."""
    return text and text.upper().removesuffix("B")


def _choose_array(
    options: ArrayOptions, frozen: FrozenRun | None, listed: int | None, wrong: Wrong
) -> tuple[ArraySpec | None, ArrayShape, tuple[int, ...]]:
    """Return what --array says, the array's shape and, where only a part of it is wanted, the indices of that part."""
    begun = None if frozen is None else frozen.array
    shape = begun or ArrayShape(0, 1, max(options.tasks or listed or 1, 1))
    spec: ArraySpec | None = None
    only: tuple[int, ...] = ()
    try:
        spec = None if options.array is None else parse_array(options.array)
    except ValueError as error:
        wrong.append((str(error), None))
    if options.array is not None and options.tasks is not None:
        wrong.append(("--tasks and --array say the same thing twice", None))
    if spec is not None:
        if spec.parallel and options.parallel and spec.parallel != options.parallel:
            wrong.append((f"--array={options.array} and --parallel {options.parallel} differ", None))
        shape = begun or ArrayShape(spec.indices[0], spec.step, len(spec.indices))
        only = () if len(spec.indices) == shape.count else spec.indices
        if any(shape.position_of(index) is None for index in spec.indices):
            new = f"Slurm hides the spacing of a list from its tasks, so a new run needs a range: {range_instead(spec)}"
            said = f"not in this run's array {shape}" if begun else new
            wrong.append((f"--array={options.array}: {said}", None if begun else f"--array={range_instead(spec)}"))
    if options.tasks is not None and options.tasks < 1:
        wrong.append((f"--tasks {options.tasks} must be at least 1", None))
    elif options.tasks is not None and options.tasks != shape.count:
        began = f"this run began as an array of {shape.count} ({shape})"
        wrong.append((f"--tasks {options.tasks}, but {began}", f"--tasks {shape.count}"))
    if frozen is not None and begun is None:
        wrong.append(("this run began without an array; use another --out, or badcjobs run without Slurm", None))
    if listed is not None and shape.count != listed:
        right = f"--tasks {listed}"
        wrong.append((f"the list names {listed} manifests, one for each task: {right}", right))
    return spec, shape, only


def _check_options(options: ArrayOptions, wrong: Wrong) -> None:
    """Add what is wrong with single options."""
    for name, least in (("parallel", 1), ("gpus_per_task", 0), ("cpus", 1), ("requeues", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            wrong.append((f"--{name.replace('_', '-')} {value} must be at least {least}", None))
    for name in ("mem", "merge_mem"):
        value = getattr(options, name)
        try:
            parse_memory("0" if value is None else value)
        except ValueError:
            said = f"--{name.replace('_', '-')} {value} is no amount of memory; write 16G or 16000M"
            wrong.append((said, None))
    for name in ("account", "partition", "constraint", "job_name", "merge_account"):
        value = getattr(options, name)
        if value is not None and (not value or not value.isprintable()):
            said = f"--{name.replace('_', '-')} {value!r} is nothing that a line of a script can hold"
            wrong.append((said, None))
    try:
        extra_options(options.sbatch)
    except ValueError as error:
        wrong.append((f"--sbatch: {error}", None))


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
