"""Output files of commands: they must not replace data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import BadInput

# A typing error (--html job.sqlite) must not replace the results of weeks.
_STDOUT = frozenset(map(Path, ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")))
_AUDIO_MAGIC = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"ID3")
_OF_A_RUN = ("run.toml", "job.sqlite", "submitted.json")
_SIGNS_OF_A_RUN = (*_OF_A_RUN, "logs/emulation.lock")  # the lock is the first file of an emulated array
_FOLDERS_OF_A_RUN = {
    "tasks": "tasks/ has the task databases of the run {}",
    "logs": "logs/ has the logs and job numbers of the run {}",
}


@dataclass(frozen=True, slots=True)
class Target:
    """An output file: its option, its path (None: not requested), and another name to suggest."""

    option: str
    path: Path | None
    instead: str


def is_stdout(path: Path | None) -> bool:
    """Say whether a path is stdout, by any of its names."""
    return path in _STDOUT


def refuse_data(targets: Sequence[Target], inputs: Iterable[Path] = (), *, whatever_it_holds: bool = False) -> None:
    """Raise BadInput for a file that has data, is an input of the command, or is given twice.

    ``whatever_it_holds``: protect only the files of a run; another database may be replaced.
    """
    given = [Path(os.path.realpath(path)) for path in inputs]
    taken: dict[Path, str] = {}
    for target in targets:
        if target.path is None or is_stdout(target.path):
            continue
        place = Path(os.path.realpath(target.path))
        if place.exists() and not place.is_file() and not place.is_dir():
            continue  # a pipe or a device stores nothing
        why = f"{taken[place]} names it as well" if place in taken else _why_protected(place, given)
        if why is None and not whatever_it_holds:
            why = _why_by_content(place)
        if why is not None:
            what = f"{target.option} {target.path} is not written"
            raise BadInput(what, why=why, fix=f"the same command with {target.option} {target.instead}")
        taken[place] = target.option


def _why_protected(place: Path, inputs: Iterable[Path]) -> str | None:
    """Return why a file is protected by its place; None: it is not."""
    if place.is_file() and any(one.exists() and place.samefile(one) for one in inputs):
        return "this command, or its run, reads it"
    for above in (place, *place.parents):
        if above.name in _FOLDERS_OF_A_RUN and _is_run(above.parent):
            return _FOLDERS_OF_A_RUN[above.name].format(above.parent)
    return f"it belongs to the run {place.parent}" if place.name in _OF_A_RUN and _is_run(place.parent) else None


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in _SIGNS_OF_A_RUN)


def _why_by_content(place: Path) -> str | None:
    from badcjobs.store.connect import SQLITE_MAGIC

    try:
        with place.open("rb") as file:
            begin = file.read(len(SQLITE_MAGIC))
    except OSError:
        return None  # it does not exist, or cannot be read
    if begin == SQLITE_MAGIC:
        return "it is a database"
    return "it is a recording" if begin.startswith(_AUDIO_MAGIC) else None


def sources_of(job: Path) -> list[Path]:
    """Return the source files of a run, if they are known; ``job``: its folder or database."""
    from badcjobs.paths import RunFolder, is_there
    from badcjobs.run_toml import FrozenRun

    folder = job if is_there(job) and job.is_dir() else job.absolute().parent
    run = RunFolder(folder.parent if folder.name == "tasks" else folder)
    try:
        frozen = FrozenRun.read(run.run_toml)
    except BadInput:
        return []
    return [Path(source) for source in (frozen.settings.get("source", ()) if frozen else ())]
