"""The audio of a chunk: cut out of a longer file, or given to the engine piece by piece and joined again.

The joint of two pieces is the middle of the stretch that both have. What lies wholly beyond it is left to the other
piece, which has more of its surroundings. What reaches across it, and was found in both, is one detection: it begins
as the first piece has it, ends as the second has it, and has the higher score. What reaches across it and was found in
one alone stays.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.model import Chunk, ChunkResult, ChunkStarted, Detection
from badcjobs.seams import Session
from badcjobs.sources.audio_files import explain_link
from badcjobs.sources.cutter import AudioCutter, CannotCut, NotThere

_SLACK_S = 1.0  # recorders round, and are not exact
LONGEST_KEPT_STEM = 50  # letters, of up to four bytes; a name may have 255 bytes in all
# HawkEars listens to windows of 3 s: with so much audio on each side of a joint no window near it is cut short.
OVERLAP_S = 6.0
# HawkEars makes its spectrograms in stretches of three windows, and drifts within each: a piece that begins where such
# a stretch does has the very spectrograms of the whole. Measured with HawkEars 2.3 on 120 s in two pieces, 6,337
# detections: begun at a multiple of 9 s all are found again with the same times, and 10 have another score; begun at a
# multiple of 3 s alone nearly half of them have other times. (Its heuristics count per file, and so per piece: no cut
# can change that.)
GRID_S = 9.0
# Its low-band model has windows of 4 s, and so stretches of 12 s. Pieces that are long enough begin where both do.
WIDE_GRID_S = 36.0
_MOST_PIECES = 1 << 16  # of a week; a length beyond that is a mistake


def cut_name(chunk: Chunk) -> str:
    """Return what the file is called; the recording's name comes first, for engines look for a date there."""
    end = "" if chunk.end_ms is None else str(chunk.end_ms)
    return f"{Path(chunk.audio_path).stem[:LONGEST_KEPT_STEM]}~{chunk.start_ms}-{end}.wav"


def stretch_of(chunk: Chunk) -> tuple[float, float]:
    """Return the seconds where a chunk begins and ends in its file; an unknown end is that of the file."""
    return chunk.start_ms / 1000, math.inf if chunk.end_ms is None else chunk.end_ms / 1000


def check_audio(chunk: Chunk) -> None:
    """Raise NotThere where a chunk's file is missing, CannotCut where it is not the one that was listed.

    Only of a file that was listed, or that has to be cut; about others the engine will say.
    """
    listed = chunk.fingerprint
    if listed.audio_bytes is None and not chunk.is_cut:
        return
    try:
        status = os.stat(chunk.audio_path)  # noqa: PTH116 - a path as it came, in a shared place
    except (FileNotFoundError, NotADirectoryError) as error:
        path = Path(chunk.audio_path)
        what, fetch = explain_link(path) if path.is_symlink() else ("no such file:", None)
        # The line to paste comes last: where an error is shown in one line, it is that one.
        raise NotThere(f"{what} {path}" + (f": {fetch} {shlex.quote(path.name)}" if fetch else "")) from error
    except OSError:
        return  # the engine will say why it cannot be read
    is_same = (status.st_size, status.st_mtime_ns) == (listed.audio_bytes, listed.audio_mtime_ns)
    if listed.audio_bytes is not None and not is_same:
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


def available_s(chunk: Chunk, cutter: AudioCutter) -> float | None:
    """Return how much of a chunk's audio is there, before anything is cut; None: not known."""
    length_s = cutter.length_s(Path(chunk.audio_path))
    if not chunk.is_cut or length_s is None or chunk.audio_s is None:
        return length_s or chunk.audio_s
    there = length_s - chunk.start_ms / 1000
    return there if 0 < there < chunk.audio_s - _SLACK_S else chunk.audio_s


def is_truncated(result: ChunkResult) -> bool:
    """Say whether a chunk was done only as far as its file goes."""
    found_s, chunk = result.audio_s, result.chunk
    return result.ok and chunk.is_cut and found_s is not None and (chunk.audio_s or 0.0) - found_s > _SLACK_S


def describe_audio(chunk: Chunk) -> str:
    """Return how people know a chunk's audio."""
    if not chunk.is_cut:
        return chunk.audio_path
    start_s, end_s = stretch_of(chunk)
    return f"{chunk.audio_path} from {start_s:g} s to {'its end' if end_s == math.inf else f'{end_s:g} s'}"


# --- in pieces --------------------------------------------------------------------------------------------------------


Stretch = tuple[float, float]  # begin and end of a piece in the whole, in seconds


def plan_pieces(audio_s: float, pieces: int) -> list[Stretch]:
    """Return up to so many stretches of nearly equal length that cover the audio and share OVERLAP_S with the next."""
    if pieces < 2:
        return [(0.0, audio_s)]
    share_s = (audio_s - OVERLAP_S) / pieces
    grid_s = WIDE_GRID_S if share_s >= 4 * WIDE_GRID_S else GRID_S
    step_s = max(1, math.ceil(share_s / grid_s)) * grid_s
    count = max(1, math.ceil((audio_s - OVERLAP_S) / step_s))
    return [(n * step_s, min(audio_s, (n + 1) * step_s + OVERLAP_S)) for n in range(count)]


def longest_piece_s(audio_s: float, pieces: int) -> float:
    """Return how long the longest of so many pieces is."""
    return max(end_s - start_s for start_s, end_s in plan_pieces(audio_s, pieces))


def pieces_shorter_than(audio_s: float, limit_s: float) -> int | None:
    """Return into how many pieces (2, 4, 8, …) to cut, so that each is shorter than a limit; None: they cannot be."""
    pieces, before_s = 2, audio_s
    while pieces <= _MOST_PIECES and (longest_s := longest_piece_s(audio_s, pieces)) < before_s:
        if longest_s < limit_s:
            return pieces
        pieces, before_s = pieces * 2, longest_s
    return None


def join_detections(heard: Sequence[tuple[Stretch, Sequence[Detection]]]) -> tuple[Detection, ...]:
    """Return what was heard in the pieces, in order, as if it had been heard in the whole."""
    whole: list[Detection] = []
    end_ms = 0
    for (start_s, end_s), found in heard:
        start_ms = round(start_s * 1000)
        moved = [replace(d, start_ms=d.start_ms + start_ms, end_ms=d.end_ms + start_ms) for d in found]
        whole = _join(whole, moved, (start_ms + end_ms) // 2) if whole or start_ms else moved
        end_ms = round(end_s * 1000)
    return tuple(sorted(whole, key=lambda d: (d.start_ms, d.end_ms, d.label)))


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
    """One chunk that is done piece by piece: whatever happens is the fault of the piece at hand."""

    session: Session
    chunk: Chunk
    audio_s: float
    pieces: int
    cutter: AudioCutter
    folder: Path
    piece_s: float = 0.0  # the length of the piece at hand
    begun_at_ms: int | None = None  # None: no piece has begun
    problem: CannotCut | OSError | None = None  # why a piece could not be cut

    def process(self) -> Iterator[ChunkStarted | ChunkResult]:
        """Yield the begin and the result of the whole chunk; none where it was stopped, or ``problem`` says why."""
        chunk, heard, result = self.chunk, list[tuple[Stretch, Sequence[Detection]]](), None
        for start_s, end_s in plan_pieces(self.audio_s, self.pieces):
            self.piece_s = end_s - start_s
            try:
                piece = self._cut(start_s, end_s)
            except (CannotCut, OSError) as problem:
                self.problem = problem
                return
            result = None
            for news in self.session.process([piece]):
                if isinstance(news, ChunkResult):
                    result = news
                if self.begun_at_ms is None:
                    self.begun_at_ms = news.at_ms if isinstance(news, ChunkStarted) else news.started_at_ms
                    yield ChunkStarted(chunk, self.begun_at_ms)
            Path(piece.audio_path).unlink(missing_ok=True)
            if result is None:
                return  # interrupted or killed: the whole chunk has no answer
            result = replace(result, chunk=chunk, started_at_ms=self.begun_at_ms or result.started_at_ms)
            if not result.ok:
                said = (result.error or "").replace(piece.audio_path, chunk.audio_path)
                where = f"in its piece from {start_s:.0f} s to {end_s:.0f} s"
                yield replace(result, pieces=self.pieces, error=f"{where}: {said}")
                return
            heard.append(((start_s, end_s), result.detections))
        if result is not None:
            audio_s = self.audio_s if chunk.audio_s is None or chunk.is_cut else chunk.audio_s
            yield replace(result, detections=join_detections(heard), audio_s=audio_s, pieces=len(heard))

    def _cut(self, start_s: float, end_s: float) -> Chunk:
        chunk, source = self.chunk, Path(self.chunk.audio_path)
        check_audio(chunk)
        start_ms, end_ms = round(start_s * 1000), round(end_s * 1000)
        name = f"{start_ms // 1000}s"
        self.folder.mkdir(parents=True, exist_ok=True)
        target = (self.folder / f"{source.stem[:LONGEST_KEPT_STEM]}~{name}.wav").absolute()
        begin_s = chunk.start_ms / 1000 if chunk.is_cut else 0.0  # of the chunk in its file
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
