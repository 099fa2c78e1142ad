"""The verdict on a job: did it work, what is wrong, what did it cost, what to do next; the same in every form.

Text, page and notebook make it from a summary (``verdict_of``); the live views from what they know while tasks run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from badcjobs.model import load_word
from badcjobs.paths import shell_line
from badcjobs.report.progress import RUNNING
from badcjobs.report.rules import busy_share, known_texts
from badcjobs.report.rules_waiting import LEAST_S
from badcjobs.report.summary import NEARLY_ALL, Summary, devices_words
from badcjobs.report.words import count, duration, energy, number, share_words

MOST_FINDINGS = 3
BAR = ("█", "x", "·")  # done, failed, left: different signs, so that no colour is needed
_FEW_S = 600.0  # less GPU time than this is shown in seconds or minutes
# A template is left out if one of its figures is None (with '?': 0).
_COST = (
    "{gpu_time}",
    " in {s.wall_s:duration}",
    ", {energy}",
    ", measured for {measured} of the GPU time",
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
    def outcome(self) -> str:
        """Whether it worked, with its numbers."""
        return f"{self.word} – {self.counts}" if self.counts else self.word

    def to_dict(self) -> dict[str, Any]:
        """Return it for scripts; its findings are the first ones of the document."""
        steps = [{"words": words, "command": command} for words, command in self.next]
        return {"state": self.state, "outcome": self.outcome, "cost": self.cost, "result": self.result, "next": steps}


def judge(done: int, failed: int, left: int, *, running: bool = False, elsewhere: int = 0) -> tuple[str, str, str]:
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
    partly = "" if many == len(summary.devices) else f" (known for {many:,} of {devices_words(summary.devices)})"
    return {
        "s": summary,
        "gpu_time": gpu_time(gpu_s),
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
    how = (
        "to do what is left" if summary.verdict == "stopped" else "to try failed chunks again, once the cause is fixed"
    )
    if first.startswith("sbatch "):
        how = "submit the same script again for these indices"
    unknown = bool(others) if queue is None else not queue.known
    if unknown and summary.verdict == "stopped":
        how += ", unless tasks of it are still queued"
    elif summary.tasks_silent and (queue is None or unknown):
        how += ", unless its silent tasks are still running"
    # If the script is not known, the other line can be pasted.
    return ((how, first), *((("or do it in one run", line) for line in others) if first.endswith("…") else ()))
