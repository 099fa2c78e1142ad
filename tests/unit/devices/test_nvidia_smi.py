"""Listening to nvidia-smi: one process for all readings, and what it may do wrong."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rooms.devices import LIMITS, SAMPLE_FIELDS, NvidiaSmiReader, Query, Stream, make_reading
from rooms.model import METRICS, Reading
from rooms.root import Clock, DeviceUnreadable, ReaderUnavailable, SystemClock
from support.fake_nvidia_smi import FakeNvidiaSmi, fake_uuid
from support.hand_clock import HandClock
from support.waiting import wait_for

Open = Callable[..., tuple[NvidiaSmiReader, FakeNvidiaSmi]]

REAL_LINE = (  # driver 580 on a H200
    "GPU-e90fd3dd-be93-5afb-b965-5ee0725cf7e5, 0, 0, 0, 33, 107.85, 375, 3201, 0x0000000000000001, [N/A], 0, 0, 0"
)


@pytest.fixture
def open_smi(tmp_path: Path) -> Iterator[Open]:
    readers: list[NvidiaSmiReader] = []

    def open_it(clock: Clock | None = None, **settings: Any) -> tuple[NvidiaSmiReader, FakeNvidiaSmi]:
        program = FakeNvidiaSmi(tmp_path / "bin", **settings)
        readers.append(NvidiaSmiReader(str(program.program), clock or SystemClock(), interval_s=0.03))
        return readers[-1], program

    yield open_it
    for reader in readers:
        reader.close()


def write_script(folder: Path, script: str) -> str:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def readable(reader: NvidiaSmiReader, index: int = 0) -> bool:
    try:
        reader.read(fake_uuid(index))
    except DeviceUnreadable:
        return False
    return True


def reason(reader: NvidiaSmiReader, index: int = 0) -> str:
    with pytest.raises(DeviceUnreadable) as caught:
        reader.read(fake_uuid(index))
    return str(caught.value)


# --- lines ------------------------------------------------------------------------------------------------------------


def test_a_line_of_a_real_card_is_understood() -> None:
    line = Query(SAMPLE_FIELDS).parse(REAL_LINE)
    assert line is not None
    uuid, values, missing = line
    reading = make_reading(values, missing)
    assert uuid == "GPU-e90fd3dd-be93-5afb-b965-5ee0725cf7e5"
    assert (reading.utilization_percent, reading.temperature_c, reading.power_w) == (0, 33, 107.85)
    assert (reading.sm_clock_mhz, reading.memory_clock_mhz, reading.throttle_reasons) == (375, 3201, 1)
    assert reading.missing == {"fan_percent": "N/A", "energy_j": "nvidia-smi has no energy counter"}


@pytest.mark.parametrize(
    "said",
    ["[N/A]", "[Not Supported]", "[Unknown Error]", "ERR!", "N/A", "", "[Insufficient Permissions]", "x"],
)
def test_what_is_no_value_is_none_with_that_as_the_reason_and_never_zero(said: str) -> None:
    line = Query(SAMPLE_FIELDS).parse(REAL_LINE.replace("107.85", said))
    assert line is not None
    reading = make_reading(line[1], line[2])
    assert reading.power_w is None
    assert reading.missing["power_w"] == (said.strip("[]") or "no value")
    assert reading.temperature_c == 33


@pytest.mark.parametrize(
    ("metric", "column", "said"),
    [
        ("utilization_percent", 1, "101"),
        ("memory_used_bytes", 3, "-5"),
        ("memory_used_bytes", 3, "1e300"),
        ("temperature_c", 4, "9999999999999999999"),
        ("temperature_c", 4, "-60"),
        ("power_w", 5, "10001"),
        ("power_w", 5, "nan"),
        ("sm_clock_mhz", 6, "100001"),
        ("throttle_reasons", 8, "0xFFFFFFFFFFFFFFFF"),
        ("throttle_reasons", 8, "-0x1"),
        ("ecc_errors", 10, "18446744073709551615"),
    ],
)
def test_a_number_that_cannot_be_is_none_with_what_was_said(metric: str, column: int, said: str) -> None:
    fields = REAL_LINE.split(", ")
    fields[column] = said
    line = Query(SAMPLE_FIELDS).parse(", ".join(fields))
    assert line is not None
    reading = make_reading(line[1], line[2])
    assert getattr(reading, metric) is None
    assert reading.missing[metric] == f"implausible value: {said}"
    assert reading.memory_clock_mhz == 3201


def test_numbers_that_cannot_be_have_one_reason_however_they_change() -> None:
    query, reasons = Query(SAMPLE_FIELDS), set()
    for said in ("-5", "-6", "7e20"):
        line = query.parse(REAL_LINE.replace("107.85", said))
        assert line is not None
        reasons.add(line[2]["power_w"])
    assert reasons == {"implausible value: -5"}


def test_every_metric_has_limits_and_sqlite_can_hold_them() -> None:
    assert set(METRICS) <= set(LIMITS)
    with closing(sqlite3.connect(":memory:")) as db:
        for low, high in LIMITS.values():
            assert low < high
            assert db.execute("SELECT ?, ?", (low, high)).fetchone() == (low, high)


@pytest.mark.parametrize(
    "text",
    ["", "No devices were found", "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.", "0, 1"],
)
def test_what_is_no_line_of_values_is_not_taken_for_one(text: str) -> None:
    assert Query(SAMPLE_FIELDS).parse(text) is None


def test_a_line_without_any_value_is_no_reading() -> None:
    uuid, *fields = REAL_LINE.split(", ")
    line = Query(SAMPLE_FIELDS).parse(", ".join([uuid, *["[GPU is lost]"] * len(fields)]))
    assert line is not None
    with pytest.raises(DeviceUnreadable, match="no metric can be read: GPU is lost"):
        make_reading(line[1], line[2])


# --- the process ------------------------------------------------------------------------------------------------------


def test_one_process_serves_every_device_and_every_reading(open_smi: Open) -> None:
    reader, program = open_smi()
    for _ in range(20):
        readings = [reader.read(device.uuid) for device in reader.inventory()]
        time.sleep(0.005)
    assert [reading.utilization_percent for reading in readings] == [50, 51, 52, 53]
    assert [reading.memory_used_bytes for reading in readings] == [2**30 * n for n in (1, 2, 3, 4)]
    assert [reading.power_w for reading in readings] == [100.25, 110.25, 120.25, 130.25]
    assert (readings[0].busy_percent, readings[0].sources) == (50.0, {"busy_percent": "utilization"})
    assert len(program.streams()) == 1
    assert len(program.starts()) == 2  # and one short call for the list


def test_the_list_of_devices_starts_no_stream(open_smi: Open) -> None:
    reader, program = open_smi()
    (device, *_) = reader.inventory()
    assert (device.name, device.pci_bus_id, device.driver) == (
        "NVIDIA Stand-in, 16 GB",
        "00000000:01:00.0",
        "535.129.03",
    )
    assert program.streams() == []


def test_fields_that_this_version_does_not_know_are_left_out_with_their_reason(open_smi: Open) -> None:
    unknown = ["utilization.encoder", "utilization.decoder", "clocks_event_reasons.active"]
    reader, program = open_smi(unknown_fields=unknown)
    reading = reader.read(fake_uuid(0))
    assert reading.missing["encoder_percent"] == "this version of nvidia-smi does not have utilization.encoder"
    assert reading.missing["decoder_percent"] == "this version of nvidia-smi does not have utilization.decoder"
    assert reading.throttle_reasons == 5  # by its older name
    assert (reading.temperature_c, reading.ecc_errors) == (40, 0)
    assert len(program.streams()) == 4  # one by one, at once
    assert reader.read(fake_uuid(0)) == reading


def test_the_list_of_devices_does_without_a_field_that_is_not_known(open_smi: Open) -> None:
    reader, _ = open_smi(unknown_fields=["enforced.power.limit", "power.limit"])
    assert [device.power_limit_w for device in reader.inventory()] == [None] * 4


def test_a_program_that_fails_makes_the_reader_unavailable_in_its_words(open_smi: Open) -> None:
    reader, _ = open_smi(fails="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    with pytest.raises(ReaderUnavailable, match="couldn't communicate with the NVIDIA driver"):
        reader.inventory()
    assert "couldn't communicate" in reason(reader)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "it prints nothing"),
        ("echo No devices were found", "it prints 'No devices were found'"),
        ("head -c 3000 /dev/urandom", "its output is not text"),
        ("echo GPU-5a1d,0,x", "it prints 'GPU-5a1d,0,x'"),
    ],
)
def test_a_program_that_lists_nothing_makes_the_reader_unavailable_even_if_it_ends_well(
    tmp_path: Path, script: str, reason: str
) -> None:
    reader = NvidiaSmiReader(write_script(tmp_path, script), SystemClock())
    with pytest.raises(ReaderUnavailable) as caught:
        reader.inventory()
    assert str(caught.value) == f"nvidia-smi lists no device: {reason}"


def test_a_program_that_hangs_is_waited_for_once(tmp_path: Path) -> None:
    reader = NvidiaSmiReader(write_script(tmp_path, "exec sleep 1000"), SystemClock(), timeout_s=1)
    began_s = time.monotonic()
    reasons = set()
    for _ in range(5):
        with pytest.raises(ReaderUnavailable) as caught:
            reader.inventory()
        reasons.add(str(caught.value))
        reason(reader)
    assert time.monotonic() - began_s < 4
    assert reasons == {"nvidia-smi cannot list the devices: no answer in 1 s"}


def test_a_program_that_does_not_stop_talking_is_ended_before_it_fills_the_memory(tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid\nexec yes GPU-5a1d,0,x"
    reader = NvidiaSmiReader(write_script(tmp_path, script), SystemClock())
    with pytest.raises(ReaderUnavailable, match="it printed more than 1 MiB"):
        reader.inventory()
    wait_for(lambda: not is_alive(int((tmp_path / "pid").read_text())), "it is gone")


def test_a_line_without_end_is_not_kept_and_the_next_one_is_heard(tmp_path: Path) -> None:
    heard: list[str] = []
    program = write_script(tmp_path, "head -c 500000 /dev/zero | tr '\\0' x\necho\necho next")

    def hear(text: str) -> bool:
        heard.append(text)
        return False

    stream = Stream(lambda: [program], hear)
    assert stream.wait(lambda: False, 60)
    assert [text[:4] for text in heard] == ["xxxx", "next"]
    assert len(heard[0]) <= 2**16
    assert len(stream.last_message) < 1000


def test_a_program_that_is_gone_makes_the_reader_unavailable(tmp_path: Path) -> None:
    with pytest.raises(ReaderUnavailable, match="No such file"):
        NvidiaSmiReader(str(tmp_path / "nvidia-smi"), SystemClock()).inventory()


def test_the_first_reading_waits_for_a_slow_start(open_smi: Open) -> None:
    reader, _ = open_smi(first_line_after_s=0.4)
    assert reader.read(fake_uuid(0)).temperature_c == 40


def test_a_silent_program_is_waited_for_once_for_all_devices_and_heard_as_soon_as_it_speaks(tmp_path: Path) -> None:
    program = FakeNvidiaSmi(tmp_path / "bin", silent=True)
    reader = NvidiaSmiReader(str(program.program), SystemClock(), interval_s=0.03, timeout_s=1)
    began_s = time.monotonic()
    for _ in range(5):
        assert [readable(reader, index) for index in range(4)] == [False] * 4
    assert time.monotonic() - began_s < 10
    program.set(silent=False)
    program.wait_for_rounds()
    wait_for(lambda: [readable(reader, index) for index in range(4)] == [True] * 4, "all are heard")
    reader.close()


def test_a_device_that_is_not_in_the_stream_holds_up_no_reading_of_the_others(open_smi: Open) -> None:
    reader, _ = open_smi(unlisted=[0, 2])
    assert [readable(reader, index) for index in range(4)] == [False, True, False, True]
    assert reason(reader, 2) == "nvidia-smi prints no line for this device"
    began_s = time.monotonic()
    for _ in range(20):
        assert [readable(reader, index) for index in range(4)] == [False, True, False, True]
    assert time.monotonic() - began_s < 10


def test_a_process_that_died_is_started_again_after_ten_seconds_and_not_before(open_smi: Open) -> None:
    clock = HandClock()
    reader, program = open_smi(clock, rounds=1, last_words="Unable to determine the device handle: Unknown Error")
    assert reader.read(fake_uuid(0)).temperature_c == 40
    clock.sleep(9)
    words = "nvidia-smi: Unable to determine the device handle: Unknown Error"
    wait_for(lambda: reason(reader) == words, words)
    for _ in range(5):
        assert reason(reader) == words
    assert len(program.streams()) == 1
    program.set(rounds=None)
    clock.sleep(2)
    wait_for(lambda: readable(reader), "a reading")
    assert len(program.streams()) == 2


def test_a_process_that_ends_without_a_word_leaves_its_exit_code(open_smi: Open) -> None:
    clock = HandClock()
    reader, program = open_smi(clock, rounds=1)
    reader.read(fake_uuid(0))
    wait_for(lambda: not is_alive(program.streams()[0]["pid"]), "it is gone")
    clock.sleep(6)
    wait_for(lambda: reason(reader) == "nvidia-smi: ended with exit code 1", "the reason")


def test_a_process_that_falls_silent_is_not_quoted_for_ever_and_the_reason_does_not_change(open_smi: Open) -> None:
    clock = HandClock()
    reader, program = open_smi(clock)
    assert readable(reader)
    program.set(silent=True)
    program.wait_for_rounds()
    clock.sleep(4)
    assert readable(reader)
    reasons = set()
    for _ in range(3):
        clock.sleep(2)
        reasons.add(reason(reader))
    assert reasons == {"nvidia-smi has printed nothing for 5 s"}


def test_a_device_that_is_no_longer_in_the_stream_is_unreadable_while_the_others_go_on(open_smi: Open) -> None:
    clock = HandClock()
    reader, program = open_smi(clock)
    assert readable(reader, 2)
    program.set(unlisted=[2])
    program.wait_for_rounds()
    clock.sleep(6)
    program.wait_for_rounds()
    assert readable(reader, 1)
    assert not readable(reader, 2)


def test_a_reading_never_waits_once_the_first_has_come(open_smi: Open) -> None:
    reader, _ = open_smi()
    assert isinstance(reader.read(fake_uuid(0)), Reading)
    began_s = time.monotonic()
    for _ in range(200):
        reader.read(fake_uuid(0))
    assert time.monotonic() - began_s < 3


def test_closing_ends_the_process(open_smi: Open) -> None:
    reader, program = open_smi()
    reader.read(fake_uuid(0))
    (stream,) = program.streams()
    assert is_alive(stream["pid"])
    reader.close()
    assert not is_alive(stream["pid"])


def test_a_reader_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    program = FakeNvidiaSmi(tmp_path / "bin")
    code = (
        "import time\nfrom badcjobs.clock import SystemClock\nfrom badcjobs.devices.nvidia_smi import NvidiaSmiReader\n"
        f"reader = NvidiaSmiReader({str(program.program)!r}, SystemClock())\n"
        f"reader.read({fake_uuid(0)!r})\nprint('reading', flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as recorder:
        assert recorder.stdout is not None and recorder.stdout.readline() == "reading\n"
        (stream,) = program.streams()
        assert is_alive(stream["pid"])
        recorder.kill()
    wait_for(lambda: not is_alive(stream["pid"]), "it is gone")


def test_signals_that_slurm_sends_to_everybody_do_not_end_the_readings(open_smi: Open) -> None:
    reader, program = open_smi()
    reader.read(fake_uuid(0))
    (stream,) = program.streams()
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(stream["pid"], signum)
    program.wait_for_rounds(3)
    assert is_alive(stream["pid"])
    assert readable(reader)
