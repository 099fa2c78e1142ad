"""Finds the task databases that merge is given: files as they are, folders with all that lies below them."""

from __future__ import annotations

import os
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


def find_task_databases(inputs: Iterable[Path], target: Path) -> list[FoundFile]:
    """Return the files given, and every ``*.sqlite`` below the folders given, in a stable order."""
    inputs = list(inputs)
    found: dict[Path, FoundFile] = {}
    for place in inputs:
        if place.is_dir():
            for file in _below(place):
                found.setdefault(file.path, file)
        elif os.path.lexists(place):
            leftovers = any(place.with_name(place.name + ending).exists() for ending in LEFTOVERS)
            found[place.absolute()] = FoundFile(place.absolute(), True, leftovers)
        else:
            raise DatabaseProblem(f"{place} does not exist", fix="badcjobs merge RUN_FOLDER")
    found.pop(target.absolute(), None)
    return sorted(found.values())


def no_task_databases(inputs: Iterable[Path]) -> DatabaseProblem:
    """Return the error for a place without any."""
    return DatabaseProblem(
        "no task database in " + ", ".join(str(place) for place in inputs),
        why="task databases are called tasks/<job>_<index>.r<restart>.<node>.sqlite",
        fix="badcjobs merge RUN_FOLDER   (the folder given as --out to badcjobs run)",
    )


def _below(folder: Path) -> Iterator[FoundFile]:
    """Yield what is called like a database below a folder; hidden names are unfinished copies and live files."""
    for parent, folders, names in os.walk(folder.absolute()):
        folders[:] = [name for name in folders if not name.startswith(".")]
        there = set(names)
        for name in names:
            if name.endswith(".sqlite") and not name.startswith(".") and name != "job.sqlite":
                yield FoundFile(Path(parent, name), False, any(name + ending in there for ending in LEFTOVERS))


def is_plain_file(status: os.stat_result) -> bool:
    """Say whether something can be read like a file; a pipe of that name would keep us waiting for ever."""
    return stat.S_ISREG(status.st_mode)
