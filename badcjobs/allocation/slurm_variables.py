"""Reads Slurm's variables into an Allocation; outside Slurm makes one up that looks the same.

Which devices they grant is decided next door, in visible_devices.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from badcjobs.errors import BadInput
from badcjobs.model import Allocation

_TELLING = (
    "SLURM_",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
)


def parse_allocation(environ: Mapping[str, str], *, hostname: str, pid: int, started_at_ms: int) -> Allocation:
    """Return what this process was given, from the variables of its environment."""
    facts = {name: value for name, value in sorted(environ.items()) if name.startswith(_TELLING)}
    local_dir = environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or None
    # Slurm may reuse the array's number as the job id of one of its tasks: the array's own comes first.
    job_id = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID")
    if not job_id:
        return Allocation(
            in_slurm=False,
            job_id=f"local{started_at_ms}-{pid}",
            node=hostname,
            local_dir=local_dir,
            facts=facts,
            started_at_ms=started_at_ms,
        )
    return Allocation(
        in_slurm=True,
        job_id=job_id,
        node=environ.get("SLURMD_NODENAME") or hostname,
        restart=_number(environ, "SLURM_RESTART_COUNT") or 0,
        array_index=_number(environ, "SLURM_ARRAY_TASK_ID"),
        array_indices=_array_indices(environ),
        # Set only inside steps; SLURM_NTASKS is also there in the batch script, where we are alone.
        step_tasks=_number(environ, "SLURM_STEP_NUM_TASKS") or 1,
        procid=_number(environ, "SLURM_PROCID") or 0,
        cpus=_number(environ, "SLURM_CPUS_PER_TASK") or _number(environ, "SLURM_CPUS_ON_NODE"),
        local_dir=local_dir,
        facts=facts,
        started_at_ms=started_at_ms,
    )


def _array_indices(environ: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    index = _number(environ, "SLURM_ARRAY_TASK_ID")
    if index is None:
        return None
    first = _number(environ, "SLURM_ARRAY_TASK_MIN")
    last = _number(environ, "SLURM_ARRAY_TASK_MAX")
    count = _number(environ, "SLURM_ARRAY_TASK_COUNT")
    if first is None or last is None or count is None:
        return None
    return first, last, _number(environ, "SLURM_ARRAY_TASK_STEP") or 1, count


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise BadInput(f"{name}={text} is not a whole number", why="Slurm always sets a number here") from error
