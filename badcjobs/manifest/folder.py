"""A folder of audio as a source: every WAV and FLAC below it, in the order of their paths."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from badcjobs.manifest.audio_files import AUDIO_WORDS, is_audio, with_slash, without_ending
from badcjobs.manifest.mistakes import Mistakes
from badcjobs.manifest.recordings import Recording, chunks_of
from badcjobs.manifest.remarks import Remarks
from badcjobs.manifest.walk import Seen, Walk
from badcjobs.model import Chunk

CLOSED_FOLDER = "has a folder that cannot be read"


@dataclass(frozen=True, slots=True)
class Folder:
    """All audio below a folder. Hidden names are skipped, links to files followed, links to folders not."""

    path: Path
    without_rows: str = f"has no audio below it ({AUDIO_WORDS})"

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def description(self) -> str:
        return f"folder {self.path}/ ({AUDIO_WORDS})"

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        folders = (with_slash(self.path.absolute()),)
        recordings = self._recordings("", walk.mistakes, walk.remarks)
        yield from chunks_of(recordings, folders, walk, "has audio that cannot be used: ")

    def identities(self) -> Iterator[tuple[int, tuple[str, str]]]:
        for line, recording_id, _ in self._recordings("", Mistakes([self.name]), Remarks()):
            yield line, (recording_id, recording_id)

    def _recordings(self, below: str, mistakes: Mistakes, remarks: Remarks) -> Iterator[Recording]:
        """Yield all audio below a folder; ids and paths are relative to the source."""
        try:
            audio, folders = _list_folder(self.path, below, remarks)
        except OSError as error:
            look = f"ls -ld {shlex.quote(str(self.path / below))}"
            mistakes.add(0, f"{CLOSED_FOLDER}: {below or '.'}", why=error.strerror or "", fix=look)
            return
        repeated = _repeated_stems(audio)
        for name in sorted(audio + list(folders)):
            path = f"{below}{name}"
            if name in folders:
                yield from self._recordings(f"{path}/", mistakes, remarks)
            elif not _is_utf8(name):
                mistakes.add(0, f"has a file whose name is not UTF-8: {path!r}")
            else:
                stem = without_ending(name)
                yield Recording(0, path if hash(stem) in repeated else f"{below}{stem}", path)


def _list_folder(source: Path, below: str, remarks: Remarks) -> tuple[list[str], set[str]]:
    """Return the names of audio and of folders; note what is passed over.

    Nothing is opened, and no link to audio followed: what only has such a name, a pipe say, fails when it is looked at.
    """
    audio, folders = [], set()
    with os.scandir(source / below) as entries:
        for entry in entries:  # names only: a million entries would not fit into the memory we promise
            if entry.is_dir(follow_symlinks=False):
                if entry.name.startswith("."):
                    remarks.hidden.add(f"{below}{entry.name}/")
                else:
                    folders.add(entry.name)
            elif is_audio(entry.name):
                if entry.name.startswith("."):
                    remarks.hidden.add(f"{below}{entry.name}")
                else:
                    audio.append(entry.name)
            elif entry.is_symlink() and os.path.isdir(entry):  # noqa: PTH112  (says no where a link leads in circles)
                remarks.linked.add(f"{below}{entry.name}")
    return audio, folders


def _repeated_stems(names: list[str]) -> set[int]:
    stems = Seen()
    for name in names:
        stems.add(without_ending(name))
    return set(stems.repeated())


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
