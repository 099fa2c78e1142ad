"""What every scheduler promises (seams.Scheduler): Slurm through submitit, and the emulation on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.cluster import LocalScheduler, LocalSettings, SlurmScheduler, cancel_line, read_request
from rooms.model import ArrayOrder, StandIn, Submitted
from rooms.root import BadInput, Scheduler, SystemClock
from rooms.task import StopRequest, World
from support.pages import Pages

PROGRAM = (sys.executable, "-m", "badcjobs")


def never(argv: tuple[str, ...], requeues: int) -> Callable[[], None]:
    raise AssertionError("nothing is to be run")


def local(folder: Path, out: Path) -> LocalScheduler:
    clock = SystemClock()
    environ = {"PATH": os.environ["PATH"], "TMPDIR": str(folder), "BADCJOBS_LOCK_DIR": str(folder / "locks")}
    world = World(environ, clock, StopRequest(clock.monotonic_s), "here", os.getpid(), folder, 8)
    return LocalScheduler(LocalSettings(StandIn(simulate=4)), world, lambda text: None, out)


@pytest.fixture
def order(tmp_path: Path) -> ArrayOrder:
    out = tmp_path / "my run"
    return ArrayOrder(
        out=out, run_arguments=("run", "/data/manifest.csv", "--out", str(out), "--engine", "demo"), tasks=5, first=1,
        step=2, parallel=4, gpus_per_task=2, cpus=6, mem="12G", time_min=90, warning_s=60, account="st-x-1-gpu",
        constraint="v100", merge_account="st-x-1", extra_sbatch=("--qos=high", "--exclusive", "--partition=gpu"),
        setup=("module load gcc cuda",),
    )  # fmt: skip


def test_their_scripts_ask_for_what_was_ordered(order: ArrayOrder, tmp_path: Path, pages: Pages) -> None:
    slurm = SlurmScheduler(PROGRAM, never)
    schedulers: tuple[Scheduler, ...] = (slurm, local(tmp_path, order.out))
    less = {"gpus_per_task": 0, "cpus": None, "account": None, "constraint": None, "extra_sbatch": ()}
    said = {}
    for scheduler in schedulers:
        script = scheduler.script(order)
        assert script == scheduler.script(order)
        said[f"{scheduler.name}.txt"] = script
        said[f"{scheduler.name}-part.txt"] = scheduler.script(replace(order, only=(3, 9), **less))
        asked = read_request(script.replace("#SBATCH --exclusive\n", ""))
        assert asked.array is not None
        assert (asked.array.indices, asked.array.parallel, asked.gpus) == (order.indices, 4, 2)
        assert (asked.cpus, asked.time_s, asked.mem_mib) == (6, 5400, 12288)
    said["merge.txt"] = slurm.merge_script(order)
    said["merge-plain.txt"] = slurm.merge_script(replace(order, merge_account=None, extra_sbatch=()))
    job = Submitted("4821", "4822", order.indices)
    said["lines.txt"] = "\n".join([cancel_line(job), *slurm.follow_lines(job, order)])
    assert list(tmp_path.iterdir()) == []
    assert [scheduler.poll_s for scheduler in schedulers] == [30, 0.5], "nobody is asked in a hurry"
    with pytest.raises(BadInput, match="has a % in its name"):
        slurm.script(replace(order, out=tmp_path / "100%"))
    plain = {name: text.replace(str(tmp_path), "FOLDER") for name, text in said.items()}
    pages({name: text.replace(sys.executable, "PYTHON") for name, text in plain.items()})


def test_the_emulation_runs_an_order_in_any_folder_and_its_states_can_be_asked(tmp_path: Path) -> None:
    out = tmp_path / "a run 100%"
    order = ArrayOrder(out, ("--version",), 3, first=1, step=2, cpus=1, setup=("export X='a b'", 'echo "$X"'))
    scheduler = local(tmp_path, out)
    job = scheduler.submit(order)
    assert scheduler.states(job).array == {1: "COMPLETED", 3: "COMPLETED", 5: "COMPLETED"}
    assert (job.indices, job.merge_job_id) == ((1, 3, 5), None)
    assert (out / "logs" / f"{job.job_id}_5.out").read_text().startswith("a b\nbadcjobs ")
    assert scheduler.states(Submitted("1", None, (0,))).array == {}
