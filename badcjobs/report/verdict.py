"""The verdict on a job and, below it, its other numbers in words; the same in text, page and notebook.

The verdict says: did it work, what is wrong, what did it cost, what to do next. Text, page and notebook make it from a
summary (``verdict_of``); the live views from what they know while tasks run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from badcjobs.model import load_word
from badcjobs.paths import shell_line
from badcjobs.report.progress import RUNNING
from badcjobs.report.rules import busy_share, known_texts
from badcjobs.report.rules_waiting import LEAST_S
from badcjobs.report.summary import NEARLY_ALL, STATE_WORDS, Summary, devices_words
from badcjobs.report.words import count, duration, energy, indices, moment, number, share_words
from badcjobs.sources.mistakes import left_out_words
from badcjobs.store.read_model import AlertFacts, Freshness

MOST_FINDINGS = 3
TRY_AGAIN = "to try failed chunks again, once the cause is fixed"
BAR = ("█", "x", "·")  # done, failed, left: different signs, so that no colour is needed
_FEW_S = 600.0  # less GPU time than this is shown in seconds or minutes
# A template is left out if one of its figures is None (with '?': 0).
_COST = (
    "{gpu_time}",
    " in {s.wall_s:duration}",
    ", {energy}",
    ", measured for {measured} of the GPU time",
    ", {units:one?} billed units",
    "; GPUs busy {busy} of the time ({load})",
)
_RESULT = (
    "{s.audio_hours:two} hours of audio",
    ", {s.times_real_time:one?} × real time",
    ", {s.audio_hours_per_gpu_hour:one?} audio-hours per GPU-hour",
    "; {s.detections:count detection}",
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to read first; every number appears in it once."""

    state: str  # done, failed, stopped (work is left), running
    word: str  # did it work: "failed"
    counts: str  # "0 of 8 chunks done, 8 failed"; empty: there are no chunks
    chunks: tuple[int, int, int]  # done, failed, left: the bar
    cost: str
    result: str
    next: tuple[tuple[str, str], ...]  # what to do: words (may be empty), a line to paste
    no_findings: str = ""  # the sentence for a job without findings

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The cost and the result, with their names."""
        return [(name, words) for name, words in (("cost", self.cost), ("result", self.result)) if words]

    @property
    def outcome(self) -> str:
        """Whether it worked, with its numbers."""
        return f"{self.word} – {self.counts}" if self.counts else self.word

    def to_dict(self) -> dict[str, Any]:
        """Return it for scripts; its findings are the first ones of the document."""
        steps = [{"words": words, "command": command} for words, command in self.next]
        return {"state": self.state, "outcome": self.outcome, "cost": self.cost, "result": self.result, "next": steps}


def judge(done: int, failed: int, left: int, *, running: bool, elsewhere: int = 0) -> tuple[str, str, str]:
    """Return the state of a job with chunks, the word for it, and the counts in words.

    ``elsewhere``: chunks whose results are in another file; no chunk done at all is a failure.
    """
    total = done + failed + left + elsewhere
    parts = [count(total, "chunk") if done == total else f"{done:,} of {count(total, 'chunk')} done"]
    kinds = ((failed, "failed"), (left, "left"), (elsewhere, "done elsewhere"))
    parts += [f"{many:,} {what}" for many, what in kinds if many]
    if running:
        state, word = "running", "running"
    elif done == total:
        state, word = "done", "all done"
    elif not done and not elsewhere:
        state, word = "failed", "failed"
    else:
        state, word = ("stopped", "not finished") if left or elsewhere else ("failed", "partly failed")
    return state, word, ", ".join(parts)


def gpu_time(gpu_s: float) -> str:
    """Return GPU time in words."""
    if not gpu_s:
        return "no GPU"
    return f"{duration(gpu_s)} of GPU time" if gpu_s < _FEW_S else f"{number(gpu_s / 3600, 2)} GPU-hours"


def bar(done: int, failed: int, left: int, width: int) -> tuple[int, int, int]:
    """Return how many of ``width`` cells each of them has; a few failed chunks have one, too."""
    total = max(1, done + failed + left)
    bad = min(width, max(failed > 0, round(width * failed / total)))
    good = min(width - bad, round(width * done / total) if left or not done else width)
    return good, bad, width - good - bad if left else 0


def verdict_of(summary: Summary) -> Verdict:
    """Return the verdict on a job."""
    proof, done, failed = summary.completeness, summary.done, summary.failed
    elsewhere, left = summary.skipped, summary.left
    if proof is not None and proof.expected is not None:  # the rows of the source
        done, failed, elsewhere = proof.done, proof.failed + proof.poison, proof.elsewhere
        left = proof.expected - done - failed - elsewhere
    running = bool(summary.tasks_by_verdict.get(RUNNING))
    if done + failed + left + elsewhere:
        state, word, counts = judge(done, failed, left, running=running, elsewhere=elsewhere)
    else:  # a recording, or no task has listed its chunks
        bad, counts = summary.tasks_by_verdict.get("failed", 0), ""
        words = {"failed": f"{count(bad, 'task')} failed", "stopped": "not finished"}
        tasks = summary.facts.tasks
        words |= {"done": "recorded"} if tasks and not any(task.engine for task in tasks) else {}
        state, word = ("running", "running") if running else (summary.verdict, words.get(summary.verdict, "all done"))
    if state != "done" and (summary.merged.new or summary.merged.changed):
        word += " when it was merged"
    figures = _figures(summary)
    return Verdict(
        state=state,
        word=word,
        counts=counts,
        chunks=(done, failed, left),
        cost="".join(known_texts(_COST, figures)),
        result="".join(known_texts(_RESULT, figures)) if summary.chunks else "",
        next=next_steps(summary, state),
        no_findings="" if summary.findings else _no_findings(summary),
    )


def _figures(summary: Summary) -> dict[str, object]:
    gpu_s, busy, measured = summary.gpu_hours * 3600, busy_share(summary.devices), summary.energy_measured_percent
    many, wh = summary.energy_devices, summary.energy_wh
    partly = "" if many == len(summary.devices) else f", known for {many:,} of {devices_words(summary.devices)}"
    return {
        "s": summary,
        "gpu_time": gpu_time(gpu_s),
        "units": summary.bill and summary.bill.units,
        "energy": f"energy {'not measured' if wh is None else energy(wh) + partly}" if gpu_s else None,
        "measured": share_words(measured) if measured is not None and measured < NEARLY_ALL else None,
        "busy": None if busy is None else share_words(100 * busy),
        "load": None if busy is None else load_word(100 * busy),
    }


def _no_findings(summary: Summary) -> str:
    """Return the sentence for a job without findings."""
    alerts, gpu_s = sum(alert.alerts for alert in summary.alerts), summary.gpu_hours * 3600
    critical = any(alert.severity == "critical" for alert in summary.alerts)
    but = f"; {count(alerts, 'alert')}{' (some critical)' if critical else ''}, see below" if alerts else ""
    if summary.verdict != "done" and summary.chunks:
        but = f" besides the chunks that are left or failed{but}"
    elif 0 < gpu_s < LEAST_S:
        but = f"; {gpu_s:.0f} s of GPU time are too few to judge how busy the GPUs were{but}"
    return f"No {'problems found' if summary.verdict == 'done' and not critical else 'findings'}{but}."


def next_steps(summary: Summary, state: str) -> tuple[tuple[str, str], ...]:
    """Return what to do next, true for the state of the job; several lines are alternatives."""
    proof, place, queue = summary.completeness, summary.place, summary.queue
    monitor = shell_line("badcjobs", "monitor", place)
    if summary.cut_short is not None:  # Slurm may have its array: any other command might do the same work twice
        return (("repeat the submit that was cut short", summary.cut_short.command),)
    if summary.merged.command is not None:
        waits = f" (or wait for merge job {queue.merge})" if queue is not None and queue.merge else ""
        return ((f"to include what is new since the merge{waits}", summary.merged.command),)
    if queue is not None and (queue.waiting or queue.running):
        return ((str(queue), next(iter(queue.release), monitor)),)
    if state == RUNNING:
        return (("", monitor),)
    kind = Path(place).suffix
    if kind in (".csv", ".jsonl"):
        return (("", shell_line("badcjobs", "report", place, "--html", "report.html")),)
    if proof is None or not proof.finish:
        if summary.verdict != "done" and summary.chunks and kind != ".sqlite":
            return (("run the same command or script again, then", shell_line("badcjobs", "merge", place)),)
        table = "" if summary.done else "chunk" if summary.chunks else "sample"
        words = ["--table", table] if table else []
        return (("", shell_line("badcjobs", "export", place, *words, "-o", f"{table or 'detection'}s.csv")),)
    first, *others = proof.finish
    how = "to do what is left" if summary.verdict == "stopped" else TRY_AGAIN
    if first.startswith("sbatch "):
        how = "submit the same script again for these indices"
    unknown = bool(others) if queue is None else not queue.known
    if unknown and summary.verdict == "stopped":
        how += ", unless tasks of it are still queued"
    elif summary.tasks_silent and (queue is None or unknown):
        how += ", unless its silent tasks are still running"
    # If the script is not known, the other line can be pasted.
    return ((how, first), *((("or do it in one run", line) for line in others) if first.endswith("…") else ()))


# --- the other numbers, below the verdict -----------------------------------------------------------------------------

_LABELS = 5  # the most frequent ones
# Name → templates; a headline is left out if all of its templates are.
HEADLINES = (
    ("tasks", (
        "{s.tasks:whole} ({verdicts})",
        "; last update from a silent task: {heard:moment}",
        "; array index {not_started:indices} not started{queue}",
        "; no {readable}database from array index {no_database:indices}{see}",
    )),
    ("merged", ("{news}",)),
    ("submit", ("{cut_short.what}",)),
    ("chunks", (
        "{s.facts.tries:count try tries?}",
        "; {s.facts.conflicts:whole?} done more than once, the last result counts",
        " ({s.facts.restarted:whole?} after a node failure)",
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
    ("energy", (
        "{least}{s.kwh_per_1000_audio_hours:two?} kWh per 1,000 audio-hours", " ({joules:round} J per audio-hour)",
    )),
    ("bill", (
        "not known: {unbilled}",
        "{bill.units_per_1000_audio_hours:one?} units per 1,000 audio-hours",
        "; with --gpus-per-node={bill.advised_gpus} --cpus-per-task={bill.advised_cpus} --mem={bill.advised_mem_gb}G it"
        " would have been {bill.advised_units_per_1000_audio_hours:one?}",
    )),
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
    missing, logs = summary.tasks_missing or None, summary.completeness.missing_logs if summary.completeness else ()
    silent, running = frozenset(summary.tasks_silent), summary.tasks_by_verdict.get(RUNNING)
    waits = summary.queue is not None and summary.queue.waiting
    heard_ms = [task.heard_at_ms or 0 for task in summary.facts.tasks if task.name in silent]
    figures = {
        "s": summary,
        "news": news_words(summary.merged) or None,
        "cut_short": summary.cut_short,
        "verdicts": ", ".join(f"{many:,} {verdict}" for verdict, many in sorted(summary.tasks_by_verdict.items())),
        "heard": max(heard_ms, default=None),
        "not_started": missing if running or waits else None,
        "no_database": None if running or waits else missing,
        "readable": "readable " if summary.facts.lossy_files else "",
        "queue": f": {summary.queue}" if waits else ", perhaps still in the queue",
        "see": f" (see {logs[0]})" if logs else "",
        "labels": tuple(f"{label} {many:,}" for label, _, many in summary.facts.labels[:_LABELS]) or None,
        "more_labels": len(summary.facts.labels[_LABELS:]),
        **_source_figures(summary),
        **_device_figures(summary),
    }
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
    cost, bill, kwh = summary.chunk_cost, summary.bill, summary.kwh_per_1000_audio_hours
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
        "joules": kwh and kwh * 3600,
        "unbilled": bill and bill.why_unknown,
        "bill": bill if bill and bill.why_unknown is None else None,
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
