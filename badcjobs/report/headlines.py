"""The headline numbers of a job in words, shared by the text, the page and the notebook: rows of templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from badcjobs.report.progress import RUNNING
from badcjobs.report.rules import known_texts
from badcjobs.report.rules_waiting import LEAST_S
from badcjobs.report.summary import NEARLY_ALL, Summary, devices_words
from badcjobs.report.words import UNKNOWN, count, duration, energy, indices, moment, number, share_words
from badcjobs.store.read_model import AlertFacts, Freshness

_FEW_S = 600.0  # of GPU time: in hours it would be hard to read
VERDICTS = {
    "done": "all done",
    "failed": "finished; some chunks failed for good",
    "stopped": "not finished: there is work left",
}
# Name → what is said; a part is left out where one of its figures is None (or, with '?', 0), a headline where all are.
HEADLINES = (
    ("tasks", (
        "{s.tasks:whole} ({verdicts})",
        "; last word of a silent one: {heard:moment}",
        "; array index {not_begun:indices} not begun, perhaps still in the queue",
        "; no word from array index {no_word:indices}{see}",
    )),
    ("merged", ("{news}",)),
    ("submit", ("{cut_short.what}",)),
    ("chunks", (
        "{s.done:whole} done, {s.failed:whole} failed, {s.left:whole} left of {s.chunks:whole}",
        ", {s.skipped:whole?} done elsewhere",
        "; {s.facts.conflicts:whole?} done more than once, the last one counts",
        " ({s.facts.tries:count try tries})",
    )),
    ("complete", (
        "not known: {unproved.why_unknown}",
        "{complete.done:whole} of {complete.expected:count row} of the source are done",
        "no: {partly.done:whole} of {partly.expected:count row} done",
        ", {partly.failed:whole?} failed",
        ", {partly.poison:whole?} poison",
        ", {partly.pending:whole?} pending",
        ", {partly.elsewhere:whole?} done elsewhere",
        "; {partly.not_listed:count row?} {where}",
        "; {proof.strangers:count row?} more that the source does not have",
    )),
    ("audio", (
        "{s.audio_hours:two} hours analysed in {s.wall_s:duration}",
        "; {s.facts.cpu_tries:count chunk?} on the CPU ({s.audio_hours_on_cpu:two} hours)",
        "; the length of {s.facts.done_of_unknown_length:count more_chunk?} is not known",
    )),
    ("recordings", ("{names}",)),
    ("speed", ("{s.times_real_time:one} × real time",)),
    ("GPU time", (
        "{no_gpu}",
        "{few_s:duration}, ",
        "{s.gpu_hours:two?} GPU-hours; {s.audio_hours_per_gpu_hour:one} audio-hours per GPU-hour",
    )),
    ("left", (
        "{left.chunks:count chunk}{listed}",
        "; {not_known}",
        ", about {known_left.audio_hours:one} audio-hours",
        " and {known_left.gpu_hours:one?} GPU-hours",
        "; done at about {known_left.end_at_ms:moment?} if the tasks that run go on like this",
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
)  # fmt: skip


def headlines(summary: Summary) -> list[tuple[str, str]]:
    """Return (name, words) in the order they are shown."""
    figures = {"s": summary, "news": news_words(summary.merged) or None, "cut_short": summary.cut_short}
    figures |= _task_figures(summary) | _source_figures(summary) | _device_figures(summary)
    said = [(name, "".join(known_texts(parts, figures))) for name, parts in HEADLINES]
    return [(name, words) for name, words in said if words]


def _task_figures(summary: Summary) -> dict[str, Any]:
    missing, logs = summary.tasks_missing or None, summary.completeness.missing_logs if summary.completeness else ()
    silent, running = frozenset(summary.tasks_silent), summary.tasks_by_verdict.get(RUNNING)
    heard_ms = [task.heard_at_ms or 0 for task in summary.facts.tasks if task.name in silent]
    return {
        "verdicts": ", ".join(f"{many:,} {verdict}" for verdict, many in sorted(summary.tasks_by_verdict.items())),
        "heard": max(heard_ms, default=None),
        "not_begun": missing if running else None,
        "no_word": None if running else missing,
        "see": f" (see {logs[0]})" if logs else "",
    }


def _source_figures(summary: Summary) -> dict[str, Any]:
    """Return how far the job has got with its source (not known, whole, or partly), and when the rest will be done."""
    proof, left, gaps = summary.completeness, summary.outlook, summary.facts.recording_names
    proved = proof if proof is not None and proof.expected is not None else None
    partly = proved if proved is not None and not proved.complete else None
    where = "in no task"
    if partly is not None and (partly.missing_indices or partly.unmerged_indices) and not partly.not_listed_examples:
        begun = "not begun" if partly.missing_indices else ""
        merged = "not merged yet" if partly.unmerged_indices else ""
        those = sorted((*partly.missing_indices, *partly.unmerged_indices))
        where = f"of array index {indices(those)} {', or '.join(filter(None, (begun, merged)))}"
    known_left = left if left is not None and left.audio_hours is not None else None
    # How many paths do not tell what those of other recordings tell; not where none or all do.
    kinds = () if gaps is None else (
        (gaps.undated, gaps.recordings, "no date in the name", gaps.undated_example),
        (gaps.untimed, gaps.recordings - gaps.undated, "a date but no time in the name", gaps.untimed_example),
        (gaps.no_study_area, gaps.recordings, "no study area in the path", gaps.no_study_area_example),
    )  # fmt: skip
    names = [
        f"{many:,} of {gaps.recordings if gaps else 0:,} {'has' if many == 1 else 'have'} {what} (the first: {example})"
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
        "listed": "" if left is None or left.whole_source else " that tasks have listed",
        "not_known": None if left is None or known_left else "how long they will take is not known yet",
        "known_left": known_left,
        "left_s": known_left.wall_s if known_left is not None and known_left.end_at_ms is None else None,
    }


def _device_figures(summary: Summary) -> dict[str, Any]:
    gpu_s, cost, told = summary.gpu_hours * 3600, summary.chunk_cost, summary.energy_devices
    partly = "" if told == len(summary.devices) else f" (known for {told:,} of {devices_words(summary.devices)})"
    known = [device for device in summary.devices if device.energy_j is not None]
    missing = sum(d.energy_measured_s for d in known) < NEARLY_ALL / 100 * sum(d.total_s for d in known)
    measured, samples = summary.energy_measured_percent, sum(device.samples for device in summary.devices)
    gaps = [gap for gap in summary.facts.gaps if gap.metric is None]
    many = f"{count(sum(gap.gaps for gap in gaps), 'gap')} of {duration(sum(gap.seconds for gap in gaps))} in all"
    # A short try may fall between two readings of power.
    some = f" where it was measured, in {cost.energy_tries:,} of {count(cost.tries, 'try', 'tries')}"
    return {
        "no_gpu": None if gpu_s else "none: no GPU was used",
        "few_s": gpu_s if 0 < gpu_s < _FEW_S else None,
        "energy": f"{UNKNOWN} (no device said)" if summary.energy_wh is None else energy(summary.energy_wh) + partly,
        "measured": share_words(measured) if measured is not None and measured < NEARLY_ALL else None,
        "least": "at least " if missing else "",  # devices used energy before and after their readings
        "cost": cost if cost.tries else None,
        "some_tries": some if cost.energy_tries < cost.tries else "",
        "samples": samples,
        "gaps": many if gaps else "no gaps" if samples else "so no gaps are known",
    }


# --- the verdict, what is new, and what to do -------------------------------------------------------------------------


def verdict_words(summary: Summary) -> str:
    """Return the verdict; of what is left or has failed only as of the merge, where there is news since."""
    if summary.verdict != "done" and (summary.merged.new or summary.merged.changed):
        stopped = summary.verdict == "stopped"
        return "not finished when it was merged" if stopped else "some had failed when it was merged"
    return VERDICTS[summary.verdict]


def news_words(merged: Freshness) -> str:
    """Return how old this is, where there is news since the merge or the files cannot be looked at; else nothing."""
    said = []
    if merged.changed:
        said.append(f"{count(merged.changed, 'task database has', 'task databases have')} changed since")
    if merged.new:
        said.append(f"{count(merged.new, 'task database is', 'task databases are')} not merged yet")
    if merged.closed:
        said.append(f"what is new since is not known: {merged.closed}")
    elif merged.gone:
        them = "its database is" if merged.gone == 1 else "their databases are"
        said.append(f"what became of {count(merged.gone, 'task')} that ran then is not known: {them} not here")
    as_of = [] if merged.as_of_ms is None else [f"as of {moment(merged.as_of_ms)}"]
    return "; ".join([*as_of, *said]) if said else ""


def well_words(summary: Summary) -> str:
    """Return what to say where there is no finding."""
    gpu_s = summary.gpu_hours * 3600
    critical = sum(alert.alerts for alert in summary.alerts if alert.severity == "critical")
    others = sum(alert.alerts for alert in summary.alerts) - critical
    if critical:
        alerts = count(critical, "critical alert") + (f" and {count(others, 'other')}" if others else "")
        return f"No check found anything to change, but not all is well: {alerts}, see below."
    see = f"; {count(others, 'alert')}, see below." if others else "."
    if summary.verdict == "done" and 0 < gpu_s < LEAST_S:
        return f"Nothing went wrong; {gpu_s:.0f} s of GPU time are too few to judge how busy the GPUs were kept{see}"
    if summary.verdict == "done":
        return f"All is well: no check found anything to change{see}"
    return f"No check found anything to change, besides the chunks that are left or have failed{see}"


def finish_words(summary: Summary) -> list[tuple[str, str]]:
    """Return what to say above each command that finishes the job, or brings its report up to date; and the command."""
    proof, news = summary.completeness, summary.merged.command
    merge = [] if news is None else [("to take in what is new since the merge:", news)]
    if summary.cut_short is not None:  # Slurm may have its array: any other command might do the same work twice
        what_for = "be done with it" if summary.verdict == "done" else "finish it"
        return [*merge, (f"to {what_for}, repeat the submit that was cut short:", summary.cut_short.command)]
    if proof is None or not proof.finish:
        return merge
    again = " (a run tries its failed and poison rows again)" if proof.failed or proof.poison else ""
    waiting = ""
    if summary.tasks_by_verdict.get(RUNNING):
        waiting = f", once no task of it is running{' or waits in the queue' if summary.tasks_missing else ''}"
    elif summary.tasks_silent:
        waiting = ", unless its silent tasks still run"
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
            words += f"; {number(alert.peak, 0)} {unit} at worst, the limit is {number(alert.threshold, 0)} {unit}"
        words += f"; {duration(alert.longest_s)} at longest" if alert.longest_s else ""
        words += f"; {alert.still_open:,} still open" if alert.still_open else ""
        lines.append(words if unit else f"{words}; for example: {alert.example}")
    return lines
