"""Read sources for a plan: every row, only the headers that are needed, without stopping at mistakes.

The file of a row with an end is not looked at: for twenty million rows a shared filesystem would need hours. Only the
first file of each folder is looked at, which finds a wrong --root and a missing folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from badcjobs.model import AudioHeader, Chunk, Cutting, Fingerprint
from badcjobs.sources.audio_files import NoAudio, ReadHeader, look_at
from badcjobs.sources.badc_manifest import CUT, Columns, Manifest, Question, RowFiles, check_cut, check_row, read_rows
from badcjobs.sources.mistakes import Mistakes, is_text
from badcjobs.sources.open import AudioSource, Sources, note_repeats
from badcjobs.sources.walk import WHOLE, Walk, look_ahead

_MOST_LOOKS = 1000
_NOT_READ = AudioHeader()
_LOST = "\N{REPLACEMENT CHARACTER}"


class PlannedRow(NamedTuple):
    """A chunk as a plan needs it; a tuple, because there may be millions."""

    recording_id: str
    chunk_id: str
    path: str  # as in the source
    base: str  # the folder of a relative path, with a slash at its end
    start_ms: int
    end_ms: int | None
    sha256: str = ""  # as it is in the source, like overlap_ms, notes and further
    is_cut: bool = False  # a part of a longer file
    overlap_ms: str = ""
    notes: str = ""
    further: Sequence[str] = ()  # values of columns that are not part of a BADC manifest, and their names
    further_names: tuple[str, ...] = ()
    there_ms: int | None = None  # where its truncated file ends, from the start of the file
    unreadable: str = ""  # why its file cannot be read


class Surveyor(Walk):
    """A walk that takes all rows, except those with the identity of an earlier row."""

    def __init__(
        self, mistakes: Mistakes, cutting: Cutting, read_header: ReadHeader, suspected: Collection[int] = ()
    ) -> None:
        super().__init__(WHOLE, mistakes, cutting, read_header=read_header)
        self.not_there: list[str] = []  # missing files, one per folder, with the reason if it is known
        self.measured = 0  # files whose header was read
        self.rates_hz: Counter[int] = Counter()  # sample rate → files
        self._suspected = suspected  # hashes of identities that probably repeat
        self._known: set[tuple[str, str]] = set()
        self._folders: Sequence[str] = ()
        self._base_of: dict[str, str] = {}
        self._usual_base = "/"

    def takes(self, recording_id: str, chunk_id: str, *, to_cut: bool = False) -> bool:
        """Count one more row, and return whether it is the first one with its identity."""
        self.rows += 1
        key = recording_id, chunk_id
        if not self._suspected:
            self.seen.add(key)
            return True
        if hash(key) not in self._suspected:
            return True
        is_new = key not in self._known
        self._known.add(key)
        return is_new

    def measure(self, path: str, header: AudioHeader) -> None:
        """Count one more file whose header was read, and note a truncated file."""
        self.measured += 1
        self.remarks.note_broken(path, header)
        if header.sample_rate_hz:
            self.rates_hz[header.sample_rate_hz] += 1

    def base_of(self, path: str, folders: Sequence[str]) -> str:
        """Return the probable base folder of a relative path, from one look per folder."""
        if folders is not self._folders:  # another source
            self._folders, self._base_of = folders, {}
        folder = path[: path.rfind("/") + 1]
        if folder in self._base_of:
            return self._base_of[folder]
        candidates = ("",) if path.startswith("/") else folders
        if len(self._base_of) >= _MOST_LOOKS:
            return self._usual_base if self._usual_base in candidates else candidates[-1]
        answer, below = look_at(path, candidates, None), path.removeprefix("./")
        if isinstance(answer, NoAudio):
            self.not_there.append(path if answer.not_found else str(answer))
            at = None if answer.not_found else answer.missing_at
            base = next((base for base in candidates if base + below == at), candidates[-1])
        else:
            base = self._usual_base = answer[0].removesuffix(below)
        self._base_of[folder] = base
        return base


def survey(sources: Sources, mistakes: Mistakes) -> tuple[Iterator[PlannedRow], Surveyor]:
    """Return all rows that can be processed, and the walk, which has the totals after they are read.

    Repeated identities are known only at the end: then ``survey_again`` leaves such rows out.
    """
    walk = Surveyor(mistakes, sources.cutting, sources.read_header)
    return _read(sources, walk), walk


def survey_again(sources: Sources, before: Surveyor) -> Iterator[PlannedRow] | None:
    """Report all rows that repeat an identity, and return the rows without them; None: no row does."""
    suspected = before.seen.repeated()
    if not suspected:
        return None
    note_repeats(sources.parts, before)
    names = [part.name for part in sources.parts]
    return _read(sources, Surveyor(Mistakes(names), sources.cutting, sources.read_header, suspected))


def _read(sources: Sources, walk: Surveyor) -> Iterator[PlannedRow]:
    return sources.read_parts(
        walk, lambda part: _rows_of(part, walk) if isinstance(part, Manifest) else _files_of(part, walk)
    )


_Read = tuple[int, list[str], Columns, int, int | None, str]  # line, fields, where they are, start_ms, end_ms, CUT


def _rows_of(manifest: Manifest, walk: Surveyor) -> Iterator[PlannedRow]:
    files = RowFiles(manifest.folders, walk.cutting, walk.read_header)
    answered = look_ahead(_planned_rows(manifest, walk, files), files.look)
    for (line, row, columns, start_ms, end_ms, cut), look in answered:
        path, is_cut, header = row[columns.source_path], cut == "yes", _NOT_READ
        if end_ms is None:
            try:
                times = start_ms, None
                _, fingerprint, end_ms, is_cut = files.resolve(path, times, look, times, known_cut=is_cut)
                cut = "yes" if is_cut else cut
            except NoAudio as problem:
                walk.mistakes.add(line, str(problem), fix=problem.fix, missing=problem.missing_at is not None)
                continue
            end_ms, header = _end_of(start_ms, end_ms, fingerprint), files.header
            if look is not None:  # otherwise it is the file of the row before
                walk.measure(path, header)
        further: Sequence[str] = [row[place] for place in columns.further] if columns.further else ()
        names = columns.further_names
        if cut:
            further, names = (*further, cut), (*names, CUT)
        yield PlannedRow(
            row[columns.recording_id], row[columns.chunk_id], path, walk.base_of(path, manifest.folders), start_ms,
            end_ms, "" if columns.sha256 is None else row[columns.sha256], is_cut,
            "" if columns.overlap_ms is None else row[columns.overlap_ms],
            "" if columns.notes is None else row[columns.notes],
            further, names, _breaks_off_ms(header), header.unreadable,
        )  # fmt: skip


def _planned_rows(manifest: Manifest, walk: Surveyor, files: RowFiles) -> Iterator[tuple[_Read, Question | None]]:
    """Yield rows with the questions about their files; only rows without an end have a question."""
    mistakes, known_mistakes = walk.mistakes, 0
    before, as_first, undecided = "", "", walk.cutting.rows is None
    for line, row, columns in read_rows(manifest.path, mistakes):
        recording_id, chunk_id, path = row[columns.recording_id], row[columns.chunk_id], row[columns.source_path]
        is_new = walk.takes(recording_id, chunk_id)
        start_ms, end_ms, wrong = check_row(row, columns)
        cut, _, wrong_cut = ("", None, ()) if columns.cut is None else check_cut(row, columns)
        for text in (*wrong, *wrong_cut) if wrong or wrong_cut else ():
            mistakes.add(line, text)
        if path != before:  # as RowFiles.ask sees it
            before, as_first = path, "" if end_ms is None else f"as {start_ms}-{end_ms}"
        elif not cut and undecided:
            cut = as_first
        if mistakes.count != known_mistakes:  # a mistake in this row, or in a line before it
            known_mistakes = mistakes.count
            lost = _LOST in f"{recording_id}{chunk_id}{path}"  # it was not UTF-8, and characters are lost
            if wrong or wrong_cut or lost:
                continue
        if is_new:
            question = files.ask(path, (start_ms, None), ours=True)[1] if end_ms is None else None
            yield (line, row, columns, start_ms, end_ms, cut), question


def _files_of(part: AudioSource, walk: Surveyor) -> Iterator[PlannedRow]:
    before, header, there_ms = "", _NOT_READ, None
    for chunk in part.chunks(walk):
        if chunk.audio_path != before:
            before, header = chunk.audio_path, chunk.fingerprint.header
            there_ms = _breaks_off_ms(header)
            walk.measure(chunk.source_path, header)
        if chunk.source_path.isascii() or is_text(chunk.source_path):
            base, path = _split(chunk)
            end_ms = _end_of(chunk.start_ms, chunk.end_ms, chunk.fingerprint)
            further, names = (("yes",), (CUT,)) if chunk.is_cut else ((), ())
            is_part = chunk.is_cut and chunk.chunk_id != chunk.recording_id  # not a complete file that is truncated
            yield PlannedRow(
                chunk.recording_id, chunk.chunk_id, path, base, chunk.start_ms, end_ms, "", is_part, "", "",
                further, names, there_ms, header.unreadable,
            )  # fmt: skip
        else:
            walk.mistakes.add(0, f"contains a path that is not UTF-8: {chunk.source_path!r}")


def _end_of(start_ms: int, end_ms: int | None, fingerprint: Fingerprint) -> int | None:
    """Return the end of a chunk; an empty file has no header, and ends at its start."""
    return start_ms if end_ms is None and fingerprint.audio_bytes == 0 else end_ms


def _breaks_off_ms(header: AudioHeader) -> int | None:
    return None if header.there_s is None else round(header.there_s * 1000)


def _split(chunk: Chunk) -> tuple[str, str]:
    """Return the base folder of a path ("": the path is absolute), and the path."""
    path = chunk.source_path
    below = path.removeprefix("./")
    if path.startswith("/"):
        return "", path
    if not chunk.audio_path.endswith(below):
        return "", chunk.audio_path
    return chunk.audio_path[: len(chunk.audio_path) - len(below)], path
