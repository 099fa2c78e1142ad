"""Jobs from lines of text: ``task(pending=9), device(samples=0), error('bad_audio', 3, 1, 0, 2, ''), job(tries=5)``.

Each task and device has what differs from a usual one; times (``_ms``) are from the start. Of ``alert``, ``error``,
``gap``, ``decision``, ``foreign`` and ``failed`` there may be many; ``seen`` is when the job is looked at, in seconds.
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rooms import store
from rooms.model import NameGaps, PlaceCounts, Reading
from rooms.report import PROBLEM, WARNING, Finding, Summary, describe_chunks, summarize
from rooms.store import DeviceFacts, JobFacts, StateTime, TaskFacts
from support.task_files import START_MS

_LISTS = {
    "alert": ("alerts", store.AlertFacts), "error": ("errors", store.ErrorFacts), "gap": ("gaps", store.GapFacts),
    "decision": ("decisions", store.DecisionFacts), "foreign": ("foreign", store.ForeignProcess),
}  # fmt: skip
_PARTS = {"merged": store.Freshness, "cost": store.CostFacts, "recording_names": NameGaps, "places": PlaceCounts}


def spent(busy: float, **seconds: float) -> dict[str, StateTime]:
    """Return the times of a device that is busy for this share of its work, and never else."""
    return {name: StateTime(s, s, s * busy if name == "working" else 0.0, None) for name, s in seconds.items()}


def failed(number: int, error_class: str = "bad_audio", error: str = "no header", **more: str) -> list[Any]:
    return [store.FailedChunk(f"r{n}", more.get("chunk", f"r{n}"), more.get("status", "failed"), 3, error_class, error)
            for n in range(number)]  # fmt: skip


def calls(line: str) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Yield the name, the arguments and the named values of each call in a line."""
    for call in ast.parse(f"({line},)", mode="eval").body.elts:  # type: ignore[attr-defined]
        named = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
        yield call.func.id, [ast.literal_eval(one) for one in call.args], named


@dataclass(frozen=True)
class Lines:
    """What lines of facts are read with: usual tasks, devices and jobs, and makers of larger ones, by name."""

    tasks: Mapping[str, TaskFacts]
    devices: Mapping[str, DeviceFacts]
    usual: Callable[[Sequence[TaskFacts], Sequence[DeviceFacts]], JobFacts]
    proof: store.Completeness
    is_proved: bool = False  # also where a line does not say so
    missing: tuple[int, ...] = ()
    large: Mapping[str, Callable[..., JobFacts]] = field(default_factory=dict)

    def read(self, line: str) -> Summary:
        """Return the job that a line tells."""
        facts, tasks, devices, more = None, list[TaskFacts](), list[DeviceFacts](), dict[str, Any]()
        proof, missing, now_ms = self.proof if self.is_proved else None, self.missing, None
        for name, args, given in calls(line):
            values = moments(given)
            if name in self.tasks:
                tasks.append(replace(self.tasks[name], **values))
            elif name == "many":
                tasks += self.many(*args, **values)
            elif name in self.devices:
                devices.append(make_device(self.devices[name], values))
            elif name in self.large:
                facts = self.large[name](*args, **values)
            elif name in _LISTS:
                more[_LISTS[name][0]] = (*more.get(_LISTS[name][0], ()), _LISTS[name][1](*args))
            elif name == "failed":
                more["failed"] = (*more.get("failed", ()), *failed(*args, **values))
            elif name in _PARTS:
                more[name] = _PARTS[name](*args, **values)
            elif name == "proof":
                proof = replace(self.proof, **values)
                missing = values.get("missing_indices", missing)
            elif name == "missing":
                missing = tuple(args)
            elif name == "seen":
                now_ms = START_MS + round(1000 * args[0])
            else:
                assert name == "job", line
                more |= values
        if facts is None:
            facts = self.usual(tasks, devices)
        else:
            facts = replace(facts, tasks=tuple(tasks) or facts.tasks, devices=tuple(devices) or facts.devices)
        facts = replace(facts, **more)
        return summarize(facts, replace(proof or describe_chunks(facts), missing_indices=missing), now_ms)

    def many(self, kind: str, number: int, **changes: Any) -> list[TaskFacts]:
        return [replace(self.tasks[kind], name=f"1_{n}", array_index=n, **changes) for n in range(number)]


def moments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of which the times are no longer from the start."""
    return {name: value + START_MS if name.endswith("_ms") and value is not None else value
            for name, value in values.items()}  # fmt: skip


def make_device(device: DeviceFacts, values: Mapping[str, Any]) -> DeviceFacts:
    made = dict(values)
    if "work" in made:
        made["work"] = replace(device.work, **moments(made["work"]))
    if "metrics" in made:
        made["metrics"] = {name: store.MetricFacts(*figures) for name, figures in made["metrics"].items()}
    if states := made.get("states"):
        made["states"] = spent(**states) if "busy" in states else {n: StateTime(*s) for n, s in states.items()}
    return replace(device, **made)


# --- a job in which everything that a report can say is there ---------------------------------------------------------

HOUR_MS = 3_600_000
NASTY = 'rec<script>|`x`\x1b[31m"\n\\'

TASK = TaskFacts(
    "4821_0.r0.gpu1", "4821", 0, 0, "gpu1", 4, None, None, 1, 2, START_MS, START_MS + HOUR_MS, 100, 1, 40, 360_000.0,
    engine="hawkears", workers=2,
)  # fmt: skip


def device(index: int = 0, task: str = TASK.name) -> DeviceFacts:
    """Return a device of which the counter says 2 % more than the readings of power do."""
    middles = {"utilization_percent": 60.0, "busy_percent": 55.0, "memory_used_bytes": 6 << 30, "temperature_c": 54.0,
               "power_w": 200.0}  # fmt: skip
    return DeviceFacts(
        task=task, node="gpu1", index=index, uuid=f"GPU-{index}", token=str(index), name="Tesla V100-SXM2-16GB",
        backend="nvml", memory_total_bytes=16 << 30, samples=3600, memory_peak_bytes=9 << 30, temperature_max_c=81,
        power_mean_w=200.0, energy_counter_j=734_400.0, energy_counter_span_s=3590.0, span_s=3600.0, gap_s=12.0,
        energy_integrated_j=720_000.0, busy_mean_percent=55.0,
        device_id=index + 1, power_limit_w=300.0, slowdown_c=87,
        states={
            "working": StateTime(2700.0, 2700.0, 1900.0, 630_000.0), "failed": StateTime(100.0, 100.0, 50.0, 20_000.0),
            "start_up": StateTime(300.0, 300.0, 10.0, 30_000.0), "waiting": StateTime(400.0, 400.0, 0.0, 32_000.0),
            "idle": StateTime(100.0, 100.0, None, 8_000.0),
        },
        metrics={name: store.MetricFacts(3600, 0.0, x, x, x * 1.2, x * 1.5) for name, x in middles.items()},
        throttled={"gpu_idle": 900, "sw_power_cap": 30},
        work=store.DeviceWork(1, 50, 1, 0, 180_000.0, 50.0, 60.0, 80.0),
        spark=(0, 30, None, 99, 100),
        read_at_ms=START_MS + HOUR_MS, reading=Reading(utilization_percent=70, power_w=210.5, temperature_c=66),
    )  # fmt: skip


JOB = JobFacts(
    tasks=(TASK,), devices=(device(0), device(1)), chunks={"done": 100, "failed": 1, "pending": 40},
    audio_done_s=360_000.0, done_of_unknown_length=0, tries=103,
    failed=(store.FailedChunk(NASTY, "c<b>", "failed", 3, "bad_audio", "first line\nthe |last| one"),),
    labels=(("OVEN", "Ovenbird", 900), (NASTY, None, 2)),
    gaps=(store.GapFacts("the recorder was late", None, 2, 12.0, 1),),
    file_remarks=(("tasks/4821_1.r0.gpu2.sqlite", "skipped: 0 bytes"),),
    last_settings={"engine": "hawkears", "workers_per_gpu": "1", "out": "july", "alerts": {"idle_s": 300.0}},
    audio_left_s=144_000.0,
    errors=(store.ErrorFacts("bad_audio", 3, 1, 0, 2, "the last one"),),
    alerts=(store.AlertFacts("thermal", "warning", 3, 2, 60.0, 84.0, 83.0, "GPU 0 is hot"),),
    cost=store.CostFacts(100, 54.0, 50.0, 60.0, 80.0, 38.0, 12_600.0, 12_000.0, 15_000.0, 20_000.0, 100),
    cpu_tries=2, cpu_audio_s=7200.0, durations={50_000: 60, 60_000: 38, 80_000: 2},
)  # fmt: skip
PROOF = store.Completeness(
    201, None, 141, 100, 1, 0, 40, 0, not_listed=60, strangers=0, missing_indices=(3,),
    finish=("sbatch --array=0,3 …", "badcjobs run m.csv --out july"), finish_by="script",
)  # fmt: skip
FINDINGS = (
    Finding(
        "unused_gpus", PROBLEM, "One of the GPUs was never used.", ("0 of 51 tries ran on GPU 1",),
        "Ask for one GPU per task.", ("#SBATCH --gpus-per-task=1",), tuple(f"task {n}" for n in range(9)),
    ),
    Finding("start_up", WARNING, "Starting up took long.", ("8 % of 2.0 GPU-hours",), "Give each task more chunks."),
)  # fmt: skip
