"""SOURCE arguments → one stream of chunks: the front of this stage, and the file to read first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.errors import BadInput
from badcjobs.manifest.audio_files import ReadHeader
from badcjobs.manifest.audio_header import read_header
from badcjobs.manifest.badc_manifest import Manifest
from badcjobs.manifest.cutting import AS_IT_COMES, Cutting
from badcjobs.manifest.look_ahead import stay
from badcjobs.manifest.manifest_list import ManifestList
from badcjobs.manifest.mistakes import Mistakes
from badcjobs.manifest.path_list import given_audio
from badcjobs.manifest.recognise import AudioFile, recognise
from badcjobs.manifest.remarks import Remarks
from badcjobs.manifest.repeats import note_repeats
from badcjobs.manifest.shards import WHOLE, Shard
from badcjobs.manifest.walk import Source, Walk
from badcjobs.model import Chunk

# The number of what shards are made of, over all sources (a row; of recordings that we cut, the recording with all its
# chunks) and of the part it is in, both from 0, and (recording_id, chunk_id).
RowNote = Callable[[int, int, tuple[str, str]], None]
_NO_LENGTHS: Mapping[str, float] = {}


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
    cutting: Cutting = AS_IT_COMES
    read_header: ReadHeader = read_header

    @property
    def descriptions(self) -> tuple[str, ...]:
        """Return what each source is, for logs."""
        return tuple(part.description for part in self.parts)

    def chunks(
        self, shard: Shard, remarks: Remarks | None = None, while_waiting: Callable[[], None] = stay
    ) -> Iterator[Chunk]:
        """Yield this shard's chunks in source order, reading every row but looking only at this shard's audio.

        Mistakes are gathered on the way and raised as one BadInput at the end, so what came before
        counts only once the iteration has ended well. ``remarks`` gather what is odd, and say whether missing audio
        is a mistake: where none at all is there, it always is. ``while_waiting`` is called now and then while files
        are slow to answer; an error that it raises ends the reading.
        """
        mistakes = Mistakes([part.name for part in self.parts])
        walk = Walk(shard, mistakes, self.cutting, remarks, self.read_header, while_waiting)
        listed, several = 0, len(self.parts) > 1
        for listed, chunk in enumerate(self._read(walk), 1):  # noqa: B007
            walk.remarks.note(chunk, several_sources=several)
            yield chunk
        note_repeats(self.parts, walk)
        if walk.remarks.keeps_missing and mistakes.count == mistakes.missing < listed:
            walk.remarks.forgive(mistakes)
            return
        mistakes.raise_any()

    def read_identities(self, note: RowNote, lengths: Mapping[str, float] = _NO_LENGTHS) -> Remarks:
        """Tell ``note`` every chunk that ``chunks`` would yield for some shard, without looking at any audio.

        But for recordings that are cut: which chunks they have, only their headers tell, unless ``lengths`` (seconds,
        by recording_id) does. Mistakes of the rows are raised as ``chunks`` would; whether identities repeat is left
        to the caller. The remarks are about names, for hardly any file was looked at.
        """
        walk = _Onlooker(self, note, lengths)
        for chunk in self._read(walk):
            note(walk.row, walk.mistakes.source, chunk.key)
        if walk.mistakes.count > walk.mistakes.missing:
            walk.mistakes.raise_any()
        return walk.remarks

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
    """A reading in which no row is ours, so that nobody looks for its audio; but for recordings that we cut."""

    def __init__(self, sources: Sources, note: RowNote, lengths: Mapping[str, float]) -> None:
        mistakes, remarks = Mistakes([part.name for part in sources.parts]), Remarks(keeps_missing=True)
        super().__init__(WHOLE, mistakes, sources.cutting, remarks, sources.read_header)
        self._note = note
        self._lengths = lengths

    def takes(self, recording_id: str, chunk_id: str) -> bool:
        self._note(self.rows, self.mistakes.source, (recording_id, chunk_id))
        self.rows += 1
        return False

    def takes_recording(self, recording_id: str) -> bool:
        self.rows += 1
        return True

    def known_length_s(self, recording_id: str) -> float | None:
        return self._lengths.get(recording_id)


def open_sources(
    paths: Sequence[Path], *, root: Path | None, position: int | None = None, cutting: Cutting = AS_IT_COMES
) -> Sources:
    """Recognise each SOURCE by looking at it; raise one BadInput that names all that cannot be used.

    ``root`` is where relative paths inside sources start from. Without it, a path is taken from the working
    directory if it exists there, otherwise from the folder of the file that names it.

    ``position`` (from 0) is this task's place in its array: of a list of manifests it picks the one line;
    None means all of them in turn. Other sources do not depend on it.

    ``cutting`` says how recordings become chunks.
    """
    if not paths:
        raise BadInput("no SOURCE given", why="a source is a manifest, a folder of audio, or a list of either")
    if root is not None and not os.path.isdir(root):  # noqa: PTH112  (Path.is_dir raises where we may not look)
        raise BadInput(f"no such folder: {root}", why="--root is the folder that relative source_paths start from")
    if problems := cutting.problems():
        raise BadInput("\n".join(problems), fix="--chunk-length 294 --overlap 6")
    mistakes = Mistakes([str(path) for path in paths])
    parts: list[Source] = []
    audio_files: list[Path] = []
    for mistakes.source, path in enumerate(paths):
        source = recognise(path, root, mistakes)
        if isinstance(source, ManifestList):
            if len(paths) == 1 and not mistakes.count:
                return _with_cutting(_open_listed(source, root, position), cutting)
            if len(paths) > 1:
                mistakes.add(0, "is a list of manifests, which has to be the only SOURCE")
        elif isinstance(source, AudioFile):
            audio_files.append(source.path)
        elif source is not None:
            parts.append(source)
    mistakes.raise_any()
    if audio_files:
        parts.append(given_audio(audio_files, root))
    return _with_cutting(Sources(tuple(parts)), cutting)


def _with_cutting(sources: Sources, cutting: Cutting) -> Sources:
    """Return sources that cut; refuse what would change nothing for any of them."""
    kinds = {isinstance(part, Manifest) for part in sources.parts}
    if cutting.cuts_recordings and kinds == {True}:
        raise BadInput(
            "--chunk-length goes with whole recordings: a folder, a list of audio, or audio files",
            why=f"{sources.parts[0].name} is a manifest, which says itself where each chunk begins and ends",
            fix="the same command without --chunk-length and --overlap",
        )
    if cutting.rows is not None and kinds == {False}:
        raise BadInput(
            f"--{'cut' if cutting.rows else 'no-cut'} goes with manifests",
            why=f"{sources.parts[0].name} is no manifest: it has no rows with a begin and an end",
            fix="the same command without it; --chunk-length 294 --overlap 6 cuts whole recordings",
        )
    return replace(sources, cutting=cutting)


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
