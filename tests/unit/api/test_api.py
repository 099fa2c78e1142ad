"""What other people's Python may count on: names, shapes, and that unknown is None."""

import re
import sqlite3

import pytest
from rooms.api import read_stats
from rooms.devices import DeviceLocks, DeviceRequest, Waiting, list_free
from rooms.model import Device, HostReading, Reading, StandIn
from rooms.root import BadInput, DatabaseProblem, NotHere, SystemClock
from rooms.store import file_uri
from rooms.telemetry import TelemetryWriter
from support.behaviour import pretty
from support.fake_nvml import FakeNvml
from support.task_files import make_job

import badcjobs

MIB = 2**20


def test_the_promised_names_are_there():
    assert (
        {"Recorder", "list_devices", "pick_devices", "open_job", "AlertLimits"}
        <= set(badcjobs.__all__)
        <= set(dir(badcjobs))
    )
    assert [device.index for device in badcjobs.list_devices(simulate=2)] == [0, 1]
    assert all(getattr(badcjobs, name) for name in badcjobs.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Recoder'"):
        badcjobs.Recoder  # noqa: B018


def test_devices_are_picked_under_the_lock_of_gpus_free(tmp_path, monkeypatch):
    monkeypatch.setenv("BADCJOBS_LOCK_DIR", str(tmp_path))
    FakeNvml(monkeypatch, 3)
    with badcjobs.pick_devices(2, min_memory_mib=100, max_utilization=100, check_every_s=0.1) as mine:
        scores = {device.uuid: device.score for device in badcjobs.list_devices()}
        assert [device.uuid for device in mine] == sorted(scores, key=scores.get, reverse=True)[:2]
        clock = SystemClock()
        with DeviceLocks(tmp_path, clock, "gpus --free") as locks:
            (other,) = list_free({}, StandIn(), DeviceRequest(1, None, None, 0.0), locks, Waiting(clock, print)).devices
        assert other.uuid not in [device.uuid for device in mine]
        with pytest.raises(
            NotHere, match=r"(?s)is locked by run of .*try: fewer devices, weaker limits, or wait_s=600"
        ):
            badcjobs.pick_devices(2, wait_s=0.2, check_every_s=0.1)
    badcjobs.pick_devices(3).release()
    assert len([badcjobs.pick_devices(2, simulate=2) for _ in range(2)]) == 2, "simulated ones are never locked"
    for never in ({"count": 4}, {"min_memory_mib": 10**6}):
        with pytest.raises(NotHere, match=r"(?s)GPU.*try: fewer devices, weaker limits"):
            badcjobs.pick_devices(**never, simulate=3)
    for wrong in ({"count": 0}, {"count": True}, {"max_utilization": 101}, {"wait_s": float("inf")}, {"wait_s": -1}):
        with pytest.raises(ValueError, match="not valid"):
            badcjobs.pick_devices(simulate=1, **wrong)


def test_statistics_have_the_promised_shape_and_unknown_is_none(tmp_path, pages):
    readings = [
        (5, Reading(utilization_percent=p, memory_used_bytes=p * MIB, temperature_c=40 + p, power_w=2.0 * p))
        for p in range(1, 21)
    ]
    writer = TelemetryWriter(tmp_path / "r.sqlite", 77)
    for number, one in enumerate([*readings, (6, Reading(memory_used_bytes=MIB))]):
        with writer.batch():
            writer.write_tick(1000 * number, [one], HostReading(1.0, 1, 2))
    writer.close()
    uri = file_uri(tmp_path / "r.sqlite", "mode=ro")
    devices = [(5, Device("0", "", 0, "GPU-5", "A100", memory_total_bytes=200 * MIB)), (6, Device("1", "", 1, "GPU-6")),
               (7, Device("MIG-b", "", 0, "MIG-b")), (8, Device("7", ""))]  # fmt: skip
    said = {"known.json": pretty(read_stats(uri, devices, 20.5))}
    nowhere = [read_stats(uri, devices[:1], 0.0) for uri in (None, "file:/does/not/exist.sqlite?mode=ro")]
    assert nowhere[0] == nowhere[1]
    pages({**said, "unknown.json": pretty(nowhere[0])})


PATHS = ("run.xls", "no/such/folder/run.sqlite", "there.sqlite", "/proc/run.sqlite", "xxx.sqlite", "a.file/run.sqlite",
         "folder.sqlite")  # fmt: skip
UNUSABLE = [
    *({"interval_s": value} for value in (0.0, 0.009, float("nan"), "x", None, True, 86_400.1)),
    *({"simulate": value} for value in ("a", 0, -1, True, 1.0)),
    {"limits": {"temperature_c": 80}}, {"limits": badcjobs.AlertLimits(memory_percent="x")},  # type: ignore[arg-type]
    {"on_alert": "print"},
]  # fmt: skip


def test_what_cannot_be_used_is_refused_before_the_work(tmp_path, pages):
    """A path when it starts; an argument where it is given, as a ValueError."""
    (tmp_path / "there.sqlite").write_text("precious")
    (tmp_path / "a.file").touch()
    (tmp_path / "folder.sqlite").mkdir()
    said = []
    for name in PATHS:
        with pytest.raises(BadInput) as caught:
            path = tmp_path / name.replace("xxx", "x" * 300)
            badcjobs.Recorder(path, simulate=1, overwrite=name == "folder.sqlite").start()
        text = re.sub("x{9,}", "xxx", str(caught.value).replace(str(tmp_path), "FOLDER"))
        said.append(f"{name}\n{text}".replace("Permission denied", "No such file or directory"))  # /proc, for root
    for arguments in UNUSABLE:
        with pytest.raises(ValueError, match="not valid") as refused:
            badcjobs.Recorder(tmp_path / "run.sqlite", **arguments)
        assert isinstance(refused.value, BadInput)
        said.append(str(refused.value))
    with pytest.raises(ValueError, match="must be at least 1"):
        badcjobs.list_devices(simulate=0)
    pages({"refusals.txt": "\n".join(said)})
    assert (tmp_path / "there.sqlite").read_text() == "precious"
    for interval_s in (0.01, 1, 86_400):
        badcjobs.Recorder(tmp_path / "run.sqlite", interval_s, on_alert=print)
    never = badcjobs.Recorder(tmp_path / "run.sqlite")
    with never.mark("work"):
        never.stop()
    assert never.stats() == {"monitoring_duration_seconds": 0.0, "sample_count": 0, "gpu_stats": {}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.file", "folder.sqlite", "there.sqlite"]


def test_a_job_is_opened_for_reading(tmp_path):
    job = badcjobs.open_job(make_job(tmp_path))
    assert repr(job) == f"Job('{tmp_path}/job.sqlite')" and badcjobs.open_job(tmp_path).path == job.path
    assert (job.summary()["done"], job.summary()["failed"]) == (3, 1)
    assert job.query("SELECT chunk_id FROM chunk WHERE status = ?", "failed") == [{"chunk_id": "b"}]
    assert {"chunk", "sample", "job_summary"} <= set(job.tables) and list(job.tables) == sorted(job.tables)
    with pytest.raises(BadInput, match="DELETE FROM chunk") as refused:
        job.query("DELETE FROM chunk")
    assert "readonly" in (refused.value.why or "") and refused.value.fix == "badcjobs guide tables"
    assert [row["chunk_id"] for row in job.db["chunk"].rows_where("status = ?", ["failed"])] == ["b"]
    assert {key.other_column for key in job.db["sample"].foreign_keys} == {"task_id", "device_id"}
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        job.db["meta"].insert({"key": "x", "value": "y"})
    with pytest.raises(DatabaseProblem, match="does not exist"):
        badcjobs.open_job(tmp_path / "no" / "where")
