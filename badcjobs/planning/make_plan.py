"""Make a plan: tasks, waves, requested resources, and remarks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from badcjobs.errors import BadInput
from badcjobs.planning import plan_tasks
from badcjobs.planning.bill import Choice, Cut, billed_start_up_s, choose
from badcjobs.planning.findings import Remark, note, problem
from badcjobs.planning.place_rules import FILES_PER_JOB, FILES_PER_TASK
from badcjobs.planning.plan_speed import Speed
from badcjobs.planning.plan_survey import Lengths, Survey, check_survey, to_facts
from badcjobs.planning.site import Site
from badcjobs.report.rules import NOTE
from badcjobs.sources.mistakes import SHOWN, with_more
from badcjobs.words import count, duration, number

PLAN_VERSION = 1
_HOUR_MS = 3_600_000
_OTHER_LENGTH = 2  # times as long: the speed of other chunks is not comparable
_LAST_IS_LONGER_S = 3.0  # than the others, at most, when recordings are cut on the fly


class CampaignPlan(NamedTuple):
    """The plan of a whole campaign."""

    survey: Survey
    speed: Speed
    margin: plan_tasks.Margin
    sizing: plan_tasks.Sizing
    choice: Choice  # what each task requests
    choices: tuple[Choice, ...]  # all that were compared, the cheapest first
    fastest: Choice
    wish: plan_tasks.PlanWish
    site: Site
    waves: Sequence[plan_tasks.Wave]
    waves_why: str  # what decides their number
    gpus: int | None  # at a time; None: not known, nor when it is finished
    gpus_why: str
    remarks: Sequence[Remark] = ()

    @property
    def tasks(self) -> int:
        """The number of array tasks."""
        return len(self.sizing.shares)

    @property
    def audio_hours(self) -> float:
        """The audio of all chunks."""
        return self.survey.lengths.total_ms / _HOUR_MS

    @property
    def recording_hours(self) -> float:
        """The audio of all recordings: what neighbouring chunks share counts once."""
        return (self.survey.lengths.total_ms - self.survey.shared_ms) / _HOUR_MS

    @property
    def work_gpu_hours(self) -> float:
        """GPU time at this speed, without start-up."""
        return self.audio_hours / self.choice.rate

    @property
    def start_up_gpu_hours(self) -> float:
        """GPU time while tasks start up."""
        return self.tasks * self.sizing.gpus * billed_start_up_s(self.speed) / 3600

    @property
    def asked_gpu_hours(self) -> float:
        """What the tasks ask of Slurm, all together."""
        return self.tasks * self.sizing.gpus * self.sizing.time_s / 3600

    @property
    def billed_units(self) -> float | None:
        """The bill of all tasks together; None: the site has no weights."""
        units = self.choice.units_per_1000_audio_hours
        return units and units * self.recording_hours / 1000

    @property
    def running_s(self) -> float | None:
        """How long all waves take, without any waiting in the queue; None: not known."""
        if self.gpus is None:
            return None
        return sum(wave.running_s for wave in self.waves)

    @property
    def files(self) -> int:
        """How many files the campaign leaves at most."""
        return self.tasks * FILES_PER_TASK + len(self.waves) * FILES_PER_JOB


def cut_of(
    lengths: Lengths,
    recorded_ms: int,
    speed: Speed,
    wish: plan_tasks.PlanWish,
    site: Site,
    chunk_s: float = 0.0,
) -> Cut:
    """Return what to choose by: the lengths of chunks, and the start-up of their tasks."""
    margin = plan_tasks.make_margin(speed, wish.margin)
    mean_s = lengths.mean_ms / 1000
    recorded_ms = max(1, recorded_ms)

    def start_up(rate: float, gpus: int) -> float:
        tasks, *_ = plan_tasks.count_tasks(lengths, rate, gpus, margin, wish, site)
        return tasks * billed_start_up_s(speed) * 1000 / recorded_ms

    return Cut(
        chunk_s or mean_s,
        mean_s,
        lengths.held_s,
        lengths.total_ms / recorded_ms,
        start_up,
    )


def make_plan(
    survey: Survey, speed: Speed, wish: plan_tasks.PlanWish, site: Site, cuts: Sequence[Cut] = ()
) -> CampaignPlan:
    """Return the plan: the same values give the same plan on every machine; ``cuts``: to choose from."""
    lengths = survey.lengths
    if not lengths.total_ms:
        raise _nothing_to_plan(survey)
    recorded_ms = lengths.total_ms - survey.shared_ms
    cuts = cuts or [cut_of(lengths, recorded_ms, speed, wish, site)]
    choice, fastest, choices = choose(speed, wish, site, cuts)
    by_cost = sorted(choices[1:], key=lambda other: other.units_per_1000_audio_hours or 0.0)

    speed = _speed_of(choice, speed, lengths.mean_ms / 1000)
    wish = replace(wish, gpus_per_task=choice.gpus)
    margin = plan_tasks.make_margin(speed, wish.margin)
    sizing = plan_tasks.size_tasks(lengths, speed, margin, wish, site)
    most, waves_why = plan_tasks.most_tasks(sizing, site)
    at_a_time, gpus_why = plan_tasks.tasks_at_a_time(sizing, wish, site, most)
    waves = plan_tasks.make_waves(sizing, speed, margin, most, at_a_time)
    plan = CampaignPlan(
        survey=survey,
        speed=speed,
        margin=margin,
        sizing=sizing,
        choice=choice,
        choices=(choices[0], *by_cost),
        fastest=fastest,
        wish=wish,
        site=site,
        waves=waves,
        waves_why=waves_why,
        gpus=at_a_time and at_a_time * sizing.gpus,
        gpus_why=gpus_why,
    )
    remarks = list(check_survey(survey, NOTE))
    for rule in (_check_workers, _check_long_chunks, _check_files, _check_unsafe_chunks, _check_speed):
        remarks += rule(plan)
    return plan._replace(remarks=remarks)


def _speed_of(choice: Choice, speed: Speed, chunk_s: float) -> Speed:
    """Return the speed of what was chosen, with chunks of this mean length."""
    origin = speed.origin
    if speed.points:
        estimated = "" if choice.measured else ", estimated"
        origin += f", for {count(choice.workers, 'worker')} per GPU and chunks of {number(chunk_s)} s{estimated}"
    return replace(speed, audio_hours_per_gpu_hour=choice.rate, origin=origin)


def _nothing_to_plan(survey: Survey) -> BadInput:
    lengths = survey.lengths
    mistakes = survey.mistakes
    names = [name for faulty in survey.walk.remarks.faults.values() for name in faulty]
    names += [*survey.unknown_names, *mistakes.examples(SHOWN)[0]]
    error = mistakes.error()
    what = f"there is nothing to plan: {count(mistakes.count, 'mistake')} in rows or sources, and there are no others"
    if lengths.unknown:
        what = f"the length of the audio is not known: {count(lengths.unknown, 'file')} without a length in the header,"
        what += " or not fetched by git-annex"
    elif lengths.rows:
        what = f"there is no audio in the source, which has {count(lengths.rows, 'chunk')}"
    fix = survey.walk.size.not_here_fix or (error and error.fix) or "badcjobs check SOURCE"
    return BadInput(
        what,
        why="\n".join(with_more(names[:SHOWN], len(names))) or None,
        fix=fix,
    )


# --- remarks about the tasks ------------------------------------------------------------------------------------------


def _check_workers(plan: CampaignPlan) -> Iterator[Remark]:
    choice = plan.choice
    held_s = plan.survey.lengths.held_s(choice.gpus * choice.workers)
    room = plan.speed.device_room(held_s)
    if choice.workers > room:
        text = f"{choice.workers} per GPU, but its memory holds {room:,} by what was measured"
        yield problem("workers", text, f"-- --workers-per-gpu {room}")
    elif not choice.fits:
        request = f"{count(choice.cpus, 'core')} and {choice.mem_gb} GB"
        text = f"{choice.workers} per GPU may need more than {request}: {choice.mem_why}"
        yield problem(
            "workers",
            text,
            "-- --workers-per-gpu 1 --chunk-length 294   (or more under [submit])",
        )


def _check_long_chunks(plan: CampaignPlan) -> Iterator[Remark]:
    """Find chunks that no task could finish, because one GPU needs longer than a task has."""
    survey = plan.survey
    limit_s = plan.sizing.longest_chunk_s
    many = survey.lengths.longer_than(limit_s * 1000)
    if not many:
        return
    text = f"{count(many, 'chunk')} longer than the {duration(limit_s)} of audio that one GPU finishes in a task for"
    text += " certain: they may never be done"
    yield problem("long chunks", text, _cut_shorter(survey, min(limit_s, 3600.0)), _longer_than(limit_s, survey))


def _cut_shorter(survey: Survey, at_most_s: float) -> str:
    """Return the options that cut recordings to chunks of at most so many seconds."""
    shorter = f"-- --chunk-length {math.floor(at_most_s)}"
    if survey.rows_alone:
        return f"plan the whole recordings instead of this manifest, with {shorter}"
    return f"{shorter}   (whole recordings are cut on the fly)"


def _longer_than(limit_s: float, survey: Survey) -> list[str]:
    """Return the names of some chunks that are longer."""
    return [f"{name} ({duration(ms / 1000)})" for ms, name in survey.longest if ms > limit_s * 1000]


def _check_files(plan: CampaignPlan) -> Iterator[Remark]:
    site = plan.site
    if site.files and plan.files > site.files:
        text = f"{plan.files:,} files at most, but the quota of {site.name} is {site.files:,}"
        fix = "a longer --time, for fewer tasks; badcjobs merge --remove-merged after each wave"
        yield problem("files", text, fix)


def _check_unsafe_chunks(plan: CampaignPlan) -> Iterator[Remark]:
    """Count the chunks longer than a probe has found to be safe: a run gets them done, but more slowly."""
    safe_s = plan.speed.safe_s
    lengths = plan.survey.lengths
    if safe_s is None:
        return
    many = lengths.longer_than(safe_s * 1000)
    if not many:
        return
    text = f"{many:,} of {lengths.rows:,} chunks are longer than the {safe_s:g} s that are safe on"
    text += f" {', '.join(plan.speed.devices)}: a run does them with one thread or in pieces, which may be slower"
    # Last chunks are longer than the others, and shall be safe, too.
    fix = _cut_shorter(plan.survey, min(plan.speed.best_s or safe_s, max(safe_s / 2, safe_s - _LAST_IS_LONGER_S)))
    yield note("chunk length", text, fix, _longer_than(safe_s, plan.survey))


def _check_speed(plan: CampaignPlan) -> Iterator[Remark]:
    speed = plan.speed
    for doubt in speed.doubts:
        yield note("speed", doubt, speed.remedy)
    chunk_s = plan.survey.lengths.mean_ms / 1000
    nearest_s = min(
        (point.chunk_s for point in speed.points if point.chunk_s and not speed.given),
        key=lambda length_s: abs(math.log(length_s / chunk_s)),
        default=chunk_s,
    )
    if not 1 / _OTHER_LENGTH <= chunk_s / nearest_s <= _OTHER_LENGTH:
        text = f"it was measured with chunks of {number(nearest_s)} s on average, and those of this plan have"
        text += (
            f" {number(chunk_s)} s: short ones are slower; run one task of this plan first, and plan again --from it"
        )
        yield note("speed", text)


# --- document ---------------------------------------------------------------------------------------------------------


def to_dict(plan: CampaignPlan) -> dict[str, Any]:
    """Return the JSON document; the same plan gives the same document, byte for byte."""
    site = {name: value for name, value in asdict(plan.site).items() if value not in (None, "", ())}
    survey = plan.survey
    document = {
        "version": PLAN_VERSION,
        "source": {
            "cut": survey.cut,
            "headers_read": survey.walk.measured,
            **to_facts(survey),
            "nothing_there": survey.nothing_there,
            "left_out": survey.mistakes.examples(SHOWN)[0],
            "sample_rates_hz": {str(hz): files for hz, files in sorted(survey.walk.rates_hz.items())},
        },
        "audio_hours": plan.audio_hours,
        "recording_hours": plan.recording_hours,
        "speed": {**asdict(plan.speed), "curve": _curve(plan)},
        "gpu_hours": plan.work_gpu_hours,
        "start_up_gpu_hours": plan.start_up_gpu_hours,
        "asked_gpu_hours": plan.asked_gpu_hours,
        "tasks": _tasks_document(plan),
        "choices": [choice._asdict() for choice in plan.choices],
        "billed_units": plan.billed_units,
        "margin": plan.margin._asdict(),
        "files": plan.files,
        "site": site,
        "waves": [wave._asdict() for wave in plan.waves],
        "waves_why": plan.waves_why,
        "gpus_at_a_time": plan.gpus,
        "gpus_why": plan.gpus_why,
        "running_s": plan.running_s,
        "remarks": [remark.to_dict() for remark in plan.remarks],
    }
    rounded: dict[str, Any] = json.loads(json.dumps(document), parse_float=lambda text: round(float(text), 6))
    return rounded


def _curve(plan: CampaignPlan) -> list[tuple[float | None, float]]:
    """Return the speed that was measured with the chosen workers, by the length of the chunks."""
    points = [point for point in plan.speed.points if point.workers == plan.choice.workers]
    points.sort(key=lambda point: (point.chunk_s or 0.0, point.rate))
    return [(point.chunk_s, point.rate) for point in points]


def _tasks_document(plan: CampaignPlan) -> dict[str, Any]:
    hours = [share.audio_ms / _HOUR_MS for share in plan.sizing.shares]
    rows = [share.rows for share in plan.sizing.shares]
    return {
        "count": plan.tasks,
        **plan.choice._asdict(),
        "time_s": plan.sizing.time_s,
        "time_chosen": plan.wish.time_s is None,
        "expected_s": plan.sizing.expected_s,
        "audio_hours_least": min(hours),
        "audio_hours_most": max(hours),
        "rows_least": min(rows),
        "rows_most": max(rows),
    }
