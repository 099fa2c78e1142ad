"""Which reader is used, and why: the first that works, and the reasons of those that do not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
from rooms.devices import open_devices, open_reader
from rooms.model import StandIn
from rooms.root import DeviceUnreadable, GpuReader, ReaderUnavailable
from support.fake_amdsmi import FakeAmdsmi
from support.fake_dcgmi import FakeDcgmi
from support.fake_nvidia_smi import FakeNvidiaSmi
from support.fake_nvml import FakeNvml
from support.hand_clock import HandClock
from support.waiting import wait_for

NO_DRIVER = "the NVIDIA driver is not loaded on this machine"
Open = Callable[..., GpuReader]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Open:
    """Open a reader on a machine whose programs are in ``tmp_path``, without an AMD GPU."""
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)

    def open_it(path: Path | None = tmp_path, **stand_in: object) -> GpuReader:
        search_path = None if path is None else str(path)
        return open_reader(StandIn(**stand_in), HandClock(), HandClock().now_ms(), search_path, machine=tmp_path)

    return open_it


def test_the_first_reader_that_works_is_used_and_why_names_those_that_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opened: Open
) -> None:
    library, smi = FakeNvml(monkeypatch, devices=2), FakeNvidiaSmi(tmp_path)
    package = FakeAmdsmi(monkeypatch, devices=2)
    nvml = opened()
    assert (nvml.backend, nvml.why, len(nvml.inventory())) == ("nvml", "NVML works: driver 580.00.00", 2)
    assert smi.starts() == []
    nvml.close()
    library.set(init_error=9)
    by_smi = opened()
    assert (by_smi.backend, by_smi.why) == ("nvidia-smi", f"nvidia-smi works and NVML does not: {NO_DRIVER}")
    smi.set(fails="NVIDIA-SMI has failed")
    amd = opened()
    no_smi = "nvidia-smi cannot list the devices: NVIDIA-SMI has failed"
    assert (amd.backend, amd.why, package.running) == ("amd", f"{NO_DRIVER}; {no_smi}; amdsmi works", True)
    amd.close()
    package.set(devices=0)
    assert (opened().why, package.running) == (f"{NO_DRIVER}; {no_smi}; amdsmi lists no device", False)
    package.set(devices=2)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    smi.set(fails=None)
    assert opened(None).backend == "amd", "no search path, no program"


def test_where_nothing_works_all_reasons_are_given_nvml_was_started_once_and_tokens_are_used_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opened: Open
) -> None:
    FakeNvml(monkeypatch, devices=2, init_error=9)
    starts = []
    start = pynvml.nvmlInit
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: (starts.append(1), start()))
    reader = opened()
    assert (reader.backend, reader.why) == ("none", f"{NO_DRIVER}; no nvidia-smi on PATH; no AMD GPU")
    with pytest.raises(ReaderUnavailable, match=reader.why):
        reader.inventory()
    with pytest.raises(DeviceUnreadable, match=reader.why):
        reader.read("GPU-x")
    reader.close()
    assert starts == [1]
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho No devices were found\n")
    program.chmod(0o755)
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    with open_devices(environ, HandClock(), StandIn()) as found:
        assert [(device.token, device.pin) for device in found.grant.devices] == [("0", "0"), ("1", "1")]
        assert "nvidia-smi lists no device" in str(found.trouble)
        assert (found.backend, found.backend_why, found.inventory) == ("none", found.trouble, ())
    for number, vendor, is_amd in ((0, b"\xff", False), (1, b"0x10de\n", False), (2, b"0x1002\n", True)):
        card = tmp_path / f"sys/class/drm/card{number}/device"
        card.mkdir(parents=True)
        (card / "vendor").write_bytes(vendor)
        assert ("amdsmi is not installed (pip install 'badcjobs[amd]')" in opened().why) is is_amd
        assert opened().why.endswith("; no AMD GPU") is not is_amd
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: int("libnvidia-ml.so.1: file too short"))
    assert "nvml does not work: ValueError" in opened().why


def test_a_card_without_gpm_gets_its_occupancy_from_dcgmi_or_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opened: Open
) -> None:
    FakeNvml(monkeypatch, devices=1, unsupported="gpm")
    without = opened()
    (device,) = without.inventory()
    reading = without.read(device.uuid)
    assert reading.sm_occupancy_percent is None
    assert reading.missing["sm_occupancy_percent"].endswith("; dcgmi is not on PATH")
    without.close()
    dcgmi = FakeDcgmi(tmp_path, {"5": device.uuid}, rows="GPU 5  0.500  0.125\n")
    reader = opened()
    assert dcgmi.starts() == []  # only a reading needs it
    wait_for(lambda: reader.read(device.uuid).sm_occupancy_percent == 12.5, "its first row")
    assert reader.read(device.uuid).sources["sm_occupancy_percent"] == "dcgmi"
    reader.close()
    assert not Path(f"/proc/{dcgmi.starts()[-1][0]}").exists()
