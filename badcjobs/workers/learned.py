"""Results that later runs use: what earlier runs have learned, and what ``badcjobs probe`` has found.

Runs keep the best number of workers and the longest chunk in ``learned.json``. ``badcjobs probe`` keeps its trials and
results in ``probe.toml``, so that the same command can continue an unfinished probe. Both files are in the run folder,
for later tasks of the run, and in the user's cache, for other runs. For a run they are hints: if a file is missing, old
or damaged, the run learns again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from badcjobs import __version__
from badcjobs.errors import BadInput
from badcjobs.masking import mask_words
from badcjobs.model import Probed, ProbeKey, ProbeResult, Trial, WorkerPlan
from badcjobs.paths import ANOTHER_CACHE, shell_line, user_cache
from badcjobs.seams import Engine
from badcjobs.settings import RunSettings, parse_toml
from badcjobs.settings import to_toml as in_toml
from badcjobs.small_files import open_regular, parse_fields, read_optional, read_small
from badcjobs.store.atomic_write import replace_text
from badcjobs.store.merge import damaged_name
from badcjobs.workers.engines import chunks_at_once_of
from badcjobs.workers.memory_limits import MemoryLimit, model_of

log = logging.getLogger(__name__)

STORE = "probe.toml"
LESSONS = "learned.json"
_VERSION = 1  # of both files
_HEAD = """\
# The longest chunks that fit: found by badcjobs probe, used by later runs (badcjobs guide plan).
# One table per device model, engine and settings; delete a table, or the file, to probe again.
"""
_SAME_MEMORY = 0.02  # drivers reserve different amounts
_JUST_LONGER_S = 0.001  # audio that is longer than the safe length by this is too long
_MOST_WORKERS = 999  # per device


# --- learned by runs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
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
    _refused: set[Path] = field(default_factory=set, compare=False)  # files that cannot be written

    def about(self, model: str) -> Lesson:
        """Return the facts about a device model (and perhaps more), each from the first file that has it."""
        facts: dict[str, Any] = {}
        for file in self.files:
            facts = {**_read_lessons(file).get(self.subject, {}).get(model, {}), **facts}
        return _lesson_of(facts)

    def every(self) -> dict[str, Lesson]:
        """Return all that is known about the engine, by what it is about: a device model, and perhaps more."""
        found = [about for file in self.files for about in _read_lessons(file).get(self.subject, ())]
        return {about: self.about(about) for about in found}

    def note(self, model: str, **facts: Any) -> None:
        """Add facts to every file that can be written; a simultaneous write by another task may be lost."""
        for file in self.files:
            lessons = _read_lessons(file)
            try:
                lessons.setdefault(self.subject, {}).setdefault(model, {}).update(facts)
                file.parent.mkdir(parents=True, exist_ok=True)
                replace_text(file, json.dumps({"version": _VERSION, "lessons": lessons}, indent=1) + "\n")
            except OSError as error:
                if file not in self._refused:
                    self._refused.add(file)
                    why = error.strerror or error
                    log.warning("what this run learns cannot be kept in %s: %s; %s", file, why, ANOTHER_CACHE)
            except AttributeError as error:
                log.debug("cannot write %s: %s", file, error)


def subject_of(settings: RunSettings) -> str:
    """Return the key of lessons: the engine with all options that affect its memory and time; secrets are hidden."""
    words = [settings.engine, settings.command, *settings.engine_args, settings.hawkears_root]
    words += ["--mps off"] if settings.mps == "off" else []
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
    counts = [count for count in (lesson.workers, lesson.worker_bytes, lesson.device_bytes) if count is not None]
    if min(counts, default=1) < 1 or (lesson.workers or 1) > _MOST_WORKERS:
        raise ValueError("a number of workers or bytes is impossible")
    return lesson


# --- found by probes --------------------------------------------------------------------------------------------------


def find_limits(
    files: Iterable[Path], plans: Sequence[WorkerPlan], engine: Engine, settings: RunSettings
) -> dict[str, MemoryLimit]:
    """Return the memory limit of each device model of these workers, from the results of probes.

    A file that cannot be read gives a warning; the run then learns the limits itself.
    """
    probes: list[Probed] = []
    for file in files:
        try:
            probes += read_probes(file)
        except (ValueError, OSError) as error:
            log.warning("%s cannot be used: %s", file, error)
    mine = (engine.name, engine.version or "unknown", subject_of(settings))
    limits: dict[str, MemoryLimit] = {}
    for plan in plans:
        beside = sum(other.device_id == plan.device_id for other in plans)
        at_once = chunks_at_once_of(engine.name, settings.engine_args, plan) * beside
        closest = 0
        for key, result in ((probed.key, probed.result) for probed in probes):
            is_mine = (key.engine, key.engine_version, key.settings, key.gpu) == (*mine, model_of(plan))
            same = plan.device is not None and is_same_memory(key.memory_bytes, plan.device.memory_total_bytes)
            # With more chunks at the same time less fits: use the probe with the most chunks, but not more than ours.
            if result is not None and is_mine and same and closest < key.chunks_at_once <= at_once:
                closest = key.chunks_at_once
                crowded_s = _first_too_long(result.safe_s, result.too_long_s)
                limits[key.gpu] = MemoryLimit(crowded_s, _first_too_long(result.lean_safe_s, result.lean_too_long_s))
    return {model: limit for model, limit in limits.items() if limit != MemoryLimit()}


def is_same_memory(one_bytes: int | None, other_bytes: int | None) -> bool:
    """Return whether two devices of the same model have the same memory."""
    if one_bytes is None or other_bytes is None:
        return one_bytes == other_bytes
    return abs(one_bytes - other_bytes) <= _SAME_MEMORY * other_bytes


def _first_too_long(safe_s: float | None, too_long_s: float | None) -> float | None:
    """Return the shortest length that is not safe; None: no length was too long."""
    return too_long_s if too_long_s is None or safe_s is None else safe_s + _JUST_LONGER_S


def default_store(environ: Mapping[str, str]) -> Path | None:
    """Return the probe file in the user's cache; None: there is no home folder."""
    cache = user_cache(environ)
    return cache and cache / STORE


def describe_readers(store: Path, environ: Mapping[str, str]) -> str:
    """Describe which commands read the file that a probe has written."""
    cached = default_store(environ)
    if cached is not None and os.path.realpath(store) == os.path.realpath(cached):
        return "later runs read it"
    if store.name == STORE:
        return f"runs with --out {shell_line(store.parent)} read it"
    return f"badcjobs plan --from FILE reads it; a run reads OUT/{STORE}, not this file"


def read_probes(file: Path) -> list[Probed]:
    """Return all entries of a file, empty without a file; raise ValueError if it is damaged, OSError if unreadable."""
    try:
        return parse_probes(read_small(file).decode())
    except FileNotFoundError:
        return []


def parse_probes(text: str) -> list[Probed]:
    """Parse the text of a file; raise ValueError if it is not as a probe writes it."""
    document = parse_toml(text)
    if document.get("version") != _VERSION:
        raise ValueError(f"version is {document.get('version')!r}, expected {_VERSION}")
    try:
        return [
            Probed(
                parse_fields(ProbeKey, table),
                tuple(parse_fields(Trial, trial) for trial in table.get("trial", [])),
                parse_fields(ProbeResult, table["result"]) if "result" in table else None,
                table.get("finished") is True,
                table.get("at"),
            )
            for table in document.get("gpu", [])
        ]
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


def to_toml(probes: Iterable[Probed]) -> str:
    """Return the text of a file; equal entries give equal text."""
    lines = [_HEAD, *_pairs({"version": _VERSION, "written_by": f"badcjobs {__version__}"})]
    for probed in sorted(probes, key=lambda one: tuple(map(str, asdict(one.key).values()))):
        lines += ["", "[[gpu]]", *_pairs({**asdict(probed.key), "finished": probed.finished, "at": probed.at})]
        if probed.result is not None:
            lines += ["", "[gpu.result]", *_pairs(asdict(probed.result))]
        for trial in sorted(probed.trials, key=lambda one: (one.lean, one.length_s)):
            lines += ["", "[[gpu.trial]]", *_pairs(asdict(trial))]
    return "\n".join(lines) + "\n"


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {in_toml(value)}" for key, value in values.items() if value is not None]


@dataclass(frozen=True)
class ProbeStore:
    """The probe file; several probes may write it at the same time, each its own entries."""

    file: Path

    def open(self) -> Path | None:
        """Make sure that the file can be read and written; return the new name of a damaged file, or None.

        A new file is created with its first entry: a probe without a result leaves no file.
        Raise BadInput if the file is not from a probe, OSError if it cannot be written.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            try:
                self._write(read_probes(self.file))
                return None
            except ValueError as error:
                begin = read_small(self.file)[: len(_HEAD)]
                if self.file.name != STORE and begin and not begin.startswith(_HEAD[:30].encode()):
                    raise BadInput(
                        f"--out {self.file} is not a probe file",
                        why=f"the file exists, and badcjobs probe did not write it ({error})",
                        fix=f"the same command with --out {STORE}",
                    ) from error
                aside = damaged_name(self.file)
                log.warning("%s is damaged (%s); renamed to %s", self.file, error, aside.name)
                self.file.rename(aside)
                replace_text(self.file, to_toml([]))
                return aside

    def find(self, key: ProbeKey) -> Probed:
        """Return the entry with this key, or an empty one."""
        return next((one for one in read_probes(self.file) if one.key == key), Probed(key))

    def put(self, new: Probed) -> None:
        """Replace the entry with the same key; an entry without trials is removed.

        If another probe has finished this key in the meantime, an unfinished entry does not replace it.
        """
        with self._locked():
            known = read_probes(self.file)
            for there in known:
                # An entry whose trials are a subset of the new ones is an earlier state of this probe.
                others_work = there.key == new.key and there.finished and not set(there.trials) <= set(new.trials)
                if others_work and new.trials and not new.finished:
                    return
            others = [one for one in known if one.key != new.key]
            self._write([*others, *([new] if new.trials else [])])

    def _write(self, probes: Sequence[Probed]) -> None:
        if probes or self.file.exists():
            replace_text(self.file, to_toml(probes))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file for one probe at a time; without effect on a filesystem that has no locks.

        The lock is a hidden file that stays: the probe file itself is replaced, and NFS does not lock folders.
        """
        path = self.file.with_name(f".{self.file.name}.lock")
        with os.fdopen(open_regular(path, os.O_RDWR | os.O_CREAT)) as lock:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
