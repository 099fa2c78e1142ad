"""Where long audio is cut into pieces, and how what was heard in the pieces becomes one list again. Pure.

The joint of two pieces is the middle of the stretch that both have. What lies wholly beyond it is the other piece's to
tell, which has more of its surroundings. What reaches across it, and was heard in both, is one detection: it begins
as the first piece has it, ends as the second has it, and has the higher score. What reaches across it and was heard in
one alone stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from badcjobs.model import Detection

# HawkEars listens to windows of 3 s: with so much audio on each side of a joint no window near it is cut short.
OVERLAP_S = 6.0
# HawkEars makes its spectrograms in stretches of three windows, and drifts within each: a piece that begins where such
# a stretch does has the very spectrograms of the whole. Measured with HawkEars 2.3 on 120 s in two pieces, 6,337
# detections: begun at a multiple of 9 s all are found again with the same times, and 10 have another score; begun at a
# multiple of 3 s alone nearly half of them have other times. (Its heuristics count per file, and so per piece: that
# no cut can mend.)
GRID_S = 9.0
# Its low-band model has windows of 4 s, and so stretches of 12 s. Pieces that are long enough begin where both do.
WIDE_GRID_S = 36.0
SHORTEST_S = GRID_S + OVERLAP_S
_MOST_PIECES = 1 << 16  # of a week; a length beyond that is a mistake, and nobody waits for its pieces


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece's place in the whole."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def plan_pieces(audio_s: float, pieces: int) -> list[Stretch]:
    """Return up to so many stretches of nearly equal length that cover the audio and share OVERLAP_S with the next."""
    if pieces < 2:
        return [Stretch(0.0, audio_s)]
    share_s = (audio_s - OVERLAP_S) / pieces
    grid_s = WIDE_GRID_S if share_s >= 4 * WIDE_GRID_S else GRID_S
    step_s = max(1, math.ceil(share_s / grid_s)) * grid_s
    count = max(1, math.ceil((audio_s - OVERLAP_S) / step_s))
    return [Stretch(n * step_s, min(audio_s, (n + 1) * step_s + OVERLAP_S)) for n in range(count)]


def longest_piece_s(audio_s: float, pieces: int) -> float:
    """Return how long the longest of so many pieces is."""
    return max(stretch.length_s for stretch in plan_pieces(audio_s, pieces))


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
    for stretch, found in heard:
        start_ms = round(stretch.start_s * 1000)
        moved = [replace(d, start_ms=d.start_ms + start_ms, end_ms=d.end_ms + start_ms) for d in found]
        whole = _join(whole, moved, (start_ms + end_ms) // 2) if whole or start_ms else moved
        end_ms = round(stretch.end_s * 1000)
    return tuple(sorted(whole, key=lambda d: (d.start_ms, d.end_ms, d.label)))


def _join(before: Sequence[Detection], after: Sequence[Detection], joint_ms: int) -> list[Detection]:
    joined = [d for d in before if d.end_ms <= joint_ms]
    crossing = [d for d in before if d.start_ms < joint_ms < d.end_ms]
    for late in (d for d in after if d.end_ms > joint_ms):
        twins = [d for d in crossing if d.label == late.label] if late.start_ms < joint_ms else []
        if twins:
            early = min(twins, key=lambda d: abs(d.start_ms - late.start_ms) + abs(d.end_ms - late.end_ms))
            crossing.remove(early)
            late = _one_of(early, late)
        joined.append(late)
    return joined + crossing


def _one_of(early: Detection, late: Detection) -> Detection:
    louder = max(early, late, key=lambda d: -math.inf if d.score is None else d.score)
    return replace(louder, start_ms=early.start_ms, end_ms=late.end_ms)
