"""Writes detections as labels: a folder that HawkEars' program imports, Audacity's label files, Raven's tables.

Names, numbers and order are those of HawkEars. Times are those of the recording. Rows are streamed.
"""

from __future__ import annotations

import csv
import posixpath
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from badcjobs.settings import absolute
from badcjobs.small_files import read_small
from badcjobs.store.export_badc import safe_name
from badcjobs.store.export_tables import VIEW, DetectionFilter
from badcjobs.store.read_tasks import parse_settings

RARITIES = "recording_rarity"
_NAMED = "temp.named_recording"
_RAVEN_COLUMNS = """\
Selection, View, Channel, Begin Time (s), End Time (s), Common Name, Scientific Name, Species Code, eBird Code, \
Species, Confidence, File Offset (s), Low Freq (Hz), High Freq (Hz), Begin File, Begin Path"""
# the band of HawkEars' spectrograms
_LOW_HZ = 200.0
_HIGH_HZ = 13_000.0
# Classes that HawkEars' program hides.
_NO_SPECIES = {
    "canine",
    "insects",
    "noise",
    "other",
    "speech",
    "squirrel",
}


SpeciesNames = tuple[str, ...]  # common name, scientific name, code, eBird code: as in Raven's table


class Label(NamedTuple):
    """A detection as text; without a label: the recording itself, which comes before its detections."""

    recording: str
    label: str
    start: str
    end: str
    score: str  # "": not known
    species: SpeciesNames
    audio_path: str  # "": the chunks are separate files
    sample_rate_hz: int | None


def _audacity_row(number: int, row: Label) -> tuple[object, ...]:
    return row.start, row.end, f"{row.label};{row.score}" if row.score else row.label


def _raven_row(number: int, row: Label) -> tuple[object, ...]:
    high_hz = min(_HIGH_HZ, row.sample_rate_hz / 2) if row.sample_rate_hz else _HIGH_HZ
    where = (f"{_LOW_HZ:.4f}", f"{high_hz:.4f}", posixpath.basename(row.audio_path), row.audio_path)
    return (
        number,
        "Spectrogram 1",
        1,
        row.start,
        row.end,
        *row.species,
        row.label,
        row.score,
        row.start,
        *where,
    )


class LabelForm(NamedTuple):
    """What a format writes."""

    fields: Callable[[int, Label], tuple[object, ...]]
    ending: str  # of the files of recordings
    time_decimals: int
    score_decimals: int
    columns: str  # "": without a header
    quotes: str | None  # None: the format has none
    delimiter: str = "\t"


LABEL_FORMS = {
    "hawkears": LabelForm(
        lambda number, row: row[:5],
        "",
        3,
        3,
        "recording,name,start_time,end_time,score",
        quotes='"',
        delimiter=",",
    ),
    "audacity": LabelForm(_audacity_row, "_scores.txt", 2, 3, "", None),
    "raven": LabelForm(_raven_row, ".selection.table.txt", 4, 4, _RAVEN_COLUMNS.replace(", ", "\t"), quotes='"'),
}


@dataclass
class LabelWriter:
    """Writes the labels of a job."""

    db: sqlite3.Connection
    form: str
    wanted: DetectionFilter
    progress: Callable[[int], None]  # gets the number of labels so far
    hawkears_root: str | None  # if that of the run cannot be read
    written: int = 0

    def __post_init__(self) -> None:
        self._form = LABEL_FORMS[self.form]
        self.species, self.species_missing = _read_species(self.db, self.hawkears_root)
        self.left_out = defaultdict[str, Counter[str]](Counter)  # reason → number by label
        _name_recordings(self.db, follows_links=self.form == "hawkears")

    def write_table(self, target: Path, view: str) -> int:
        """Write one table of all recordings; return the number of its rows."""
        before = self.written
        self._write(target, self._labels(view))
        return self.written - before

    def write_files(self, folder: Path) -> int:
        """Write a file for each recording with an analysed chunk, also without detections; return their number."""
        files = 0
        for name, labels in groupby(self._labels(VIEW), key=attrgetter("recording")):
            target = folder / f"{name}{self._form.ending}"
            target.parent.mkdir(parents=True, exist_ok=True)
            self._write(target, labels)
            files += 1
        return files

    def _labels(self, view: str) -> Iterator[Label]:
        """Yield recordings and detections in HawkEars' order, without those that readers would refuse."""
        form = self._form
        rows = self.db.execute(
            f"""SELECT n.name, v.label, v.start_ms / 1000.0, v.end_ms / 1000.0, v.score, v.label_name, n.audio_path,
                       n.sample_rate_hz
                FROM {view} v LEFT JOIN {_NAMED} n USING (recording_id)
                WHERE {self.wanted.condition}
                UNION ALL SELECT name, '', 0, 0, NULL, NULL, NULL, NULL
                FROM {_NAMED}
                ORDER BY 1, 2, 3, 4, 5""",
            self.wanted.values,
        )
        for name, text, start_s, end_s, score, label_name, *audio in rows:
            label = " ".join(text.split())  # on one line
            common_name = " ".join((label_name or label).split())
            start = f"{start_s:.{form.time_decimals}f}"
            end = f"{end_s:.{form.time_decimals}f}"
            score_text = "" if score is None else f"{score:.{form.score_decimals}f}"
            species = self.species.get(label.casefold(), (common_name, "", "", ""))
            row = Label(name, label, start, end, score_text, species, *audio)
            reason = self._find_refusal(row) if label else None
            if reason is None:
                yield row
            else:
                self.left_out[reason][label] += 1

    def _find_refusal(self, row: Label) -> str | None:
        """Return why the readers would refuse a row, HawkEars' program with its folder; None: they accept it."""
        if not 0 <= float(row.start) < float(row.end):
            return "the end is not after the start"
        if self.form == "raven":
            return None
        if not 0 <= float(row.score or 0) <= 1:
            return "the score is not from 0 to 1"
        if self.form == "audacity":
            return None
        key = row.label.casefold()
        if key in _NO_SPECIES or (self.species and key not in self.species):
            return "not a species in HawkEars' list"
        if row.recording != row.recording.strip() or "\\" in row.recording:
            return "the path has a backslash, or a blank at an end"
        return None

    def _write(self, target: Path, labels: Iterable[Label]) -> None:
        form = self._form
        with target.open("w", encoding="utf-8", newline="") as out:
            if form.columns:
                out.write(f"{form.columns}\n")
            writer = csv.writer(
                out,
                delimiter=form.delimiter,
                lineterminator="\n",
                quotechar=form.quotes,
                quoting=csv.QUOTE_MINIMAL if form.quotes else csv.QUOTE_NONE,
            )
            for number, label in enumerate((row for row in labels if row.label), 1):
                writer.writerow(form.fields(number, label))
                self.written += 1
                self.progress(self.written)


# --- names of recordings ----------------------------------------------------------------------------------------------

# A recording has an audio file unless its chunks are separate files: then it has only its id.
_RECORDINGS = """
    SELECT c.recording_id, min(c.source_path), max(c.audio_path),
           max(c.status = 'done'), max(r.sample_rate_hz),
           min(c.source_path) = max(c.source_path)
           AND min(c.is_cut OR c.start_ms = 0)
    FROM chunk c LEFT JOIN recording r USING (recording_id)
    GROUP BY c.recording_id
    UNION ALL SELECT recording_id, source_path, '', 0, NULL, 1 FROM recording WHERE left_out IS NOT NULL"""


def _name_recordings(db: sqlite3.Connection, *, follows_links: bool) -> None:
    """Fill a temporary table with the name of each analysed recording in labels.

    A name is the file's name without extension if that identifies the file for HawkEars' importer among all recordings
    of the job; otherwise all names are paths, relative to the folder of the source or sources, with extension. HawkEars
    ``follows_links`` (git-annex): their targets are named, and have absolute paths.
    """
    db.execute(f"CREATE TABLE {_NAMED} (recording_id TEXT PRIMARY KEY, name, path, audio_path, sample_rate_hz)")
    used = set[str]()
    roots = set[str]()
    needs_paths = False
    for recording_id, source_path, opened_path, is_done, rate_hz, has_file in db.execute(_RECORDINGS):
        audio_path = absolute(Path("/"), opened_path or source_path) if has_file else ""
        path = audio_path or "/".join(map(safe_name, recording_id.split("/")))
        if follows_links and Path(audio_path).is_symlink():
            path = str(Path(audio_path).resolve())
        file_name = posixpath.basename(path)
        name = PurePosixPath(file_name).stem if has_file else file_name

        keys = {name.casefold(), file_name.casefold()}
        needs_paths = needs_paths or not keys.isdisjoint(used) or name != name.strip()
        used |= keys
        if not is_done:
            continue
        if has_file:
            roots.add(_find_root(audio_path, source_path))
        db.execute(
            f"INSERT INTO {_NAMED} VALUES (?, ?, ?, ?, ?)",
            (recording_id, name, path, audio_path, rate_hz),
        )
    if needs_paths:
        root = posixpath.commonpath(roots).rstrip("/") if roots else ""
        begin = "CASE path WHEN audio_path THEN ? ELSE 1 END"
        db.execute(f"UPDATE {_NAMED} SET name = substr(path, {begin})", (len(root) + 2,))


def _find_root(audio_path: str, source_path: str) -> str:
    """Return the folder that the path in the source is relative to; of an absolute path, the folder of the file."""
    below = "/" + posixpath.normpath(source_path)
    if audio_path.endswith(below):
        return audio_path.removesuffix(below) or "/"
    return posixpath.dirname(audio_path)


# --- names of species -------------------------------------------------------------------------------------------------


def _read_species(db: sqlite3.Connection, hawkears_root: str | None) -> tuple[Mapping[str, SpeciesNames], str | None]:
    """Return HawkEars' species by label, from the folder of the run or another one; else where they are not."""
    rows = db.execute("SELECT DISTINCT value FROM task_meta WHERE key = 'settings'")
    roots = [parse_settings(text).get("hawkears_root") for (text,) in rows]
    folders = list(dict.fromkeys(filter(None, [*roots, hawkears_root])))
    for folder in folders:
        with suppress(OSError, ValueError, IndexError, csv.Error):
            return _read_classes(Path(folder) / "data"), None
    return {}, " or ".join(folders) or "a known folder"


def _read_classes(folder: Path) -> dict[str, SpeciesNames]:
    """Read HawkEars' classes, with the names and codes that its taxonomy replaces."""
    classes = {row[1]: row for row in _read_rows(folder / "classes.csv")}
    if (folder / "taxonomy.csv").is_file():
        for model_code, *newer in _read_rows(folder / "taxonomy.csv"):
            older = classes.get(model_code, newer)
            classes[model_code] = [new or old for new, old in zip(newer, older, strict=True)]
    species: dict[str, SpeciesNames] = {}
    for name, code, scientific_name, ebird_code in classes.values():
        names = (name, scientific_name, code, ebird_code)
        species |= {label.casefold(): names for label in names if label}
    return species


def _read_rows(path: Path) -> list[list[str]]:
    lines = read_small(path).decode("utf-8-sig").splitlines()
    return [row for row in csv.reader(lines) if row][1:]
