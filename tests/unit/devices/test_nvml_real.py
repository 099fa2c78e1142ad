"""What holds on every NVIDIA device: on the stand-in library, and on a real driver when asked for it.

On a machine with a GPU: ``BADCJOBS_TEST_REAL_NVML=1 pytest tests/unit/devices/test_nvml_real.py``
"""

import itertools
import os
import statistics
import time

import pytest
from rooms.devices import NvmlReader
from rooms.model import METRICS
from rooms.root import DeviceUnreadable, SystemClock
from support.fake_nvml import FakeNvml

REAL = bool(os.environ.get("BADCJOBS_TEST_REAL_NVML"))
PACE = 10 if REAL else 200  # a real GPM window needs 100 ms
MOST = {  # a whole number for whole metrics
    **{metric: 100.0 for metric in METRICS if metric.endswith("_percent")},
    **dict.fromkeys(["utilization_percent", "memory_utilization_percent", "encoder_percent", "decoder_percent"], 100),
    "fan_percent": 200, "memory_used_bytes": 2**40, "temperature_c": 120, "power_w": 2000.0, "energy_j": 1e15,
    "sm_clock_mhz": 5000, "memory_clock_mhz": 30_000, "throttle_reasons": 2**32, "ecc_errors": 2**40,
    "pcie_rx_bytes_per_s": 10**12, "pcie_tx_bytes_per_s": 10**12,
}  # fmt: skip


class QuickClock(SystemClock):
    """The machine's clock, in seconds that pass faster, so that the next warm reading is soon due."""

    def monotonic_s(self):
        return PACE * super().monotonic_s()


class Machine:
    """The reader, its devices, and two readings of each with all metrics; the next one leaves out expensive ones."""

    def __init__(self):
        self.reader = NvmlReader(QuickClock())
        self.devices = list(self.reader.inventory())
        self.cards = [device for device in self.devices if device.slice is None]
        self.readings = {device.uuid: [] for device in self.devices}
        for _ in range(2):
            for uuid, readings in self.readings.items():
                readings.append(self.reader.read(uuid))
            time.sleep(5.5 / PACE)


@pytest.fixture(params=["as it is"] if REAL else ["without_gpm", "with_gpm"])  # a real device has GPM or not
def machine(request, monkeypatch):
    if not REAL:
        FakeNvml(monkeypatch, devices=2, mig="1:1", unsupported="gpm" if request.param == "without_gpm" else "")
    machine = Machine()
    yield machine
    machine.reader.close()


def test_every_card_has_a_uuid_a_name_and_memory_and_is_followed_by_its_slices(machine):
    assert machine.cards, "no NVIDIA GPU here"
    assert len({device.uuid for device in machine.devices}) == len(machine.devices)
    for card in machine.cards:
        assert card.uuid.startswith("GPU-") and card.name and card.driver
        assert (card.memory_total_bytes or 0) > 2**30
        assert card.slowdown_c is None or 50 < card.slowdown_c < 150
        assert machine.reader.why == f"NVML works: driver {card.driver}"
    card = machine.devices[0]
    for device in machine.devices:
        card = device if device.slice is None else card
        assert device.parent_uuid == (None if device.slice is None else card.uuid)
        assert device.index == card.index


def test_every_metric_is_plausible_or_missing_with_a_reason(machine):
    for readings in machine.readings.values():
        for reading, metric in itertools.product(readings, METRICS):
            value = getattr(reading, metric)
            assert value is None or type(value) is type(MOST[metric]), metric
            assert value is None or 0 <= value <= MOST[metric], metric
        for metric in METRICS:  # once a window has passed
            missing = readings[-1].missing.get(metric)
            assert (getattr(readings[-1], metric) is None) == bool(missing), (metric, missing)
    for card in machine.cards:
        for _ in range(20):
            reading = machine.reader.read(card.uuid)
            assert None not in (reading.memory_used_bytes, reading.temperature_c)
            assert reading.faults == ()


def test_busy_time_energy_and_processes_agree_with_their_sources(machine):
    for card in machine.cards:
        first, reading = machine.readings[card.uuid]
        assert reading.busy_percent is not None
        assert reading.sources["busy_percent"] in ("gpm", "processes", "utilization")
        assert (reading.sources["busy_percent"] == "gpm") == (reading.sm_occupancy_percent is not None)
        if first.energy_j is not None and reading.energy_j is not None:
            assert 0 < reading.energy_j - first.energy_j < 10 * 2000  # ten seconds of 2 kW
    for _, reading in machine.readings.values():
        assert (reading.processes is None) == ("processes" in reading.missing)
        for process in reading.processes or ():
            assert process.pid > 0
            assert process.memory_used_bytes is None or process.memory_used_bytes < 2**40


def test_an_unknown_uuid_is_unreadable_and_a_closed_reader_reads_again(machine):
    for uuid in ("GPU-00000000-0000-0000-0000-000000000000", "MIG-00000000-0000-0000-0000-000000000000", "nonsense"):
        with pytest.raises(DeviceUnreadable, match=r"\w"):
            machine.reader.read(uuid)
    machine.reader.close()
    assert machine.reader.read(machine.cards[0].uuid).memory_used_bytes is not None


if REAL:  # the time of a stand-in says nothing

    def test_a_reading_of_the_hot_metrics_costs_little():
        reader = NvmlReader(SystemClock())
        uuid = reader.inventory()[0].uuid
        reader.read(uuid)
        took_us = []
        for _ in range(500):
            start_ns = time.perf_counter_ns()
            reader.read(uuid)
            took_us.append((time.perf_counter_ns() - start_ns) / 1000)
        reader.close()
        assert statistics.median(took_us) <= 60
