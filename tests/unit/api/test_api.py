"""What other people's Python may count on: names, shapes, and that unknown is None."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rooms.api import read_stats
from rooms.model import Device, HostReading, Reading
from rooms.root import BadInput, DatabaseProblem
from rooms.store import read_only_uri
from rooms.telemetry import Alert, AlertCalls, TelemetryWriter
from support.behaviour import pretty
from support.databases import query
from support.pages import Pages
from support.task_files import make_job

import badcjobs

MIB = 2**20


def test_the_promised_names_are_there_and_importing_them_imports_nothing_heavy() -> None:
    assert {"Recorder", "list_devices", "open_job", "AlertLimits"} <= set(badcjobs.__all__) <= set(dir(badcjobs))
    assert all(getattr(badcjobs, name) for name in badcjobs.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Recoder'"):
        badcjobs.Recoder  # noqa: B018
    code = "import sys; before = set(sys.modules); import badcjobs; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("['__future__', 'badcjobs']", "['badcjobs']")


def write_samples(path: Path, readings: list[tuple[int, Reading]]) -> str:
    writer = TelemetryWriter(path, 77)
    for number, (device_id, reading) in enumerate(readings):
        with writer.batch():
            writer.write_tick(1000 * number, [(device_id, reading)], HostReading(1.0, 1, 2))
    writer.close()
    return read_only_uri(path, sealed=False)


def test_statistics_have_the_promised_shape_and_unknown_is_none(tmp_path: Path, pages: Pages) -> None:
    readings = [
        (5, Reading(utilization_percent=p, memory_used_bytes=p * MIB, temperature_c=40 + p, power_w=2.0 * p))
        for p in range(1, 21)
    ]
    uri = write_samples(tmp_path / "r.sqlite", [*readings, (6, Reading(memory_used_bytes=MIB))])
    devices = [(5, Device("0", "", 0, "GPU-5", "A100", memory_total_bytes=200 * MIB)), (6, Device("1", "", 1, "GPU-6")),
               (7, Device("MIG-b", "", 0, "MIG-b")), (8, Device("7", ""))]  # fmt: skip
    said = {"known.json": pretty(read_stats(uri, devices, 20.5))}
    nowhere = [read_stats(uri, devices[:1], 0.0) for uri in (None, "file:/does/not/exist.sqlite?mode=ro")]
    assert nowhere[0] == nowhere[1]
    pages({**said, "unknown.json": pretty(nowhere[0])})


# --- mistakes ---------------------------------------------------------------------------------------------------------

PATHS = {
    "run.xls": "unknown extension '.xls'", "no/such/folder/run.sqlite": "does not exist",
    "there.sqlite": "already exists", "/proc/run.sqlite": "/proc/run.sqlite cannot be written",
    f"{'x' * 300}.sqlite": "cannot be written", "a.file/run.sqlite": "does not exist",
}  # fmt: skip


def test_a_path_that_cannot_be_used_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "there.sqlite").write_text("precious")
    (tmp_path / "a.file").touch()
    (tmp_path / "folder.sqlite").mkdir()
    for name, words in PATHS.items():
        with pytest.raises(BadInput) as caught:
            badcjobs.Recorder(tmp_path / name, simulate=1).start()
        assert words in caught.value.what
    with pytest.raises(BadInput, match=r"folder\.sqlite is a folder"):
        badcjobs.Recorder(tmp_path / "folder.sqlite", simulate=1, overwrite=True).start()
    assert (tmp_path / "there.sqlite").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.file", "folder.sqlite", "there.sqlite"]


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    *(({"interval_s": value}, f"interval_s={value!r}") for value in (0.0, 0.009, float("nan"), "x", None, True)),
    ({"interval_s": 86_400.1}, "from 0.01 to 86400 seconds (one day)"),
    *(({"simulate": value}, f"simulate={value!r} is not valid") for value in ("a", 0, -1, True, 1.0)),
    ({"limits": {"temperature_c": 80}}, "limits=AlertLimits(temperature_c=80)"),
    ({"limits": badcjobs.AlertLimits(memory_percent="x")}, "memory_percent = 'x' must be a number above 0"),  # type: ignore[arg-type]
    ({"on_alert": "print"}, "on_alert='print'"),
]


def test_an_argument_that_cannot_be_used_is_a_value_error_where_it_is_given(tmp_path: Path) -> None:
    for arguments, words in UNUSABLE:
        with pytest.raises(ValueError, match="not valid") as caught:
            badcjobs.Recorder(tmp_path / "run.sqlite", **arguments)
        assert words in str(caught.value) and isinstance(caught.value, BadInput)
    with pytest.raises(ValueError, match="whole number, at least 1"):
        badcjobs.list_devices(simulate=0)
    for interval_s in (0.01, 1, 86_400):
        badcjobs.Recorder(tmp_path / "run.sqlite", interval_s, on_alert=print)
    never = badcjobs.Recorder(tmp_path / "run.sqlite")
    with never.mark("work"):
        never.stop()
    assert never.stats() == {"monitoring_duration_seconds": 0.0, "sample_count": 0, "gpu_stats": {}}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way_out", [RuntimeError("a bug"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_on_alert_raises_is_only_logged(caplog: pytest.LogCaptureFixture, way_out: BaseException) -> None:
    heard: list[str] = []

    def on_alert(alert: Alert) -> None:
        heard.append(alert.kind)
        raise way_out

    calls = AlertCalls(on_alert)
    for kind in ("thermal", "memory"):
        calls.add(Alert(kind, "warning", 1, 0, "GPU-1", 1, None, None, None, "hot"))
    calls.finish()
    assert heard == ["thermal", "memory"]
    assert caplog.text.count("on_alert failed") == 2


# --- a recorder, and a job --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.sqlite", "run.csv"])
def test_a_recorder_starts_and_stops_once_each(tmp_path: Path, name: str) -> None:
    recorder = badcjobs.Recorder(tmp_path / name, 0.05, simulate=1)
    assert recorder.start() is recorder.start() is recorder, "a second start changes nothing"
    with recorder.mark("first"), recorder.mark("inside"):
        pass
    recorder.stop()
    recorder.stop()
    with recorder.mark("too late"):
        pass
    stats = recorder.stats()
    assert stats["sample_count"] >= 1 and stats == recorder.stats()
    if name.endswith(".csv"):
        assert len((tmp_path / name).read_text().splitlines()) >= 2
        return
    marks = query(tmp_path / name, "SELECT name, ended_at_ms >= started_at_ms FROM mark ORDER BY rowid")
    assert marks == [("first", 1), ("inside", 1)]
    ((verdict, wall_s),) = query(tmp_path / name, "SELECT verdict, (ended_at_ms - started_at_ms) / 1000.0 FROM task")
    assert (verdict, stats["monitoring_duration_seconds"]) == ("done", wall_s)
    again = badcjobs.Recorder(tmp_path / name, 0.05, simulate=1, overwrite=True)
    with pytest.raises(ZeroDivisionError), again:
        raise ZeroDivisionError
    assert query(tmp_path / name, "SELECT verdict, exit_code FROM task") == [("failed", 1)]
    again.start().stop()
    assert query(tmp_path / name, "SELECT verdict, exit_code FROM task") == [("done", 0)]


def test_a_job_is_opened_for_reading(tmp_path: Path) -> None:
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


def test_neither_help_nor_the_recorder_and_its_readers_wait_for_what_is_heavy() -> None:
    """Module names, because a process that starts imports modules."""
    light = ("telemetry.recorder_process", "devices.choose", "devices.nvml", "devices.nvidia_smi")
    for modules, heavy in ((light, {"hashlib", "psutil", "sqlite_utils"}), (("cli.program",), {"sqlite_utils"}),
                           (("task.run_task",), {"sqlite_utils"})):  # fmt: skip
        imports = ", ".join(f"badcjobs.{module}" for module in modules)
        code = f"import sys, {imports}; print(sys.modules.keys() & {heavy})"
        told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        assert told == "set()\n"
