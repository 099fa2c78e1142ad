"""What was asked of Slurm against what was used, with the lines for next time."""

from __future__ import annotations

import math
from collections.abc import Iterator

from badcjobs.model import NOTE, PROBLEM, WARNING, Finding, JobFacts, TaskFacts
from badcjobs.report.finding_rules.device_time import busy_share, each_once, share
from badcjobs.report.finding_rules.low_busy import LOW
from badcjobs.report.summarize import Summary
from badcjobs.report.task_states import is_running
from badcjobs.report.words import count, duration, memory, number

_GIB = 2**30
_LEAST_S = 300.0  # a task that ran for less has not shown what it needs
_MEMORY_MARGIN, _TIME_MARGIN, _CPU_MARGIN = 1.2, 1.3, 1.3
_NEAR = 0.9
_FAR_MEMORY, _FAR_MEMORY_GIB = 2.0, 4
_FAR_TIME, _FAR_TIME_S = 3.0, 3600.0
_FAR_CORES = 8  # fewer are not worth a line
_STOPPED_NEAR = 0.75  # an orderly stop leaves the last part of the time for what is in progress


def judge_requests(facts: JobFacts, summary: Summary) -> Iterator[Finding]:
    """Yield memory, time and cores that were asked for and not used, or used up."""
    # What a task that goes on will need, nobody knows: until it has ended, nothing is too much.
    all_ended = not any(is_running(task, summary.tasks_silent) for task in facts.tasks)
    yield from _memory(facts, all_ended=all_ended)
    yield from _time(facts, summary)
    if all_ended:
        yield from _cores(facts)


def _memory(facts: JobFacts, *, all_ended: bool) -> Iterator[Finding]:
    known = [t for t in facts.tasks if t.memory_limit_bytes and t.memory_peak_bytes]
    if not known:
        return
    asked = max(t.memory_limit_bytes or 0 for t in known)
    fullest = max(known, key=lambda t: t.memory_peak_bytes or 0)
    peak = fullest.memory_peak_bytes or 0
    wanted = math.ceil((_MEMORY_MARGIN * peak + _GIB) / _GIB)
    evidence = (
        f"asked for {memory(asked)}, used {memory(peak)} at most, {share(peak, asked)}",
        f"{fullest.name}; {count(len(known), 'task')} measured",
    )
    killed = [t for t in known if (t.slurm_state or "").startswith("OUT_OF_ME")]
    starved = any(error.error_class == "host_memory" for error in facts.errors)
    if killed or starved or peak >= _NEAR * asked:
        more = max(wanted, math.ceil((1.5 if killed or starved else 1.2) * asked / _GIB))
        sentence = f"Slurm killed {count(len(killed), 'task')} that used more memory than asked for." if killed else (
            "The node's memory ran out." if starved else "The tasks come close to the memory they asked for."
        )  # fmt: skip
        yield Finding(
            "memory_request", PROBLEM if killed or starved else WARNING, sentence, evidence,
            "Ask for more memory, or run fewer workers.", (f"#SBATCH --mem={more}G",),
            each_once(t.name for t in killed or [fullest]),
        )  # fmt: skip
    elif all_ended and asked >= max(_FAR_MEMORY * wanted, wanted + _FAR_MEMORY_GIB) * _GIB and _showed(known):
        yield Finding(
            "memory_request", NOTE, "Much more memory was asked for than was used.", evidence,
            "Ask for less: such tasks wait less in the queue, and many sites bill memory.",
            (f"#SBATCH --mem={wanted}G",), (fullest.name,),
        )  # fmt: skip


def _time(facts: JobFacts, summary: Summary) -> Iterator[Finding]:
    known = [t for t in facts.tasks if t.time_limit_s]
    over = [t for t in known if _ran_out(t)]
    if over:
        yield _too_short(over, summary)
        return
    ended = [t for t in known if t.verdict in ("done", "failed") and t.done]
    if not ended or len(ended) < len([t for t in known if t.verdict is not None and t.done]):
        return
    for_good = all(t.verdict is not None for t in known)  # what the others will have taken, nobody knows
    longest = max(ended, key=lambda t: t.wall_s)
    asked_s = max(t.time_limit_s or 0.0 for t in ended)
    wanted_s = _round_up(_TIME_MARGIN * longest.wall_s + 300)
    evidence = (
        f"asked for {duration(asked_s)}, used {duration(longest.wall_s)} at most, {share(longest.wall_s, asked_s)}",
        f"{longest.name}; {count(len(ended), 'task')} ended in order",
    )
    if longest.wall_s >= _NEAR * asked_s:
        yield Finding(
            "time_request", NOTE, "The tasks ended shortly before their time was over.", evidence,
            "Ask for a little more; what is left when the time is over is done by submitting again.",
            (_time_line(max(wanted_s, _round_up(1.2 * asked_s))),), (longest.name,),
        )  # fmt: skip
    elif for_good and asked_s >= max(_FAR_TIME * wanted_s, wanted_s + _FAR_TIME_S) and _showed(ended):
        yield Finding(
            "time_request", NOTE, "Much more time was asked for than was used.", evidence,
            "Ask for less: short tasks fit into gaps of the queue.", (_time_line(wanted_s),), (longest.name,),
        )  # fmt: skip


def _ran_out(task: TaskFacts) -> bool:
    if (task.slurm_state or "").startswith("TIMEOUT"):
        return True
    at_end = task.wall_s >= _STOPPED_NEAR * (task.time_limit_s or math.inf)
    return task.verdict in ("stopped", "killed") and task.pending > 0 and at_end


def _too_short(over: list[TaskFacts], summary: Summary) -> Finding:
    done, left = sum(t.done for t in over), sum(t.pending for t in over)
    asked_s = max(t.time_limit_s or 0.0 for t in over)
    needed_s = max(t.wall_s * (1 + t.pending / t.done) if t.done else 2 * t.wall_s for t in over)
    return Finding(
        "time_request", WARNING if summary.left else NOTE,
        f"The time of {count(len(over), 'task')} was over before the work was done.",
        (f"asked for {duration(asked_s)}", f"{count(done, 'chunk')} done in it, {left:,} left"),
        "Submit again, which does the rest; or ask for more time, or cut the source into more tasks.",
        (_time_line(_round_up(_TIME_MARGIN * needed_s + 300)),), each_once(t.name for t in over),
    )  # fmt: skip


def _cores(facts: JobFacts) -> Iterator[Finding]:
    known = [t for t in facts.tasks if t.cpus and t.cpu_mean_cores is not None]
    busy = busy_share(facts.devices)
    if not known or not _showed(known) or (busy is not None and busy < LOW):
        return  # devices with little to do need more workers, and these need the cores
    asked = max(t.cpus or 0 for t in known)
    most = max(known, key=lambda t: t.cpu_mean_cores or 0.0)
    used = most.cpu_mean_cores or 0.0
    wanted = math.ceil(_CPU_MARGIN * used) + 1
    if wanted <= asked / 2 and asked - wanted >= _FAR_CORES:
        yield Finding(
            "cpus_request", NOTE, "Many more cores were asked for than were used.",
            (
                f"asked for {asked} cores, {number(used, 1)} busy on average, {share(used, asked)}",
                f"{most.name}; {count(len(known), 'task')} measured",
            ),
            "Ask for fewer: such tasks wait less in the queue.", (f"#SBATCH --cpus-per-task={wanted}",), (most.name,),
        )  # fmt: skip


def _showed(tasks: list[TaskFacts]) -> bool:
    return max(task.wall_s for task in tasks) >= _LEAST_S


def _round_up(seconds: float) -> float:
    """Return a time that people would ask for: in steps of 5 minutes, of half an hour from 3 h on."""
    step_s = 300 if seconds < 3 * 3600 else 1800
    return math.ceil(seconds / step_s) * step_s


def _time_line(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"#SBATCH --time={minutes // 60}:{minutes % 60:02d}:00"
