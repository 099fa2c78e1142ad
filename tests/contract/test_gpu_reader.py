"""What every GpuReader promises; each implementation brings a bench that can break its devices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import pytest
from support.fake_nvml import FakeNvml
from support.hand_clock import HandClock

from badcjobs.gpu.nvml import NvmlReader
from badcjobs.gpu.script import SimulatedDevice, SimulationScript
from badcjobs.gpu.simulated import SimulatedReader
from badcjobs.model import METRICS
from badcjobs.seams import DeviceUnreadable, GpuReader

COUNT = 4
RANGES = {
    "utilization_percent": (int, 0, 100),
    "memory_utilization_percent": (int, 0, 100),
    "memory_used_bytes": (int, 1, 16 * 2**30),
    "temperature_c": (int, 10, 110),
    "power_w": (float, 1, 1000),
    "energy_j": (float, 0, 1e15),
    "sm_clock_mhz": (int, 1, 5000),
    "memory_clock_mhz": (int, 1, 20000),
    "throttle_reasons": (int, 0, 2**32),
}
NVML_CALLS = {  # what the stand-in library calls them
    "utilization_percent": ["utilization"],
    "memory_used_bytes": ["memory", "memory_v2"],
    "temperature_c": ["temperature", "temperature_v"],
    "power_w": ["power"],
    "energy_j": ["energy"],
    "throttle_reasons": ["throttle", "throttle_old"],
}


class SimulatedBench:
    """Device 3 has it in its script to be lost after an hour."""

    def __init__(self, clock: HandClock) -> None:
        self._clock = clock

    def open(self, unsupported: Sequence[str] = ()) -> GpuReader:
        """Open four devices; device 1 lacks the unsupported metrics."""
        devices = (SimulatedDevice(1, unsupported=tuple(unsupported)), SimulatedDevice(3, lost_at_s=3600))
        return SimulatedReader(COUNT, SimulationScript(devices), clock=self._clock, started_at_ms=self._clock.now_ms())

    def lose_device_3(self) -> None:
        self._clock.sleep(3600)


class NvmlBench:
    """The real binding on the stand-in library."""

    def __init__(self, clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> None:
        self._clock = clock
        self._library = FakeNvml(monkeypatch, devices=COUNT)

    def open(self, unsupported: Sequence[str] = ()) -> GpuReader:
        self._library.set(unsupported=",".join(f"{call}:1" for metric in unsupported for call in NVML_CALLS[metric]))
        return NvmlReader(self._clock)

    def lose_device_3(self) -> None:
        self._library.set(lost=3)


Bench = SimulatedBench | NvmlBench


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture(params=["simulated", "nvml"])
def bench(request: pytest.FixtureRequest, clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return SimulatedBench(clock) if request.param == "simulated" else NvmlBench(clock, monkeypatch)


@pytest.fixture
def reader(bench: Bench) -> Iterator[GpuReader]:
    reader = bench.open()
    yield reader
    reader.close()


def uuids(reader: GpuReader) -> list[str]:
    return [device.uuid for device in reader.inventory()]


def test_inventory_lists_every_device_with_its_index_and_a_uuid_of_its_own(reader: GpuReader) -> None:
    devices = reader.inventory()
    assert [device.index for device in devices] == [0, 1, 2, 3]
    assert len({device.uuid for device in devices}) == COUNT
    for device in devices:
        assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", device.uuid)
        assert device.name
        assert device.backend == reader.backend
        assert device.memory_total_bytes == 16 * 2**30
        assert device.power_limit_w == 300


def test_inventory_is_the_same_when_asked_again_and_in_another_reader(bench: Bench, reader: GpuReader) -> None:
    other = bench.open()
    assert reader.inventory() == reader.inventory() == other.inventory()
    other.close()


def test_every_metric_has_its_type_and_lies_in_a_sane_range(reader: GpuReader) -> None:
    for uuid in uuids(reader):
        reading = asdict(reader.read(uuid))
        for metric, (kind, low, high) in RANGES.items():
            assert type(reading[metric]) is kind, metric
            assert low <= reading[metric] <= high, metric
        assert reading["missing"] == {}


def test_a_metric_that_is_never_attempted_is_none_without_being_called_missing(reader: GpuReader) -> None:
    reading = asdict(reader.read(uuids(reader)[0]))
    for metric in set(METRICS) - set(RANGES):
        assert reading[metric] is None
        assert metric not in reading["missing"]


def test_a_device_is_read_without_listing_the_devices_first(bench: Bench, reader: GpuReader) -> None:
    uuid = uuids(reader)[2]
    fresh = bench.open()
    assert fresh.read(uuid).utilization_percent is not None
    fresh.close()


def test_a_uuid_that_nobody_has_is_unreadable(reader: GpuReader) -> None:
    for uuid in ("GPU-00000000-0000-0000-0000-000000000000", "nonsense", ""):
        with pytest.raises(DeviceUnreadable, match=r"\w"):
            reader.read(uuid)


@pytest.mark.parametrize("metric", sorted(NVML_CALLS))
def test_an_unsupported_metric_is_none_with_a_reason_on_that_device_alone(bench: Bench, metric: str) -> None:
    reader = bench.open(unsupported=[metric])
    first, second, *_ = uuids(reader)
    for _ in range(3):
        reading = reader.read(second)
        assert getattr(reading, metric) is None
        assert "Not Supported" in reading.missing[metric]
    assert getattr(reader.read(first), metric) is not None
    reader.close()


def test_a_device_that_is_lost_on_the_way_is_unreadable_while_the_others_go_on(bench: Bench, reader: GpuReader) -> None:
    *others, doomed = uuids(reader)
    assert reader.read(doomed).power_w is not None
    bench.lose_device_3()
    for _ in range(2):
        with pytest.raises(DeviceUnreadable, match="GPU is lost"):
            reader.read(doomed)
        for uuid in others:
            assert reader.read(uuid).power_w is not None


def test_energy_never_runs_backwards(reader: GpuReader, clock: HandClock) -> None:
    uuid = uuids(reader)[0]
    energies = []
    for _ in range(20):
        energies.append(reader.read(uuid).energy_j)
        clock.sleep(10)
    assert None not in energies
    assert energies == sorted(energies)
    assert energies[-1] > energies[0]


def test_closing_twice_or_before_any_use_does_no_harm(bench: Bench, reader: GpuReader) -> None:
    bench.open().close()
    reader.inventory()
    reader.close()
    reader.close()
