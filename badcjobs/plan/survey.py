"""What one reading of a source has shown: lengths, and whatever is worth a line."""

from __future__ import annotations

import heapq
import shlex
from collections import Counter
from dataclasses import dataclass, field

from badcjobs.plan.lengths import Lengths

EXAMPLES, LONGEST_SHOWN = 20, 3


@dataclass(slots=True)
class Survey:
    """The tally of a source, chunk by chunk; names are kept of a few examples only."""

    lengths: Lengths = field(default_factory=Lengths)
    empty: int = 0
    cut: int = 0  # chunks that are parts of longer files
    shared_ms: int = 0  # of audio that two neighbours in a recording both have
    rows_alone: bool = False  # all of it is manifests, whose rows --chunk-length does not touch
    measured: int = 0  # files whose header was read
    rates_hz: Counter[int] = field(default_factory=Counter)  # sample rate → files
    unknown_names: list[str] = field(default_factory=list)
    unreadable: int = 0  # files that are there, and cannot be read from here; of unknown length, too
    unreadable_names: list[str] = field(default_factory=list)  # each with the reason
    unreadable_fix: str | None = None
    empty_names: list[str] = field(default_factory=list)
    broken: int = 0  # files that have less audio than their header says
    broken_names: list[str] = field(default_factory=list)
    nothing_there: int = 0  # chunks that will fail: their file breaks off before them
    not_there: int = 0  # folders of which a first file was looked for in vain
    not_there_names: list[str] = field(default_factory=list)
    passed_over: tuple[str, ...] = ()  # what of folders nobody looks at, in words
    left_out: int = 0  # rows that cannot be planned
    left_out_missing: int = 0  # so many of these because their audio is not there, or cannot be used
    left_out_folders: int = 0  # folders that nobody may look into, with all that is in there
    left_out_sources: int = 0  # sources of which not one row can be
    left_out_lines: tuple[str, ...] = ()  # the first mistakes
    left_out_fix: str | None = None
    _longest: list[tuple[int, int, str]] = field(default_factory=list)
    _shortest_shown_ms: int = 0

    def add(self, length_ms: int | None, path: str, chunk_id: str) -> None:
        """Take the next chunk."""
        self.lengths.add(length_ms)
        if length_ms is None:
            _keep(self.unknown_names, path)
        elif length_ms <= 0:
            self.empty += 1
            _keep(self.empty_names, path)
        elif length_ms > self._shortest_shown_ms:
            heapq.heappush(self._longest, (length_ms, -self.lengths.rows, f"{chunk_id} in {path}"))
            if len(self._longest) > LONGEST_SHOWN:
                heapq.heappop(self._longest)  # of equal ones the first stay
                self._shortest_shown_ms = self._longest[0][0]

    def add_unreadable(self, path: str, base: str, why: str) -> None:
        """Take the next chunk, whose file cannot be read; a relative path is put behind ``base``."""
        self.lengths.add(None)
        self.unreadable += 1
        self.unreadable_fix = self.unreadable_fix or f"ls -l {shlex.quote(base + path.removeprefix('./'))}"
        _keep(self.unreadable_names, f"{path}: {why}")

    def add_broken(self, there_ms: int, path: str, chunk_id: str) -> None:
        """Take the next chunk, in or before which its file breaks off."""
        if there_ms:
            self.add(there_ms, path, chunk_id)
        else:
            self.lengths.add(0)
            self.nothing_there += 1

    @property
    def untold(self) -> int:
        """How many files can be read, and have a header that does not tell how long they are."""
        return self.lengths.unknown - self.unreadable

    @property
    def left_out_words(self) -> str:
        """Return how many rows and sources cannot be planned; empty: all can."""
        counts = (
            (self.left_out, "row"), (self.left_out_folders, "closed folder"), (self.left_out_sources, "whole source")
        )  # fmt: skip
        return " and ".join(f"{many:,} {one}{'' if many == 1 else 's'}" for many, one in counts if many)

    @property
    def left_out_fate(self) -> str:
        """Return what a run would do with what is left out."""
        many = self.left_out + self.left_out_folders + self.left_out_sources
        them = "it" if many == 1 else "them"
        if not self.left_out_missing:
            return f"refuse {them}"
        if self.left_out_missing < many:
            return "refuse them, or fail those whose audio cannot be used"
        return f"fail {them}, for the audio cannot be used"

    @property
    def longest(self) -> list[tuple[int, str]]:
        """Length and name of the longest ones, the longest first."""
        return [(length_ms, name) for length_ms, _, name in sorted(self._longest, reverse=True)]


def _keep(names: list[str], name: str) -> None:
    if len(names) < EXAMPLES:
        names.append(name)
