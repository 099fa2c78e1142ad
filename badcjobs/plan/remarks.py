"""What is worth a line besides the plan itself: what could not be measured, what will not work, what is assumed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from badcjobs.plan.curve import is_below
from badcjobs.plan.margin import clock
from badcjobs.plan.sizing import Sizing
from badcjobs.plan.speed import Speed
from badcjobs.plan.survey import Survey
from badcjobs.plan.wish import Caps

PROBLEM, NOTE = "problem", "note"
_OTHER_LENGTH = 2  # times as long: a speed of other chunks says little


@dataclass(frozen=True, slots=True)
class Remark:
    """One line; a problem comes with a line to paste."""

    severity: str
    subject: str
    text: str
    fix: str | None = None
    examples: tuple[str, ...] = ()


def remark_source(survey: Survey) -> Iterator[Remark]:
    """Say what is odd about the source; nothing of it is lost."""
    if survey.left_out_words:
        text = f"{survey.left_out_words} cannot be planned: badcjobs run would {survey.left_out_fate}"
        yield Remark(PROBLEM, "left out", text, survey.left_out_fix, survey.left_out_lines)
    yield from _remark_audio(survey)
    if len(survey.rates_hz) > 1:
        rates = ", ".join(f"{_count(many, 'file')} with {hz:,} Hz" for hz, many in sorted(survey.rates_hz.items()))
        yield Remark(NOTE, "sample rates", f"they differ: {rates}; an engine may be slower where it has to resample")
    if survey.not_there:
        text = (
            f"the first file of {_count(survey.not_there, 'folder')} is not there, or cannot be used; rows that say"
            " their end are not looked up one by one"
        )
        fix = "badcjobs check SOURCE   (looks at every file; --root DIR: where relative source_paths start from)"
        yield Remark(NOTE, "audio", text, fix, tuple(survey.not_there_names))
    for text in survey.passed_over:
        yield Remark(NOTE, "passed over", text)


def _remark_audio(survey: Survey) -> Iterator[Remark]:
    """Say of which files nobody knows how much audio they have, and which have none, or less than they say."""
    guess = f"planned with the mean of the others, {survey.lengths.mean_ms / 1000:,.1f} s"
    if survey.unreadable:
        many = _count(survey.unreadable, "file")
        text = f"{many} that cannot be read from here; {guess}; whatever tasks cannot read either will fail"
        names = _named(survey.unreadable_names, survey.unreadable)
        yield Remark(PROBLEM, "unreadable", text, survey.unreadable_fix, names)
    if survey.untold:
        text = f"{_count(survey.untold, 'file')} whose header does not tell how long it is; {guess}"
        yield Remark(NOTE, "unknown length", text, examples=_named(survey.unknown_names, survey.untold))
    if survey.empty:
        many = _count(survey.empty, "file")
        who = "it" if survey.empty == 1 else "each"
        text = f"{many} without any audio; planned with 0 s, and {who} will fail: there is nothing to analyse"
        yield Remark(NOTE, "empty", text, examples=_named(survey.empty_names, survey.empty))
    if survey.broken:
        fail = f"; {_count(survey.nothing_there, 'chunk')} without any of it will fail" if survey.nothing_there else ""
        what = f"{_count(survey.broken, 'file')} with less audio than the header says"
        text = f"{what}; what is there is planned, no more{fail}"
        yield Remark(NOTE, "broken off", text, examples=_named(survey.broken_names, survey.broken))


def remark_long_chunks(survey: Survey, sizing: Sizing, needed_s: int, caps: Caps) -> Iterator[Remark]:
    """Name chunks that no task could finish, because one GPU needs longer than a task has.

    ``needed_s``: the time limit with which the longest of them would be finished.
    """
    limit_s = sizing.longest_chunk_s
    many = survey.lengths.longer_than(limit_s * 1000)
    if not many:
        return
    text = (
        f"{_count(many, 'chunk')} longer than the {_length(limit_s)} of audio that one GPU is sure to finish"
        " in a task: they may never be done"
    )
    names = [f"{name} ({_length(ms / 1000)})" for ms, name in survey.longest if ms > limit_s * 1000]
    ways = [f"--time {clock(needed_s)}"] if caps.time_s is None or needed_s <= caps.time_s else []
    shorter = f"--chunk-length {_round_down(min(limit_s, 3600))}"
    if survey.rows_alone:
        ways.append("a faster GPU (--from its run, or its --rate)")
        ways.append(f"plan the whole recordings instead of this manifest, with {shorter}")
    else:
        ways.insert(0, f"{shorter}   (whole recordings are cut on the fly)")
    yield Remark(PROBLEM, "long chunks", text, ", or ".join(ways), tuple(names))


def remark_speed(speed: Speed, sizing: Sizing, chunk_s: float) -> Iterator[Remark]:
    """Say where a whole campaign hangs on a short measurement, other chunks, or several kinds of device."""
    if is_below(speed.curve, chunk_s):
        text = (
            f"no trial of the probe had chunks as short as the {chunk_s:,.3g} s of this plan (the shortest: "
            f"{speed.curve[0][0]:g} s); probe them, or run one task of this plan first, and plan again --from it"
        )
        fix = None if speed.remedy is None else f"{speed.remedy} --start-length {chunk_s:.3g} --again"
        yield Remark(NOTE, "speed", text, fix)
    elif not speed.curve and speed.chunk_s and not 1 / _OTHER_LENGTH <= chunk_s / speed.chunk_s <= _OTHER_LENGTH:
        text = (
            f"it was measured with chunks of {speed.chunk_s:,.3g} s on average, and those of this plan have"
            f" {chunk_s:,.3g} s: short ones are slower; run one task of this plan first, and plan again --from it"
        )
        yield Remark(NOTE, "speed", text)
    if len(speed.devices) > 1:
        text = f"it is the mean of {', '.join(speed.devices)}; on one model alone it will differ"
        yield Remark(NOTE, "speed", text)
    planned_hours = sizing.work_s / 3600
    if speed.gpu_hours is not None and planned_hours > 1000 * speed.gpu_hours:
        text = (
            f"{planned_hours:,.0f} GPU-hours are planned from {speed.gpu_hours:,.3g} measured; run one task of this"
            " plan first, and plan again --from it"
        )
        yield Remark(NOTE, "speed", text)


def remark_files(files: int, caps: Caps) -> Iterator[Remark]:
    """Compare the files of the whole campaign with the quota."""
    if caps.files and files > caps.files:
        text = f"{files:,} files at most, but the quota of {caps.site} is {caps.files:,}"
        fix = "a longer --time, for fewer tasks; badcjobs merge --remove-merged after each wave"
        yield Remark(PROBLEM, "files", text, fix)


def problems(remarks: Sequence[Remark]) -> int:
    """Count the problems."""
    return sum(remark.severity == PROBLEM for remark in remarks)


def _named(names: Sequence[str], many: int) -> tuple[str, ...]:
    return (*names, f"… and {many - len(names):,} more") if many > len(names) else tuple(names)


def _length(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} hours" if seconds >= 3600 else f"{seconds:,.3g} s"


def _round_down(seconds: float) -> str:
    """Return a length that people would choose, with two digits, never more than what is given."""
    step = 10 ** (math.floor(math.log10(seconds)) - 1)
    return f"{math.floor(seconds / step + 1e-9) * step:.6g}"


def _count(many: int, one: str) -> str:
    return f"{many:,} {one}{'' if many == 1 else 's'}"
