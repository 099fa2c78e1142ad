"""The causes of a low busy share in words: the numbers each rests on, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from badcjobs.model import PROBLEM, WARNING, DeviceFacts, Finding, JobFacts, TaskFacts
from badcjobs.report.cards import cards
from badcjobs.report.finding_rules.device_time import (
    busy_share,
    each_once,
    gpu_time,
    share,
    short_of_memory,
    took_back,
    workers_of,
)
from badcjobs.report.words import count, duration, memory, number, plain

_SERIOUS_S = 10 * 3600.0  # of GPU time lost
_SECOND = 0.2  # of what was lost: another cause is worth a word
_FULL = 0.85  # of a device's memory
_GOOD_TASK_S = 1800.0
OPTIONS = "Give badcjobs run these options."
READ_AHEAD = (
    "Let badcjobs copy audio to the node's own disk ahead of time (--stage always), and read fewer, larger files. More"
    f" workers per GPU overlap their waiting. {OPTIONS}"
)
READ_AHEAD_OPTIONS = "--stage always --workers-per-gpu auto"
LONGER_TASKS = "Give each array task more to do: fewer tasks for the same work, of half an hour at least."
EVEN_CHUNKS = "Cut long recordings into chunks of about the same length, or ask for fewer GPUs for each task."
_WORDS = {
    "start_up": "start-up",
    "waiting_for_audio": "waiting for audio",
    "cpu_bound": "waiting for cores",
    "too_few_workers": "workers too few to fill the GPU",
    "tail": "waiting for the last chunks of others",
    "low_busy": "a cause that is not known",
    "ending": "the end of the task",
    "failures": "chunks that failed",
}


@dataclass(frozen=True, slots=True)
class Loss:
    """Where the seconds went in which devices were not busy, in the tasks where that is most of them."""

    tasks: tuple[TaskFacts, ...]
    devices: tuple[DeviceFacts, ...]
    measured_s: float
    by_cause: Mapping[str, float]
    states: Mapping[str, float]  # state → seconds, busy or not

    @property
    def lost_s(self) -> float:
        return sum(self.by_cause.values())

    @property
    def busy(self) -> str:
        return share(busy_share(self.devices) or 0.0, 1.0)


def _finding(loss: Loss, kind: str, sentence: str, evidence: Sequence[str], advice: str, *lines: str) -> Finding:
    severity = PROBLEM if loss.lost_s >= _SERIOUS_S else WARNING
    where = count(cards(loss.devices), "device")
    where += f" in {count(len(loss.tasks), 'task')}" if len(loss.tasks) > 1 else ""
    head = f"busy {loss.busy} of {gpu_time(loss.measured_s)}, on {where}"
    second = sorted(((s, cause) for cause, s in loss.by_cause.items() if cause != kind), reverse=True)[:1]
    beside = [
        f"{share(seconds, loss.lost_s)} of the idle time: {_WORDS[cause]}"
        for seconds, cause in second
        if seconds >= _SECOND * loss.lost_s
    ]
    subjects = each_once(task.name for task in loss.tasks)
    hours = loss.by_cause[kind] / 3600
    return Finding(kind, severity, sentence, (head, *evidence, *beside), advice, lines, subjects, hours)


def _of_idle(loss: Loss, kind: str) -> str:
    return f"{gpu_time(loss.by_cause[kind])}, {share(loss.by_cause[kind], loss.lost_s)} of the idle time"


def _start_up(loss: Loss, facts: JobFacts) -> Finding:
    starting_s = loss.states.get("start_up", 0.0)
    p50_s = [device.work.chunk_p50_s for device in loss.devices if device.work.chunk_p50_s is not None]
    if any(task.engine == "command" for task in loss.tasks) and starting_s < 0.5 * loss.by_cause["start_up"]:
        return _finding(
            loss, "start_up",
            f"Every chunk starts a program anew, and the GPUs are busy for {loss.busy} of the time only.",
            (f"a chunk takes {number(median(p50_s), 1)} s (median), with the start of its program",),
            "Use an engine that stays: --engine hawkears starts once for all chunks of a worker. For another program,"
            f" make the chunks longer. {OPTIONS}",
            "--engine hawkears --workers-per-gpu auto",
        )  # fmt: skip
    workers, places = sum(d.work.workers for d in loss.devices), _places(loss, facts)
    restarts = [f"{workers:,} engines were started for {places:,} at a time"] if workers >= 2 * places else []
    advice = (
        "Engines died and were started anew: look first at why tries failed or were lost (job.sqlite, table attempt)."
        if restarts
        else LONGER_TASKS
    )
    lines = () if restarts else fewer_tasks(facts)
    return _finding(
        loss, "start_up",
        f"Engines starting up took {share(starting_s, sum(loss.states.values()))} of the GPU time.",
        (f"start-up: {_of_idle(loss, 'start_up')}", f"tasks ran for {_median_wall(loss)} (median)", *restarts),
        advice, *lines,
    )  # fmt: skip


def fewer_tasks(facts: JobFacts) -> tuple[str, ...]:
    """Return the array of a fifth of the tasks, or of so few that each works for half an hour."""
    tasks = len({(task.job_id, task.array_index) for task in facts.tasks})
    wanted = max(1, min(tasks // 5, int(sum(task.wall_s for task in facts.tasks) // _GOOD_TASK_S)))
    return (f"#SBATCH --array=0-{wanted - 1}",) if tasks >= 5 else ()


def _waiting_for_audio(loss: Loss, facts: JobFacts) -> Finding:
    rates = [t.read_mean_bytes_per_s for t in loss.tasks if t.read_mean_bytes_per_s is not None]
    reads = [f"read {number(median(rates) / 1e6, 1)} MB/s for each task (median)"] if rates else []
    return _finding(
        loss, "waiting_for_audio", f"The GPUs wait for audio: they are busy for {loss.busy} of the time only.",
        (f"waiting: {_of_idle(loss, 'waiting_for_audio')}", *_cpu(loss, facts), *reads),
        READ_AHEAD, READ_AHEAD_OPTIONS,
    )  # fmt: skip


def _cpu_bound(loss: Loss, facts: JobFacts) -> Finding:
    short_by = 0.9 / max(busy_share(loss.devices) or 0.0, 0.01)
    cores, granted = max(task.cpus or 0 for task in loss.tasks), max(task.devices for task in loss.tasks)
    now = f" (now {number(cores / max(1, granted), 1)})" if cores else ""
    line = f"#SBATCH --cpus-per-task={math.ceil(cores * min(2.0, short_by))}"
    if granted > 1 and short_by >= 2:  # no node has so many cores: fewer GPUs have more each
        line = f"#SBATCH --gpus-per-node={max(1, round(granted / short_by))}"
    return _finding(
        loss, "cpu_bound", f"The engine is held up by the CPU: the GPUs are busy for {loss.busy} of the time only.",
        (f"waiting for cores: {_of_idle(loss, 'cpu_bound')}", *_cpu(loss, facts)),
        f"Ask for more cores per GPU{now}, or for fewer or smaller GPUs.",
        *((line,) if cores else ()),
    )  # fmt: skip


def _too_few_workers(loss: Loss, facts: JobFacts) -> Finding:
    peaks = [d for d in loss.devices if d.memory_peak_bytes and d.memory_total_bytes]
    fullest = max(peaks, key=lambda d: (d.memory_peak_bytes or 0) / (d.memory_total_bytes or 1), default=None)
    room, full = [], False
    if fullest is not None:
        used, total = fullest.memory_peak_bytes or 0, fullest.memory_total_bytes or 1
        full = used > _FULL * total
        room = [f"device memory: {memory(used)} of {memory(total)} at most"]
    per_gpu = _places(loss, facts) / max(1, len(loss.devices))
    advice = f"Run more workers on each GPU; auto adds them while they pay. {OPTIONS}"
    lines = ["--workers-per-gpu auto"]
    if full:
        advice = "More workers need more device memory than there is: use shorter chunks or fewer models, then auto."
        advice += f" {OPTIONS}"
    elif (short := short_of_memory(facts)) and (asked := max(task.memory_limit_bytes or 0 for task in loss.tasks)):
        room.append(plain(f"no more workers were tried: {short[-1]}"))
        advice = "Ask Slurm for more main memory: the lack of it has kept auto from adding workers."
        lines = [f"#SBATCH --mem={math.ceil(2 * asked / 2**30)}G"]
    return _finding(
        loss, "too_few_workers",
        f"Too few workers: {number(per_gpu, 0)} on each GPU, which is busy for {loss.busy} of the time only.",
        (f"not filled: {_of_idle(loss, 'too_few_workers')}", *_cpu(loss, facts), *room), advice, *lines,
    )  # fmt: skip


def _tail(loss: Loss, facts: JobFacts) -> Finding:
    longest_s = max((d.work.chunk_max_s for d in loss.devices if d.work.chunk_max_s is not None), default=None)
    p50_s = [d.work.chunk_p50_s for d in loss.devices if d.work.chunk_p50_s is not None]
    took = [] if longest_s is None else [
        f"the longest chunk took {duration(longest_s)}, the median one {duration(median(p50_s))}"
    ]  # fmt: skip
    return _finding(
        loss, "tail", "At the end most GPUs of a task wait, while one still works on its last chunk.",
        (f"waiting for others: {_of_idle(loss, 'tail')}", *took),
        EVEN_CHUNKS,
    )  # fmt: skip


def _unknown(loss: Loss, facts: JobFacts) -> Finding:
    tried = [plain(f"one worker more was tried: {reason}") for reason in took_back(facts)][:1]
    advice = (
        "One worker more on each GPU did not pay: this engine does not fill this GPU. A smaller one (a MIG slice)"
        " does the same work."
        if tried
        else "What the engines were waiting for was not measured. Try more workers on each GPU: auto adds them while"
        f" they pay. {OPTIONS}"
    )
    lines = () if tried else ("--workers-per-gpu auto",)
    return _finding(
        loss, "low_busy", f"The GPUs are busy for {loss.busy} of the time only.",
        (f"while chunks were worked on: {_of_idle(loss, 'low_busy')}", *_cpu(loss, facts), *tried), advice, *lines,
    )  # fmt: skip


EXPLAIN: Mapping[str | None, Callable[[Loss, JobFacts], Finding]] = {
    "start_up": _start_up,
    "waiting_for_audio": _waiting_for_audio,
    "cpu_bound": _cpu_bound,
    "too_few_workers": _too_few_workers,
    "tail": _tail,
    "low_busy": _unknown,
}


def _cpu(loss: Loss, facts: JobFacts) -> list[str]:
    """Return how many cores the tasks kept busy, of how many; nothing where nobody measured it."""
    used = [task.cpu_mean_cores for task in loss.tasks if task.cpu_mean_cores is not None]
    if not used:
        host = [task.host_cpu_mean_percent for task in loss.tasks if task.host_cpu_mean_percent is not None]
        return [f"the machine's cores were {median(host):.0f} % busy (median)"] if host else []
    cores = [task.cpus for task in loss.tasks if task.cpus]
    granted = f" of {number(median(cores), 0)}" if cores else ""
    each = count(round(_places(loss, facts) / len(loss.tasks)), "worker")
    of_many = " (median of the tasks)" if len(used) > 1 else ""
    return [f"{number(median(used), 1)}{granted} cores busy, for {each}{of_many}"]


def _places(loss: Loss, facts: JobFacts) -> int:
    return max(1, round(sum(workers_of(task, facts) or 1.0 for task in loss.tasks)))


def _median_wall(loss: Loss) -> str:
    return duration(median(task.wall_s for task in loss.tasks))
