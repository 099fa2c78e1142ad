"""What one run has learned for the next: how many workers pay, how long a chunk may be. One small file of JSON.

It lies in the run folder, where the later tasks of the run find it, and in the user's cache for other runs. Both are
hints: a file that is missing, old or broken only means that something is learned again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from badcjobs.config import RunSettings

log = logging.getLogger(__name__)

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is known about one engine on one model of device."""

    workers: int | None = None  # per device; the best that was found
    cores: int | None = None  # per device, where that was found
    settled: bool = False  # it was the best; else there was no time to try more
    crowded_s: float | None = None  # seconds of audio that ran out of memory with the usual threads
    alone_s: float | None = None  # and even with one thread, and nothing beside it
    worker_bytes: int | None = None  # of main memory, for each worker

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Lesson:
        """Read what a file says; what makes no sense is not known."""

        def known(name: str, *kinds: type) -> Any:
            value: Any = values.get(name)
            return value if type(value) in kinds and value > 0 else None

        return cls(
            known("workers", int),
            known("cores", int),
            values.get("settled") is True,
            known("crowded_s", int, float),
            known("alone_s", int, float),
            known("worker_bytes", int),
        )


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
    home = environ.get("XDG_CACHE_HOME") or (environ.get("HOME") and f"{environ['HOME']}/.cache")
    return [out / "learned.json", *([Path(home) / "badcjobs" / "learned.json"] if home else [])]


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
