"""A plan in words: what there is to do, what to ask for, and when it would be finished."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence

from badcjobs.plan.make import Plan
from badcjobs.plan.margin import clock
from badcjobs.plan.remarks import PROBLEM
from badcjobs.plan_folder import Written
from badcjobs.report.words import count, duration, number, plain

_COLUMNS, _INDENT = 100, 14
_DAY_S = 86_400
_SHOWN_SCRIPTS = 3


def plan_text(plan: Plan, descriptions: Sequence[str], written: Written | None) -> str:
    """Return the plan for people; the same plan gives the same text."""
    lines = [_headline(plan), ""]
    for name, words in _lines(plan, descriptions):
        lines += _folded(name, words)
    for remark in plan.remarks:
        lines += ["", *_folded(remark.severity, f"{remark.subject}: {remark.text}")]
        lines += [f"{'':{_INDENT}}{plain(example)}" for example in remark.examples]
        lines += [f"{'try: ':>{_INDENT}}{plain(remark.fix)}"] if remark.fix else []
    return "\n".join([*lines, *(_written(plan, written) if written else ())])


def _headline(plan: Plan) -> str:
    problems = sum(remark.severity == PROBLEM for remark in plan.remarks)
    waves = count(len(plan.waves.waves), "wave")
    words = f"{number(plan.work_gpu_hours)} GPU-hours in {count(plan.tasks, 'array task')} and {waves}"
    return f"{words}; {count(problems, 'problem')}" if problems else words


def _lines(plan: Plan, descriptions: Sequence[str]) -> Iterator[tuple[str, str]]:
    survey, lengths, sizing, speed = plan.survey, plan.survey.lengths, plan.sizing, plan.speed
    yield "source", ", ".join(descriptions[:3]) + (f" and {len(descriptions) - 3:,} more" if descriptions[3:] else "")
    cut = f", {survey.cut:,} of them cut out of longer files when they are needed" if survey.cut else ""
    shared = f", out of {number(plan.recording_hours)} hours of recordings (chunks overlap)" if survey.shared_ms else ""
    sounding = f" (of the {lengths.rows - lengths.empty:,} with audio)" if lengths.empty else ""
    yield (
        "audio",
        f"{number(plan.audio_hours)} hours in {count(lengths.rows, 'chunk')}{shared}{cut};"
        f" mean {lengths.mean_ms / 1000:,.1f} s{sounding}, longest {lengths.longest_ms / 1000:,.1f} s",
    )
    yield "speed", _speed(plan)
    yield (
        "GPU time",
        f"{number(plan.work_gpu_hours)} GPU-hours of work and {number(plan.start_up_gpu_hours)} of start-up;"
        f" {number(plan.asked_gpu_hours)} are asked for, so that every task ends in time",
    )
    yield "tasks", _tasks(plan)
    yield "margin", _margin(plan)
    yield "memory", f"--mem={plan.asking.mem_gb}G: {plan.asking.mem_why}"
    yield "cores", f"--cpus-per-task={plan.asking.cpus}: {plan.asking.cpus_why}"
    yield (
        "time",
        f"--time={clock(sizing.time_s)}: {'what the fullest task needs' if sizing.chosen else 'as --time says'}",
    )
    yield "waves", _waves(plan)
    quota = f"; the quota of {plan.caps.site} is {plan.caps.files:,}" if plan.caps.files else ""
    yield "files", f"{plan.files:,} at most, shards and logs and job scripts included, and none per chunk{quota}"
    yield "finished", _finished(plan)
    if speed.devices:
        yield "measured on", ", ".join(speed.devices)


def _speed(plan: Plan) -> str:
    speed = plan.speed
    words = f"{number(speed.audio_hours_per_gpu_hour)} audio-hours per GPU-hour, {speed.origin}"
    if speed.gpu_hours is not None:
        words += f" ({count(speed.tasks, 'task')}, {number(speed.gpu_hours, 2)} GPU-hours without start-up)"
    return words


def _tasks(plan: Plan) -> str:
    sizing = plan.sizing
    hours = [share.audio_ms / 3_600_000 for share in sizing.shares]
    each = " to ".join(dict.fromkeys(number(bound, 2) for bound in (min(hours), max(hours))))
    return (
        f"{count(plan.tasks, 'array task')} of {count(sizing.gpus, 'GPU')} with {each} hours of audio"
        f"{' each' if plan.tasks > 1 else ''}: about {duration(sizing.expected_s)} of {clock(sizing.time_s)}"
    )


def _margin(plan: Plan) -> str:
    margin = plan.margin
    start_up = "measured" if margin.start_up_measured else "assumed, for nobody has measured it"
    return (
        f"start-up {margin.start_up_s:,.0f} s ({start_up}), an orderly end {margin.end_s:,.0f} s, and between them each"
        f" task may be {margin.factor:.2f} times as slow as the mean ({margin.why})"
    )


def _waves(plan: Plan) -> str:
    waves = plan.waves.waves
    if len(waves) == 1:
        return f"1; {plan.waves.why}"
    sizes = f"{waves[0].tasks:,}" if waves[0].tasks == waves[-1].tasks else f"{waves[-1].tasks:,} or {waves[0].tasks:,}"
    return f"{len(waves):,} of {sizes} tasks, one after another: {plan.waves.why}"


def _finished(plan: Plan) -> str:
    running_s = plan.waves.running_s
    if running_s is None:
        one_s = plan.work_gpu_hours * 3600 + plan.tasks * plan.margin.start_up_s
        alone = f"one alone would take {span(one_s)}, start-up included"
        return f"nobody says how many GPUs there are at a time, so --gpus N; {alone}"
    return (
        f"after {span(running_s)} of running with {count(plan.waves.gpus or 0, 'GPU')} at a time"
        f" ({plan.waves.gpus_why}); waiting in the queue comes on top"
    )


def _written(plan: Plan, written: Written) -> Iterator[str]:
    yield ""
    yield from _folded(
        "written", f"{written.folder}: {count(plan.tasks, 'shard')}, {count(len(written.scripts), 'job script')}"
    )
    if written.left_out is not None:
        yield from _folded("left out", f"all of it, each with its reason: {written.left_out}")
    for script, out in list(zip(written.scripts, written.outs, strict=True))[:_SHOWN_SCRIPTS]:
        yield f"{'':{_INDENT}}sbatch {shlex.quote(str(script))}"
        yield f"{'':{_INDENT}}badcjobs merge {shlex.quote(str(out))}   (once it has ended)"
    if len(written.scripts) > _SHOWN_SCRIPTS:
        yield f"{'':{_INDENT}}… and {len(written.scripts) - _SHOWN_SCRIPTS:,} more, each when the one before has ended"


def span(seconds: float) -> str:
    """Return a long time as people say it: in days from two days on."""
    return duration(seconds) if seconds < 2 * _DAY_S else f"{seconds / _DAY_S:,.1f} days"


def _folded(name: str, words: str) -> list[str]:
    wrapped = textwrap.wrap(plain(words), _COLUMNS - _INDENT, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"  {name:<{_INDENT - 3}} {wrapped[0]}", *(f"{'':{_INDENT}}{line}" for line in wrapped[1:])]
