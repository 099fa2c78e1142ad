"""The NVML reader where it can go wrong, with the real binding on a stand-in library."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest
from rooms.devices import NvmlReader
from rooms.root import DeviceUnreadable, ReaderUnavailable
from support.fake_nvml import FakeNvml, fake_nvml_environ, fake_uuid
from support.hand_clock import HandClock

Open = Callable[..., tuple[NvmlReader, FakeNvml]]


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def open_nvml(monkeypatch: pytest.MonkeyPatch, clock: HandClock) -> Iterator[Open]:
    readers: list[NvmlReader] = []

    def open_it(devices: int = 2, **settings: object) -> tuple[NvmlReader, FakeNvml]:
        library = FakeNvml(monkeypatch, devices, **settings)
        readers.append(NvmlReader(clock))
        return readers[-1], library

    yield open_it
    for reader in readers:
        reader.close()


def inventory_in_a_new_process(environ: dict[str, str]) -> str:
    """Print what the reader finds, or why it finds nothing."""
    program = """
from badcjobs.clock import SystemClock
from badcjobs.devices.nvml import NvmlReader
from badcjobs.seams import ReaderUnavailable
try:
    print([device.uuid for device in NvmlReader(SystemClock()).inventory()])
except ReaderUnavailable as why:
    print("unavailable:", why)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_binding_finds_the_library_on_the_search_path() -> None:
    assert inventory_in_a_new_process(fake_nvml_environ(devices=2)) == str([fake_uuid(0), fake_uuid(1)])


def test_a_machine_without_the_library_is_told_so(tmp_path: Path) -> None:
    # On a machine with a driver, this file stands in the way of the real library.
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    answer = inventory_in_a_new_process({"LD_LIBRARY_PATH": str(tmp_path)})
    assert answer == "unavailable: no NVIDIA driver on this machine: libnvidia-ml.so.1 was not found"


@pytest.mark.parametrize(
    ("code", "text"), [(9, "driver is not loaded"), (18, "different versions"), (999, "does not start: Unknown Error")]
)
def test_an_nvml_that_does_not_start_is_unavailable_with_the_reason(open_nvml: Open, code: int, text: str) -> None:
    reader, _ = open_nvml(init_error=code)
    with pytest.raises(ReaderUnavailable, match=text):
        reader.inventory()
    with pytest.raises(DeviceUnreadable, match=text):
        reader.read(fake_uuid(0))


def test_a_reader_recovers_once_nvml_starts(open_nvml: Open) -> None:
    reader, library = open_nvml(init_error=9)
    with pytest.raises(ReaderUnavailable):
        reader.inventory()
    library.set(init_error=None)
    assert len(reader.inventory()) == 2


def test_a_machine_with_a_driver_and_no_card_has_an_empty_inventory(open_nvml: Open) -> None:
    assert open_nvml(devices=0)[0].inventory() == []


@pytest.mark.parametrize(
    ("trouble", "text"), [({"lost": "1"}, "GPU is lost"), ({"failing": "uuid:1"}, "Unknown Error")], ids=str
)
def test_a_device_lost_while_listing_is_left_out_and_the_others_keep_their_index(
    open_nvml: Open, caplog: pytest.LogCaptureFixture, trouble: dict[str, str], text: str
) -> None:
    reader, _ = open_nvml(devices=4, **trouble)
    with caplog.at_level(logging.WARNING):
        assert [(device.index, device.uuid) for device in reader.inventory()] == [
            (index, fake_uuid(index)) for index in (0, 2, 3)
        ]
        reader.inventory()
    assert caplog.messages == [f"GPU 1 is left out: {text}"]  # once, however often they are listed


def test_inventory_tells_bus_and_driver_and_where_the_device_slows_down(open_nvml: Open) -> None:
    device = open_nvml()[0].inventory()[1]
    assert (device.pci_bus_id, device.driver, device.name) == ("00000000:11:00.0", "580.00.00", "Stand-in GPU")
    assert (device.slowdown_c, device.parent_uuid, device.slice) == (87, None, None)


def test_the_reader_says_why_it_is_used(open_nvml: Open) -> None:
    reader, _ = open_nvml()
    assert reader.why == "NVML is tried first"
    reader.inventory()
    assert reader.why == "NVML works: driver 580.00.00"


def test_a_card_that_keeps_facts_to_itself_is_still_listed(open_nvml: Open) -> None:
    device = open_nvml(devices=1, unsupported="limit,memory,pci,name,threshold,mig_mode")[0].inventory()[0]
    assert (device.power_limit_w, device.memory_total_bytes, device.pci_bus_id) == (None, None, None)
    assert (device.name, device.slowdown_c) == ("NVIDIA GPU", None)


def test_a_threshold_without_a_value_is_none(open_nvml: Open) -> None:
    assert open_nvml(blank="threshold")[0].inventory()[0].slowdown_c is None


def test_energy_is_asked_every_five_seconds_and_not_called_missing_in_between(
    open_nvml: Open, clock: HandClock
) -> None:
    reader, library = open_nvml()
    given = []
    for _ in range(11):
        reading = reader.read(fake_uuid(0))
        assert "energy_j" not in reading.missing
        given.append(reading.energy_j is not None)
        clock.sleep(1)
    assert given == [second % 5 == 0 for second in range(11)]
    assert library.calls("energy", 0) == 3


def test_each_device_has_its_own_rest_from_energy(open_nvml: Open) -> None:
    reader, _ = open_nvml()
    assert reader.read(fake_uuid(0)).energy_j is not None
    assert reader.read(fake_uuid(1)).energy_j is not None


def test_power_is_in_watts_and_energy_in_joules(open_nvml: Open, clock: HandClock) -> None:
    reader, _ = open_nvml()
    reading = reader.read(fake_uuid(1))
    assert reading.power_w == 110.0
    assert reading.energy_j is not None
    clock.sleep(5)
    later = reader.read(fake_uuid(1))
    assert later.energy_j is not None
    assert 0 <= later.energy_j - reading.energy_j < 110.0 * 10  # 110 W for less than ten real seconds


@pytest.mark.parametrize(
    ("refusal", "reason"), [("unsupported", "Not Supported"), ("forbidden", "Insufficient Permissions")]
)
def test_a_refused_call_is_not_made_again_and_keeps_its_reason(open_nvml: Open, refusal: str, reason: str) -> None:
    reader, library = open_nvml(**{refusal: "power:0"})
    for _ in range(3):
        assert reader.read(fake_uuid(0)).missing == {"power_w": reason}
        assert reader.read(fake_uuid(1)).missing == {}
    assert library.calls("power", 0) == 1
    assert library.calls("power", 1) == 3


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        (pynvml.NVML_ERROR_NOT_SUPPORTED, 1),
        (pynvml.NVML_ERROR_NO_PERMISSION, 1),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, 1),
        (25, 1),  # the driver does not know this version of the call
        (26, 1),  # the driver has dropped it
        (pynvml.NVML_ERROR_INVALID_ARGUMENT, 4),
        (pynvml.NVML_ERROR_TIMEOUT, 4),
        (pynvml.NVML_ERROR_UNKNOWN, 4),
    ],
)
def test_what_a_card_refuses_for_good_is_asked_once_and_everything_else_every_time(
    open_nvml: Open, clock: HandClock, code: int, calls: int
) -> None:
    reader, library = open_nvml(answering=f"power:0={code},fan:0={code},energy:0={code}")
    for _ in range(4):
        reading = reader.read(fake_uuid(0))
        assert {"power_w", "fan_percent", "energy_j"} <= reading.missing.keys()
        assert (reading.power_w, reading.fan_percent, reading.energy_j) == (None, None, None)
        clock.sleep(5)
    assert [library.calls(call, 0) for call in ("power", "fan", "energy")] == [calls] * 3


def test_a_failing_call_is_tried_again(open_nvml: Open) -> None:
    reader, library = open_nvml(failing="power")
    assert reader.read(fake_uuid(0)).missing == {"power_w": "Unknown Error"}
    library.set(failing=None)
    reading = reader.read(fake_uuid(0))
    assert reading.power_w == 100.0
    assert reading.missing == {}


@pytest.mark.parametrize("refusal", ["unsupported", "absent"])
def test_an_old_driver_is_asked_in_the_old_way_without_repeating_the_new_one(open_nvml: Open, refusal: str) -> None:
    reader, library = open_nvml(**{refusal: "memory_v2,throttle"})
    for _ in range(3):
        reading = reader.read(fake_uuid(0))
        assert (reading.memory_used_bytes, reading.throttle_reasons) == (3 * 2**29, 4)
        assert reading.missing == {}
    assert (library.calls("memory_v2", 0), library.calls("throttle", 0)) == (1, 1)


def test_a_driver_that_dropped_the_old_temperature_call_is_asked_in_the_new_way(open_nvml: Open) -> None:
    reading = open_nvml(absent="temperature")[0].read(fake_uuid(0))
    if hasattr(pynvml, "nvmlDeviceGetTemperatureV"):
        assert reading.temperature_c == 40
    else:  # a binding older than the new call
        assert reading.missing == {"temperature_c": "Function Not Found"}


def test_memory_used_leaves_out_what_the_driver_reserves(open_nvml: Open) -> None:
    assert open_nvml()[0].read(fake_uuid(0)).memory_used_bytes == 2**30


@pytest.mark.parametrize("call", ["memory_v2", "power", "energy", "throttle"])
def test_the_number_that_nvml_writes_for_no_value_is_none(open_nvml: Open, call: str) -> None:
    reading = open_nvml(blank=call)[0].read(fake_uuid(0))
    assert list(reading.missing.values()) == ["Not Available"]
    assert all(getattr(reading, metric) is None for metric in reading.missing)


def test_a_number_that_cannot_be_is_none_with_one_reason_however_it_changes(open_nvml: Open, clock: HandClock) -> None:
    reader, library = open_nvml(devices=1, ecc=1e19, now_s=3e13)
    reading = reader.read(fake_uuid(0))
    assert (reading.ecc_errors, reading.energy_j, reading.power_w) == (None, None, 100.0)
    assert reading.missing["ecc_errors"] == "implausible value: 10000000000000000000"
    assert reading.missing["energy_j"] == "implausible value: 3000000000000000.0"
    clock.sleep(5)
    library.set(ecc=1.1e19, now_s=3e13 + 5)
    again = reader.read(fake_uuid(0)).missing
    assert [again[metric] for metric in ("ecc_errors", "energy_j")] == [
        reading.missing[metric] for metric in ("ecc_errors", "energy_j")
    ]
    clock.sleep(5)
    library.set(ecc=3, now_s=1000)
    assert reader.read(fake_uuid(0)).ecc_errors == 3


@pytest.mark.parametrize("trouble", ["failing", "unsupported"])
def test_a_device_that_answers_nothing_is_unreadable_every_time(open_nvml: Open, trouble: str) -> None:
    calls = "utilization,memory,memory_v2,temperature,temperature_v,power,energy,clock,throttle,throttle_old"
    reader, _ = open_nvml(**{trouble: calls})
    for _ in range(3):
        with pytest.raises(DeviceUnreadable, match="no metric can be read"):
            reader.read(fake_uuid(0))


def test_a_device_that_comes_back_is_read_again_and_what_it_refused_is_remembered(
    open_nvml: Open, tmp_path: Path
) -> None:
    flag = tmp_path / "lost"
    reader, library = open_nvml(lost=0, lost_while=flag, unsupported="power:0")
    assert reader.read(fake_uuid(0)).utilization_percent == 50
    flag.touch()
    with pytest.raises(DeviceUnreadable, match="GPU is lost"):
        reader.read(fake_uuid(0))
    flag.unlink()
    assert reader.read(fake_uuid(0)).missing == {"power_w": "Not Supported"}
    assert library.calls("power", 0) == 1


def test_a_call_that_the_binding_lacks_is_refused_with_the_reason(
    open_nvml: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(pynvml, "nvmlDeviceGetPowerUsage")
    reader, _ = open_nvml()
    for _ in range(2):
        reading = reader.read(fake_uuid(0))
        assert reading.power_w is None
        assert reading.missing == {"power_w": "this version of pynvml has no nvmlDeviceGetPowerUsage"}


def test_a_lost_device_is_looked_for_again_with_every_reading(open_nvml: Open) -> None:
    reader, library = open_nvml(lost=0)
    for _ in range(2):
        with pytest.raises(DeviceUnreadable, match=r"^GPU is lost$"):
            reader.read(fake_uuid(0))
        assert reader.read(fake_uuid(1)).power_w == 110.0
    library.set(lost=None)
    assert reader.read(fake_uuid(0)).power_w == 100.0


def test_a_reader_can_be_used_again_after_it_was_closed(open_nvml: Open) -> None:
    reader, _ = open_nvml()
    reader.read(fake_uuid(0))
    reader.close()
    assert reader.read(fake_uuid(0)).power_w == 100.0


def test_importing_the_stage_does_not_load_the_binding() -> None:
    program = "import sys, badcjobs.devices.choose; print('pynvml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
