"""What holds on every NVIDIA device: on the stand-in library, and on a real driver when asked for it.

On a machine with a GPU: ``BADCJOBS_TEST_REAL_NVML=1 pytest tests/unit/devices/test_nvml_real.py``
"""

import os
import statistics
import time
import timeit

import pytest
from rooms.devices import NvmlReader
from rooms.model import METRICS
from rooms.root import DeviceUnreadable, SystemClock
from support.fake_nvml import FakeNvml

REAL = bool(os.environ.get("BADCJOBS_TEST_REAL_NVML"))
PACE = 10 if REAL else 200  # a real GPM window needs 100 ms


class QuickClock(SystemClock):
    """The machine's clock, in seconds that pass faster, so that the next warm reading is soon due."""

    def monotonic_s(self):
        return PACE * super().monotonic_s()


@pytest.fixture(params=["", "gpm"][: 1 if REAL else 2])  # a real device has GPM or not
def reader(request, monkeypatch):
    if not REAL:
        FakeNvml(monkeypatch, devices=2, mig="1:1", unsupported=request.param)
    reader = NvmlReader(QuickClock())
    yield reader
    reader.close()


def test_every_card_is_followed_by_its_slices_and_every_metric_is_plausible_or_missing_with_a_reason(reader):
    devices = reader.inventory()
    assert len({device.uuid for device in devices}) == len(devices) > 0, "no NVIDIA GPU here"
    card = devices[0]
    for device in devices:
        card = device if device.slice is None else card
        assert (device.index, device.parent_uuid) == (card.index, None if device is card else card.uuid)
        assert card.uuid.startswith("GPU-") and card.name and card.memory_total_bytes > 2**30
        assert card.slowdown_c is None or 50 < card.slowdown_c < 150
        assert reader.why == f"NVML works: driver {card.driver}"
    for kind in ("GPU", "MIG"):
        with pytest.raises(DeviceUnreadable, match=r"\w"):
            reader.read(f"{kind}-00000000-0000-0000-0000-000000000000")
    for device in devices:
        first = reader.read(device.uuid)
        time.sleep(20.5 / PACE)  # until all metrics are read again
        reading = reader.read(device.uuid)
        missing = {metric for metric in METRICS if getattr(reading, metric) is None}
        missing |= {"processes"} if reading.processes is None else set()
        assert missing == {metric for metric, reason in reading.missing.items() if reason}
        assert all(process.pid > 0 and (process.memory_used_bytes or 0) < 2**40 for process in reading.processes or ())
        if device.slice is None:
            assert 0 < reading.temperature_c < 120 and 0 <= reading.busy_percent <= 100
            assert reading.memory_used_bytes <= device.memory_total_bytes and (reading.power_w or 0) < 2000
            assert reading.sources["busy_percent"] in ("gpm", "processes", "utilization")
            assert (reading.sources["busy_percent"] == "gpm") == (reading.sm_occupancy_percent is not None)
            assert reading.energy_j is None or 0 < reading.energy_j - first.energy_j < 40 * 2000  # 40 s of 2 kW
        assert {reader.read(device.uuid).faults for _ in range(20)} == {()}


if REAL:  # the time of a stand-in says nothing

    def test_a_reading_of_the_hot_metrics_costs_little():
        reader = NvmlReader(SystemClock())
        uuid = reader.inventory()[0].uuid
        reader.read(uuid)
        assert statistics.median(timeit.repeat(lambda: reader.read(uuid), number=1, repeat=500)) <= 60e-6
        reader.close()
