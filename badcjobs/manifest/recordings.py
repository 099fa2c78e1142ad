"""The chunks of the recordings in a folder or a list: all of each, or the stretches that it is cut into."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from badcjobs.manifest.audio_files import Found, NoAudio, covering_end_ms, end_ms_of, look_at
from badcjobs.manifest.cutting import Cutting
from badcjobs.manifest.look_ahead import look_ahead
from badcjobs.manifest.walk import Walk
from badcjobs.model import AudioHeader, Chunk, Fingerprint


class Recording(NamedTuple):
    """A recording that a source names."""

    line: int  # 0: it has none
    recording_id: str
    path: str


class _Ours(NamedTuple):
    recording: Recording
    row: int  # its number in the whole source
    known_s: float | None  # its length, where nobody needs to look


def chunks_of(
    recordings: Iterable[Recording], folders: Sequence[str], walk: Walk, refusal: str = ""
) -> Iterator[Chunk]:
    """Yield the chunks of those recordings that are ours; ``refusal`` begins what is said of one without audio."""

    def look(path: str) -> Found | NoAudio:
        return look_at(path, folders, walk.read_header)

    for ours, answer in look_ahead(_ours(recordings, walk), look, while_waiting=walk.while_waiting):
        walk.row = ours.row
        line, recording_id, path = ours.recording
        if isinstance(answer, NoAudio):
            whole = Chunk(recording_id, recording_id, path, "")
            yield from walk.miss(line, f"{refusal}{answer}", answer, whole)
            continue
        audio_path, fingerprint = answer or (path, Fingerprint(header=AudioHeader(ours.known_s)))
        header = fingerprint.header
        if walk.cutting.cuts_recordings:
            whole = Chunk(recording_id, recording_id, path, audio_path, fingerprint=fingerprint)
            yield from _cut(whole, walk.cutting)
        else:
            end_ms, is_cut = end_ms_of(header), _needs_a_cut(header)
            yield Chunk(recording_id, recording_id, path, audio_path, 0, end_ms, fingerprint, is_cut=is_cut)


def _ours(recordings: Iterable[Recording], walk: Walk) -> Iterator[tuple[_Ours, str | None]]:
    """Yield our recordings, each with the path that is to be looked at; None: its length is known."""
    cuts = walk.cutting.cuts_recordings
    for one in recordings:
        row = walk.rows
        if cuts:
            if walk.takes_recording(one.recording_id):
                known_s = walk.known_length_s(one.recording_id)
                yield _Ours(one, row, known_s), one.path if known_s is None else None
        elif walk.takes(one.recording_id, one.recording_id):
            yield _Ours(one, row, None), one.path


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
