"""Read the sources for check and plan once, from end to end, and remark on files without audio and what is left out.

Mistakes are counted and do not stop it.
"""

from __future__ import annotations

import csv
import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from badcjobs.model import BROKEN_AUDIO, EMPTY_FILE, NOT_AUDIO, UNREADABLE_FILE, Cutting, PlaceCounts
from badcjobs.paths import shell_line
from badcjobs.planning.findings import Remark, note, problem, warning
from badcjobs.report.rules import PROBLEM, WARNING
from badcjobs.sources.badc_manifest import CARRIED, CUT, HEADER, OF_A_PLACE, Manifest
from badcjobs.sources.mistakes import PERHAPS_AUDIO, SHOWN, Mistakes, left_out_words, with_more
from badcjobs.sources.open import Sources, note_repeats
from badcjobs.sources.places import place_words
from badcjobs.sources.survey import PlannedRow, Surveyor, survey
from badcjobs.words import count, data_size

Progress = Callable[[int], None]


def read_sources(
    sources: Sources,
    progress: Progress,
    rows: RowFile | None = None,
    left_out: TextIO | None = None,
    *,
    needs_audio: bool = False,
) -> Survey:
    """Read everything once; refuse a source in which identities repeat, as a run does."""
    mistakes = Mistakes([part.name for part in sources.parts], left_out)
    chunks, walk = survey(sources, mistakes, needs_audio=needs_audio)
    tally = Survey(walk, mistakes)
    tally.read(chunks, rows, progress)
    if note_repeats(sources.parts, walk):
        mistakes.raise_any()
    size = walk.size
    guessed_s = size.guessed_s()
    if guessed_s is not None:
        tally.lengths.guess(guessed_s, size.not_here_unknown)
    tally.places = sources.places
    tally.rows_alone = all(isinstance(part, Manifest) for part in sources.parts)
    return tally


# --- lengths ----------------------------------------------------------------------------------------------------------

_UNKNOWN = -1
_MOST_HELD = 512


class Lengths:
    """The lengths of chunks in their order; None: not known."""

    def __init__(self) -> None:
        self.rows = 0
        self.unknown = 0
        self.empty = 0
        self.known_ms = 0
        self.longest_ms = 0
        self._guess_ms: int | None = None
        self._ms = array("q")
        self._many = array("I")

    def add(self, length_ms: int | None, many: int = 1) -> None:
        """Take the next chunk, or neighbours that are equally long."""
        self.rows += many
        if length_ms is None:
            self.unknown += many
        else:
            self.known_ms += many * length_ms
            self.longest_ms = max(self.longest_ms, length_ms)
            self.empty += many * (length_ms == 0)
        kept_ms = _UNKNOWN if length_ms is None else length_ms
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
        if self._guess_ms is None:
            return self.mean_ms
        return self._guess_ms

    @property
    def mean_ms(self) -> int:
        """The mean of those that are known and have audio, in whole milliseconds; 0: there are none."""
        with_audio = self.rows - self.unknown - self.empty
        if with_audio:
            return self.known_ms // with_audio
        return 0

    @property
    def total_ms(self) -> int:
        """All of them together; one that is not known counts as guessed."""
        return self.known_ms + self.unknown * self.guess_ms

    @property
    def longest_s(self) -> float | None:
        """The longest that is known; None: none is."""
        if self.unknown == self.rows:
            return None
        return self.longest_ms / 1000

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


@dataclass
class Survey:
    """Counts of a source, chunk by chunk, with a few names as examples."""

    walk: Surveyor  # the headers that were read, and the files that are missing
    mistakes: Mistakes
    lengths: Lengths = field(default_factory=Lengths)
    cut: int = 0  # chunks that are parts of longer files
    shared_ms: int = 0  # of audio that two neighbours in a recording both have
    rows_alone: bool = False  # all of it is manifests, whose rows --chunk-length does not touch
    unknown_names: list[str] = field(default_factory=list)
    nothing_there: int = 0  # chunks that will fail: their file ends before them
    longest: list[tuple[int, str]] = field(default_factory=list)  # length and name, the longest first
    places: PlaceCounts | None = None  # None: no place is given

    def read(
        self,
        rows: Iterable[PlannedRow],
        kept: RowFile | None,
        progress: Progress,
    ) -> None:
        """Count all rows, and keep them if there is a file for them."""
        before = ""  # the recording of the last row with audio, and where that was
        from_ms = until_ms = 0
        for row_number, row in enumerate(rows, 1):
            start_ms, end_ms = row.start_ms, row.end_ms
            if row.there_ms is not None and end_ms is not None and row.there_ms < end_ms:
                end_ms = max(start_ms, row.there_ms)  # no more will be done
                self.nothing_there += end_ms == start_ms
            length_ms = None if end_ms is None else end_ms - start_ms
            if row.fails:
                length_ms = 0
            self.lengths.add(length_ms)
            if length_ms is None:
                if len(self.unknown_names) < EXAMPLES:
                    self.unknown_names.append(row.path)
            elif len(self.longest) < LONGEST_SHOWN or length_ms > self.longest[-1][0]:
                self._note_long(length_ms, row)
            if end_ms is not None and not row.fails:
                if start_ms < until_ms and row.recording_id == before:
                    self.shared_ms += max(0, min(end_ms, until_ms) - max(start_ms, from_ms))
                before = row.recording_id
                from_ms = start_ms
                until_ms = end_ms
            self.cut += row.is_cut
            if kept is not None:
                kept.add(row)
            if not row_number & 0xFF:  # a call for each of a million rows takes too long
                progress(row_number)

    def _note_long(self, length_ms: int, row: PlannedRow) -> None:
        """Keep the name of a chunk that is longer than those that are shown."""
        self.longest.append((length_ms, f"{row.chunk_id} in {row.path}"))
        self.longest.sort(key=lambda chunk: -chunk[0])  # of equal ones the first stay
        del self.longest[LONGEST_SHOWN:]


class RowFile:
    """Rows in a temporary file, written once and then read in turn, for the manifests of the tasks."""

    def __init__(self, file: TextIO, *, has_places: bool) -> None:
        self._file = file
        self.columns = [*HEADER.split(","), CUT]
        if has_places:
            self.columns += OF_A_PLACE
        self._bases: set[str] = set()  # the folders of relative paths
        self._writer = csv.writer(file)

    def add(self, row: PlannedRow) -> None:
        """Store a row."""
        self._bases.add(row.base)
        # A row that ends where it begins is refused; without an end, the length comes from the header.
        end_ms = None if row.end_ms is None or row.end_ms <= row.start_ms else row.end_ms
        overlap_ms, sha256, notes, *place = row.carried or [""] * len(CARRIED)
        times = (row.start_ms, end_ms, overlap_ms)
        fields = (row.recording_id, row.chunk_id, row.path, *times, sha256, notes, row.cut, *place)
        self._writer.writerow((row.base, *fields[: len(self.columns)]))

    @property
    def root(self) -> str | None:
        """The folder that all relative paths start from; None: there are none, or they start from several."""
        bases = self._bases - {""}
        if len(bases) == 1:
            return bases.pop()
        return None

    def rows(self) -> Iterator[list[str]]:
        """Yield all rows from the first."""
        self._file.seek(0)
        has_root = self.root is not None
        for base, *row in csv.reader(self._file):
            if base and not has_root:
                row[2] = base + row[2].removeprefix("./")
            yield row


# --- what is odd about a source ---------------------------------------------------------------------------------------

_GO_ON = "ls -l {path}   (a run does the others; restore the files, then run the same command again)"
# fault → how bad it is, what happens, a line to paste about the first file
_FAULTS = {
    EMPTY_FILE: (WARNING, "without any audio; counted as 0 hours, and would fail", _GO_ON),
    NOT_AUDIO: (PROBLEM, "of no audio format, named like audio; counted as 0 hours, and would fail", "file {path}"),
    BROKEN_AUDIO: (WARNING, "truncated, or with a wrong header; only what is there is counted", _GO_ON),
    UNREADABLE_FILE: (PROBLEM, "that cannot be read from here; counted as 0 hours, and would fail", "ls -l {path}"),
}


def to_facts(survey: Survey) -> dict[str, Any]:
    """Return the chunks and files of a source, and every file that gives no audio, for JSON documents."""
    walk = survey.walk
    size = walk.size
    return {
        "chunks": survey.lengths.rows,
        "longest_s": survey.lengths.longest_s,
        "of_unknown_length": survey.lengths.unknown,
        "files": size.files,
        "bytes": size.total_bytes,
        "files_of_unknown_size": size.unsized,
        "not_fetched": size.not_here,
        "not_fetched_bytes": size.not_here_total_bytes,
        "left_out_files": dict(walk.remarks.left_out),
        "places": survey.places and asdict(survey.places),
        "faults": {fault: names for fault, names in walk.remarks.faults.items() if names},
    }


def check_survey(survey: Survey, quiet: str) -> Iterator[Remark]:
    """Return what is odd about a source; ``quiet`` is the severity of what must not alarm."""
    remarks = survey.walk.remarks
    yield from check_places(survey.places, quiet)
    yield from _check_left_out(survey)
    yield from _check_faults(survey)
    yield from _check_lengths(survey)
    yield from _check_not_here(survey)
    if remarks.left_out:
        may_be_audio = any(ending in PERHAPS_AUDIO for ending in remarks.left_out)
        severity = WARNING if may_be_audio else quiet
        yield Remark(
            severity,
            "left out",
            left_out_words(remarks.left_out),
            "badcjobs guide audio   (formats)",
        )
    for text in remarks.notes():
        yield note("passed over", text)


def check_places(places: PlaceCounts | None, quiet: str) -> Iterator[Remark]:
    """Say how many recordings have a place; those without one would be analysed differently."""
    if places is None:
        return
    if places.left_out:
        fix = "add them to the list, or give all others a place: --config recordings.region=CA-NT"
        yield warning("places", place_words(places), fix)
    else:
        yield Remark(quiet, "places", place_words(places))


def _check_left_out(survey: Survey) -> Iterator[Remark]:
    mistakes = survey.mistakes
    error = mistakes.error()
    if error is not None:
        text = f"{count(mistakes.count, 'mistake')} in rows or sources, which are left out:"
        text += " badcjobs run would refuse them, or fail those without usable audio"
        details = with_more(mistakes.examples(SHOWN)[0], mistakes.count)
        yield problem("left out", text, error.fix or "badcjobs check --help", details)


def _check_faults(survey: Survey) -> Iterator[Remark]:
    """Name every file that gives no audio, or less than its header says."""
    remarks = survey.walk.remarks
    for fault, (severity, effect, fix) in _FAULTS.items():
        names = remarks.faults[fault]
        if not names:
            continue
        text = f"{count(len(names), 'file')} {effect}"
        if fault == BROKEN_AUDIO and survey.nothing_there:
            text += f"; {count(survey.nothing_there, 'chunk')} without any of it would fail"
        path = shell_line(Path(remarks.first_fault[fault]))
        yield Remark(
            severity,
            fault.replace("_", " "),
            text,
            fix.format(path=path),
            names,
        )


def _check_lengths(survey: Survey) -> Iterator[Remark]:
    """Report lengths that are not known."""
    walk = survey.walk
    lengths = survey.lengths
    unknown = lengths.unknown - walk.size.not_here_unknown
    if unknown:
        counted = f"counted with {lengths.guess_ms / 1000:,.1f} s each"
        text = f"{count(unknown, 'file')} without a length in the header; {counted}"
        yield note("unknown length", text, details=survey.unknown_names)
    if walk.for_ffmpeg:
        text = "ffmpeg is not on PATH: files in M4A, AAC, WMA or the like have no known length and are not cut"
        fix = "module load ffmpeg   (or: apt install ffmpeg)"
        yield warning("ffmpeg", text, fix, walk.for_ffmpeg[:SHOWN])


def _check_not_here(survey: Survey) -> Iterator[Remark]:
    """Report files that git-annex has not fetched, and those that are missing."""
    walk = survey.walk
    size = walk.size
    if size.not_here and not walk.needs_audio:  # then each of them is a mistake
        amount = f"{count(size.not_here, 'file')} ({data_size(size.not_here_total_bytes)})"
        how = "planned by the times of their rows"
        if size.not_here_unknown:
            how += ", or with a length that is estimated by the others"
        text = f"git-annex has not fetched {amount}; {how}; badcjobs run would fail them"
        yield warning("not here", text, size.not_here_fix)
    if walk.not_there:
        missing = count(len(walk.not_there), "file")
        text = f"{missing} missing or unusable, of those looked at; rows with an end are planned by their times"
        fix = "badcjobs check SOURCE   (looks at every file; --root DIR: where relative source_paths start from)"
        yield note("audio", text, fix, walk.not_there[:3])
