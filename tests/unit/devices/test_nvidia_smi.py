"""Reading through nvidia-smi: one process for all readings, and what it may do wrong."""

import os
import signal
import sqlite3
from contextlib import closing

import pytest
from rooms.devices import LIMITS, SAMPLE_FIELDS, NvidiaSmiReader, ReadingBuilder, Stream, make_reading, parse_line
from rooms.model import METRICS, InventoryDevice
from rooms.root import DeviceUnreadable, ReaderUnavailable, SystemClock
from support.cases import read_data
from support.device_stories import shown
from support.fake_nvidia_smi import FakeNvidiaSmi, fake_uuid
from support.hand_clock import HandClock
from support.stand_ins import install
from support.waiting import is_running, wait_for

REAL_LINE = (  # driver 580 on a H200
    "GPU-e90fd3dd-be93-5afb-b965-5ee0725cf7e5, 7, 8, 9, 33, 107.85, 375, 3201, 0x0000000000000011, [N/A], 2"
)


@pytest.fixture
def open_smi(tmp_path):
    readers = []

    def open_it(clock=None, timeout_s=20, **settings):
        program, clock = FakeNvidiaSmi(tmp_path / "bin", **settings), clock or SystemClock()
        readers.append(NvidiaSmiReader(str(program.program), clock, interval_s=0.03, timeout_s=timeout_s))
        return readers[-1], program

    yield open_it
    for reader in readers:
        reader.close()


def state(reader, index=0):
    """Return why a device cannot be read, or an empty text."""
    try:
        reader.read(fake_uuid(index))
    except DeviceUnreadable as reason:
        return str(reason)
    return ""


def states(reader):
    return [not state(reader, index) for index in range(4)]


def parsed(said, column=5):
    """Return the reading of a real line with something else in one column, 5: the power."""
    fields = REAL_LINE.split(", ")
    fields[column] = said
    line = parse_line(", ".join(fields), SAMPLE_FIELDS)
    assert line is not None and line.uuid == fields[0]
    return make_reading(ReadingBuilder({}), line)


def test_a_line_is_a_reading_and_what_cannot_be_is_none_with_its_reason_and_never_zero(pages):
    usual = shown(parsed("107.85"))
    lines = [REAL_LINE, "  " + ", ".join(f"{name} {text}" for name, text in usual.items()), ""]
    for number, (name, *words) in enumerate(
        line.split() for line in read_data("nvidia_smi_words.txt").split("\n\n")[1].splitlines()
    ):
        for said in [*words, ""] if words else []:
            changed = shown(parsed(said, number + 1)).items() - usual.items()
            lines.append(f"{name} {said}: " + ", ".join(f"{name} {text}" for name, text in sorted(changed)))
    pages({"numbers.txt": "\n".join(lines)})
    uuid, *fields = REAL_LINE.split(", ")
    for text in ("", "No devices were found", "Unable to determine the device handle for GPU 0: GPU is lost.", "0, 1",
                 REAL_LINE.replace("GPU-", ""), ", ".join([uuid, *fields[1:]])):  # fmt: skip
        assert parse_line(text, SAMPLE_FIELDS) is None
    lost = parse_line(", ".join([uuid, *["[GPU is lost]"] * len(fields)]), SAMPLE_FIELDS)
    with pytest.raises(DeviceUnreadable, match=r"^no metric can be read: GPU is lost$"):
        make_reading(ReadingBuilder({}), lost)
    assert {metric.rpartition("_")[2] for metric in METRICS} <= set(LIMITS)
    with closing(sqlite3.connect(":memory:")) as db:
        for low, high in LIMITS.values():
            assert low < high and db.execute("SELECT ?, ?", (low, high)).fetchone() == (low, high)


def test_one_process_serves_every_device_and_every_reading_and_ends_with_the_reader(open_smi):
    reader, program = open_smi()
    facts = {"memory_total_bytes": 16 * 2**30, "power_limit_w": 300.0, "driver": "535.129.03"}
    facts["pci_bus_id"] = "00000000:02:00.0"
    assert reader.inventory()[1] == InventoryDevice(1, fake_uuid(1), "NVIDIA Stand-in, 16 GB", "nvidia-smi", **facts)
    assert program.streams() == [], "the list needs no stream"
    for _ in range(20):
        readings = [reader.read(device.uuid) for device in reader.inventory()]
    assert [reading.power_w for reading in readings] == [100.25, 110.25, 120.25, 130.25]
    assert [reading.memory_used_bytes for reading in readings] == [2**30 * n for n in (1, 2, 3, 4)]
    (stream,) = program.streams()
    assert (len(program.starts()), stream["arguments"][-1]) == (2, "30")
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):  # Slurm sends them to all processes
        os.kill(stream["pid"], signum)
    program.wait_for_rounds(3)
    assert is_running(stream["pid"]) and states(reader) == [True] * 4
    reader.close()
    assert not is_running(stream["pid"])
    assert reader.read(fake_uuid(0)).temperature_c == 40, "a later reading starts it again"


def test_what_it_is_not_asked_is_missing_with_its_reason(open_smi):
    reader, program = open_smi(first_line_after_s=0.2)
    reading = reader.read(fake_uuid(0))
    assert (reading.throttle_reasons, reading.temperature_c, reading.ecc_errors) == (5, 40, 0)
    asked = {f"{name}_percent": "not asked of nvidia-smi" for name in ("encoder", "decoder")}
    assert reading.missing == {"energy_j": "nvidia-smi has no energy counter", "fan_percent": "N/A", **asked}
    assert len(program.streams()) == 1
    assert reader.read(fake_uuid(0)) == reading


# What it prints instead of a list.
UNUSABLE = {
    "exit 0": "lists no device: it prints ''",
    "echo No devices were found": "lists no device: it prints 'No devices were found'",
    "printf '%0200d' 0": f"lists no device: it prints '{'0' * 80}'",
    "echo no driver; exit 9": "cannot list the devices: no driver",
    "exit 9": "cannot list the devices: ended with exit code 9",
    "exec yes GPU-5a1d,0,x": "cannot list the devices: it printed more than 10000 lines",
}


def test_a_program_that_lists_nothing_makes_the_reader_unavailable(tmp_path):
    for script, reason in UNUSABLE.items():
        text = f"#!/bin/sh\necho $$ > {tmp_path}/pid\n{script}\n"
        program = install(tmp_path / "nvidia-smi", text)
        reader = NvidiaSmiReader(str(program), SystemClock(), timeout_s=60)
        with pytest.raises(ReaderUnavailable) as caught:
            reader.inventory()
        assert str(caught.value) == f"nvidia-smi {reason}"
        assert state(reader) == f"nvidia-smi {reason}"
        pid = int((tmp_path / "pid").read_text())
        wait_for(lambda pid=pid: not is_running(pid), "it is gone")
    with pytest.raises(ReaderUnavailable, match="it does not start: No such file"):
        NvidiaSmiReader(str(tmp_path / "gone"), SystemClock()).inventory()
    hanging = NvidiaSmiReader(str(install(program, "#!/bin/sh\nexec sleep 1000\n")), SystemClock(), timeout_s=0.3)
    assert {state(hanging) for _ in range(3)} == {"nvidia-smi cannot list the devices: no answer in 0.3 s"}


def test_the_last_eight_messages_of_a_program_are_kept_each_once():
    heard = []
    lines = "seq 1 3; head -c 1000 /dev/zero | tr '\\0' x; echo; echo next; echo next; seq 4 8; echo last"
    stream = Stream(lambda: ["sh", "-c", lines], lambda text: heard.append(text) or text == "last")
    assert stream.wait(lambda: False, 60)
    assert [text[:4] for text in heard] == [*"123", "xxxx", "next", "next", *"45678", "last"]
    assert stream.last_message == f"3 {'x' * 500}… next 4 5 6 7 8"
    assert (stream.ended, stream.exit_code) == (True, 0)


def test_a_silent_program_is_waited_for_once_and_heard_as_soon_as_it_speaks(open_smi):
    reader, program = open_smi(timeout_s=1, unlisted=[0, 1, 2, 3])
    silent = "nvidia-smi: no line for this device in 5 s"
    for _ in range(2):
        assert {state(reader, index) for index in range(4)} == {silent}
    program.set(unlisted=[0, 2])
    wait_for(lambda: states(reader) == [False, True, False, True], "two are heard")
    assert state(reader, 2) == silent
    assert state(reader, 9) == f"nvidia-smi lists no device {fake_uuid(9)!r}"


def test_a_process_that_died_is_started_again_after_ten_seconds_and_its_lines_count_for_five(open_smi):
    clock = HandClock()
    reader, program = open_smi(clock, rounds=1, last_words="Unable to determine the device handle: Unknown Error")
    assert reader.read(fake_uuid(0)).temperature_c == 40
    wait_for(lambda: not is_running(program.streams()[0]["pid"]), "it is gone")
    clock.sleep(5)
    assert states(reader) == [True] * 4, "the last line counts for 5 s"
    clock.sleep(4.9)
    words = "nvidia-smi: Unable to determine the device handle: Unknown Error"
    wait_for(lambda: state(reader) == words, words)
    assert len(program.streams()) == 1
    program.set(rounds=None, first_line_after_s=0.3)
    clock.sleep(0.1)
    assert state(reader) == words, "until the next one speaks"
    wait_for(lambda: not state(reader), "a reading")
    assert len(program.streams()) == 2
    program.set(unlisted=[0, 1, 2, 3])
    program.wait_for_rounds()
    clock.sleep(5)
    assert states(reader) == [True] * 4
    for _ in range(3):
        clock.sleep(1)
        assert state(reader) == "nvidia-smi: no line for this device in 5 s"
    program.set(unlisted=[2])
    wait_for(lambda: states(reader) == [True, True, False, True], "one is no longer in the stream")


def test_a_reader_that_is_killed_leaves_no_process_behind(tmp_path):
    program = FakeNvidiaSmi(tmp_path / "bin")
    recorder = os.fork()
    if recorder == 0:
        NvidiaSmiReader(str(program.program), SystemClock(), timeout_s=60).read(fake_uuid(0))
        (tmp_path / "reading").touch()
        signal.pause()
    wait_for(lambda: (tmp_path / "reading").exists(), "it reads")
    (stream,) = program.streams()
    assert is_running(stream["pid"])
    os.kill(recorder, signal.SIGKILL)
    os.waitpid(recorder, 0)
    wait_for(lambda: not is_running(stream["pid"]), "it is gone")
