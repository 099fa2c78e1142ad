"""Facts of a job in which everything that a report can say is there, for the tests of its forms."""

from __future__ import annotations

from rooms.model import Reading
from rooms.report import PROBLEM, WARNING, Finding
from rooms.store import (
    AlertFacts,
    Completeness,
    CostFacts,
    DeviceFacts,
    DeviceWork,
    ErrorFacts,
    FailedChunk,
    GapFacts,
    JobFacts,
    MetricFacts,
    StateTime,
    TaskFacts,
)

START_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
NASTY = 'rec<script>|`x`\x1b[31m"\n\\'

TASK = TaskFacts(
    "4821_0.r0.gpu1", "4821", 0, 0, "gpu1", 4, None, None, 1, 2, START_MS, START_MS + HOUR_MS, 100, 1, 40, 360_000.0,
    engine="hawkears", workers=2,
)  # fmt: skip


def metric(middle: float) -> MetricFacts:
    return MetricFacts(3600, 0.0, middle, middle, middle * 1.2, middle * 1.5)


def device(index: int = 0, task: str = TASK.name) -> DeviceFacts:
    """Return a device of which the counter says 2 % more than the readings of power do."""
    return DeviceFacts(
        task=task, node="gpu1", index=index, uuid=f"GPU-{index}", token=str(index), name="Tesla V100-SXM2-16GB",
        backend="nvml", memory_total_bytes=16 << 30, samples=3600, memory_peak_bytes=9 << 30, temperature_max_c=81,
        power_mean_w=200.0, energy_counter_j=734_400.0, energy_counter_span_s=3590.0, span_s=3600.0, gap_s=12.0,
        energy_integrated_j=720_000.0, busy_mean_percent=55.0, utilization_counts={0: 900, 70: 2700},
        device_id=index + 1, power_limit_w=300.0, slowdown_c=87,
        states={
            "working": StateTime(2700.0, 2700.0, 1900.0, 630_000.0),
            "failed": StateTime(100.0, 100.0, 50.0, 20_000.0),
            "start_up": StateTime(300.0, 300.0, 10.0, 30_000.0),
            "waiting": StateTime(400.0, 400.0, 0.0, 32_000.0),
            "idle": StateTime(100.0, 100.0, None, 8_000.0),
        },
        metrics={
            "utilization_percent": metric(60.0), "busy_percent": metric(55.0), "memory_used_bytes": metric(6 << 30),
            "temperature_c": metric(54.0), "power_w": metric(200.0),
        },
        throttled={"gpu_idle": 900, "sw_power_cap": 30},
        work=DeviceWork(1, 50, 1, 0, 180_000.0, 50.0, 60.0, 80.0),
        spark=(0.0, 30.0, None, 99.0, 100.0),
        read_at_ms=START_MS + HOUR_MS, reading=Reading(utilization_percent=70, power_w=210.5, temperature_c=66),
    )  # fmt: skip


JOB = JobFacts(
    tasks=(TASK,),
    devices=(device(0), device(1)),
    chunks={"done": 100, "failed": 1, "pending": 40},
    audio_done_s=360_000.0,
    done_of_unknown_length=0,
    tries=103,
    failed=(FailedChunk(NASTY, "c<b>", "failed", 3, "bad_audio", "first line\nthe |last| one"),),
    labels=(("OVEN", "Ovenbird", 900), (NASTY, None, 2)),
    gaps=(GapFacts("the recorder was late", None, 2, 12.0, 1),),
    file_remarks=(("tasks/4821_1.r0.gpu2.sqlite", "skipped: 0 bytes"),),
    last_settings={"engine": "hawkears", "workers_per_gpu": "1", "out": "july", "alerts": {"idle_s": 300.0}},
    audio_left_s=144_000.0,
    errors=(ErrorFacts("bad_audio", 3, 1, 0, 2, "the last one"),),
    alerts=(AlertFacts("thermal", "warning", 3, 2, 60.0, 84.0, 83.0, "GPU 0 is hot"),),
    cost=CostFacts(100, 54.0, 50.0, 60.0, 80.0, 38.0, 12_600.0, 12_000.0, 15_000.0, 20_000.0, 100),
    cpu_tries=2,
    cpu_audio_s=7200.0,
    durations={50_000: 60, 60_000: 38, 80_000: 2},
)
PROOF = Completeness(
    201, None, 141, 100, 1, 0, 40, 0, not_listed=60, strangers=0, missing_indices=(3,),
    finish=("sbatch --array=0,3 …", "badcjobs run m.csv --out july"),
)  # fmt: skip
FINDINGS = (
    Finding(
        "unused_gpus", PROBLEM, "One of the GPUs was never used.", ("0 of 51 tries ran on GPU 1",),
        "Ask for one GPU per task.", ("#SBATCH --gpus-per-task=1",), tuple(f"task {n}" for n in range(9)),
    ),
    Finding("start_up", WARNING, "Starting up took long.", ("8 % of 2.0 GPU-hours",), "Give each task more chunks."),
)  # fmt: skip
