"""The simulated devices: the same in every process, and as the script says."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.devices import SimulatedReader, list_granted, open_reader, parse_script, simulated_uuid
from rooms.model import ProcessFacts, Reading, StandIn
from rooms.root import BadInput, DeviceUnreadable, GpuReader
from support.device_stories import FACTS, facts_of, shown
from support.hand_clock import HandClock
from support.pages import Pages

STARTED_AT_MS = 1_800_000_000_000


def opened(at_s: float = 0, started_at_ms: int = STARTED_AT_MS, **stand_in: Any) -> GpuReader:
    return open_reader(StandIn(**stand_in), HandClock(STARTED_AT_MS + round(at_s * 1000)), started_at_ms, None)


def read_at(at_s: float, index: int = 0, **table: Any) -> Reading:
    """Read one scripted device some seconds after the start."""
    _, script = parse_script({"device": [{"index": index, **table}]})
    clock = HandClock(STARTED_AT_MS + round(at_s * 1000))
    return SimulatedReader(index + 1, script, clock=clock, started_at_ms=STARTED_AT_MS).read(simulated_uuid(index))


# Name, script, seconds
COURSES: list[tuple[str, dict[str, Any], Sequence[float]]] = [
    ("a wave", {}, (0, 15, 30, 45, 60)), ("steps", {"load": [[10, 90], [20, 4.6]]}, (9.999, 10, 20, 1000)),
    ("idle", {"load": []}, (7,)), ("full, and a clock that was set back", {"load": [[0, 100]]}, (1, -5)),
    ("lost from 10 to 20 s", {"load": [], "lost_at_s": 10, "back_at_s": 20}, (0, 9.999, 10, 19.999, 20, 500)),
    ("lost for ever", {"load": [], "lost_at_s": 10}, (9.999, 10, 10**6)),
    ("without energy", {"load": [], "unsupported": ["energy_j"]}, (1,)),
    ("two processes", {"load": [], "processes": [[4711, 900], [4712, 0]]}, (1,)),
    ("no process", {"load": [], "processes": []}, (1,)),
]  # fmt: skip


def test_all_values_depend_only_on_the_script_and_the_seconds(pages: Pages) -> None:
    lines = []
    for name, table, times in COURSES:
        for at_s in times:
            try:
                said = shown(read_at(at_s, 1, **table))
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
def test_energy_is_the_integral_of_power_from_the_start(load: list[Any] | None, index: int) -> None:
    table = {} if load is None else {"load": load}
    step_s = 0.1
    middles = [(number + 0.5) * step_s for number in range(200)]  # no middle falls on an edge of a step
    by_power = sum(read_at(at_s, index, **table).power_w or 0 for at_s in middles) * step_s
    assert read_at(20, index, **table).energy_j == pytest.approx(by_power, rel=1e-5)


def test_each_fault_is_reported_once() -> None:
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


def test_a_script_file_describes_some_devices_and_the_others_are_usual(tmp_path: Path, pages: Pages) -> None:
    file, said = tmp_path / "devices.toml", []
    texts = {
        "one": '[[device]]\nindex = 2\nname = "A100"\nmemory_total_mib = 40960\nslowdown_c = 87\nload = [[0, 95]]\n',
        "too few": "devices = 4\n[[device]]\nindex = 4\n", "no TOML": "load = [", "no key": "nodes = 3", "gone": None,
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
    assert opened(simulate=1).why == "1 simulated device requested"
    assert opened(simulate=0).inventory() == []
    file.write_text(
        f"[[device]]\nindex = 0\nprocesses = [[{os.getpid()}, 900], [4194999, 10]]\n"
    )  # no pid is that high
    everything = list_granted({}, HandClock(), stand_in=StandIn(script=str(file)), everything=True)
    me = psutil.Process()
    assert everything.devices[0].processes == (
        ProcessFacts(me.pid, me.name(), me.username(), 900 * 2**20),
        ProcessFacts(4194999, None, None, 10 * 2**20),
    )


def test_memory_is_what_running_processes_wrote_into_the_ledger(tmp_path: Path) -> None:
    uuid = simulated_uuid(0)
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie, until the end of this block
        texts = {f"{uuid}.{os.getpid()}": "1000", f"{uuid}.{ended.pid}": "200", f"{uuid}.1": "x", f"{uuid}.0": "30"}
        for name, text in {**texts, f"{simulated_uuid(1)}.{os.getpid()}": "4"}.items():
            (tmp_path / name).write_text(text)
        reader = opened(simulate=2, ledger=str(tmp_path))
        assert [reader.read(simulated_uuid(index)).memory_used_bytes for index in (0, 1)] == [1000, 4]


def test_every_mistake_in_a_script_is_named_and_the_least_values_are_none(tmp_path: Path, pages: Pages) -> None:
    data, file, said = Path(__file__).parents[2] / "data", tmp_path / "script.toml", []
    for line in (data / "simulation_mistakes.txt").read_text().splitlines()[1:]:
        file.write_text(line.replace("; ", "\n"))
        with pytest.raises(BadInput) as caught:
            opened(script=str(file))
        said += [line, f"  {caught.value}".replace(f"badcjobs: error: {file}", "it")]
    pages({"mistakes.txt": "\n".join(said)})
    least = {"index": 0, "lost_at_s": 0, "back_at_s": 1, "load": [[0, 0], [1, 100]], "memory_total_mib": 1,
             "slowdown_c": 1, "processes": [[1, 0]], "fault": [[0, "x"]], "unsupported": []}  # fmt: skip
    assert parse_script({"devices": 1, "device": [least]})[0] == 1
    assert parse_script({"device": [{"index": 1}, {"index": 0}]})[0] == 2
    assert parse_script({}) == (1, ())
