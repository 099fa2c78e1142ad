"""The headline numbers of a job in words, shared by the text and the page."""

from __future__ import annotations

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
    return words + (f", {summary.skipped:,} done elsewhere" if summary.skipped else "")


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
