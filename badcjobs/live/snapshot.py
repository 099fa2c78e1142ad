"""The state of a run or a machine at one moment: tasks, devices, alerts, totals, and their JSON documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from badcjobs.model import CHARTED, METRICS, expected_end_ms, load_word, not_none
from badcjobs.paths import shell_line
from badcjobs.report.progress import progress_of, with_start_and_longest
from badcjobs.report.rules_tasks import ADVICE, USUAL_ADVICE
from badcjobs.report.summary import running_s
from badcjobs.report.verdict import TRY_AGAIN, Verdict, gpu_time, judge
from badcjobs.report.words import count, duration
from badcjobs.store.connect import grouped
from badcjobs.store.read_model import DeviceFacts, TaskAlert, TaskFacts

Document = dict[str, Any]
Tasks = Sequence[TaskFacts]
# The states that need attention come first.
STATES = ("killed", "failed", "silent", "stopped", "unbegun", "running", "waiting", "done")
_OF_A_TASK = (
    "name", "job_id", "array_index", "state", "procid", "restart", "node", "engine", "devices", "workers",
    "shard_index", "shard_count", "exit_code", "started_at_ms", "ended_at_ms", "heard_at_ms", "silent_after_s", "done",
    "failed", "before", "pending", "audio_done_s", "rate", "chunks_per_s", "ends_at_ms", "working_on", "cpu_percent",
    "memory_used_bytes", "memory_percent", "label", "chunks", "settled",
)  # fmt: skip
_OF_A_DEVICE = (
    "node", "index", "uuid", "token", "name", "backend", "task", "alive", "memory_total_bytes", "power_limit_w",
    "read_at_ms", "trail", "chunks", "chunks_done", "audio_done_s", "rate", "processes", "trouble", "reading", "means",
    "memory_percent", "load",
)  # fmt: skip
_OF_A_TRAIL = ("from_ms", "step_ms", *CHARTED)
_READ_MODEL_NAMES = {"failed": "failed_for_good", "audio_done_s": "audio_s"}  # names in the read model


def task_document(task: TaskFacts) -> Document:
    """Return the JSON document of a task."""
    values = {name: getattr(task, _READ_MODEL_NAMES.get(name, name)) for name in _OF_A_TASK}
    return values | {name: values[name] or None for name in ("node", "started_at_ms")}  # empty before it starts


def device_document(device: DeviceFacts) -> Document:
    """Return the JSON document of a device; unknown metrics are null."""
    of_run, means, processes = bool(device.task), device.means, device.processes
    others = {
        "token": device.token or None,
        "task": device.task or None,
        "trail": {name: getattr(device.trail, name) for name in _OF_A_TRAIL},  # asdict would copy every step
        "load": load_word(device.shown.utilization_percent),
        "chunks_done": device.work.done if of_run else None,
        "audio_done_s": device.work.audio_s if of_run else None,
        "processes": None if processes is None else [asdict(process) for process in processes],
        "reading": {metric: getattr(device.reading, metric) for metric in METRICS},
        "means": None if means is None else {metric: getattr(means, metric) for metric in CHARTED},
    }
    return {name: others[name] if name in others else getattr(device, name) for name in _OF_A_DEVICE}


def alert_document(alert: TaskAlert) -> Document:
    """Return the JSON document of an alert."""
    values = asdict(alert)
    del values["is_open"]
    return values


@dataclass(frozen=True, slots=True)
class Total:
    """The totals of a run or a machine."""

    states: Mapping[str, int] = field(default_factory=dict)  # state → number of array tasks
    devices: int = 0  # of running tasks, or all devices of this machine
    chunks: int | None = None  # of the source if known, else those listed so far; None: a machine, not a run
    chunks_known: bool = False  # whether ``chunks`` counts all chunks of the source
    parts: int | None = None  # of the source, one per task; None: unknown, or not divided
    parts_listed: int = 0  # parts whose chunks a task has listed
    done: int = 0
    failed: int = 0
    audio_done_s: float = 0.0
    rate: float | None = None  # seconds of audio per second, sum over the running tasks
    ends_at_ms: int | None = None
    ended_at_ms: int | None = None  # end of the last task; None: some run or wait, or none has started
    ran_s: float = 0.0  # time during which at least one task was running
    speed: float | None = None  # audio_done_s / ran_s, a multiple of real time
    standstill: str | None = None  # set when chunks are left and no task is running
    go_on: tuple[str, ...] = ()  # commands that resume the run, any one of them
    gpu_s: float = 0.0  # for each task, its running time × its devices
    utilization_percent: float | None = None  # mean over the devices that report it
    power_w: float | None = None  # sum over the devices that report it

    @property
    def settled(self) -> int:
        """Chunks that are done or have failed for good."""
        return self.done + self.failed

    @property
    def source_chunks(self) -> int | None:
        """All chunks of the source, an estimate until all parts are listed; None: unknown."""
        return self.chunks if self.chunks_known else self.chunks_in(self.parts or 0) or None

    def chunks_in(self, parts: int) -> int:
        """Estimate the chunks in this many parts; parts that are not listed count as equally large."""
        return round((self.chunks or 0) * parts / self.parts_listed) if self.parts_listed else 0

    @property
    def share(self) -> float | None:
        """Progress from 0 to 1; parts that are not listed count as equally large."""
        if not self.chunks:
            return None
        share = self.settled / self.chunks
        return share if self.chunks_known or not self.parts else share * self.parts_listed / self.parts

    def to_dict(self) -> Document:
        """Return the JSON document."""
        others = {"source_chunks": self.source_chunks, "settled": self.settled, "share": self.share}
        return {**asdict(self), **others, "load": load_word(self.utilization_percent)}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run or a machine at one moment."""

    at_ms: int
    title: str
    of_run: bool  # False: this machine
    tasks: tuple[TaskFacts, ...] = ()
    devices: tuple[DeviceFacts, ...] = ()
    alerts: tuple[TaskAlert, ...] = ()
    total: Total = field(default_factory=Total)
    remarks: tuple[str, ...] = ()  # files that could not be read, and why
    unread: int = 0  # files that have never been read yet, for lack of time
    files: int = 0  # databases of the run
    merged: bool = False  # the job database is up to date

    @property
    def reading(self) -> str | None:
        """How far reading has come, in words; None: everything has been read."""
        return f"reading {self.files - self.unread:,} of {self.files:,} task databases" if self.unread else None

    @property
    def findings(self) -> list[TaskAlert]:
        """What is wrong, one per cause, the worst first: alerts of one kind on several devices of a run are one."""
        if not self.of_run:
            return sorted(self.alerts, key=_order)
        found = []
        for alerts in grouped((alert.kind, alert) for alert in self.alerts).values():
            first, where = min(alerts, key=_order), {(alert.node, alert.device_index) for alert in alerts}
            if len(where) > 1:
                nodes = named(sorted({alert.node for alert in alerts if alert.node}))
                words = f"{count(len(where), 'GPU')} on {nodes}; for example, {first.message}"
                first = replace(first, message=words, node=None, task=None, device_index=None, device_uuid=None)
            found.append(replace(first, fix=first.fix or _FIXES.get(first.kind, "")))
        return sorted(found, key=_order)

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on a run so far; None: a machine, or no chunk is known yet."""
        total, states = self.total, self.total.states
        if not total.chunks:
            return None
        left = max(0, (total.source_chunks or total.chunks) - total.settled)
        running = bool(states.get("running") or self.unread or (states.get("waiting") and total.standstill is None))
        state, word, counts = judge(total.done, total.failed, left, running=running)
        counts += f" (estimate; {total.parts_listed:,} of {total.parts:,} parts listed)" if total.parts else ""
        counts += " (listed so far)" if running and not total.chunks_known and not total.parts else ""
        cost = f"{gpu_time(total.gpu_s)} in {duration(total.ran_s)}" if total.ran_s else ""
        look = "report" if self.title.endswith(".sqlite") else "export" if self.merged else "merge"
        command = shell_line(
            "badcjobs", look, Path(self.title), *(("-o", "detections.csv") if look == "export" else ())
        )
        words = "" if total.standstill or not total.failed else TRY_AGAIN
        steps = tuple((words, line) for line in total.go_on) or (() if running else (("", command),))
        return Verdict(state, word, counts, (total.done, total.failed, left), cost, "", steps)

    @property
    def verdict_document(self) -> Document | None:
        """The verdict for scripts; None: there is none."""
        found = self.verdict
        return None if found is None else {**found.to_dict(), "word": found.word, "counts": found.counts}

    def eta_s(self, ends_at_ms: int | None) -> float | None:
        """Return the seconds from this snapshot until a time."""
        return None if ends_at_ms is None else max(0.0, (ends_at_ms - self.at_ms) / 1000)

    def to_dict(self) -> Document:
        """Return the JSON document of ``badcjobs monitor --once --json``."""
        total = {**self.total.to_dict(), "eta_s": self.eta_s(self.total.ends_at_ms)}
        return {
            "version": 1,
            "at_ms": self.at_ms,
            "title": self.title,
            "of_run": self.of_run,
            "total": total,
            "tasks": [{**task_document(task), "eta_s": self.eta_s(task.ends_at_ms)} for task in self.tasks],
            "devices": list(map(device_document, self.devices)),
            "alerts": list(map(alert_document, self.alerts)),
            "findings": list(map(alert_document, self.findings)),
            "remarks": list(self.remarks),
            "unread": self.unread,
            "verdict": self.verdict_document,
        }


# --- what is wrong, and whether it works ------------------------------------------------------------------------------

_MOST_NAMED = 3
_AGAIN = "submit the same again after the array has ended; what is done is not repeated."
_NODE = "Report the node to the site, and exclude it from the next job."
_COOLING = "Ask the site to check the cooling of the node."
_FIXES = {  # by kind of alert
    "tasks_failed": "Read the log of one of them in the folder tasks.",
    "tasks_killed": f"To do the rest, {_AGAIN}",
    "tasks_silent": f"Unless still in squeue, {_AGAIN}",
    "lost": _NODE,
    "fault": _NODE,
    "ecc": f"Results from there may be wrong. {_NODE}",
    "thermal": _COOLING,
    "throttle_thermal": _COOLING,
    "throttle_power": "Ask the site about the power limit of the node.",
    "memory": "Run fewer workers per GPU, or make the chunks shorter.",
}


def _order(alert: TaskAlert) -> tuple[bool, bool, int]:
    """Put problems first, and those of the whole run before those of a device."""
    of_run = alert.kind.startswith(("chunks_", "tasks_"))
    return alert.severity != "critical", not of_run, 0 if of_run else alert.started_at_ms


def named(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def run_alerts(tasks: Tasks) -> list[TaskAlert]:
    """Return what is wrong with a run: failing chunks, and tasks that failed, were killed or are silent."""
    found = []
    failing = [task for task in tasks if task.errors or task.failed_for_good]
    if failing:
        many, examples = Counter[str](), dict[str, str]()
        for error_class, chunks, example in (error for task in failing for error in task.errors):
            many[error_class] += chunks
            examples.setdefault(error_class, example or "")
        failed = sum(task.failed_for_good for task in failing)
        words = "chunks failed" if failed else f"{count(many.total(), 'chunk')} left after a failed try"
        worst = ""
        for worst, times in many.most_common(1):  # the verdict has the number of all
            others = "".join(f", {other.replace('_', ' ')} {chunks:,}" for other, chunks in many.most_common()[1:])
            often = f" ({times:,} of {many.total():,}{others})" if others else ""
            example = "; ".join(examples[worst].splitlines())
            words += (
                f", {'most often ' if often else ''}with {worst.replace('_', ' ')}{often}{example and f': {example}'}"
            )
        alert = replace(_run_alert("chunks_failed", words, failing), fix=ADVICE.get(worst, USUAL_ADVICE))
        found.append(alert if failed else replace(alert, severity="warning"))
    for state, meaning in _TROUBLE_WORDS.items():
        which = [task for task in tasks if task.state == state and not (state == "failed" and task.failed_for_good)]
        if which:
            names = named([f"{task.label}{f' on {task.node}' if task.node else ''}" for task in which])
            found.append(_run_alert(f"tasks_{state}", f"{count(len(which), 'task')} {meaning}: {names}", which))
    return found


_TROUBLE_WORDS = {
    "failed": "failed",
    "killed": "killed from outside",
    "silent": "silent (the node is down, a disk hangs, or it was killed)",
}


def _run_alert(kind: str, message: str, tasks: Tasks) -> TaskAlert:
    since_ms = min(task.ended_at_ms or task.heard_at_ms or task.started_at_ms for task in tasks)
    return TaskAlert(kind, "critical", message, None, since_ms)


# --- totals -----------------------------------------------------------------------------------------------------------


def add_up(
    tasks: Tasks,
    devices: Sequence[DeviceFacts],
    every: Tasks = (),
    *,
    source_chunks: int | None = None,
    array_count: int = 0,
    all_listed: bool = False,
    alone: bool = False,
) -> Total:
    """Return the totals of a run; ``every`` holds all attempts, including those followed by another.

    ``array_count``: tasks of the array; 0: unknown. ``alone``: only one file, without the other parts of the source.

    A run may have divided its source several times, in different ways. Each division covers all of the source, so only
    the chunks of one division are counted.
    """
    cut = _cut_to_count(tasks)
    listed = sum(task.chunks for task in cut)
    parts, parts_listed = _parts(cut, array_count)
    known = all_listed or parts == parts_listed or (source_chunks is not None and source_chunks >= listed)
    in_parts = parts is not None and not known and not alone
    chunks = listed if source_chunks is None else max(listed, source_chunks)
    failed = sum(task.failed_for_good for task in cut)
    parts_done = map(_done_of_part, grouped((task.part, task) for task in every).values())
    done = max(sum(parts_done), sum(task.done + task.before for task in cut))
    audio_s, ran_s = sum(task.audio_s for task in every), running_s(every)
    over = bool(tasks) and not in_parts and all(task.begun and not task.alive for task in tasks)
    total = replace(
        total_of_devices([device for device in devices if device.alive]),
        states=dict(Counter(task.state for task in tasks)),
        chunks=chunks,
        chunks_known=known,
        parts=parts if in_parts else None,
        parts_listed=parts_listed if in_parts else 0,
        done=min(chunks - failed, done),
        failed=failed,
        audio_done_s=audio_s,
        rate=sum_of_known(task.rate for task in tasks if task.state == "running"),
        ended_at_ms=max(task.ended_at_ms or task.heard_at_ms or 0 for task in tasks) if over else None,
        ran_s=ran_s,
        gpu_s=sum(task.gpu_s for task in every),
        speed=audio_s / ran_s if audio_s and ran_s > 0 else None,
    )
    left = (total.source_chunks or chunks) - total.settled
    running = [progress_of(task) for task in tasks if task.state == "running"]
    end_ms = expected_end_ms(running, left, [task.chunks_per_s for task in tasks if task.chunks_per_s])
    if end_ms is not None:
        since_ms = max(progress.at_ms for progress in running)
        starts = left > sum(progress.pending for progress in running)  # for the rest
        end_ms = since_ms + round(1000 * with_start_and_longest((end_ms - since_ms) / 1000, every, starts=starts))
    return replace(total, ends_at_ms=end_ms)


def _done_of_part(attempts: Tasks) -> int:
    """Return the chunks done by all attempts at a part; of those done twice, the last attempt found only some done."""
    last, done = max(attempts, key=lambda task: task.age), sum(task.done for task in attempts)
    return min(done, last.done + last.before) if last.chunks else done


def total_of_devices(devices: Sequence[DeviceFacts]) -> Total:
    """Return the totals of devices, without tasks."""
    return Total(devices=len(devices), utilization_percent=mean_utilization(devices), power_w=total_power_w(devices))


def _cut_to_count(tasks: Tasks) -> Tasks:
    """Return the tasks of the latest division of the source, or of the one that lists more chunks so far."""
    cuts: dict[int | None, list[TaskFacts]] = {}
    for task in tasks:
        if task.begun or task.chunks:
            cuts.setdefault(task.shard_count, []).append(task)
    by_age = sorted(cuts.values(), key=lambda cut: max(task.started_at_ms for task in cut), reverse=True)
    return max(by_age, key=lambda cut: sum(task.chunks for task in cut), default=())  # of equal ones the latest


def _parts(cut: Tasks, array_count: int) -> tuple[int | None, int]:
    """Return into how many parts the source is divided (None: unknown), and how many of them these tasks have.

    If the source lists manifests, each array task has its own manifest, and ``shard_count`` refers to that manifest.
    """
    count = cut[0].shard_count if cut else None
    without_slurm = any(task.is_local for task in cut)  # then --shard selects the part
    if cut and array_count and not without_slurm and (count is None or count % array_count):
        return max(len(cut), array_count * (count or 1)), len(cut)
    return count, len({task.shard_index for task in cut})


def mean_utilization(devices: Iterable[DeviceFacts]) -> float | None:
    """Return the mean utilization over the devices that report it."""
    return mean_of_known(device.shown.utilization_percent for device in devices)


def total_power_w(devices: Iterable[DeviceFacts]) -> float | None:
    """Return the total power over the devices that report it."""
    return sum_of_known(device.shown.power_w for device in devices)


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None: all are unknown."""
    known = not_none(values)
    return sum(known) / len(known) if known else None


def sum_of_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None: all are unknown."""
    known = not_none(values)
    return sum(known) if known else None


def standstill(total: Total) -> str | None:
    """Describe what is left when no task is running; None: a task is running, none has started, or nothing is left."""
    states = total.states
    unbegun, silent = states.get("unbegun", 0), states.get("silent", 0)
    waiting = states.get("waiting", 0) + unbegun
    unlisted = max(0, (total.parts or 0) - total.parts_listed)
    absent = max(0, unlisted - waiting)  # parts without a task
    to_come = total.chunks_in(unlisted - absent)  # chunks of tasks that have not started
    left = (total.chunks or 0) - total.settled + to_come
    begun = sum(states.values()) - states.get("waiting", 0)  # includes tasks that an emulation did not start
    if states.get("running") or not begun or not (left or waiting or absent):
        return None
    facts = ["chunks are left"] if left else []  # the verdict has their number
    if absent:
        size = f" (~{count(total.chunks_in(absent), 'chunk')})" if total.chunks_in(absent) else ""
        facts.append(f"{absent:,} of {total.parts:,} parts of the source without a task{size}")
    if waiting:
        facts.append(f"{count(waiting, 'task')} not started{', and the emulation has ended' if unbegun else ''}")
    if silent:
        facts.append(f"{count(silent, 'task')} silent")
    return f"no task is running: {', '.join(facts)}"


def is_done(total: Total) -> bool:
    """Return whether a run is complete: all chunks are done, none has failed, and no task is running or waiting."""
    if not total.chunks or any(total.states.get(state) for state in ("running", "waiting", "unbegun")):
        return False
    return total.done >= total.chunks and total.parts_listed >= (total.parts or 0)
