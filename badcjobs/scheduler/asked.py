"""What ``badcjobs submit`` was asked for, by its options: kept to be compared with the next one, and repeated. Pure.

How an option's text becomes an order is ``wishes.py``'s business; this is the way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from badcjobs.model import ArrayOrder
from badcjobs.scheduler.wishes import Known, Wishes, make_order

Asked = Mapping[str, Any]  # option → its value; None: the option was not given


def asked_of(order: ArrayOrder) -> dict[str, Any]:
    """Return the options that an order stands for; times are in minutes, as sbatch takes them."""
    return {
        "--array": order.spec,
        "--gpus-per-task": order.gpus_per_task,
        "--cpus": order.cpus,
        "--mem": order.mem,
        "--time": order.time_min,
        "--account": order.account,
        "--partition": order.partition,
        "--constraint": order.constraint,
        "--sbatch": list(order.extra_sbatch),
        "--job-name": order.name,
        "--setup": list(order.setup),
        "--requeues": order.requeues,
        "--merge-account": order.merge_account,
        "--merge-mem": order.merge_mem,
        "--merge-time": order.merge_time_min,
    }


def differences(then: Asked, now: Asked) -> list[str]:
    """Return the options that differ, each with both values."""
    return [
        f"{option} was {_words(then.get(option))}, now {_words(now.get(option))}"
        for option in now
        if then.get(option) != now.get(option)
    ]


def submit_words(cluster: str, run_arguments: Sequence[str], asked: Asked) -> tuple[str, ...]:
    """Return the ``badcjobs submit`` that asks for the same once more, without what it would do anyway."""
    wishes = Wishes(gpus_per_task=asked["--gpus-per-task"])  # cores and memory go by them
    any_run = ("run", "--cpu-workers=1")  # whatever it is: it was taken once
    usual = asked_of(make_order(wishes, Known(), out=Path(), run_arguments=any_run))
    usual["--gpus-per-task"] = 1
    return (
        *("badcjobs", "submit", *run_arguments[1:], f"--cluster={cluster}"),
        *(word for option, value in asked.items() if value != usual.get(option) for word in _option(option, value)),
    )


def _option(option: str, value: Any) -> Iterator[str]:
    for one in value if isinstance(value, list) else [value]:
        if one is not None:
            yield f"{option}={one}"


def _words(value: Any) -> str:
    if value is None or value == []:
        return "not given"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
