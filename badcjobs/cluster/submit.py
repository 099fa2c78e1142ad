"""Submit an array to Slurm: check the source, make the order, find its existing job or submit a new one.

Checks that need the complete source are made here once, not in every task. Nothing is submitted twice: an intent is
recorded before sbatch is called, and signals are delayed until the job number is recorded (``hold``). ``slurm.py``
makes the scripts and calls sbatch; ``wait_for_job.py`` waits for the job.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from badcjobs.cluster import sbatch_options as sbatch
from badcjobs.cluster import slurm
from badcjobs.errors import BadcjobsError, BadInput
from badcjobs.masking import mask_words
from badcjobs.model import ArrayOrder, ArrayShape, Submitted, default_cpus, default_mem
from badcjobs.paths import RunFolder, shell_line
from badcjobs.project import Project, is_config_file
from badcjobs.report.job import summarize_database
from badcjobs.report.summary import Summary
from badcjobs.run_toml import FrozenRun, check_against
from badcjobs.seams import Clock, Unanswered
from badcjobs.settings import SETTINGS, RunSettings, SubmitSettings, absolute, refuse
from badcjobs.sources.open import open_sources_of
from badcjobs.sources.walk import Shard
from badcjobs.store import submission_record as records
from badcjobs.store.merge import MergeOrder, merge
from badcjobs.store.run_lock import check_writable, folder_lock, refuse_during_emulation, undo_on_error

Progress = Callable[[int], None]

_LOOKED_AT = 2000  # audio files; opening each of twenty million on Lustre would take an hour
_ASKS_FOR_GPUS = re.compile(r"--(gres|gpus|tres-per)")  # not --exclusive: srun, which starts the tasks, sees no GPU
_WARNING_S = 180
_SHORTEST_WARNING_S = 30  # Slurm checks time limits every 30 seconds
Wrong = list[tuple[str, str | None]]  # mistakes, each with the option as it should be, where that is known


# What each task is called with: the options of ``badcjobs run`` by key (None: not given), and the project file.
RunCommand = tuple[Mapping[str, Any], Project]


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """An order whose source was read completely."""

    order: ArrayOrder
    chunks: int
    asked: Mapping[str, Any]  # the options of submit, also if only a part of the array is submitted now
    looked_at: int | None = None  # chunks whose audio was checked; None: it was checked by an earlier submit
    listed: int | None = None  # how many manifests a list of manifests names
    finished: Summary | None = None  # the summary of the run, if nothing is left to submit
    redo_all: bool = False  # --no-resume: chunks that are done are done again
    left: int | None = None  # chunks left in a stopped run; None: all, or not counted

    @property
    def idle(self) -> int:
        """How many tasks have nothing to do; with a list of manifests each task has its own."""
        if self.order.only or self.listed is not None or not self.chunks:
            return 0
        return max(0, self.order.tasks - self.chunks)


def make_plan(
    command: RunCommand,
    options: SubmitSettings,
    cwd: Path,
    clock: Clock,
    progress: Progress,
    *,
    again: bool = False,
    find: bool = True,
    keep: bool = True,
    mistakes: Sequence[str] = (),
) -> ArrayPlan:
    """Check settings, source, run folder and options; raise one BadInput per kind of problem.

    ``mistakes`` were found earlier in the same command.
    ``again``: only the array indices of a stopped run that have work left; with --no-resume, all of them.
    ``find``: do not check the source of an existing job again.
    ``keep``: merge into the run folder to find out what is left; otherwise leave the run folder unchanged.
    """
    flags, project = command
    out, wrong = cwd / str(flags.get("out") or project.get("run", "out")), list(mistakes)
    settings = project.make(RunSettings, flags, "submit", wrong)
    wrong += ["[run] stop_after is for one task, not for an array"] if settings.stop_after else []
    chunks, looked_at, listed = 0, None, None
    if find and not again and (record := records.read_record(out)) is not None:
        chunks, listed = record.chunks or 0, record.listed  # checked when the job was submitted
    elif not wrong:
        chunks, looked_at, listed = read_source(settings, cwd, progress)
    run_toml = RunFolder(out).run_toml
    frozen = FrozenRun.read(run_toml)
    arguments = run_arguments(out, flags, project, cwd)
    order = make_order(options, frozen, listed, out=out, run_arguments=arguments, mistakes=wrong)
    if frozen is not None:
        check_against(frozen, FrozenRun.of(settings, order.shape, cwd), run_toml)
    plan = ArrayPlan(order, chunks, records.asked_of(order), looked_at, listed, redo_all=not settings.resume)
    return _plan_what_is_left(plan, clock, keep=keep) if again and settings.resume and not order.only else plan


def read_source(settings: RunSettings, cwd: Path, progress: Progress) -> tuple[int, int, int | None]:
    """Read every row and check the audio of some; return the number of rows, of checked rows, of listed manifests."""
    sources = open_sources_of(settings, cwd)
    rows = 0

    def count(_row: int, _part: int, _key: tuple[str, str]) -> None:
        nonlocal rows
        rows += 1
        progress(rows)

    sources.read_identities(count)
    looked_at = sum(1 for _ in sources.chunks(Shard(0, max(1, rows // _LOOKED_AT))))  # finds repeated rows as well
    return rows, looked_at, sources.manifests_listed


def run_arguments(out: Path, flags: Mapping[str, Any], project: Project, cwd: Path) -> tuple[str, ...]:
    """Return the arguments of each task's badcjobs; paths are absolute, so that tasks may start in any folder."""
    given = {key: value for key, value in flags.items() if value is not None}
    sources = given.get("source") or project.get("run", "source") or ()
    return ("run", *(absolute(cwd, path) for path in sources), f"--out={out}", *project.run_words(given, cwd))


def _plan_what_is_left(plan: ArrayPlan, clock: Clock, *, keep: bool) -> ArrayPlan:
    """Return the plan for the array indices that have work left; all of them if no task has written a database."""
    folder = RunFolder(plan.order.out)
    if not folder.run_toml.exists() or not (folder.job_database.exists() or any(folder.tasks.glob("*.sqlite"))):
        return plan
    if keep:
        merge(MergeOrder([folder.path], folder.job_database), clock)
        summary = summarize_database(folder.job_database)  # the merge job writes the page
    else:
        with tempfile.TemporaryDirectory(prefix="badcjobs-dry-run-") as name:
            aside = RunFolder(Path(name))  # with the layout of the run folder, because merged files have relative names
            for mine, copy in ((folder.run_toml, aside.run_toml), (folder.job_database, aside.job_database)):
                if mine.exists():
                    shutil.copyfile(mine, copy)
            aside.tasks.symlink_to(folder.tasks)
            merge(MergeOrder([aside.tasks], aside.job_database), clock)
            summary = summarize_database(aside.job_database)
    if summary.verdict == "done":
        return replace(plan, finished=summary)
    proof = summary.completeness
    plan = replace(plan, left=None if proof is None or proof.expected is None else proof.expected - proof.done)
    indices = proof.left_indices if proof is not None else ()
    return plan if len(indices) == plan.order.tasks else replace(plan, order=replace(plan.order, only=indices))


# --- from the options of submit to the order ------------------------------------------------------------------------


def make_order(
    options: SubmitSettings,
    frozen: FrozenRun | None = None,
    listed: int | None = None,
    *,
    out: Path,
    run_arguments: Sequence[str],
    mistakes: Sequence[str] = (),
) -> ArrayOrder:
    """Return the order; all mistakes are in one message, with those that were found earlier in the same command.

    ``frozen``: run.toml of the run; ``listed``: the number of manifests in a list of manifests.
    """
    wrong: Wrong = [(one, None) for one in mistakes]
    more = _check_options(options, wrong)
    array, name = more.pop("array", None), more.pop("job-name", None)  # given through --sbatch
    spec, shape, only = _choose_array(options, None if array is None else str(array), frozen, listed, wrong)
    times = {"time": options.time or "12:00:00", "merge_time": options.merge_time or "1:00:00"}
    minutes = {}
    for key, text in times.items():
        try:
            minutes[key] = sbatch.parse_minutes(text)
        except ValueError:
            wrong.append((f"{_place(key)} {text} is not a time; write minutes, H:M:S or D-H:M:S: 12:00:00", None))
    if "\n" in str(out):
        wrong.append((f"--out {str(out)!r} has a line break in its name", None))
    words = [word.partition("=")[::2] for word in run_arguments]
    by_file = any(name == "--config" and is_config_file(value) for name, value in words)  # it may set cpu_workers
    on_cpu = by_file or dict(words).get("--cpu-workers", "0") != "0"
    if options.gpus_per_task == 0 and not on_cpu and not any(map(_ASKS_FOR_GPUS.match, options.sbatch)):
        # --simulate replaces granted GPUs, and no GPU would be granted.
        lacking = "--gpus-per-task 0: no task could start; a task without a GPU needs --cpu-workers"
        wrong.append((lacking, "-- --cpu-workers 2"))
    right = [option for _, option in wrong if option is not None]
    fix = f"the same command with {' '.join(right)}" if len(right) == len(wrong) else "badcjobs submit --help"
    refuse([text for text, _ in wrong], fix, "these options cannot be used")
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
    """Return an amount of memory as sbatch and the emulation accept it: 16GB becomes 16G."""
    return text and text.upper().removesuffix("B")


def _choose_array(
    options: SubmitSettings, array: str | None, frozen: FrozenRun | None, listed: int | None, wrong: Wrong
) -> tuple[sbatch.ArraySpec | None, ArrayShape, tuple[int, ...]]:
    """Return the parsed --array, the shape of the array and, if only a part is requested, its indices."""
    begun = None if frozen is None else frozen.array
    shape = begun or ArrayShape(0, 1, max(options.tasks or listed or 1, 1))
    spec: sbatch.ArraySpec | None = None
    only: tuple[int, ...] = ()
    try:
        spec = None if array is None else sbatch.parse_array(array)
    except ValueError as error:
        wrong.append((str(error), None))
    if spec is not None:
        if spec.parallel and options.parallel and spec.parallel != options.parallel:
            wrong.append((f"--sbatch=--array={array} and --parallel {options.parallel} differ", None))
        shape = begun or ArrayShape(spec.indices[0], spec.step, len(spec.indices))
        only = () if len(spec.indices) == shape.count else spec.indices
        if any(shape.position_of(index) is None for index in spec.indices):
            instead = sbatch.suggest_range(spec)
            new = f"a new run needs a range, because Slurm does not pass a list to its tasks: {instead}"
            said = f"not in this run's array {shape}" if begun else new
            right = None if begun else f"--sbatch=--array={instead}"
            wrong.append((f"--sbatch=--array={array}: {said}", right))
    if spec is not None and begun is None and options.tasks not in (None, shape.count):
        wrong.append((f"--tasks {options.tasks} and --sbatch=--array={array} differ", None))
    elif options.tasks is not None and options.tasks != shape.count:
        began = f"this run was started as an array of {shape.count} ({shape})"
        wrong.append((f"--tasks {options.tasks}, but {began}", f"--tasks {shape.count}"))
    if frozen is not None and begun is None:
        wrong.append(("this run was started without an array; use another --out, or badcjobs run without Slurm", None))
    if listed is not None and shape.count != listed:
        right = f"--tasks {listed}"
        wrong.append((f"the list names {listed} manifests, one for each task: {right}", right))
    return spec, shape, only


def _check_options(options: SubmitSettings, wrong: Wrong) -> dict[str, str | bool]:
    """Add the mistakes in single options; return the other options of sbatch."""
    for key in ("account", "constraint", "merge_account"):
        value = getattr(options, key)
        if value is not None and (not value or not value.isprintable()):
            wrong.append((f"{_place(key)} {value!r} cannot be written in a line of a script", None))
    try:
        return sbatch.extra_options(options.sbatch)
    except ValueError as error:
        wrong.append((f"--sbatch: {error}", None))
        return {}


def _place(key: str) -> str:
    """Return the option of a setting of [submit], or its key."""
    setting = SETTINGS["submit"][key]
    return setting.option if setting.heading else f"[submit] {key} ="


# --- from the order to a job that Slurm has -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """A submitted job; ``found``: it existed before this command."""

    job: Submitted
    plan: ArrayPlan
    found: bool
    merge: slurm.Answer | None = None  # of sbatch for the merge job, if this command has submitted it


def submit_or_find(
    plan: ArrayPlan, task: slurm.NewTask, clock: Clock, *, again: bool, hold: Callable[[], None]
) -> SubmitResult:
    """Submit the array and its merge job; without ``again``, find the existing job of this run folder instead.

    ``hold`` is called right before sbatch; from then on the caller must delay signals until this function returns.
    """
    out = plan.order.out
    with undo_on_error(out), folder_lock(out):
        interrupted = _find_interrupted_submit(out)
        record = find_record(plan, again=again)
        found, merge = record is not None, None
        if record is None:
            check_writable(out)
            record = _submit_array(plan, task, clock, hold)
        if record.job.merge_job_id is None and (interrupted or not found):
            hold()
            merge = slurm.submit_merge(plan.order, record.job.job_id)
            record = replace(record, job=replace(record.job, merge_job_id=merge.job_id))
            records.write_record(out, record)
        if merge is None or merge.sure:  # else there may be a merge job, and the next submit looks for it
            records.forget_intent(out)
        return SubmitResult(record.job, replace(plan, left=record.left), found, merge)


def find_record(plan: ArrayPlan, *, again: bool) -> records.Record | None:
    """Return the existing job that this command would find; refuse what it would refuse, and change nothing."""
    out = plan.order.out
    record = records.last_submission(out, slurm.find_array)
    if record is not None and not again:
        differing = [] if record.asked is None else records.differences(record.asked, plan.asked)
        then, now = record.run_arguments, tuple(mask_words(plan.order.run_arguments))
        if then != now:
            differing += [f"then: {shell_line(*then)}", f"now: {shell_line(*now)}"]
        if differing:
            ending = f"once it has ended ({slurm.cancel_line(record.job)} ends it)"
            raise BadInput(
                f"{out} already has job {record.job.job_id}, which was submitted with other options",
                why="\n".join([*differing, "the options of a submitted job cannot be changed"]),
                fix=f"the same command with --again, {ending}, or with another --out",
            )
        return record
    if record is not None:
        number = record.job.job_id
        try:
            ended = slurm.has_ended(slurm.query_states(record.job))
        except Unanswered as error:
            raise slurm.SlurmRefused(
                f"it is not known whether job {number} has ended",
                why=f"Slurm does not answer: {error}",
                fix=f"squeue -j {number}   (when it answers, the same command)",
            ) from error
        if not ended:
            raise BadInput(
                f"job {number} has not ended yet",
                why="a second job would process the same chunks",
                fix=f"{slurm.cancel_line(record.job)}   (or the same command with --wait, without --again)",
            )
    refuse_during_emulation(out)
    return None


def _submit_array(plan: ArrayPlan, task: slurm.NewTask, clock: Clock, hold: Callable[[], None]) -> records.Record:
    """Submit the array; record the intent before sbatch is called, and the job with its number afterwards."""
    order = plan.order
    record = records.Record(
        "slurm", Submitted("", None, order.indices), tuple(mask_words(order.run_arguments)), plan.chunks,
        clock.now_ms(), dict(plan.asked), plan.listed, plan.left,
    )  # fmt: skip

    def about_to(script: Path) -> None:
        hold()
        records.write_intent(order.out, script, record)

    try:
        record = replace(record, job=replace(record.job, job_id=slurm.submit_array(order, task, about_to)))
    except slurm.SubmissionUnknown:
        raise  # the intent stays: the next submit looks for the job
    except BadcjobsError:
        records.forget_intent(order.out)
        raise
    records.write_record(order.out, record)
    return record


def _find_interrupted_submit(out: Path) -> bool:
    """Look for the job of a submit that was killed while sbatch was running; record it if it exists.

    The intent is removed only if there is no job: the next submit may still need it for the merge job.
    """
    intent = records.read_intent(out)
    if intent is None:
        return False
    script, intended = intent
    record = records.last_submission(out, slurm.find_array)
    if record is None or not record.is_of(intended):
        records.forget_intent(out)
        return False
    records.write_record(out, record)
    slurm.rename_script(out / "logs" / script.name, record.job.job_id)
    return True
