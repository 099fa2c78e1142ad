"""A folder of audio as a source: every WAV and FLAC below it, in the order of their paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from badcjobs.manifest.audio_files import (
    AUDIO_WORDS,
    NoAudio,
    end_ms_of,
    find_audio,
    is_audio,
    with_slash,
    without_ending,
)
from badcjobs.manifest.mistakes import Mistakes
from badcjobs.manifest.walk import Seen, Walk
from badcjobs.model import Chunk


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
        for recording_id, path in self._recordings("", walk.mistakes):
            if not walk.takes(recording_id, recording_id):
                continue
            try:
                audio_path, fingerprint = find_audio(path, folders)
            except NoAudio as problem:
                walk.mistakes.add(0, f"has audio that cannot be used: {problem}", fix=problem.fix)
            else:
                yield Chunk(recording_id, recording_id, path, audio_path, 0, end_ms_of(audio_path), fingerprint)

    def identities(self) -> Iterator[tuple[int, tuple[str, str]]]:
        for recording_id, _ in self._recordings("", Mistakes([self.name])):
            yield 0, (recording_id, recording_id)

    def _recordings(self, below: str, mistakes: Mistakes) -> Iterator[tuple[str, str]]:
        """Yield recording id and path of all audio below a folder, both relative to the source."""
        try:
            audio, folders = _list_folder(self.path / below)
        except OSError as error:
            mistakes.add(0, f"has a folder that cannot be read: {below or '.'}", why=error.strerror or "")
            return
        repeated = _repeated_stems(audio)
        for name in sorted(audio + list(folders)):
            path = f"{below}{name}"
            if name in folders:
                yield from self._recordings(f"{path}/", mistakes)
            elif not _is_utf8(name):
                mistakes.add(0, f"has a file whose name is not UTF-8: {path!r}")
            else:
                stem = without_ending(name)
                yield (path if hash(stem) in repeated else f"{below}{stem}"), path


def _list_folder(folder: Path) -> tuple[list[str], set[str]]:
    """Return the names of audio files (links included, not yet followed) and of folders."""
    audio, folders = [], set()
    with os.scandir(folder) as entries:
        for entry in entries:  # names only: a million entries would not fit into the memory we promise
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.add(entry.name)
            elif is_audio(entry.name) and (entry.is_symlink() or entry.is_file()):
                audio.append(entry.name)
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
