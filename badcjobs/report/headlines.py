"""The headline numbers of a job, its verdict and the commands to run next: the same in text, page and notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from badcjobs.report.progress import RUNNING
from badcjobs.report.rules import busy_share, known_texts
from badcjobs.report.rules_waiting import LEAST_S
from badcjobs.report.summary import NEARLY_ALL, STATE_WORDS, Summary, devices_words
from badcjobs.report.words import count, duration, energy, indices, moment, number, share_words
from badcjobs.store.read_model import AlertFacts, Freshness

_FEW_S = 600.0  # less GPU time than this is also shown in seconds or minutes
_SBATCH = "#SBATCH "
# Name → templates. A template is left out if one of its figures is None (with '?': 0), a headline if all of them are.
HEADLINES = (
    ("tasks", (
        "{s.tasks:whole} ({verdicts})",
        "; last update from a silent task: {heard:moment}",
        "; array index {not_started:indices} not started, perhaps still in the queue",
        "; no database from array index {no_database:indices}{see}",
    )),
    ("merged", ("{news}",)),
    ("submit", ("{cut_short.what}",)),
    ("chunks", (
        "{s.done:whole} done, {s.failed:whole} failed, {s.left:whole} left of {s.chunks:whole}",
        ", {s.skipped:whole?} done elsewhere",
        "; {s.facts.conflicts:whole?} done more than once, the last result counts",
        " ({s.facts.tries:count try tries})",
    )),
    ("complete", (
        "unknown: {unproved.why_unknown}",
        "yes: {complete.done:whole} of {complete.expected:count row} of the source done",
        "no: {partly.done:whole} of {partly.expected:count row} of the source done",
        ", {partly.failed:whole?} failed",
        ", {partly.poison:whole?} poison",
        ", {partly.pending:whole?} pending",
        ", {partly.elsewhere:whole?} done elsewhere",
        "; {partly.not_listed:count row?} {where}",
        "; {proof.strangers:count row?} in the job but not in the source",
    )),
    ("audio", (
        "{s.audio_hours:two} hours analysed in {s.wall_s:duration}",
        "; {s.facts.cpu_tries:count chunk?} on the CPU ({s.audio_hours_on_cpu:two} hours)",
        "; {s.facts.done_of_unknown_length:count more_chunk?} of unknown length",
    )),
    ("recordings", ("{names}",)),
    ("speed", ("{s.times_real_time:one} × real time",)),
    ("GPU time", (
        "{no_gpu}",
        "{few_s:duration}, ",
        "{s.gpu_hours:two?} GPU-hours; {s.audio_hours_per_gpu_hour:one} audio-hours per GPU-hour",
    )),
    ("GPU use", ("busy {busy} of the measured time; ", "{use:list}")),
    ("left", (
        "{left.chunks:count chunk}{listed}",
        "; {unknown_time}",
        ", about {known_left.audio_hours:one} audio-hours",
        " and {known_left.gpu_hours:one?} GPU-hours",
        "; expected end: about {known_left.end_at_ms:moment?} at the speed of the running tasks",
        "; about {left_s:duration} at the speed so far",
    )),
    ("energy", (
        "{energy}",
        ", measured for {measured} of the GPU time",
        "; {least}{s.kwh_per_1000_audio_hours:two?} kWh per 1,000 audio-hours",
    )),
    ("per chunk", (
        "{cost.gpu_s_mean:two} GPU-seconds (p50 {cost.gpu_s_p50:two}, p95 {cost.gpu_s_p95:two},"
        " max {cost.gpu_s_max:two})",
        "; {cost.energy_j_mean:one?} J{some_tries} (p50 {cost.energy_j_p50:one}, p95 {cost.energy_j_p95:one},"
        " max {cost.energy_j_max:one})",
    )),
    ("detections", ("{s.detections:whole}",)),
    ("telemetry", (
        "{samples:count sample}, {gaps}",
        "; off in {s.tasks_without_telemetry:count task?} (--no-emit-gpu-telemetry)",
    )),
    ("next time", ("{requests:words}",)),
)  # fmt: skip


def headlines(summary: Summary) -> list[tuple[str, str]]:
    """Return (name, words) in the order they are shown."""
    requests: dict[str, str] = {}  # option → with its value; the worst finding comes first
    for line in (line for finding in summary.findings for line in finding.lines if line.startswith(_SBATCH)):
        requests.setdefault(line.partition("=")[0], line.removeprefix(_SBATCH))
    figures: dict[str, Any] = {"s": summary, "news": news_words(summary.merged) or None, "cut_short": summary.cut_short}
    figures["requests"] = (_SBATCH.strip(), *requests.values()) if requests else None
    missing, logs = summary.tasks_missing or None, summary.completeness.missing_logs if summary.completeness else ()
    silent, running = frozenset(summary.tasks_silent), summary.tasks_by_verdict.get(RUNNING)
    heard_ms = [task.heard_at_ms or 0 for task in summary.facts.tasks if task.name in silent]
    figures |= {
        "verdicts": ", ".join(f"{many:,} {verdict}" for verdict, many in sorted(summary.tasks_by_verdict.items())),
        "heard": max(heard_ms, default=None),
        "not_started": missing if running else None,
        "no_database": None if running else missing,
        "see": f" (see {logs[0]})" if logs else "",
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
        "unproved": None if proved else proof,
        "complete": proved if partly is None else None,
        "partly": partly,
        "where": where,
        "names": "; ".join(names) or None,
        "left": left,
        "listed": "" if left is None or left.whole_source else " listed by tasks",
        "unknown_time": None if left is None or known_left else "remaining time not known yet",
        "known_left": known_left,
        "left_s": known_left.wall_s if known_left is not None and known_left.end_at_ms is None else None,
    }


def _device_figures(summary: Summary) -> dict[str, Any]:
    gpu_s, cost, many = summary.gpu_hours * 3600, summary.chunk_cost, summary.energy_devices
    known = [device for device in summary.devices if device.energy_j is not None]
    partly = "" if many == len(summary.devices) else f" (known for {many:,} of {devices_words(summary.devices)})"
    missing = sum(d.energy_measured_s for d in known) < NEARLY_ALL / 100 * sum(d.total_s for d in known)
    measured, samples = summary.energy_measured_percent, sum(device.samples for device in summary.devices)
    gaps = [gap for gap in summary.facts.gaps if gap.metric is None]
    gap_words = f"{count(sum(gap.gaps for gap in gaps), 'gap')}, {duration(sum(gap.seconds for gap in gaps))} in total"
    use = {STATE_WORDS[state]: time.share_percent or 0.0 for state, time in summary.states.items()}
    busy = busy_share(summary.devices)
    return {
        "no_gpu": None if gpu_s else "none: no GPU was used",
        "few_s": gpu_s if 0 < gpu_s < _FEW_S else None,
        "busy": None if busy is None else share_words(100 * busy),
        "use": tuple(f"{words} {share_words(percent)}" for words, percent in use.items() if percent >= 0.5) or None,
        "energy": "not measured" if summary.energy_wh is None else energy(summary.energy_wh) + partly,
        "measured": share_words(measured) if measured is not None and measured < NEARLY_ALL else None,
        "least": "at least " if missing else "",  # devices used energy before and after their readings
        "cost": cost if cost.tries else None,
        # A short try may fall between two readings of power.
        "some_tries": f", measured in {cost.energy_tries:,} of {count(cost.tries, 'try', 'tries')}"
        if cost.energy_tries < cost.tries
        else "",
        "samples": samples,
        "gaps": gap_words if gaps else "no gaps" if samples else "gaps unknown",
    }


# --- the verdict, what is new, and what to do -------------------------------------------------------------------------


def verdict_words(summary: Summary) -> str:
    """Return the verdict; where task databases are newer than the merge, unfinished work is as of the merge."""
    outdated = summary.merged.new or summary.merged.changed
    if not summary.chunks and not outdated and summary.verdict != "done":
        failed = summary.tasks_by_verdict.get("failed", 0)
        return f"{count(failed, 'task')} failed" if summary.verdict == "failed" else "not finished"
    if summary.verdict == "stopped":
        return "not finished when it was merged" if outdated else "not finished: there is work left"
    if summary.verdict == "failed":
        return "some chunks had failed when it was merged" if outdated else "finished; some chunks failed for good"
    return "all done"


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


def no_findings_words(summary: Summary) -> str:
    """Return the sentence for a job without findings."""
    gpu_s = summary.gpu_hours * 3600
    critical = sum(alert.alerts for alert in summary.alerts if alert.severity == "critical")
    others = sum(alert.alerts for alert in summary.alerts) - critical
    alerts = [count(critical, "critical alert")] if critical else []
    alerts += [count(others, "other alert" if critical else "alert")] if others else []
    see = f"; {' and '.join(alerts)}, see below" if alerts else ""
    but = ""
    if summary.verdict != "done" and summary.chunks:
        but = " besides the chunks that are left or failed"
    elif 0 < gpu_s < LEAST_S:
        but = f"; {gpu_s:.0f} s of GPU time are too few to judge how busy the GPUs were"
    found = "problems found" if summary.verdict == "done" and not critical else "findings"
    return f"No {found}{but}{see}."


def finish_words(summary: Summary) -> list[tuple[str, str]]:
    """Return the commands that finish the job, or bring its report up to date, each with a line to show above it."""
    proof, news = summary.completeness, summary.merged.command
    merge = [] if news is None else [("to include what is new since the merge:", news)]
    if summary.cut_short is not None:  # Slurm may have its array: any other command might do the same work twice
        what_for = "clean up" if summary.verdict == "done" else "finish it"
        return [*merge, (f"to {what_for}, repeat the submit that was cut short:", summary.cut_short.command)]
    if proof is None or not proof.finish:
        return merge
    again = " (this tries failed and poison rows again)" if proof.failed or proof.poison else ""
    waiting = ""
    if summary.tasks_by_verdict.get(RUNNING):
        waiting = f", once no task of it is running{' or queued' if summary.tasks_missing else ''}"
    elif summary.tasks_silent:
        waiting = ", unless its silent tasks are still running"
    elif merge:
        waiting = ", if work is left after that and no task of it is running"
    *in_slurm, here = proof.finish
    how = {True: "submit the same script again for these indices:", False: "submit what is left:"}
    words = [(f"to finish it{waiting}, {how[line.startswith('sbatch ')]}", line) for line in in_slurm]
    last = f"or do all that is left in one run{again}:" if words else f"to finish it{waiting}{again}:"
    return [*merge, *words, (last, here)]


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
