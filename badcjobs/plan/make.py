"""Puts a plan together: the file of this stage to read first."""

from __future__ import annotations

from dataclasses import dataclass

from badcjobs.errors import BadInput
from badcjobs.plan.asking import Asking, ask_for
from badcjobs.plan.curve import at_length
from badcjobs.plan.fit import remark_doubts, remark_unsafe_chunks
from badcjobs.plan.margin import Margin, make_margin, round_up
from badcjobs.plan.remarks import Remark, remark_files, remark_long_chunks, remark_source, remark_speed
from badcjobs.plan.sizing import Sizing, size_tasks
from badcjobs.plan.speed import Speed
from badcjobs.plan.survey import Survey
from badcjobs.plan.waves import Waves, make_waves
from badcjobs.plan.wish import Caps, Wish

FILES_PER_TASK = 12  # at most ten by contract, Slurm's log, and the manifest with its rows
FILES_PER_WAVE = 12  # run.toml, job.sqlite, report.html, …, the job script and its list


@dataclass(frozen=True, slots=True)
class Plan:
    """From a source to the day it would be finished."""

    survey: Survey
    speed: Speed
    margin: Margin
    sizing: Sizing
    asking: Asking
    waves: Waves
    caps: Caps
    files: int  # at most, of the whole campaign
    remarks: tuple[Remark, ...]

    @property
    def tasks(self) -> int:
        return len(self.sizing.shares)

    @property
    def audio_hours(self) -> float:
        """Of all chunks."""
        return self.survey.lengths.total_ms / 3_600_000

    @property
    def recording_hours(self) -> float:
        """What neighbouring chunks share counts once."""
        return (self.survey.lengths.total_ms - self.survey.shared_ms) / 3_600_000

    @property
    def work_gpu_hours(self) -> float:
        """At the measured speed, without start-up."""
        return self.sizing.work_s / 3600

    @property
    def start_up_gpu_hours(self) -> float:
        """While the tasks start up, their GPUs wait."""
        return self.tasks * self.sizing.gpus * self.margin.start_up_s / 3600

    @property
    def asked_gpu_hours(self) -> float:
        """What the tasks ask of Slurm, all together."""
        return self.tasks * self.sizing.gpus * self.sizing.time_s / 3600


def make_plan(survey: Survey, speed: Speed, wish: Wish, caps: Caps) -> Plan:
    """Return the plan: the same for the same values, on every machine."""
    lengths = survey.lengths
    if not lengths.total_ms:
        raise _no_audio(survey)
    speed = at_length(speed, lengths.mean_ms / 1000)
    margin = make_margin(speed, wish.margin)
    sizing = size_tasks(lengths, speed, margin, wish, caps)
    waves = make_waves(sizing, speed, margin, wish, caps)
    longest_s = lengths.longest_ms / 1000 / speed.audio_hours_per_gpu_hour
    files = len(sizing.shares) * FILES_PER_TASK + len(waves.waves) * FILES_PER_WAVE
    remarks = (
        *remark_source(survey),
        *remark_long_chunks(survey, sizing, round_up(margin.time_s(longest_s)), caps),
        *remark_files(files, caps),
        *remark_unsafe_chunks(survey, speed),
        *remark_doubts(speed),
        *remark_speed(speed, sizing, lengths.mean_ms / 1000),
    )
    return Plan(survey, speed, margin, sizing, ask_for(sizing.gpus, speed, wish, caps), waves, caps, files, remarks)


def _no_audio(survey: Survey) -> BadInput:
    rows, unknown = survey.lengths.rows, survey.lengths.unknown
    names = [*survey.unreadable_names, *survey.unknown_names, *survey.empty_names, *survey.broken_names]
    names += survey.left_out_lines
    fix = survey.unreadable_fix or survey.left_out_fix or "badcjobs check SOURCE"
    if unknown:
        what = f"nobody knows how long the audio is: {_why_unknown(survey)}"
    elif rows:
        what = f"there is no audio in the source: its {rows:,} chunk{'s have' if rows > 1 else ' has'} none"
    else:
        what = f"there is nothing to plan: {survey.left_out_words} cannot be used, and there are no others"
    return BadInput(what, why="\n".join(names) or None, fix=fix)


def _why_unknown(survey: Survey) -> str:
    counts = (survey.unreadable, "cannot be read"), (survey.untold, "with a header that does not tell")
    return ", ".join(f"{many:,} file{'' if many == 1 else 's'} {why}" for many, why in counts if many)
