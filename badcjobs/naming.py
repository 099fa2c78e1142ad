"""What the paths of recordings mean: who reads them in a run, and what to say where they tell too little."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from badcjobs.config import RunSettings
from badcjobs.manifest.recording_names import NameReader
from badcjobs.model import NameGaps


def name_reader(settings: RunSettings, cwd: Path) -> NameReader:
    """Return what reads the names of a run's recordings; absolute paths may lie below --root, or beside the source."""
    beside = [(cwd / source).parent for source in settings.source]
    roots = beside if settings.root is None else [cwd / settings.root]
    return NameReader(settings.patterns, tuple(dict.fromkeys(os.path.abspath(root) for root in roots)))  # noqa: PTH100


def gap_lines(gaps: NameGaps, patterns: Sequence[object]) -> Iterator[str]:
    """Yield a line for each kind of thing that paths do not tell: dates, and where they fit no pattern."""
    if gaps.undated:
        verb, whose = ("has", "its") if gaps.undated == 1 else ("have", "their")
        where = f"e.g. {gaps.undated_example} (badcjobs guide recordings)"
        yield f"{_of(gaps.undated, gaps)} {verb} no date in {whose} name, {where}"
    if patterns and gaps.no_pattern:
        verb = "fits" if gaps.no_pattern == 1 else "fit"
        where = f"e.g. {gaps.no_pattern_example}; there the built-in rule was used"
        yield f"{_of(gaps.no_pattern, gaps)} {verb} no pattern of [recordings], {where}"


def area_line(gaps: NameGaps) -> str | None:
    """Return what to say of recordings without a study area; None: each has one."""
    if not gaps.no_study_area:
        return None
    verb, whose = ("has", "its") if gaps.no_study_area == 1 else ("have", "their")
    where = f"e.g. {gaps.no_study_area_example} (badcjobs guide recordings)"
    return f"{_of(gaps.no_study_area, gaps)} {verb} no study area in {whose} path, {where}"


def _of(many: int, gaps: NameGaps) -> str:
    return f"{many:,} of {gaps.recordings:,} recording{'' if gaps.recordings == 1 else 's'}"
