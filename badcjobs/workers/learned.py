"""What is known before a run begins: what earlier runs have learned, and what probes have found.

One run keeps for the next how many workers pay and how long a chunk may be, in a small file of JSON. It lies in the run
folder, where the later tasks of the run find it, and in the user's cache for other runs. Both are hints: a file that is
missing, old or broken only means that something is learned again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from badcjobs.model import Probed, ProbeKey, ProbeResult, WorkerPlan
from badcjobs.paths import user_cache
from badcjobs.seams import Engine
from badcjobs.settings import RunSettings
from badcjobs.workers.engines import lanes_of, version_of
from badcjobs.workers.memory_limits import MemoryLimit, model_of
from badcjobs.workers.probe_results import Damaged, read_probes

log = logging.getLogger(__name__)

_VERSION = 1
_SAME_MEMORY = 0.02  # drivers keep more or less of it for themselves
_JUST_LONGER_S = 0.001  # than what is safe, is too long


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is known about one engine on one model of device."""

    workers: int | None = None  # per device; the best that was found
    cores: int | None = None  # per device, where that was found
    settled: bool = False  # it was the best; else there was no time to try more
    limit: MemoryLimit = field(default=MemoryLimit())
    worker_bytes: int | None = None  # of main memory, for each worker

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Lesson:
        """Read what a file says; what makes no sense is not known."""

        def known(name: str, *kinds: type) -> Any:
            value: Any = values.get(name)
            return value if type(value) in kinds and value > 0 else None

        limit = MemoryLimit(known("crowded_s", int, float), known("alone_s", int, float))
        settled = values.get("settled") is True
        return cls(known("workers", int), known("cores", int), settled, limit, known("worker_bytes", int))


class Learned:
    """The lessons about one engine and its options; files nearer to the run come first, all of them are written."""

    def __init__(self, subject: str, files: Iterable[Path]) -> None:
        self._subject = subject
        self._files = list(files)

    def about(self, model: str) -> Lesson:
        """Return what is known about a model of device, each fact from the first file that has it."""
        facts: dict[str, Any] = {}
        for file in self._files:
            entry = _read(file).get(self._subject, {})
            known = entry.get(model, {}) if isinstance(entry, dict) else {}
            facts = {**(known if isinstance(known, dict) else {}), **facts}
        return Lesson.parse(facts)

    def note(self, model: str, **facts: float | None) -> None:
        """Add facts to every file that can be written; who writes at the same moment may win, and that is no harm."""
        for file in self._files:
            try:
                _change(file, lambda lessons: lessons.setdefault(self._subject, {}).setdefault(model, {}).update(facts))
            except (OSError, AttributeError) as error:
                log.debug("what was learned is not kept in %s: %s", file, error)


def subject_of(settings: RunSettings) -> str:
    """Return what lessons are about: the engine with all that decides how much memory and time it takes."""
    words = [settings.engine, settings.command, *settings.engine_args, settings.hawkears_root]
    return " ".join(word for word in words if word)


def learned_files(out: Path, environ: Mapping[str, str]) -> list[Path]:
    """Return where lessons are kept: in the run folder, then in the user's cache."""
    folders = [out, user_cache(environ)]
    return [folder / "learned.json" for folder in folders if folder is not None]


def _read(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        lessons = document["lessons"] if document["version"] == _VERSION else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return lessons if isinstance(lessons, dict) else {}


def _change(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    lessons = _read(file)
    change(lessons)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps({"version": _VERSION, "lessons": lessons}, indent=1) + "\n", encoding="utf-8")
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


# --- what probes have found -------------------------------------------------------------------------------------------


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
    device = plan.device
    same = device is not None and is_same_memory(key.memory_bytes, device.memory_total_bytes)
    return same and key.gpu == model_of(plan)


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
