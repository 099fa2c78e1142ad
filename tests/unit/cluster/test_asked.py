"""What submit was asked for, on its way back from an order to a command that can be compared and pasted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rooms.cluster import make_order
from rooms.model import ArrayOrder
from rooms.root import Project, SubmitSettings
from rooms.store import asked_of, differences, submit_command, with_words

RUN = ("run", "/data/m.csv", "--out=/scratch/july", "--engine=demo")


def order(**wishes: Any) -> ArrayOrder:
    options = Project().make(SubmitSettings, wishes, "submit")
    return make_order(options, out=Path("/scratch/july"), run_arguments=(*RUN, "--cpu-workers=1"))


def test_the_command_names_only_what_was_wished_for() -> None:
    plain = submit_command("slurm", RUN, asked_of(order()))
    begin, end = ("badcjobs", "submit", "/data/m.csv", "--out=/scratch/july"), ("--", "--engine=demo")
    assert plain == (*begin, "--cluster=slurm", *end)
    four = submit_command("local", RUN, asked_of(order(gpus_per_task=4)))
    assert four == (*begin, "--cluster=local", "--gpus-per-task=4", *end)  # cores and memory follow from it
    assert with_words(plain, "--again") == (*begin, "--cluster=slurm", "--again", *end)
    many = asked_of(
        order(time="1-0", setup=["module load gcc", "x"], sbatch=["--array=1-9:2%4", "--qos=high"], mem="9GB")
    )
    assert submit_command("slurm", RUN, many)[5:-2] == (
        "--sbatch=--array=1-9:2%4", "--mem=9G", "--time=1440", "--sbatch=--qos=high",
        '--config=submit.setup=["module load gcc", "x"]',
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
    again: dict[str, Any] = {"sbatch": []}
    for word in submit_command("slurm", RUN, asked_of(first))[5:-2]:
        name, value = word.removeprefix("--config=submit.").removeprefix("--").split("=", 1)
        if name == "sbatch":
            again["sbatch"].append(value)
        else:
            key = name.replace("-", "_")
            again[key] = int(value) if key in ("gpus_per_task", "cpus", "requeues") else value
    assert order(**again) == first
    assert differences(asked_of(first), asked_of(order(**again))) == []


def test_what_differs_is_named_with_both_values() -> None:
    assert differences(asked_of(order()), asked_of(order(mem="9G", setup=["a", "b"]))) == [
        "--mem was 4G, now 9G", "submit.setup was not given, now a, b",
    ]  # fmt: skip
