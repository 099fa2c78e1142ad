"""The headline numbers of a job in words, shared by the text and the page."""

from __future__ import annotations

from badcjobs.model import Completeness
from badcjobs.report.summarize import Summary
from badcjobs.report.words import UNKNOWN, count, duration, energy, indices, number

VERDICTS = {
    "done": "all done",
    "failed": "finished; some chunks failed for good",
    "stopped": "not finished: there is work left",
}


def headlines(summary: Summary) -> list[tuple[str, str]]:
    """Return (name, words) in the order they are shown."""
    return [
        ("tasks", _tasks(summary)),
        ("chunks", f"{_chunks(summary)} ({count(summary.tries, 'try', 'tries')})"),
        *([("complete", complete_words(summary.completeness))] if summary.completeness else []),
        ("audio", _audio(summary)),
        ("speed", f"{number(summary.times_real_time)} × real time"),
        ("GPU time", _gpu_time(summary)),
        ("energy", _energy(summary)),
        ("detections", f"{summary.detections:,}"),
        ("telemetry", _telemetry(summary)),
    ]


def _tasks(summary: Summary) -> str:
    verdicts = ", ".join(f"{many:,} {verdict}" for verdict, many in sorted(summary.tasks_by_verdict.items()))
    missing = f"; no word from array index {indices(summary.tasks_missing)}" if summary.tasks_missing else ""
    return f"{summary.tasks:,} ({verdicts}){missing}"


def _chunks(summary: Summary) -> str:
    words = f"{summary.done:,} done, {summary.failed:,} failed, {summary.left:,} left of {summary.chunks:,}"
    words += f", {summary.skipped:,} done elsewhere" if summary.skipped else ""
    return words + (f"; {summary.conflicts:,} done more than once, the last one counts" if summary.conflicts else "")


def complete_words(proof: Completeness) -> str:
    """Return how far the job has got with its source."""
    if proof.expected is None:
        return f"not known: {proof.why_unknown}"
    strangers = f"; {count(proof.strangers, 'row')} more that the source does not have" if proof.strangers else ""
    if proof.complete:
        return f"{proof.done:,} of {count(proof.expected, 'row')} of the source are done{strangers}"
    states = {
        "failed": proof.failed, "poison": proof.poison, "pending": proof.pending, "done elsewhere": proof.elsewhere,
    }  # fmt: skip
    others = "".join(f", {many:,} {state}" for state, many in states.items() if many)
    return f"no: {proof.done:,} of {count(proof.expected, 'row')} done{others}{_not_begun(proof)}{strangers}"


def _not_begun(proof: Completeness) -> str:
    if not proof.not_listed:
        return ""
    rows = count(proof.not_listed, "row")
    if proof.missing_indices and not proof.not_listed_examples:
        return f"; {rows} of array index {indices(proof.missing_indices)} not begun"
    return f"; {rows} in no task"


def finish_words(summary: Summary) -> list[tuple[str, str]]:
    """Return what to say above each command that finishes the job, and the command."""
    proof = summary.completeness
    if proof is None or not proof.finish:
        return []
    again = " (a run tries its failed and poison rows again)" if proof.failed or proof.poison else ""
    waiting = ", once no task of it is running" if summary.tasks_by_verdict.get("running") else ""
    *in_slurm, here = proof.finish
    words = [(f"to finish it{waiting}, submit the same script again for these indices:", line) for line in in_slurm]
    return [*words, (f"or do all that is left in one run{again}:" if words else f"to finish it{waiting}{again}:", here)]


def _audio(summary: Summary) -> str:
    unknown = summary.chunks_of_unknown_length
    words = f"{number(summary.audio_hours, 2)} hours analysed in {duration(summary.wall_s)}"
    return words + (f"; the length of {count(unknown, 'more chunk')} is not known" if unknown else "")


def _gpu_time(summary: Summary) -> str:
    if not summary.gpu_hours:
        return "none: no GPU was used"
    rate = summary.audio_hours_per_gpu_hour
    return f"{number(summary.gpu_hours, 2)} GPU-hours; {number(rate)} audio-hours per GPU-hour"


def _energy(summary: Summary) -> str:
    if summary.energy_wh is None:
        return f"{UNKNOWN} (no device said)"
    known = summary.energy_devices
    partly = "" if known == len(summary.devices) else f" (known for {known} of {len(summary.devices)} devices)"
    return energy(summary.energy_wh) + partly


def _telemetry(summary: Summary) -> str:
    samples = sum(device.samples for device in summary.devices)
    gaps = [gap for gap in summary.gaps if gap.metric is None]
    words = f"{count(samples, 'sample')}, " + (
        f"{count(sum(gap.gaps for gap in gaps), 'gap')} of {duration(sum(gap.seconds for gap in gaps))} in all"
        if gaps
        else "no gaps"
        if samples
        else "so no gaps are known"
    )
    off = summary.tasks_without_telemetry
    return words + (f"; off in {count(off, 'task')} (--no-emit-gpu-telemetry)" if off else "")
