"""What every GpuReader promises; each implementation brings a bench that can break its devices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

import pytest
from rooms.devices import AmdReader, NvidiaSmiReader, NvmlReader, ReplayReader, SimulatedDevice, SimulatedReader
from rooms.model import METRICS, Reading
from rooms.root import DeviceUnreadable, GpuReader, SystemClock
from support.fake_amdsmi import FakeAmdsmi
from support.fake_nvidia_smi import FakeNvidiaSmi
from support.fake_nvml import FakeNvml
from support.hand_clock import HandClock
from support.recorded_tape import Said, write_recording

COUNT = 4
RANGES: Mapping[str, tuple[type, float, float]] = {
    "utilization_percent": (int, 0, 100),
    "memory_utilization_percent": (int, 0, 100),
    "memory_used_bytes": (int, 1, 16 * 2**30),
    "temperature_c": (int, 10, 110),
    "power_w": (float, 1, 1000),
    "energy_j": (float, 0, 1e15),
    "sm_clock_mhz": (int, 1, 5000),
    "memory_clock_mhz": (int, 1, 20000),
    "throttle_reasons": (int, 0, 2**32),
    "sm_activity_percent": (float, 0, 100),
    "sm_occupancy_percent": (float, 0, 100),
    "busy_percent": (float, 0, 100),
    "tensor_percent": (float, 0, 100),
    "dram_percent": (float, 0, 100),
    "pcie_rx_bytes_per_s": (int, 0, 10**12),
    "pcie_tx_bytes_per_s": (int, 0, 10**12),
    "fan_percent": (int, 0, 100),
    "encoder_percent": (int, 0, 100),
    "decoder_percent": (int, 0, 100),
    "ecc_errors": (int, 0, 2**63),
}
EVERYBODY_GIVES = frozenset(
    {
        "utilization_percent",
        "memory_utilization_percent",
        "memory_used_bytes",
        "temperature_c",
        "power_w",
        "sm_clock_mhz",
        "memory_clock_mhz",
    }
)
GPU_UUID = r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class Bench(Protocol):
    """Four devices of 16 GiB and 300 W, and the means to break them."""

    gives: frozenset[str]  # at the first reading already
    cannot: Mapping[str, str]  # metric → the reason that this backend always has for not giving it
    refusable: Mapping[str, Sequence[str]]  # metric → what it is called on the other side
    uuid: str
    lost: str

    def open(self, unsupported: Sequence[str] = ()) -> GpuReader:
        """Open the devices; device 1 lacks the unsupported metrics."""
        ...

    def lose_device_3(self) -> None: ...


class SimulatedBench:
    """Device 3 has it in its script to be lost after an hour."""

    gives = EVERYBODY_GIVES | {
        "energy_j", "throttle_reasons", "busy_percent", "sm_activity_percent", "sm_occupancy_percent",
        "pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s",
    }  # fmt: skip
    cannot: Mapping[str, str] = {}
    refusable: Mapping[str, Sequence[str]] = {metric: [metric] for metric in gives}
    uuid, lost = GPU_UUID, "GPU is lost"

    def __init__(self, clock: HandClock) -> None:
        self._clock = clock

    def open(self, unsupported: Sequence[str] = ()) -> GpuReader:
        devices = (SimulatedDevice(1, unsupported=tuple(unsupported)), SimulatedDevice(3, lost_at_s=3600))
        return SimulatedReader(COUNT, devices, clock=self._clock, started_at_ms=self._clock.now_ms())

    def lose_device_3(self) -> None:
        self._clock.sleep(3600)


class NvmlBench:
    """The real binding on the stand-in library."""

    gives = EVERYBODY_GIVES | {"energy_j", "throttle_reasons"}
    cannot: Mapping[str, str] = {}
    refusable: Mapping[str, Sequence[str]] = {
        "utilization_percent": ["utilization"],
        "memory_used_bytes": ["memory", "memory_v2"],
        "temperature_c": ["temperature", "temperature_v"],
        "power_w": ["power"],
        "energy_j": ["energy"],
        "throttle_reasons": ["throttle", "throttle_old"],
    }
    uuid, lost = GPU_UUID, "GPU is lost"

    def __init__(self, clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> None:
        self._clock = clock
        self._library = FakeNvml(monkeypatch, devices=COUNT)

    def open(self, unsupported: Sequence[str] = ()) -> GpuReader:
        calls = [call for metric in unsupported for call in self.refusable[metric]]
        self._library.set(unsupported=",".join(f"{call}:1" for call in calls))
        return NvmlReader(self._clock)

    def lose_device_3(self) -> None:
        self._library.set(lost=3)


class NvidiaSmiBench:
    """A stand-in program, in real time: it talks on its own."""

    gives = EVERYBODY_GIVES | {"throttle_reasons", "busy_percent", "ecc_errors", "encoder_percent", "decoder_percent"}
    cannot: Mapping[str, str] = {"energy_j": "no energy counter", "fan_percent": "N/A"}
    refusable: Mapping[str, Sequence[str]] = {
        "utilization_percent": ["utilization.gpu"],
        "busy_percent": ["utilization.gpu"],
        "memory_used_bytes": ["memory.used"],
        "temperature_c": ["temperature.gpu"],
        "power_w": ["power.draw"],
        "throttle_reasons": ["clocks_event_reasons.active"],
        "ecc_errors": ["ecc.errors.uncorrected.volatile.total"],
    }
    uuid, lost = GPU_UUID, "GPU is lost"

    def __init__(self, folder: Path) -> None:
        self._program = FakeNvidiaSmi(folder, devices=COUNT)

    def open(self, unsupported: Sequence[str] = ()) -> GpuReader:
        self._program.set(unsupported={field: [1] for metric in unsupported for field in self.refusable[metric]})
        return NvidiaSmiReader(str(self._program.program), SystemClock(), interval_s=0.03)

    def lose_device_3(self) -> None:
        self._program.set(lost=[3])
        self._program.wait_for_rounds()


class AmdBench:
    """A stand-in package, with ROCm 7's answers."""

    gives = EVERYBODY_GIVES | {"energy_j", "busy_percent", "fan_percent", "ecc_errors"}
    cannot: Mapping[str, str] = {"throttle_reasons": "does not report throttle reasons"}
    refusable: Mapping[str, Sequence[str]] = {
        "utilization_percent": ["activity"],
        "busy_percent": ["activity"],
        "memory_used_bytes": ["vram"],
        "temperature_c": ["temp"],
        "power_w": ["power"],
        "energy_j": ["energy"],
        "fan_percent": ["fan"],
        "ecc_errors": ["ecc"],
    }
    uuid, lost = r"GPU-[0-9a-f]{16}", "Device Not found"

    def __init__(self, clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> None:
        self._clock = clock
        self._package = FakeAmdsmi(monkeypatch, devices=COUNT)

    def open(self, unsupported: Sequence[str] = ()) -> GpuReader:
        self._package.set(
            unsupported=",".join(f"{call}:1" for metric in unsupported for call in self.refusable[metric])
        )
        return AmdReader(self._clock)

    def lose_device_3(self) -> None:
        self._package.set(lost=3)


class ReplayBench:
    """Five minutes of simulated devices, a sample every 10 s; device 3 was lost in the fourth."""

    gives = SimulatedBench.gives
    cannot: Mapping[str, str] = {}
    refusable: Mapping[str, Sequence[str]] = SimulatedBench.refusable
    uuid, lost = GPU_UUID, "GPU is lost"

    def __init__(self, clock: HandClock, folder: Path) -> None:
        self._clock = clock
        self._folder = folder
        self._number = 0

    def open(self, unsupported: Sequence[str] = ()) -> GpuReader:
        self._number += 1
        recorded = HandClock()
        source = SimulatedReader(COUNT, clock=recorded, started_at_ms=recorded.now_ms())
        began_ms = recorded.now_ms()

        def said(index: int, at_s: float) -> Said:
            if index == 3 and at_s >= 240:
                return "GPU is lost"
            recorded.sleep(at_s - (recorded.now_ms() - began_ms) / 1000)
            reading = source.read(source.inventory()[index].uuid)
            return replace(reading, **dict.fromkeys(unsupported)) if index == 1 else reading

        gaps = {(1, metric): "Not Supported" for metric in unsupported}
        file = self._folder / f"{self._number}.sqlite"
        write_recording(file, source.inventory(), said, range(0, 300, 10), gaps)
        return ReplayReader(file, clock=self._clock, started_at_ms=self._clock.now_ms())

    def lose_device_3(self) -> None:
        self._clock.sleep(240)


BENCHES = {
    "simulated": SimulatedBench,
    "nvml": NvmlBench,
    "nvidia-smi": NvidiaSmiBench,
    "amd": AmdBench,
    "replay": ReplayBench,
}


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture(params=BENCHES)
def bench(request: pytest.FixtureRequest, clock: HandClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return make_bench(request.param, clock, monkeypatch, tmp_path)


def make_bench(name: str, clock: HandClock, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Bench:
    if name == "simulated":
        return SimulatedBench(clock)
    if name == "nvidia-smi":
        return NvidiaSmiBench(folder)
    if name == "replay":
        return ReplayBench(clock, folder)
    return NvmlBench(clock, monkeypatch) if name == "nvml" else AmdBench(clock, monkeypatch)


@pytest.fixture
def reader(bench: Bench) -> Iterator[GpuReader]:
    reader = bench.open()
    yield reader
    reader.close()


def uuids(reader: GpuReader) -> list[str]:
    return [device.uuid for device in reader.inventory()]


def test_inventory_lists_every_device_with_its_index_and_a_uuid_of_its_own(bench: Bench, reader: GpuReader) -> None:
    devices = reader.inventory()
    assert [device.index for device in devices] == [0, 1, 2, 3]
    assert len({device.uuid for device in devices}) == COUNT
    for device in devices:
        assert re.fullmatch(bench.uuid, device.uuid)
        assert device.name
        assert device.backend == reader.backend
        assert device.memory_total_bytes == 16 * 2**30
        assert device.power_limit_w == 300
        assert device.vendor == ("amd" if reader.backend == "amd" else "nvidia")


def test_inventory_is_the_same_when_asked_again_and_in_another_reader(bench: Bench, reader: GpuReader) -> None:
    other = bench.open()
    assert reader.inventory() == reader.inventory() == other.inventory()
    other.close()


def test_a_reader_says_in_words_why_it_is_used(reader: GpuReader) -> None:
    reader.inventory()
    assert re.search(r"\w", reader.why)


def test_every_metric_has_its_type_and_lies_in_a_sane_range(bench: Bench, reader: GpuReader) -> None:
    assert set(RANGES) == set(METRICS)
    for uuid in uuids(reader):
        reading = asdict(reader.read(uuid))
        assert {metric for metric in bench.gives if reading[metric] is None} == set()
        for metric, (kind, low, high) in RANGES.items():
            if reading[metric] is not None:
                assert type(reading[metric]) is kind, metric
                assert low <= reading[metric] <= high, metric


def test_what_is_missing_is_none_and_has_a_reason_in_words(bench: Bench, reader: GpuReader) -> None:
    for uuid in uuids(reader):
        reading = reader.read(uuid)
        assert set(reading.missing) <= set(METRICS) - bench.gives
        for metric, reason in reading.missing.items():
            assert getattr(reading, metric) is None, metric
            assert re.search(r"\w", reason)
        for metric, reason in bench.cannot.items():
            assert reason in reading.missing[metric]


def test_a_share_of_busy_time_says_where_it_is_from(bench: Bench, reader: GpuReader) -> None:
    reading = reader.read(uuids(reader)[0])
    assert set(reading.sources) <= {metric for metric in METRICS if getattr(reading, metric) is not None}
    if reading.busy_percent is not None and reader.backend != "replay":  # this recording did not say
        assert re.search(r"\w", reading.sources["busy_percent"])


def test_a_device_is_read_without_listing_the_devices_first(bench: Bench, reader: GpuReader) -> None:
    uuid = uuids(reader)[2]
    fresh = bench.open()
    assert fresh.read(uuid).utilization_percent is not None
    fresh.close()


def test_a_uuid_that_nobody_has_is_unreadable(reader: GpuReader) -> None:
    for uuid in ("GPU-00000000-0000-0000-0000-000000000000", "nonsense", ""):
        with pytest.raises(DeviceUnreadable, match=r"\w"):
            reader.read(uuid)


@pytest.mark.parametrize(
    ("name", "metric"), [(name, metric) for name, bench in BENCHES.items() for metric in sorted(bench.refusable)]
)
def test_an_unsupported_metric_is_none_with_a_reason_on_that_device_alone(
    name: str, metric: str, clock: HandClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reader = make_bench(name, clock, monkeypatch, tmp_path).open(unsupported=[metric])
    first, second, *_ = uuids(reader)
    reasons = set()
    for _ in range(3):
        reading = reader.read(second)
        assert getattr(reading, metric) is None
        reasons.add(reading.missing[metric])
    (reason,) = reasons  # a new text would be a new gap
    assert "not supported" in reason.lower()
    assert getattr(reader.read(first), metric) is not None
    reader.close()


def test_a_device_that_is_lost_on_the_way_is_unreadable_while_the_others_go_on(bench: Bench, reader: GpuReader) -> None:
    *others, doomed = uuids(reader)
    assert reader.read(doomed).power_w is not None
    bench.lose_device_3()
    for _ in range(2):
        with pytest.raises(DeviceUnreadable, match=bench.lost):
            reader.read(doomed)
        for uuid in others:
            assert reader.read(uuid).power_w is not None


def test_energy_never_runs_backwards_where_there_is_a_counter(
    bench: Bench, reader: GpuReader, clock: HandClock
) -> None:
    uuid = uuids(reader)[0]
    if "energy_j" in bench.cannot:
        assert reader.read(uuid).energy_j is None
        return
    energies = []
    for _ in range(20):
        energies.append(reader.read(uuid).energy_j)
        clock.sleep(10)
    known = [energy for energy in energies if energy is not None]
    assert len(known) == len(energies)
    assert known == sorted(known)
    assert known[-1] > known[0]


def test_nothing_but_a_reading_or_unreadable_comes_of_a_closed_reader(reader: GpuReader) -> None:
    uuid = uuids(reader)[0]
    reader.close()
    try:
        assert isinstance(reader.read(uuid), Reading)
    except DeviceUnreadable as reason:
        assert re.search(r"\w", str(reason))


def test_closing_twice_or_before_any_use_does_no_harm(bench: Bench, reader: GpuReader) -> None:
    bench.open().close()
    reader.inventory()
    reader.close()
    reader.close()
    assert reader.backend


@pytest.mark.parametrize(
    ("call", "metric", "shown"),
    [
        ("power", "power_w", "1e+19"),
        ("ecc", "ecc_errors", "10000000000000000000"),
        ("clock", "sm_clock_mhz", "10000000000000000000"),
    ],
)
def test_what_amdsmi_gives_and_cannot_be_is_none_with_one_reason(
    call: str, metric: str, shown: str, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = FakeAmdsmi(monkeypatch, devices=1)
    reader = AmdReader(clock)
    (uuid,) = uuids(reader)
    reasons = set()
    for said in (10**19, 10**19 + 1):
        package.set(says=f"{call}:{said}")
        reading = reader.read(uuid)
        assert getattr(reading, metric) is None
        assert reading.temperature_c == 40
        reasons.add(reading.missing[metric])
        clock.sleep(5)
    assert reasons == {f"implausible value: {shown}"}
    package.set(says=None)
    assert getattr(reader.read(uuid), metric) is not None
    reader.close()
