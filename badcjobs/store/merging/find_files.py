"""Finds the task databases that merge is given: files as they are, folders with all that lies below them."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import DatabaseProblem

LEFTOVERS = ("-wal", "-journal")


@dataclass(frozen=True, slots=True, order=True)
class FoundFile:
    """A file that may be a task database."""

    path: Path
    given: bool = False  # named by itself, not found in a folder
    has_leftovers: bool = False  # a WAL or a journal lies beside it
    closed: str | None = None  # it is a folder that nobody here may look into, and why


def check_inputs(inputs: Iterable[Path]) -> None:
    """Refuse places that do not exist, all at once."""
    missing = [str(place) for place in inputs if not _is_there(place)]
    if missing:
        words = "does not exist" if len(missing) == 1 else "do not exist"
        above = next(folder for folder in Path(missing[0]).absolute().parents if folder.is_dir())
        raise DatabaseProblem(
            f"{', '.join(missing)} {words}",
            why="wanted are run folders (what badcjobs run or submit got as --out), or task databases",
            fix=shlex.join(["ls", str(above)]),
        )


def _is_there(place: Path) -> bool:
    try:
        place.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:  # a folder above it is closed to us
        line = shlex.join(["ls", "-ld", str(place.absolute().parent)])
        raise DatabaseProblem(f"{place} cannot be looked at", why=error.strerror, fix=line) from error
    return True


def find_task_databases(inputs: Iterable[Path], target: Path) -> list[FoundFile]:
    """Return the files given, and every ``*.sqlite`` below the folders given, in a stable order.

    A folder that may not be looked into is in it, too: whatever lies there is missing.
    """
    found: dict[Path, FoundFile] = {}
    for place in map(full_path, inputs):
        if place.is_dir():
            for file in _below(place):
                found.setdefault(file.path, file)
        else:
            leftovers = any(place.with_name(place.name + ending).exists() for ending in LEFTOVERS)
            found[place] = FoundFile(place, True, leftovers)
    found.pop(full_path(target), None)
    return sorted(found.values(), key=lambda file: file.path)


def full_path(path: Path) -> Path:
    """Return the one way to spell a path, without following links."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link to a file of another name


class NoTaskDatabases(DatabaseProblem):
    """There are none yet, or they are elsewhere."""


def no_task_databases(inputs: Iterable[Path]) -> NoTaskDatabases:
    """Return the error for a place without any."""
    return NoTaskDatabases(
        "no task database in " + ", ".join(str(place) for place in inputs),
        why="task databases are called tasks/<job>_<index>.r<restart>.<node>.sqlite",
        fix="badcjobs merge RUN_FOLDER   (the folder given as --out to badcjobs run)",
    )


def _below(folder: Path) -> Iterator[FoundFile]:
    """Yield what is called like a database below a folder; hidden names are unfinished copies and live files."""
    closed: list[OSError] = []
    for parent, folders, names in os.walk(folder, onerror=closed.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        there = set(names)
        for name in names:
            if name.endswith(".sqlite") and not name.startswith(".") and name != "job.sqlite":
                yield FoundFile(Path(parent, name), False, any(name + ending in there for ending in LEFTOVERS))
    for error in closed:
        if not isinstance(error, FileNotFoundError):  # gone since it was listed
            yield FoundFile(Path(error.filename), closed=_closed_words(Path(error.filename), error))


def _closed_words(folder: Path, error: OSError) -> str:
    line = shlex.join(["ls", "-ld", str(folder)])
    return f"the folder cannot be looked into: {error.strerror}; what lies in it is not here. try: {line}"


def is_open_folder(path: Path) -> bool:
    """Say whether something is a folder that we may look into."""
    try:
        os.scandir(path).close()
    except OSError:
        return False
    return True


def is_plain_file(status: os.stat_result) -> bool:
    """Say whether something can be read like a file; a pipe of that name would keep us waiting for ever."""
    return stat.S_ISREG(status.st_mode)
