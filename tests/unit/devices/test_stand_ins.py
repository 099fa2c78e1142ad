"""The devices of rehearsals: simulated ones, as their script says, and a recorded task database, played back."""

import json
import os
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.devices import SimulatedReader, list_granted, open_reader, parse_script, simulated_uuid
from rooms.model import InventoryDevice, ProcessFacts, ProcessReading, Reading, StandIn
from rooms.root import BadInput, DeviceUnreadable
from support.cases import read_data, read_lines
from support.device_stories import FACTS, facts_of, shown
from support.hand_clock import HandClock
from support.recorded_tape import BEGIN_MS, TASK_ID, add_gap, insert, write_recording
from support.task_files import TaskFile

STARTED_AT_MS = 1_800_000_000_000


def opened(at_s=0, **stand_in):
    return open_reader(StandIn(**stand_in), HandClock(STARTED_AT_MS + round(at_s * 1000)), STARTED_AT_MS, None)


def read_at(at_s, index=0, **table):
    """Read one scripted device some seconds after the start."""
    devices = parse_script({"device": [{"index": index, **table}]})
    clock = HandClock(STARTED_AT_MS + round(at_s * 1000))
    return SimulatedReader(devices, clock=clock, started_at_ms=STARTED_AT_MS).read(simulated_uuid(index))


def test_all_values_depend_only_on_the_script_and_the_seconds(pages):
    lines = []
    for line in read_data("simulation_courses.txt").splitlines()[2:]:
        name, table, *times = line.split(" | ")
        for at_s in times:
            try:
                said = shown(read_at(float(at_s), 1, **json.loads(table)))
            except DeviceUnreadable as reason:
                said = {"unreadable:": str(reason)}
            known = ", ".join(f"{key} {value}" for key, value in said.items() if value != "–")
            lines.append(f"{name}, {at_s} s: {known}")
    pages({"readings.txt": "\n".join(lines)})
    waves = [[read_at(second, index).utilization_percent for second in range(60)] for index in range(3)]
    assert [(min(wave), max(wave)) for wave in waves] == [(65, 95)] * 3
    assert len({tuple(wave) for wave in waves}) == 3, "each in its own phase"


loads = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 100)), max_size=4, unique_by=lambda step: step[0])


@settings(max_examples=30)
@given(loads.map(lambda steps: [list(step) for step in sorted(steps)]) | st.none(), st.integers(0, 3))
def test_energy_is_the_integral_of_power_from_the_start(load, index):
    table = {} if load is None else {"load": load}
    middles = [(number + 0.5) / 10 for number in range(200)]  # no middle falls on an edge of a step
    by_power = sum(read_at(at_s, index, **table).power_w or 0 for at_s in middles) / 10
    assert read_at(20, index, **table).energy_j == pytest.approx(by_power, rel=1e-5)


def test_each_fault_is_reported_once():
    devices = parse_script(
        {"devices": 2, "device": [{"index": 0, "fault": [[3, "Xid 31"], [3.5, "Xid 79"], [8, "Xid 48"]]}]}
    )
    clock = HandClock(STARTED_AT_MS)
    early, heard = SimulatedReader(devices, clock=clock, started_at_ms=STARTED_AT_MS), []
    for _ in range(6):
        heard.append([early.read(simulated_uuid(index)).faults for index in (0, 1)])
        clock.sleep(2)
    assert heard == [[faults, ()] for faults in ((), (), ("Xid 31", "Xid 79"), (), (), ("Xid 48",))]
    late = SimulatedReader(devices, clock=clock, started_at_ms=STARTED_AT_MS)
    clock.sleep(2)
    assert late.read(simulated_uuid(0)).faults == ()


def test_a_script_file_describes_some_devices_and_the_others_are_usual(tmp_path, pages):
    file, said = tmp_path / "devices.toml", []
    texts = {
        "one": '[[device]]\nindex = 2\nname = "A100"\nmemory_total_mib = 40960\nslowdown_c = 87\nload = [[0, 95]]\n',
        "one more": "devices = 1\n[[device]]\nindex = 1\n", "no TOML": "load = [", "no key": "nodes = 3", "gone": None,
    }  # fmt: skip
    for name, text in texts.items():
        file.unlink() if text is None else file.write_text(text)
        try:
            reader = opened(script=str(file))
            said += [f"[{name}] {reader.why}", FACTS, *facts_of(reader.inventory()), ""]
        except BadInput as refused:
            words = refused.what if "not TOML" in refused.what else str(refused)  # the rest is the parser's
            said += [f"[{name}] {words}".replace(str(tmp_path), "."), ""]
    pages({"scripts.txt": "\n".join(said)})
    assert opened(simulate=1).why == "simulated devices were requested: 1"
    assert opened(simulate=0).inventory() == []
    me, unused_pid = psutil.Process(), 4194999  # no pid is that high
    file.write_text(f"[[device]]\nindex = 0\nprocesses = [[{me.pid}, 900], [{unused_pid}, 10]]\n")
    everything = list_granted({}, HandClock(), StandIn(script=str(file)), everything=True)
    mine = ProcessFacts(me.pid, me.name(), me.username(), 900 * 2**20)
    assert everything.devices[0].processes == (mine, ProcessFacts(unused_pid, None, None, 10 * 2**20))


def test_memory_is_what_running_processes_wrote_into_the_ledger(tmp_path):
    uuid = simulated_uuid(0)
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie, until the end of this block
        for name, text in ((f"{uuid}.{os.getpid()}", "1000"), (f"{uuid}.{ended.pid}", "200"), (f"{uuid}.1", "x"),
                           (f"{uuid}.0", "30"), (f"{simulated_uuid(1)}.{os.getpid()}", "4")):  # fmt: skip
            (tmp_path / name).write_text(text)
        reader = opened(simulate=2, ledger=str(tmp_path))
        assert [reader.read(simulated_uuid(index)).memory_used_bytes for index in (0, 1)] == [1000, 4]


def test_every_mistake_in_a_script_is_named_and_the_least_values_are_none(tmp_path, pages):
    file, said = tmp_path / "script.toml", []
    for line in read_lines("simulation_mistakes.txt"):
        file.write_text(line.replace("; ", "\n"))
        with pytest.raises(BadInput) as caught:
            opened(script=str(file))
        said += [line, f"  {caught.value}".replace(f"badcjobs: error: {file}", "it")]
    pages({"mistakes.txt": "\n".join(said)})
    least = {"index": 0, "lost_at_s": 0, "back_at_s": 1, "load": [[0, 0], [1, 100]], "memory_total_mib": 1,
             "slowdown_c": 1, "processes": [[1, 0]], "fault": [[0, "x"]], "unsupported": []}  # fmt: skip
    assert len(parse_script({"devices": 1, "device": [least]})) == 1
    assert [device.index for device in parse_script({"device": [{"index": 1}, {"index": 0}]})] == [0, 1]
    assert len(parse_script({})) == 1


DEVICES = [
    InventoryDevice(index, f"GPU-{index}", "Tesla V100", "nvml", memory_total_bytes=2**34, power_limit_w=300.0)
    for index in (0, 1)
]


def steady(index, at_s):
    """Say the second as the temperature; device 1 is lost from 4 to 6 s."""
    if index == 1 and 4 <= at_s <= 6:
        return "GPU is lost"
    return Reading(temperature_c=round(at_s), utilization_percent=50 + index, power_w=None)


@pytest.fixture
def recording(tmp_path):
    return write_recording(tmp_path / "a recording?.sqlite", DEVICES, steady, range(10))


def edit(path, *changes):
    with closing(sqlite3.connect(path)) as db, db:
        for change in changes:
            db.execute(change) if isinstance(change, str) else change(db)


def replayed(path, at_s, index=0):
    """Return the reading, or why there is none."""
    with closing(opened(at_s, replay=str(path))) as reader:
        try:
            return reader.read(f"GPU-{index}")
        except DeviceUnreadable as reason:
            return str(reason)


def heard(path, index, *seconds):
    """Return the temperatures at these times, or why there are none."""
    return [getattr(one, "temperature_c", one) for one in (replayed(path, at_s, index) for at_s in seconds)]


def test_a_recording_is_heard_again_from_the_start_and_repeats_at_its_end(recording):
    before = recording.read_bytes()
    reader = opened(replay=str(recording))
    assert reader.inventory() == [replace(device, backend="replay") for device in DEVICES]
    assert reader.why == f"replay of {recording}, 10.0 s long, repeated at its end"
    assert heard(recording, 0, -5, 0, 0.999, 1, 3.5, 9, 9.999, 10, 13, 1005) == [0, 0, 0, 1, 3, 9, 9, 0, 3, 5]
    assert heard(recording, 1, 3, 3.5, 4, 6.9, 7) == [3, *["GPU is lost"] * 3, 7], "a gap is a gap again"
    assert replayed(recording, 3, 1) == Reading(temperature_c=3, utilization_percent=51)
    assert recording.read_bytes() == before and [*recording.parent.iterdir()] == [recording], "and nothing beside it"
    reader.close()
    for uuid, words in (("GPU-0", "cannot be read: "), ("GPU-9", "the recording has no device 'GPU-9'")):
        with pytest.raises(DeviceUnreadable, match=words):
            reader.read(uuid)


def test_gaps_have_their_reasons_whether_of_a_device_a_metric_or_the_recorder(recording, tmp_path):
    from_ms, to_ms = BEGIN_MS + 1000, BEGIN_MS + 3000
    edit(recording, f"DELETE FROM sample WHERE at_ms BETWEEN {from_ms} AND {to_ms}",
         lambda db: add_gap(db, None, 0, 4, "the recorder was killed"),
         lambda db: add_gap(db, 0, 0, 5, "Not Supported", "power_w"),
         lambda db: add_gap(db, 0, 8, 8, "Unknown Error", "power_w"),
         lambda db: add_gap(db, 0, 0, 9, "it is known", "temperature_c"))  # fmt: skip
    assert [replayed(recording, 2, index) for index in (0, 1)] == ["the recorder was killed"] * 2
    assert heard(recording, 0, 0, 4) == [0, 4]
    reasons = [replayed(recording, at_s).missing.get("power_w") for at_s in (4, 5, 6, 8, 9)]
    assert reasons == ["Not Supported", "Not Supported", None, "Unknown Error", None]
    assert replayed(recording, 9).missing == {}
    holes = write_recording(tmp_path / "holes.sqlite", DEVICES, steady, range(10))
    edit(holes, f"DELETE FROM sample WHERE device_id = 100 AND at_ms > {BEGIN_MS}")
    assert heard(holes, 0, 5, 5.001) == [0, "the recording has no sample at this time"]
    closed = (Reading(temperature_c=1), "no permission")
    never = write_recording(tmp_path / "r.sqlite", DEVICES, lambda index, at_s: closed[index], range(5))
    assert heard(never, 1, 0, 2, 4.9) == ["no permission"] * 3
    rare = write_recording(tmp_path / "rare.sqlite", DEVICES[:1], steady, range(0, 90, 30))
    assert heard(rare, 0, 29, 59, 89, 90) == [0, 30, 60, 0], "the usual interval is 30 s"
    for name, times, length_s in (("one", [0], "1.0"), ("two", [0, 30], "60.0")):
        short = write_recording(tmp_path / f"{name}.sqlite", DEVICES[:1], steady, times)
        assert opened(replay=str(short)).why.endswith(f" {length_s} s long, repeated at its end")


def test_sources_and_processes_are_replayed_where_they_were_recorded(recording):
    def add(db):
        for from_s, source in ((0, "gpm"), (5, "utilization")):
            insert(db, "metric_source", task_id=TASK_ID, device_id=100, metric="busy_percent", source=source,
                   from_ms=BEGIN_MS + from_s * 1000)  # fmt: skip
        for pid in (12, 11):
            insert(db, "process_sample", task_id=TASK_ID, device_id=100, at_ms=BEGIN_MS + 2000, pid=pid,
                   memory_used_bytes=2**20, sm_percent=None)  # fmt: skip

    edit(recording, add)
    readings = [replayed(recording, at_s) for at_s in (2, 3, 4, 5)]
    processes = (ProcessReading(12, 2**20), ProcessReading(11, 2**20))
    assert [reading.processes for reading in readings] == [processes, None, None, None]
    assert [reading.sources["busy_percent"] for reading in readings] == ["gpm", "gpm", "gpm", "utilization"]


def test_slices_follow_their_card(tmp_path):
    recording = write_recording(tmp_path / "mig.sqlite", DEVICES, steady, range(10))
    device = {"task_id": TASK_ID, "why": "test"}
    with closing(sqlite3.connect(recording)) as db, db:
        for number, uuid in enumerate(("MIG-b", "MIG-a"), 50):
            insert(db, "device", device_id=number, uuid=uuid, device_index=1, token=uuid, name="MIG 1g",
                   backend="nvml", parent_uuid="GPU-1", **device)  # fmt: skip
        insert(db, "device", device_id=900, uuid="GPU-x", token="9", backend="none", **device)
    devices = opened(replay=str(recording)).inventory()
    cards = [("GPU-x", 0, "GPU"), ("GPU-0", 0, "Tesla V100"), ("GPU-1", 1, "Tesla V100")]
    assert [(d.uuid, d.index, d.name) for d in devices] == [*cards, ("MIG-a", 1, "MIG 1g"), ("MIG-b", 1, "MIG 1g")]


def test_files_of_other_programs_are_refused(recording, tmp_path, pages):
    said = []

    def refuse(path, *changes):
        if changes:
            edit(path, *changes)
        with pytest.raises(BadInput) as caught:
            opened(replay=str(path))
        said.append(str(caught.value).replace(f"{tmp_path}/", ""))

    other = tmp_path / "x.csv"
    refuse(other)
    for text in ("at_ms,power_w\n1,2\n" * 100, ""):
        other.write_text(text)
        refuse(other)
    refuse(recording, "DELETE FROM sample")
    refuse(recording, "CREATE TABLE source_file (path TEXT)")
    pages({"refused.txt": "\n".join(said)})
    published = TaskFile(tmp_path, devices=2, samples=5).write()
    assert replayed(published, 3, index=1).utilization_percent == 80
