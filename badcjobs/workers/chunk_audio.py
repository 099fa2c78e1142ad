"""The audio of a chunk that is only a stretch of a longer file: cut out of it, under a name of its own."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path

from badcjobs.model import Chunk, ChunkResult
from badcjobs.sources.audio_files import explain_link
from badcjobs.sources.cutter import AudioCutter, CannotCut, NotThere

_SLACK_S = 1.0  # recorders, and those who round, are not exact
LONGEST_KEPT_STEM = 50  # letters, of up to four bytes; a name may have 255 bytes in all


def cut_name(chunk: Chunk) -> str:
    """Return what the file is called; the recording's name comes first, for engines look for a date there."""
    end = "" if chunk.end_ms is None else str(chunk.end_ms)
    return f"{Path(chunk.audio_path).stem[:LONGEST_KEPT_STEM]}~{chunk.start_ms}-{end}.wav"


def stretch_of(chunk: Chunk) -> tuple[float, float]:
    """Return the seconds where a chunk begins and ends in its file; an end that nobody knows is that of the file."""
    return chunk.start_ms / 1000, math.inf if chunk.end_ms is None else chunk.end_ms / 1000


def check_audio(chunk: Chunk) -> None:
    """Raise NotThere where a chunk's file is missing, CannotCut where it is not the one that was listed.

    Only of a file that somebody has listed, or that has to be cut; about others the engine will say.
    """
    listed = chunk.fingerprint
    if listed.audio_bytes is None and not chunk.is_cut:
        return
    try:
        status = os.stat(chunk.audio_path)  # noqa: PTH116 - a path as it came, in a shared place
    except (FileNotFoundError, NotADirectoryError) as error:
        path = Path(chunk.audio_path)
        what, fetch = explain_link(path) if path.is_symlink() else ("no such file:", None)
        # The line to paste comes last: of an error that is told in one line, it is that one.
        raise NotThere(f"{what} {path}" + (f": {fetch} {shlex.quote(path.name)}" if fetch else "")) from error
    except OSError:
        return  # who reads it will say why that cannot be
    if listed.audio_bytes is not None and (status.st_size, status.st_mtime_ns) != (
        listed.audio_bytes,
        listed.audio_mtime_ns,
    ):
        raise CannotCut(f"{chunk.audio_path} has changed since the work was listed; run the same command again")


def cut_chunk(chunk: Chunk, target: Path, cutter: AudioCutter) -> int | None:
    """Write a chunk's audio and return where it ends (ms): of one in which its file breaks off, there.

    Raise CannotCut where it is not all there for any other reason, OSError where a disk will not have it.
    """
    start_s, end_s = stretch_of(chunk)
    cutter.cut(Path(chunk.audio_path), start_s, end_s, target)
    length_s = cutter.length_s(target) or 0.0
    if end_s == math.inf or end_s - start_s - length_s <= _SLACK_S:
        return chunk.end_ms
    if length_s and end_s - (cutter.promised_s(Path(chunk.audio_path)) or 0.0) <= _SLACK_S:
        return chunk.start_ms + round(length_s * 1000)
    target.unlink(missing_ok=True)
    ends = f"{chunk.audio_path} ends at {start_s + length_s:.3f} s"
    raise CannotCut(f"{ends}, so the chunk from {start_s:.3f} s to {end_s:.3f} s is not all there")


def there_s(chunk: Chunk, cutter: AudioCutter) -> float | None:
    """Return how much of a chunk's audio is there, before anything is cut; None: nobody can tell."""
    length_s = cutter.length_s(Path(chunk.audio_path))
    if not chunk.is_cut or length_s is None or chunk.audio_s is None:
        return length_s or chunk.audio_s
    there = length_s - chunk.start_ms / 1000
    return there if 0 < there < chunk.audio_s - _SLACK_S else chunk.audio_s


def short_words(result: ChunkResult) -> str | None:
    """Return what to say of a chunk that was done as far as its file goes; None: it was all there."""
    chunk, found_s = result.chunk, result.audio_s
    if not (result.ok and chunk.is_cut) or found_s is None or (chunk.audio_s or 0.0) - found_s <= _SLACK_S:
        return None
    breaks = f"{chunk.audio_path} breaks off at {chunk.start_ms / 1000 + found_s:.3f} s"
    return f"{breaks}: {found_s:.3f} s of the {chunk.audio_s:g} s of this chunk were there, and are done"


def cut_words(chunk: Chunk) -> str:
    """Return how people know a chunk's audio."""
    if not chunk.is_cut:
        return chunk.audio_path
    start_s, end_s = stretch_of(chunk)
    return f"{chunk.audio_path} from {start_s:g} s to {'its end' if end_s == math.inf else f'{end_s:g} s'}"
