"""Read the sources for check and plan once, from end to end; mistakes are counted and do not stop it."""

from __future__ import annotations

import csv
import heapq
import io
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TextIO

from badcjobs.model import Cutting, PlaceCounts
from badcjobs.sources.badc_manifest import CUT, HEADER, Columns, Manifest
from badcjobs.sources.folder import CLOSED_FOLDER
from badcjobs.sources.mistakes import Mistakes
from badcjobs.sources.open import AudioSource, Sources
from badcjobs.sources.survey import PlannedRow, Surveyor, survey, survey_again
from badcjobs.words import count

Progress = Callable[[int], None]


def read_sources(
    sources: Sources, rows: RowFile | None, progress: Progress, folder: Path | None = None, *, needs_audio: bool = False
) -> Survey:
    """Read everything once; a second time if identities repeat, without the repeated rows."""
    with LeftOut(sources.parts, None if folder is None else folder / "left-out.txt") as mistakes:
        chunks, walk = survey(sources, mistakes, needs_audio=needs_audio)
        tally = Survey(walk, mistakes)
        tally.read(chunks, rows, progress)
        chunks_once = survey_again(sources, walk)
        if chunks_once is not None:
            if rows is not None:
                rows.clear()
            tally = Survey(walk, mistakes)
            tally.read(chunks_once, rows, progress)
    size = tally.walk.size
    guessed_s = size.guessed_s()
    if guessed_s is not None:
        tally.lengths.guess(guessed_s, size.not_here_unknown)
    tally.places = sources.places
    tally.rows_alone = all(isinstance(part, Manifest) for part in sources.parts)
    return tally


# --- lengths ----------------------------------------------------------------------------------------------------------

_UNKNOWN = 2**32 - 1
_MOST_HELD = 512
_LONGEST_MS = 2**32 - 2  # 49 days; whatever is longer fits into no walltime, and counts in full in the sum


class Lengths:
    """The lengths of chunks in their order; None: not known."""

    def __init__(self) -> None:
        self.rows = 0
        self.unknown = 0
        self.empty = 0
        self.known_ms = 0
        self.longest_ms = 0
        self._guess_ms: int | None = None
        self._ms = array("I")
        self._many = array("I")

    def add(self, length_ms: int | None, many: int = 1) -> None:
        """Take the next chunk, or several of one length; neighbours that are equally long are kept together."""
        self.rows += many
        if length_ms is None:
            self.unknown += many
        else:
            self.known_ms += many * length_ms
            self.longest_ms = max(self.longest_ms, length_ms)
            if not length_ms:
                self.empty += many
        kept_ms = _UNKNOWN if length_ms is None else min(length_ms, _LONGEST_MS)
        if self._ms and self._ms[-1] == kept_ms:
            self._many[-1] += many
        else:
            self._ms.append(kept_ms)
            self._many.append(many)

    def cut(self, cutting: Cutting) -> Lengths:
        """Return those of the chunks into which these recordings are cut."""
        cut = Lengths()
        for length_ms, many in self.runs():
            for chunk_ms, chunks in Counter(end - start for start, end in cutting.stretches(length_ms)).items():
                cut.add(chunk_ms, many * chunks)
        return cut

    def guess(self, unknown_s: float, many: int) -> None:
        """Take the estimated length of this many unknown ones together; the mean counts for the others."""
        if many:
            rest_ms = (self.unknown - many) * self.mean_ms
            self._guess_ms = (round(unknown_s * 1000) + rest_ms) // max(1, self.unknown)

    @property
    def guess_ms(self) -> int:
        """The length of a chunk that is not known."""
        return self.mean_ms if self._guess_ms is None else self._guess_ms

    @property
    def mean_ms(self) -> int:
        """The mean of those that are known and have audio, in whole milliseconds; 0: there are none."""
        with_audio = self.rows - self.unknown - self.empty
        return self.known_ms // with_audio if with_audio else 0

    @property
    def total_ms(self) -> int:
        """All of them together; one that is not known counts as guessed."""
        return self.known_ms + self.unknown * self.guess_ms

    def held_s(self, many: int) -> float:
        """Return the mean length of so many chunks that are in progress together: a task begins with the longest."""
        longest = self._longest_ms[:many]
        return sum(longest) / 1000 / max(1, len(longest))

    @cached_property
    def _longest_ms(self) -> list[int]:
        """As many as a task may ever have workers; call it when all have been added."""
        return [ms for ms, many in heapq.nlargest(_MOST_HELD, self.runs()) for _ in range(min(_MOST_HELD, many))]

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield length and number of neighbours that are equally long."""
        guess_ms = self.guess_ms
        for length_ms, many in zip(self._ms, self._many, strict=True):
            yield (guess_ms if length_ms == _UNKNOWN else length_ms), many

    def longer_than(self, limit_ms: float) -> int:
        """Count those that are longer."""
        return sum(many for length_ms, many in self.runs() if length_ms > limit_ms)


# --- the tally, and the rows for the shards ---------------------------------------------------------------------------

EXAMPLES = 20
LONGEST_SHOWN = 3


@dataclass(slots=True)
class Survey:
    """Counts of a source, chunk by chunk, with a few names as examples."""

    walk: Surveyor  # the headers that were read, and the files that are missing
    mistakes: LeftOut
    lengths: Lengths = field(default_factory=Lengths)
    cut: int = 0  # chunks that are parts of longer files
    shared_ms: int = 0  # of audio that two neighbours in a recording both have
    rows_alone: bool = False  # all of it is manifests, whose rows --chunk-length does not touch
    unknown_names: list[str] = field(default_factory=list)
    nothing_there: int = 0  # chunks that will fail: their file ends before them
    longest: list[tuple[int, str]] = field(default_factory=list)  # length and name, the longest first
    places: PlaceCounts | None = None  # None: no place is given
    _before: tuple[str, int, int] = ("", 0, 0)  # the recording of the last chunk with audio, and where that was

    def read(self, rows: Iterable[PlannedRow], kept: RowFile | None, progress: Progress) -> None:
        """Count all rows, and keep them if there is a file for them."""
        for row_number, row in enumerate(rows, 1):
            end_ms = self._end_of(row)
            self.cut += row.is_cut
            if row.fails:
                self.lengths.add(0)
            elif end_ms is None:
                self.lengths.add(None)
                if len(self.unknown_names) < EXAMPLES:
                    self.unknown_names.append(row.path)
            else:
                self.lengths.add(end_ms - row.start_ms)
                self._note_long(end_ms - row.start_ms, row)
                self._note_shared(row, end_ms)
            if kept is not None:
                kept.add(row)
            if not row_number & 0xFF:  # a call for each of a million rows takes too long
                progress(row_number)

    def _end_of(self, row: PlannedRow) -> int | None:
        """Return where a chunk ends: no later than the audio of its truncated file."""
        end_ms = row.end_ms
        if end_ms is None or row.there_ms is None or row.there_ms >= end_ms:
            return end_ms
        self.nothing_there += row.there_ms <= row.start_ms
        return max(row.start_ms, row.there_ms)

    def _note_shared(self, row: PlannedRow, end_ms: int) -> None:
        """Count the audio that a chunk and the one before it both have."""
        recording_id, from_ms, until_ms = self._before
        if row.recording_id == recording_id and row.start_ms < until_ms:
            self.shared_ms += max(0, min(end_ms, until_ms) - max(row.start_ms, from_ms))
        self._before = row.recording_id, row.start_ms, end_ms

    def _note_long(self, length_ms: int, row: PlannedRow) -> None:
        """Keep the name of a chunk that is longer than those that are shown."""
        shown = self.longest
        if len(shown) == LONGEST_SHOWN and length_ms <= shown[-1][0]:
            return
        shown.append((length_ms, f"{row.chunk_id} in {row.path}"))
        shown.sort(key=lambda chunk: -chunk[0])  # of equal ones the first stay
        del shown[LONGEST_SHOWN:]


class RowFile:
    """Rows in a file, written once and then read in turn."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._forget()

    def _forget(self) -> None:
        self._writer = csv.writer(self._file, lineterminator="\r\n")  # so that a name with either of them is quoted
        self._kinds: dict[tuple[str, Columns], int] = {}  # folder of a relative path, columns → number
        self._is_cut = False  # a row has the column CUT

    def add(self, row: PlannedRow) -> None:
        """Store a row."""
        kind = self._kinds.setdefault((row.base, row.columns), len(self._kinds))
        # A row that ends where it begins is refused; without an end, the length comes from the header.
        end_ms = None if row.end_ms is None or row.end_ms <= row.start_ms else row.end_ms
        self._is_cut = self._is_cut or row.cut != ""
        times = (row.start_ms, end_ms, row.cut)
        self._writer.writerow((kind, row.recording_id, row.chunk_id, row.path, *times, *row.fields))

    def clear(self) -> None:
        """Delete all rows."""
        self._file.seek(0)
        self._file.truncate()
        self._forget()

    @property
    def root(self) -> str | None:
        """The folder that all relative paths start from; None: there are none, or they start from several."""
        bases = {base for base, _ in self._kinds if base}
        return bases.pop() if len(bases) == 1 else None

    @property
    def _further(self) -> list[str]:
        """The names of the columns behind those of BADC."""
        names = dict.fromkeys(name for _, columns in self._kinds for name in columns.further_names)
        return [*names, CUT] if self._is_cut else [*names]

    @property
    def header(self) -> str:
        """The columns of every shard, as the first line of a manifest."""
        return f"{_line([*HEADER.split(','), *self._further])}\n"

    def rows(self) -> Iterator[str]:
        """Yield all rows from the first, as lines of a manifest."""
        self._file.seek(0)
        kinds = list(self._kinds)
        further = self._further
        has_root = self.root is not None
        for kind, recording_id, chunk_id, path, start_ms, end_ms, cut, *fields in csv.reader(self._file):
            base, columns = kinds[int(kind)]
            if base and not has_root:
                path = base + path.removeprefix("./")
            row = [recording_id, chunk_id, path, start_ms, end_ms]
            for place in (columns.overlap_ms, columns.sha256, columns.notes):
                row.append("" if place is None else fields[place])
            values = {CUT: cut}
            for name, place in zip(columns.further_names, columns.further, strict=True):
                values[name] = fields[place]
            row += [values.get(name, "") for name in further]
            yield f"{_line(row)}\n"


def _line(row: Sequence[str]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\r\n").writerow(row)
    return text.getvalue()[:-2]


# --- what cannot be planned -------------------------------------------------------------------------------------------


class LeftOut(Mistakes):
    """Mistakes, counted by row: one row may have several.

    With a file, every one is written to it.
    """

    def __init__(self, parts: Sequence[AudioSource], path: Path | None = None) -> None:
        super().__init__([part.name for part in parts])
        self.rows = 0
        self.folders = 0
        self.whole: set[int] = set()  # sources of which not one row could be understood
        self._parts = parts
        self._lines: set[tuple[int, int]] = set()  # source and line of the rows that are counted
        self._path = path
        self._file: TextIO | None = None

    def __enter__(self) -> LeftOut:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, line: int, text: str, *, why: str = "", fix: str | None = None, missing: bool = False) -> None:
        """Note a mistake, and write it down."""
        super().add(line, text, why=why, fix=fix, missing=missing)
        part = self._parts[self.source]
        if line:
            self.rows += (self.source, line) not in self._lines
            self._lines.add((self.source, line))
        elif isinstance(part, Manifest) or text in (part.without_rows, "cannot be read", f"{CLOSED_FOLDER}: ."):
            self.whole.add(self.source)
        elif text.startswith(CLOSED_FOLDER):
            self.folders += 1  # its content is not known
        else:
            self.rows += 1  # a recording in a folder, which has no lines
        if self._path is not None:
            self._file = self._file or self._path.open("w", encoding="utf-8", errors="backslashreplace")
            place = f"{part.name} line {line}:" if line else part.name
            reason = f" ({why})" if why else ""
            self._file.write(f"{place} {text}{reason}\n")

    @property
    def words(self) -> str:
        """How much cannot be planned, as text."""
        numbers = {"row": self.rows, "closed folder": self.folders, "whole source": len(self.whole)}
        return " and ".join(count(number, noun) for noun, number in numbers.items() if number)

    @property
    def fix(self) -> str | None:
        """A line to paste; None: there are no mistakes."""
        error = self.error()
        return None if error is None else error.fix

    def add_unseen(self, count: int) -> None:
        """Count rows that are not read one by one."""
        super().add_unseen(count)
        self.rows += count
