"""AMD's GPUs through amdsmi, whose answers changed from one ROCm to the next."""

from __future__ import annotations

from pathlib import Path

import pytest
from rooms.devices import AmdReader, has_amd_gpu
from rooms.model import ProcessReading
from rooms.root import DeviceUnreadable, ReaderUnavailable
from support.fake_amdsmi import FakeAmdsmi
from support.hand_clock import HandClock

FIRST = "GPU-a3d0000000000000"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakeAmdsmi:
    return FakeAmdsmi(monkeypatch, devices=2)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def reader(package: FakeAmdsmi, clock: HandClock) -> AmdReader:
    return AmdReader(clock)


@pytest.mark.parametrize("rocm", [5, 6, 7])
def test_the_same_device_reads_the_same_with_every_rocm(package: FakeAmdsmi, clock: HandClock, rocm: int) -> None:
    package.set(rocm=rocm)
    reader = AmdReader(clock)
    device = reader.inventory()[1]
    assert (device.index, device.name, device.vendor, device.backend) == (1, "AMD Stand-in", "amd", "amd")
    assert (device.memory_total_bytes, device.power_limit_w, device.slowdown_c) == (16 * 2**30, 300.0, 100)
    assert (device.pci_bus_id, device.driver) == ("0000:02:00.0", "6.8.5")
    reading = reader.read(device.uuid)
    assert (reading.utilization_percent, reading.memory_utilization_percent, reading.busy_percent) == (51, 21, 51.0)
    assert (reading.memory_used_bytes, reading.temperature_c, reading.power_w) == (2 * 2**30, 41, 110.0)
    assert (reading.sm_clock_mhz, reading.memory_clock_mhz, reading.fan_percent) == (1700, 1600, 20)
    assert reading.ecc_errors == 0
    assert reading.sources == {"busy_percent": "utilization"}
    assert reading.processes == (ProcessReading(4001, 2 * 2**30),)
    assert set(reading.missing) == {"throttle_reasons"}
    reader.close()


@pytest.mark.parametrize(
    ("rocm", "uuid"), [(7, FIRST), (6, FIRST), (5, "a3ff74a1-0000-1000-80d0-000000000000")], ids=["7", "6", "5"]
)
def test_a_device_has_the_name_that_rocr_visible_devices_takes_where_amdsmi_tells_it(
    package: FakeAmdsmi, clock: HandClock, rocm: int, uuid: str
) -> None:
    package.set(rocm=rocm)
    assert AmdReader(clock).inventory()[0].uuid == uuid


@pytest.mark.parametrize("said", ["N/A", "65535", str(2**32 - 1), str(2**64 - 1)])
def test_what_is_no_number_is_none_with_a_reason_and_never_zero(
    package: FakeAmdsmi, reader: AmdReader, said: str
) -> None:
    package.set(says=f"power:{said},activity:{said}")
    reading = reader.read(FIRST)
    for metric in ("power_w", "utilization_percent", "busy_percent"):
        assert getattr(reading, metric) is None
        assert said in reading.missing[metric]
    assert reading.memory_utilization_percent == 20  # of the same call
    assert "busy_percent" not in reading.sources


def test_energy_fan_errors_and_processes_rest_between_two_answers(
    package: FakeAmdsmi, reader: AmdReader, clock: HandClock
) -> None:
    slow = ("energy", "fan", "ecc", "processes")
    assert reader.read(FIRST).energy_j is not None
    for _ in range(4):
        clock.sleep(1)
        resting = reader.read(FIRST)
        assert (resting.energy_j, resting.processes) == (None, None)
        assert "energy_j" not in resting.missing
    assert [package.calls(call, 0) for call in slow] == [1, 1, 1, 1]
    clock.sleep(1)
    assert reader.read(FIRST).energy_j is not None
    assert [package.calls(call, 0) for call in slow] == [2, 2, 2, 2]


def test_what_a_device_does_not_support_is_asked_once(package: FakeAmdsmi, reader: AmdReader) -> None:
    package.set(unsupported="power:0,processes:0")
    readings = [reader.read(FIRST) for _ in range(5)]
    assert {reading.missing["power_w"] for reading in readings} == {
        "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported"
    }
    assert {reading.processes for reading in readings} == {None}
    assert (package.calls("power", 0), package.calls("processes", 0)) == (1, 1)


def test_a_device_that_comes_back_is_read_again(package: FakeAmdsmi, reader: AmdReader) -> None:
    assert reader.read(FIRST).power_w == 100
    package.set(lost=0)
    for _ in range(2):
        with pytest.raises(DeviceUnreadable, match="no metric can be read: AMDSMI_STATUS_NOT_FOUND - Device Not found"):
            reader.read(FIRST)
    package.set(lost=None)
    assert reader.read(FIRST).power_w == 100


def test_a_library_that_does_not_start_is_unavailable_in_its_words(package: FakeAmdsmi, clock: HandClock) -> None:
    package.set(devices=None)
    with pytest.raises(ReaderUnavailable, match=r"amdsmi does not start: .*driver not loaded"):
        AmdReader(clock).inventory()
    with pytest.raises(DeviceUnreadable, match="driver not loaded"):
        AmdReader(clock).read(FIRST)


def test_a_library_without_a_device_is_unavailable(package: FakeAmdsmi, clock: HandClock) -> None:
    package.set(devices=0)
    with pytest.raises(ReaderUnavailable, match="lists no device"):
        AmdReader(clock).inventory()


@pytest.mark.parametrize(("vendor", "expected"), [("0x1002\n", True), ("0x10de\n", False), (None, False)])
def test_an_amd_gpu_is_known_by_its_vendor(tmp_path: Path, vendor: str | None, expected: bool) -> None:
    if vendor is not None:
        card = tmp_path / "sys/class/drm/card1/device"
        card.mkdir(parents=True)
        (card / "vendor").write_text(vendor)
    assert has_amd_gpu(tmp_path) is expected
