"""Submit an array to Slurm: read the source, make the order, find its existing job or submit a new one.

Checks that need the complete source are made here once, not in every task. Nothing is submitted twice: an intent is
recorded before sbatch is called, and signals are delayed until the job number is recorded (``hold``).
``array_script.py`` makes the scripts, ``slurm.py`` has them submitted, ``wait_for_job.py`` waits for the job.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from badcjobs.cluster import sbatch_options as sbatch
from badcjobs.cluster.scheduler import has_ended
from badcjobs.cluster.slurm import Slurm, SlurmRefused, SubmissionUnknown, find_array, rename_script
from badcjobs.devices.slurm_programs import Answer
from badcjobs.errors import BadcjobsError, BadInput
from badcjobs.masking import mask_words
from badcjobs.model import ArrayOrder, ArrayShape, PlaceCounts, Submitted, default_cpus, default_mem
from badcjobs.paths import RunFolder, shell_line
from badcjobs.report.completeness import open_placed_sources
from badcjobs.report.job import summarize_database
from badcjobs.report.summary import Summary
from badcjobs.run_toml import FrozenRun, check_against
from badcjobs.seams import Clock, Unanswered
from badcjobs.settings import SETTINGS, RunSettings, SubmitSettings, refuse
from badcjobs.sources.places import place_words
from badcjobs.sources.walk import Shard
from badcjobs.store import submission_record as records
from badcjobs.store.merge import MergeOrder, merge
from badcjobs.store.run_lock import check_writable, folder_lock, refuse_during_emulation, undo_on_error

Progress = Callable[[int], None]

_LOOKED_AT = 2000  # audio files; opening each of twenty million on Lustre would take an hour
_ASKS_FOR_GPUS = re.compile(r"--(gres|gpus|tres-per)")  # not --exclusive: srun, which starts the tasks, sees no GPU
_WARNING_S = 180
_SHORTEST_WARNING_S = 30  # Slurm checks time limits every 30 seconds


class SourceSurvey(NamedTuple):
    """What a source has."""

    chunks: int = 0
    looked_at: int | None = None  # chunks whose audio was checked; None: it was checked by an earlier submit
    listed: int | None = None  # how many manifests a list of manifests names
    places: PlaceCounts | None = None  # None: no place is given, or it was checked by an earlier submit

    @property
    def notes(self) -> dict[str, str]:
        """Notes for the user: audio that was not checked, places."""
        notes = {}
        if self.looked_at is not None and self.looked_at < self.chunks:
            looked_at = f"{self.looked_at:,} of {self.chunks:,} chunks"
            notes["checked"] = f"checked the audio of {looked_at}; badcjobs check opens all"
        if self.places is not None:
            notes["places"] = place_words(self.places)
        return notes


@dataclass(frozen=True)
class ArrayPlan:
    """An order whose source was read completely."""

    order: ArrayOrder
    survey: SourceSurvey
    asked: Mapping[str, Any]  # the options of submit, also if only a part of the array is submitted now
    finished: Summary | None = None  # the summary of the run, if nothing is left to submit
    redo_all: bool = False  # --no-resume: chunks that are done are done again
    left: int | None = None  # chunks left in a stopped run; None: all, or not counted


def plan_array(
    settings: RunSettings,
    options: SubmitSettings,
    *,
    out: Path,
    run_arguments: Sequence[str],
    record: records.Record | None,
    cwd: Path,
    progress: Progress,
    mistakes: Sequence[str],
) -> ArrayPlan:
    """Read source and run folder, check all options, and return the order; raise one BadInput per kind of problem.

    ``record``: the existing job, whose source is not checked again. ``mistakes`` were found earlier.
    """
    survey = SourceSurvey()
    if record is not None:
        survey = SourceSurvey(record.chunks or 0, listed=record.listed)
    elif not mistakes:
        survey = survey_source(settings, cwd, progress)
    run_toml = RunFolder(out).run_toml
    frozen = FrozenRun.read(run_toml)
    order = make_order(
        options,
        frozen,
        survey.listed,
        out=out,
        run_arguments=run_arguments,
        cpu_workers=settings.cpu_workers,
        mistakes=mistakes,
    )
    if frozen is not None:
        check_against(frozen, FrozenRun.of(settings, order.shape, cwd), run_toml)
    return ArrayPlan(order, survey, records.asked_of(order), redo_all=not settings.resume)


def survey_source(settings: RunSettings, cwd: Path, progress: Progress) -> SourceSurvey:
    """Read every row of a source and check the audio of some."""
    sources = open_placed_sources(settings, cwd)
    rows = 0

    def on_row(_key: tuple[str, str]) -> None:
        nonlocal rows
        rows += 1
        progress(rows)

    sources.read_identities(on_row)
    sample = Shard(0, max(1, rows // _LOOKED_AT))
    looked_at = sum(1 for _ in sources.chunks(sample))  # finds repeated rows as well
    return SourceSurvey(rows, looked_at, sources.manifests_listed, sources.places)


def plan_what_is_left(plan: ArrayPlan, clock: Clock) -> ArrayPlan:
    """Merge what there is; return the plan for the indices with work left, all if no task has written a database."""
    folder = RunFolder(plan.order.out)
    if plan.redo_all or plan.order.only or not folder.run_toml.exists():
        return plan
    if not folder.job_database.exists() and not any(folder.tasks.glob("*.sqlite")):
        return plan

    merge(MergeOrder([folder.path], folder.job_database), clock)
    summary = summarize_database(folder.job_database)  # the merge job writes the page
    proof = summary.completeness
    expected = None if proof is None else proof.expected
    if proof is not None and expected is not None and plan.survey.chunks > expected:
        return replace(plan, left=plan.survey.chunks - proof.done)  # a longer --filelist: recordings that were left out
    if summary.verdict == "done":
        return replace(plan, finished=summary)
    if proof is None or expected is None:
        return plan
    plan = replace(plan, left=expected - proof.done)
    if len(proof.left_indices) == plan.order.tasks:
        return plan
    return replace(plan, order=replace(plan.order, only=proof.left_indices))


# --- from the options of submit to the order ------------------------------------------------------------------------


def make_order(
    options: SubmitSettings,
    frozen: FrozenRun | None,
    listed: int | None,
    *,
    out: Path,
    run_arguments: Sequence[str],
    cpu_workers: int,
    mistakes: Sequence[str],
) -> ArrayOrder:
    """Return the order; all mistakes are in one message, with those that were found earlier in the same command.

    ``frozen``: run.toml of the run; ``listed``: the number of manifests in a list of manifests.
    """
    wrong = list(mistakes)
    more = _read_extra_options(options, wrong)
    name = str(more.pop("job-name", "badcjobs"))
    shape, spec = _read_array(options, more.pop("array", None), frozen, listed, wrong)
    time_min = _read_minutes("time", options.time or "12:00:00", wrong)
    merge_time_min = _read_minutes("merge_time", options.merge_time or "1:00:00", wrong)
    if options.gpus_per_task == 0 and not cpu_workers and not any(map(_ASKS_FOR_GPUS.match, options.sbatch)):
        wrong.append("--gpus-per-task 0: a task without a GPU needs -- --cpu-workers 2, or it cannot start")
    refuse(wrong, "badcjobs submit --help", "these options cannot be used")

    return _order_of(
        options,
        shape,
        spec,
        time_min,
        out=out,
        run_arguments=tuple(run_arguments),
        name=name,
        extra_sbatch=more,
        merge_time_min=merge_time_min,
    )


def _order_of(
    options: SubmitSettings, shape: ArrayShape, spec: sbatch.ArraySpec | None, time_min: int, **work: Any
) -> ArrayOrder:
    """Return an order: its work, the array, and what each task gets."""
    gpus = 1 if options.gpus_per_task is None else options.gpus_per_task
    only: tuple[int, ...] = ()
    parallel = options.parallel
    if spec is not None:
        parallel = parallel or spec.parallel
        if len(spec.indices) != shape.count:
            only = spec.indices
    return ArrayOrder(
        **work,
        tasks=shape.count,
        first=shape.first,
        step=shape.step,
        only=only,
        parallel=parallel,
        gpus_per_task=gpus,
        cpus=options.cpus or default_cpus(gpus),
        mem=_memory(options.mem) or default_mem(gpus),
        time_min=time_min,
        warning_s=min(_WARNING_S, max(_SHORTEST_WARNING_S, time_min * 60 // 4)),
        requeues=options.requeues,
        account=options.account,
        constraint=options.constraint,
        setup=options.setup,
        merge_account=options.merge_account,
        merge_mem=_memory(options.merge_mem) or "4G",
    )


def _read_extra_options(options: SubmitSettings, wrong: list[str]) -> dict[str, str | bool]:
    """Return the other options of sbatch; add the mistakes in single options."""
    for key in ("account", "constraint", "merge_account"):
        value = getattr(options, key)
        if value is not None and (not value or not value.isprintable()):
            wrong.append(f"{_place(key)} {value!r} cannot be written in a line of a script")
    try:
        return sbatch.extra_options(options.sbatch)
    except ValueError as error:
        wrong.append(f"--sbatch: {error}")
        return {}


def _read_minutes(key: str, text: str, wrong: list[str]) -> int:
    try:
        return sbatch.parse_minutes(text)
    except ValueError:
        wrong.append(f"{_place(key)} {text} is not a time; write minutes, H:M:S or D-H:M:S: 12:00:00")
        return 0


def _place(key: str) -> str:
    """Return the option of a setting of [submit], or its key."""
    setting = SETTINGS["submit"][key]
    return setting.option if setting.heading else f"[submit] {key} ="


def _memory(text: str | None) -> str | None:
    """Return an amount of memory as sbatch and the emulation accept it: 16GB becomes 16G."""
    return text and text.upper().removesuffix("B")


def _read_array(
    options: SubmitSettings, array: str | bool | None, frozen: FrozenRun | None, listed: int | None, wrong: list[str]
) -> tuple[ArrayShape, sbatch.ArraySpec | None]:
    """Return the shape of the array, and the indices that --sbatch=--array names.

    The shape is that of the run, else of these indices, else of the number of tasks or manifests.
    """
    spec = None if array is None else sbatch.try_parse(wrong, sbatch.parse_array, str(array))
    given = f"--sbatch=--array={array}"
    if frozen is not None and frozen.array is not None:
        shape = frozen.array
        if spec is not None and any(shape.position_of(index) is None for index in spec.indices):
            wrong.append(f"{given}: not in this run's array {shape}")
    elif spec is not None:
        shape = ArrayShape(spec.indices[0], spec.step, len(spec.indices))
        instead = sbatch.suggest_range(spec)
        if instead is not None:
            why = "because Slurm does not pass a list to its tasks"
            wrong.append(f"{given}: a new run needs a range, {why}: --sbatch=--array={instead}")
    else:
        shape = ArrayShape(0, 1, max(options.tasks or listed or 1, 1))

    if options.tasks not in (None, shape.count):
        has_array = f"the array of this run has {shape.count} ({shape})"
        wrong.append(f"--tasks {options.tasks}, but {has_array}: --tasks {shape.count}")
    if frozen is not None and frozen.array is None:
        wrong.append("this run was started without an array; use another --out, or badcjobs run without Slurm")
    if listed is not None and shape.count != listed:
        wrong.append(f"the list names {listed} manifests, one for each task: --tasks {listed}")
    return shape, spec


# --- from the order to a job that Slurm has -------------------------------------------------------------------------


class SubmitResult(NamedTuple):
    """A submitted job; ``found``: it existed before this command."""

    job: Submitted
    plan: ArrayPlan
    found: bool
    merge: Answer | None = None  # of sbatch for the merge job, if this command has submitted it


def submit_or_find(
    plan: ArrayPlan, slurm: Slurm, clock: Clock, *, again: bool, hold: Callable[[], None]
) -> SubmitResult:
    """Submit the array and its merge job; without ``again``, find the existing job of this run folder instead.

    ``hold`` is called right before sbatch; from then on the caller must delay signals until this function returns.
    """
    out = plan.order.out
    with undo_on_error(out), folder_lock(out):
        interrupted = _find_interrupted_submit(out)
        record = find_record(plan, again=again)
        is_found = record is not None
        merge = None
        if record is None:
            check_writable(out)
            record = _submit_array(plan, slurm, clock, hold)
        if record.job.merge_job_id is None and (interrupted or not is_found):
            hold()
            merge = slurm.submit_merge(plan.order, record.job.job_id)
            record = replace(record, job=replace(record.job, merge_job_id=merge.job_id))
            records.write_record(out, record)
        if merge is None or merge.sure:  # else there may be a merge job, and the next submit looks for it
            records.forget_intent(out)
        return SubmitResult(record.job, replace(plan, left=record.left), is_found, merge)


def find_record(plan: ArrayPlan, *, again: bool) -> records.Record | None:
    """Return the existing job that this command would find; refuse what it would refuse, and change nothing."""
    out = plan.order.out
    record = records.last_submission(out, find_array)
    if record is not None and not again:
        _refuse_other_options(record, plan)
        return record
    if record is not None:
        _refuse_unfinished(record.job)
    refuse_during_emulation(out)
    return None


def _refuse_other_options(record: records.Record, plan: ArrayPlan) -> None:
    """Raise BadInput if a job was submitted with other options than those of a plan."""
    differing = [] if record.asked is None else records.differences(record.asked, plan.asked)
    now = tuple(mask_words(plan.order.run_arguments))
    if record.run_arguments != now:
        differing.append(f"then: {shell_line(*record.run_arguments)}")
        differing.append(f"now: {shell_line(*now)}")
    if differing:
        ending = f"once it has ended ({Slurm().cancel_line(record.job)} ends it)"
        raise BadInput(
            f"{plan.order.out} already has job {record.job.job_id}, which was submitted with other options",
            why="\n".join([*differing, "the options of a submitted job cannot be changed"]),
            fix=f"the same command with --again, {ending}, or with another --out",
        )


def _refuse_unfinished(job: Submitted) -> None:
    """Raise an error unless Slurm says that a job has ended."""
    try:
        states = Slurm().states(job)
    except Unanswered as error:
        raise SlurmRefused(
            f"it is not known whether job {job.job_id} has ended",
            why=f"Slurm does not answer: {error}",
            fix=f"squeue -j {job.job_id}   (when it answers, the same command)",
        ) from error
    if not has_ended(states):
        raise BadInput(
            f"job {job.job_id} has not ended yet",
            why="a second job would process the same chunks",
            fix=f"{Slurm().cancel_line(job)}   (or the same command with --wait, without --again)",
        )


def _submit_array(plan: ArrayPlan, slurm: Slurm, clock: Clock, hold: Callable[[], None]) -> records.Record:
    """Submit the array; record the intent before sbatch is called, and the job with its number afterwards."""
    order = plan.order
    record = records.Record(
        cluster="slurm",
        job=Submitted("", None, order.indices),
        run_arguments=tuple(mask_words(order.run_arguments)),
        chunks=plan.survey.chunks,
        submitted_at_ms=clock.now_ms(),
        asked=dict(plan.asked),
        listed=plan.survey.listed,
        left=plan.left,
    )

    def about_to(script: Path) -> None:
        hold()
        records.write_intent(order.out, script, record)

    try:
        job = slurm.submit(order, about_to)
    except SubmissionUnknown:
        raise  # the intent stays: the next submit looks for the job
    except BadcjobsError:
        records.forget_intent(order.out)
        raise
    submitted = replace(record, job=job)
    records.write_record(order.out, submitted)
    return submitted


def _find_interrupted_submit(out: Path) -> bool:
    """Look for the job of a submit that was killed while sbatch was running; record it if it exists.

    The intent is removed only if there is no job: the next submit may still need it for the merge job.
    """
    intent = records.read_intent(out)
    if intent is None:
        return False
    script, intended = intent
    record = records.last_submission(out, find_array)
    if record is None or not record.is_of(intended):
        records.forget_intent(out)
        return False
    records.write_record(out, record)
    rename_script(out / "logs" / script.name, record.job.job_id)
    return True
