"""What Slurm gave this process: its shard, its memory, when its time ends, and what may still be started before it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

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
from rooms.task import Rates, TimeBudget, Work, find_end
from support.hand_clock import HandClock
from support.pages import Pages
from support.task_files import make_chunk

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


NOW_MS = HandClock().now_ms()


def test_the_user_says_when_the_time_ends_else_slurms_variable_else_squeue_once(tmp_path: Path) -> None:
    program, calls = tmp_path / "squeue", tmp_path / "calls"

    def ask(answer: str, stop_after: str | None = None, **facts: str) -> tuple[EndTime | None, list[str]]:
        """Return the end that was found, and how squeue was called."""
        program.write_text(f'#!/bin/sh\necho "$SLURM_TIME_FORMAT $*" >> {calls}\n{answer}\n')
        program.chmod(0o755)
        calls.write_text("")
        allocation = Allocation("outside" not in facts, "4821", "gpu3", array_index=7, facts=facts)
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_TIME_FORMAT": "relative"}
        return find_end(stop_after, allocation, environ, NOW_MS), calls.read_text().splitlines()

    called, hour, in_two_hours = ["%s -h -j 4821_7 -o %e"], "echo 1800003600", {"SLURM_JOB_END_TIME": "1800007200"}
    by_squeue = EndTime(NOW_MS + 3_600_000, "squeue")
    assert ask(hour, "1:00", **in_two_hours) == (EndTime(NOW_MS + 60_000, "run.stop_after"), [])
    assert ask(hour, **in_two_hours) == (EndTime(NOW_MS + 7_200_000, "SLURM_JOB_END_TIME"), [])
    assert ask(hour) == ask(hour, SLURM_JOB_END_TIME="1799999000") == (by_squeue, called)
    assert ask(hour, outside="Slurm") == (None, [])
    for answer in ("echo NONE", "echo slurmctld is down >&2; exit 1", "kill -9 $$"):
        assert ask(answer) == (None, called), answer
    program.write_bytes(b"\x7fELF, or nearly")
    for path in (f"{tmp_path}", "/nowhere"):
        assert find_end(None, Allocation(True, "4821", "gpu3"), {"PATH": path}, NOW_MS) is None


def budget_of(seconds: float, *work: Work, gone: float = 0) -> tuple[TimeBudget, HandClock]:
    """Return a budget, some seconds of which are gone, that has learned from this work; 20 s are for publishing."""
    clock = HandClock()
    budget = TimeBudget(EndTime(clock.now_ms() + round(seconds * 1000), "run.stop_after"), clock)
    budget.learn(lambda limit: work)
    clock.sleep(gone)
    return budget, clock


# Seconds in all, seconds gone, how long the work takes → whether it may start.
STARTS: list[tuple[float, float, float | None, bool]] = [
    (3600, 0, 0.1, True), (3600, 0, 3254, True), (3600, 0, 3255, False), (3600, 0, 3576, False),  # a margin of a tenth
    (3600, 3574, 1.0, True), (3600, 3575, 1.0, False),  # and of 5 s at least
    (3600, 3579, None, True), (3600, 3580, None, False),
    (5, 3, 0.3, True), (5, 4, 0.3, False),  # a short time has a small margin and a small reserve
    (0, 0, None, False), (-5, 0, 0.0, False),
]  # fmt: skip


def test_work_may_start_if_it_fits_with_a_margin_before_publishing() -> None:
    for whole_s, gone_s, takes_s, may in STARTS:
        budget, _ = budget_of(whole_s, gone=gone_s)
        assert budget.may_start(takes_s, takes_s or 0.0) is may, (whole_s, gone_s, takes_s)
    budget, clock = budget_of(3600)
    seen = []
    for pause_s in (0, 3579, 1):
        clock.sleep(pause_s)
        seen.append((budget.left_s, budget.over, budget.out_of_time, budget.is_news, budget.is_news))
    assert seen == [(3580, False, False, False, False), (1, False, False, False, False), (0, True, True, True, False)]


def test_the_rate_of_a_device_is_the_slowest_but_one_in_twenty_of_its_own_chunks() -> None:
    assert Rates().expected_s(1, 30.0) is None
    rates = Rates([(1, 30.0, 3.0), (1, 60.0, 6.0), (2, 30.0, 30.0)])
    assert [rates.expected_s(device, 600.0) for device in (1, 2, 3)] == pytest.approx([60, 600, 600])
    work: list[Work] = [(1, 10.0, 1.0)] * 95 + [(1, 10.0, 100.0)] * 5
    assert Rates(work).expected_s(1, 10.0) == pytest.approx(1.0)
    assert Rates([*work, (1, 10.0, 100.0)]).expected_s(1, 10.0) == pytest.approx(100.0)
    assert Rates([(1, None, 4.0), (1, None, 2.0)]).expected_s(1, 30.0) == 4.0, "the length is not known"
    assert Rates([(1, 30.0, 3.0), (1, 300.0, 30.0)]).expected_s(1, None) == 30.0
    looks: list[int] = []
    budget, clock = budget_of(3600)
    for _ in range(30):
        clock.sleep(0.1)
        budget.learn(lambda limit: looks.append(limit) or [])
    assert looks == [200] * 3, "no more than once a second"


def accepted(budget: TimeBudget, in_hand: dict[float, int | None], lanes: int, *offered: float | None) -> list[bool]:
    """Return which chunks are accepted, one after the other, by a worker with some in hand: seconds → begun at."""
    hand = [(make_chunk("h", seconds=seconds), at_ms) for seconds, at_ms in in_hand.items()]
    fits = budget.fit_test(1, hand, lanes)
    return [fits(make_chunk("c", seconds=seconds)) for seconds in offered]


def test_a_worker_gets_only_what_it_finishes_after_what_it_has() -> None:
    realtime: Work = (1, 1.0, 1.0)
    unlimited = TimeBudget(None, HandClock())
    unlimited.learn(lambda limit: pytest.fail("nobody needs to know"))
    assert accepted(unlimited, {}, 1, 1e9) == [True] and not unlimited.over
    budget, _ = budget_of(3600, realtime)
    assert accepted(budget, {}, 1, 1700, 1700) == [True, True] and not budget.out_of_time
    assert accepted(budget, {}, 1, 36_000, 300) == [False, True] and budget.out_of_time
    assert accepted(budget, {1200: None}, 1, 1201, 1202) == [True, False]
    assert accepted(budget, {}, 2, *[1700] * 5) == [True] * 4 + [False]
    assert accepted(budget, {}, 0, 1700, 1700, 1700) == [True, True, False], "a worker has one lane at least"
    unknown, clock = budget_of(3600, gone=3570)
    assert accepted(unknown, {30: None}, 1, 30, 30) == [True, True]
    clock.sleep(20)
    assert accepted(unknown, {}, 1, 30) == [False]


def test_of_a_chunk_that_was_begun_only_the_rest_counts_and_it_keeps_its_lane() -> None:
    begun_ms = HandClock().now_ms()
    budget, clock = budget_of(3600, (1, 1.0, 1.0), gone=1000)
    assert accepted(budget, {1500: None}, 1, 1500) == [False]
    assert accepted(budget, {1500: begun_ms}, 1, 1500) == [True]
    clock.sleep(800)  # it is late, and may end at any time
    assert accepted(budget, {1500: begun_ms}, 1, 1500) == [True]
    clock.sleep(200)
    assert accepted(budget, {1500: begun_ms}, 1, 1500) == [False], "1580 s are left"
    budget, _ = budget_of(3600, (1, 1.0, 1.0), gone=500)  # 3080 s left; those begun take 100 s and 1500 s more
    in_hand = {1000: None, 600: begun_ms, 2000: begun_ms}
    assert accepted(budget, in_hand, 2, 1750) == [True], "it begins in 1100 s"
    assert accepted(budget, in_hand, 2, 1850) == [False], "in 1000 s no lane is free"
