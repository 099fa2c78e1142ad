"""What is known about a recording besides its sound: where and when it was made, and what its header says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecordingName:
    """What the path of a recording tells; None: it does not."""

    study_area: str | None = None
    location: str | None = None
    recorded_at: str | None = (
        None  # ISO 8601 on the recorder's own clock, which has no zone; a date alone where no time is
    )
    pattern: str | None = None  # the pattern that fitted; None: none did, and the built-in rule was used


@dataclass(frozen=True, slots=True)
class NameGaps:
    """Of how many recordings the paths do not tell enough; the examples are None where there are none."""

    recordings: int
    undated: int
    undated_example: str | None
    no_study_area: int
    no_study_area_example: str | None
    no_pattern: int  # fit none; that is no gap where the config has none
    no_pattern_example: str | None
    untimed: int = 0  # have a date, but no time
    untimed_example: str | None = None


@dataclass(frozen=True, slots=True)
class AudioHeader:
    """What the header of an audio file says; None: it does not, or nobody has read it."""

    duration_s: float | None = None
    sample_rate_hz: int | None = None
    channels: int | None = None
    there_s: float | None = None  # the file breaks off, and so much of duration_s is there; None: all of it
    unfinished: bool = False  # nobody wrote the sizes into it, so that engines may find no audio where there is some
    unreadable: str = ""  # why the file could not be read at all, in the system's words
