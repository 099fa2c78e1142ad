"""Read from its path where and when a recording was made: by the patterns of the config, or by a built-in rule.

The rule: the location is the folder of the file, if its name begins or ends with it; the file name has the date as
YYYYMMDD and, after it, the time as HHMMSS. What is not certain is left out: only a pattern can tell the study area, and
the folder of a recording that was cut into chunks is not a location."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

from badcjobs.model import NameGaps, NamePattern, RecordingName
from badcjobs.settings import RunSettings, absolute
from badcjobs.words import count

# Adjacent, with at most one character between: 20220501_060000, 20220501$060000, 20220501T060000, 20220501060000.
_STAMP = re.compile(r"(?<![0-9])((?:19|20)[0-9]{6})[^0-9]?([0-9]{6})(?![0-9])")
# Anywhere in the name, without letters or digits around them: a serial number has a letter before it.
_DATE = re.compile(r"(?<![0-9A-Za-z])(?:19|20)[0-9]{6}(?![0-9A-Za-z])")
_TIME = re.compile(r"(?<![0-9A-Za-z])[0-9]{6}(?![0-9A-Za-z])")


class NameReader(NamedTuple):
    """Reads recording names from paths; ``roots`` are the folders that absolute paths may be in."""

    patterns: tuple[NamePattern, ...]
    roots: tuple[str, ...] = ()

    def read(self, recording_id: str, source_path: str, audio_path: str) -> RecordingName:
        """Return where and when a recording was made, from its id, its path in the source and its absolute path."""
        audio_path = absolute(Path("/"), audio_path)
        plain = read_path(recording_id, source_path, audio_path)
        below = self._path_below_root(recording_id, source_path, audio_path)
        for pattern in self.patterns:
            if (fields := pattern.read(audio_path, below)) is None:
                continue
            date = fields.get("date")
            return RecordingName(
                fields.get("study_area", plain.study_area),
                fields.get("location", plain.location),
                plain.recorded_at if date is None else moment(date, fields.get("time")),
                pattern.text,
            )
        return plain

    def _path_below_root(self, recording_id: str, source_path: str, audio_path: str) -> str | None:
        """Return the path relative to the root of the source; None: it is not below the root."""
        named = posixpath.normpath(source_path)
        if not named.startswith(("/", "../")):
            return named
        for root in (root.rstrip("/") + "/" for root in self.roots):
            if audio_path.startswith(root):
                return audio_path.removeprefix(root)
        for whole in (audio_path, posixpath.splitext(audio_path)[0]):
            root = whole.removesuffix(f"/{recording_id}")  # ids of a list are paths relative to its root
            if root not in ("", whole):  # "": the id is the complete path, so it is outside the root
                return audio_path[len(root) + 1 :]
        return None


def read_path(recording_id: str, source_path: str, audio_path: str) -> RecordingName:
    """Apply the built-in rule to a path; the study area stays unknown."""
    folder = normalize("NFC", posixpath.basename(posixpath.dirname(audio_path)))
    # Files that were cut earlier may have other names; then the id of the recording may have the date.
    recorded_at = find_moment(posixpath.basename(source_path)) or find_moment(posixpath.basename(recording_id))
    stem = normalize("NFC", posixpath.splitext(posixpath.basename(source_path))[0])
    is_location = folder and _carries(stem, folder) and not _is_recording(folder, recording_id)
    return RecordingName(None, folder if is_location else None, recorded_at)


def _carries(stem: str, location: str) -> bool:
    """Return whether a file name begins or ends with a location, as a word of its own."""
    word = re.escape(location)
    return re.search(rf"^{word}(?![^\W_])|(?<![^\W_]){word}$", stem, re.IGNORECASE) is not None


def _is_recording(folder: str, recording_id: str) -> bool:
    """Return whether a folder is named after one recording, as that of its chunks is, or after a day."""
    has_date = _STAMP.search(folder) or _DATE.search(folder)
    return has_date is not None or folder == normalize("NFC", posixpath.basename(recording_id))


def find_moment(name: str) -> str | None:
    """Return date and time from a file name; None: there is no certain one."""
    stamps = _STAMP.findall(name)
    if stamps:
        found = {at for date, time in stamps if (at := moment(date, time)) is not None}
        if len(found) == 1:  # two different ones are perhaps start and end
            return found.pop()
        return None
    dates = [match for match in _DATE.finditer(name) if moment(match[0], None) is not None]
    if len({match[0] for match in dates}) != 1:
        return None
    times = {time for time in _TIME.findall(name, dates[-1].end()) if moment(dates[0][0], time) is not None}
    if len(times) == 1:
        return moment(dates[0][0], times.pop())
    return None


def moment(date: str, time: str | None) -> str | None:
    """Return YYYYMMDD and HHMMSS in ISO 8601; None: there is no such day or time."""
    try:
        day = datetime(int(date[:4]), int(date[4:6]), int(date[6:]))
        if time is None:
            return day.date().isoformat()
        return day.replace(
            hour=int(time[:2]),
            minute=int(time[2:4]),
            second=int(time[4:]),
        ).isoformat()
    except ValueError:
        return None


def name_reader(settings: RunSettings, cwd: Path) -> NameReader:
    """Return the NameReader of a run; absolute paths may be below --root, or next to the source."""
    beside = [(cwd / source).parent for source in settings.source]
    roots = beside if settings.root is None else [cwd / settings.root]
    paths = [absolute(cwd, str(root)) for root in roots]
    # A path with ".." is read without the links above it.
    return NameReader(settings.patterns, tuple(dict.fromkeys([*paths, *map(posixpath.realpath, paths)])))


def gap_lines(
    gaps: NameGaps,
    patterns: Sequence[object],
    *,
    nameless: str | None = None,
) -> Iterator[str]:
    """Yield a line for each kind of missing name: no date, no matching pattern, no study area.

    ``nameless``: the file for recordings without a study area, if there is one file per study area.
    """
    kinds = [(gaps.undated, "date in the name", gaps.undated_example, " (badcjobs guide audio)")]
    if patterns:
        rule = "; the built-in rule was used instead"
        kinds.append((gaps.no_pattern, "matching pattern in [recordings]", gaps.no_pattern_example, rule))
    if nameless is not None:
        there = f" (badcjobs guide audio); the detections are in {nameless}"
        kinds.append((gaps.no_study_area, "study area in the path", gaps.no_study_area_example, there))
    for lacking, part, example, rest in kinds:
        if lacking:
            has = "has" if lacking == 1 else "have"
            yield f"{lacking:,} of {count(gaps.recordings, 'recording')} {has} no {part}, e.g. {example}{rest}"
