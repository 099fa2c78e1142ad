"""Results that later runs use: what earlier runs have learned, and what ``badcjobs probe`` has found.

Runs keep the best number of workers and the longest chunk in ``learned.json``. ``badcjobs probe`` keeps its trials and
results in ``probe.json``, so that the same command can continue an unfinished probe. Both files are in the run folder,
for later tasks of the run, and in the user's cache, for other runs. For a run they are hints: if a file is missing, old
or damaged, the run learns again.
"""

from __future__ import annotations

import json
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from badcjobs.errors import BadInput
from badcjobs.locks import kernel_lock
from badcjobs.masking import mask_words
from badcjobs.model import Probed, ProbeKey, ProbeResult, Trial, WorkerPlan, not_none
from badcjobs.paths import ANOTHER_CACHE, shell_line, user_cache
from badcjobs.seams import Engine
from badcjobs.settings import RunSettings
from badcjobs.small_files import parse_fields, parse_json, read_optional, read_small
from badcjobs.store.atomic_write import replace_text
from badcjobs.version import __version__
from badcjobs.workers.memory_limits import MemoryLimit, model_of

log = logging.getLogger(__name__)

STORE = "probe.json"
LESSONS = "learned.json"
_VERSION = 1  # of both files
_SAME_MEMORY = 0.02  # drivers reserve different amounts
_JUST_LONGER_S = 0.001  # audio that is longer than the safe length by this is too long
_MOST_WORKERS = 999  # per device


# --- learned by runs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lesson:
    """The facts about one engine on one device model; those about workers also depend on cores and chunk length."""

    workers: int | None = None  # per device; the best number found
    settled: bool = False  # the search was finished; False: there was no time or no memory to try more
    limit: MemoryLimit = field(default=MemoryLimit())
    worker_bytes: int | None = None  # main memory of one worker
    device_bytes: int | None = None  # memory of one worker on its device
    memory_bytes: int | None = None  # of the device
    rates: Mapping[str, float] = field(default_factory=dict)  # number of workers → × real time of one device
    chunk_s: float | None = None  # the chunks that these are about; None: not known


@dataclass(frozen=True)
class Learned:
    """The lessons about one engine and its options; the first file has priority, all files are written."""

    subject: str
    files: Sequence[Path]
    _refused: set[Path] = field(default_factory=set)  # files that cannot be written

    def about(self, model: str) -> Lesson:
        """Return the facts about a device model (and perhaps more), each from the first file that has it."""
        return self.every().get(model, Lesson())

    def every(self) -> dict[str, Lesson]:
        """Return all that is known about the engine, by what it is about: a device model, and perhaps more."""
        facts = defaultdict[str, dict[str, Any]](dict)
        for file in reversed(self.files):
            for model, facts_of_model in _read_lessons(file).get(self.subject, {}).items():
                facts[model] |= facts_of_model
        return {model: _lesson_of(facts[model]) for model in sorted(facts)}

    def note(self, model: str, **facts: Any) -> None:
        """Add facts to every file that can be written; a simultaneous write by another task may be lost."""
        for file in self.files:
            lessons = _read_lessons(file)
            lessons.setdefault(self.subject, {}).setdefault(model, {}).update(facts)
            text = json.dumps({"version": _VERSION, "lessons": lessons}, indent=1)
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                replace_text(file, f"{text}\n")
            except OSError as error:
                if file not in self._refused:
                    self._refused.add(file)
                    why = error.strerror or error
                    log.warning("what this run learns cannot be kept in %s: %s; %s", file, why, ANOTHER_CACHE)


def subject_of(settings: RunSettings) -> str:
    """Return the key of lessons: the engine with all options that affect its memory and time; secrets are hidden."""
    words = [settings.engine, settings.command, *settings.engine_args, settings.hawkears_root]
    if settings.mps == "off":
        words.append("--mps off")
    return " ".join(mask_words([word for word in words if word]))


def known_files(name: str, out: Path, environ: Mapping[str, str]) -> list[Path]:
    """Return the files with this name in the run folder and in the user's cache."""
    return [folder / name for folder in (out, user_cache(environ)) if folder is not None]


def _read_lessons(file: Path) -> dict[str, Any]:
    return read_optional(file, _lessons_of) or {}


def _lessons_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the facts by engine and by device model."""
    if document["version"] != _VERSION:
        return {}
    lessons: dict[str, Any] = document["lessons"]
    for models in lessons.values():
        for facts in models.values():
            _lesson_of(facts)
    return lessons


def _lesson_of(facts: Mapping[str, Any]) -> Lesson:
    """Return facts as a lesson; raise ValueError if one of them is impossible."""
    lesson = parse_fields(Lesson, {**facts, "limit": parse_fields(MemoryLimit, facts)})
    counts = not_none([lesson.workers, lesson.worker_bytes, lesson.device_bytes])
    if min(counts, default=1) < 1 or (lesson.workers or 1) > _MOST_WORKERS:
        raise ValueError("a number of workers or bytes is impossible")
    return lesson


# --- found by probes --------------------------------------------------------------------------------------------------


def find_limits(
    files: Iterable[Path],
    plans: Sequence[WorkerPlan],
    engine: Engine,
    settings: RunSettings,
) -> dict[str, MemoryLimit]:
    """Return the memory limit of each device model of these workers, from the results of probes.

    A file that cannot be read gives a warning; the run then learns the limits itself.
    """
    probes = list[Probed]()
    for file in files:
        try:
            probes += [probed for probed in read_probes(file) if probed.result is not None]
        except (ValueError, OSError) as error:
            log.warning("%s cannot be used: %s", file, error)
    mine = (engine.name, engine.version or "unknown", subject_of(settings))
    limits = {}
    for plan in plans:
        beside = sum(neighbour.device_id == plan.device_id for neighbour in plans)
        at_once = engine.chunks_at_once(plan) * beside
        fitting = [
            probed for probed in probes if _is_about(probed.key, plan, mine) and probed.key.chunks_at_once <= at_once
        ]
        # With more chunks at the same time less fits: use the probe with the most chunks, but not more than ours.
        closest = max(fitting, key=lambda probed: probed.key.chunks_at_once, default=None)
        if closest is not None and closest.result is not None:
            limits[closest.key.gpu] = _limit_of(closest.result)
    return limits


def _is_about(key: ProbeKey, plan: WorkerPlan, engine: tuple[str, str, str]) -> bool:
    """Return whether a probe was made with this engine on a device like that of a worker."""
    if plan.device is None or (key.engine, key.engine_version, key.settings, key.gpu) != (*engine, model_of(plan)):
        return False
    device_bytes = plan.device.memory_total_bytes
    if key.memory_bytes is None or device_bytes is None:
        return key.memory_bytes == device_bytes
    return abs(key.memory_bytes - device_bytes) <= _SAME_MEMORY * device_bytes


def _limit_of(result: ProbeResult) -> MemoryLimit:
    return MemoryLimit(
        _first_too_long(result.safe_s, result.too_long_s),
        _first_too_long(result.lean_safe_s, result.lean_too_long_s),
    )


def _first_too_long(safe_s: float | None, too_long_s: float | None) -> float | None:
    """Return the shortest length that is not safe; None: no length was too long."""
    if too_long_s is None or safe_s is None:
        return too_long_s
    return safe_s + _JUST_LONGER_S


def default_store(environ: Mapping[str, str]) -> Path | None:
    """Return the probe file in the user's cache; None: there is no home folder."""
    cache = user_cache(environ)
    return cache and cache / STORE


def describe_readers(store: Path, environ: Mapping[str, str]) -> str:
    """Describe which commands read the file that a probe has written."""
    cached = default_store(environ)
    if cached is not None and os.path.realpath(store) == os.path.realpath(cached):
        return "later runs read it"
    return f"runs with --out {shell_line(store.parent)} read it if its name is {STORE}"


def read_probes(file: Path) -> list[Probed]:
    """Return all entries of a file, empty without a file; raise ValueError if it is damaged, OSError if unreadable."""
    try:
        document = parse_json(read_small(file).decode())
    except FileNotFoundError:
        return []
    try:
        if document["version"] != _VERSION:
            raise ValueError(f"version is {document['version']!r}, expected {_VERSION}")
        return [_parse_probed(entry) for entry in document["probes"]]
    except (TypeError, KeyError) as error:
        raise ValueError(f"not as badcjobs probe writes it: {error}") from error


def _parse_probed(entry: Any) -> Probed:
    return Probed(
        parse_fields(ProbeKey, entry["key"]),
        tuple(parse_fields(Trial, trial) for trial in entry["trials"]),
        entry["result"] and parse_fields(ProbeResult, entry["result"]),
        entry["finished"] is True,
        entry["at"],
    )


def to_json(probes: Iterable[Probed]) -> str:
    """Return the text of a file; equal entries give equal text."""
    entries = [asdict(probed) for probed in sorted(probes, key=lambda probed: str(probed.key))]
    document = {"version": _VERSION, "written_by": f"badcjobs {__version__}", "probes": entries}
    return json.dumps(document, indent=1) + "\n"


@dataclass(frozen=True)
class ProbeStore:
    """The probe file; several probes may write it at the same time, each its own entries."""

    file: Path

    def open(self) -> None:
        """Make sure that the file can be read and written.

        A new file is created with its first entry: a probe without a result leaves no file.
        Raise BadInput if the file is damaged or not from a probe, OSError if it cannot be written.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with kernel_lock(self._lock_file):
            try:
                self._write(self._entries())
            except ValueError as error:
                raise BadInput(
                    f"{self.file} is damaged, or not from badcjobs probe",
                    why=str(error),
                    fix=f"mv {shell_line(self.file)} {shell_line(self.file)}.damaged",
                ) from error

    def find(self, key: ProbeKey) -> Probed:
        """Return the entry with this key, or an empty one."""
        return self._entries().get(key, Probed(key))

    def put(self, new: Probed) -> None:
        """Replace the entry with the same key; an entry without trials is removed."""
        with kernel_lock(self._lock_file):
            entries = self._entries()
            entries.pop(new.key, None)
            if new.trials:
                entries[new.key] = new
            self._write(entries)

    def _entries(self) -> dict[ProbeKey, Probed]:
        return {probed.key: probed for probed in read_probes(self.file)}

    def _write(self, entries: Mapping[ProbeKey, Probed]) -> None:
        if entries or self.file.exists():
            replace_text(self.file, to_json(entries.values()))

    @property
    def _lock_file(self) -> Path:
        """The file that is locked for one probe at a time: hidden, and it stays, as the probe file is replaced."""
        return self.file.with_name(f".{self.file.name}.lock")
