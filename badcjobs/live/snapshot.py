"""The state of a run or a machine at one moment: tasks, devices, alerts, totals, and their JSON documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from badcjobs.model import CHARTED, METRICS, load_word, not_none
from badcjobs.paths import shell_line
from badcjobs.report.progress import expected_end_ms, with_start_and_longest
from badcjobs.report.rules_tasks import ADVICE, USUAL_ADVICE
from badcjobs.report.summary import running_s
from badcjobs.report.verdict import TRY_AGAIN, Steps, Verdict, judge
from badcjobs.store.connect import grouped
from badcjobs.store.read_model import DeviceFacts, TaskAlert, TaskFacts
from badcjobs.store.read_tasks import parse_settings
from badcjobs.words import count, duration, first_names, gpu_time

Document = dict[str, Any]
Tasks = Sequence[TaskFacts]
# The states that need attention come first.
STATES = ("killed", "failed", "silent", "stopped", "unbegun", "running", "waiting", "done")
_OF_A_TASK = (
    "name",
    "job_id",
    "array_index",
    "state",
    "node",
    "engine",
    "devices",
    "workers",
    "exit_code",
    "started_at_ms",
    "ended_at_ms",
    "heard_at_ms",
    "done",
    "failed",
    "before",
    "pending",
    "audio_done_s",
    "rate",
    "ends_at_ms",
    "working_on",
    "cpu_percent",
    "memory_percent",
    "label",
    "chunks",
    "settled",
)
_OF_A_DEVICE = (
    "node",
    "index",
    "uuid",
    "token",
    "name",
    "backend",
    "task",
    "alive",
    "memory_total_bytes",
    "power_limit_w",
    "read_at_ms",
    "chunks",
    "rate",
    "trouble",
    "memory_percent",
)
_READ_MODEL_NAMES = {"failed": "failed_for_good", "audio_done_s": "audio_s"}  # names in the read model


def task_document(task: TaskFacts) -> Document:
    """Return the JSON document of a task."""
    document = {name: getattr(task, _READ_MODEL_NAMES.get(name, name)) for name in _OF_A_TASK}
    for name in ("node", "started_at_ms"):  # empty before it starts
        document[name] = document[name] or None
    return document


def device_document(device: DeviceFacts) -> Document:
    """Return the JSON document of a device; unknown metrics are null."""
    means = device.means
    processes = device.processes
    work = None
    if device.task:
        work = device.work
    listed_processes = None
    if processes is not None:
        listed_processes = [asdict(process) for process in processes]
    return {
        **{name: getattr(device, name) for name in _OF_A_DEVICE},
        "token": device.token or None,
        "task": device.task or None,
        "trail": {name: getattr(device.trail, name) for name in ("from_ms", "step_ms", *CHARTED)},
        "chunks_done": work and work.done,
        "audio_done_s": work and work.audio_s,
        "processes": listed_processes,
        "reading": {metric: getattr(device.reading, metric) for metric in METRICS},
        "means": means and {metric: getattr(means, metric) for metric in CHARTED},
        "load": load_word(device.shown.utilization_percent),
    }


def alert_document(alert: TaskAlert) -> Document:
    """Return the JSON document of an alert."""
    values = asdict(alert)
    del values["is_open"]
    return values


@dataclass(frozen=True)
class Total:
    """The totals of a run or a machine."""

    states: Mapping[str, int] = field(default_factory=dict)  # state → number of array tasks
    devices: int = 0  # of running tasks, or all devices of this machine
    chunks: int | None = None  # of the source if known, else those listed so far; None: a machine, not a run
    source_chunks: int | None = None  # all chunks of the source, an estimate until all parts are listed; None: unknown
    parts: int | None = None  # of the source, one per task; None: all are listed, or their number is unknown
    parts_listed: int = 0  # parts whose chunks a task has listed
    done: int = 0
    failed: int = 0
    audio_done_s: float = 0.0
    with_overlaps: bool = False  # whether audio_done_s counts what two chunks have twice: before a merge
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
    def left(self) -> int:
        """Chunks that need work, as far as known."""
        return max(0, (self.source_chunks or self.chunks or 0) - self.settled)

    @property
    def share(self) -> float | None:
        """Progress from 0 to 1; None: no chunk is known."""
        chunks = self.source_chunks or self.chunks
        if not chunks:
            return None
        return self.settled / chunks

    def to_dict(self) -> Document:
        """Return the JSON document."""
        load = load_word(self.utilization_percent)
        return {**asdict(self), "settled": self.settled, "share": self.share, "load": load}


@dataclass(frozen=True)
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
        if not self.unread:
            return None
        return f"reading {self.files - self.unread:,} of {self.files:,} task databases"

    @property
    def findings(self) -> list[TaskAlert]:
        """What is wrong, one per cause, the worst first: alerts of one kind on several devices of a run are one."""
        if not self.of_run:
            return sorted(self.alerts, key=_order)
        by_kind = grouped((alert.kind, alert) for alert in self.alerts)
        return sorted((_one_finding(alerts) for alerts in by_kind.values()), key=_order)

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on a run so far; None: a machine, or no chunk is known yet."""
        total = self.total
        if not total.chunks:
            return None
        verdict = judge(total.done, total.failed, total.left, running=self._is_running)
        counts = verdict.counts
        if total.parts:
            counts += f" (estimate; {total.parts_listed:,} of {total.parts:,} parts listed)"
        elif self._is_running and total.source_chunks is None:
            counts += " (listed so far)"
        cost = ""
        if total.ran_s:
            cost = f"{gpu_time(total.gpu_s)} in {duration(total.ran_s)}"
        return verdict._replace(counts=counts, cost=cost, next=self.next_steps)

    @property
    def _is_running(self) -> bool:
        states = self.total.states
        waits = states.get("waiting") and self.total.standstill is None
        return bool(states.get("running") or self.unread or waits)

    @property
    def next_steps(self) -> Steps:
        """What to do next, each with an explanation: commands that resume the run, or one that shows results."""
        total = self.total
        if total.go_on:
            explanation = ""
            if total.failed and not total.standstill:
                explanation = TRY_AGAIN
            return tuple((explanation, command) for command in total.go_on)
        if self._is_running or not total.chunks:
            return ()
        path = Path(self.title)
        if self.title.endswith(".sqlite"):
            return (("", shell_line("badcjobs", "report", path)),)
        if self.merged:
            return (("", shell_line("badcjobs", "export", path, "-o", "detections.csv")),)
        return (("", shell_line("badcjobs", "merge", path)),)

    def eta_s(self, ends_at_ms: int | None) -> float | None:
        """Return the seconds from this snapshot until a time."""
        return ends_at_ms and max(0.0, (ends_at_ms - self.at_ms) / 1000)

    def state(self) -> Document:
        """Return the JSON document without tasks and devices."""
        verdict = self.verdict
        return {
            "at_ms": self.at_ms,
            "title": self.title,
            "of_run": self.of_run,
            "verdict": verdict and {**verdict.to_dict(), "word": verdict.word, "counts": verdict.counts},
            "reading": self.reading,
            "total": self.total.to_dict(),
            "alerts": list(map(alert_document, self.alerts)),
            "findings": list(map(alert_document, self.findings)),
            "remarks": list(self.remarks),
        }

    def to_dict(self) -> Document:
        """Return the JSON document of ``badcjobs monitor --once --json``."""
        tasks = list(map(task_document, self.tasks))
        devices = list(map(device_document, self.devices))
        return {"version": 1, **self.state(), "tasks": tasks, "devices": devices}


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
    return alert.severity != "critical", alert.node is not None, alert.started_at_ms


def _one_finding(alerts: Sequence[TaskAlert]) -> TaskAlert:
    """Return alerts of one kind as one, with what to do."""
    worst = min(alerts, key=_order)
    devices = {(alert.node, alert.device_index) for alert in alerts}
    if len(devices) > 1:
        nodes = sorted({alert.node for alert in alerts if alert.node})
        where = f"{count(len(devices), 'GPU')} on {first_names(nodes, _MOST_NAMED)}"
        message = f"{where}; for example, {worst.message}"
        worst = replace(
            worst,
            message=message,
            node=None,
            task=None,
            device_index=None,
            device_uuid=None,
        )
    return replace(worst, fix=worst.fix or _FIXES.get(worst.kind, ""))


def run_alerts(tasks: Tasks) -> list[TaskAlert]:
    """Return what is wrong with a run: failing chunks, and tasks that failed, were killed or are silent."""
    alerts = []
    failing = [task for task in tasks if task.errors or task.failed_for_good]
    if failing:
        alerts.append(_failing_chunks(failing))
    for state, meaning in _TROUBLE_WORDS.items():
        troubled = [task for task in tasks if task.state == state]
        if state == "failed":
            troubled = [task for task in troubled if not task.failed_for_good]
        if troubled:
            names = [f"{task.label} on {task.node}" if task.node else task.label for task in troubled]
            message = f"{count(len(troubled), 'task')} {meaning}: {first_names(names, _MOST_NAMED)}"
            alerts.append(_run_alert(f"tasks_{state}", message, troubled))
    return alerts


def _failing_chunks(failing: Tasks) -> TaskAlert:
    """Return what fails most often, with an example; the verdict has the number of all."""
    times = Counter[str]()
    examples: dict[str, str] = {}
    for task in failing:
        for error_class, chunks, example in task.errors:
            times[error_class] += chunks
            examples.setdefault(error_class, example or "")
    severity = "critical"
    message = "chunks failed"
    if not any(task.failed_for_good for task in failing):
        severity = "warning"
        message = f"{count(times.total(), 'chunk')} left after a failed try"
    fix = USUAL_ADVICE
    if times:
        [(worst, _)] = times.most_common(1)
        fix = ADVICE.get(worst, USUAL_ADVICE)
        reason = worst.replace("_", " ")
        message += f", most often with {reason}" if len(times) > 1 else f", with {reason}"
        if examples[worst]:
            message += f": {'; '.join(examples[worst].splitlines())}"
    return replace(_run_alert("chunks_failed", message, failing), severity=severity, fix=fix)


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
) -> Total:
    """Return the totals of a run; ``every`` holds all attempts, including those followed by another.

    ``array_count``: tasks of the array; 0: unknown. ``all_listed``: no other parts of the source are of interest.
    A run may have divided its source several times, in different ways. Each division covers all of the source, so only
    the chunks of one division are counted.
    """
    listed_last = {task.part: task for task in sorted(every, key=lambda task: task.age) if task.chunks}
    division = [listed_last.get(task.part, task) for task in _latest_division(tasks)]
    listed = sum(task.chunks for task in division)
    parts, parts_listed = _parts(division, array_count)
    chunks = max(listed, source_chunks or 0)
    in_all: int | None = None
    if all_listed or parts == parts_listed or (source_chunks is not None and source_chunks >= listed):
        in_all = chunks
        parts = None
    elif parts is not None and parts_listed:
        in_all = round(chunks * parts / parts_listed)
    total = replace(
        _total_of_work(tasks, devices, every),
        chunks=chunks,
        source_chunks=in_all,
        parts=parts,
        parts_listed=parts_listed if parts else 0,
        done=sum(task.done + task.before for task in division),
        failed=sum(task.failed_for_good for task in division),
        ended_at_ms=None if parts else _end_of_last(tasks),
    )
    return replace(total, ends_at_ms=_expected_end_ms(total, tasks, every))


def _total_of_work(tasks: Tasks, devices: Sequence[DeviceFacts], every: Tasks) -> Total:
    """Return the totals that do not depend on how the source was divided."""
    audio_s = sum(task.audio_s for task in every)
    ran_s = running_s(every)
    return replace(
        total_of_devices([device for device in devices if device.alive]),
        states=dict(Counter(task.state for task in tasks)),
        audio_done_s=audio_s,
        with_overlaps=any(parse_settings(settings).get("overlap") for settings in {task.settings for task in every}),
        rate=sum_of_known(task.rate for task in tasks if task.state == "running"),
        ran_s=ran_s,
        gpu_s=sum(task.gpu_s for task in every),
        speed=audio_s / ran_s if audio_s and ran_s else None,
    )


def _expected_end_ms(total: Total, tasks: Tasks, every: Tasks) -> int | None:
    """Return when the last chunk is expected to be done; None: not known, or no task is running."""
    end_ms = expected_end_ms(tasks, total.left)
    if end_ms is None:
        return None
    running = [task for task in tasks if task.state == "running"]
    since_ms = max(task.counted_at_ms for task in running)
    starts = total.left > sum(task.pending for task in running)  # for the rest
    lasts_s = with_start_and_longest((end_ms - since_ms) / 1000, every, starts=starts)
    return since_ms + round(1000 * lasts_s)


def _end_of_last(tasks: Tasks) -> int | None:
    """Return when the last task ended; None: some run or wait, or none has started."""
    if not tasks or any(task.alive or not task.begun for task in tasks):
        return None
    return max(task.ended_at_ms or task.heard_at_ms or 0 for task in tasks)


def total_of_devices(devices: Sequence[DeviceFacts]) -> Total:
    """Return the totals of devices, without tasks."""
    power_w = sum_of_known(device.shown.power_w for device in devices)
    return Total(devices=len(devices), utilization_percent=mean_utilization(devices), power_w=power_w)


def _latest_division(tasks: Tasks) -> Tasks:
    """Return the tasks of the division of the source that lists most chunks so far; of equal ones the latest."""
    divisions = grouped((task.shard_count, task) for task in tasks if task.begun or task.chunks)

    def listed_and_last_start_ms(division: Tasks) -> tuple[int, int]:
        return sum(task.chunks for task in division), max(task.started_at_ms for task in division)

    return max(divisions.values(), key=listed_and_last_start_ms, default=())


def _parts(division: Tasks, array_count: int) -> tuple[int | None, int]:
    """Return into how many parts the source is divided (None: unknown), and how many of them these tasks have.

    If the source lists manifests, each array task has its own manifest, and ``shard_count`` refers to that manifest.
    """
    if not division:
        return None, 0
    shards = division[0].shard_count
    without_slurm = any(task.is_local for task in division)  # then --shard selects the part
    if array_count and not without_slurm and (shards is None or shards % array_count):
        return max(len(division), array_count * (shards or 1)), len(division)
    return shards, len({task.shard_index for task in division})


def mean_utilization(devices: Iterable[DeviceFacts]) -> float | None:
    """Return the mean utilization over the devices that report it."""
    return mean_of_known(device.shown.utilization_percent for device in devices)


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None: all are unknown."""
    numbers = not_none(values)
    if not numbers:
        return None
    return sum(numbers) / len(numbers)


def sum_of_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None: all are unknown."""
    numbers = not_none(values)
    if not numbers:
        return None
    return sum(numbers)


def has_more_to_do(total: Total) -> bool:
    """Return whether chunks, tasks or parts of the source are left; False if no task has started."""
    states = total.states
    if set(states) <= {"waiting"}:
        return False
    waiting = states.get("waiting", 0) + states.get("unbegun", 0)
    has_parts_without_task = (total.parts or 0) > total.parts_listed + waiting
    return bool(total.left or waiting or has_parts_without_task)


def is_done(total: Total) -> bool:
    """Return whether a run is complete: all chunks are done, none has failed, and no task is running or waiting."""
    if not total.chunks:
        return False
    if any(total.states.get(state) for state in ("running", "waiting", "unbegun")):
        return False
    return total.done >= total.chunks and total.parts_listed >= (total.parts or 0)
