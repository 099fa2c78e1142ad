"""Which reader is used, and why: the first that works, and the reasons of those that do not."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pynvml
import pytest
from rooms.devices import open_devices, open_reader
from rooms.model import StandIn
from rooms.root import BadInput, DeviceUnreadable, GpuReader, ReaderUnavailable
from support.fake_amdsmi import FakeAmdsmi
from support.fake_dcgmi import FakeDcgmi
from support.fake_nvidia_smi import FakeNvidiaSmi
from support.fake_nvml import FakeNvml
from support.hand_clock import HandClock
from support.task_files import TaskFile

NO_DRIVER = "the NVIDIA driver is not loaded on this machine"


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return FakeNvml(monkeypatch, devices=2, init_error=9)


@pytest.fixture(autouse=True)
def no_amdsmi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A machine without a card, and a search path without a program."""
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def opened(stand_in: StandIn, search_path: Path | None, machine: Path = Path("/nowhere")) -> GpuReader:
    path = None if search_path is None else str(search_path)
    return open_reader(stand_in, HandClock(), HandClock().now_ms(), path, machine=machine)


def test_nvml_comes_first_even_where_the_others_would_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeNvml(monkeypatch, devices=2)
    FakeAmdsmi(monkeypatch, devices=2)
    smi = FakeNvidiaSmi(tmp_path)
    reader = opened(StandIn(), tmp_path)
    assert reader.backend == "nvml"
    assert "NVML" in reader.why
    assert len(reader.inventory()) == 2
    assert smi.starts() == []
    reader.close()


def test_nvml_is_started_at_most_once_by_opening(
    monkeypatch: pytest.MonkeyPatch, no_nvml: FakeNvml, empty: Path
) -> None:
    starts = []
    start = pynvml.nvmlInit
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: (starts.append(1), start()))
    reader = opened(StandIn(), empty)
    assert starts == [1]
    with pytest.raises(ReaderUnavailable):
        reader.inventory()
    with pytest.raises(DeviceUnreadable):
        reader.read("GPU-x")
    assert starts == [1]


@pytest.mark.usefixtures("no_nvml")
def test_nvidia_smi_is_used_where_nvml_does_not_start_and_why_tells_both(tmp_path: Path) -> None:
    FakeNvidiaSmi(tmp_path)
    reader = opened(StandIn(), tmp_path)
    assert reader.backend == "nvidia-smi"
    assert reader.why == f"nvidia-smi works and NVML does not: {NO_DRIVER}"
    assert {device.backend for device in reader.inventory()} == {"nvidia-smi"}


@pytest.mark.usefixtures("no_nvml")
def test_amd_is_used_where_no_nvidia_driver_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeAmdsmi(monkeypatch, devices=2)
    FakeNvidiaSmi(tmp_path, fails="NVIDIA-SMI has failed")
    reader = opened(StandIn(), tmp_path)
    assert reader.backend == "amd"
    assert NO_DRIVER in reader.why and "NVIDIA-SMI has failed" in reader.why and "amdsmi works" in reader.why
    assert [device.vendor for device in reader.inventory()] == ["amd", "amd"]
    reader.close()


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize("script", ["exit 0", "head -c 3000 /dev/urandom", "echo No devices were found"])
def test_an_nvidia_smi_that_lists_nothing_does_not_work_and_tokens_are_used_as_they_are(
    tmp_path: Path, empty: Path, script: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert opened(StandIn(), tmp_path, machine=empty).backend == "none"
    with open_devices(environ, HandClock(), StandIn()) as sight:
        assert [(device.token, device.pin) for device in sight.grant.devices] == [("0", "0"), ("1", "1")]
        assert "nvidia-smi lists no device" in str(sight.trouble)


@pytest.mark.usefixtures("no_nvml")
def test_where_nothing_works_the_reasons_are_given_with_nvml_s_first(empty: Path) -> None:
    reader = opened(StandIn(), empty, machine=empty)
    assert reader.backend == "none"
    with pytest.raises(ReaderUnavailable) as unavailable:
        reader.inventory()
    assert str(unavailable.value) == f"{NO_DRIVER}; no nvidia-smi on PATH; no AMD GPU" == reader.why
    with pytest.raises(DeviceUnreadable, match=NO_DRIVER):
        reader.read("GPU-x")
    reader.close()


@pytest.mark.usefixtures("no_nvml")
def test_an_amd_gpu_without_the_package_is_told_how_to_get_it(empty: Path) -> None:
    card = empty / "sys/class/drm/card0/device"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x1002\n")
    assert "pip install 'badcjobs[amd]'" in opened(StandIn(), empty, machine=empty).why


@pytest.mark.usefixtures("no_nvml")
def test_without_a_search_path_no_program_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvidiaSmi(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert opened(StandIn(), None).backend == "none"


def test_a_broken_binding_keeps_nobody_from_opening(monkeypatch: pytest.MonkeyPatch, empty: Path) -> None:
    def broken() -> None:
        raise OSError("libnvidia-ml.so.1: file too short")

    monkeypatch.setattr(pynvml, "nvmlInit", broken)
    reader = opened(StandIn(), empty)
    assert reader.backend == "none"
    assert "file too short" in reader.why


def test_a_card_without_gpm_gets_its_occupancy_from_dcgmi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeNvml(monkeypatch, devices=1, unsupported="gpm")
    dcgmi = FakeDcgmi(tmp_path)
    reader = opened(StandIn(), tmp_path)
    (device,) = reader.inventory()
    assert dcgmi.starts() == []  # only a reading needs it
    dcgmi.set(listed={"5": device.uuid}, rows={"5": ["0.500", "0.125"]})
    end_s = time.monotonic() + 60
    while (reading := reader.read(device.uuid)).sm_occupancy_percent is None and time.monotonic() < end_s:
        time.sleep(0.01)
    assert (reading.sm_activity_percent, reading.sm_occupancy_percent) == (50.0, 12.5)
    assert reading.sources["sm_occupancy_percent"] == "dcgmi"
    reader.close()


def test_a_card_without_gpm_and_dcgmi_says_why_it_gives_no_occupancy(
    monkeypatch: pytest.MonkeyPatch, empty: Path
) -> None:
    FakeNvml(monkeypatch, devices=1, unsupported="gpm")
    reader = opened(StandIn(), empty)
    reading = reader.read(reader.inventory()[0].uuid)
    assert reading.sm_occupancy_percent is None
    assert reading.missing["sm_occupancy_percent"].endswith("; dcgmi is not on PATH")
    reader.close()


def test_a_lost_card_is_told_once_by_opening_and_listing(
    monkeypatch: pytest.MonkeyPatch, empty: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FakeNvml(monkeypatch, devices=2, lost=1)
    reader = opened(StandIn(), empty)
    assert [device.index for device in reader.inventory()] == [0]
    assert caplog.messages == ["GPU 1 is left out: GPU is lost"]
    reader.close()


def test_stand_ins_are_used_when_they_are_asked_for_and_say_so(tmp_path: Path) -> None:
    simulated = opened(StandIn(simulate=3), None)
    assert (simulated.backend, len(simulated.inventory())) == ("simulated", 3)
    assert simulated.why == "3 simulated devices requested"
    recording = TaskFile(tmp_path, devices=2, samples=5).write()
    replay = opened(StandIn(replay=str(recording)), None)
    assert (replay.backend, len(replay.inventory())) == ("replay", 2)
    assert replay.why.startswith(f"replay of {recording}")


def test_a_recording_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        opened(StandIn(replay=str(tmp_path / "gone.sqlite")), None)
