"""Chooses where a task's live files lie while it runs, and how they may be written there.

On node-local disk if there is one; else beside the published file, on whatever filesystem that is, in the safe mode.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import BadInput
from badcjobs.model import TaskKey
from badcjobs.paths import LocalFolder
from badcjobs.store.filesystem import Filesystem, read_filesystem

_ROOM_BYTES = 256 * 1024  # what two empty databases need


@dataclass(frozen=True, slots=True)
class LiveFolder:
    """A task's own folder, and the mode in which its databases are written there."""

    folder: LocalFolder
    filesystem: Filesystem
    shared: bool
    why: str

    @property
    def mode(self) -> str:
        """The mode in words."""
        return "safe mode for shared filesystems" if self.shared else "WAL on node-local disk"

    @property
    def is_risky(self) -> bool:
        """Whether somebody insists on WAL where it is not known to be safe."""
        return self.filesystem.shared and not self.shared

    @property
    def words(self) -> str:
        """Which folder, which filesystem, which mode, and why; for the log."""
        return f"live files: {self.folder.path} ({self.filesystem.words}); {self.mode}: {self.why}"

    def to_meta(self) -> dict[str, str]:
        """Return the same for the database."""
        return {
            "live_folder": str(self.folder.path),
            "live_filesystem": self.filesystem.kind,
            "live_mode": "shared" if self.shared else "local",
        }


def choose_live_folder(wanted: str, local_dir: str | None, key: TaskKey, target: Path) -> LiveFolder:
    """Make the folder; ``wanted`` is one of config.LIVE_MODES, ``target`` the file that will be published."""
    if wanted == "shared":
        return _beside(target, "--live-mode shared")
    candidate = Path(local_dir or tempfile.gettempdir())
    filesystem = read_filesystem(candidate)
    if wanted == "local":
        return LiveFolder(LocalFolder.create(str(candidate), key), filesystem, False, "--live-mode local")
    if filesystem.shared and candidate.exists():
        return _beside(target, f"{candidate} is no node-local disk ({filesystem.words})")
    try:
        folder = LocalFolder.create(str(candidate), key)
    except BadInput as error:
        return _beside(target, f"there is no node-local folder {candidate} ({error.why})")
    try:
        _write_something(folder.path)
    except OSError as error:
        folder.remove()
        return _beside(target, f"{candidate} cannot be written ({error.strerror})")
    return LiveFolder(folder, filesystem, False, f"{candidate} is local")


def _beside(target: Path, why: str) -> LiveFolder:
    return LiveFolder(LocalFolder.beside(target), read_filesystem(target.parent), True, why)


def _write_something(folder: Path) -> None:
    """Find out whether there is any room; a quota speaks only when it is asked to keep something."""
    trial = folder / "trial"
    with trial.open("wb") as file:
        file.write(bytes(_ROOM_BYTES))
        file.flush()
        os.fsync(file.fileno())
    trial.unlink()
