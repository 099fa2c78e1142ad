"""SM activity and occupancy through dcgmi, for devices whose own reader does not give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rooms.devices import DcgmActivity, SimulatedDevice, SimulatedReader, simulated_uuid
from rooms.model import Reading
from support.fake_dcgmi import FakeDcgmi
from support.hand_clock import HandClock
from support.waiting import wait_for

NO_GPM = "Not Supported (simulated)"
LACKS = ("sm_activity_percent", "sm_occupancy_percent")


class Devices:
    """Two simulated devices without these metrics, and one with them, completed by a dcgmi."""

    def __init__(self, program: object) -> None:
        self.clock = HandClock()
        devices = (SimulatedDevice(0, unsupported=LACKS), SimulatedDevice(1, unsupported=LACKS))
        self._inner = SimulatedReader(3, devices, clock=self.clock, started_at_ms=self.clock.now_ms())
        self.dcgm = DcgmActivity(program and str(program), self.clock)

    def read(self, index: int = 0) -> Reading:
        return self.dcgm.complete(simulated_uuid(index), self._inner.read(simulated_uuid(index)))

    def shares(self, index: int = 0) -> list[float | str | None]:
        """Return activity and occupancy, or why they are missing."""
        reading = self.read(index)
        return [reading.missing.get(metric, getattr(reading, metric)) for metric in LACKS]

    def wait_until(self, good: Callable[[Reading], Any], index: int = 0) -> Reading:
        readings = [self.read(index)]
        wait_for(lambda: good(readings[-1]) or readings.append(self.read(index)), "a reading")
        return readings[-1]


@pytest.fixture
def dcgmi(tmp_path: Path) -> FakeDcgmi:
    # The host engine counts a card before ours that we cannot see.
    listed = {"0": "GPU-of-others", "1": simulated_uuid(0), "12": simulated_uuid(1)}
    rows = "GPU 0  0.999  0.999\nGPU-I 1   0.5    0.5\nGPU 1     0.52345       1.000\nGPU 12  0.000  N/A\n"
    return FakeDcgmi(tmp_path / "bin", listed, rows=rows)


@pytest.fixture
def devices(dcgmi: FakeDcgmi) -> Iterator[Devices]:
    devices = Devices(dcgmi.program)
    yield devices
    devices.dcgm.close()


def test_one_process_gives_each_device_the_shares_that_discovery_names(dcgmi: FakeDcgmi, devices: Devices) -> None:
    own = devices.read(2)
    assert own.sm_occupancy_percent is not None and "sm_occupancy_percent" not in own.sources
    assert dcgmi.starts() == [], "a device with its own values needs none"
    assert devices.read().missing == {}, "nothing is missing before its first word"
    reading = devices.wait_until(lambda reading: reading.sm_activity_percent is not None)
    assert (reading.sm_activity_percent, reading.sm_occupancy_percent, reading.missing) == (52.345, 100.0, {})
    assert reading.sources == {"busy_percent": "simulated", **dict.fromkeys(LACKS, "dcgmi")}
    devices.wait_until(lambda reading: reading.sm_activity_percent is not None, index=1)
    assert devices.shares(1) == [0.0, f"{NO_GPM}; dcgmi: N/A"], "zero is zero, and unknown is not"
    (_, *listing), (pid, *watching) = dcgmi.starts()
    assert (listing, watching) == (["discovery", "-l"], ["dmon", "-e", "1002,1003", "-d", "1000"])
    devices.dcgm.close()
    assert not Path(f"/proc/{pid}").exists()
    assert devices.read().sm_activity_percent is None, "what it said before is forgotten"


def test_shares_that_cannot_be_and_old_ones_are_missing_with_one_reason(dcgmi: FakeDcgmi, devices: Devices) -> None:
    dcgmi.write(rows="GPU 1  73.5  -0.25\n")
    devices.wait_until(lambda reading: reading.missing)
    reasons = [f"{NO_GPM}; dcgmi: implausible value: {said}" for said in ("73.5", "-0.25")]
    assert devices.shares() == reasons
    dcgmi.write(rows="GPU 1  0.5  nan\n")
    devices.wait_until(lambda reading: reading.sm_activity_percent)
    assert devices.shares() == [50.0, reasons[1]]
    dcgmi.write(rows="")
    rounds = dcgmi.rounds()
    wait_for(lambda: dcgmi.rounds() > rounds + 1, "it is silent")
    devices.clock.sleep(5)
    assert devices.shares() == [50.0, reasons[1]]
    devices.clock.sleep(0.1)
    assert devices.shares() == [f"{NO_GPM}; dcgmi: no data for this device"] * 2


REFUSAL = "Error setting watches. Result: -29: requires the host engine to be running as root."
TROUBLE: list[tuple[dict[str, str | None], str]] = [
    ({"refusal": REFUSAL}, REFUSAL),
    ({"discovery": "Error: unable to connect", "code": "1"}, "Error: unable to connect"),
    ({"discovery": ""}, "discovery lists no GPU"),
    ({"rows": None}, "ended with exit code 1"),
]


def test_a_dcgmi_that_refuses_leaves_one_reason_and_is_not_started_again(tmp_path: Path) -> None:
    for number, (trouble, words) in enumerate(TROUBLE):
        dcgmi = FakeDcgmi(tmp_path / str(number), {"1": simulated_uuid(0)}, **trouble)
        devices = Devices(dcgmi.program)
        devices.wait_until(lambda reading: reading.missing)
        starts = len(dcgmi.starts())
        for _ in range(3):
            assert devices.shares() == [f"{NO_GPM}; dcgmi: {words}"] * 2
            devices.clock.sleep(60)
        assert len(dcgmi.starts()) == starts
        devices.dcgm.close()
    assert Devices(None).shares() == [f"{NO_GPM}; dcgmi is not on PATH"] * 2
    others = Devices(FakeDcgmi(tmp_path / "others", {"0": "GPU-of-others"}).program)
    assert others.read().missing == {}
    others.clock.sleep(5.1)
    assert others.shares() == [f"{NO_GPM}; dcgmi: no data for this device"] * 2
    others.dcgm.close()
