"""Which memory and cores a task asks for: from what was measured, else what ``badcjobs submit`` asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from badcjobs.plan.speed import Speed
from badcjobs.plan.wish import Caps, Wish

USUAL_CPUS_PER_GPU, USUAL_MEM_GB_PER_GPU = 2, 4  # of badcjobs submit
_MEMORY_MARGIN, _CPU_MARGIN = 1.2, 1.3  # as the report asks for next time
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Asking:
    """What one task asks Slurm for, besides its GPUs and its time, and why."""

    cpus: int
    cpus_why: str
    mem_gb: int
    mem_why: str


def ask_for(gpus: int, speed: Speed, wish: Wish, caps: Caps) -> Asking:
    """Return cores and memory for a task of so many GPUs, never more than a node has."""
    cpus, cpus_why = _cpus(gpus, speed, wish, caps)
    mem_gb, mem_why = _memory(gpus, speed, wish)
    if caps.node_cpus and cpus > caps.node_cpus:
        cpus, cpus_why = caps.node_cpus, f"all of a node ({cpus} would be asked for: {cpus_why})"
    if caps.node_memory_gb and mem_gb > caps.node_memory_gb:
        mem_why = f"all of a node ({mem_gb} GB would be asked for: {mem_why})"
        mem_gb = int(caps.node_memory_gb)
    return Asking(cpus, cpus_why, mem_gb, mem_why)


def _cpus(gpus: int, speed: Speed, wish: Wish, caps: Caps) -> tuple[int, str]:
    if wish.cpus is not None:
        return wish.cpus, "as --cpus says"
    cpus, why = USUAL_CPUS_PER_GPU * gpus, f"{USUAL_CPUS_PER_GPU} per GPU, as submit asks for: nothing is measured"
    if speed.cores_per_gpu is not None:
        cpus = math.ceil(_CPU_MARGIN * speed.cores_per_gpu * gpus) + 1
        why = f"measured: {speed.cores_per_gpu:.1f} busy per GPU at most, a third more and one for the wrapper"
    free = int((caps.free_cores_per_gpu or 0.0) * gpus)
    if free > cpus:
        return free, f"they cost no more than the GPUs do at {caps.site}; needed are {cpus} ({why})"
    return cpus, why


def _memory(gpus: int, speed: Speed, wish: Wish) -> tuple[int, str]:
    if wish.mem_gb is not None:
        return math.ceil(wish.mem_gb), "as --mem says"
    if speed.memory_bytes_per_gpu is None:
        said = f"{USUAL_MEM_GB_PER_GPU} GB per GPU, as submit asks for: nothing is measured"
        return USUAL_MEM_GB_PER_GPU * gpus, said
    peak = speed.memory_bytes_per_gpu
    wanted = math.ceil((_MEMORY_MARGIN * peak * gpus + _GIB) / _GIB)
    return wanted, f"measured: {peak / _GIB:.1f} GiB per GPU at most, a fifth more and 1 GiB"
