"""Where and when each recording was made: by the list (--filelist), the manifest, its study area, or the project file.

The first of these that gives a place counts; a date as well, and without any the date in the file's name.
"""

from __future__ import annotations

import os
import posixpath
import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unicodedata import normalize

from badcjobs.errors import BadInput
from badcjobs.model import NOWHERE, Chunk, Place, PlaceCounts, ProjectPlaces, RecordingName, names_place, parse_place
from badcjobs.settings import RunSettings, absolute
from badcjobs.sources.badc_manifest import Manifest
from badcjobs.sources.mistakes import Mistakes, quoted, shown
from badcjobs.sources.open import Sources
from badcjobs.sources.recording_names import NameReader, moment, name_reader
from badcjobs.sources.tables import Fields, copy_command, read_table

NO_PLACE = "no_place"  # recording.left_out
PLACING_OPTIONS = ("--region", "--lat", "--lon", "--date")  # of HawkEars, for all recordings alike
NAMED = 5  # recordings and names in messages
_COLUMNS = "filename,recording_date,region   (or latitude,longitude instead of region)"
_DAY = re.compile(r"(?<![0-9])((?:19|20)[0-9]{2})([-_]?)([0-9]{2})\2([0-9]{2})(?![0-9])")
_ELSEWHERE = "places:"  # the name, in messages, of mistakes that are not in the list


class ListRow(NamedTuple):
    """A row of the list."""

    line: int
    filename: str
    place: Place


class PlaceList:
    """The rows of --filelist, none without it; the mistakes in it are collected."""

    def __init__(self, path: Path | None) -> None:
        self.is_given = path is not None
        self.folder = f"{path.parent}/" if path else ""
        self.mistakes = Mistakes([str(path or ""), _ELSEWHERE])
        self.rows: dict[str, ListRow] = {}  # by path or, for a row without a folder, by file name
        if path is None:
            return
        try:
            if _is_utf8(path, self.mistakes):
                for line, fields in read_table(path, self.mistakes, _missing_of, _COLUMNS):
                    self._add(line, fields)
        except OSError as error:
            self.mistakes.add(0, "cannot be read", why=error.strerror or str(error))

    def _add(self, line: int, fields: Fields) -> None:
        place, problems = parse_place(fields)
        filename = fields["filename"].strip().replace("\\", "/")
        row = ListRow(line, filename, place)
        earlier = self.rows.setdefault(_path_key(filename) if "/" in filename else _name_key(filename), row)
        if not filename:
            problems.append("filename is empty")
        elif earlier is not row:
            problems.append(f"{quoted(filename)} is already on line {earlier.line}")
        for problem in problems:
            self.mistakes.add(line, problem)

    def rows_for(self, recording: Chunk) -> list[ListRow]:
        """Return the rows that name a recording.

        They may have its file name, or its path: as in the source, absolute, or from the folder of the list.
        """
        if not self.rows:
            return []
        ending = posixpath.splitext(recording.source_path)[1]
        names = (recording.source_path, recording.recording_id + ending)  # a recording may consist of several files
        path = recording.audio_path
        paths = (*names, path, path.removeprefix(self.folder))
        keys = [*map(_path_key, paths), *map(_name_key, map(posixpath.basename, names))]
        return [self.rows[key] for key in dict.fromkeys(keys) if key in self.rows]


def _is_utf8(path: Path, mistakes: Mistakes) -> bool:
    """Return whether a list is UTF-8, or note that it is not: spreadsheets may write others."""
    content = path.read_bytes()
    encoding = "UTF-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "WINDOWS-1252"
    try:
        content.decode()
    except UnicodeDecodeError:
        fix = copy_command(path, f"iconv -f {encoding} -t UTF-8")
        mistakes.add(0, "is not UTF-8", why=f"it may be {encoding}", fix=fix)
        return False
    return True


def _missing_of(columns: Sequence[str]) -> list[str]:
    missing = [] if "filename" in columns else ["filename"]
    return missing if names_place(columns) else [*missing, "region"]


def _name_key(name: str) -> str:
    return normalize("NFC", name)


def _path_key(path: str) -> str:
    """Return a path with a slash, which a file name has not."""
    folder, name = posixpath.split(path)
    if folder.startswith("/"):  # links above the file do not matter
        return _name_key(f"{_real_folder(folder)}/{name}")
    return _name_key(f"{posixpath.normpath(folder)}/{name}")


_real_folder = lru_cache(1024)(os.path.realpath)


# --- HawkEars' regions ------------------------------------------------------------------------------------------------

# HawkEars' occurrence data has exactly the areas that can be selected; it is a pickle, which we do not open.
_COUNTIES = (
    "SELECT Code, MinLatitude, MaxLatitude, MinLongitude, MaxLongitude FROM AdministrativeArea WHERE Selectable = 1"
)


class Regions:
    """Answers what HawkEars would find in its occurrence data."""

    def __init__(self, counties: Sequence[tuple[Any, ...]]) -> None:
        self.counties = counties  # code, and bounds in degrees: south, north, west, east
        self._codes = {code[:length] for code, *_ in counties for length in range(1, len(code) + 1)}
        self._bounds = [bounds for _, *bounds in counties if None not in bounds]
        self._covers = cache(self._find_county)  # a station has many recordings

    def has(self, code: str) -> bool:
        """Return whether HawkEars finds a region: the code of a county, or the beginning of one."""
        return code in self._codes

    def covers_place(self, place: Place) -> bool:
        """Return whether HawkEars finds a county for a place, or needs none: its region counts before coordinates."""
        if place.region is not None or place.latitude is None or place.longitude is None:
            return True
        return self._covers(place.latitude, place.longitude)

    def _find_county(self, latitude: float, longitude: float) -> bool:
        """Return whether a county is at a point; HawkEars finds none that has no bounds."""
        return any(
            south <= latitude <= north and west <= longitude <= east for south, north, west, east in self._bounds
        )


def read_regions(root: Path) -> Regions | None:
    """Return the regions of the HawkEars in a folder; None: it has no readable table of them."""
    path = (root / "data" / "locations.db").absolute()
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            counties = database.execute(_COUNTIES).fetchall()
    except sqlite3.Error:
        return None
    return Regions(counties)


# --- the place of a recording -----------------------------------------------------------------------------------------


class PlaceReader(NamedTuple):
    """Says where and when a recording was made, and whether it is left out."""

    names: NameReader
    project: ProjectPlaces
    filelist: PlaceList
    regions: Regions | None  # None: HawkEars' table is not at hand

    def of(self, recording: Chunk) -> RecordingName:
        """Return what is known of the recording of a chunk."""
        name = self.names.read(recording.recording_id, recording.source_path, recording.audio_path)
        rows = self.filelist.rows_for(recording)
        area = self.project.study_areas.get(name.study_area or "", NOWHERE)
        levels = [*(row.place for row in rows[:1]), recording.place, area, self.project.everywhere]
        where = next((place for place in levels if place.is_known), NOWHERE)
        day = next((place.recorded_on for place in levels if place.recorded_on), None)
        location = next((place.location_name for place in levels if place.location_name), None)
        place = replace(
            where,
            recorded_on=day or _day_in_name(recording, name),
            location_name=location,
        )
        # As in HawkEars: a recording that the list names without a place is analysed, one that it does not name is not.
        is_left_out = self.filelist.is_given and not rows and not where.is_known
        return replace(
            name,
            place=place,
            left_out=NO_PLACE if is_left_out else None,
            no_county=None if self.regions is None else not self.regions.covers_place(place),
        )


def _day_in_name(recording: Chunk, name: RecordingName) -> str | None:
    if name.recorded_at is not None:
        return name.recorded_at[:10]
    parts = _DAY.search(posixpath.basename(recording.source_path))
    if parts is None:
        return None
    return moment(f"{parts[1]}{parts[3]}{parts[4]}", None)


def place_reader(settings: RunSettings, cwd: Path) -> PlaceReader:
    """Return the PlaceReader of a run; raise BadInput if its list has mistakes."""
    reader = _open_reader(settings, cwd)
    reader.filelist.mistakes.raise_any()
    return reader


def _open_reader(settings: RunSettings, cwd: Path) -> PlaceReader:
    path = Path(absolute(cwd, settings.filelist)) if settings.filelist else None
    regions = read_regions(cwd / (settings.hawkears_root or ""))
    return PlaceReader(name_reader(settings, cwd), settings.places, PlaceList(path), regions)


def gives_places(settings: RunSettings, sources: Sources) -> bool:
    """Return whether a run says anywhere where its recordings were made."""
    return bool(settings.filelist or settings.places.to_keys()) or any(part.has_places for part in sources.parts)


# --- the check of all recordings --------------------------------------------------------------------------------------


_GUIDE = "badcjobs guide audio   (places and dates)"


def placing_options(settings: RunSettings) -> list[str]:
    """Return HawkEars' options for one place of all recordings; HawkEars 1 also takes the beginnings of their names."""
    names = set(PLACING_OPTIONS)
    if settings.engine == "hawkears1":
        names = {option[:length] for option in PLACING_OPTIONS for length in range(3, len(option) + 1)}
    return [arg for arg in settings.engine_args if arg.partition("=")[0] in names]


def refuse_placing_options(settings: RunSettings, sources: Sources) -> None:
    """Refuse HawkEars' options for one place of all recordings, if recordings have their own."""
    options = placing_options(settings)
    if options and gives_places(settings, sources):
        raise BadInput(
            f"--engine-arg {' '.join(options)} cannot be used together with places of recordings",
            why="each recording has its own place and date, from the list, the manifest or the project file",
            fix="remove it, or remove --filelist and the places in manifest and project file",
        )


def place_sources(
    settings: RunSettings, sources: Sources, cwd: Path, done: Mapping[str, Place] = MappingProxyType({})
) -> Sources:
    """Look up the place of every recording, without opening audio; raise BadInput with all mistakes at once.

    ``done``: the places with which chunks are done, by recording id. Return the sources with the counts, and without
    the recordings that are left out.
    """
    refuse_placing_options(settings, sources)
    if not gives_places(settings, sources):
        return sources
    check = _PlaceCheck(_open_reader(settings, cwd), done)
    for part in sources.parts:
        for recording in part.named_recordings():
            check.add(recording)
    try:
        check.finish()
    except BadInput as problem:
        raise _with_rows(problem, sources) from None
    return replace(sources, left_out=frozenset(check.left_out), places=check.counts)


def _with_rows(problem: BadInput, sources: Sources) -> BadInput:
    """Add the mistakes in the rows of manifests to an error about places."""
    manifests = tuple(part for part in sources.parts if isinstance(part, Manifest))
    try:
        replace(sources, parts=manifests).read_identities(lambda _: None)
    except BadInput as rows:
        lines = [problem.what, problem.why or "", rows.what, rows.why or ""]
        return BadInput(
            "these sources have mistakes",
            why="\n".join(filter(None, lines)),
            fix=problem.fix,
        )
    return problem


@dataclass
class _PlaceCheck:
    """Counts recordings by their place, and collects what is wrong."""

    reader: PlaceReader
    done: Mapping[str, Place]
    counts: PlaceCounts = field(default_factory=PlaceCounts)
    left_out: set[str] = field(default_factory=set)  # recording ids
    named: dict[int, Chunk] = field(default_factory=dict)  # line of the list → the recording that it names
    unknown_regions: dict[str, str] = field(default_factory=dict)  # region → the first recording
    moved: list[str] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)  # by recording id
    examples: list[str] = field(default_factory=list)  # the paths of the first recordings
    divided: set[str] = field(default_factory=set)  # ids of recordings with several places
    study_areas: set[str | None] = field(default_factory=set)

    def add(self, recording: Chunk) -> None:
        """Count one more recording, unless other files or rows of it were counted."""
        self._note_rows(recording)
        name = self.reader.of(recording)
        self.study_areas.add(name.study_area)
        place = replace(name.place, location_name=None)
        if recording.recording_id in self.places:
            if self.places[recording.recording_id] != place:
                self.divided.add(recording.recording_id)
            return
        self.places[recording.recording_id] = place
        self.counts.recordings += 1
        if len(self.examples) < NAMED:
            self.examples.append(shown(recording.source_path))
        if self.done.get(recording.recording_id, place) != place:
            self.moved.append(recording.source_path)
        if name.left_out is not None:
            self.left_out.add(recording.recording_id)
            self.counts.left_out += 1
            self.counts.left_out_names.append(shown(recording.source_path))
        elif place.is_known:
            self.counts.undated += place.recorded_on is None
            self._look_up(recording, name)
        else:
            self.counts.unplaced += 1

    def _note_rows(self, recording: Chunk) -> None:
        """Refuse a row for two recordings, and two rows for one recording."""
        mistakes = self.reader.filelist.mistakes
        rows = self.reader.filelist.rows_for(recording)
        for row in rows:
            first = self.named.setdefault(row.line, recording)
            if first.recording_id != recording.recording_id and first.audio_path != recording.audio_path:
                both = f"{shown(first.audio_path)} and {shown(recording.audio_path)}"
                paths = f"{shown(first.source_path)}, {shown(recording.source_path)}"
                fix = f"paths as filename, absolute or below the source: {paths}"
                mistakes.add(row.line, f"{quoted(row.filename)} matches two recordings: {both}", fix=fix)
        if len(rows) > 1:
            earlier, later = sorted(row.line for row in rows[:2])
            mistakes.add(later, f"names the same recording as line {earlier}")

    def _look_up(self, recording: Chunk, name: RecordingName) -> None:
        """Ask HawkEars' table of regions, if it is at hand."""
        regions = self.reader.regions
        if regions is None:
            return
        if name.no_county:
            self.counts.not_covered += 1
            self.counts.not_covered_names.append(shown(recording.source_path))
        elif name.place.region is not None and not regions.has(name.place.region):
            self.unknown_regions.setdefault(name.place.region, recording.source_path)

    def finish(self) -> None:
        """Raise one BadInput for everything that is wrong."""
        mistakes = self.reader.filelist.mistakes
        if self.reader.filelist.is_given:
            self._check_names()
        mistakes.source = 1
        for region, path in self.unknown_regions.items():
            mistakes.add(0, f"region {region} of {shown(path)} is not in HawkEars' data", fix=_GUIDE)
        for recording_id in self.divided:
            text = f"recording {shown(recording_id)}: its files or rows have different places or dates"
            mistakes.add(0, text, fix=_GUIDE)
        mistakes.raise_any()
        refuse_moved(self.moved)
        self.counts.unused_areas = sorted(self.reader.project.study_areas.keys() - self.study_areas)

    def _check_names(self) -> None:
        """Count the names in the list that match no recording; refuse a list of which none does."""
        filelist = self.reader.filelist
        unmatched = [row.filename for row in filelist.rows.values() if row.line not in self.named]
        self.counts.unmatched_names = unmatched
        if unmatched and not self.named:
            why = "a filename is a path below the source, or a file name alone"
            why += f"; the list has {', '.join(unmatched[:NAMED])}; the source has {', '.join(self.examples)}"
            filelist.mistakes.add(0, "names no recording of the source", why=why)
        elif not filelist.rows and not filelist.mistakes.count:
            filelist.mistakes.add(0, "has no rows")


def refuse_moved(recordings: Sequence[str]) -> None:
    """Refuse to give a recording another place or date than its chunks that are done had."""
    if not recordings:
        return
    names = name_few(recordings, len(recordings))
    raise BadInput(
        f"another place or date for recordings with chunks that are done: {names}",
        why="all chunks of a recording are judged with one place; results of two places must not be mixed",
        fix="restore these rows of --filelist (or of the manifest), or use another --out for a new run",
    )


def place_words(counts: PlaceCounts) -> str:
    """Return how many recordings have a place, lack one, or are left out, and the names that match nothing."""
    parts = [f"{counts.placed:,} of {counts.recordings:,} recordings have a place"]
    kinds = [
        (counts.left_out, "left out, because nothing places them", counts.left_out_names),
        (counts.unplaced, "analysed without a place (HawkEars: without the filter of species)", []),
        (counts.undated, "without a date, so that the place counts for all weeks", []),
        (counts.not_covered, "where HawkEars has no county, so without the filter", counts.not_covered_names),
        (len(counts.unmatched_names), "names in the list that match no recording", counts.unmatched_names),
        (len(counts.unused_areas), "study areas with a place and no recording", counts.unused_areas),
    ]
    for many, meaning, names in kinds:
        if many:
            parts.append(f"{meaning}: {name_few(names, many)}")
    return "; ".join(parts)


def name_few(names: Sequence[str], many: int) -> str:
    """Return a number, and the first names in brackets."""
    if not names:
        return f"{many:,}"
    more = ", …" if many > NAMED else ""
    return f"{many:,} ({', '.join(names[:NAMED])}{more})"
