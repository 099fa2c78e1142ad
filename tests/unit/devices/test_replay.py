"""A recorded task database, played back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from rooms.devices import ReplayReader
from rooms.model import InventoryDevice, ProcessReading, Reading
from rooms.root import BadInput, DeviceUnreadable
from support.hand_clock import HandClock
from support.recorded_tape import BEGIN_MS, TASK_ID, Said, add_gap, insert, write_recording
from support.task_files import TaskFile

NOW_MS = 1_900_000_000_000
DEVICES = [InventoryDevice(index, f"GPU-{index}", "Tesla V100", "nvml", 2**34, 300.0) for index in (0, 1)]


def steady(index: int, at_s: float) -> Said:
    """Say the second as the temperature; device 1 is lost from 4 to 6 s."""
    if index == 1 and 4 <= at_s <= 6:
        return "GPU is lost"
    return Reading(temperature_c=round(at_s), utilization_percent=50 + index, power_w=None)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return write_recording(tmp_path / "a recording?.sqlite", DEVICES, steady, range(10))


def edit(path: Path, change: Callable[[sqlite3.Connection], object]) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        change(db)


def add_slices(db: sqlite3.Connection, tokens: Mapping[str, str]) -> None:
    """Add slices of card 1, given as uuid → token; their ids are in another order than they are."""
    for number, (uuid, token) in enumerate(tokens.items()):
        insert(db, "device", device_id=(7 * number) % 3 + 500, task_id=TASK_ID, uuid=uuid, device_index=1, token=token,
               name="MIG 1g", backend="nvml", why="test", parent_uuid="GPU-1")  # fmt: skip


def listed_slices(path: Path) -> list[tuple[str, str | None, int, str | None]]:
    reader = ReplayReader(path, clock=HandClock(), started_at_ms=NOW_MS)
    devices = reader.inventory()
    reader.close()
    assert [device.uuid for device in devices if device.parent_uuid is None] == ["GPU-0", "GPU-1"]
    return [(d.uuid, d.parent_uuid, d.index, d.slice) for d in devices if d.parent_uuid]


def read_at(path: Path, at_s: float, index: int = 0) -> Reading:
    reader = ReplayReader(path, clock=HandClock(NOW_MS + round(at_s * 1000)), started_at_ms=NOW_MS)
    try:
        return reader.read(f"GPU-{index}")
    finally:
        reader.close()


def reason_at(path: Path, at_s: float, index: int = 0) -> str:
    with pytest.raises(DeviceUnreadable) as caught:
        read_at(path, at_s, index)
    return str(caught.value)


def refusal(path: Path) -> BadInput:
    with pytest.raises(BadInput) as caught:
        ReplayReader(path, clock=HandClock(), started_at_ms=0)
    assert str(path) in str(caught.value)
    return caught.value


def test_devices_are_those_of_the_recording(recording: Path) -> None:
    reader = ReplayReader(recording, clock=HandClock(), started_at_ms=NOW_MS)
    assert [(d.index, d.uuid, d.name, d.memory_total_bytes) for d in reader.inventory()] == [
        (0, "GPU-0", "Tesla V100", 2**34),
        (1, "GPU-1", "Tesla V100", 2**34),
    ]
    assert {device.backend for device in reader.inventory()} == {"replay"}


def test_a_sample_comes_as_long_after_the_start_as_it_was_recorded(recording: Path) -> None:
    assert [read_at(recording, at_s).temperature_c for at_s in (0, 0.999, 1, 3.5, 9)] == [0, 0, 1, 3, 9]
    assert read_at(recording, 3, index=1).utilization_percent == 51


def test_at_its_end_the_recording_starts_again_and_why_says_so(recording: Path) -> None:
    assert [read_at(recording, at_s).temperature_c for at_s in (9.999, 10, 13, 1005)] == [9, 0, 3, 5]
    reader = ReplayReader(recording, clock=HandClock(), started_at_ms=NOW_MS)
    assert str(recording) in reader.why
    assert "10.0 s long, repeated at its end" in reader.why


def test_a_gap_is_a_gap_again_with_its_reason(recording: Path) -> None:
    assert read_at(recording, 3, index=1).temperature_c == 3
    for at_s in (3.5, 4, 5, 6, 6.9):
        assert reason_at(recording, at_s, index=1) == "GPU is lost"
    assert read_at(recording, 7, index=1).temperature_c == 7
    assert read_at(recording, 5, index=0).temperature_c == 5


def test_a_gap_of_the_recorder_is_a_gap_of_every_device(recording: Path) -> None:
    edit(
        recording,
        lambda db: db.execute("DELETE FROM sample WHERE at_ms BETWEEN ? AND ?", (BEGIN_MS + 1000, BEGIN_MS + 3000)),
    )
    edit(recording, lambda db: add_gap(db, None, 0, 4, "the recorder was killed"))
    assert {reason_at(recording, 2, index) for index in (0, 1)} == {"the recorder was killed"}
    assert read_at(recording, 4).temperature_c == 4


def test_a_device_that_was_never_read_is_unreadable_from_the_first_moment(tmp_path: Path) -> None:
    path = write_recording(
        tmp_path / "r.sqlite", DEVICES, lambda i, s: "no permission" if i else Reading(temperature_c=1), range(5)
    )
    assert {reason_at(path, at_s, index=1) for at_s in (0, 2, 4.9)} == {"no permission"}


def test_a_metric_that_was_missing_is_none_with_its_reason_and_one_that_was_not_asked_is_none_without(
    recording: Path,
) -> None:
    edit(recording, lambda db: add_gap(db, 0, 0, 5, "Not Supported", "power_w"))
    assert read_at(recording, 2).missing == {"power_w": "Not Supported"}
    assert read_at(recording, 7).missing == {}
    assert read_at(recording, 2, index=1).missing == {}


def test_a_stretch_that_nobody_explained_is_unreadable_too(recording: Path) -> None:
    edit(recording, lambda db: db.execute("DELETE FROM sample WHERE device_id = 100 AND at_ms > ?", (BEGIN_MS + 1000,)))
    assert read_at(recording, 3).temperature_c == 1
    assert reason_at(recording, 9) == "the recording has no sample at this time"


def test_sources_and_processes_are_replayed_where_they_were_recorded(recording: Path) -> None:
    def add(db: sqlite3.Connection) -> None:
        for from_s, source in ((0, "gpm"), (5, "utilization")):
            insert(db, "metric_source", task_id=TASK_ID, device_id=100, metric="busy_percent", source=source,
                   from_ms=BEGIN_MS + from_s * 1000)  # fmt: skip
        for pid in (11, 12):
            insert(db, "process_sample", task_id=TASK_ID, device_id=100, at_ms=BEGIN_MS + 2000, pid=pid,
                   memory_used_bytes=2**20, sm_percent=None)  # fmt: skip

    edit(recording, add)
    assert read_at(recording, 2).processes == (ProcessReading(11, 2**20), ProcessReading(12, 2**20))
    assert read_at(recording, 3).processes is None
    assert read_at(recording, 4).sources == {"busy_percent": "gpm"}
    assert read_at(recording, 5).sources == {"busy_percent": "utilization"}


def test_slices_keep_their_uuid_their_card_and_the_order_of_the_recorded_list(recording: Path) -> None:
    slices = ["MIG-b", "MIG-c", "MIG-a"]
    edit(recording, lambda db: add_slices(db, {uuid: uuid for uuid in slices}))
    environment = json.dumps({"CUDA_VISIBLE_DEVICES": ", ".join(slices)})
    edit(recording, lambda db: insert(db, "meta", key="environment", value=environment))
    assert listed_slices(recording) == [(uuid, "GPU-1", 1, None) for uuid in slices]


def test_slices_of_a_recording_without_a_list_are_in_the_order_of_their_old_names(recording: Path) -> None:
    tokens = {"MIG-b": "MIG-GPU-1/10/0", "MIG-c": "MIG-GPU-1/7/1", "MIG-a": "MIG-GPU-1/7/0"}
    edit(recording, lambda db: add_slices(db, tokens))
    assert listed_slices(recording) == [
        ("MIG-a", "GPU-1", 1, "7/0"),
        ("MIG-c", "GPU-1", 1, "7/1"),
        ("MIG-b", "GPU-1", 1, "10/0"),
    ]


@pytest.mark.parametrize("value", [None, "", "no JSON", "[1]", '{"CUDA_VISIBLE_DEVICES": 7}'])
def test_a_recording_whose_environment_cannot_be_understood_is_played_all_the_same(
    recording: Path, value: str | None
) -> None:
    edit(recording, lambda db: insert(db, "meta", key="environment", value=value))
    assert read_at(recording, 3).temperature_c == 3


def test_a_published_task_database_is_a_recording(tmp_path: Path) -> None:
    path = TaskFile(tmp_path, devices=2, samples=5).write()
    assert read_at(path, 3, index=1).utilization_percent == 80


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone.sqlite").why == "No such file or directory"


@pytest.mark.parametrize(
    ("content", "why"), [("", "has no table device"), ("at_ms,power_w\n1,2\n" * 100, "not a database")]
)
def test_a_file_that_is_no_database_is_refused_with_a_way_to_make_one(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(content)
    refused = refusal(path)
    assert why in (refused.why or "")
    assert "badcjobs record" in (refused.fix or "")


def test_a_database_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "birds.sqlite"
    edit(path, lambda db: db.execute("CREATE TABLE bird (name TEXT)"))
    assert refusal(path).why == "it has no table device and no table sample and no table gap"


def test_a_job_database_is_refused_with_the_place_of_its_task_databases(recording: Path) -> None:
    edit(recording, lambda db: db.execute("CREATE TABLE source_file (path TEXT)"))
    refused = refusal(recording)
    assert "job database" in refused.what
    assert str(recording.parent / "tasks") in (refused.fix or "")


def test_a_recording_without_samples_is_refused(recording: Path) -> None:
    edit(recording, lambda db: db.execute("DELETE FROM sample"))
    assert "no sample of any device" in refusal(recording).what


def test_replay_leaves_the_file_as_it_is(recording: Path) -> None:
    before = recording.read_bytes()
    read_at(recording, 5)
    assert recording.read_bytes() == before
    assert sorted(recording.parent.iterdir()) == [recording]
