"""What probes have found, as a run needs it: from which length on audio is too long for its devices."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from badcjobs.config import RunSettings
from badcjobs.learned import subject_of
from badcjobs.model import Probed, ProbeKey, ProbeResult, WorkerPlan
from badcjobs.probed import Damaged, read_probes
from badcjobs.seams import Engine
from badcjobs.workers.identity import lanes_of, version_of
from badcjobs.workers.memory_limits import MemoryLimit
from badcjobs.workers.piecewise_session import model_of

log = logging.getLogger(__name__)

_SAME_MEMORY = 0.02  # drivers keep more or less of it for themselves
_JUST_LONGER_S = 0.001  # than what is safe, is too long


def find_limits(
    files: Iterable[Path], plans: Sequence[WorkerPlan], engine: Engine, settings: RunSettings
) -> dict[str, MemoryLimit]:
    """Return from which length on audio is too long for each model of device of these workers, as probes have found.

    A file that cannot be read only means that a run learns by itself.
    """
    probes = [probed for file in files for probed in _read_gently(file)]
    limits: dict[str, MemoryLimit] = {}
    for plan in plans:
        beside = sum(other.device_id == plan.device_id for other in plans)
        at_once = lanes_of(engine.name, settings.engine_args, plan) * beside
        fitting = [
            probed
            for probed in probes
            if _is_by(probed.key, engine, settings)
            and _is_for(probed.key, plan)
            and probed.key.chunks_at_once <= at_once  # with more of them at once still less fits
        ]
        if fitting:
            closest = max(fitting, key=lambda probed: probed.key.chunks_at_once)
            limits[model_of(plan)] = _limit(closest.result)
    return {model: limit for model, limit in limits.items() if limit != MemoryLimit()}


def _read_gently(file: Path) -> list[Probed]:
    try:
        return [probed for probed in read_probes(file) if probed.result is not None]
    except (Damaged, OSError) as error:
        log.warning("%s cannot be used: %s", file, error)
        return []


def _is_by(key: ProbeKey, engine: Engine, settings: RunSettings) -> bool:
    mine = (engine.name, version_of(engine), subject_of(settings))
    return (key.engine, key.engine_version, key.settings) == mine


def _is_for(key: ProbeKey, plan: WorkerPlan) -> bool:
    memory_bytes = None if plan.device is None else plan.device.memory_total_bytes
    if key.gpu != model_of(plan) or plan.device is None:
        return False
    return is_same_memory(key.memory_bytes, memory_bytes)


def is_same_memory(one_bytes: int | None, other_bytes: int | None) -> bool:
    """Say whether two devices of one model have the same memory."""
    if one_bytes is None or other_bytes is None:
        return one_bytes == other_bytes
    return abs(one_bytes - other_bytes) <= _SAME_MEMORY * other_bytes


def _limit(result: ProbeResult | None) -> MemoryLimit:
    if result is None:
        return MemoryLimit()
    return MemoryLimit(
        _first_too_long(result.safe_s, result.too_long_s), _first_too_long(result.lean_safe_s, result.lean_too_long_s)
    )


def _first_too_long(safe_s: float | None, too_long_s: float | None) -> float | None:
    """Return the shortest that is not safe; None: nothing was too long."""
    if too_long_s is None:
        return None
    return too_long_s if safe_s is None else safe_s + _JUST_LONGER_S
