"""The options of ``badcjobs submit`` become an order: its array, its times, and every mistake at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.cluster import ArrayPlan, extra_options, make_order, parse_array, parse_minutes
from rooms.model import ArrayOrder, ArrayShape
from rooms.root import BadInput, FrozenRun, Project, SubmitSettings

OUT = Path("/scratch/july")


Known = tuple[FrozenRun | None, int | None]  # the run as it has begun, and how many manifests are listed


def known_of(began: bool = False, shape: ArrayShape | None = None, listed: int | None = None) -> Known:
    return FrozenRun({}, shape) if began else None, listed


def order(
    known: Known | None = None, run: tuple[str, ...] = ("run", "m.csv"), out: Path = OUT, array: str = "", **wishes: Any
) -> ArrayOrder:
    more = {**wishes, "sbatch": (f"--array={array}",)} if array else wishes
    return make_order(Project().make(SubmitSettings, more, "submit"), *(known or ()), out=out, run_arguments=run)


def refusal(known: Known | None = None, **wishes: Any) -> str:
    with pytest.raises(BadInput) as refused:
        order(known, **wishes)
    return str(refused.value)


def test_without_options_there_is_one_task_with_one_gpu_for_twelve_hours() -> None:
    made = order()
    assert (made.spec, made.gpus_per_task, made.cpus, made.mem, made.time_min) == ("0-0", 1, 2, "4G", 720)
    assert (made.warning_s, made.logs) == (180, OUT / "logs")


def test_cores_and_memory_grow_with_the_gpus_unless_they_are_named() -> None:
    assert (order(gpus_per_task=4).cpus, order(gpus_per_task=4).mem) == (8, "16G")
    on_cpu = order(gpus_per_task=0, run=("run", "m.csv", "--cpu-workers=2"))
    assert (on_cpu.cpus, on_cpu.mem) == (2, "4G")
    assert (order(gpus_per_task=4, cpus=24, mem="9000M").cpus, order(mem="9000M").mem) == (24, "9000M")


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("1:30", 2), ("0:01", 1), ("2:00:00", 120), ("1-0", 1440), ("1-2:30", 1590), ("7-00:00:00", 10080)],
)
def test_a_time_is_read_as_sbatch_reads_it(text: str, minutes: int) -> None:
    assert parse_minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "0", "0:00", "1:2:3:4", "-5", "1-", "12h", "infinite", "٣"])
def test_what_is_no_time_is_refused(text: str) -> None:
    assert "--time" in refusal(time=text)
    assert "minutes, H:M:S or D-H:M:S" in refusal(time=text)


def test_a_short_job_is_warned_earlier_than_a_long_one_but_never_too_late_for_slurms_clock() -> None:
    assert [order(time=text).warning_s for text in ("1", "4", "12", "600")] == [30, 60, 180, 180]


@pytest.mark.parametrize(
    ("array", "shape", "parallel", "spec"),
    [
        ("0-19%4", ArrayShape(0, 1, 20), 4, "0-19%4"),
        ("1-20:2", ArrayShape(1, 2, 10), None, "1-19:2"),
        ("7", ArrayShape(7, 1, 1), None, "7-7"),
    ],
)
def test_an_array_may_begin_anywhere_and_have_a_step(
    array: str, shape: ArrayShape, parallel: int | None, spec: str
) -> None:
    made = order(array=array)
    assert (made.shape, made.parallel, made.spec, made.only) == (shape, parallel, spec, ())


@given(first=st.integers(0, 50), step=st.integers(1, 7), count=st.integers(1, 40))
def test_what_is_submitted_names_exactly_the_orders_indices(first: int, step: int, count: int) -> None:
    made = ArrayOrder(OUT, ("run",), tasks=count, first=first, step=step)
    assert parse_array(made.spec).indices == made.indices == tuple(range(first, first + step * count, step))


def test_of_a_run_that_began_a_part_may_be_submitted_again_and_keeps_its_shape() -> None:
    known = known_of(began=True, shape=ArrayShape(1, 2, 10))
    made = order(known, array="3,7%1")
    assert (made.shape, made.only, made.spec, made.indices) == (ArrayShape(1, 2, 10), (3, 7), "3,7%1", (3, 7))
    assert order(known, array="3,7", tasks=10).only == (3, 7)  # the project file may have tasks
    assert order(known).spec == order(known, tasks=10).spec == order(known, array="1-19:2").spec == "1-19:2"


@pytest.mark.parametrize(
    ("wishes", "known", "words"),
    [
        ({"array": "1,2,5"}, known_of(), "does not pass a list to its tasks: 0-2"),
        ({"array": "4"}, known_of(True, ArrayShape(1, 2, 10)), "--array=4: not in this run's array 1-19:2"),
        ({"tasks": 3}, known_of(True, ArrayShape(0, 1, 4)), "was started as an array of 4 (0-3)"),
        ({}, known_of(True, None), "was started without an array"),
        ({"tasks": 3}, known_of(listed=5), "the list names 5 manifests, one for each task: --tasks 5"),
        ({"tasks": 0}, known_of(), "--tasks = 0 must be at least 1"),
        ({"tasks": 4, "array": "0-2"}, known_of(), "--tasks 4 and --sbatch=--array=0-2 differ"),
        ({"array": "0-3%2", "parallel": 3}, known_of(), "differ"),
        ({"array": "3-1"}, known_of(), "'3-1' is empty, has step 0, or has an index above"),
        ({"mem": "a lot"}, known_of(), '--mem = "a lot" must be an amount of memory'),
        ({"account": "a\nb"}, known_of(), "--account 'a\\nb'"),
        ({"sbatch": ("--signal=USR1",)}, known_of(), "--signal is set by badcjobs itself"),
        ({"sbatch": ("qos=high",)}, known_of(), "is not a long option of sbatch"),
        ({"sbatch": ("--nodes=2",)}, known_of(), "each array task is one badcjobs on one node"),
        ({"mem": "16GiB"}, known_of(), '--mem = "16GiB" must be an amount of memory'),
        ({"mem": "1.5G"}, known_of(), '--mem = "1.5G" must be an amount of memory'),
        ({"out": Path("/scratch/a\nb")}, known_of(), "--out '/scratch/a\\nb' has a line break in its name"),
    ],
)
def test_a_mistake_is_named_with_its_value(wishes: dict[str, Any], known: Known, words: str) -> None:
    assert words in refusal(known, **wishes)


@pytest.mark.parametrize(
    ("text", "mem"), [("16GB", "16G"), ("16g", "16G"), ("16000MB", "16000M"), ("16000", "16000"), ("0", "0")]
)
def test_memory_is_taken_in_every_way_that_sbatch_takes_it(text: str, mem: str) -> None:
    assert (order(mem=text).mem, order(merge_mem=text).merge_mem) == (mem, mem)  # tried on a real 22.05


@pytest.mark.parametrize(
    ("wishes", "begins"),
    [
        ({"gpus_per_task": 0}, False),
        ({"gpus_per_task": 0, "run": ("run", "--simulate=2")}, False),  # they stand in for GPUs that were granted
        ({"gpus_per_task": 0, "run": ("run", "--cpu-workers=0")}, False),
        ({"gpus_per_task": 0, "run": ("run", "--cpu-workers=2")}, True),
        ({"gpus_per_task": 0, "run": ("run", "--config=/x/run.toml")}, True),  # it may have cpu_workers
        ({"gpus_per_task": 0, "sbatch": ("--gres=gpu:a100:1",)}, True),
        ({"gpus_per_task": 0, "sbatch": ("--exclusive",)}, False),  # srun sees none of the node's
        ({"gpus_per_task": 1}, True),
        ({}, True),
    ],
)
def test_tasks_without_gpus_that_could_never_begin_are_refused_at_once(wishes: dict[str, Any], begins: bool) -> None:
    if begins:
        assert order(**wishes).tasks == 1
    else:
        assert "no task could start" in refusal(**wishes)
        assert refusal(**wishes).splitlines()[-1] == "  try: the same command with -- --cpu-workers 2"


@pytest.mark.parametrize(
    ("wishes", "chunks", "idle"),
    [
        ({"tasks": 4}, 4, 0),
        ({"tasks": 4}, 3, 1),
        ({"array": "0-19:2"}, 1, 9),
        ({"tasks": 4}, 0, 0),  # a source without chunks is refused elsewhere
        ({"array": "3", "known": known_of(began=True, shape=ArrayShape(0, 1, 9))}, 3, 0),  # that was said at first
    ],
)
def test_tasks_that_would_have_nothing_to_do_are_counted(wishes: dict[str, Any], chunks: int, idle: int) -> None:
    assert ArrayPlan(order(**wishes), chunks, {}).idle == idle


def test_a_list_of_manifests_has_a_task_for_each() -> None:
    assert order(known_of(listed=5)).spec == "0-4"


def test_all_mistakes_of_one_command_are_told_together() -> None:
    with pytest.raises(BadInput) as refused:
        make_order(
            SubmitSettings(time="soon", account="", merge_time="x"),
            out=OUT, run_arguments=(), mistakes=["--engine foo is not known"],
        )  # fmt: skip
    assert (refused.value.why or "").splitlines() == [
        "--engine foo is not known",
        "--account '' cannot be written in a line of a script",
        "--time soon is not a time; write minutes, H:M:S or D-H:M:S: 12:00:00",
        "[submit] merge_time = x is not a time; write minutes, H:M:S or D-H:M:S: 12:00:00",
    ]
    assert refused.value.exit_code == 2


def test_more_options_of_sbatch_are_passed_on_by_name() -> None:
    assert extra_options(["--qos=high", "--exclusive"]) == {"qos": "high", "exclusive": True}


@pytest.mark.parametrize(
    ("wishes", "known", "fix"),
    [
        ({"tasks": 4}, known_of(True, ArrayShape(0, 1, 3)), "the same command with --tasks 3"),
        ({"tasks": 3}, known_of(listed=5), "the same command with --tasks 5"),
        ({"array": "1,3,5,7%2"}, known_of(), "the same command with --sbatch=--array=1-7:2%2"),
        ({"tasks": 4, "mem": "much"}, known_of(True, ArrayShape(0, 1, 3)), "badcjobs submit --help"),
        ({"array": "4"}, known_of(True, ArrayShape(1, 2, 10)), "badcjobs submit --help"),
    ],
)
def test_where_the_right_value_is_known_it_is_the_line_to_try(wishes: dict[str, Any], known: Known, fix: str) -> None:
    assert refusal(known, **wishes).splitlines()[-1] == f"  try: {fix}"
