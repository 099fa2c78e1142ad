"""How many workers a device gets when nobody says: measured, one more while it pays."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from rooms.model import MemoryHeld
from rooms.workers import Ramp, WorkerStep, plan_start

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
    *numbers, reason, _ = plan_start(cpus=cpus, devices=devices, memory_bytes=memory, known=known)
    assert numbers == [workers, most]
    assert ("earlier run" in reason) == (known is not None)
    assert "GPU memory" in reason


@pytest.mark.parametrize(
    ("granted", "known", "worker", "workers"),
    [
        (None, None, None, 4),
        (64 * GIB, None, None, 4),
        (16 * GIB, None, None, 3),  # nobody knows yet what a worker takes
        (16 * GIB, None, GIB, 4),
        (2 * GIB, None, None, 1),  # one there always is
        (16 * GIB, 8, None, 3),  # it has worked before, in nobody knows how much memory
        (16 * GIB, 8, 3 * GIB, 4),  # where more memory was granted
        (64 * GIB, 8, 3 * GIB, 8),
    ],
)
def test_the_beginning_keeps_to_the_main_memory_that_was_granted(
    granted: int | None, known: int | None, worker: int | None, workers: int
) -> None:
    begun, _, reason, short_of_memory = plan_start(
        cpus=16, devices=1, memory_bytes=139 * GIB, known=known, granted_bytes=granted, worker_bytes=worker
    )
    assert begun == workers
    assert short_of_memory == (workers < (known or 4)) == ("of main memory, and a worker may need" in reason)


def test_the_workers_of_all_devices_share_the_main_memory_from_the_beginning() -> None:
    four, eight = (
        plan_start(
            cpus=64, devices=devices, memory_bytes=None, known=None, granted_bytes=64 * GIB, worker_bytes=4 * GIB
        )
        for devices in (4, 8)
    )
    assert (four[0], eight[0]) == (3, 1)
    assert four[2].endswith("; the job has 64.0 GiB of main memory, and a worker may need 4.0 GiB")


def climb(
    ramp: Ramp,
    speed: Callable[[int], float],
    *,
    left: int = 10**6,
    memory_each: float | None = None,
    held: Callable[[float, int], MemoryHeld | None] = lambda now_s, workers: None,
) -> list[WorkerStep]:
    """Let time pass; ``speed`` is the chunks per second that so many workers per device achieve.

    ``held``: the last reading of the main memory at a moment, with so many workers per device.
    """
    steps, done, now_s = [], 0.0, 0.0
    while not ramp.settled and now_s < 10_000:
        now_s += 1
        done += speed(ramp.workers)
        step = ramp.observe(
            now_s,
            work_done=30 * int(done),
            chunks_done=int(done),
            chunks_left=max(0, left - int(done)),
            all_warm=True,
            memory_share=None if memory_each is None else memory_each * ramp.workers,
            memory_held=held(now_s, ramp.workers),
        )
        steps += [] if step is None else [step]
    return steps


def test_workers_are_added_while_each_brings_more_than_5_percent_and_the_last_goes_again() -> None:
    speeds = {1: 10.0, 2: 18.0, 3: 22.0, 4: 22.5, 5: 40.0}
    ramp = Ramp(1, 8, 1, settled=False)
    steps = climb(ramp, speeds.__getitem__)
    assert [(step.workers, step.settled) for step in steps] == [(2, False), (3, False), (4, False), (3, True)]
    assert re.search(r"4 per device changed the rate by \+[0-4]% against 3", steps[-1].reason)


def test_a_worker_that_makes_all_slower_goes_at_once() -> None:
    ramp = Ramp(4, 8, 1, settled=False)
    steps = climb(ramp, {4: 20.0, 5: 15.0}.__getitem__)
    assert [step.workers for step in steps] == [5, 4]
    assert "-25%" in steps[-1].reason


def test_there_are_never_more_workers_than_cores() -> None:
    ramp = Ramp(1, 3, 1, settled=False)
    steps = climb(ramp, lambda workers: 10.0 * workers)
    assert [step.workers for step in steps] == [2, 3, 3]
    assert "cores" in steps[-1].reason


def test_a_device_is_never_filled_beyond_nine_tenths() -> None:
    ramp = Ramp(1, 16, 1, settled=False)
    steps = climb(ramp, lambda workers: 10.0 * workers, memory_each=0.25)
    assert steps[-1].workers == 3
    assert "one more might fill 100% of a device's memory" in steps[-1].reason
    assert not steps[-1].settled, "tomorrow it may be empty"


def every_10_s(gib_each: float, devices: int = 1) -> Callable[[float, int], MemoryHeld]:
    """Read the memory as a watch does: now and then, and in between it is the old reading that is known."""
    last = MemoryHeld(0, -10.0)

    def read(now_s: float, workers: int) -> MemoryHeld:
        nonlocal last
        if now_s >= last.at_s + 10:
            last = MemoryHeld(int(gib_each * GIB * workers * devices), now_s)
        return last

    return read


@pytest.mark.parametrize(
    ("devices", "granted", "workers"), [(1, 16, 4), (1, 18, 5), (4, 16, 1), (4, 24, 1), (4, 30, 2)]
)
def test_there_is_no_further_worker_where_nine_tenths_of_the_main_memory_would_be_passed(
    devices: int, granted: int, workers: int
) -> None:
    ramp = Ramp(1, 8, devices, settled=False, granted_bytes=granted * GIB)
    steps = climb(ramp, lambda n: 30.0 * n, held=every_10_s(3.2, devices))
    assert (steps[-1].workers, steps[-1].settled) == (workers, False), "another job may have asked for more"
    now, then = 3.2 * workers * devices, 3.2 * (workers + 1) * devices
    words = f"raise the main memory in use from {now:.1f} GiB to {then:.1f} GiB; the job has {granted}.0 GiB"
    assert steps[-1].reason.endswith(f"one more might {words}")


def test_without_a_limit_or_a_reading_of_the_main_memory_there_is_no_such_rule() -> None:
    for granted, held in ((None, every_10_s(100.0)), (GIB, lambda now_s, workers: None)):
        ramp = Ramp(1, 3, 1, settled=False, granted_bytes=granted)
        assert [step.workers for step in climb(ramp, lambda n: 30.0 * n, held=held)] == [2, 3, 3]


def test_a_reading_from_before_the_last_worker_was_warm_is_not_what_is_decided_by() -> None:
    ramp = Ramp(1, 8, 1, settled=False, granted_bytes=16 * GIB)
    assert climb(ramp, lambda n: 30.0 * n, held=lambda now_s, workers: MemoryHeld(GIB, 0.5)) == []
    assert ramp.workers == 1


def test_while_the_main_memory_still_grows_nothing_is_added() -> None:
    def grows(now_s: float, workers: int) -> MemoryHeld:
        return MemoryHeld(int(GIB * (1.0 + 0.1 * min(now_s, 60.0))), now_s)

    ramp = Ramp(1, 8, 1, settled=False, granted_bytes=15 * GIB)
    (step,) = climb(ramp, lambda n: 30.0, held=grows)  # at 7 GiB it ends; 14 would be more than nine tenths of 15
    assert (step.workers, step.settled) == (1, False)
    assert "the main memory in use" in step.reason


def test_with_little_work_left_nothing_is_tried_and_nothing_is_learned() -> None:
    ramp = Ramp(2, 16, 1, settled=False)
    (step,) = climb(ramp, lambda workers: 10.0, left=500)
    assert (step.workers, step.settled) == (2, False)
    assert "s of work left" in step.reason
    assert ramp.settled


def test_what_an_earlier_run_has_found_is_not_tried_again() -> None:
    ramp = Ramp(5, 16, 1, settled=True)
    assert climb(ramp, lambda workers: 10.0 * workers) == []
    assert ramp.workers == 5


def test_a_window_is_long_enough_that_one_chunk_more_or_less_does_not_matter() -> None:
    ramp = Ramp(2, 16, 4, settled=False)
    for second in range(2000):
        step = ramp.observe(
            second, work_done=0.1 * second, chunks_done=int(0.1 * second), chunks_left=10**6, all_warm=True,
            memory_share=None, memory_held=None,
        )  # fmt: skip
        if step is not None:
            break
    assert 0.1 * second >= 20 * 2 * 4


def test_nothing_is_measured_before_every_worker_is_warm() -> None:
    ramp = Ramp(1, 16, 1, settled=False)
    for second in range(600):
        step = ramp.observe(
            second, work_done=0, chunks_done=second, chunks_left=9, all_warm=False, memory_share=None, memory_held=None
        )
        assert step is None
    assert ramp.rates == {}


def test_memory_that_ran_out_costs_a_worker_but_never_the_last() -> None:
    ramp = Ramp(3, 16, 1, settled=False)
    step = ramp.step_back("it ran out of memory")
    assert step == WorkerStep(2, "it ran out of memory", settled=False)
    assert Ramp(1, 16, 1, settled=False).step_back("it ran out of memory") is None
