"""The audio of a chunk: cut out of a longer file, or given to the engine piece by piece and joined again.

Two pieces overlap, and their joint is the middle of the overlap. A detection that is completely beyond the joint is
taken from the other piece, which has more audio around it. A detection that crosses the joint and is in both pieces
becomes one: start of the first, end of the second, the higher score. One that crosses it in one piece only is kept.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.model import BROKEN_AUDIO, UNREADABLE_FILE, Chunk, ChunkResult, ChunkStarted, Detection
from badcjobs.seams import Session
from badcjobs.sources.audio_files import LONGEST_POINTER, explain_missing, read_header, read_pointer
from badcjobs.sources.cutter import AudioCutter, CannotCut, NotThere
from badcjobs.workers import retry

_SLACK_S = 1.0  # recorders are not exact
LONGEST_KEPT_STEM = 50  # characters of up to 4 bytes; a file name may have 255 bytes
# HawkEars analyses windows of 3 s: with this overlap no window near a joint is cut short.
OVERLAP_S = 6.0
# HawkEars computes spectrograms in blocks of three windows and drifts within each block. A piece that starts at a block
# has the same spectrograms as the complete file. Measured with HawkEars 2.3 on 120 s in two pieces, 6,337 detections:
# with a start at a multiple of 9 s all are found with the same times, and 10 have another score; with a start at a
# multiple of 3 s nearly half of them have other times. (Its heuristics count per file, and so per piece, in any case.)
GRID_S = 9.0
# Its low-band model has windows of 4 s, so blocks of 12 s. Pieces that are long enough start at a multiple of both.
WIDE_GRID_S = 36.0
# Failures whose reason may be the file.
_OF_FILES = (
    retry.BAD_AUDIO, retry.MISSING_AUDIO, retry.ENGINE_ERROR, retry.EXIT_CODE, retry.NO_OUTPUT, retry.NO_PROGRAM
)  # fmt: skip
_MOST_PIECES = 1 << 16  # enough for a week; a longer file is a mistake


def cut_name(chunk: Chunk) -> str:
    """Return the name of the cut file; the recording's name comes first, because engines look for a date in it."""
    end = "" if chunk.end_ms is None else str(chunk.end_ms)
    return f"{Path(chunk.audio_path).stem[:LONGEST_KEPT_STEM]}~{chunk.start_ms}-{end}.wav"


def stretch_of(chunk: Chunk) -> tuple[float, float]:
    """Return the start and end of a chunk in its file, in seconds; an unknown end is infinite."""
    return chunk.start_ms / 1000, math.inf if chunk.end_ms is None else chunk.end_ms / 1000


def check_audio(chunk: Chunk) -> None:
    """Raise NotThere if a chunk's file is missing, CannotCut if it has no audio or has changed since it was listed.

    Checks only files with a known size and files that must be cut; the engine reports errors of other files. Whether
    there is audio in it is known of WAV and FLAC: an engine may take a file without audio for one without birds.
    """
    listed = chunk.fingerprint
    if listed.audio_bytes is None and not chunk.is_cut:
        return
    try:
        status = os.stat(chunk.audio_path)  # noqa: PTH116 - the path as given
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotThere(explain_missing(Path(chunk.audio_path))) from error
    except OSError:
        return  # the engine will report why it cannot be read
    if 0 < status.st_size <= LONGEST_POINTER and read_pointer(chunk.audio_path):
        raise NotThere(explain_missing(Path(chunk.audio_path)))
    is_same = (status.st_size, status.st_mtime_ns) == (listed.audio_bytes, listed.audio_mtime_ns)
    if listed.audio_bytes is not None and not is_same:
        raise CannotCut(f"{chunk.audio_path} has changed since the work was listed; run the same command again")
    is_known = not status.st_size or chunk.audio_path.lower().endswith((".wav", ".flac"))
    if is_known and not chunk.is_cut and read_header(chunk.audio_path).fault not in ("", UNREADABLE_FILE):
        raise CannotCut("the engine did not get this file")


def cut_chunk(chunk: Chunk, target: Path, cutter: AudioCutter) -> int | None:
    """Write a chunk's audio and return its end (ms); if the file is truncated within the chunk, that is its end.

    Raise CannotCut if audio is missing for another reason, OSError if the disk cannot be written.
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
    raise CannotCut(f"{ends}, before the end of the chunk from {start_s:.3f} s to {end_s:.3f} s")


def available_s(chunk: Chunk, cutter: AudioCutter) -> float | None:
    """Return how many seconds of a chunk's audio exist in its file; None: not known."""
    length_s = cutter.length_s(Path(chunk.audio_path))
    if not chunk.is_cut or length_s is None or chunk.audio_s is None:
        return length_s or chunk.audio_s
    there = length_s - chunk.start_ms / 1000
    return there if 0 < there < chunk.audio_s - _SLACK_S else chunk.audio_s


def is_truncated(result: ChunkResult) -> bool:
    """Return whether a chunk was done only up to the end of its truncated file."""
    found_s, chunk = result.audio_s, result.chunk
    return result.ok and chunk.is_cut and found_s is not None and (chunk.audio_s or 0.0) - found_s > _SLACK_S


def describe_audio(chunk: Chunk) -> str:
    """Describe a chunk's audio for a message: its path and, if it is cut out, the times."""
    if not chunk.is_cut:
        return chunk.audio_path
    start_s, end_s = stretch_of(chunk)
    return f"{chunk.audio_path} from {start_s:g} s to {'its end' if end_s == math.inf else f'{end_s:g} s'}"


def name_fault(result: ChunkResult) -> ChunkResult:
    """Return a failure with the class and the reason that its file gives, if that gives no audio or is truncated."""
    if result.error_class not in _OF_FILES or not Path(result.chunk.audio_path).is_file():  # opening a pipe blocks
        return result
    header, path = read_header(result.chunk.audio_path), result.chunk.audio_path
    fault, is_plain = header.fault, result.error_class in (retry.BAD_AUDIO, retry.MISSING_AUDIO)
    if header.there_s is not None and is_plain:
        fault = BROKEN_AUDIO
    if not fault or (fault == UNREADABLE_FILE and header.why != os.strerror(errno.EACCES)):
        return result  # also if the filesystem fails
    return replace(result, error_class=fault, error=f"{result.error or ''}\n{path}: {header.why}".lstrip())


# --- in pieces --------------------------------------------------------------------------------------------------------


Stretch = tuple[float, float]  # start and end of a piece within the chunk, in seconds


def plan_pieces(audio_s: float, pieces: int) -> list[Stretch]:
    """Return at most this many stretches of nearly equal length that cover the audio and overlap by OVERLAP_S."""
    if pieces < 2:
        return [(0.0, audio_s)]
    share_s = (audio_s - OVERLAP_S) / pieces
    grid_s = WIDE_GRID_S if share_s >= 4 * WIDE_GRID_S else GRID_S
    step_s = max(1, math.ceil(share_s / grid_s)) * grid_s
    count = max(1, math.ceil((audio_s - OVERLAP_S) / step_s))
    return [(n * step_s, min(audio_s, (n + 1) * step_s + OVERLAP_S)) for n in range(count)]


def longest_piece_s(audio_s: float, pieces: int) -> float:
    """Return the length of the longest of this many pieces."""
    return max(end_s - start_s for start_s, end_s in plan_pieces(audio_s, pieces))


def pieces_shorter_than(audio_s: float, limit_s: float) -> int | None:
    """Return how many pieces (2, 4, 8, …) make each shorter than a limit; None: no number does."""
    pieces, before_s = 2, audio_s
    while pieces <= _MOST_PIECES and (longest_s := longest_piece_s(audio_s, pieces)) < before_s:
        if longest_s < limit_s:
            return pieces
        pieces, before_s = pieces * 2, longest_s
    return None


def join_detections(pieces: Sequence[tuple[Stretch, Sequence[Detection]]]) -> tuple[Detection, ...]:
    """Join the detections of consecutive pieces into those of the complete chunk."""
    joined: list[Detection] = []
    end_ms = 0
    for (start_s, end_s), found in pieces:
        start_ms = round(start_s * 1000)
        moved = [replace(d, start_ms=d.start_ms + start_ms, end_ms=d.end_ms + start_ms) for d in found]
        joined = _join(joined, moved, (start_ms + end_ms) // 2) if joined or start_ms else moved
        end_ms = round(end_s * 1000)
    return tuple(sorted(joined, key=lambda d: (d.start_ms, d.end_ms, d.label)))


def _join(before: Sequence[Detection], after: Sequence[Detection], joint_ms: int) -> list[Detection]:
    joined = [d for d in before if d.end_ms <= joint_ms]
    crossing = [d for d in before if d.start_ms < joint_ms < d.end_ms]
    for late in (d for d in after if d.end_ms > joint_ms):
        twins = [d for d in crossing if d.label == late.label] if late.start_ms < joint_ms else []
        if twins:
            early = min(twins, key=lambda d: abs(d.start_ms - late.start_ms) + abs(d.end_ms - late.end_ms))
            crossing.remove(early)
            louder = max(early, late, key=lambda d: -math.inf if d.score is None else d.score)
            late = replace(louder, start_ms=early.start_ms, end_ms=late.end_ms)
        joined.append(late)
    return joined + crossing


@dataclass
class PieceRun:
    """Processes one chunk piece by piece; a failure belongs to the current piece."""

    session: Session
    chunk: Chunk
    audio_s: float
    pieces: int
    cutter: AudioCutter
    folder: Path
    piece_s: float = 0.0  # the length of the current piece
    started_at_ms: int | None = None  # None: no piece was started
    problem: CannotCut | OSError | None = None  # why a piece could not be cut

    def process(self) -> Iterator[ChunkStarted | ChunkResult]:
        """Yield the start and the result of the chunk; no result if it was stopped, or if ``problem`` is set."""
        chunk, done, result = self.chunk, list[tuple[Stretch, Sequence[Detection]]](), None
        for start_s, end_s in plan_pieces(self.audio_s, self.pieces):
            self.piece_s = end_s - start_s
            try:
                piece = self._cut(start_s, end_s)
            except (CannotCut, OSError) as problem:
                self.problem = problem
                return
            result = None
            for event in self.session.process([piece]):
                if isinstance(event, ChunkResult):
                    result = event
                if self.started_at_ms is None:
                    self.started_at_ms = event.at_ms if isinstance(event, ChunkStarted) else event.started_at_ms
                    yield ChunkStarted(chunk, self.started_at_ms)
            Path(piece.audio_path).unlink(missing_ok=True)
            if result is None:
                return  # interrupted or killed: the chunk has no result
            result = replace(result, chunk=chunk, started_at_ms=self.started_at_ms or result.started_at_ms)
            if not result.ok:
                error = (result.error or "").replace(piece.audio_path, chunk.audio_path)
                where = f"in its piece from {start_s:.0f} s to {end_s:.0f} s"
                yield replace(result, pieces=self.pieces, error=f"{where}: {error}")
                return
            done.append(((start_s, end_s), result.detections))
        if result is not None:
            audio_s = self.audio_s if chunk.audio_s is None or chunk.is_cut else chunk.audio_s
            yield replace(result, detections=join_detections(done), audio_s=audio_s, pieces=len(done))

    def _cut(self, start_s: float, end_s: float) -> Chunk:
        chunk, source = self.chunk, Path(self.chunk.audio_path)
        check_audio(chunk)
        start_ms, end_ms = round(start_s * 1000), round(end_s * 1000)
        name = f"{start_ms // 1000}s"
        self.folder.mkdir(parents=True, exist_ok=True)
        target = (self.folder / f"{source.stem[:LONGEST_KEPT_STEM]}~{name}.wav").absolute()
        begin_s = chunk.start_ms / 1000 if chunk.is_cut else 0.0  # start of the chunk in its file
        self.cutter.cut(source, begin_s + start_s, begin_s + end_s, target)
        return Chunk(
            chunk.recording_id,
            f"{chunk.chunk_id}~{name}",
            chunk.source_path,
            str(target),
            chunk.start_ms + start_ms,
            chunk.start_ms + end_ms,
            piece_of=chunk.chunk_id,
        )
