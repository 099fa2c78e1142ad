"""The accounts of a task as they are published: of one that runs, of one that was killed, of one that has ended."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from rooms.model import Allocation, ChunkResult, HostReading, Reading, TaskKey
from rooms.root import SystemClock
from rooms.store import MergeOrder, TaskWriter, merge, publish, read_job
from rooms.telemetry import TelemetryWriter
from support.databases import query
from support.task_files import START_MS, make_chunk, make_device

KEY = TaskKey("4821", 0, 0, "gpu1")
ALERT = {"kind": "thermal", "severity": "warning", "started_at_ms": START_MS + 2000, "peak": 90.0, "threshold": 83.0}


def publish_task(run: Path, *, verdict: str | None = None, worker_died: bool = False) -> Path:
    """Publish ten seconds of a task: one chunk done in the second to the fourth, one begun in the fifth."""
    wrapper, recorder, device = run / "wrapper.sqlite", run / "recorder.sqlite", make_device()
    with closing(TaskWriter(wrapper, KEY)) as writer:
        allocation = Allocation(True, "4821", "gpu1", array_index=0)
        writer.begin_task(allocation, started_at_ms=START_MS, pid=1, version="1", engine="demo", telemetry=True)
        writer.add_devices([device])
        writer.update_task(devices=1, workers=1)
        writer.fill([make_chunk("a"), make_chunk("b")], lambda rows: None)
        on = writer.device_id(device)
        worker = writer.worker_started(device_id=on, pid=7, engine="demo", at_ms=START_MS + 1000)
        result = ChunkResult(make_chunk("a"), START_MS + 2000, START_MS + 4000, (), 30.0)
        writer.attempt_ended(result, status="done", try_number=1, worker_id=worker, device_id=on)
        begun = START_MS + 5000
        writer.attempt_started(make_chunk("b"), try_number=1, worker_id=worker, device_id=on, at_ms=begun)
        if worker_died:
            writer.worker_ended(worker, at_ms=START_MS + 8000, exit_code=-9)
        with closing(TelemetryWriter(recorder, KEY.task_id)) as telemetry:
            for second in range(11):
                reading = Reading(utilization_percent=80, power_w=100.0, throttle_reasons=0x41)
                telemetry.write_tick(START_MS + second * 1000, [(on, reading)], HostReading(5.0, 2**30, 2**33))
            telemetry.write_alert({**ALERT, "device_id": on, "ended_at_ms": None, "message": "at 85 °C"})
            telemetry.write_alert({**ALERT, "device_id": on, "ended_at_ms": START_MS + 3000, "severity": "critical",
                                   "message": "at 95 °C", "peak": 95.0})  # fmt: skip
        (run / "tasks").mkdir()
        target = run / "tasks" / f"{KEY.name}.sqlite"
        closing_words = None if verdict is None else {"verdict": verdict}
        publish([wrapper, recorder], target, closing=closing_words)
    return target


def states(path: Path) -> dict[str, float]:
    return {str(state): float(str(seconds)) for state, seconds in query(path, "SELECT state, total_s FROM device_time")}


def test_what_a_running_task_is_at_is_work_and_not_lost(tmp_path: Path) -> None:
    path = publish_task(tmp_path)
    assert states(path) == {"start_up": 2.0, "working": 7.0, "waiting": 1.0}
    assert query(path, "SELECT state, gpu_s FROM attempt_cost") == [("working", 2.0), ("working", 5.0)]


def test_what_a_killed_task_was_at_is_lost(tmp_path: Path) -> None:
    path = publish_task(tmp_path, verdict="killed")
    assert states(path) == {"start_up": 2.0, "working": 2.0, "waiting": 1.0, "lost": 5.0}


def test_what_a_dead_worker_of_a_running_task_was_at_is_lost_up_to_its_death(tmp_path: Path) -> None:
    path = publish_task(tmp_path, worker_died=True)
    assert states(path) == {"start_up": 2.0, "working": 2.0, "waiting": 1.0, "lost": 3.0, "idle": 2.0}


@pytest.mark.parametrize(("verdict", "lost"), [(None, 0), ("killed", 1)])
def test_a_job_counts_tries_that_are_under_way_neither_as_lost_nor_as_done(
    tmp_path: Path, verdict: str | None, lost: int
) -> None:
    publish_task(tmp_path, verdict=verdict)
    merge(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock())
    job = read_job(tmp_path / "job.sqlite")
    (device,) = job.devices
    assert (device.work.done, device.work.lost) == (1, lost)
    assert (job.cost.tries, job.cost.gpu_s_mean, job.cost.energy_j_mean) == (1, 2.0, pytest.approx(200.0))
    assert device.throttled == {"gpu_idle": 11, "hw_thermal_slowdown": 11}


def test_an_alert_that_never_ended_lasted_as_long_as_anybody_looked_and_the_worst_one_speaks(tmp_path: Path) -> None:
    publish_task(tmp_path)
    merge(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock())
    (alert,) = read_job(tmp_path / "job.sqlite").alerts
    assert (alert.severity, alert.alerts, alert.longest_s, alert.peak) == ("critical", 2, 8.0, 95.0)
    assert alert.example == "at 95 °C"
