"""SOURCE arguments → one stream of chunks: the front of this stage, and the file to read first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.errors import BadInput
from badcjobs.manifest.badc_manifest import Manifest
from badcjobs.manifest.manifest_list import ManifestList
from badcjobs.manifest.mistakes import Mistakes
from badcjobs.manifest.path_list import given_audio
from badcjobs.manifest.recognise import AudioFile, recognise
from badcjobs.manifest.repeats import note_repeats
from badcjobs.manifest.shards import WHOLE, Shard
from badcjobs.manifest.walk import Source, Walk
from badcjobs.model import Chunk

# Row number over all sources and number of the part it is in, both from 0, and (recording_id, chunk_id).
RowNote = Callable[[int, int, tuple[str, str]], None]


@dataclass(frozen=True, slots=True)
class Sources:
    """What was given, recognised but not yet read.

    ``picked_by_position``: a position has already picked this task's manifest, so that is not to be cut into
    shards for the array's tasks again. ``manifests_listed``: how many manifests a list of manifests has, which is
    how many array tasks it wants; None when no such list was given.
    """

    parts: tuple[Source, ...]
    picked_by_position: bool = False
    manifests_listed: int | None = None

    @property
    def descriptions(self) -> tuple[str, ...]:
        """Return what each source is, for logs."""
        return tuple(part.description for part in self.parts)

    def chunks(self, shard: Shard) -> Iterator[Chunk]:
        """Yield this shard's chunks in source order, reading every row but looking only at this shard's audio.

        Mistakes are gathered on the way and raised as one BadInput at the end, so what came before
        counts only once the iteration has ended well.
        """
        walk = Walk(shard, Mistakes([part.name for part in self.parts]))
        yield from self._read(walk)
        note_repeats(self.parts, walk)
        walk.mistakes.raise_any()

    def read_identities(self, note: RowNote) -> None:
        """Tell ``note`` every row that ``chunks`` would number, without looking at any audio.

        Mistakes of the rows are raised as ``chunks`` would; whether identities repeat is left to the caller.
        """
        walk = _Onlooker(Mistakes([part.name for part in self.parts]), note)
        for _ in self._read(walk):
            pass  # none is ours: they all went to note
        walk.mistakes.raise_any()

    def _read(self, walk: Walk) -> Iterator[Chunk]:
        mistakes = walk.mistakes
        for mistakes.source, part in enumerate(self.parts):
            before = walk.rows, mistakes.count
            try:
                yield from part.chunks(walk)
            except OSError as error:
                mistakes.add(0, "cannot be read", why=error.strerror or str(error))
            if (walk.rows, mistakes.count) == before:
                mistakes.add(0, part.without_rows)


class _Onlooker(Walk):
    """A reading in which no row is ours, so that nobody looks for its audio."""

    def __init__(self, mistakes: Mistakes, note: RowNote) -> None:
        super().__init__(WHOLE, mistakes)
        self._note = note

    def takes(self, recording_id: str, chunk_id: str) -> bool:
        self._note(self.rows, self.mistakes.source, (recording_id, chunk_id))
        self.rows += 1
        return False


def open_sources(paths: Sequence[Path], *, root: Path | None, position: int | None = None) -> Sources:
    """Recognise each SOURCE by looking at it; raise one BadInput that names all that cannot be used.

    ``root`` is where relative paths inside sources start from. Without it, a path is taken from the working
    directory if it exists there, otherwise from the folder of the file that names it.

    ``position`` (from 0) is this task's place in its array: of a list of manifests it picks the one line;
    None means all of them in turn. Other sources do not depend on it.
    """
    if not paths:
        raise BadInput("no SOURCE given", why="a source is a manifest, a folder of audio, or a list of either")
    if root is not None and not os.path.isdir(root):  # noqa: PTH112  (Path.is_dir raises where we may not look)
        raise BadInput(f"no such folder: {root}", why="--root is the folder that relative source_paths start from")
    mistakes = Mistakes([str(path) for path in paths])
    parts: list[Source] = []
    audio_files: list[Path] = []
    for mistakes.source, path in enumerate(paths):
        source = recognise(path, root, mistakes)
        if isinstance(source, ManifestList):
            if len(paths) == 1 and not mistakes.count:
                return _open_listed(source, root, position)
            if len(paths) > 1:
                mistakes.add(0, "is a list of manifests, which has to be the only SOURCE")
        elif isinstance(source, AudioFile):
            audio_files.append(source.path)
        elif source is not None:
            parts.append(source)
    mistakes.raise_any()
    if audio_files:
        parts.append(given_audio(audio_files, root))
    return Sources(tuple(parts))


def _open_listed(listed: ManifestList, root: Path | None, position: int | None) -> Sources:
    picked = listed.pick(position)
    mistakes = Mistakes([str(path) for _, path in picked])
    parts: list[Source] = []
    for mistakes.source, (line, path) in enumerate(picked):
        source = recognise(path, root, mistakes)
        if isinstance(source, Manifest):
            parts.append(replace(source, named_by=f" (line {line} of {listed.path})"))
    mistakes.raise_any()
    return Sources(tuple(parts), picked_by_position=position is not None, manifests_listed=len(listed.manifests))
