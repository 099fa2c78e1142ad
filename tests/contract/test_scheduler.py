"""What every scheduler promises (seams.Scheduler): Slurm through submitit, and the emulation on this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.cluster import LocalScheduler, LocalSettings, SlurmScheduler, cancel_line, read_request
from rooms.model import ArrayOrder, Submitted
from rooms.root import Scheduler, SystemClock
from rooms.task import StopRequest, World

PROGRAM = (sys.executable, "-m", "badcjobs")


def never(argv: tuple[str, ...], requeues: int) -> Callable[[], None]:
    raise AssertionError("nothing is to be run")


def slurm() -> SlurmScheduler:
    return SlurmScheduler(PROGRAM, never)


def local() -> Scheduler:
    clock, here = SystemClock(), Path.cwd()
    world = World({}, clock, StopRequest(clock.monotonic_s), "here", 1, here, 8)
    return LocalScheduler(LocalSettings(), world, lambda text: None, here)


@pytest.fixture(params=[slurm, local], ids=["slurm", "local"])
def scheduler(request: pytest.FixtureRequest) -> Scheduler:
    made: Scheduler = request.param()
    return made


@pytest.fixture
def order(tmp_path: Path) -> ArrayOrder:
    return ArrayOrder(
        out=tmp_path / "my run",
        run_arguments=("run", "/data/manifest.csv", "--out", str(tmp_path / "my run"), "--engine", "demo"),
        tasks=5,
        first=1,
        step=2,
        parallel=4,
        gpus_per_task=2,
        cpus=6,
        mem="12G",
        time_min=90,
        setup=("module load gcc cuda",),
    )


def test_its_script_asks_for_what_was_ordered(scheduler: Scheduler, order: ArrayOrder) -> None:
    asked = read_request(scheduler.script(order))
    assert asked.array is not None
    assert (tuple(asked.array.indices), asked.array.parallel) == ((1, 3, 5, 7, 9), 4)
    assert (asked.gpus, asked.cpus) == (2, 6)
    assert asked.time_s == 90 * 60


def test_a_part_that_is_submitted_again_is_that_part(scheduler: Scheduler, order: ArrayOrder) -> None:
    asked = read_request(scheduler.script(replace(order, only=(3, 9))))
    assert asked.array is not None
    assert tuple(asked.array.indices) == (3, 9)


def test_the_same_order_is_the_same_text_and_making_it_leaves_nothing_behind(
    scheduler: Scheduler, order: ArrayOrder, tmp_path: Path
) -> None:
    assert scheduler.script(order) == scheduler.script(order)
    assert list(tmp_path.iterdir()) == []


def test_what_is_to_be_set_up_comes_before_the_work(scheduler: Scheduler, order: ArrayOrder) -> None:
    check_setup(scheduler.script(order))


def check_setup(script: str) -> None:
    lines = script.splitlines()
    assert lines[0].startswith("#!")
    (place,) = [number for number, line in enumerate(lines) if line == "module load gcc cuda"]
    assert not any(line.startswith("#SBATCH") for line in lines[place:])
    assert any(line.strip() and not line.startswith("#") for line in lines[place + 1 :])


def test_the_merge_job_of_slurm_merges_the_run_folder(order: ArrayOrder) -> None:
    script = slurm().merge_script(order)
    check_setup(script)
    last = [line for line in script.splitlines() if line.strip()][-1]
    assert shlex.split(last)[-2:] == ["merge", str(order.out)]


def test_the_lines_of_slurm_can_be_pasted(order: ArrayOrder) -> None:
    job = Submitted("4821", "4822", order.indices)
    lines = (cancel_line(job), *slurm().follow_lines(job, order))
    assert len(lines) == 4
    assert all(shlex.split(line) for line in lines)
    assert any(shlex.split(line)[:2] == ["badcjobs", "merge"] for line in lines)


def test_nobody_is_asked_in_a_hurry(scheduler: Scheduler) -> None:
    assert scheduler.poll_s >= (30 if scheduler.name == "slurm" else 0.1)
