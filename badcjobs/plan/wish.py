"""What is asked of a plan, and what the site allows; None: nobody says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from badcjobs.errors import BadInput

SLURMS_OWN_ARRAY = 1_000  # MaxArraySize is 1001 unless somebody has changed it
USUAL_TIME_S = 12 * 3600  # as of badcjobs submit


@dataclass(frozen=True, slots=True)
class Caps:
    """What a site allows."""

    site: str | None = None
    array_tasks: int | None = None
    queued_jobs: int | None = None
    gpu_hours: float | None = None  # running and waiting together
    time_s: float | None = None
    files: int | None = None
    node_gpus: int | None = None
    node_cpus: int | None = None
    node_memory_gb: float | None = None
    plan_time_s: float | None = None  # a good time limit there
    plan_gpus: int | None = None  # how many one may hope for at a time
    free_cores_per_gpu: float | None = None  # cores that cost nothing beside a GPU


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line says."""

    time_s: int | None = None
    gpus_per_task: int | None = None
    gpus: int | None = None  # at a time
    margin: float | None = None
    cpus: int | None = None
    mem_gb: float | None = None

    def longest_s(self, caps: Caps) -> float:
        """Return the most time that a task may ask for."""
        return self.time_s or caps.plan_time_s or min(USUAL_TIME_S, caps.time_s or math.inf)

    def task_gpus(self, caps: Caps) -> int:
        """Return the GPUs of each task: all of a node, where the site says how many that are."""
        return self.gpus_per_task or min(caps.node_gpus or 1, self.gpus or caps.node_gpus or 1)


def check_wish(wish: Wish, caps: Caps) -> None:
    """Refuse what cannot be planned, before a long reading; all mistakes at once."""
    mistakes = list(_mistakes(wish, caps))
    if mistakes:
        what, fix = mistakes[0]
        raise BadInput(
            what if len(mistakes) == 1 else "this cannot be planned",
            why=None if len(mistakes) == 1 else "\n".join(text for text, _ in mistakes),
            fix=" ".join(fix for _, fix in mistakes) if len(mistakes) > 1 else fix,
        )


def _mistakes(wish: Wish, caps: Caps) -> Iterator[tuple[str, str]]:
    site, gpus = caps.site or "the site", wish.task_gpus(caps)
    if wish.time_s and caps.time_s and wish.time_s > caps.time_s:
        hours = f"{caps.time_s / 3600:g}"
        yield f"--time asks for {wish.time_s / 3600:g} h, but {site} allows {hours} h", f"--time {hours}:00:00"
    if wish.margin is not None and not 1 <= wish.margin < math.inf:
        yield f"--margin {wish.margin:g} must be a number from 1: how many times as slow a task may be", "--margin 1.5"
    for name, value in (("--gpus", wish.gpus), ("--gpus-per-task", wish.gpus_per_task), ("--cpus", wish.cpus)):
        if value is not None and value < 1:
            yield f"{name} {value} must be at least 1", f"{name} 1"
    if caps.node_gpus and gpus > caps.node_gpus:
        yield f"a task of {gpus} GPUs, but a node of {site} has {caps.node_gpus}", f"--gpus-per-task {caps.node_gpus}"
    if caps.node_cpus and (wish.cpus or 0) > caps.node_cpus:
        yield f"--cpus {wish.cpus}, but a node of {site} has {caps.node_cpus} cores", f"--cpus {caps.node_cpus}"
    if caps.node_memory_gb and (wish.mem_gb or 0) > caps.node_memory_gb:
        most = f"{caps.node_memory_gb:g}"
        yield f"--mem {wish.mem_gb:g}G, but a node of {site} has {most} GB", f"--mem {most}G"
    if wish.gpus and wish.gpus < gpus:
        yield f"--gpus {wish.gpus} at a time are fewer than the {gpus} of one task", f"--gpus-per-task {wish.gpus}"
    task_hours = gpus * wish.longest_s(caps) / 3600
    if caps.gpu_hours and task_hours > caps.gpu_hours:
        fitting_h = max(1, int(caps.gpu_hours / gpus))
        text = f"one task of {gpus} GPUs × {wish.longest_s(caps) / 3600:g} h is {task_hours:,.0f} GPU-hours"
        yield f"{text}, but {site} allows {caps.gpu_hours:,.0f} at a time", f"--time {fitting_h}:00:00"
