"""Complete recordings as a source: all audio files below a folder, in path order, or the files of a list."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from badcjobs.model import AudioHeader, Chunk, ChunkKey, Cutting, Fingerprint
from badcjobs.paths import shell_line
from badcjobs.settings import absolute
from badcjobs.sources.audio_files import (
    AUDIO_FORMATS,
    Found,
    NoAudio,
    SourceRoot,
    end_ms_of,
    is_audio,
    locate,
    look_at,
    search_folders,
    with_slash,
    without_ending,
)
from badcjobs.sources.mistakes import Mistakes, Remarks, escape_bytes, quoted
from badcjobs.sources.tables import read_list
from badcjobs.sources.walk import SeenKeys, Walk, look_ahead


class ListedRecording(NamedTuple):
    """A recording of a source."""

    line: int  # 0: not from a file with lines
    recording_id: str
    path: str


# A recording, and its length if it is known already.
_Ours = tuple[ListedRecording, float | None]


@dataclass(frozen=True)
class AudioList:
    """The recordings of a folder, of a list, or of the command line.

    ``recordings`` yields them from the first one, and notes mistakes and skipped names.
    """

    name: str
    description: str
    folders: tuple[str, ...]
    recordings: Callable[[Mistakes, Remarks], Iterator[ListedRecording]]
    without_rows: str = "lists nothing"
    is_folder: bool = False
    has_places: bool = False

    def named_recordings(self) -> Iterator[Chunk]:
        for _, recording_id, path in self.recordings(Mistakes([self.name]), Remarks()):
            yield Chunk(recording_id, recording_id, path, locate(path, self.folders))

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        def look(path: str) -> Found | NoAudio:
            return look_at(path, self.folders, walk.read_header)

        ours = look_ahead(self._ours(walk), look, walk.while_waiting)
        for ((line, recording_id, path), known_s), answer in ours:
            recording = Chunk(recording_id, recording_id, path, "")
            if isinstance(answer, NoAudio):
                refusal = "contains audio that cannot be used: " if self.is_folder else ""
                yield from walk.add_missing(line, f"{refusal}{answer}", answer, recording)
                continue
            audio_path, fingerprint = answer or (path, Fingerprint(header=AudioHeader(known_s)))
            recording = replace(recording, audio_path=audio_path, fingerprint=fingerprint)
            if walk.cutting.cuts_recordings:
                yield from _cut(recording, walk.cutting)
            else:
                header = fingerprint.header
                yield replace(recording, end_ms=end_ms_of(header), is_cut=_needs_a_cut(header))

    def _ours(self, walk: Walk) -> Iterator[tuple[_Ours, str | None]]:
        """Yield the recordings of this shard, each with the path to look at; None: its length is known."""
        for recording in self.recordings(walk.mistakes, walk.remarks):
            if not walk.takes(
                recording.recording_id,
                recording.recording_id,
                to_cut=walk.cutting.cuts_recordings,
            ):
                continue
            known_s = walk.lengths.get(recording.recording_id)
            yield (recording, known_s), recording.path if known_s is None else None

    def identities(self) -> Iterator[tuple[int, ChunkKey]]:
        for line, recording_id, _ in self.recordings(Mistakes([self.name]), Remarks()):
            yield line, (recording_id, recording_id)


def _cut(recording: Chunk, cutting: Cutting) -> Iterator[Chunk]:
    duration_s = recording.fingerprint.header.duration_s
    if duration_s is None:  # the header does not tell the length: the engine gets the complete file
        yield recording
        return
    audio_ms = -(-round(duration_s * 1_000_000) // 1000)  # rounded up, so that no sample is left out
    stretches = cutting.stretches(audio_ms)
    name = posixpath.basename(recording.recording_id)
    is_cut = len(stretches) > 1 or _needs_a_cut(recording.fingerprint.header)
    for start_ms, end_ms in stretches:
        yield replace(
            recording, chunk_id=f"{name}_{start_ms}_{end_ms}", start_ms=start_ms, end_ms=end_ms, is_cut=is_cut
        )


def _needs_a_cut(header: AudioHeader) -> bool:
    """Return whether a file is cut even if it is a single chunk: a cut copy of a damaged file is a valid file.

    Cutting empty audio fails, with a clear error.
    """
    return header.duration_s == 0 or header.unfinished or header.there_s is not None


# --- a folder ---------------------------------------------------------------------------------------------------------

CLOSED_FOLDER = "contains a folder that cannot be read"


def audio_folder(path: Path) -> AudioList:
    """Describe all audio below a folder, without hidden names; only links to files are followed."""
    return AudioList(
        name=str(path),
        description=f"folder {path}/",
        folders=(with_slash(path.absolute()),),
        recordings=partial(_below, path, ""),
        without_rows=f"contains no audio ({AUDIO_FORMATS})",
        is_folder=True,
    )


def _below(
    source: Path,
    below: str,
    mistakes: Mistakes,
    remarks: Remarks,
) -> Iterator[ListedRecording]:
    """Yield all audio below a folder of a source; ids and paths are relative to the source."""
    try:
        audio, folders = _list_folder(source, below, remarks)
    except OSError as error:
        look = shell_line("ls", "-ld", source / below)
        mistakes.add(
            0,
            f"{CLOSED_FOLDER}: {below or '.'}",
            why=error.strerror or "",
            fix=look,
        )
        return
    repeated = SeenKeys(map(without_ending, audio)).repeated()
    for name in sorted(audio + list(folders)):
        path = f"{below}{name}"
        if name in folders:
            yield from _below(source, f"{path}/", mistakes, remarks)
        else:
            stem = without_ending(name)
            recording_id = path if hash(stem) in repeated else f"{below}{stem}"
            yield ListedRecording(0, escape_bytes(recording_id), escape_bytes(path))


def _list_folder(source: Path, below: str, remarks: Remarks) -> tuple[list[str], set[str]]:
    """Return the names of audio files and of folders; note the names that are skipped.

    No file is opened and no link followed: a pipe with an audio name, say, fails later, when it is looked at.
    """
    audio = []
    folders = set()
    with os.scandir(source / below) as entries:
        for entry in entries:  # only names are kept: a million entries need too much memory
            name = entry.name
            is_hidden = name.startswith(".")
            if entry.is_dir(follow_symlinks=False):
                if is_hidden:
                    remarks.skip("hidden", f"{below}{name}/")
                else:
                    folders.add(name)
            elif is_audio(name):
                if is_hidden:
                    remarks.skip("hidden", f"{below}{name}")
                else:
                    audio.append(name)
            elif entry.is_symlink() and os.path.isdir(entry):  # noqa: PTH112  (False for a circular link)
                remarks.skip("linked", f"{below}{name}")
            elif not is_hidden:
                remarks.leave_out(name)
    return audio, folders


# --- a list -----------------------------------------------------------------------------------------------------------

Lines = Iterator[tuple[int, str]]


def audio_list(path: Path, root: Path | None) -> AudioList:
    """Describe a text file of audio paths.

    Relative paths are searched as for a manifest. Recording ids are relative to ``root``, or to the folder of the list;
    a relative path is itself the id, wherever the file is found.
    """
    base = SourceRoot(root or path.parent)
    return AudioList(
        name=str(path),
        description=f"list of audio {path}",
        folders=search_folders(path, root),
        recordings=partial(_listed, base, lambda mistakes: read_list(path, mistakes)),
    )


def given_audio(paths: Sequence[Path], root: Path | None) -> AudioList:
    """Describe audio files of the command line; ids are relative to ``root``, or to their common folder."""
    given = list(dict.fromkeys(absolute(Path(), str(path)) for path in paths))
    base = SourceRoot(root or Path(posixpath.commonpath(map(posixpath.dirname, given))))
    name = str(paths[0]) if len(given) == 1 else f"the {len(given)} audio files starting with {paths[0]}"
    return AudioList(
        name=name,
        description=f"audio {name}",
        folders=("/",),
        recordings=partial(_listed, base, lambda _: ((0, path) for path in given)),
    )


def _listed(
    base: SourceRoot, lines: Callable[[Mistakes], Lines], mistakes: Mistakes, remarks: Remarks
) -> Iterator[ListedRecording]:
    """Read the list twice: an id keeps the extension if another path would get the same id."""
    paths = (path for _, path in lines(Mistakes([""])) if is_audio(path))
    repeated = SeenKeys(without_ending(base.path_below(path)) for path in paths).repeated()
    for line, path in lines(mistakes):
        if not is_audio(path):
            mistakes.add(line, f"{quoted(path)} is not audio ({AUDIO_FORMATS}), unlike the first line")
            continue
        full = base.path_below(path)
        stem = without_ending(full)
        yield ListedRecording(line, full if hash(stem) in repeated else stem, path)
