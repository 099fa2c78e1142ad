"""What every GpuReader promises; each implementation brings a bench that can break its devices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

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
FRACTIONS = {"power_w", "energy_j"} | {
    f"{name}_percent" for name in ("sm_activity", "sm_occupancy", "busy", "tensor", "dram")
}
GIVEN = (
    "utilization_percent", "memory_utilization_percent", "memory_used_bytes", "temperature_c", "power_w",
    "sm_clock_mhz", "memory_clock_mhz",
)  # fmt: skip


class Bench:
    """Four devices of 16 GiB and 300 W, and the means to break them."""

    refusable: Mapping[str, str]  # metric → what it is called on the other side
    uuid, lost = r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "GPU is lost"

    def __init__(self, clock: HandClock, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.clock, self.monkeypatch, self.folder = clock, monkeypatch, folder
        self.prepare()

    def prepare(self) -> None: ...

    def open(self, unsupported: Sequence[str] = ()) -> GpuReader:
        """Open the devices; device 1 lacks the unsupported metrics, by their names on the other side."""
        raise NotImplementedError

    def lose_device_3(self) -> None:
        raise NotImplementedError


class SimulatedBench(Bench):
    """Device 3 has it in its script to be lost after an hour."""

    refusable: Mapping[str, str] = {metric: metric for metric in (*GIVEN, "energy_j", "busy_percent")}

    def open(self, unsupported: Sequence[str] = ()) -> GpuReader:
        devices = (SimulatedDevice(1, unsupported=tuple(unsupported)), SimulatedDevice(3, lost_at_s=3600))
        return SimulatedReader(COUNT, devices, clock=self.clock, started_at_ms=self.clock.now_ms())

    def lose_device_3(self) -> None:
        self.clock.sleep(3600)


class NvmlBench(Bench):
    """The real binding on the stand-in library."""

    refusable: Mapping[str, str] = {"memory_used_bytes": "memory memory_v2", "power_w": "power", "energy_j": "energy"}

    def prepare(self) -> None:
        self.library = FakeNvml(self.monkeypatch, devices=COUNT)

    def open(self, unsupported: Sequence[str] = ()) -> GpuReader:
        self.library.set(unsupported=",".join(f"{call}:1" for call in unsupported))
        return NvmlReader(self.clock)

    def lose_device_3(self) -> None:
        self.library.set(lost=3)


class NvidiaSmiBench(Bench):
    """A stand-in program, in real time: it talks on its own."""

    refusable: Mapping[str, str] = {
        "utilization_percent": "utilization.gpu",
        "busy_percent": "utilization.gpu",
        "power_w": "power.draw",
    }

    def prepare(self) -> None:
        self.program = FakeNvidiaSmi(self.folder, devices=COUNT)

    def open(self, unsupported: Sequence[str] = ()) -> GpuReader:
        self.program.set(unsupported={field: [1] for field in unsupported})
        return NvidiaSmiReader(str(self.program.program), SystemClock(), interval_s=0.03)

    def lose_device_3(self) -> None:
        self.program.set(lost=[3])
        self.program.wait_for_rounds()


class AmdBench(Bench):
    """A stand-in package, with ROCm 7's answers."""

    refusable: Mapping[str, str] = {
        "busy_percent": "activity",
        "power_w": "power",
        "energy_j": "energy",
        "ecc_errors": "ecc",
    }
    uuid, lost = r"GPU-[0-9a-f]{16}", "Device Not found"

    def prepare(self) -> None:
        self.package = FakeAmdsmi(self.monkeypatch, devices=COUNT)

    def open(self, unsupported: Sequence[str] = ()) -> GpuReader:
        self.package.set(unsupported=",".join(f"{call}:1" for call in unsupported))
        return AmdReader(self.clock)

    def lose_device_3(self) -> None:
        self.package.set(lost=3)


class ReplayBench(Bench):
    """Five minutes of simulated devices, a sample every 10 s; device 3 was lost in the fourth."""

    refusable: Mapping[str, str] = SimulatedBench.refusable

    def open(self, unsupported: Sequence[str] = ()) -> GpuReader:
        source = SimulatedReader(COUNT, clock=HandClock(), started_at_ms=0)

        def said(index: int, at_s: float) -> Said:
            if index == 3 and at_s >= 240:
                return "GPU is lost"
            clock = HandClock(round(at_s * 1000))
            reading = SimulatedReader(COUNT, clock=clock, started_at_ms=0).read(source.inventory()[index].uuid)
            return replace(reading, **dict.fromkeys(unsupported)) if index == 1 else reading

        gaps = {(1, metric): "Not Supported" for metric in unsupported}
        file = self.folder / f"{len(list(self.folder.iterdir()))}.sqlite"
        write_recording(file, source.inventory(), said, range(0, 300, 10), gaps)
        return ReplayReader(file, clock=self.clock, started_at_ms=self.clock.now_ms())

    def lose_device_3(self) -> None:
        self.clock.sleep(240)


@pytest.fixture(params=[SimulatedBench, NvmlBench, NvidiaSmiBench, AmdBench, ReplayBench])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    bench: Bench = request.param(HandClock(), monkeypatch, tmp_path)
    return bench


def uuids(reader: GpuReader) -> list[str]:
    return [device.uuid for device in reader.inventory()]


def check_reading(reader: GpuReader, reading: Reading) -> None:
    """See numbers of their kind, and reasons for what is missing."""
    given = {metric: getattr(reading, metric) for metric in METRICS if getattr(reading, metric) is not None}
    assert set(GIVEN) <= given.keys()
    kinds = {metric: float if metric in FRACTIONS else int for metric in given}
    assert {metric: type(value) for metric, value in given.items()} == kinds
    assert reading.missing.keys() <= set(METRICS) - given.keys()
    assert reading.sources.keys() <= given.keys()
    assert all(re.search(r"\w", reason) for reason in (*reading.missing.values(), *reading.sources.values()))
    if "busy_percent" in given and reader.backend != "replay":  # this recording did not say
        assert reading.sources["busy_percent"]


def test_every_device_is_listed_and_read_with_numbers_of_their_kind_and_energy_never_runs_backwards(
    bench: Bench,
) -> None:
    reader, other = bench.open(), bench.open()
    devices = reader.inventory()
    assert [device.index for device in devices] == [0, 1, 2, 3]
    assert len({device.uuid for device in devices}) == COUNT
    for device in devices:
        assert re.fullmatch(bench.uuid, device.uuid) and device.name
        assert (device.memory_total_bytes, device.power_limit_w) == (16 * 2**30, 300)
        assert (device.backend, device.vendor) == (reader.backend, "amd" if reader.backend == "amd" else "nvidia")
        check_reading(reader, reader.read(device.uuid))
    assert devices == reader.inventory() == other.inventory()
    assert re.search(r"\w", reader.why)
    energies = []
    for _ in range(20):
        bench.clock.sleep(10)
        energies.append(reader.read(devices[0].uuid).energy_j)
    if reader.backend == "nvidia-smi":
        assert set(energies) == {None}, "it has no counter"
    else:
        assert energies == sorted(energies) and energies[-1] > energies[0]
    reader.close(), other.close()


def test_unsupported_metrics_are_none_with_one_reason_on_that_device_alone_and_a_lost_device_is_unreadable(
    bench: Bench,
) -> None:
    reader = bench.open([call for calls in bench.refusable.values() for call in calls.split()])
    first, second, third, doomed = uuids(reader)
    healthy = reader.read(first)
    readings = [reader.read(second) for _ in range(3)]
    for metric in bench.refusable:
        assert {getattr(reading, metric) for reading in readings} == {None}
        (reason,) = {reading.missing[metric] for reading in readings}  # a new text would be a new gap
        assert "not supported" in reason.lower()
        assert getattr(healthy, metric) is not None
    assert reader.read(doomed).power_w is not None
    bench.lose_device_3()
    for _ in range(2):
        with pytest.raises(DeviceUnreadable, match=bench.lost):
            reader.read(doomed)
        for uuid in (first, third):
            assert reader.read(uuid).power_w is not None
    reader.close()


def test_a_reader_is_robust_to_unknown_uuids_to_reading_first_and_to_closing(bench: Bench) -> None:
    reader, unlisted = bench.open(), bench.open()
    for uuid in ("GPU-00000000-0000-0000-0000-000000000000", "nonsense", ""):
        with pytest.raises(DeviceUnreadable, match=r"\w"):
            reader.read(uuid)
    uuid = uuids(reader)[2]
    assert unlisted.read(uuid).utilization_percent is not None
    for _ in range(2):
        unlisted.close()
        try:
            assert isinstance(unlisted.read(uuid), Reading)
        except DeviceUnreadable as reason:
            assert re.search(r"\w", str(reason))
    unlisted.close(), reader.close()
    bench.open().close()
