"""Files that a command writes: none of them may replace data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import BadInput

# A slip on a command line (--html job.sqlite) would else replace what took weeks to compute, or to record.
_STDOUT = frozenset(map(Path, ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")))
_AUDIO_MAGIC = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"ID3")
_OF_A_RUN = ("run.toml", "job.sqlite", "submitted.json")
_SIGNS_OF_A_RUN = (*_OF_A_RUN, "logs/emulation.lock")  # the last is the first that an emulated array leaves
_FOLDERS_OF_A_RUN = {
    "tasks": "tasks/ holds what the tasks of the run {} have left",
    "logs": "logs/ holds what the scheduler of the run {} has written down",
}


@dataclass(frozen=True, slots=True)
class Target:
    """A file to be written: the option that names it, and a name that would do instead; ``path`` None: not wanted."""

    option: str
    path: Path | None
    instead: str


def is_stdout(path: Path | None) -> bool:
    """Say whether a path means stdout, by whichever of its names."""
    return path in _STDOUT


def refuse_data(targets: Sequence[Target], inputs: Iterable[Path] = (), *, whatever_it_holds: bool = False) -> None:
    """Raise BadInput for a file that holds somebody's data, is an input of the command, or is wanted twice.

    ``whatever_it_holds``: only what belongs to a run is data; another database may be replaced.
    """
    given = [Path(os.path.realpath(path)) for path in inputs]
    taken: dict[Path, str] = {}
    for target in targets:
        if target.path is None or is_stdout(target.path):
            continue
        place = Path(os.path.realpath(target.path))
        if place.exists() and not place.is_file() and not place.is_dir():
            continue  # a pipe or a device keeps nothing
        why = f"{taken[place]} names it as well" if place in taken else _why_protected(place, given)
        if why is None and not whatever_it_holds:
            why = _why_by_content(place)
        if why is not None:
            what = f"{target.option} {target.path} is not written"
            raise BadInput(what, why=why, fix=f"the same command with {target.option} {target.instead}")
        taken[place] = target.option


def _why_protected(place: Path, inputs: Iterable[Path]) -> str | None:
    """Return whose file it is by its place; None: nobody's."""
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
        return None  # not there yet; or it cannot be read, and then hardly be written
    if begin == SQLITE_MAGIC:
        return "there is a database in it"
    return "there is a recording in it" if begin.startswith(_AUDIO_MAGIC) else None


def sources_of(job: Path) -> list[Path]:
    """Return the files that a run takes its chunks from, as far as is known; ``job``: its folder or database."""
    from badcjobs.paths import RunFolder, is_there
    from badcjobs.run_toml import FrozenRun

    folder = job if is_there(job) and job.is_dir() else job.absolute().parent
    run = RunFolder(folder.parent if folder.name == "tasks" else folder)
    try:
        frozen = FrozenRun.read(run.run_toml)
    except BadInput:
        return []
    return [Path(source) for source in (frozen.settings.get("source", ()) if frozen else ())]
