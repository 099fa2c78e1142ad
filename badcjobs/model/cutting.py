"""Where recordings are cut: which rows of a manifest are stretches of a file, and those of a whole recording. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLACK_MS = 1000  # a row and its file may differ by so much: recorders, and those who round, are not exact
_LEAST_OF_ITS_OWN_MS = 3000  # HawkEars listens to windows of 3 s: a last chunk has one that no other has
_SHORTEST_S = 1.0
_LONGEST_S = 86_400.0
_LEAST_STEP_S = 1.0  # from the begin of one chunk to that of the next


@dataclass(frozen=True, slots=True)
class Cutting:
    """How recordings become chunks.

    ``rows``: whether rows of a manifest are stretches of longer files; None: those that look so. ``chunk_length_s``
    and ``overlap_s`` are for whole recordings (folders, lists, audio files); without a length each is one chunk.
    """

    rows: bool | None = None
    chunk_length_s: float | None = None
    overlap_s: float = 0.0

    @property
    def cuts_recordings(self) -> bool:
        return self.chunk_length_s is not None

    def problems(self) -> list[str]:
        """Return what is wrong with these values, in the words of the command line."""
        length_s, overlap_s = self.chunk_length_s, self.overlap_s
        if length_s is None:
            return [f"--overlap {overlap_s:g} goes with --chunk-length SECONDS"] if overlap_s else []
        found = []
        if not _SHORTEST_S <= length_s <= _LONGEST_S:
            found.append(f"--chunk-length {length_s:g} must be from {_SHORTEST_S:g} to {_LONGEST_S:g} seconds")
        if overlap_s < 0:
            found.append(f"--overlap {overlap_s:g} must not be negative")
        elif length_s - overlap_s < _LEAST_STEP_S and not found:
            least = f"at least {_LEAST_STEP_S:g} s shorter than --chunk-length {length_s:g}"
            found.append(f"--overlap {overlap_s:g} must be {least}, for each chunk begins where the last one is over")
        return found

    def stretches(self, audio_ms: int) -> Sequence[tuple[int, int]]:
        """Return start and end of the chunks of a whole recording."""
        if self.chunk_length_s is None:
            return [(0, audio_ms)]
        return plan_stretches(audio_ms, round(self.chunk_length_s * 1000), round(self.overlap_s * 1000))


AS_IT_COMES = Cutting()


def plan_stretches(audio_ms: int, length_ms: int, overlap_ms: int) -> list[tuple[int, int]]:
    """Return the stretches that cover a recording, each sharing the overlap with the next.

    What would be left for a last one that has less than three seconds of its own goes to the one before.
    """
    step_ms = length_ms - overlap_ms
    more_ms = audio_ms - overlap_ms - _LEAST_OF_ITS_OWN_MS  # where the last one begins at the latest
    count = 1 + max(0, more_ms // step_ms)
    stretches = [(n * step_ms, n * step_ms + length_ms) for n in range(count)]
    return [*stretches[:-1], (stretches[-1][0], audio_ms)]


def is_stretch(start_ms: int, end_ms: int, audio_ms: int) -> bool:
    """Say whether a row can only be a part of its file: that is longer than the row, and reaches to its end."""
    return is_longer(start_ms, end_ms, audio_ms) and not is_beyond(end_ms, audio_ms)


def is_longer(start_ms: int, end_ms: int, audio_ms: int) -> bool:
    """Say whether a file has clearly more audio than its row."""
    return audio_ms - (end_ms - start_ms) > SLACK_MS


def is_beyond(end_ms: int, audio_ms: int) -> bool:
    """Say whether a row ends clearly behind the end of its file."""
    return end_ms - audio_ms > SLACK_MS
