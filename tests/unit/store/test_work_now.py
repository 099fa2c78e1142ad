"""How far the work is, counted in the wrapper's half of a task database."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from rooms.model import Allocation, ChunkResult, TaskKey
from rooms.store import TaskWriter
from rooms.task import DeviceWorkNow, TaskProgress, count_progress
from support.task_files import START_MS, make_chunk

NAMES = ("a", "b", "c", "d")
CPU = DeviceWorkNow("CPU", 0, 0.0)


def test_what_failed_and_is_not_settled_is_counted_apart_and_so_is_the_time_before_the_first_chunk(
    tmp_path: Path,
) -> None:
    with closing(TaskWriter(tmp_path / "wrapper.sqlite", TaskKey("4821", 7, 1, "gpu3"))) as writer:
        allocation = Allocation(True, "4821", "gpu3")
        writer.begin_task(allocation, started_at_ms=START_MS, pid=42, version="0", engine="demo", telemetry=True)
        writer.fill([make_chunk(name) for name in NAMES], lambda rows: None)
        assert count_progress(writer, 20.0) == TaskProgress(0, 4, 0.0, 20.0, devices=(CPU,))
        for name, status in zip(NAMES[:3], ("done", "pending", "failed"), strict=True):
            times = (START_MS + 30_000, START_MS + 31_000)
            good, bad = {"audio_s": 29.5}, {"error_class": "bad_audio", "error": "no luck"}
            result = ChunkResult(make_chunk(name), *times, **(good if status == "done" else bad))  # type: ignore[arg-type]
            writer.attempt_ended(result, status=status, try_number=1, worker_id=5, device_id=9)
        expected = TaskProgress(2, 4, 29.5, 32.0, start_up_s=30.0, failed=1, retrying=1, devices=(CPU,))
        assert count_progress(writer, 32.0) == expected
        assert count_progress(writer, 32.0).eta_s == 2.0
