"""What submit was asked for, on its way back from an order to a command that can be compared and pasted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from badcjobs.cluster.array_options import ArrayOptions, make_order
from badcjobs.model import ArrayOrder
from badcjobs.store.submission_record import asked_of, differences, submit_command

RUN = ("run", "/data/m.csv", "--out=/scratch/july", "--engine=demo")


def order(**wishes: Any) -> ArrayOrder:
    return make_order(ArrayOptions(**wishes), out=Path("/scratch/july"), run_arguments=(*RUN, "--cpu-workers=1"))


def test_the_command_names_only_what_was_wished_for() -> None:
    plain = submit_command("slurm", RUN, asked_of(order()))
    assert plain == ("badcjobs", "submit", "/data/m.csv", "--out=/scratch/july", "--engine=demo", "--cluster=slurm")
    four = submit_command("local", RUN, asked_of(order(gpus_per_task=4)))
    assert four[5:] == ("--cluster=local", "--gpus-per-task=4")  # cores and memory follow from it
    many = asked_of(
        order(array="1-9:2%4", time="1-0", setup=("module load gcc", "x"), sbatch=("--qos=high",), mem="9GB")
    )
    assert submit_command("slurm", RUN, many)[6:] == (
        "--array=1-9:2%4", "--mem=9G", "--time=1440", "--sbatch=--qos=high", "--setup=module load gcc", "--setup=x",
    )  # fmt: skip


@given(
    tasks=st.integers(1, 50),
    parallel=st.none() | st.integers(1, 9),
    gpus_per_task=st.none() | st.integers(0, 8),
    cpus=st.none() | st.integers(1, 24),
    mem=st.none() | st.sampled_from(["4G", "16gb", "9000", "12000M"]),
    time=st.none() | st.sampled_from(["90", "1:30", "2-0", "12:00:00"]),
    account=st.none() | st.just("st-pi-1"),
    requeues=st.integers(0, 12),
)
def test_the_command_asks_for_the_same_order(**wishes: Any) -> None:
    first = order(**wishes)
    flags = dict(word.removeprefix("--").split("=", 1) for word in submit_command("slurm", RUN, asked_of(first))[6:])
    again: dict[str, Any] = {name.replace("-", "_"): value for name, value in flags.items()}
    for name in {"gpus_per_task", "cpus", "requeues"} & again.keys():
        again[name] = int(again[name])
    assert order(**again) == first
    assert differences(asked_of(first), asked_of(order(**again))) == []


def test_what_differs_is_named_with_both_values() -> None:
    assert differences(asked_of(order()), asked_of(order(mem="9G", setup=("a", "b")))) == [
        "--mem was 4G, now 9G", "--setup was not given, now a, b",
    ]  # fmt: skip
