"""Slurm's variables → what this process was given, and which part of the source is its own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.devices import (
    ShardPlace,
    array_shape,
    find_place,
    own_memory_bytes,
    parse_allocation,
    requested_memory_bytes,
)
from rooms.model import Allocation, ArrayShape
from rooms.root import BadInput


def parse(**environ: str) -> Allocation:
    return parse_allocation(environ, hostname="login1", pid=42, started_at_ms=1_800_000_000_123)


def array_task(index: int, indices: tuple[int, int, int, int], **others: str) -> Allocation:
    low, high, step, count = indices
    return parse(
        SLURM_JOB_ID=str(4821 + index),
        SLURM_ARRAY_JOB_ID="4821",
        SLURM_ARRAY_TASK_ID=str(index),
        SLURM_ARRAY_TASK_MIN=str(low),
        SLURM_ARRAY_TASK_MAX=str(high),
        SLURM_ARRAY_TASK_STEP=str(step),
        SLURM_ARRAY_TASK_COUNT=str(count),
        **others,
    )


# --- what was given ---------------------------------------------------------------------------------------------------


def test_outside_slurm_the_name_is_made_of_start_and_process() -> None:
    allocation = parse(TMPDIR="/fast")
    assert not allocation.in_slurm
    assert allocation.key.name == "local1800000000123-42_0.r0.login1"
    assert (allocation.local_dir, allocation.array_index, allocation.step_tasks) == ("/fast", None, 1)


def test_a_job_without_an_array_has_index_zero() -> None:
    allocation = parse(SLURM_JOB_ID="77", SLURMD_NODENAME="gpu3")
    assert allocation.in_slurm
    assert allocation.key.name == "77_0.r0.gpu3"


def test_the_node_is_the_host_where_slurm_does_not_name_it() -> None:
    assert parse(SLURM_JOB_ID="77").key.node == "login1"


def test_an_array_task_is_known_by_the_arrays_number_not_by_its_own() -> None:
    allocation = array_task(3, (0, 3, 1, 4), SLURMD_NODENAME="gpu3", SLURM_RESTART_COUNT="2")
    assert allocation.key.name == "4821_3.r2.gpu3"


def test_the_batch_script_of_a_job_with_many_tasks_is_alone() -> None:
    allocation = parse(SLURM_JOB_ID="77", SLURM_NTASKS="8", SLURM_PROCID="0")
    assert (allocation.step_tasks, allocation.key.procid) == (1, None)


def test_a_task_of_a_step_carries_its_number_in_its_name() -> None:
    allocation = parse(SLURM_JOB_ID="77", SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="3", SLURMD_NODENAME="gpu3")
    assert allocation.key.name == "77_0.r0.gpu3.p3"


@pytest.mark.parametrize("environ", [{"SLURM_JOB_ID": "77"}, {}], ids=["in Slurm", "outside"])
def test_two_runs_inside_one_job_have_one_name_and_two_ids(environ: dict[str, str]) -> None:
    one = parse(**environ)
    other = parse_allocation(environ, hostname="login1", pid=42, started_at_ms=1_800_000_000_124)
    assert (one.started_at_ms, one.key.started_at_ms) == (1_800_000_000_123, 1_800_000_000_123)
    assert one.key.task_id != other.key.task_id
    assert (one.key == other.key) == one.in_slurm  # outside, the name has the start in it


def test_the_jobs_own_folder_comes_before_tmpdir() -> None:
    assert parse(SLURM_JOB_ID="77", SLURM_TMPDIR="/job", TMPDIR="/tmp").local_dir == "/job"
    assert parse(SLURM_JOB_ID="77", SLURM_TMPDIR="", TMPDIR="/tmp").local_dir == "/tmp"
    assert parse(SLURM_JOB_ID="77").local_dir is None


def test_cores_are_those_of_the_task_before_those_of_the_node() -> None:
    assert parse(SLURM_JOB_ID="77", SLURM_CPUS_PER_TASK="6", SLURM_CPUS_ON_NODE="24").cpus == 6
    assert parse(SLURM_JOB_ID="77", SLURM_CPUS_ON_NODE="24").cpus == 24
    assert parse(SLURM_JOB_ID="77").cpus is None


# What Slurm 22.05 sets for these options of sbatch.
MEMORY_REQUESTS = {
    "--mem=300": ({"SLURM_MEM_PER_NODE": "300", "SLURM_CPUS_ON_NODE": "1"}, 300),
    "--mem=1G": ({"SLURM_MEM_PER_NODE": "1024", "SLURM_CPUS_ON_NODE": "1"}, 1024),
    "--mem=300K": ({"SLURM_MEM_PER_NODE": "1", "SLURM_CPUS_ON_NODE": "1"}, 1),
    "--mem=0": ({"SLURM_CPUS_ON_NODE": "1"}, None),
    "--mem-per-cpu=100 -c2": (
        {"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "2"}, 200,
    ),
    "--mem-per-gpu=100 --gpus=2": (
        {"SLURM_MEM_PER_GPU": "100", "SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_ON_NODE": "1"}, 200,
    ),
    "nothing": ({"SLURM_CPUS_ON_NODE": "1", "SLURM_GPUS_ON_NODE": "2"}, None),
    "other versions, --mem=0": ({"SLURM_MEM_PER_NODE": "0", "SLURM_MEM_PER_CPU": "100"}, None),
    "per CPU, of which nobody knows the number": ({"SLURM_MEM_PER_CPU": "100"}, None),
    "no number": ({"SLURM_MEM_PER_NODE": "all"}, None),
}  # fmt: skip


@pytest.mark.parametrize(("environ", "mib"), MEMORY_REQUESTS.values(), ids=MEMORY_REQUESTS)
def test_the_memory_that_was_asked_for_is_known_where_slurm_says_it(environ: dict[str, str], mib: int | None) -> None:
    facts = parse(SLURM_JOB_ID="77", **environ).facts
    assert requested_memory_bytes(facts) == (None if mib is None else mib * 2**20)


@pytest.mark.parametrize(
    ("step", "mib"),
    [
        ({}, 600),  # the batch script
        ({"SLURM_TASKS_PER_NODE": "3"}, 600),  # the same: nobody has called srun
        ({"SLURM_STEP_TASKS_PER_NODE": "3"}, 200),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}, 300),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, 600),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "9"}, 600),
        ({"SLURM_STEP_TASKS_PER_NODE": "0"}, 600),
    ],
)
def test_the_tasks_of_a_step_share_the_memory_of_their_node(step: dict[str, str], mib: int) -> None:
    facts = parse(SLURM_JOB_ID="77", SLURM_MEM_PER_NODE="600", **step).facts
    assert own_memory_bytes(facts) == mib * 2**20
    assert own_memory_bytes({**facts, "SLURM_MEM_PER_NODE": "0"}) is None


def test_the_variables_are_kept_as_facts_and_nothing_else_is() -> None:
    told = {
        "SLURM_JOB_ID": "77",
        "SLURM_GPUS_PER_NODE": "v100:1,a100:1",
        "CUDA_VISIBLE_DEVICES": "1",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "ROCR_VISIBLE_DEVICES": "1",
        "HIP_VISIBLE_DEVICES": "0",
    }
    assert parse(**told, SECRET="x", CUDA_HOME="/usr/local/cuda").facts == told


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_RESTART_COUNT", "SLURM_STEP_NUM_TASKS", "SLURM_ARRAY_TASK_ID"])
def test_a_variable_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse(**{"SLURM_JOB_ID": "77", name: "two"})
    assert refused.value.what == f"{name}=two is not a whole number"


# --- which part is ours -----------------------------------------------------------------------------------------------

# Seen on a real Slurm 22.05: --array → the indices it starts, and its MIN, MAX, STEP and COUNT.
REGULAR = {
    "0-3": ((0, 1, 2, 3), (0, 3, 1, 4)),
    "1-9:4": ((1, 5, 9), (1, 9, 4, 3)),
    "0-7:3": ((0, 3, 6), (0, 6, 3, 3)),
    "5": ((5,), (5, 5, 1, 1)),
}
IRREGULAR = {
    "3,7": ((3, 7), (3, 7, 1, 2)),
    "1,2,5": ((1, 2, 5), (1, 5, 1, 3)),
    "2,4,6": ((2, 4, 6), (2, 6, 1, 3)),  # even, but Slurm says step 1
}


@pytest.mark.parametrize(("indices", "said"), REGULAR.values(), ids=REGULAR)
def test_the_position_among_the_arrays_indices_is_the_shard(indices: tuple[int, ...], said: tuple[int, ...]) -> None:
    for position, index in enumerate(indices):
        allocation = array_task(index, said)
        count = len(indices)
        assert find_place(allocation, array_shape(allocation)) == ShardPlace(position, count, position, count)


@pytest.mark.parametrize("written", REGULAR)
def test_a_shape_is_written_as_sbatch_takes_it(written: str) -> None:
    indices, said = REGULAR[written]
    shape = array_shape(array_task(indices[0], said))
    rewritten = {"0-7:3": "0-6:3", "5": "5-5"}.get(written, written)
    assert str(shape) == rewritten


@pytest.mark.parametrize(("indices", "said"), IRREGULAR.values(), ids=IRREGULAR)
def test_an_irregular_first_list_is_refused_with_the_line_to_paste(
    indices: tuple[int, ...], said: tuple[int, ...]
) -> None:
    for index in indices:
        allocation = array_task(index, said)
        assert array_shape(allocation) is None
        with pytest.raises(BadInput, match="does not report the indices of a list to its tasks") as refused:
            find_place(allocation, None)
        assert f"from {indices[0]} to {indices[-1]}, {len(indices)} tasks and a step of 1" in str(refused.value.why)
        assert (refused.value.fix or "").startswith(f"sbatch --array=0-{len(indices) - 1} ")


@pytest.mark.parametrize(
    ("said", "same"),
    [((2, 6, 1, 3), "--array=2-6:2"), ((1, 7, 1, 4), "--array=1-7:2"), ((1, 5, 1, 3), "1-5:2"), ((1, 6, 1, 3), None)],
)
def test_a_list_that_may_be_even_is_told_the_range_that_would_say_so(
    said: tuple[int, int, int, int], same: str | None
) -> None:
    with pytest.raises(BadInput) as refused:
        find_place(array_task(said[0], said), None)
    fix = str(refused.value.fix)
    assert ("if evenly spaced" in fix) == (same is not None)
    assert (same or "later") in fix


def test_a_list_that_looks_regular_refuses_the_index_that_is_not() -> None:
    said = (0, 6, 2, 4)  # --array=0-2:2,3,6
    shape = array_shape(array_task(0, said))
    assert shape == ArrayShape(0, 2, 4)
    assert find_place(array_task(6, said), shape).position == 3
    with pytest.raises(BadInput, match="array index 3 is not part of this run's array 0-6:2"):
        find_place(array_task(3, said), shape)


def test_indices_that_are_submitted_again_keep_their_shards() -> None:
    frozen = ArrayShape(0, 1, 8)
    assert find_place(array_task(3, (3, 7, 1, 2)), frozen) == ShardPlace(3, 8, 3, 8)
    assert find_place(array_task(7, (3, 7, 1, 2)), frozen) == ShardPlace(7, 8, 7, 8)
    assert find_place(array_task(5, (5, 5, 1, 1)), frozen) == ShardPlace(5, 8, 5, 8)


@pytest.mark.parametrize("index", [0, 11, 4, 100])
def test_an_index_outside_the_frozen_array_is_refused_with_the_line_to_paste(index: int) -> None:
    with pytest.raises(BadInput) as refused:
        find_place(array_task(index, (index, index, 1, 1)), ArrayShape(1, 2, 5))
    assert refused.value.what == f"array index {index} is not part of this run's array 1-9:2"
    assert "--array=1-9:2" in (refused.value.fix or "")
    assert refused.value.exit_code == 2


def test_an_array_task_that_does_not_know_its_array_is_refused() -> None:
    allocation = parse(SLURM_JOB_ID="4822", SLURM_ARRAY_JOB_ID="4821", SLURM_ARRAY_TASK_ID="1")
    with pytest.raises(BadInput, match="the shape of the array of task 4821_1 is unknown") as refused:
        find_place(allocation, array_shape(allocation))
    assert "--shard" in (refused.value.fix or "")


def test_an_array_task_cannot_join_a_run_that_began_without_an_array() -> None:
    with pytest.raises(BadInput, match="4821_1 cannot join a run that started without an array") as refused:
        find_place(array_task(1, (0, 3, 1, 4)), None)
    assert "--shard" in (refused.value.fix or "")


def test_without_an_array_there_is_one_part() -> None:
    assert find_place(parse(), None) == ShardPlace(0, 1)
    assert find_place(parse(SLURM_JOB_ID="77"), None) == ShardPlace(0, 1)


def test_a_run_outside_an_array_takes_everything_even_where_an_array_was_frozen() -> None:
    assert find_place(parse(SLURM_JOB_ID="77"), ArrayShape(0, 1, 8)) == ShardPlace(0, 1)


def test_the_tasks_of_a_step_share_the_position_of_their_array_task() -> None:
    allocation = array_task(5, (1, 9, 4, 3), SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1")
    assert find_place(allocation, array_shape(allocation)) == ShardPlace(3, 6, 1, 3, 1, 2)


@settings(deadline=None)
@given(first=st.integers(0, 50), step=st.integers(1, 9), count=st.integers(1, 12), tasks=st.integers(1, 5))
def test_all_indices_and_all_tasks_of_their_steps_share_the_source_without_overlap_or_rest(
    first: int, step: int, count: int, tasks: int
) -> None:
    last = first + (count - 1) * step
    steps = {"SLURM_STEP_NUM_TASKS": str(tasks)} if tasks > 1 else {}
    places = []
    for index in range(first, last + 1, step):
        for procid in range(tasks):
            allocation = array_task(index, (first, last, step, count), SLURM_PROCID=str(procid), **steps)
            places.append(find_place(allocation, array_shape(allocation)))
    assert sorted(place.index for place in places) == list(range(count * tasks))
    assert {place.count for place in places} == {count * tasks}
