"""Lays a batch out in one folder for HawkEars, so that its outputs and complaints lead back to the chunks.

HawkEars resolves the links in its input folder and names outputs after the file it arrives at. Two files
of one stem would change the naming of the whole run, and a git-annex link would come out under its key.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from badcjobs.model import Chunk

# HawkEars adds "_scores.txt"; a name may have 255 bytes, and one letter up to four.
_LONGEST_KEPT_STEM = 50


@dataclass(frozen=True, slots=True)
class Staged:
    """A chunk in the input folder, under the names by which HawkEars will speak of it."""

    chunk: Chunk
    path: str
    stem: str


@dataclass(frozen=True, slots=True)
class NotStaged:
    """A chunk whose audio cannot be had, and why."""

    chunk: Chunk
    why: str


def stage_batch(batch: Sequence[Chunk], folder: Path, *, may_link: bool = True) -> Iterator[Staged | NotStaged]:
    """Place each chunk's audio in the new folder; ``may_link``: by a symbolic link too, where nothing else does.

    A full disk raises OSError: that is no chunk's fault.
    """
    folder.mkdir(parents=True)
    folder = folder.resolve()
    stems: set[str] = set()
    for number, chunk in enumerate(batch):
        try:
            place = folder / staged_name(number, Path(chunk.audio_path))
            path = _place(Path(chunk.audio_path), place, stems if may_link else None)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            yield NotStaged(chunk, f"{chunk.audio_path}: {error.strerror or error}")
            continue
        stems.add(path.stem.casefold())
        yield Staged(chunk, str(path), path.stem)


def staged_name(number: int, audio: Path) -> str:
    """Return a name that differs from all others.

    The old name stays in it because ``--date file`` looks for a date there.
    """
    readable = re.sub(r"[^\w.+-]", "_", audio.stem)[:_LONGEST_KEPT_STEM]
    return f"c{number:06d}~{readable}{audio.suffix}"


def _place(audio: Path, place: Path, stems: set[str] | None) -> Path:
    """Bring the audio to ``place`` and return the path that HawkEars will see."""
    target = audio.resolve(strict=True)
    if not target.is_file():
        raise OSError(errno.EINVAL, "not a file")
    try:
        os.link(target, place)
        return place
    except OSError:
        pass  # another file system, or a file that is not ours: the usual case on a cluster
    if stems is not None and target.name == audio.name and target.stem.casefold() not in stems:
        place.symlink_to(target)  # HawkEars will use the target's name, and here that does no harm
        return target
    shutil.copyfile(target, place)
    return place
