"""Decides whether audio is copied to the node before it is needed: where it lies far away, and the node has a disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from badcjobs.model import Chunk
from badcjobs.store.filesystem import read_filesystem

_MOST_BYTES = 20 * 2**30
_MOST_BYTES_IN_MEMORY = 2**30  # a tmpfs is the job's own memory
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class StagingChoice:
    """Whether audio is staged, why, and how much of it at once; or only what has to be cut out of longer files."""

    staged: bool
    why: str
    most_bytes: int = 0
    only_cuts: bool = False

    @property
    def words(self) -> str:
        """The decision, for the log."""
        what = "is copied to this node before it is needed" if self.staged else "is read where it lies"
        what = "is cut out of longer files before it is needed" if self.only_cuts else what
        return f"audio {what}: {self.why}"


def choose_staging(wanted: str, chunks: Sequence[Chunk], local: Path) -> StagingChoice:
    """Look at the filesystems of some chunks and of the node's own folder; ``wanted`` is one of config.STAGE_MODES."""
    here = read_filesystem(local)
    most_bytes = _MOST_BYTES_IN_MEMORY if here.kind in _IN_MEMORY else _MOST_BYTES
    if wanted != "auto":
        return StagingChoice(wanted == "always", f"--stage {wanted}", most_bytes)
    if not chunks:
        return StagingChoice(False, "nothing waits")
    far = next((path for path in _folders(chunks) if read_filesystem(path).shared), None)
    is_cut = any(chunk.is_cut for chunk in chunks) and not here.shared
    if far is None:
        why = f"{_folders(chunks)[0]} is local"
        return StagingChoice(True, why, most_bytes, only_cuts=True) if is_cut else StagingChoice(False, why)
    if here.shared:
        return StagingChoice(False, f"{local} is no node-local disk ({here.words})")
    return StagingChoice(True, f"{far} is on {read_filesystem(far).words}, {local} on {here.words}", most_bytes)


def _folders(chunks: Sequence[Chunk]) -> list[Path]:
    """Return where the audio really lies: a git-annex link may lead to another filesystem."""
    found = []
    for chunk in chunks:
        try:
            found.append(Path(chunk.audio_path).resolve().parent)
        except (OSError, RuntimeError):  # a loop of links
            found.append(Path(chunk.audio_path).parent)
    return list(dict.fromkeys(found))
