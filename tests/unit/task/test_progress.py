"""Progress as people and scripts read it: the heartbeat line letter by letter, and what each device is at."""

from __future__ import annotations

from pathlib import Path

from rooms.model import Allocation, Chunk, ChunkResult, Device, TaskKey
from rooms.store import TaskWriter
from rooms.task import DeviceWorkNow, TaskProgress, count_progress, heartbeat_line

LOAD = (12.4, 38.6, 85.0)
NOW = 850 / 7  # seconds since the start; 840 of 960 chunks are left, so this takes seven times as long again
LINES = [
    (TaskProgress(120, 960, audio_done_s=412 * NOW, elapsed_s=NOW), LOAD, 4,
     "heartbeat cpu=12% mem=39% gpu=85% devices=4 chunks=120/960 rate=412x eta=00:14:10"),
    (TaskProgress(0, 960, 0.0, 30.0), (None, None, None), 0,
     "heartbeat cpu=? mem=? gpu=? devices=0 chunks=0/960 rate=? eta=?"),
    (TaskProgress(1, 2, 1.0, 1.0), (0.0, 38.6, 0.0), 1,
     "heartbeat cpu=0% mem=39% gpu=0% devices=1 chunks=1/2 rate=1x eta=00:00:01"),
]  # fmt: skip
ENDINGS = [
    (TaskProgress(10, 10, 1.0, 100.0), "chunks=10/10 rate=0.01x eta=00:00:00"),
    (TaskProgress(1, 2, 59.6, 59.6), "chunks=1/2 rate=1x eta=00:01:00"),
    (TaskProgress(1, 2, 3599.6, 3599.6), "chunks=1/2 rate=1x eta=01:00:00"),
    (TaskProgress(1, 101, 3600.0, 3600.0), "chunks=1/101 rate=1x eta=100:00:00"),
    (TaskProgress(5, 10, 0.0, 0.0), "chunks=5/10 rate=? eta=00:00:00"),
    (TaskProgress(5, 10, 1.0, 0.0), "chunks=5/10 rate=? eta=00:00:00"),
    (TaskProgress(5, 10, 0.0, 60.0), "chunks=5/10 rate=? eta=00:01:00"),  # those that failed have no rate
    (TaskProgress(1, 3, 60.0, 60.0, start_up_s=50), "chunks=1/3 rate=1x eta=00:00:20"),
    (TaskProgress(1, 3, 60.0, 60.0, start_up_s=70), "chunks=1/3 rate=1x eta=00:00:00"),
    (TaskProgress(9, 10, 90.0, 60.0, retrying=1), "chunks=9/10 rate=2x eta=?"),  # its rest has no pace
    (TaskProgress(8, 10, 90.0, 60.0, retrying=1), "chunks=8/10 rate=2x eta=00:00:15"),
    (TaskProgress(10, 10, 90.0, 60.0, retrying=1), "chunks=10/10 rate=2x eta=00:00:00"),
    *((TaskProgress(1, 2, 60 * rate, 60.0), f"chunks=1/2 rate={said} eta=00:01:00") for rate, said in (
        (1.0, "1x"), (0.999, "1x"), (0.45, "0.45x"), (0.1234, "0.12x"), (0.0042, "0.0042x"), (1e-9, "0.0001x"))),
]  # fmt: skip


def test_the_heartbeat_line_is_as_the_contract_shows_it_and_what_nobody_knows_is_no_zero() -> None:
    assert [heartbeat_line(progress, load, devices) for progress, load, devices, _ in LINES] == [
        line for *_, line in LINES
    ]
    for progress, ending in ENDINGS:
        assert heartbeat_line(progress, LOAD, 4) == f"heartbeat cpu=12% mem=39% gpu=85% devices=4 {ending}"


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
