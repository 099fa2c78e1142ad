"""The other numbers of a job in words, below its verdict: the same in text, page and notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from badcjobs.report.progress import RUNNING
from badcjobs.report.rules import known_texts
from badcjobs.report.summary import NEARLY_ALL, STATE_WORDS, Summary
from badcjobs.report.words import count, duration, indices, moment, number, share_words
from badcjobs.sources.mistakes import left_out_words
from badcjobs.store.read_model import AlertFacts, Freshness

_LABELS = 5  # the most frequent ones
# Name → templates. A template is left out if one of its figures is None (with '?': 0), a headline if all of them are.
HEADLINES = (
    ("tasks", (
        "{s.tasks:whole} ({verdicts})",
        "; last update from a silent task: {heard:moment}",
        "; array index {not_started:indices} not started{queue}",
        "; no database from array index {no_database:indices}{see}",
    )),
    ("merged", ("{news}",)),
    ("submit", ("{cut_short.what}",)),
    ("chunks", (
        "{s.facts.tries:count try tries?}",
        "; {s.facts.conflicts:whole?} done more than once, the last result counts",
        "; {s.facts.cpu_tries:whole?} on the CPU ({s.audio_hours_on_cpu:two} hours of audio)",
        "; {s.facts.done_of_unknown_length:whole?} of unknown length",
    )),
    ("source", (
        "not compared: {unproved.why_unknown}",
        "{proof.expected:count row}",
        "; {partly.not_listed:whole?} {where}",
        "; {proof.strangers:count row?} in the job but not in the source",
    )),
    ("recordings", ("{names}",)),
    ("left out", ("{left_out}",)),
    ("GPU use", ("{use:list}",)),
    ("left", (
        "{unknown_time}",
        "about {known_left.audio_hours:one} audio-hours",
        " and {known_left.gpu_hours:one?} GPU-hours",
        "; expected end: about {known_left.end_at_ms:moment?} at the speed of the running tasks",
        "; about {left_s:duration} at the speed so far",
    )),
    ("energy", ("{least}{s.kwh_per_1000_audio_hours:two?} kWh per 1,000 audio-hours",)),
    ("per chunk", (
        "{cost.gpu_s_mean:two} GPU-seconds (p50 {cost.gpu_s_p50:two}, p95 {cost.gpu_s_p95:two},"
        " max {cost.gpu_s_max:two})",
        "; {cost.energy_j_mean:one?} J{some_tries} (p50 {cost.energy_j_p50:one}, p95 {cost.energy_j_p95:one},"
        " max {cost.energy_j_max:one})",
    )),
    ("detections", ("{labels:list}", " and {more_labels:count other_label?}")),
    ("telemetry", (
        "{samples:count sample}, {gaps}",
        "; off in {s.tasks_without_telemetry:count task?} (--no-emit-gpu-telemetry)",
    )),
)  # fmt: skip


def headlines(summary: Summary) -> list[tuple[str, str]]:
    """Return (name, words) in the order they are shown."""
    figures: dict[str, Any] = {"s": summary, "news": news_words(summary.merged) or None, "cut_short": summary.cut_short}
    missing, logs = summary.tasks_missing or None, summary.completeness.missing_logs if summary.completeness else ()
    silent, running = frozenset(summary.tasks_silent), summary.tasks_by_verdict.get(RUNNING)
    waits = summary.queue is not None and summary.queue.waiting
    heard_ms = [task.heard_at_ms or 0 for task in summary.facts.tasks if task.name in silent]
    figures |= {
        "verdicts": ", ".join(f"{many:,} {verdict}" for verdict, many in sorted(summary.tasks_by_verdict.items())),
        "heard": max(heard_ms, default=None),
        "not_started": missing if running or waits else None,
        "no_database": None if running or waits else missing,
        "queue": f": {summary.queue}" if waits else ", perhaps still in the queue",
        "see": f" (see {logs[0]})" if logs else "",
        "labels": tuple(f"{label} {many:,}" for label, _, many in summary.facts.labels[:_LABELS]) or None,
        "more_labels": len(summary.facts.labels[_LABELS:]),
    }
    figures |= _source_figures(summary) | _device_figures(summary)
    said = [(name, "".join(known_texts(parts, figures))) for name, parts in HEADLINES]
    return [(name, words) for name, words in said if words]


def _source_figures(summary: Summary) -> dict[str, Any]:
    """Return how much of the source is done, and when the rest will be."""
    proof, left, gaps = summary.completeness, summary.outlook, summary.facts.recording_names
    proved = proof if proof is not None and proof.expected is not None else None
    partly = proved if proved is not None and not proved.complete else None
    where = "in no task"
    if partly is not None and (partly.missing_indices or partly.unmerged_indices) and not partly.not_listed_examples:
        reasons = [*(["not started"] if partly.missing_indices else []),
                   *(["not merged yet"] if partly.unmerged_indices else [])]  # fmt: skip
        where = f"of array index {indices((*partly.missing_indices, *partly.unmerged_indices))} {', or '.join(reasons)}"
    known_left = left if left is not None and left.audio_hours is not None else None
    # Paths without a date, a time or a study area; not mentioned if all paths, or none, are like that.
    kinds = () if gaps is None else (
        (gaps.undated, gaps.recordings, "no date in the name", gaps.undated_example),
        (gaps.untimed, gaps.recordings - gaps.undated, "a date but no time in the name", gaps.untimed_example),
        (gaps.no_study_area, gaps.recordings, "no study area in the path", gaps.no_study_area_example),
    )  # fmt: skip
    names = [
        f"{many:,} of {gaps.recordings if gaps else 0:,} {'has' if many == 1 else 'have'} {what} (e.g. {example})"
        for many, most, what, example in kinds
        if 0 < many < most
    ]
    return {
        "proof": proved,
        "unproved": None if proved or not summary.chunks else proof,  # a recording has no source
        "partly": partly,
        "where": where,
        "names": "; ".join(names) or None,
        "left_out": left_out_words(summary.left_out) or None,
        "unknown_time": None if left is None or known_left else "remaining time not known yet",
        "known_left": known_left,
        "left_s": known_left.wall_s if known_left is not None and known_left.end_at_ms is None else None,
    }


def _device_figures(summary: Summary) -> dict[str, Any]:
    cost = summary.chunk_cost
    known = [device for device in summary.devices if device.energy_j is not None]
    missing = sum(d.energy_measured_s for d in known) < NEARLY_ALL / 100 * sum(d.total_s for d in known)
    samples = sum(device.samples for device in summary.devices)
    gaps = [gap for gap in summary.facts.gaps if gap.metric is None]
    gap_words = f"{count(sum(gap.gaps for gap in gaps), 'gap')}, {duration(sum(gap.seconds for gap in gaps))} in total"
    work = summary.states if any(task.engine for task in summary.facts.tasks) else {}
    use = {STATE_WORDS[state]: time.share_percent or 0.0 for state, time in work.items()}
    return {
        "use": tuple(f"{words} {share_words(percent)}" for words, percent in use.items() if percent >= 0.5) or None,
        "least": "at least " if missing else "",  # devices used energy before and after their readings
        "cost": cost if cost.tries else None,
        # A short try may fall between two readings of power.
        "some_tries": f", measured in {cost.energy_tries:,} of {count(cost.tries, 'try', 'tries')}"
        if cost.energy_tries < cost.tries
        else "",
        "samples": samples,
        "gaps": gap_words if gaps else "no gaps" if samples else "gaps unknown",
    }


# --- what is new, and alerts -------------------------------------------------------------------------


def news_words(merged: Freshness) -> str:
    """Return how old the merge is if task databases are newer or cannot be read; otherwise nothing."""
    said = []
    if merged.changed:
        said.append(f"{count(merged.changed, 'task database has', 'task databases have')} changed since")
    if merged.new:
        said.append(f"{count(merged.new, 'task database is', 'task databases are')} not merged yet")
    if merged.closed:
        said.append(f"whether anything is new since then is not known: {merged.closed}")
    elif merged.gone:
        them = "its database is" if merged.gone == 1 else "their databases are"
        said.append(f"the state of {count(merged.gone, 'task')} that ran then is not known: {them} not here")
    as_of = [] if merged.as_of_ms is None else [f"as of {moment(merged.as_of_ms)}"]
    return "; ".join([*as_of, *said]) if said else ""


_UNITS = {"thermal": "°C", "memory": "%", "power": "%", "idle": "s", "energy": "%"}  # of peak and limit


def alert_lines(alerts: Sequence[AlertFacts]) -> list[str]:
    """Return a line for each kind of alert, the critical ones first."""
    lines = []
    for alert in sorted(alerts, key=lambda alert: alert.severity != "critical"):
        words = f"{alert.kind} ({alert.severity}): {count(alert.alerts, 'alert')} on {count(alert.devices, 'device')}"
        unit = _UNITS.get(alert.kind)
        if unit and alert.peak is not None and alert.threshold is not None:
            words += f"; worst value {number(alert.peak, 0)} {unit}, limit {number(alert.threshold, 0)} {unit}"
        words += f"; longest {duration(alert.longest_s)}" if alert.longest_s else ""
        words += f"; {alert.still_open:,} still open" if alert.still_open else ""
        lines.append(words if unit else f"{words}; for example: {alert.example}")
    return lines
