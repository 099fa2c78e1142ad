"""AMD's GPUs through amdsmi, whose answers changed from one ROCm to the next."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from rooms.devices import AmdReader, has_amd_gpu
from rooms.model import InventoryDevice, ProcessReading, Reading
from rooms.root import DeviceUnreadable, ReaderUnavailable
from support.fake_amdsmi import FakeAmdsmi
from support.hand_clock import HandClock

FIRST, SECOND = "GPU-a3d0000000000000", "GPU-a3d0000000000001"
NO_THROTTLE = {"throttle_reasons": "amdsmi does not report throttle reasons as NVML does"}
RESTING = ("energy_j", "fan_percent", "ecc_errors", "processes")
ALWAYS = (
    "utilization_percent", "memory_utilization_percent", "memory_used_bytes", "temperature_c", "power_w",
    "sm_clock_mhz", "memory_clock_mhz", "busy_percent",
)  # fmt: skip


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
    package.set(rocm=rocm, ticks=2_000_000)
    reader = AmdReader(clock)
    uuid = "a3ff74a1-0000-1000-80d0-000000000001" if rocm == 5 else SECOND
    assert reader.inventory()[1] == InventoryDevice(
        1, uuid, "AMD Stand-in", "amd", 16 * 2**30, 300.0, "0000:02:00.0", "6.8.5", 100, vendor="amd"
    )
    assert asdict(reader.read(uuid)) == asdict(
        Reading(
            51, 21, 2 * 2**30, 41, 110.0, 2_000_000 * 15.259 / 1e6, 1700, 1600, busy_percent=51.0, fan_percent=20,
            ecc_errors=0, missing=NO_THROTTLE, sources={"busy_percent": "utilization"},
            processes=(ProcessReading(4001, 2 * 2**30),),
        )
    )  # fmt: skip
    assert package.running
    reader.close()
    reader.close()
    assert not package.running


def test_devices_are_in_the_order_of_hip_and_facts_that_cannot_be_are_none(
    package: FakeAmdsmi, clock: HandClock
) -> None:
    package.set(reversed=1, says="cap:N/A,vram:N/A", unsupported="temp:0")
    first, second = AmdReader(clock).inventory()
    assert [(first.index, first.uuid), (second.index, second.uuid)] == [(0, SECOND), (1, FIRST)]
    assert (second.power_limit_w, second.slowdown_c, first.slowdown_c) == (None, None, 100)
    package.set(says="cap:9999")
    assert AmdReader(clock).inventory()[0].power_limit_w == 9999.0
    package.set(says="cap:10001000000")
    assert AmdReader(clock).inventory()[0].power_limit_w is None
    for hip_id in ("N/A", 65537):
        package.set(hip_id=hip_id)
        assert [device.index for device in AmdReader(clock).inventory()] == [0, 1]
    package.set(serial="0x1F", rocm=6)
    assert AmdReader(clock).inventory()[0].uuid == "GPU-000000000000001f"
    package.set(nameless=1)
    nameless = AmdReader(clock).inventory()[0]
    assert (nameless.name, nameless.uuid, nameless.driver) == ("Board", "a3ff74a1-0000-1000-80d0-000000000000", None)


def test_what_is_no_number_is_none_with_a_reason_and_never_zero(
    package: FakeAmdsmi, reader: AmdReader, clock: HandClock
) -> None:
    for said in ("N/A", "65535", str(2**32 - 1), str(2**64 - 1)):
        package.set(says=f"power:{said},activity:{said},temp:{said},fan_max:{said}")
        reading = reader.read(FIRST)
        for metric in ("power_w", "utilization_percent", "busy_percent", "temperature_c"):
            assert getattr(reading, metric) is None
            assert reading.missing[metric] == f"amdsmi returns {said if said.isdecimal() else repr(said)}"
        assert reading.memory_utilization_percent == 20  # of the same call
        assert reading.sources == {}
    package.set(says="power:0,activity:0,vram:0,fan_max:0,processes:0")
    clock.sleep(5)
    reading = reader.read(FIRST)
    assert (reading.power_w, reading.utilization_percent, reading.busy_percent, reading.memory_used_bytes) == (
        0,
        0,
        0,
        0,
    )
    assert (reading.fan_percent, reading.missing["fan_percent"]) == (None, "no fan")
    reasons = set()
    for number in (10**19, 10**19 + 1):
        package.set(says=f"power:{number},ecc:{number},clock:{number}")
        clock.sleep(5)
        missing = reader.read(FIRST).missing
        reasons.add((missing["power_w"], missing["ecc_errors"], missing["sm_clock_mhz"]))
    assert reasons == {("implausible value: 1e+19", *["implausible value: 10000000000000000000"] * 2)}, "the first"


def test_the_edge_is_read_where_the_hot_spot_is_not(package: FakeAmdsmi, reader: AmdReader) -> None:
    package.set(no_hotspot=1)
    assert reader.read(FIRST).temperature_c == 35
    assert reader.inventory()[0].slowdown_c == 95


def test_energy_fan_errors_and_processes_are_read_every_five_seconds(
    package: FakeAmdsmi, reader: AmdReader, clock: HandClock
) -> None:
    given = []
    for _ in range(12):
        reading = reader.read(FIRST)
        values = [name for name in RESTING if getattr(reading, name) is not None]
        assert reading.missing == NO_THROTTLE
        assert None not in [getattr(reading, name) for name in ALWAYS], "the others every time"
        given.append(values == list(RESTING))
        assert given[-1] or values == []
        clock.sleep(0.5)
    assert given == [turn % 10 == 0 for turn in range(12)]
    assert [package.calls(call, 0) for call in ("energy", "fan", "ecc", "processes")] == [2, 2, 2, 2]


def test_what_a_device_does_not_support_is_asked_once_and_everything_else_again(
    package: FakeAmdsmi, reader: AmdReader, clock: HandClock
) -> None:
    package.set(unsupported="power:0,processes:0", failing="ecc:0")
    for _ in range(3):
        reading = reader.read(FIRST)
        assert reading.missing["power_w"] == "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported"
        assert reading.processes is None
        clock.sleep(5)
    assert [package.calls(call, 0) for call in ("power", "processes", "ecc")] == [1, 1, 3]
    package.set(lost=0)
    for _ in range(2):
        with pytest.raises(DeviceUnreadable, match="no metric can be read: AMDSMI_STATUS_NOT_FOUND - Device Not found"):
            reader.read(FIRST)
    package.set(lost=None, unsupported=None)
    assert (reader.read(FIRST).temperature_c, reader.read(FIRST).power_w) == (40, None)


def test_a_library_that_does_not_work_is_unavailable_in_its_words(package: FakeAmdsmi, clock: HandClock) -> None:
    for devices, words in ((None, r"amdsmi does not start: .*driver not loaded"), (0, "lists no device")):
        package.set(devices=devices)
        with pytest.raises(ReaderUnavailable, match=words):
            AmdReader(clock).inventory()
        with pytest.raises(DeviceUnreadable, match=words):
            AmdReader(clock).read(FIRST)


def test_an_amd_gpu_is_known_by_its_vendor(tmp_path: Path) -> None:
    assert not has_amd_gpu(tmp_path)
    for number, vendor, found in ((0, b"\xff", False), (1, b"0x10de\n", False), (2, b"0x1002\n", True)):
        card = tmp_path / f"sys/class/drm/card{number}/device"
        card.mkdir(parents=True)
        (card / "vendor").write_bytes(vendor)
        assert has_amd_gpu(tmp_path) is found
