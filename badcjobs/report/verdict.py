"""The verdict on a job and, below it, its other numbers in words; the same in text, page and notebook.

The verdict says: did it work, what is wrong, what did it cost, what to do next. Text, page and notebook make it from a
summary (``verdict_of``); the live views from what they know while tasks run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor
from pathlib import Path
from typing import Any, NamedTuple

from badcjobs.model import NameGaps, load_word
from badcjobs.paths import shell_line
from badcjobs.report.progress import RUNNING
from badcjobs.report.rules import Figures, busy_percent, known_texts
from badcjobs.report.summary import NEARLY_ALL, STATE_WORDS, Summary
from badcjobs.sources.mistakes import left_out_words
from badcjobs.sources.places import place_words
from badcjobs.store.read_model import AlertFacts, Completeness, Freshness
from badcjobs.words import count, duration, gpu_time, moment, share_words

MOST_FINDINGS = 3
TRY_AGAIN = "to try failed chunks again, once the cause is fixed"
BAR = ("█", "x", "·")  # done, failed, left: different signs, so that no colour is needed
# A template is left out if one of its figures is None (with '?': 0).
_COST = (
    "{gpu_time}",
    " in {s.wall_s:duration}",
    ", energy {s.energy_wh:energy?}",
    ", measured for {measured:percent} of the GPU time",
    ", {s.bill.units:one?} billed units",
    "; GPUs busy {busy:percent} of the time ({load})",
)
_RESULT = (
    "{s.audio_hours:two} hours of audio",
    ", {s.times_real_time:one?} × real time",
    ", {s.audio_hours_per_gpu_hour:one?} audio-hours per GPU-hour",
    "; {s.detections:count detection}",
)


Steps = tuple[tuple[str, str], ...]  # what to do: words (may be empty), a line to paste


class Verdict(NamedTuple):
    """What to read first; every number appears in it once."""

    state: str  # done, failed, stopped (work is left), running
    word: str  # did it work: "failed"
    counts: str = ""  # "0 of 8 chunks done, 8 failed"; empty: there are no chunks
    chunks: tuple[int, int, int] = (0, 0, 0)  # done, failed, left: the bar
    cost: str = ""
    result: str = ""
    next: Steps = ()

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The cost and the result, with their names."""
        lines = [("cost", self.cost), ("result", self.result)]
        return [(name, words) for name, words in lines if words]

    @property
    def outcome(self) -> str:
        """Whether it worked, with its numbers."""
        return f"{self.word} – {self.counts}" if self.counts else self.word

    def to_dict(self) -> dict[str, Any]:
        """Return it for scripts; its findings are the first ones of the document."""
        steps = [{"words": words, "command": command} for words, command in self.next]
        return {"state": self.state, "outcome": self.outcome, "cost": self.cost, "result": self.result, "next": steps}


def judge(done: int, failed: int, left: int, *, running: bool, elsewhere: int = 0) -> Verdict:
    """Judge a job with chunks; without the cost, the result and what to do next.

    ``elsewhere``: chunks whose results are in another file; no chunk done at all is a failure.
    """
    total = done + failed + left + elsewhere
    chunks = count(total, "chunk")
    parts = [chunks if done == total else f"{done:,} of {chunks} done"]
    for many, state in ((failed, "failed"), (left, "left"), (elsewhere, "done elsewhere")):
        if many:
            parts.append(f"{many:,} {state}")
    counts = ", ".join(parts)

    state = "failed"
    word = "partly failed"
    if running:
        state = word = "running"
    elif done == total:
        state = "done"
        word = "all done"
    elif not done and not elsewhere:
        word = "failed"
    elif left or elsewhere:
        state = "stopped"
        word = "not finished"
    return Verdict(state, word, counts, (done, failed, left))


def judge_rows(proof: Completeness, *, running: bool) -> Verdict:
    """Judge a job by the rows of its source or, if that is not known, of its database."""
    return judge(proof.done, proof.given_up, proof.left, running=running, elsewhere=proof.elsewhere)


def bar(done: int, failed: int, left: int, width: int) -> tuple[int, int, int]:
    """Return how many of ``width`` cells each of them has; a few failed chunks have one, too."""
    total = max(1, done + failed + left)
    failed_cells = ceil(width * failed / total)
    done_cells = floor(width * done / total)
    if not left:
        done_cells = width - failed_cells
    return done_cells, failed_cells, width - failed_cells - done_cells


def verdict_of(summary: Summary) -> Verdict:
    """Return the verdict on a job."""
    proof = summary.completeness
    running = bool(summary.tasks_by_verdict.get(RUNNING))
    places = summary.facts.places
    left_out = places.left_out if places else 0
    if proof.rows:
        verdict = judge_rows(proof, running=running)
    elif running:
        verdict = Verdict("running", "running")
    else:
        verdict = _judge_tasks(summary, left_out)

    word = verdict.word
    if verdict.state != "done" and (summary.merged.new or summary.merged.changed):
        word += " when it was merged"
    counts = [verdict.counts]
    if left_out:
        counts.append(f"{count(left_out, 'recording')} left out")
    figures = _figures(summary)
    return verdict._replace(
        word=word,
        counts=", ".join(filter(None, counts)),
        cost="".join(known_texts(_COST, figures)),
        result="".join(known_texts(_RESULT, figures)) if summary.chunks else "",
        next=next_steps(summary, verdict.state),
    )


def _judge_tasks(summary: Summary, left_out: int) -> Verdict:
    """Judge a recording, or a job whose tasks have listed no chunks."""
    state = summary.verdict
    tasks = summary.facts.tasks
    if state == "failed":
        return Verdict(state, f"{count(summary.tasks_by_verdict['failed'], 'task')} failed")
    if state == "stopped":
        return Verdict(state, "not finished")
    if left_out:
        return Verdict(state, "nothing analysed")
    if tasks and not any(task.engine for task in tasks):
        return Verdict(state, "recorded")
    return Verdict(state, "all done")


def _figures(summary: Summary) -> Figures:
    """Return the figures of _COST and _RESULT."""
    busy = busy_percent(summary)
    measured = summary.energy_measured_percent
    if measured is not None and measured >= NEARLY_ALL:
        measured = None
    return {
        "s": summary,
        "measured": measured,
        "gpu_time": gpu_time(summary.gpu_hours * 3600),
        "busy": busy,
        "load": load_word(busy),  # None: the line leaves both out
    }


def no_findings_words(summary: Summary) -> str:
    """Return the sentence for a job without findings."""
    if summary.alerts:
        return "No findings besides the counts above and the alerts below."
    if summary.verdict == "done":
        return "No problems found."
    return "No findings besides the chunks that are left or failed."


def next_steps(summary: Summary, state: str) -> Steps:
    """Return what to do next, true for the state of the job; several lines are alternatives."""
    queue = summary.queue
    monitor = shell_line("badcjobs", "monitor", summary.place)
    if summary.cut_short is not None:  # Slurm may have its array: any other command might do the same work twice
        return (("repeat the submit that was cut short", summary.cut_short.command),)
    if summary.merged.command is not None:
        return (("to include what is new since the merge", summary.merged.command),)
    if queue is not None and (queue.waiting or queue.running):
        return ((str(queue), next(iter(queue.release), monitor)),)
    if state == RUNNING:
        return (("", monitor),)
    if Path(summary.place).suffix in (".csv", ".jsonl"):
        return (("", shell_line("badcjobs", "report", summary.place, "--html", "report.html")),)
    if summary.completeness.finish:
        return _finish_steps(summary)
    if summary.verdict != "done" and summary.chunks and Path(summary.place).suffix != ".sqlite":
        return (("run the same command or script again, then", shell_line("badcjobs", "merge", summary.place)),)
    return (("", _export_line(summary)),)


def _export_line(summary: Summary) -> str:
    """Return the command that exports detections; without any, chunks; of a recording, samples."""
    if summary.done:
        return shell_line("badcjobs", "export", summary.place, "-o", "detections.csv")
    table = "chunk" if summary.chunks else "sample"
    return shell_line("badcjobs", "export", summary.place, "--table", table, "-o", f"{table}s.csv")


def _finish_steps(summary: Summary) -> Steps:
    """Return the commands that do the rest."""
    proof = summary.completeness
    first, *others = proof.finish
    words = TRY_AGAIN
    if proof.finish_by == "script":
        words = "submit the same script again for these indices"
    elif summary.verdict == "stopped":
        words = "to do what is left"
    queue_known = summary.queue is not None and summary.queue.known
    if summary.verdict == "stopped" and not queue_known:
        words += ", unless its tasks are still queued or running"
    steps = [(words, first)]
    if proof.finish_by == "script":  # the other line can be pasted
        steps += [("or do it in one run", line) for line in others]
    return tuple(steps)


# --- the other numbers, below the verdict -----------------------------------------------------------------------------

_LABELS = 5  # the most frequent ones
# Name → templates; a headline is left out if all of its templates are.
HEADLINES = {
    "tasks": (
        "{s.tasks:whole} ({verdicts})",
        "; no database from array index {s.completeness.missing_indices:indices?}",
        " (see {log})",
    ),
    "merged": ("{news:?}",),
    "submit": ("{s.cut_short.what}",),
    "chunks": (
        "{s.facts.tries:count try tries?}",
        "; {s.facts.conflicts:whole?} done more than once, the last result counts",
        " ({s.facts.restarted:whole?} after a node failure)",
        "; {s.facts.cpu_tries:whole?} on the CPU ({s.audio_hours_on_cpu:two} hours of audio)",
        "; {s.facts.done_of_unknown_length:whole?} of unknown length",
    ),
    "source": (
        "not compared: {why_unknown}",
        "{s.completeness.expected:count row}",
        "; {s.completeness.not_listed:whole?} in no task",
        "; {s.completeness.strangers:count row?} in the job but not in the source",
    ),
    "recordings": ("{names:?}",),
    "places": ("{places}",),
    "left out": ("{left_out:?}",),
    "GPU use": ("{use:list?}",),
    "left": (
        "about {s.outlook.audio_hours:one?} audio-hours",
        " and {s.outlook.gpu_hours:one?} GPU-hours",
        "; about {s.outlook.wall_s:duration?} of running time",
        "; expected end: about {s.outlook.end_at_ms:moment?}",
    ),
    "energy": (
        "{s.kwh_per_1000_audio_hours:two?} kWh per 1,000 audio-hours",
        " ({joules:round} J per audio-hour)",
    ),
    "bill": (
        "{s.bill.units_per_1000_audio_hours:one?} units per 1,000 audio-hours",
        "; with --gpus-per-node={s.bill.advised_gpus} --cpus-per-task={s.bill.advised_cpus}"
        " --mem={s.bill.advised_mem_gb}G it would have been {s.bill.advised_units_per_1000_audio_hours:one?}",
    ),
    "per chunk": (
        "{cost.gpu_s_mean:two} GPU-seconds (p50 {cost.gpu_s_p50:two}, p95 {cost.gpu_s_p95:two},"
        " max {cost.gpu_s_max:two})",
        "; {cost.energy_j_mean:one?} J (p50 {cost.energy_j_p50:one}, p95 {cost.energy_j_p95:one},"
        " max {cost.energy_j_max:one})",
    ),
    "detections": ("{labels:list?}", " and {more_labels:count other_label?}"),
    "telemetry": (
        "{samples:count sample}",
        ", {gaps:count gap?}, {gap_s:duration} in total",
        "; off in {s.tasks_without_telemetry:count task?} (--no-emit-gpu-telemetry)",
    ),
}


def headlines(summary: Summary) -> list[tuple[str, str]]:
    """Return (name, words) in the order they are shown."""
    places = summary.facts.places
    figures = {
        "s": summary,
        "news": news_words(summary.merged),
        "left_out": left_out_words(summary.left_out),
        "cost": summary.facts.cost,
        "labels": tuple(f"{label} {many:,}" for label, _, many in summary.facts.labels[:_LABELS]),
        "more_labels": len(summary.facts.labels[_LABELS:]),
        "verdicts": ", ".join(f"{many:,} {verdict}" for verdict, many in sorted(summary.tasks_by_verdict.items())),
        "log": next(iter(summary.completeness.missing_logs), None),
        "why_unknown": summary.completeness.why_unknown if summary.chunks else None,  # a recording has no source
        "names": "; ".join(_name_gaps(summary.facts.recording_names)),
        "places": places and place_words(places),
        **_device_figures(summary),
    }
    lines = [(name, "".join(known_texts(templates, figures))) for name, templates in HEADLINES.items()]
    return [(name, words) for name, words in lines if words]


def _name_gaps(gaps: NameGaps | None) -> Iterator[str]:
    """Yield what some paths lack; not if all paths, or none, lack it."""
    if gaps is None:
        return
    total = gaps.recordings
    for many, gap, example in (
        (gaps.undated, "a date in the name", gaps.undated_example),
        (gaps.untimed, "a time in the name", gaps.untimed_example),
        (gaps.no_study_area, "a study area in the path", gaps.no_study_area_example),
    ):
        if 0 < many < total:
            yield f"{many:,} of {total:,} without {gap} (e.g. {example})"


def _device_figures(summary: Summary) -> Figures:
    """Return what the devices did and used."""
    kwh = summary.kwh_per_1000_audio_hours
    gaps = [gap for gap in summary.facts.gaps if gap.metric is None]
    states = summary.states if any(task.engine for task in summary.facts.tasks) else {}
    shares = {STATE_WORDS[state]: time.share_percent or 0.0 for state, time in states.items()}
    return {
        "use": tuple(f"{state} {share_words(share)}" for state, share in shares.items() if share >= 0.5),
        "joules": kwh and kwh * 3600,
        "samples": sum(device.samples for device in summary.devices),
        "gaps": sum(gap.gaps for gap in gaps),
        "gap_s": sum(gap.seconds for gap in gaps),
    }


# --- what is new, and alerts -------------------------------------------------------------------------


def news_words(merged: Freshness) -> str:
    """Return how old the merge is if task databases are newer or cannot be read; otherwise nothing."""
    news = []
    if merged.changed:
        news.append(f"{count(merged.changed, 'task database has', 'task databases have')} changed since")
    if merged.new:
        news.append(f"{count(merged.new, 'task database is', 'task databases are')} not merged yet")
    if merged.closed:
        news.append(f"whether anything is new since then is not known: {merged.closed}")
    elif merged.gone:
        news.append(f"the state of {count(merged.gone, 'task')} that ran then is not known: no database is here")
    if news and merged.as_of_ms is not None:
        news.insert(0, f"as of {moment(merged.as_of_ms)}")
    return "; ".join(news)


def alert_lines(alerts: Sequence[AlertFacts]) -> list[str]:
    """Return a line for each kind of alert, the critical ones first."""
    lines = []
    for alert in sorted(alerts, key=lambda alert: alert.severity != "critical"):
        line = f"{alert.kind} ({alert.severity}): {count(alert.alerts, 'alert')} on {count(alert.devices, 'device')}"
        if alert.longest_s:
            line += f"; longest {duration(alert.longest_s)}"
        if alert.still_open:
            line += f"; {alert.still_open:,} still open"
        lines.append(f"{line}; for example: {alert.example}")
    return lines
