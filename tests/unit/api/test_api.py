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
from support.databases import query
from support.task_files import make_job

import badcjobs

FIGURES = {"min", "mean", "p50", "p95", "max", "samples"}
METRICS = {"utilization", "memory_used_mb", "memory_usage_percent", "temperature_c", "power_draw_w"}
UNKNOWN = {"min": None, "mean": None, "p50": None, "p95": None, "max": None, "samples": 0}
MIB = 2**20


# --- the names --------------------------------------------------------------------------------------------------------


def test_the_promised_names_are_there() -> None:
    from rooms.api import list_devices, open_job

    from badcjobs import Recorder

    assert [thing.__name__ for thing in (Recorder, list_devices, open_job)] == ["Recorder", "list_devices", "open_job"]
    assert set(badcjobs.__all__) <= set(dir(badcjobs))
    assert all(getattr(badcjobs, name) for name in badcjobs.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Recoder'"):
        badcjobs.Recoder  # noqa: B018


def test_importing_badcjobs_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import badcjobs; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("['__future__', 'badcjobs']", "['badcjobs']")


# --- figures ----------------------------------------------------------------------------------------------------------


def write_samples(path: Path, readings: list[tuple[int, Reading]]) -> str:
    writer = TelemetryWriter(path, 77)
    for number, (device_id, reading) in enumerate(readings):
        with writer.batch():
            writer.write_tick(1000 * number, [(device_id, reading)], HostReading(1.0, 1, 2))
    writer.close()
    return read_only_uri(path, sealed=False)


def test_stats_have_exactly_the_promised_shape(tmp_path: Path) -> None:
    readings = [
        (5, Reading(utilization_percent=p, memory_used_bytes=p * MIB, temperature_c=40 + p, power_w=2.0 * p))
        for p in range(1, 21)
    ]
    uri = write_samples(tmp_path / "r.sqlite", readings)
    stats = read_stats(uri, [(5, Device("0", "", 0, "GPU-5", "A100", memory_total_bytes=200 * MIB))], 20.5)
    assert set(stats) == {"monitoring_duration_seconds", "sample_count", "gpu_stats"}
    assert (stats["monitoring_duration_seconds"], stats["sample_count"]) == (20.5, 20)
    device: dict[str, Any] = dict(stats["gpu_stats"]["0"])
    assert set(device) == {"name", *METRICS}
    assert device.pop("name") == "A100"
    assert all(set(figures) == FIGURES for figures in device.values())
    assert device["utilization"] == {"min": 1, "mean": 10.5, "p50": 10, "p95": 19, "max": 20, "samples": 20}
    assert device["memory_used_mb"]["max"] == 20.0
    assert device["memory_usage_percent"]["max"] == 10.0
    assert device["temperature_c"]["p50"] == 50
    assert device["power_draw_w"]["mean"] == 21.0


def test_what_a_device_does_not_say_is_none_and_never_zero(tmp_path: Path) -> None:
    uri = write_samples(tmp_path / "r.sqlite", [(5, Reading(temperature_c=40)), (5, Reading(memory_used_bytes=MIB))])
    stats = read_stats(uri, [(5, Device("0", "", 0, "GPU-5")), (6, Device("1", "", 1, "GPU-6"))], 2.0)
    first, second = stats["gpu_stats"]["0"], stats["gpu_stats"]["1"]
    assert first["utilization"] == first["power_draw_w"] == first["memory_usage_percent"] == UNKNOWN
    assert first["temperature_c"]["samples"] == first["memory_used_mb"]["samples"] == 1
    assert all(second[metric] == UNKNOWN for metric in METRICS)  # type: ignore[literal-required]
    assert second["name"] is None


def test_a_file_that_is_not_there_yet_gives_figures_without_values() -> None:
    device = Device("0", "", 0, "GPU-5", "A100")
    for uri in (None, "file:/does/not/exist.sqlite?mode=ro"):
        stats = read_stats(uri, [(5, device)], 0.0)
        assert stats["sample_count"] == 0
        assert stats["gpu_stats"]["0"]["utilization"] == UNKNOWN


def test_devices_are_named_by_index_and_slices_of_one_card_stay_apart() -> None:
    slices = [(1, Device("MIG-a", "", 0, "MIG-a")), (2, Device("MIG-b", "", 0, "MIG-b")), (3, Device("7", ""))]
    assert list(read_stats(None, slices, 0.0)["gpu_stats"]) == ["0", "MIG-b", "7"]


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("run.xls", "unknown extension '.xls'"),
        ("no/such/folder/run.sqlite", "does not exist"),
        ("there.sqlite", "already exists"),
        ("/proc/run.sqlite", "/proc/run.sqlite cannot be written"),
        (f"{'x' * 300}.sqlite", "cannot be written"),
        ("a.file/run.sqlite", "does not exist"),
    ],
)
def test_a_path_that_cannot_be_used_is_refused_before_the_work(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "there.sqlite").write_text("precious")
    (tmp_path / "a.file").touch()
    recorder = badcjobs.Recorder(tmp_path / name, simulate=1)
    with pytest.raises(BadInput) as caught:
        recorder.start()
    assert words in caught.value.what
    assert (tmp_path / "there.sqlite").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.file", "there.sqlite"]


def test_a_folder_is_not_replaced_by_a_recording(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").mkdir()
    with pytest.raises(BadInput, match=r"run\.sqlite is a folder"):
        badcjobs.Recorder(tmp_path / "run.sqlite", simulate=1, overwrite=True).start()


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"interval_s": 0.0}, "interval_s=0.0"),
    ({"interval_s": float("nan")}, "interval_s=nan"),
    ({"interval_s": "x"}, "interval_s='x'"),
    ({"interval_s": None}, "interval_s=None"),
    ({"interval_s": 1e12}, "to 86400 seconds (one day)"),
    ({"simulate": "a"}, "simulate='a'"),
    ({"simulate": 0}, "simulate=0"),
    ({"simulate": -1}, "simulate=-1"),
    ({"simulate": True}, "simulate=True"),
    ({"limits": {"temperature_c": 80}}, "limits=AlertLimits(temperature_c=80)"),
    ({"limits": badcjobs.AlertLimits(memory_percent="x")}, "memory_percent = 'x' must be a number above 0"),  # type: ignore[arg-type]
    ({"on_alert": "print"}, "on_alert='print'"),
]


@pytest.mark.parametrize(("arguments", "words"), UNUSABLE, ids=[str(arguments) for arguments, _ in UNUSABLE])
def test_an_argument_that_cannot_be_used_is_a_value_error_where_it_is_given(
    tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match="not valid") as caught:
        badcjobs.Recorder(tmp_path / "run.sqlite", **arguments)
    assert words in str(caught.value)
    assert isinstance(caught.value, BadInput)


@pytest.mark.parametrize("simulate", ["a", 0, -1])
def test_a_number_of_devices_to_list_that_is_none_is_a_value_error(simulate: Any) -> None:
    with pytest.raises(ValueError, match="whole number, at least 1"):
        badcjobs.list_devices(simulate=simulate)


def test_a_recorder_that_was_never_started_knows_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    recorder = badcjobs.Recorder(tmp_path / "run.sqlite")
    with recorder.mark("work"):
        done = True
    recorder.stop()
    assert done
    assert recorder.stats() == {"monitoring_duration_seconds": 0.0, "sample_count": 0, "gpu_stats": {}}
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_is_not_there_is_said_with_the_line_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(DatabaseProblem, match="is not a run folder"):
        badcjobs.open_job(tmp_path)
    with pytest.raises(DatabaseProblem, match="does not exist") as nowhere:
        badcjobs.open_job(tmp_path / "no" / "where")
    assert nowhere.value.fix == f"ls {tmp_path}"
    (tmp_path / "tasks").mkdir()
    with pytest.raises(DatabaseProblem, match="does not exist") as caught:
        badcjobs.open_job(tmp_path)
    assert caught.value.fix == f"badcjobs merge {tmp_path}"


# --- calls of on_alert ------------------------------------------------------------------------------------------------


def test_on_alert_is_called_in_order_and_what_it_raises_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    def on_alert(alert: Alert) -> None:
        heard.append(alert.kind)
        raise RuntimeError("somebody else's bug")

    calls = AlertCalls(on_alert)
    for kind in ("thermal", "memory", "power"):
        calls.add(Alert(kind, "warning", 1, 0, "GPU-1", 1, None, None, None, "hot"))
    calls.finish()
    assert heard == ["thermal", "memory", "power"]
    assert caplog.text.count("on_alert failed") == 3


@pytest.mark.parametrize("way_out", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_callback_that_wants_to_exit_does_not_end_the_later_ones(
    caplog: pytest.LogCaptureFixture, way_out: BaseException
) -> None:
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


def test_a_recorder_goes_through_its_life_in_this_process_too(tmp_path: Path) -> None:
    recorder = badcjobs.Recorder(tmp_path / "run.sqlite", 0.05, simulate=1)
    assert recorder.start() is recorder
    assert recorder.start() is recorder, "a second start changes nothing"
    with recorder.mark("first"), recorder.mark("inside"):
        pass
    recorder.stop()
    recorder.stop()
    assert recorder.stats()["sample_count"] >= 2
    marks = query(tmp_path / "run.sqlite", "SELECT name, ended_at_ms >= started_at_ms FROM mark ORDER BY rowid")
    assert marks == [("first", 1), ("inside", 1)]
    assert query(tmp_path / "run.sqlite", "SELECT verdict FROM task") == [("done",)]


# --- sqlite-utils -----------------------------------------------------------------------------------------------------


def test_a_job_has_its_database_as_sqlite_utils_gives_it(tmp_path: Path) -> None:
    job = badcjobs.open_job(make_job(tmp_path))
    assert [row["chunk_id"] for row in job.db["chunk"].rows_where("status = ?", ["failed"])] == ["b"]
    assert {key.other_column for key in job.db["sample"].foreign_keys} == {"task_id", "device_id"}
    assert "job_summary" in job.db.view_names()
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        job.db["meta"].insert({"key": "x", "value": "y"})


def test_the_recorder_and_its_readers_carry_nothing_heavy() -> None:
    modules = ("telemetry.recorder_process", "devices.choose", "devices.nvml", "devices.nvidia_smi")
    imports = ", ".join(f"badcjobs.{module}" for module in modules)
    code = f"import sys, {imports}; print(sys.modules.keys() & {{'hashlib', 'psutil', 'sqlite_utils'}})"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told == "set()\n"


def test_neither_help_nor_the_recorder_waits_for_sqlite_utils() -> None:
    for module in ("badcjobs.cli.program", "badcjobs.telemetry.recorder_process", "badcjobs.task.run_task"):
        code = f"import sys, {module}; sys.exit('sqlite_utils' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, module
