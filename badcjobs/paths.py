"""Paths: the run folder, the folder of one task's live files, small files, the files of this installation."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from badcjobs.errors import BadInput, NotHere
from badcjobs.masking import mask_words, write_new_text
from badcjobs.model import TaskKey

log = logging.getLogger(__name__)

LIVE_PREFIX = ".live-"  # hidden folders of live files; only their owners may open these


def is_there(path: Path) -> bool:
    """Return whether a path exists; raise BadInput if a parent folder cannot be read."""
    try:
        return path.exists()
    except OSError as error:
        line = shlex.join(["ls", "-ld", str(path.absolute().parent)])
        raise BadInput(f"{path} cannot be read", why=error.strerror, fix=line) from error


def shell_line(*words: str | Path) -> str:
    """Return a command to paste into a shell, whatever is in its words; secrets are hidden.

    A Path is never read as an option.
    """
    given = mask_words(
        [f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word) for word in words]
    )
    escaped = [
        os.fsencode(word).decode("latin-1").encode("unicode_escape").decode().replace("'", "\\'") for word in given
    ]
    both = zip(given, escaped, strict=True)
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{odd}'" for word, odd in both)


class RunFolder:
    """The folder given as --out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_toml = path / "run.toml"
        self.tasks = path / "tasks"
        self.waiting = self.tasks / ".waiting"  # why tasks wait for devices, for ``monitor``
        self.raw = path / "raw"  # output files of the engine, with --keep-raw
        self.job_database = path / "job.sqlite"
        self.report = path / "report.html"

    def task_database(self, key: TaskKey) -> Path:
        """Return the published database of a task."""
        return self.tasks / f"{key.name}.sqlite"

    def task_log(self, key: TaskKey) -> Path:
        """Return the log of a task."""
        return self.tasks / f"{key.name}.log"

    def create(self) -> None:
        """Create the folder; raise BadInput if that is not possible."""
        try:
            self.tasks.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            elsewhere = "use a folder that compute nodes can write to, on Sockeye: --out /scratch/<alloc>/…"
            raise self.unusable(error, elsewhere) from error

    def unusable(self, error: OSError, fix: str | None = None) -> BadInput:
        """Return the error for a folder in which files cannot be created."""
        fix = fix or f"{shlex.join(['ls', '-ld', str(self.tasks)])}   (or another --out)"
        return BadInput(f"--out {self.path} cannot be used", why=f"{error.strerror}: {error.filename}", fix=fix)

    def claim(self, key: TaskKey) -> TaskKey:
        """Claim a name that is not used yet: a second run inside the same job counts as a restart."""
        candidate = key
        while True:
            try:
                if candidate is key:
                    os.scandir(self.tasks).close()  # without read permission, work already done would be done again
                if not self.task_database(candidate).exists():
                    self.task_log(candidate).open("x").close()
                    return candidate
            except FileExistsError:
                pass
            except OSError as error:
                raise self.unusable(error) from error
            candidate = replace(candidate, restart=candidate.restart + 1)

    def give_back(self, key: TaskKey) -> None:
        """Undo ``claim`` and ``create`` for a task that could not start."""
        if self.task_database(key).exists():
            return
        self.task_log(key).unlink(missing_ok=True)
        self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        with suppress(OSError):  # not empty: other tasks use it
            self.tasks.rmdir()
            self.path.rmdir()

    def tell_waiting(self, why: str) -> None:
        """Write that tasks wait for devices, even before the first one has started."""
        with suppress(OSError):
            self.tasks.mkdir(parents=True, exist_ok=True)
            self.waiting.unlink(missing_ok=True)  # it may be a link, to any file
            write_new_text(self.waiting, why)

    def stop_waiting(self) -> None:
        """Undo ``tell_waiting``."""
        with suppress(OSError):  # there was no need to wait
            self.waiting.unlink()
            self._remove_if_empty()

    def earlier_databases(self, key: TaskKey, merged: set[str]) -> list[Path]:
        """Return the task databases that may contain work already done.

        Databases that are merged into job.sqlite are left out, and those of other indices of our array: their shards
        are disjoint from ours. The folder is listed once, for an array of any size.
        """
        found = []
        for path in sorted(self.tasks.glob("*.sqlite")):
            other = TaskKey.parse(path.stem)
            sibling = other is not None and other.is_sibling_of(key)
            if not path.name.startswith(".") and path.name not in merged and not sibling and path.is_file():
                found.append(path)
        return found


class LocalFolder:
    """The folder of one task, on the node if possible: its live databases, and scratch space for its workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wrapper_file = path / "wrapper.sqlite"
        self.recorder_file = path / "recorder.sqlite"
        self.recorder_snapshot = path / "recorder.snapshot.sqlite"
        self.owner_file = path / "owner.json"
        self.latest_file = path / "latest.json"  # the last reading of each device
        self.watched_file = path / "watched"  # touched by each reader of that file
        self.scratch = path / "scratch"
        self.mps = path / "mps"  # a link to the folder of the MPS daemons, whose path must be short

    @classmethod
    def create(cls, parent: Path, prefix: str) -> LocalFolder:
        """Create a new folder in ``parent``."""
        try:
            return cls(Path(tempfile.mkdtemp(prefix=prefix, dir=parent)))
        except OSError as error:
            raise BadInput(
                f"no folder can be created in {parent}",
                why=error.strerror,
                fix="export TMPDIR=/a/local/folder   (in the job script, before badcjobs)",
            ) from error

    def remove(self) -> None:
        """Remove the folder and everything in it; if we are killed meanwhile, the next task removes the rest.

        It finds the owner file, which is removed last, and nothing to publish without the wrapper's file.
        """
        shutil.rmtree(self.mps.resolve(), ignore_errors=True)
        for path in sorted(self.path.glob("*"), key=lambda path: path != self.wrapper_file):
            if path != self.owner_file:
                shutil.rmtree(path, ignore_errors=True)
                with suppress(OSError):  # it was a folder
                    path.unlink()
        if not {*self.path.glob("*")} - {self.owner_file}:
            shutil.rmtree(self.path, ignore_errors=True)


# --- has a file changed? ----------------------------------------------------------------------------------------------

FileVersion = tuple[int, int, int]


def version_of(status: os.stat_result) -> FileVersion:
    """Return a value that changes when a file is replaced."""
    return status.st_mtime_ns, status.st_size, status.st_ino


def file_version(path: Path) -> FileVersion | None:
    """Return the version of a file; None: it does not exist."""
    try:
        return version_of(path.stat())
    except OSError:
        return None


# --- small files: anyone who may write in a run folder can put anything in their place --------------------------------

_MOST_BYTES = 16 << 20
_DEEPEST = 20
_MOST_KEYS = 500
Noun = TypeVar("Noun")


class DamagedFile(ValueError):
    """The content of a small file is not as badcjobs writes it."""


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file without waiting; raise OSError for a pipe, a folder or a device."""
    file = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_small(path: Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """Read a small file; raise OSError for anything else."""
    return read_with_status(path, most_bytes)[0]


def read_with_status(path: Path, most_bytes: int) -> tuple[bytes, os.stat_result]:
    """Read a small file, and the status of the very file that was read."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(most_bytes + 1)
        status = os.fstat(file.fileno())
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes:,} bytes", str(path))
    return content, status


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise DamagedFile for anything else, for deep nesting and for impossible values."""
    try:
        document = json.loads(text)
        check_document(document)
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode(errors="surrogateescape")
    except (ValueError, RecursionError, MemoryError) as error:
        raise DamagedFile(str(error) or "too large") from error
    return document


def check_document(document: Any) -> None:
    """Raise ValueError for deep nesting, large tables, numbers of more than 64 bits, and NUL characters."""
    level = [document]
    for _ in range(_DEEPEST):
        if any(map(_is_impossible, level)):
            raise ValueError("a number or a table is too large, or a text has a NUL character")
        tables = [child for table in level if isinstance(table, dict) for child in table.values()]
        level = tables + [child for items in level if isinstance(items, list) for child in items]
    if level:
        raise ValueError("nested too deeply")


def _is_impossible(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) > _MOST_KEYS
    if isinstance(value, str):
        return "\0" in value
    return isinstance(value, int) and abs(value) >= 1 << 63


def read_optional(path: Path, parse: Callable[[Any], Noun]) -> Noun | None:
    """Return what a JSON file holds; None: there is none, it is empty, or it is damaged, which is logged."""
    try:
        content = read_small(path)
        return parse(parse_json(content)) if content.strip() else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        set_aside(path, str(error))
        return None


@lru_cache(100)
def set_aside(path: Path, why: str) -> None:
    """Log, once, that a file is ignored."""
    log.warning("%s is ignored: %s", path, why)


def parse_fields(noun: type[Noun], table: Any) -> Noun:
    """Make a dataclass of a table, field by field; raise DamagedFile for a value of the wrong type."""
    if not isinstance(table, dict):
        raise DamagedFile(f"{str(table)[:40]} is not a table")
    values: dict[str, Any] = {}
    for field in fields(noun):  # type: ignore[arg-type]
        if field.name not in table and (field.default is not MISSING or field.default_factory is not MISSING):
            continue
        value = table.get(field.name)
        kinds = str(field.type).split(" | ")
        if not any(_fits(kind, value) for kind in kinds):
            raise DamagedFile(f"{field.name} = {repr(value)[:40]} is not {' or '.join(kinds)}")
        if isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, int) and "float" in kinds:
            value = float(value)
        values[field.name] = value
    return noun(**values)


def _fits(kind: str, value: Any) -> bool:
    """Return whether a value from a file has the type that the annotation of a field names."""
    base, _, items = kind.removesuffix("]").partition("[")
    if base == "float":
        return type(value) in (int, float) and math.isfinite(value)
    if base == "tuple":
        return type(value) is list and all(_fits(items.removesuffix(", ..."), item) for item in value)
    if base == "Mapping":
        return type(value) is dict and all(_fits(items.removeprefix("str, "), item) for item in value.values())
    return type(value).__name__.removesuffix("Type") == base


# --- resources --------------------------------------------------------------------------------------------------------

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """Return the folder ``templates``, ``slurm`` or ``guide``.

    A wheel has the first two inside the package; a repository has them next to it, where users look for them.
    """
    for candidate in (_PACKAGE / "_shipped" / name, _PACKAGE / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise NotHere(
        f"the folder {name}/ is missing from this installation",
        why=f"it is neither in {_PACKAGE} nor next to it",
        fix="pip install --force-reinstall badcjobs",
    )


ANOTHER_CACHE = "try: export XDG_CACHE_HOME=/a/folder/that/jobs/can/write"


def user_cache(environ: Mapping[str, str]) -> Path | None:
    """Return our folder in the user's cache; None: no home folder is known."""
    home = environ.get("XDG_CACHE_HOME") or (environ.get("HOME") and f"{environ['HOME']}/.cache")
    return Path(home) / "badcjobs" if home else None
