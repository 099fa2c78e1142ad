"""Progress as people and scripts read it: the heartbeat line letter by letter, and what each device is at."""

from __future__ import annotations

from pathlib import Path

from rooms.model import Allocation, Chunk, ChunkResult, Device, TaskKey
from rooms.store import TaskWriter
from rooms.task import DeviceWorkNow, TaskProgress, count_progress, heartbeat_line
from support.pages import Pages

LOAD = (12.4, 38.6, 85.0)
NOW = 850 / 7  # seconds since the start; 840 of 960 chunks are left, so this takes seven times as long again
# Chunks settled, of how many, seconds of audio, seconds since the start; and what else is known.
PROGRESS = [
    TaskProgress(120, 960, 412 * NOW, NOW), TaskProgress(10, 10, 1.0, 100.0), TaskProgress(1, 2, 59.6, 59.6),
    TaskProgress(1, 2, 3599.6, 3599.6), TaskProgress(1, 101, 3600.0, 3600.0), TaskProgress(5, 10, 0.0, 0.0),
    TaskProgress(5, 10, 1.0, 0.0), TaskProgress(5, 10, 0.0, 60.0), TaskProgress(1, 3, 60.0, 60.0, start_up_s=50),
    TaskProgress(1, 3, 60.0, 60.0, start_up_s=70), TaskProgress(9, 10, 90.0, 60.0, retrying=1),
    TaskProgress(8, 10, 90.0, 60.0, retrying=1), TaskProgress(10, 10, 90.0, 60.0, retrying=1),
    *(TaskProgress(1, 2, 60 * rate, 60.0) for rate in (1.0, 0.999, 0.45, 0.1234, 0.0042, 1e-9)),
]  # fmt: skip


def test_the_heartbeat_line_is_as_the_contract_shows_it_and_what_nobody_knows_is_no_zero(pages: Pages) -> None:
    lines = [heartbeat_line(progress, LOAD, 4) for progress in PROGRESS]
    lines.append(heartbeat_line(TaskProgress(0, 960, 0.0, 30.0), (None, None, None), 0))
    lines.append(heartbeat_line(TaskProgress(1, 2, 1.0, 1.0), (0.0, 38.6, 0.0), 1))
    pages({"heartbeats.txt": "\n".join(lines)})


def test_progress_counts_what_is_settled_and_what_each_device_is_at(tmp_path: Path) -> None:
    writer = TaskWriter(tmp_path / "wrapper.sqlite", TaskKey("4821", 0, 0, "gpu1", started_at_ms=1000))
    writer.begin_task(Allocation(True, "4821", "gpu1"), started_at_ms=1000, telemetry=True, pid=1, version="1")
    chunks = [Chunk("r", f"c{n}", "a.wav", "/a.wav", 0, 30_000) for n in range(7)]
    writer.fill(chunks, lambda rows: None)
    assert count_progress(writer, 5.0) == TaskProgress(0, 7, 0.0, 5.0, devices=(DeviceWorkNow("CPU", 0, 0.0),))
    devices = (Device("0", "test", 0, "GPU-0", "Tesla V100"), Device("MIG-1", "test", uuid="MIG-1"))
    writer.add_devices(devices)
    places = [writer.device_id(device) for device in devices]
    ends = [("done", 0), ("done", 0), ("failed", 0), ("poison", 1), ("pending", 1), ("done", 1)]
    for number, (chunk, (status, place)) in enumerate(zip(chunks, ends, strict=False)):
        tried = {"try_number": 1, "worker_id": 1, "device_id": places[place]}
        writer.attempt_started(chunk, **tried, at_ms=3000)  # type: ignore[arg-type]
        if number < 5:
            error_class = None if status == "done" else "bad_audio"
            result = ChunkResult(chunk, 3000, 4000, audio_s=30.0, error_class=error_class)
            writer.attempt_ended(result, status=status, **tried)  # type: ignore[arg-type]
    progress = count_progress(writer, 60.0, devices)
    assert progress == TaskProgress(
        4, 7, 60.0, 60.0, start_up_s=2.0, failed=2, retrying=1,
        devices=(DeviceWorkNow("GPU 0  Tesla V100", 2, 60.0), DeviceWorkNow("GPU MIG-1", 0, 0.0, ("r/c5",))),
    )  # fmt: skip
    assert (progress.rate, progress.eta_s) == (1.0, 58 * 3 / 4)
