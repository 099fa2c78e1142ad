"""Slurm's variables: what this process was given, which shard is its own, and when its time ends."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.devices import (
    EndTime,
    ShardPlace,
    array_shape,
    end_time_command,
    find_place,
    is_in_slurm,
    own_memory_bytes,
    parse_allocation,
    parse_end,
    requested_memory_bytes,
)
from rooms.model import Allocation, ArrayShape, parse_stop_after
from rooms.root import BadInput
from support.pages import Pages

NOW_MS = 1_800_000_000_000  # 2027-01-15T08:00:00Z


def parse(**environ: str) -> Allocation:
    return parse_allocation(environ, hostname="login1", pid=42, started_at_ms=NOW_MS)


def array_task(index: int, indices: tuple[int, int, int, int], **others: str) -> Allocation:
    shape = zip(("MIN", "MAX", "STEP", "COUNT"), map(str, indices), strict=True)
    variables = {f"SLURM_ARRAY_TASK_{name}": value for name, value in shape}
    numbers = {"SLURM_JOB_ID": str(4821 + index), "SLURM_ARRAY_JOB_ID": "4821", "SLURM_ARRAY_TASK_ID": str(index)}
    return parse(**numbers, **variables, **others)


def test_an_allocation_is_what_slurm_gave_and_outside_slurm_the_machine() -> None:
    assert parse(TMPDIR="/fast", SLURM_PROCID="3") == Allocation(
        False, f"local{NOW_MS}-42", "login1", local_dir="/fast", facts={"SLURM_PROCID": "3"}, started_at_ms=NOW_MS
    )
    variables = {
        "SLURM_ARRAY_JOB_ID": "4821", "SLURM_JOB_ID": "4824", "SLURMD_NODENAME": "gpu3", "SLURM_RESTART_COUNT": "2",
        "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "9",
        "SLURM_ARRAY_TASK_STEP": "2", "SLURM_ARRAY_TASK_COUNT": "5", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3",
        "SLURM_CPUS_PER_TASK": "6", "SLURM_CPUS_ON_NODE": "24", "SLURM_TMPDIR": "/job", "CUDA_VISIBLE_DEVICES": "1",
        "CUDA_DEVICE_ORDER": "x", "NVIDIA_VISIBLE_DEVICES": "all", "ROCR_VISIBLE_DEVICES": "1",
        "HIP_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    whole = parse(**variables, TMPDIR="/tmp", SECRET="x", CUDA_HOME="/usr/local/cuda")
    assert whole == Allocation(
        True, "4821", "gpu3", 2, 3, (1, 9, 2, 5), 4, 3, 6, "/job",
        {name: value for name, value in variables.items() if name != "SLURMD_NODENAME"}, NOW_MS,
    )  # fmt: skip
    assert whole.key.name == "4821_3.r2.gpu3.p3"
    least = parse(SLURM_JOB_ID="77", SLURM_TMPDIR="", TMPDIR="/tmp", SLURM_NTASKS="8", SLURM_CPUS_ON_NODE="24")
    assert (least.node, least.restart, least.array_index, least.step_tasks) == ("login1", 0, None, 1)
    assert (least.cpus, least.local_dir, least.key.name) == (24, "/tmp", "77_0.r0.login1")
    assert parse(SLURM_JOB_ID="77").cpus is parse(SLURM_JOB_ID="77").local_dir is None
    partial = parse(SLURM_JOB_ID="7", SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_TASK_MIN="0", SLURM_ARRAY_TASK_COUNT="2")
    assert partial.array_indices is None


def test_two_runs_inside_one_job_have_one_name_and_two_ids() -> None:
    for environ, same_name in (({"SLURM_JOB_ID": "77"}, True), ({}, False)):
        one, other = (parse_allocation(environ, hostname="n", pid=42, started_at_ms=ms) for ms in (1, 2))
        assert one.key.task_id != other.key.task_id
        assert (one.key == other.key) is same_name is is_in_slurm(environ)


def test_a_variable_that_is_no_number_is_named() -> None:
    for name in ("SLURM_PROCID", "SLURM_RESTART_COUNT", "SLURM_STEP_NUM_TASKS", "SLURM_ARRAY_TASK_ID"):
        for text in ("two", "-1", "٢"):
            with pytest.raises(BadInput) as refused:
                parse(**{"SLURM_JOB_ID": "77", name: text})
            assert refused.value.what == f"{name}={text} is not a whole number"


# Variables of real jobs (Slurm 22.05), without SLURM_ → MiB that the job requested, and this task's part of it.
MEMORY: list[tuple[dict[str, str], int | None, int | None]] = [
    ({"MEM_PER_NODE": "300", "CPUS_ON_NODE": "2"}, 300, 300),  # --mem=300
    ({"MEM_PER_CPU": "100", "CPUS_ON_NODE": "2", "CPUS_PER_TASK": "1"}, 200, 200),
    ({"MEM_PER_GPU": "100", "GPUS_ON_NODE": "3", "CPUS_ON_NODE": "1"}, 300, 300),
    ({"CPUS_ON_NODE": "1", "GPUS_ON_NODE": "2"}, None, None),
    ({"MEM_PER_NODE": "0", "MEM_PER_CPU": "100", "CPUS_ON_NODE": "2"}, None, None),  # --mem=0 in other versions
    ({"MEM_PER_CPU": "100"}, None, None),
    ({"MEM_PER_NODE": "all"}, None, None),
    ({"MEM_PER_NODE": "600", "TASKS_PER_NODE": "3"}, 600, 600),  # the batch script
    ({"MEM_PER_NODE": "600", "STEP_TASKS_PER_NODE": "3"}, 600, 200),
    ({"MEM_PER_NODE": "600", "STEP_TASKS_PER_NODE": "3,2"}, 600, 200),
    ({"MEM_PER_NODE": "600", "STEP_TASKS_PER_NODE": "2(x3),1", "NODEID": "2"}, 600, 300),
    ({"MEM_PER_NODE": "600", "STEP_TASKS_PER_NODE": "2(x3),1", "NODEID": "3"}, 600, 600),
    ({"MEM_PER_NODE": "600", "STEP_TASKS_PER_NODE": "2(x3),3", "NODEID": "4"}, 600, 600),
    ({"MEM_PER_NODE": "600", "STEP_TASKS_PER_NODE": "0"}, 600, 600),
]


def test_the_memory_of_a_task_is_what_slurm_says_shared_by_the_tasks_of_a_step() -> None:
    for variables, requested, own in MEMORY:
        facts = {f"SLURM_{name}": value for name, value in variables.items()}
        sizes = [requested_memory_bytes(facts), own_memory_bytes(facts)]
        assert sizes == [None if mib is None else mib * 2**20 for mib in (requested, own)], variables


# --- which shard is ours ----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(first=st.integers(0, 50), step=st.integers(1, 9), count=st.integers(1, 12), tasks=st.integers(1, 5))
def test_all_indices_and_all_tasks_of_their_steps_share_the_source_without_overlap_or_rest(
    first: int, step: int, count: int, tasks: int
) -> None:
    last = first + (count - 1) * step
    places = []
    for position, index in enumerate(range(first, last + 1, step)):
        for procid in range(tasks):
            more = {"SLURM_PROCID": str(procid), "SLURM_STEP_NUM_TASKS": str(tasks)}
            allocation = array_task(index, (first, last, step, count), **more)
            shape = array_shape(allocation)
            assert shape == ArrayShape(first, step, count)
            place = find_place(allocation, shape)
            assert place == ShardPlace(place.index, count * tasks, position, count, procid, tasks)
            again = array_task(index, (index, index, 1, 1), **more)  # submitted again, alone
            assert find_place(again, shape) == place
            places.append(place.index)
    assert places == list(range(count * tasks))


def test_without_an_array_the_tasks_of_the_step_are_the_shards() -> None:
    for frozen in (None, ArrayShape(0, 1, 8)):
        for allocation in (parse(), parse(SLURM_JOB_ID="77")):
            assert find_place(allocation, frozen) == ShardPlace(0, 1, None, None, 0, 1)
    third = find_place(parse(SLURM_JOB_ID="7", SLURM_STEP_NUM_TASKS="3", SLURM_PROCID="2"), None)
    assert third == ShardPlace(2, 3, None, None, 0, 1)


# Array task, and the shape of the run's array → the refusals, as a page. Lists have step 1 on a real Slurm.
REFUSED: Mapping[str, tuple[Allocation, ArrayShape | None]] = {
    "--array=3,7": (array_task(3, (3, 7, 1, 2)), None),
    "--array=1,2,5": (array_task(5, (1, 5, 1, 3)), None),
    "--array=2,4,6": (array_task(4, (2, 6, 1, 3)), None),
    "--array=1,3,6": (array_task(1, (1, 6, 1, 3)), None),
    "--array=0-2:2,3,6, index 3": (array_task(3, (0, 6, 2, 4)), array_shape(array_task(0, (0, 6, 2, 4)))),
    "before the first": (array_task(0, (0, 0, 1, 1)), ArrayShape(1, 2, 5)),
    "after the last": (array_task(11, (11, 11, 1, 1)), ArrayShape(1, 2, 5)),
    "unknown shape": (parse(SLURM_JOB_ID="4822", SLURM_ARRAY_JOB_ID="4821", SLURM_ARRAY_TASK_ID="1"), None),
    "a run without an array": (array_task(1, (0, 3, 1, 4)), None),
}


def test_an_array_task_without_a_shard_is_refused_with_a_line_to_paste(pages: Pages) -> None:
    said = []
    for name, (allocation, frozen) in REFUSED.items():
        with pytest.raises(BadInput) as refused:
            find_place(allocation, frozen)
        said += [f"[{name}]", str(refused.value), ""]
    pages({"refused.txt": "\n".join(said)})
    assert array_shape(array_task(3, (3, 7, 1, 2))) is None
    assert array_shape(array_task(5, (5, 5, 0, 1))) == ArrayShape(5, 1, 1)


# --- the end of the time ----------------------------------------------------------------------------------------------

STOP_AFTER: dict[str, float | None] = {
    "0": 0, "90": 5400, "0.5": 30, "5:00": 300, "0:59": 59, "1:30:00": 5400, "100:00:00": 360_000,
    "1-02:03:04": 93_784, "1-06": 108_000, "1-06:30": 109_800,
    **dict.fromkeys(["", "abc", "-5", "1e3", "nan", "inf", "1:2:3:4", "1-30:60", "UNLIMITED", "2h", "٣", ":30"]),
}  # fmt: skip
# What SLURM_JOB_END_TIME or squeue says → seconds from now, at a place 8 hours behind UTC.
ENDS: dict[str, float | None] = {
    "1800003600": 3600, "1800003600\n": 3600, "1800000001": 1, "2027-01-15T01:00:00\n": 3600,
    "Welcome To Sockeye\n1800007200\nNONE\n1800003600\n": 3600, str(1_800_000_000 + 3_162_240_000): 3_162_240_000,
    **dict.fromkeys(["", "soon", "0", "-1", "1800000000", "1799999999", str(1_800_000_001 + 3_162_240_000)]),
    **dict.fromkeys(["9" * 40, "NONE\n", "Unknown\n", "N/A\n", "NOT_SET", "T", "10:10:56", "2027-01-16"]),
}  # fmt: skip


def test_the_end_of_the_time_is_read_as_slurm_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {text: parse_stop_after(text) for text in STOP_AFTER} == STOP_AFTER
    monkeypatch.setenv("TZ", "<-08>8")
    time.tzset()
    try:
        found = {text: parse_end(text, "squeue", NOW_MS) for text in ENDS}
    finally:
        monkeypatch.undo()
        time.tzset()
    assert found == {text: None if s is None else EndTime(NOW_MS + s * 1000, "squeue") for text, s in ENDS.items()}
    assert end_time_command(Allocation(True, "4821", "gpu3")) == ["squeue", "-h", "-j", "4821", "-o", "%e"]
    assert end_time_command(Allocation(True, "4821", "gpu3", array_index=0))[3] == "4821_0"
