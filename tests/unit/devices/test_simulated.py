"""The simulated devices: the same for everyone, and as the script says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rooms.devices import SimulatedDevice, SimulatedReader, load_script, open_reader, parse_script, simulated_uuid
from rooms.model import ProcessReading, Reading, StandIn
from rooms.root import BadInput, DeviceUnreadable
from support.hand_clock import HandClock

STARTED_AT_MS = 1_800_000_000_000


def read_at(at_s: float, index: int = 0, **table: Any) -> Reading:
    """Read one scripted device some seconds after the start."""
    _, script = parse_script({"device": [{"index": index, **table}]})
    clock = HandClock(STARTED_AT_MS + round(at_s * 1000))
    return SimulatedReader(index + 1, script, clock=clock, started_at_ms=STARTED_AT_MS).read(simulated_uuid(index))


def mistakes_in(document: dict[str, Any]) -> str:
    with pytest.raises(BadInput) as caught:
        parse_script(document)
    return str(caught.value)


def test_uuids_are_the_same_in_every_process() -> None:
    program = "from badcjobs.devices.simulated import simulated_uuid; print(simulated_uuid(3))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == simulated_uuid(3) == "GPU-51a0d000-0000-4000-8000-000000000003"


def test_the_same_instant_gives_the_same_reading_in_any_reader() -> None:
    assert read_at(17.25, index=2) == read_at(17.25, index=2)
    assert read_at(17.25, index=2) != read_at(18.25, index=2)


def test_without_a_script_devices_wave_around_80_percent_each_in_its_own_phase() -> None:
    waves = [[read_at(second, index).utilization_percent for second in range(60)] for index in range(4)]
    for wave in waves:
        assert sum(wave) / len(wave) == pytest.approx(80, abs=0.5)
        assert (min(wave), max(wave)) == (65, 95)
    assert len({tuple(wave) for wave in waves}) == 4


def test_memory_temperature_power_and_clock_follow_the_load() -> None:
    idle, busy = read_at(1, load=[[0, 0]]), read_at(1, load=[[0, 100]])
    for metric in ("memory_used_bytes", "temperature_c", "power_w", "sm_clock_mhz", "memory_clock_mhz"):
        assert getattr(idle, metric) < getattr(busy, metric), metric
    assert (idle.power_w, busy.power_w) == (50, 280)


def test_scripted_load_goes_in_steps_and_idles_before_the_first() -> None:
    load = [[10, 90], [20, 4.6]]
    seen = [read_at(at_s, load=load).utilization_percent for at_s in (0, 9.999, 10, 19.999, 20, 1000)]
    assert seen == [0, 0, 90, 90, 5, 5]


@pytest.mark.parametrize("table", [{}, {"load": [[2, 90], [7.5, 10]]}, {"load": []}], ids=["wave", "steps", "idle"])
def test_energy_is_the_integral_of_power_from_the_start(table: dict[str, Any]) -> None:
    step_s = 0.02
    middles = [(number + 0.5) * step_s for number in range(1000)]  # no middle falls on an edge of a step
    by_power = sum(read_at(at_s, index=1, **table).power_w or 0 for at_s in middles) * step_s
    assert read_at(0, index=1, **table).energy_j == 0
    assert read_at(20, index=1, **table).energy_j == pytest.approx(by_power, rel=1e-6)


def test_a_device_is_lost_from_its_second_on_until_it_is_back() -> None:
    script = {"lost_at_s": 10, "back_at_s": 20}
    for at_s in (0, 9.999, 20, 500):
        assert read_at(at_s, **script).utilization_percent is not None
    for at_s in (10, 19.999):
        with pytest.raises(DeviceUnreadable, match=r"GPU is lost \(simulated\)"):
            read_at(at_s, **script)
    with pytest.raises(DeviceUnreadable):
        read_at(10**6, lost_at_s=10)


def test_activity_and_traffic_follow_the_load_and_say_that_they_are_simulated() -> None:
    idle, busy = read_at(1, load=[[0, 0]]), read_at(1, load=[[0, 62.5]])
    assert (idle.busy_percent, busy.busy_percent) == (0, 62.5)
    assert busy.sources == {"busy_percent": "simulated"}
    for metric in ("sm_activity_percent", "sm_occupancy_percent", "pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s"):
        assert getattr(idle, metric) == 0 < getattr(busy, metric), metric


def test_processes_are_listed_only_where_the_script_says_so() -> None:
    listed = read_at(1, processes=[[4711, 900], [4712, 0]]).processes
    assert listed == (ProcessReading(4711, 900 * 2**20), ProcessReading(4712, 0))
    assert read_at(1, processes=[]).processes == ()
    assert read_at(1).processes is None


def test_each_fault_is_reported_once_by_every_reader_that_was_there() -> None:
    _, script = parse_script({"device": [{"index": 0, "fault": [[3, "Xid 31"], [3.5, "Xid 79"], [8, "Xid 48"]]}]})
    clock = HandClock(STARTED_AT_MS)
    early = SimulatedReader(2, script, clock=clock, started_at_ms=STARTED_AT_MS)
    heard = []
    for _ in range(6):
        heard.append(early.read(simulated_uuid(0)).faults)
        assert early.read(simulated_uuid(1)).faults == ()
        clock.sleep(2)
    assert heard == [(), (), ("Xid 31", "Xid 79"), (), (), ("Xid 48",)]
    late = SimulatedReader(2, script, clock=clock, started_at_ms=STARTED_AT_MS)
    clock.sleep(2)
    assert late.read(simulated_uuid(0)).faults == ()


def test_where_a_device_slows_down_is_in_the_inventory_if_the_script_says_it() -> None:
    _, script = parse_script({"device": [{"index": 1, "slowdown_c": 87}]})
    reader = SimulatedReader(2, script, clock=HandClock(), started_at_ms=STARTED_AT_MS)
    assert [device.slowdown_c for device in reader.inventory()] == [None, 87]


def test_name_and_memory_come_from_the_script_for_that_device_alone() -> None:
    script = [SimulatedDevice(1, name="Simulated A100", memory_total_mib=40960)]
    reader = SimulatedReader(2, script, clock=HandClock(), started_at_ms=STARTED_AT_MS)
    assert [(device.name, device.memory_total_bytes) for device in reader.inventory()] == [
        ("Simulated GPU", 16 * 2**30),
        ("Simulated A100", 40 * 2**30),
    ]


def test_no_devices_at_all_can_be_simulated() -> None:
    assert open_reader(StandIn(0), HandClock(), STARTED_AT_MS, None).inventory() == []


def test_a_script_that_speaks_of_more_devices_than_there_are_is_refused(tmp_path: Path) -> None:
    (tmp_path / "devices.toml").write_text("devices = 4\n[[device]]\nindex = 4\n")
    with pytest.raises(BadInput, match="device 4") as caught:
        open_reader(StandIn(script=str(tmp_path / "devices.toml")), HandClock(), STARTED_AT_MS, None)
    assert caught.value.fix == "devices = 5"


def test_without_a_number_there_are_as_many_devices_as_the_highest_index_says(tmp_path: Path) -> None:
    (tmp_path / "devices.toml").write_text("[[device]]\nindex = 2\n")
    reader = open_reader(StandIn(script=str(tmp_path / "devices.toml")), HandClock(), STARTED_AT_MS, None)
    assert len(reader.inventory()) == 3
    assert "devices = 0 must be a whole number from 1" in mistakes_in({"devices": 0})


def test_a_script_is_read_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "script.toml"
    file.write_text('[[device]]\nindex = 1\nload = [[0, 95], [60, 4.5]]\nunsupported = ["energy_j"]\n')
    assert load_script(file) == (2, (SimulatedDevice(1, load=((0, 95), (60, 4.5)), unsupported=("energy_j",)),))


@pytest.mark.parametrize(("text", "expected"), [("load = [", "is not TOML"), ("nodes = 3", "nodes"), (None, "No such")])
def test_a_bad_script_file_is_named_in_the_error(tmp_path: Path, text: str | None, expected: str) -> None:
    file = tmp_path / "script.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BadInput) as caught:
        load_script(file)
    assert str(file) in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "table",
    [
        {"index": -1},
        {"index": [1]},
        {"index": True},
        {"index": 0, "temperature": 30},
        {"index": 0, "load": [[0, 101]]},
        {"index": 0, "load": [[5, 10], [5, 20]]},
        {"index": 0, "load": 80},
        {"index": 0, "lost_at_s": "soon"},
        {"index": 0, "back_at_s": 5},
        {"index": 0, "lost_at_s": 5, "back_at_s": 5},
        {"index": 0, "unsupported": ["fan_rpm"]},
        {"index": 0, "unsupported": "energy_j"},
        {"index": 0, "name": 7},
        {"index": 0, "memory_total_mib": 0},
        {"index": 0, "slowdown_c": 0},
        {"index": 0, "processes": [4711]},
        {"index": 0, "processes": [[4711, -1]]},
        {"index": 0, "processes": [["me", 1]]},
        {"index": 0, "fault": [[1, 79]]},
        {"index": 0, "fault": [["soon", "Xid 79"]]},
        {"index": 0, "fault": "Xid 79"},
    ],
    ids=lambda table: str(table),
)
def test_a_mistake_in_a_device_is_named_with_its_key_and_value(table: dict[str, Any]) -> None:
    key, value = list(table.items())[-1]
    text = mistakes_in({"device": [table]})
    assert "device table 1" in text
    assert key in text
    assert key == "back_at_s" or key == "temperature" or repr(value) in text


def test_all_mistakes_of_a_script_are_told_at_once() -> None:
    text = mistakes_in({"speed": 2, "device": [{"name": "x"}, {"index": 1, "wattage": 3}, {"index": 1}]})
    for expected in ("'speed'", "1: 'index' is missing", "2: unknown key 'wattage'", "two tables for device 1"):
        assert expected in text


def test_a_single_device_table_is_answered_with_the_way_to_write_it() -> None:
    assert "[[device]]" in mistakes_in({"device": {"index": 0}})
