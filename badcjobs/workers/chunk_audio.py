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
from badcjobs.store.overlaps import Heard, Sound, join_overlaps
from badcjobs.workers import policy

SLACK_S = 1.0  # recorders are not exact
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
_AUDIO_ERRORS = (policy.BAD_AUDIO, policy.MISSING_AUDIO)
_MAY_BE_FILE = (*_AUDIO_ERRORS, policy.ENGINE_ERROR, policy.EXIT_CODE, policy.NO_OUTPUT, policy.NO_PROGRAM)
_COUNTS = [2**n for n in range(1, 17)]  # of pieces: enough for a week; a longer file is a mistake


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
    if listed.audio_bytes is not None:
        state = (status.st_size, status.st_mtime_ns)
        if state != (listed.audio_bytes, listed.audio_mtime_ns):
            raise CannotCut(f"{chunk.audio_path} has changed since the work was listed; run the same command again")
    has_header = status.st_size == 0 or chunk.audio_path.lower().endswith((".wav", ".flac"))
    if has_header and not chunk.is_cut and read_header(chunk.audio_path).fault not in ("", UNREADABLE_FILE):
        raise CannotCut("the engine did not get this file")


def cut_chunk(chunk: Chunk, target: Path, cutter: AudioCutter) -> int | None:
    """Write a chunk's audio and return its end (ms); if the file is truncated within the chunk, that is its end.

    Raise CannotCut if audio is missing for another reason, OSError if the disk cannot be written.
    """
    start_s, end_s = stretch_of(chunk)
    source = Path(chunk.audio_path)
    cutter.cut(source, start_s, end_s, target)
    length_s = cutter.length_s(target) or 0.0
    if end_s == math.inf or end_s - start_s - length_s <= SLACK_S:
        return chunk.end_ms
    if length_s and end_s - (cutter.promised_s(source) or 0.0) <= SLACK_S:
        return chunk.start_ms + round(length_s * 1000)
    target.unlink(missing_ok=True)
    ends = f"{chunk.audio_path} ends at {start_s + length_s:.3f} s"
    raise CannotCut(f"{ends}, before the end of the chunk from {start_s:.3f} s to {end_s:.3f} s")


def available_s(chunk: Chunk, cutter: AudioCutter) -> float | None:
    """Return how many seconds of a chunk's audio exist in its file; None: not known."""
    length_s = cutter.length_s(Path(chunk.audio_path))
    if not chunk.is_cut or length_s is None:
        return length_s or chunk.audio_s
    there_s = length_s - chunk.start_ms / 1000
    if there_s > 0 and (chunk.audio_s is None or there_s < chunk.audio_s - SLACK_S):
        return there_s
    return chunk.audio_s


def describe_audio(chunk: Chunk) -> str:
    """Describe a chunk's audio for a message: its path and, if it is cut out, the times."""
    if not chunk.is_cut:
        return chunk.audio_path
    start_s, end_s = stretch_of(chunk)
    end = "its end" if end_s == math.inf else f"{end_s:g} s"
    return f"{chunk.audio_path} from {start_s:g} s to {end}"


def name_fault(result: ChunkResult) -> ChunkResult:
    """Return a failure with the class and the reason that its file gives, if that gives no audio or is truncated."""
    path = result.chunk.audio_path
    if result.error_class not in _MAY_BE_FILE or not Path(path).is_file():  # opening a pipe blocks
        return result
    header = read_header(path)
    fault = header.fault
    if header.there_s is not None and result.error_class in _AUDIO_ERRORS:
        fault = BROKEN_AUDIO
    if not fault:
        return result
    if fault == UNREADABLE_FILE and header.why != os.strerror(errno.EACCES):
        return result  # the filesystem fails
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
    starts_s = [number * step_s for number in range(count)]
    return [(start_s, min(audio_s, start_s + step_s + OVERLAP_S)) for start_s in starts_s]


def longest_piece_s(audio_s: float, pieces: int) -> float:
    """Return the length of the longest of this many pieces."""
    return max(end_s - start_s for start_s, end_s in plan_pieces(audio_s, pieces))


def pieces_shorter_than(audio_s: float, limit_s: float) -> int | None:
    """Return how many pieces (2, 4, 8, …) make each shorter than a limit; None: no number does."""
    limit_s = min(limit_s, audio_s)
    return next((pieces for pieces in _COUNTS if longest_piece_s(audio_s, pieces) < limit_s), None)


def join_detections(pieces: Sequence[tuple[Stretch, Sequence[Detection]]]) -> tuple[Detection, ...]:
    """Join the detections of consecutive pieces into those of the complete chunk."""
    heard = []
    end_before_ms: int | None = None
    for (start_s, end_s), detections in pieces:
        start_ms = round(start_s * 1000)
        joint_ms = None if end_before_ms is None else (start_ms + end_before_ms) // 2
        end_before_ms = round(end_s * 1000)
        sounds = [Sound(d.start_ms + start_ms, d.end_ms + start_ms, d.label, d.label_name, d.score) for d in detections]
        heard.append(Heard(start_ms, joint_ms, sounds))
    joined = [Detection(s.start_ms, s.end_ms, s.label, s.score, s.label_name) for s in join_overlaps(heard)]
    return tuple(sorted(joined, key=lambda detection: (detection.start_ms, detection.end_ms, detection.label)))


@dataclass
class PieceRun:
    """Processes one chunk piece by piece; a failure belongs to the current piece."""

    session: Session
    chunk: Chunk
    audio_s: float
    pieces: int
    cutter: AudioCutter
    folder: Path
    started_at_ms: int | None = None  # None: no piece was started
    problem: CannotCut | OSError | None = None  # why a piece could not be cut

    def process(self) -> Iterator[ChunkStarted | ChunkResult]:
        """Yield the start and the result of the chunk; no result if it was stopped, or if ``problem`` is set."""
        done: list[tuple[Stretch, ChunkResult]] = []
        for stretch in plan_pieces(self.audio_s, self.pieces):
            start_s, end_s = stretch
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
                    yield ChunkStarted(self.chunk, self.started_at_ms)
            Path(piece.audio_path).unlink(missing_ok=True)
            if result is None:
                return  # interrupted or killed: the chunk has no result
            result = replace(result, chunk=self.chunk, started_at_ms=self.started_at_ms or result.started_at_ms)
            if not result.ok:
                error = (result.error or "").replace(piece.audio_path, self.chunk.audio_path)
                error = f"in its piece from {start_s:.0f} s to {end_s:.0f} s: {error}"
                yield replace(result, pieces=self.pieces, error=error)
                return
            done.append((stretch, result))
        yield self._join(done)

    def _join(self, done: Sequence[tuple[Stretch, ChunkResult]]) -> ChunkResult:
        """Return the result of the complete chunk."""
        audio_s = self.chunk.audio_s
        if audio_s is None or self.chunk.is_cut:
            audio_s = self.audio_s
        last_result = done[-1][1]
        return replace(
            last_result,
            detections=join_detections([(stretch, result.detections) for stretch, result in done]),
            rarities=join_detections([(stretch, result.rarities) for stretch, result in done]),
            audio_s=audio_s,
            pieces=len(done),
        )

    def _cut(self, start_s: float, end_s: float) -> Chunk:
        """Cut a piece, from its start to its end within the chunk."""
        chunk = self.chunk
        source = Path(chunk.audio_path)
        check_audio(chunk)
        start_ms = round(start_s * 1000)
        name = f"{start_ms // 1000}s"
        self.folder.mkdir(parents=True, exist_ok=True)
        target = (self.folder / f"{source.stem[:LONGEST_KEPT_STEM]}~{name}.wav").absolute()
        chunk_start_s = chunk.start_ms / 1000 if chunk.is_cut else 0.0  # in its file
        self.cutter.cut(source, chunk_start_s + start_s, chunk_start_s + end_s, target)
        return Chunk(
            chunk.recording_id,
            f"{chunk.chunk_id}~{name}",
            chunk.source_path,
            str(target),
            start_ms=chunk.start_ms + start_ms,
            end_ms=chunk.start_ms + round(end_s * 1000),
            piece_of=chunk.chunk_id,
            place=chunk.place,
        )
