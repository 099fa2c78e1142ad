"""The options of ``badcjobs submit`` that shape an array → the order; every mistake is named at once. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from badcjobs.cluster.sbatch_options import ArraySpec, parse_array, parse_memory, parse_minutes, range_instead
from badcjobs.errors import BadInput
from badcjobs.model import ArrayOrder, ArrayShape, default_cpus, default_mem
from badcjobs.project import is_config_file
from badcjobs.run_toml import FrozenRun
from badcjobs.settings import SETTINGS, SubmitSettings

_ASKS_FOR_GPUS = re.compile(r"--(gres|gpus|tres-per)")  # --exclusive is not: srun, by which tasks start, sees none
_WARNING_S = 180
_SHORTEST_WARNING_S = 30  # Slurm looks at its clock every 30 seconds only
_OURS = ("output", "error", "signal", "open-mode", "requeue", "dependency")
_OF_THE_ORDER = ("array", "job-name")  # given through --sbatch, and part of the order itself
_OF_ONE_NODE = ("nodes", "ntasks", "ntasks-per-node")
Wrong = list[tuple[str, str | None]]  # mistakes, each with the option as it should be, where that is known


def make_order(
    options: SubmitSettings,
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
    more = _check_options(options, wrong)
    array, name = (more.pop(one, None) for one in _OF_THE_ORDER)
    spec, shape, only = _choose_array(options, None if array is None else str(array), frozen, listed, wrong)
    times = {"time": options.time or "12:00:00", "merge_time": options.merge_time or "1:00:00"}
    minutes = {}
    for key, text in times.items():
        try:
            minutes[key] = parse_minutes(text)
        except ValueError:
            wrong.append((f"{_place(key)} {text} is not a time; write minutes, H:M:S or D-H:M:S: 12:00:00", None))
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
        time_min=minutes["time"],
        warning_s=min(_WARNING_S, max(_SHORTEST_WARNING_S, minutes["time"] * 60 // 4)),
        requeues=options.requeues,
        account=options.account,
        constraint=options.constraint,
        extra_sbatch=tuple(f"--{key}" if value is True else f"--{key}={value}" for key, value in more.items()),
        name=str(name or "badcjobs"),
        setup=options.setup,
        merge_account=options.merge_account,
        merge_mem=_memory(options.merge_mem) or "4G",
        merge_time_min=minutes["merge_time"],
    )


def _memory(text: str | None) -> str | None:
    """Return an amount of memory in the one way of several in which sbatch and the emulation take it: 16GB is 16G."""
    return text and text.upper().removesuffix("B")


def _choose_array(
    options: SubmitSettings, array: str | None, frozen: FrozenRun | None, listed: int | None, wrong: Wrong
) -> tuple[ArraySpec | None, ArrayShape, tuple[int, ...]]:
    """Return what --array says, the array's shape and, where only a part of it is wanted, the indices of that part."""
    begun = None if frozen is None else frozen.array
    shape = begun or ArrayShape(0, 1, max(options.tasks or listed or 1, 1))
    spec: ArraySpec | None = None
    only: tuple[int, ...] = ()
    try:
        spec = None if array is None else parse_array(array)
    except ValueError as error:
        wrong.append((str(error), None))
    if array is not None and options.tasks is not None:
        wrong.append((f"--tasks {options.tasks} and --sbatch=--array={array}: give only one of them", None))
    if spec is not None:
        if spec.parallel and options.parallel and spec.parallel != options.parallel:
            wrong.append((f"--sbatch=--array={array} and --parallel {options.parallel} differ", None))
        shape = begun or ArrayShape(spec.indices[0], spec.step, len(spec.indices))
        only = () if len(spec.indices) == shape.count else spec.indices
        if any(shape.position_of(index) is None for index in spec.indices):
            new = f"Slurm hides the spacing of a list from its tasks, so a new run needs a range: {range_instead(spec)}"
            said = f"not in this run's array {shape}" if begun else new
            right = None if begun else f"--sbatch=--array={range_instead(spec)}"
            wrong.append((f"--sbatch=--array={array}: {said}", right))
    if options.tasks is not None and options.tasks != shape.count:
        began = f"this run began as an array of {shape.count} ({shape})"
        wrong.append((f"--tasks {options.tasks}, but {began}", f"--tasks {shape.count}"))
    if frozen is not None and begun is None:
        wrong.append(("this run began without an array; use another --out, or badcjobs run without Slurm", None))
    if listed is not None and shape.count != listed:
        right = f"--tasks {listed}"
        wrong.append((f"the list names {listed} manifests, one for each task: {right}", right))
    return spec, shape, only


def _check_options(options: SubmitSettings, wrong: Wrong) -> dict[str, str | bool]:
    """Add what is wrong with single options; return the further options of sbatch."""
    for key in ("mem", "merge_mem"):
        value = getattr(options, key)
        try:
            parse_memory("0" if value is None else value)
        except ValueError:
            wrong.append((f"{_place(key)} {value} is not an amount of memory; write 16G or 16000M", None))
    for key in ("account", "constraint", "merge_account"):
        value = getattr(options, key)
        if value is not None and (not value or not value.isprintable()):
            wrong.append((f"{_place(key)} {value!r} cannot stand in a line of a script", None))
    try:
        return extra_options(options.sbatch)
    except ValueError as error:
        wrong.append((f"--sbatch: {error}", None))
        return {}


def _place(key: str) -> str:
    """Return how a setting of [submit] is written: its option, or its key."""
    setting = SETTINGS["submit"][key]
    return setting.option if setting.heading else f"[submit] {key} ="


def extra_options(given: Sequence[str]) -> dict[str, str | bool]:
    """Return options of sbatch by name: ``--qos=high`` and ``--exclusive``; raise ValueError for what cannot be."""
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
