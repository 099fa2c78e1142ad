"""SM activity and occupancy through dcgmi, around a reader that cannot give them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rooms.devices import (
    DcgmActivity,
    SimulatedDevice,
    SimulatedReader,
    parse_discovery,
    parse_dmon_row,
    simulated_uuid,
)
from rooms.model import Reading
from support.fake_dcgmi import FakeDcgmi
from support.hand_clock import HandClock

NO_GPM = "Not Supported (simulated)"
LACKS = ("sm_activity_percent", "sm_occupancy_percent")

DISCOVERY = """\
2 GPUs found.
+--------+----------------------------------------------------------------------+
| GPU ID | Device Information                                                   |
+--------+----------------------------------------------------------------------+
| 0      | Name: Tesla V100-SXM2-32GB                                           |
|        | PCI Bus ID: 00000000:18:00.0                                         |
|        | Device UUID: GPU-9ca02968-f496-c0c4-01d9-509cb6c32f5e                |
+--------+----------------------------------------------------------------------+
| 1      | Name: Tesla V100-SXM2-32GB                                           |
|        | PCI Bus ID: 00000000:3B:00.0                                         |
|        | Device UUID: GPU-1ca02968-f496-c0c4-01d9-509cb6c32f5e                |
+--------+----------------------------------------------------------------------+
0 NvSwitches found.
+-----------+
| Switch ID |
+-----------+
+-----------+
"""


@dataclass
class Devices:
    """Simulated devices, and a dcgmi that completes their readings."""

    inner: SimulatedReader
    dcgm: DcgmActivity

    def read(self, uuid: str) -> Reading:
        return self.dcgm.complete(uuid, self.inner.read(uuid))


@dataclass
class Setting:
    """Two simulated devices without these metrics, and one with them, behind a dcgmi."""

    dcgmi: FakeDcgmi
    clock: HandClock = field(default_factory=HandClock)

    def open(self, program: str | None) -> Devices:
        devices = (SimulatedDevice(0, unsupported=LACKS), SimulatedDevice(1, unsupported=LACKS))
        inner = SimulatedReader(3, devices, clock=self.clock, started_at_ms=self.clock.now_ms())
        return Devices(inner, DcgmActivity(program, self.clock))


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    # The host engine counts a card before ours that we cannot see.
    listed = {"0": "GPU-somebody-elses", "1": simulated_uuid(0), "2": simulated_uuid(1)}
    rows = {"0": ["0.999", "0.999"], "1": ["0.523", "0.250"], "2": ["0.000", "N/A"]}
    return Setting(FakeDcgmi(tmp_path / "bin", listed=listed, rows=rows))


@pytest.fixture
def reader(setting: Setting) -> Iterator[Devices]:
    reader = setting.open(str(setting.dcgmi.program))
    yield reader
    reader.dcgm.close()


def read_until(reader: Devices, good: Callable[[Reading], Any], index: int = 0) -> Reading:
    end_s = time.monotonic() + 60
    while not good(reading := reader.read(simulated_uuid(index))):
        assert time.monotonic() < end_s, reading
        time.sleep(0.01)
    return reading


def test_shares_are_given_to_the_device_that_discovery_names_and_not_by_index(reader: Devices) -> None:
    reading = read_until(reader, lambda reading: reading.sm_activity_percent is not None)
    assert (reading.sm_activity_percent, reading.sm_occupancy_percent) == (52.3, 25.0)
    assert {metric: reading.sources[metric] for metric in LACKS} == dict.fromkeys(LACKS, "dcgmi")
    assert reading.missing == {}
    assert reading.sources["busy_percent"] == "simulated"


def test_a_share_of_zero_is_zero_and_one_that_is_not_available_is_none_with_both_reasons(reader: Devices) -> None:
    reading = read_until(reader, lambda reading: reading.sm_activity_percent is not None, index=1)
    assert (reading.sm_activity_percent, reading.sm_occupancy_percent) == (0.0, None)
    assert reading.missing == {"sm_occupancy_percent": f"{NO_GPM}; dcgmi: N/A"}


def test_a_share_that_cannot_be_is_none_with_one_reason_however_it_changes(setting: Setting, reader: Devices) -> None:
    setting.dcgmi.set(rows={"1": ["73.5", "-0.25"]})
    reading = read_until(reader, lambda reading: reading.missing)
    expected = {
        "sm_activity_percent": f"{NO_GPM}; dcgmi: implausible value: 73.5",
        "sm_occupancy_percent": f"{NO_GPM}; dcgmi: implausible value: -0.25",
    }
    assert reading.missing == expected
    assert (reading.sm_activity_percent, reading.sm_occupancy_percent) == (None, None)
    assert not set(LACKS) & set(reading.sources)
    setting.dcgmi.set(rows={"1": ["0.5", "1e300"]})
    reading = read_until(reader, lambda reading: reading.sm_activity_percent == 50.0)
    assert reading.missing == {"sm_occupancy_percent": expected["sm_occupancy_percent"]}


def test_a_device_that_gives_them_itself_is_left_alone_and_starts_no_dcgmi(setting: Setting, reader: Devices) -> None:
    own = reader.read(simulated_uuid(2))
    assert own.sm_occupancy_percent is not None
    assert "sm_occupancy_percent" not in own.sources
    assert setting.dcgmi.starts() == []


def test_one_process_serves_all_readings(setting: Setting, reader: Devices) -> None:
    for index in (0, 1, 0, 1):
        read_until(reader, lambda reading: reading.sm_activity_percent is not None, index)
    assert [start["arguments"] for start in setting.dcgmi.starts()] == [
        ["discovery", "-l"],
        ["dmon", "-e", "1002,1003", "-d", "1000"],
    ]


def test_before_its_first_word_nothing_is_called_missing(reader: Devices) -> None:
    reading = reader.read(simulated_uuid(0))
    assert reading.sm_occupancy_percent is None or reading.sm_occupancy_percent == 25.0
    assert reading.missing == {}


def test_without_dcgmi_the_reason_says_so(setting: Setting) -> None:
    reading = setting.open(None).read(simulated_uuid(0))
    assert reading.missing == dict.fromkeys(LACKS, f"{NO_GPM}; dcgmi is not on PATH")
    assert reading.temperature_c is not None


REFUSAL = (
    "Error setting watches. Result: -29: Unable to watch one or more of the requested fields because doing so requires "
    "the host engine to be running as root."
)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ({"refuses": REFUSAL}, REFUSAL),
        ({"discovery_fails": "Error: unable to establish a connection to the specified host"}, "unable to establish"),
        ({"listed": {}}, "discovery lists no GPU"),
        ({"ends": True}, "ended with exit code 1"),
    ],
)
def test_a_dcgmi_that_refuses_leaves_one_reason_and_is_not_tried_again(
    setting: Setting, reader: Devices, trouble: dict[str, Any], words: str
) -> None:
    setting.dcgmi.set(**trouble)
    reasons = {read_until(reader, lambda reading: reading.missing).missing["sm_occupancy_percent"]}
    starts = len(setting.dcgmi.starts())
    for _ in range(5):
        setting.clock.sleep(60)
        reasons.add(reader.read(simulated_uuid(0)).missing["sm_occupancy_percent"])
    (reason,) = reasons
    assert reason.startswith(f"{NO_GPM}; dcgmi: ")
    assert words in reason
    assert len(setting.dcgmi.starts()) == starts


def test_a_value_of_more_than_five_seconds_ago_is_no_value(setting: Setting, reader: Devices) -> None:
    read_until(reader, lambda reading: reading.sm_activity_percent is not None)
    setting.dcgmi.set(silent=True)
    time.sleep(0.2)
    setting.clock.sleep(5)
    assert reader.read(simulated_uuid(0)).sm_activity_percent == 52.3
    setting.clock.sleep(1)
    reading = reader.read(simulated_uuid(0))
    assert reading.sm_activity_percent is None
    assert reading.missing["sm_activity_percent"] == f"{NO_GPM}; dcgmi: no data for this device"


def test_a_device_that_dcgm_does_not_know_is_missing_after_a_while(setting: Setting, reader: Devices) -> None:
    setting.dcgmi.set(listed={"0": "GPU-somebody-elses"})
    assert reader.read(simulated_uuid(0)).missing == {}
    setting.clock.sleep(6)
    assert "no data for this device" in reader.read(simulated_uuid(0)).missing["sm_occupancy_percent"]


def test_closing_ends_dcgmi(setting: Setting, reader: Devices) -> None:
    read_until(reader, lambda reading: reading.sm_activity_percent is not None)
    pid = setting.dcgmi.starts()[-1]["pid"]
    assert Path(f"/proc/{pid}").exists()
    reader.dcgm.close()
    assert not Path(f"/proc/{pid}").exists()


def test_the_list_of_dcgm_is_understood() -> None:
    assert parse_discovery(DISCOVERY) == {
        0: "GPU-9ca02968-f496-c0c4-01d9-509cb6c32f5e",
        1: "GPU-1ca02968-f496-c0c4-01d9-509cb6c32f5e",
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("GPU 7     0.523        0.250        ", (7, {"sm_activity_percent": 52.3, "sm_occupancy_percent": 25.0})),
        ("GPU 0     N/A          N/A", (0, dict.fromkeys(LACKS, "N/A"))),
        ("GPU 0     0.5          nan", (0, dict(zip(LACKS, [50.0, "implausible value: nan"], strict=True)))),
        ("GPU-I 0   0.5          0.5", None),
        ("#Entity   SMACT        SMOCC", None),
        ("Error setting watches. Result: -6: Feature not supported", None),
    ],
)
def test_rows_of_cards_are_understood_and_others_are_not(line: str, expected: object) -> None:
    assert parse_dmon_row(line.strip()) == expected
