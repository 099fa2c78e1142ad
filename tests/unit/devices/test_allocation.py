"""Slurm's variables: what this process was given, which shard is its own, and when its time ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.devices import (
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


_HEAD, *PARTS = (Path(__file__).parents[2] / "data" / "slurm_variables.txt").read_text().split("\n\n[")
CASES = {part.partition("]")[0]: part.splitlines()[1:] for part in PARTS}


def environ_of(line: str) -> dict[str, str]:
    pairs = [word.split("=") for word in line.split()]
    return {name[1:] if name[0] == "." else f"SLURM_{name}": value for name, value in pairs}


def test_an_allocation_is_what_slurm_gave_and_outside_slurm_the_machine(pages: Pages) -> None:
    said = []
    for line in CASES["allocations"]:
        try:
            found = parse(**environ_of(line))
        except BadInput as refused:
            said += [line, f"  {refused.what}"]
        else:
            known = [f"{field.name}={getattr(found, field.name)}" for field in fields(found) if field.name != "facts"]
            facts = [f"    {name}={value}" for name, value in found.facts.items()]
            said += [line, f"  {found.key.name}: {', '.join(known)}", *facts]
    memory = []
    for line in CASES["memory"]:
        sizes = [size(environ_of(line)) for size in (requested_memory_bytes, own_memory_bytes)]
        whole, own = (one and one // 2**20 for one in sizes)
        memory.append(f"{line}: {whole} MiB, of which {own} are for this task of the step")
    pages({"allocations.txt": "\n".join(said), "memory.txt": "\n".join(memory)})


def test_two_runs_inside_one_job_have_one_name_and_two_ids() -> None:
    for environ, same_name in (({"SLURM_JOB_ID": "77"}, True), ({"SLURM_ARRAY_JOB_ID": "77"}, True), ({}, False)):
        one, other = (parse_allocation(environ, hostname="n", pid=42, started_at_ms=ms) for ms in (1, 2))
        assert one.key.task_id != other.key.task_id
        assert (one.key == other.key) is same_name is is_in_slurm(environ)


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


def test_the_end_of_the_time_is_read_as_slurm_writes_it(monkeypatch: pytest.MonkeyPatch, pages: Pages) -> None:
    said = [f"--stop-after {text!r}: {parse_stop_after(text)} s" for text in ["", *CASES["stop after"]]]
    monkeypatch.setenv("TZ", "<-08>8")  # at a place 8 hours behind UTC
    time.tzset()
    try:
        found = {text: parse_end(text.replace("\\n", "\n"), "squeue", NOW_MS) for text in ["", *CASES["ends"]]}
    finally:
        monkeypatch.undo()
        time.tzset()
    ends = [
        f"end {text!r}: {end and f'{end.source}, in {(end.at_ms - NOW_MS) / 1000} s'}" for text, end in found.items()
    ]
    pages({"times.txt": "\n".join([*said, *ends])})
    assert end_time_command(Allocation(True, "4821", "gpu3")) == ["squeue", "-h", "-j", "4821", "-o", "%e"]
    assert end_time_command(Allocation(True, "4821", "gpu3", array_index=0))[3] == "4821_0"
