"""What a report finds: how bad it is, one sentence, the numbers it rests on, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
SEVERITIES = (PROBLEM, WARNING, NOTE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One judgement about a job; never without numbers."""

    kind: str  # a stable name for scripts: unused_gpus, start_up, waiting_for_audio, …
    severity: str
    sentence: str
    evidence: tuple[str, ...]  # one figure each, in words: "busy 12 % of 3.4 GPU-hours"
    advice: str
    lines: tuple[str, ...] = ()  # to paste: #SBATCH lines, commands
    subjects: tuple[str, ...] = ()  # the tasks, devices, nodes or chunks that it is about
    gpu_hours: float | None = None  # what it cost; None: that cannot be said in GPU time
