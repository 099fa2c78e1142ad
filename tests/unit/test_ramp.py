"""How many workers a device gets when nobody says: measured, one more while it pays."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from badcjobs.workers.ramp import Beginning, Ramp, Step, begin

GIB = 2**30


@pytest.mark.parametrize(
    ("cpus", "devices", "memory", "known", "workers", "most"),
    [
        (16, 1, 139 * GIB, None, 4, 16),  # an H200 with 16 cores
        (24, 4, 32 * GIB, None, 1, 6),  # a Sockeye node
        (24, 4, 16 * GIB, 3, 3, 6),  # the same, with experience
        (64, 1, 8 * GIB, None, 1, 16),  # many cores, little memory
        (64, 1, None, None, 16, 16),
        (2, 4, 16 * GIB, None, 1, 1),  # fewer cores than devices
        (4, 1, 139 * GIB, 8, 4, 4),  # experience from a larger machine
    ],
)
def test_the_beginning_follows_from_cores_memory_and_experience(
    cpus: int, devices: int, memory: int | None, known: int | None, workers: int, most: int
) -> None:
    beginning = begin(cpus=cpus, devices=devices, memory_bytes=memory, known=known)
    assert (beginning.workers, beginning.most) == (workers, most)
    assert ("earlier run" in beginning.reason) == (known is not None)


def climb(
    ramp: Ramp, speed: Callable[[int], float], *, left: int = 10**6, memory_each: float | None = None
) -> list[Step]:
    """Let time pass; ``speed`` is the chunks per second that so many workers per device achieve."""
    steps, done, now_s = [], 0.0, 0.0
    while not ramp.settled and now_s < 10_000:
        now_s += 1
        done += speed(ramp.workers)
        step = ramp.look(
            now_s,
            work_done=30 * int(done),
            chunks_done=int(done),
            chunks_left=max(0, left - int(done)),
            all_warm=True,
            memory_share=None if memory_each is None else memory_each * ramp.workers,
        )
        steps += [] if step is None else [step]
    return steps


def test_workers_are_added_while_each_brings_more_than_5_percent_and_the_last_goes_again() -> None:
    speeds = {1: 10.0, 2: 18.0, 3: 22.0, 4: 22.5, 5: 40.0}
    ramp = Ramp(Beginning(1, 8, ""), 1, settled=False)
    steps = climb(ramp, speeds.__getitem__)
    assert [(step.workers, step.settled) for step in steps] == [(2, False), (3, False), (4, False), (3, True)]
    assert re.search(r"4 per device did \+[0-4]% against 3", steps[-1].reason)


def test_a_worker_that_makes_all_slower_goes_at_once() -> None:
    ramp = Ramp(Beginning(4, 8, ""), 1, settled=False)
    steps = climb(ramp, {4: 20.0, 5: 15.0}.__getitem__)
    assert [step.workers for step in steps] == [5, 4]
    assert "-25%" in steps[-1].reason


def test_there_are_never_more_workers_than_cores() -> None:
    ramp = Ramp(Beginning(1, 3, ""), 1, settled=False)
    steps = climb(ramp, lambda workers: 10.0 * workers)
    assert [step.workers for step in steps] == [2, 3, 3]
    assert "cores" in steps[-1].reason


def test_a_device_is_never_filled_beyond_nine_tenths() -> None:
    ramp = Ramp(Beginning(1, 16, ""), 1, settled=False)
    steps = climb(ramp, lambda workers: 10.0 * workers, memory_each=0.25)
    assert steps[-1].workers == 3
    assert "one more might fill 100% of a device's memory" in steps[-1].reason
    assert not steps[-1].settled, "tomorrow it may be empty"


def test_with_little_work_left_nothing_is_tried_and_nothing_is_learned() -> None:
    ramp = Ramp(Beginning(2, 16, ""), 1, settled=False)
    (step,) = climb(ramp, lambda workers: 10.0, left=500)
    assert (step.workers, step.settled) == (2, False)
    assert "s of work are left" in step.reason
    assert ramp.settled


def test_what_an_earlier_run_has_found_is_not_tried_again() -> None:
    ramp = Ramp(Beginning(5, 16, ""), 1, settled=True)
    assert climb(ramp, lambda workers: 10.0 * workers) == []
    assert ramp.workers == 5


def test_a_window_is_long_enough_that_one_chunk_more_or_less_does_not_matter() -> None:
    ramp = Ramp(Beginning(2, 16, ""), 4, settled=False)
    for second in range(2000):
        step = ramp.look(
            second, work_done=0.1 * second, chunks_done=int(0.1 * second), chunks_left=10**6, all_warm=True,
            memory_share=None,
        )  # fmt: skip
        if step is not None:
            break
    assert 0.1 * second >= 20 * 2 * 4


def test_nothing_is_measured_before_every_worker_is_warm() -> None:
    ramp = Ramp(Beginning(1, 16, ""), 1, settled=False)
    for second in range(600):
        assert (
            ramp.look(second, work_done=0, chunks_done=second, chunks_left=9, all_warm=False, memory_share=None) is None
        )
    assert ramp.rates == {}


def test_memory_that_ran_out_costs_a_worker_but_never_the_last() -> None:
    ramp = Ramp(Beginning(3, 16, ""), 1, settled=False)
    step = ramp.too_much("it ran out of memory")
    assert step == Step(2, "it ran out of memory", settled=False)
    assert Ramp(Beginning(1, 16, ""), 1, settled=False).too_much("it ran out of memory") is None
