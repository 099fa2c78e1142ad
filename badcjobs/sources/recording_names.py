"""Where and when a recording was made, from its path: by the patterns of the config, else by a rule of our own. Pure.

The rule: the study area is the first folder below the source's root, the location the last one; the file name has the
date as YYYYMMDD and, behind it, the time as HHMMSS. What it cannot tell for certain it does not tell: a folder alone is
the location, as where the folder of one study area is the source."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from unicodedata import normalize

from badcjobs.model import Chunk, NameGaps, NamePattern, RecordingName
from badcjobs.settings import RunSettings

# Side by side, with at most one letter between: 20220501_060000, 20220501$060000, 20220501T060000, 20220501060000.
_STAMP = re.compile(r"(?<![0-9])((?:19|20)[0-9]{6})[^0-9]?([0-9]{6})(?![0-9])")
# Somewhere in the name, each standing alone: a serial number has a letter before it.
_DATE = re.compile(r"(?<![0-9A-Za-z])(?:19|20)[0-9]{6}(?![0-9A-Za-z])")
_TIME = re.compile(r"(?<![0-9A-Za-z])[0-9]{6}(?![0-9A-Za-z])")


@dataclass(frozen=True, slots=True)
class NameReader:
    """Reads what paths tell; ``roots`` are the folders that absolute paths may be below of."""

    patterns: tuple[NamePattern, ...] = ()
    roots: tuple[str, ...] = ()

    def of(self, chunk: Chunk) -> RecordingName:
        """Return what is known about the recording of a chunk."""
        return self.read(chunk.recording_id, chunk.source_path, chunk.audio_path)

    def read(self, recording_id: str, source_path: str, audio_path: str) -> RecordingName:
        """Return what is known about a recording whose audio is named so by its source and lies there."""
        below = path_below_root(recording_id, source_path, audio_path, self.roots)
        for pattern in self.patterns:
            told = pattern.read(audio_path, below)
            if told is None:
                continue
            plain = read_path(recording_id, source_path, below)
            date = told.get("date")
            return RecordingName(
                told.get("study_area", plain.study_area),
                told.get("location", plain.location),
                plain.recorded_at if date is None else moment(date, told.get("time")),
                pattern.text,
            )
        return read_path(recording_id, source_path, below)


def read_path(recording_id: str, source_path: str, below: str | None) -> RecordingName:
    """Return what a path tells by itself."""
    folders = [] if below is None else normalize("NFC", below).split("/")[:-1]
    # Chunks that were cut beforehand may have names of their own; then that of the recording may tell.
    recorded_at = find_moment(posixpath.basename(source_path)) or find_moment(posixpath.basename(recording_id))
    study_area = folders[0] if len(folders) > 1 else None
    return RecordingName(study_area, folders[-1] if folders else None, recorded_at)


def path_below_root(recording_id: str, source_path: str, audio_path: str, roots: Sequence[str]) -> str | None:
    """Return the path from the source's root on; None: it does not lie below it."""
    named = posixpath.normpath(source_path)
    if not named.startswith(("/", "../")):
        return named
    path = posixpath.normpath(audio_path)
    for root in (root.rstrip("/") + "/" for root in roots):
        if path.startswith(root):
            return path.removeprefix(root)
    for whole in (path, posixpath.splitext(path)[0]):
        if whole.endswith(f"/{recording_id}"):  # as lists name their recordings: by the path from their root on
            start = len(whole) - len(recording_id)
            return path[start:] if start > 1 else None  # all folders: it lies elsewhere
    return None


def find_moment(name: str) -> str | None:
    """Return the date and time that a file name has; None: none that is certain."""
    stamps = _STAMP.findall(name)
    if stamps:
        found = {at for date, time in stamps if (at := moment(date, time)) is not None}
        return found.pop() if len(found) == 1 else None  # two are a begin and an end, or what else?
    dates = [match for match in _DATE.finditer(name) if moment(match[0], None) is not None]
    if len({match[0] for match in dates}) != 1:
        return None
    times = {time for time in _TIME.findall(name, dates[-1].end()) if moment(dates[0][0], time) is not None}
    return moment(dates[0][0], times.pop()) if len(times) == 1 else None


def moment(date: str, time: str | None) -> str | None:
    """Return YYYYMMDD and HHMMSS as ISO 8601 has them; None: there is no such day or time."""
    try:
        day = datetime(int(date[:4]), int(date[4:6]), int(date[6:]))
        if time is None:
            return day.date().isoformat()
        return day.replace(hour=int(time[:2]), minute=int(time[2:4]), second=int(time[4:])).isoformat()
    except ValueError:
        return None


def name_reader(settings: RunSettings, cwd: Path) -> NameReader:
    """Return what reads the names of a run's recordings; absolute paths may lie below --root, or beside the source."""
    beside = [(cwd / source).parent for source in settings.source]
    roots = beside if settings.root is None else [cwd / settings.root]
    return NameReader(settings.patterns, tuple(dict.fromkeys(os.path.abspath(root) for root in roots)))  # noqa: PTH100


def gap_lines(gaps: NameGaps, patterns: Sequence[object], *, nameless: str | None = None) -> Iterator[str]:
    """Yield a line for each kind of thing that paths do not tell: dates, and where they fit no pattern.

    ``nameless``: the file for what has no study area, where there is a file for each.
    """
    kinds = [(gaps.undated, "date in the name", gaps.undated_example, " (badcjobs guide recordings)")]
    if patterns:
        rule = "; there the built-in rule was used"
        kinds.append((gaps.no_pattern, "fitting pattern in [recordings]", gaps.no_pattern_example, rule))
    if nameless is not None:
        there = f" (badcjobs guide recordings); what was heard there is in {nameless}"
        kinds.append((gaps.no_study_area, "study area in the path", gaps.no_study_area_example, there))
    for many, what, example, rest in kinds:
        if many:
            has = f"recording{'' if gaps.recordings == 1 else 's'} {'has' if many == 1 else 'have'}"
            yield f"{many:,} of {gaps.recordings:,} {has} no {what}, e.g. {example}{rest}"
