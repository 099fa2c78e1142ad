"""A plan as JSON: the keys that scripts may rely on (``badcjobs guide plan`` explains them)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from badcjobs.plan.make import Plan

PLAN_VERSION = 1


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return the document; the same plan gives the same document, byte for byte."""
    shares = plan.sizing.shares
    return {
        "version": PLAN_VERSION,
        "source": _source(plan),
        "audio_hours": _hours(plan.survey.lengths.total_ms),
        "recording_hours": _hours(plan.survey.lengths.total_ms - plan.survey.shared_ms),
        "speed": _rounded(asdict(plan.speed)),
        "gpu_hours": round(plan.work_gpu_hours, 6),
        "start_up_gpu_hours": round(plan.start_up_gpu_hours, 6),
        "asked_gpu_hours": round(plan.asked_gpu_hours, 6),
        "tasks": {
            "count": plan.tasks,
            "gpus": plan.sizing.gpus,
            "cpus": plan.asking.cpus,
            "cpus_why": plan.asking.cpus_why,
            "mem_gb": plan.asking.mem_gb,
            "mem_why": plan.asking.mem_why,
            "time_s": plan.sizing.time_s,
            "time_chosen": plan.sizing.chosen,
            "expected_s": round(plan.sizing.expected_s, 3),
            "audio_hours_least": _hours(min(share.audio_ms for share in shares)),
            "audio_hours_most": _hours(max(share.audio_ms for share in shares)),
            "rows_least": min(share.rows for share in shares),
            "rows_most": max(share.rows for share in shares),
        },
        "margin": _rounded(asdict(plan.margin)),
        "files": plan.files,
        "caps": _rounded(asdict(plan.caps)),
        "waves": [
            {
                "number": wave.number,
                "tasks": wave.tasks,
                "rows": wave.rows,
                "audio_hours": _hours(wave.audio_ms),
                "asked_gpu_hours": round(wave.tasks * plan.sizing.gpus * plan.sizing.time_s / 3600, 6),
                "running_s": None if plan.waves.gpus is None else round(wave.running_s, 3),
            }
            for wave in plan.waves.waves
        ],
        "waves_why": plan.waves.why,
        "gpus_at_a_time": plan.waves.gpus,
        "gpus_why": plan.waves.gpus_why,
        "running_s": None if plan.waves.running_s is None else round(plan.waves.running_s, 3),
        "remarks": [asdict(remark) | {"examples": list(remark.examples)} for remark in plan.remarks],
    }


def _source(plan: Plan) -> dict[str, Any]:
    survey, lengths = plan.survey, plan.survey.lengths
    return {
        "chunks": lengths.rows,
        "cut": survey.cut,
        "headers_read": survey.measured,
        "of_unknown_length": lengths.unknown,
        "unreadable": survey.unreadable,
        "empty": survey.empty,
        "broken_off": survey.broken,
        "nothing_there": survey.nothing_there,
        "left_out": survey.left_out,
        "left_out_folders": survey.left_out_folders,
        "left_out_sources": survey.left_out_sources,
        "longest_s": lengths.longest_ms / 1000,
        "sample_rates_hz": {str(hz): many for hz, many in sorted(survey.rates_hz.items())},
    }


def _hours(milliseconds: int) -> float:
    return round(milliseconds / 3_600_000, 6)


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in values.items()}
