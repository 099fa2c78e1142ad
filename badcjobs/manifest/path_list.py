"""A list of audio paths as a source, from a text file or from the command line; how the lines of any list are read."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from badcjobs.manifest.audio_files import is_audio, path_below, search_folders, without_ending
from badcjobs.manifest.mistakes import Mistakes, quoted
from badcjobs.manifest.recordings import Recording, chunks_of
from badcjobs.manifest.text_lines import read_lines
from badcjobs.manifest.walk import Seen, Walk
from badcjobs.model import Chunk

Lines = Iterator[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class AudioList:
    """Audio files one by one; ``root`` is the folder that recording ids start from."""

    name: str
    description: str
    lines: Callable[[Mistakes], Lines]
    folders: tuple[str, ...]
    root: str
    without_rows: str = "lists nothing"

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        yield from chunks_of(self._recordings(walk.mistakes), self.folders, walk)

    def identities(self) -> Iterator[tuple[int, tuple[str, str]]]:
        for line, recording_id, _ in self._recordings(Mistakes([self.name])):
            yield line, (recording_id, recording_id)

    def _recordings(self, mistakes: Mistakes) -> Iterator[Recording]:
        """Read the list twice: a recording's id depends on whether another path would get it too."""
        stems = Seen()
        for _, path in self.lines(Mistakes([self.name])):
            if is_audio(path):
                stems.add(without_ending(path_below(self.root, path)))
        repeated = set(stems.repeated())
        for line, path in self.lines(mistakes):
            if not is_audio(path):
                mistakes.add(line, f"{quoted(path)} is not audio (.wav, .flac) like the first line")
                continue
            full = path_below(self.root, path)
            stem = without_ending(full)
            yield Recording(line, full if hash(stem) in repeated else stem, path)


def audio_list(path: Path, root: Path | None) -> AudioList:
    """Describe a text file of audio paths.

    Relative paths lie where a manifest's would. Ids start from ``root``, or from the folder of the list;
    a relative path names its recording as it stands, wherever it is found.
    """
    base = path.absolute().parent if root is None else root.absolute()
    return AudioList(
        name=str(path),
        description=f"list of audio {path}",
        lines=lambda mistakes: read_list(path, mistakes),
        folders=search_folders(path, root),
        root=str(base),
    )


def given_audio(paths: Sequence[Path], root: Path | None) -> AudioList:
    """Describe audio files named on the command line; ids start from ``root``, or from the folder they share."""
    absolute = list(dict.fromkeys(str(path.absolute()) for path in paths))
    shared = posixpath.commonpath([posixpath.dirname(posixpath.normpath(path)) for path in absolute])
    name = str(paths[0]) if len(absolute) == 1 else f"the {len(absolute)} audio files from {paths[0]} on"
    return AudioList(
        name=name,
        description=f"audio {name}",
        lines=lambda _: ((0, path) for path in absolute),
        folders=("/",),
        root=shared if root is None else str(root.absolute()),
    )


def read_list(path: Path, mistakes: Mistakes) -> Lines:
    """Yield number and text of every line, without blank lines and # comments."""
    for number, line in enumerate(read_lines(path, mistakes), 1):
        text = line.strip()
        if text and not text.startswith("#"):
            yield number, text
