"""A recorded task database, played back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.devices import ReplayReader
from rooms.model import InventoryDevice, ProcessReading, Reading
from rooms.root import BadInput, DeviceUnreadable
from support.hand_clock import HandClock
from support.pages import Pages
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


def edit(path: Path, *changes: Callable[[sqlite3.Connection], object] | str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        for change in changes:
            db.execute(change) if isinstance(change, str) else change(db)


def opened(path: Path, at_s: float = 0) -> ReplayReader:
    return ReplayReader(path, clock=HandClock(NOW_MS + round(at_s * 1000)), started_at_ms=NOW_MS)


def read_at(path: Path, at_s: float, index: int = 0) -> Reading | str:
    """Return the reading, or why there is none."""
    with closing(opened(path, at_s)) as reader:
        try:
            return reader.read(f"GPU-{index}")
        except DeviceUnreadable as reason:
            return str(reason)


def heard(path: Path, index: int, *seconds: float) -> list[int | str | None]:
    """Return the temperatures at these times, or why there are none."""
    readings = [read_at(path, at_s, index) for at_s in seconds]
    return [one if isinstance(one, str) else one.temperature_c for one in readings]


def test_a_recording_is_heard_again_from_the_start_and_repeats_at_its_end(recording: Path) -> None:
    before = recording.read_bytes()
    reader = opened(recording)
    assert reader.inventory() == [replace(device, backend="replay") for device in DEVICES]
    assert reader.why == f"replay of {recording}, 10.0 s long, repeated at its end"
    assert heard(recording, 0, -5, 0, 0.999, 1, 3.5, 9, 9.999, 10, 13, 1005) == [0, 0, 0, 1, 3, 9, 9, 0, 3, 5]
    assert heard(recording, 1, 3, 3.5, 4, 6.9, 7) == [3, *["GPU is lost"] * 3, 7], "a gap is a gap again"
    assert read_at(recording, 3, 1) == Reading(temperature_c=3, utilization_percent=51)
    assert recording.read_bytes() == before
    assert sorted(recording.parent.iterdir()) == [recording], "and nothing beside it"
    reader.close()
    with pytest.raises(DeviceUnreadable, match="cannot be read: "):
        reader.read("GPU-0")
    with pytest.raises(DeviceUnreadable, match="the recording has no device 'GPU-9'"):
        reader.read("GPU-9")


def test_gaps_have_their_reasons_whether_of_a_device_a_metric_or_the_recorder(recording: Path, tmp_path: Path) -> None:
    from_ms, to_ms = BEGIN_MS + 1000, BEGIN_MS + 3000
    edit(recording, f"DELETE FROM sample WHERE at_ms BETWEEN {from_ms} AND {to_ms}",
         lambda db: add_gap(db, None, 0, 4, "the recorder was killed"),
         lambda db: add_gap(db, 0, 0, 5, "Not Supported", "power_w"),
         lambda db: add_gap(db, 0, 8, 8, "Unknown Error", "power_w"),
         lambda db: add_gap(db, 0, 0, 9, "it is known", "temperature_c"))  # fmt: skip
    assert [read_at(recording, 2, index) for index in (0, 1)] == ["the recorder was killed"] * 2
    assert heard(recording, 0, 0, 4) == [0, 4]
    readings = [read_at(recording, at_s) for at_s in (4, 5, 6, 8, 9)]
    assert [reading.missing for reading in readings if isinstance(reading, Reading)] == [
        {"power_w": "Not Supported"}, {"power_w": "Not Supported"}, {}, {"power_w": "Unknown Error"}, {},
    ]  # fmt: skip
    holes = write_recording(tmp_path / "holes.sqlite", DEVICES, steady, range(10))
    edit(holes, f"DELETE FROM sample WHERE device_id = 100 AND at_ms > {BEGIN_MS}")
    assert heard(holes, 0, 5, 5.001) == [0, "the recording has no sample at this time"]
    never = write_recording(
        tmp_path / "r.sqlite", DEVICES, lambda i, s: "no permission" if i else Reading(temperature_c=1), range(5)
    )
    assert heard(never, 1, 0, 2, 4.9) == ["no permission"] * 3
    rare = write_recording(tmp_path / "rare.sqlite", DEVICES[:1], steady, range(0, 90, 30))
    assert heard(rare, 0, 29, 59, 89, 90) == [0, 30, 60, 0], "the usual interval is 30 s"
    for name, times, length_s in (("one", [0], "1.0"), ("two", [0, 30], "60.0")):
        short = write_recording(tmp_path / f"{name}.sqlite", DEVICES[:1], steady, times)
        assert opened(short).why.endswith(f" {length_s} s long, repeated at its end")


def test_sources_and_processes_are_replayed_where_they_were_recorded(recording: Path) -> None:
    def add(db: sqlite3.Connection) -> None:
        for from_s, source in ((0, "gpm"), (5, "utilization")):
            insert(db, "metric_source", task_id=TASK_ID, device_id=100, metric="busy_percent", source=source,
                   from_ms=BEGIN_MS + from_s * 1000)  # fmt: skip
        for pid in (12, 11):
            insert(db, "process_sample", task_id=TASK_ID, device_id=100, at_ms=BEGIN_MS + 2000, pid=pid,
                   memory_used_bytes=2**20, sm_percent=None)  # fmt: skip

    edit(recording, add)
    readings = [read_at(recording, at_s) for at_s in (2, 3, 4, 5)]
    assert [reading.processes for reading in readings if isinstance(reading, Reading)] == [
        (ProcessReading(12, 2**20), ProcessReading(11, 2**20)), None, None, None,
    ]  # fmt: skip
    sources = [reading.sources["busy_percent"] for reading in readings if isinstance(reading, Reading)]
    assert sources == ["gpm", "gpm", "gpm", "utilization"]


def test_slices_keep_their_card_and_their_order_of_the_recorded_list_or_of_their_old_names(tmp_path: Path) -> None:
    listed = {"MIG-b": "MIG-b", "MIG-c": "MIG-c", "MIG-a": "MIG-a"}
    old = {"MIG-b": "MIG-GPU-1/10/0", "MIG-c": "MIG-GPU-1/7/1", "MIG-a": "MIG-GPU-1/7/0"}
    for tokens, expected in (
        (listed, [("MIG-b", 1, None), ("MIG-c", 1, None), ("MIG-a", 1, None)]),
        (old, [("MIG-a", 1, "7/0"), ("MIG-c", 1, "7/1"), ("MIG-b", 1, "10/0")]),
    ):
        recording = write_recording(tmp_path / f"{tokens['MIG-a'][4:7]}.sqlite", DEVICES, steady, range(10))
        device = {"task_id": TASK_ID, "why": "test"}
        with closing(sqlite3.connect(recording)) as db, db:
            for number, (uuid, token) in enumerate(tokens.items()):  # their ids are in another order
                insert(db, "device", device_id=(7 * number) % 3 + 500, uuid=uuid, device_index=1, token=token,
                       name="MIG 1g", backend="nvml", parent_uuid="GPU-1", **device)  # fmt: skip
            insert(db, "device", device_id=900, uuid="GPU-x", token="9", backend="none", **device)
            if tokens is listed:
                insert(db, "meta", key="environment", value=json.dumps({"CUDA_VISIBLE_DEVICES": ", ".join(tokens)}))
        devices = opened(recording).inventory()
        assert [(d.uuid, d.index, d.slice) for d in devices if d.parent_uuid == "GPU-1"] == expected
        others = [(d.uuid, d.index, d.name) for d in devices if d.parent_uuid is None]
        assert others == [("GPU-x", 0, "GPU"), ("GPU-0", 0, "Tesla V100"), ("GPU-1", 1, "Tesla V100")]


def test_files_of_other_programs_are_refused_and_a_strange_environment_is_not(
    recording: Path, tmp_path: Path, pages: Pages
) -> None:
    said = []

    def refuse(path: Path, *changes: str) -> None:
        if changes:
            edit(path, *changes)
        with pytest.raises(BadInput) as caught:
            opened(path)
        said.append(str(caught.value).replace(f"{tmp_path}/", ""))

    other = tmp_path / "x.csv"
    refuse(other)
    for text in ("at_ms,power_w\n1,2\n" * 100, ""):
        other.write_text(text)
        refuse(other)
    for number, value in enumerate(("", "no JSON", "[1]", '{"CUDA_VISIBLE_DEVICES": 7}')):
        edit(recording, f"INSERT OR REPLACE INTO meta (key, value) VALUES ('environment', '{value}')")
        assert heard(recording, 0, 3) == [3], number
    refuse(recording, "DELETE FROM sample")
    refuse(recording, "DROP TABLE process_sample")
    refuse(recording, "CREATE TABLE source_file (path TEXT)")
    pages({"refused.txt": "\n".join(said)})
    published = TaskFile(tmp_path, devices=2, samples=5).write()
    reading = read_at(published, 3, index=1)
    assert isinstance(reading, Reading) and reading.utilization_percent == 80
