"""Findings about what was asked of Slurm against what was used, with the lines for next time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from badcjobs.report.progress import is_running
from badcjobs.report.rules import NOTE, PROBLEM, WARNING, Figures, Rule, Topic, busy_share, names, share
from badcjobs.report.rules_waiting import LOW
from badcjobs.report.summary import Summary
from badcjobs.store.read_model import JobFacts, TaskFacts

_GIB = 2**30
_LEAST_S = 300.0  # a task that ran for less has not shown what it needs
_MEMORY_MARGIN, _TIME_MARGIN, _CPU_MARGIN = 1.2, 1.3, 1.3
_NEAR = 0.9
_FAR_MEMORY, _FAR_MEMORY_GIB = 2.0, 4
_FAR_TIME, _FAR_TIME_S = 3.0, 3600.0
_FAR_CORES = 8  # fewer are not worth a line
_STOPPED_NEAR = 0.75  # an orderly stop leaves the last part of the time for what is in progress


def _all_ended(facts: JobFacts, summary: Summary) -> bool:
    """Say whether no task goes on: what one will still need is not known, so nothing is too much."""
    return not any(is_running(task, summary.tasks_silent) for task in facts.tasks)


def _showed(tasks: Sequence[TaskFacts]) -> bool:
    return max(task.wall_s for task in tasks) >= _LEAST_S


def _memory(facts: JobFacts, summary: Summary) -> Iterator[Figures]:
    known = [t for t in facts.tasks if t.memory_limit_bytes and t.memory_peak_bytes]
    if not known:
        return
    asked = max(t.memory_limit_bytes or 0 for t in known)
    fullest = max(known, key=lambda t: t.memory_peak_bytes or 0)
    peak = fullest.memory_peak_bytes or 0
    wanted = math.ceil((_MEMORY_MARGIN * peak + _GIB) / _GIB)
    killed = [t for t in known if (t.slurm_state or "").startswith("OUT_OF_ME")]
    starved = any(error.error_class == "host_memory" for error in facts.errors)
    far = asked >= max(_FAR_MEMORY * wanted, wanted + _FAR_MEMORY_GIB) * _GIB and _showed(known)
    yield {
        "killed": len(killed),
        "starved": starved,
        "near": peak >= _NEAR * asked,
        "far": far and _all_ended(facts, summary),
        "asked": asked,
        "peak": peak,
        "of_asked": share(peak, asked),
        "fullest": fullest,
        "known": len(known),
        "more": max(wanted, math.ceil((1.5 if killed or starved else 1.2) * asked / _GIB)),
        "wanted": wanted,
        "subjects": names(killed or [fullest]),
    }


_MORE_MEMORY = Rule(
    "memory_request", PROBLEM,
    when=lambda f: f["killed"],
    says="Slurm killed {killed:count task} that used more memory than asked for.",
    evidence=(
        "asked for {asked:memory}, used {peak:memory} at most, {of_asked}",
        "{fullest.name}; {known:count task} measured",
    ),
    fix="Ask for more memory, or run fewer workers.",
    lines=("#SBATCH --mem={more}G",),
)  # fmt: skip
MEMORY = Topic(_memory, (
    _MORE_MEMORY,
    replace(_MORE_MEMORY, when=lambda f: f["starved"], says="The node's memory ran out."),
    replace(_MORE_MEMORY, severity=WARNING, when=lambda f: f["near"],
            says="The tasks come close to the memory they asked for."),
    replace(_MORE_MEMORY, severity=NOTE, when=lambda f: f["far"],
            says="Much more memory was asked for than was used.",
            fix="Ask for less: such tasks wait less in the queue, and many sites bill memory.",
            lines=("#SBATCH --mem={wanted}G",)),
))  # fmt: skip


def _time(facts: JobFacts, summary: Summary) -> Iterator[Figures]:
    known = [t for t in facts.tasks if t.time_limit_s]
    if over := [t for t in known if _ran_out(t)]:
        needed_s = max(t.wall_s * (1 + t.pending / t.done) if t.done else 2 * t.wall_s for t in over)
        yield {
            "over": len(over),
            "severity": WARNING if summary.left else NOTE,
            "asked_s": max(t.time_limit_s or 0.0 for t in over),
            "done": sum(t.done for t in over),
            "left": sum(t.pending for t in over),
            "time": _time_option(_TIME_MARGIN * needed_s + 300),
            "subjects": names(over),
        }
        return
    ended = [t for t in known if t.verdict in ("done", "failed") and t.done]
    if not ended or len(ended) < len([t for t in known if t.verdict is not None and t.done]):
        return
    for_good = all(t.verdict is not None for t in known)  # what the others will have taken is not known
    longest = max(ended, key=lambda t: t.wall_s)
    asked_s, wanted_s = max(t.time_limit_s or 0.0 for t in ended), _round_up(_TIME_MARGIN * longest.wall_s + 300)
    near = longest.wall_s >= _NEAR * asked_s
    yield {
        "over": 0,
        "near": near,
        "far": for_good and asked_s >= max(_FAR_TIME * wanted_s, wanted_s + _FAR_TIME_S) and _showed(ended),
        "asked_s": asked_s,
        "longest": longest,
        "of_asked": share(longest.wall_s, asked_s),
        "ended": len(ended),
        "time": _time_option(max(wanted_s, 1.2 * asked_s) if near else wanted_s),
        "subjects": [longest.name],
    }


def _ran_out(task: TaskFacts) -> bool:
    if (task.slurm_state or "").startswith("TIMEOUT"):
        return True
    at_end = task.wall_s >= _STOPPED_NEAR * (task.time_limit_s or math.inf)
    return task.verdict in ("stopped", "killed") and task.pending > 0 and at_end


def _round_up(seconds: float) -> float:
    """Return a time that people would ask for: in steps of 5 minutes, of half an hour from 3 h on."""
    step_s = 300 if seconds < 3 * 3600 else 1800
    return math.ceil(seconds / step_s) * step_s


def _time_option(seconds: float) -> str:
    minutes = round(_round_up(seconds) / 60)
    return f"{minutes // 60}:{minutes % 60:02d}:00"


_TIME_USED = Rule(
    "time_request", NOTE,
    when=lambda f: f["near"],
    says="The tasks ended shortly before their time was over.",
    evidence=(
        "asked for {asked_s:duration}, used {longest.wall_s:duration} at most, {of_asked}",
        "{longest.name}; {ended:count task} ended in order",
    ),
    fix="Ask for a little more; what is left when the time is over is done by submitting again.",
    lines=("#SBATCH --time={time}",),
)  # fmt: skip
TIME = Topic(_time, (
    Rule(
        "time_request", "{severity}",
        when=lambda f: f["over"],
        says="The time of {over:count task} was over before the work was done.",
        evidence=("asked for {asked_s:duration}", "{done:count chunk} done in it, {left:whole} left"),
        fix="Submit again, which does the rest; or ask for more time, or cut the source into more tasks.",
        lines=("#SBATCH --time={time}",),
    ),
    _TIME_USED,
    replace(_TIME_USED, when=lambda f: f["far"],
            says="Much more time was asked for than was used.",
            fix="Ask for less: short tasks fit into gaps of the queue."),
))  # fmt: skip


def _cores(facts: JobFacts, summary: Summary) -> Iterator[Figures]:
    known = [t for t in facts.tasks if t.cpus and t.cpu_mean_cores is not None]
    busy = busy_share(facts.devices)
    if not _all_ended(facts, summary) or not known or not _showed(known) or (busy is not None and busy < LOW):
        return  # devices with little to do need more workers, and these need the cores
    asked = max(t.cpus or 0 for t in known)
    most = max(known, key=lambda t: t.cpu_mean_cores or 0.0)
    used = most.cpu_mean_cores or 0.0
    wanted = math.ceil(_CPU_MARGIN * used) + 1
    if wanted <= asked / 2 and asked - wanted >= _FAR_CORES:
        found = {"asked": asked, "used": used, "of_asked": share(used, asked), "most": most, "known": len(known)}
        yield {**found, "wanted": wanted, "subjects": [most.name]}


CORES = Topic(_cores, (
    Rule(
        "cpus_request", NOTE,
        says="Many more cores were asked for than were used.",
        evidence=(
            "asked for {asked} cores, {used:one} busy on average, {of_asked}",
            "{most.name}; {known:count task} measured",
        ),
        fix="Ask for fewer: such tasks wait less in the queue.",
        lines=("#SBATCH --cpus-per-task={wanted}",),
    ),
))  # fmt: skip
