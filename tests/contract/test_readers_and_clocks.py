"""What every GpuReader promises, each with a bench that can break its devices; and what the clock does."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
from rooms.devices import (
    AmdReader,
    NvidiaSmiReader,
    NvmlReader,
    ReplayReader,
    SimulatedDevice,
    SimulatedReader,
    SysfsReader,
    simulated_devices,
)
from rooms.model import METRICS, Reading
from rooms.root import DeviceUnreadable, GpuReader, SystemClock
from support.fake_amdsmi import FakeAmdsmi
from support.fake_nvidia_smi import FakeNvidiaSmi
from support.fake_nvml import FakeNvml
from support.fake_sysfs import amd_card
from support.hand_clock import HandClock
from support.recorded_tape import write_recording

COUNT = 4
SHARES = {"sm_activity_percent", "sm_occupancy_percent", "busy_percent", "tensor_percent", "dram_percent"}
FRACTIONS = {"power_w", "energy_j", *SHARES}
GIVEN = ("utilization_percent", "memory_utilization_percent", "memory_used_bytes", "temperature_c", "power_w",
         "sm_clock_mhz", "memory_clock_mhz")  # fmt: skip


@dataclass
class Bench:
    """Four devices of 16 GiB and 300 W, and the means to break them."""

    clock: HandClock
    open: Callable[..., GpuReader]  # device 1 lacks these metrics, by their names on the other side
    lose_device_3: Callable[[], object]
    refusable: Mapping[str, str]  # metric → its names on the other side
    uuid: str = r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    lost: str = "GPU is lost"


SIMULATED = {metric: metric for metric in (*GIVEN, "energy_j", "busy_percent")}


def simulated(clock, patch, folder):
    """Device 3 has it in its script to be lost after an hour."""

    def opened(*unsupported):
        described = (SimulatedDevice(1, unsupported=unsupported), SimulatedDevice(3, lost_at_s=3600))
        return SimulatedReader(simulated_devices(COUNT, described), clock=clock, started_at_ms=clock.now_ms())

    return Bench(clock, opened, lambda: clock.sleep(3600), SIMULATED)


def steered(clock, stand_in, reader, *words):
    """A reader of a library; the stand-in for that library is given what it does not support and whom it has lost."""

    def opened(*unsupported):
        stand_in.set(unsupported=",".join(f"{call}:1" for call in unsupported))
        return reader(clock)

    return Bench(clock, opened, lambda: stand_in.set(lost=3), *words)


def nvml(clock, patch, folder):
    """The real binding on the stand-in library."""
    refusable = {"memory_used_bytes": "memory memory_v2", "power_w": "power", "energy_j": "energy"}
    return steered(clock, FakeNvml(patch, devices=COUNT), NvmlReader, refusable)


def nvidia_smi(clock, patch, folder):
    """A stand-in program, in real time: it talks on its own."""
    program = FakeNvidiaSmi(folder, devices=COUNT)

    def opened(*unsupported):
        program.set(unsupported={field: [1] for field in unsupported})
        return NvidiaSmiReader(str(program.program), SystemClock(), interval_s=0.03)

    def lose():
        program.set(lost=[3])
        program.wait_for_rounds()

    return Bench(clock, opened, lose, {"busy_percent": "utilization.gpu", "power_w": "power.draw"})


def amd(clock, patch, folder):
    """A stand-in package, with ROCm 7's answers."""
    refusable = {"busy_percent": "activity", "power_w": "power", "energy_j": "energy"}
    words = (refusable, r"GPU-[0-9a-f]{16}", "Device Not found")
    return steered(clock, FakeAmdsmi(patch, devices=COUNT), AmdReader, *words)


def replay(clock, patch, folder):
    """Five minutes of simulated devices, a sample every 10 s; device 3 was lost in the fourth."""

    def opened(*unsupported):
        devices = simulated_devices(COUNT)
        source = SimulatedReader(devices, clock=HandClock(), started_at_ms=0)

        def said(index, at_s):
            if index == 3 and at_s >= 240:
                return "GPU is lost"
            then = HandClock(round(at_s * 1000))
            reading = SimulatedReader(devices, clock=then, started_at_ms=0).read(source.inventory()[index].uuid)
            return replace(reading, **dict.fromkeys(unsupported)) if index == 1 else reading

        gaps = {(1, metric): "Not Supported" for metric in unsupported}
        file = folder / f"{len(list(folder.iterdir()))}.sqlite"
        write_recording(file, source.inventory(), said, range(0, 300, 10), gaps)
        return ReplayReader(file, clock=clock, started_at_ms=clock.now_ms())

    return Bench(clock, opened, lambda: clock.sleep(240), SIMULATED)


def sysfs(clock, patch, folder):
    """The files of the kernel's amdgpu driver."""
    cards = [amd_card(folder, number) for number in range(COUNT)]

    def opened(*unsupported):
        for file in unsupported:
            (cards[1] / "device" / file).unlink(missing_ok=True)
        return SysfsReader(folder)

    refusable = {"busy_percent": "gpu_busy_percent", "power_w": "hwmon/hwmon7/power1_average"}
    lost = "the kernel no longer lists this device"
    return Bench(clock, opened, lambda: (cards[3] / "device").unlink(), refusable, r"GPU-[0-9a-f]{16}", lost)


@pytest.fixture(params=[simulated, nvml, nvidia_smi, amd, replay, sysfs])
def bench(request, monkeypatch, tmp_path):
    return request.param(HandClock(), monkeypatch, tmp_path)


def uuids(reader):
    return [device.uuid for device in reader.inventory()]


def check_reading(reader, reading):
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


def test_every_device_is_listed_and_read_with_numbers_of_their_kind(bench):
    reader, other = bench.open(), bench.open()
    devices = reader.inventory()
    assert [device.index for device in devices] == [0, 1, 2, 3]
    assert len({device.uuid for device in devices}) == COUNT
    for device in devices:
        assert re.fullmatch(bench.uuid, device.uuid) and device.name
        assert (device.memory_total_bytes, device.power_limit_w) == (16 * 2**30, 300)
        vendor = "amd" if reader.backend in ("amd", "sysfs") else "nvidia"
        assert (device.backend, device.vendor) == (reader.backend, vendor)
        check_reading(reader, reader.read(device.uuid))
    assert devices == reader.inventory() == other.inventory()
    assert re.search(r"\w", reader.why)
    energies = []
    for _ in range(10):
        bench.clock.sleep(20)
        energies.append(reader.read(devices[0].uuid).energy_j)
    if reader.backend in ("nvidia-smi", "sysfs"):
        assert set(energies) == {None}, "it has no counter"
    else:
        assert energies == sorted(energies) and energies[-1] > energies[0]
    reader.close(), other.close()


def test_unsupported_metrics_are_none_with_a_reason_and_a_lost_device_is_unreadable(bench):
    reader = bench.open(*" ".join(bench.refusable.values()).split())
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


def test_a_reader_is_robust_to_unknown_uuids_to_reading_first_and_to_closing(bench):
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


def test_the_system_clock_tells_utc_in_whole_milliseconds_and_never_goes_back(monkeypatch):
    clock, wall_s, seen = SystemClock(), time.time(), []
    assert type(clock.now_ms()) is int and abs(clock.now_ms() - wall_s * 1000) < 500
    for seconds in (0.02, 0, -1, -0.5, *[0.0002] * 20):
        seen.append((clock.now_ms(), clock.monotonic_s()))
        clock.sleep(seconds)
    assert seen == sorted(seen)
    assert seen[1][0] - seen[0][0] >= 19 and seen[1][1] - seen[0][1] >= 0.0199
    monkeypatch.setattr(time, "time", lambda: wall_s - 3600)
    assert clock.now_ms() >= seen[-1][0]
