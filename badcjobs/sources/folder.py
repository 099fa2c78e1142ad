"""A folder of audio as a source: every WAV and FLAC below it, in the order of their paths."""

from __future__ import annotations

import os
import posixpath
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from badcjobs.model import AudioHeader, Chunk, Cutting, Fingerprint
from badcjobs.sources.audio_files import (
    AUDIO_WORDS,
    Found,
    NoAudio,
    covering_end_ms,
    end_ms_of,
    is_audio,
    look_at,
    path_below,
    search_folders,
    with_slash,
    without_ending,
)
from badcjobs.sources.look_ahead import look_ahead
from badcjobs.sources.mistakes import Mistakes, Remarks, is_text, quoted, read_lines
from badcjobs.sources.walk import SeenKeys, Walk


class ListedRecording(NamedTuple):
    """A recording that a source names."""

    line: int  # 0: it has none
    recording_id: str
    path: str


def chunks_of(
    recordings: Iterable[ListedRecording], folders: Sequence[str], walk: Walk, refusal: str = ""
) -> Iterator[Chunk]:
    """Yield the chunks of those recordings that are ours; ``refusal`` begins what is said of one without audio."""

    def look(path: str) -> Found | NoAudio:
        return look_at(path, folders, walk.read_header)

    for (recording, row, known_s), answer in look_ahead(
        _ours(recordings, walk), look, while_waiting=walk.while_waiting
    ):
        walk.row = row
        line, recording_id, path = recording
        if isinstance(answer, NoAudio):
            whole = Chunk(recording_id, recording_id, path, "")
            yield from walk.miss(line, f"{refusal}{answer}", answer, whole)
            continue
        audio_path, fingerprint = answer or (path, Fingerprint(header=AudioHeader(known_s)))
        header = fingerprint.header
        if walk.cutting.cuts_recordings:
            yield from _cut(Chunk(recording_id, recording_id, path, audio_path, fingerprint=fingerprint), walk.cutting)
        else:
            end_ms, is_cut = end_ms_of(header), _needs_a_cut(header)
            yield Chunk(recording_id, recording_id, path, audio_path, 0, end_ms, fingerprint, is_cut=is_cut)


def _ours(
    recordings: Iterable[ListedRecording], walk: Walk
) -> Iterator[tuple[tuple[ListedRecording, int, float | None], str | None]]:
    """Yield our recordings, their number in the whole source, their length if known, and the path to be looked at."""
    for one in recordings:
        row = walk.rows
        if not walk.cutting.cuts_recordings:
            if walk.takes(one.recording_id, one.recording_id):
                yield (one, row, None), one.path
        elif walk.takes_recording(one.recording_id):
            known_s = walk.known_length_s(one.recording_id)
            yield (one, row, known_s), one.path if known_s is None else None


def _cut(whole: Chunk, cutting: Cutting) -> Iterator[Chunk]:
    audio_ms = covering_end_ms(whole.fingerprint.header)
    if audio_ms is None:  # its header does not tell; what the engine makes of it, nobody knows before
        yield whole
        return
    name, stretches = posixpath.basename(whole.recording_id), cutting.stretches(audio_ms)
    is_cut = len(stretches) > 1 or _needs_a_cut(whole.fingerprint.header)
    for start_ms, end_ms in stretches:
        chunk_id = f"{name}_{start_ms}_{end_ms}"
        yield Chunk(
            whole.recording_id, chunk_id, whole.source_path, whole.audio_path, start_ms, end_ms, whole.fingerprint,
            is_cut=is_cut,
        )  # fmt: skip


def _needs_a_cut(header: AudioHeader) -> bool:
    """Say whether even a file that is one chunk is cut: of one that is unfinished or breaks off, a cut is a sound file.

    Of no audio nothing can be cut, and that is how it fails.
    """
    return header.duration_s == 0 or header.unfinished or header.there_s is not None


# --- a folder ---------------------------------------------------------------------------------------------------------

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

    def _recordings(self, below: str, mistakes: Mistakes, remarks: Remarks) -> Iterator[ListedRecording]:
        """Yield all audio below a folder; ids and paths are relative to the source."""
        try:
            audio, folders = _list_folder(self.path, below, remarks)
        except OSError as error:
            look = f"ls -ld {shlex.quote(str(self.path / below))}"
            mistakes.add(0, f"{CLOSED_FOLDER}: {below or '.'}", why=error.strerror or "", fix=look)
            return
        repeated = _repeated(map(without_ending, audio))
        for name in sorted(audio + list(folders)):
            path = f"{below}{name}"
            if name in folders:
                yield from self._recordings(f"{path}/", mistakes, remarks)
            elif not is_text(name):
                mistakes.add(0, f"has a file whose name is not UTF-8: {path!r}")
            else:
                stem = without_ending(name)
                yield ListedRecording(0, path if hash(stem) in repeated else f"{below}{stem}", path)


def _list_folder(source: Path, below: str, remarks: Remarks) -> tuple[list[str], set[str]]:
    """Return the names of audio and of folders; note what is passed over.

    Nothing is opened, and no link to audio followed: what only has such a name, a pipe say, fails when it is looked at.
    """
    audio, folders = [], set()
    with os.scandir(source / below) as entries:
        for entry in entries:  # names only: a million entries would not fit into the memory we promise
            name, is_folder = entry.name, entry.is_dir(follow_symlinks=False)
            if is_folder or is_audio(name):
                if name.startswith("."):
                    remarks.pass_over("hidden", f"{below}{name}{'/' if is_folder else ''}")
                elif is_folder:
                    folders.add(name)
                else:
                    audio.append(name)
            elif entry.is_symlink() and os.path.isdir(entry):  # noqa: PTH112  (says no where a link leads in circles)
                remarks.pass_over("linked", f"{below}{name}")
    return audio, folders


def _repeated(stems: Iterable[str]) -> set[int]:
    """Return the hashes of those that come more than once."""
    seen = SeenKeys()
    for stem in stems:
        seen.add(stem)
    return set(seen.repeated())


# --- a list -----------------------------------------------------------------------------------------------------------

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

    def _recordings(self, mistakes: Mistakes) -> Iterator[ListedRecording]:
        """Read the list twice: a recording's id depends on whether another path would get it too."""
        paths = (path for _, path in self.lines(Mistakes([self.name])) if is_audio(path))
        repeated = _repeated(without_ending(path_below(self.root, path)) for path in paths)
        for line, path in self.lines(mistakes):
            if not is_audio(path):
                mistakes.add(line, f"{quoted(path)} is not audio (.wav, .flac) like the first line")
                continue
            full = path_below(self.root, path)
            stem = without_ending(full)
            yield ListedRecording(line, full if hash(stem) in repeated else stem, path)


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
