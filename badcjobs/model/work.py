"""The work: chunks of audio, cutting and naming of recordings, results of attempts, and probes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from unicodedata import normalize

from badcjobs.model.devices import Device
from badcjobs.model.places import NOWHERE, Place


@dataclass(frozen=True, slots=True)
class RecordingName:
    """What the path of a recording contains; None: it does not contain it."""

    study_area: str | None = None
    location: str | None = None
    # ISO 8601 on the recorder's own clock, without a time zone; only a date if the path has no time.
    recorded_at: str | None = None
    pattern: str | None = None  # the pattern that matched; None: none did, and the built-in rule was used
    place: Place = NOWHERE
    left_out: str | None = None  # why the recording is not analysed; None: it is
    no_county: bool | None = None  # at its coordinates, so that HawkEars' filter of species is off; None: not known


@dataclass(frozen=True, slots=True)
class NameGaps:
    """How many recordings have a path without a date, study area or time; an example is None if there are none."""

    recordings: int
    undated: int
    undated_example: str | None
    no_study_area: int
    no_study_area_example: str | None
    no_pattern: int  # match no pattern; not a gap if the config has no patterns
    no_pattern_example: str | None
    untimed: int = 0  # with a date, but no time
    untimed_example: str | None = None


# Why a file gives no audio: the same words in check, plan, report and monitor, and the error_class of its chunks.
EMPTY_FILE = "empty_file"
NOT_AUDIO = "not_audio"
BROKEN_AUDIO = "broken_audio"  # its header, or less audio than the header states
UNREADABLE_FILE = "unreadable_file"  # no permission, or a disk that fails
AUDIO_FAULTS = (
    EMPTY_FILE,
    NOT_AUDIO,
    BROKEN_AUDIO,
    UNREADABLE_FILE,
)


@dataclass(frozen=True, slots=True)
class AudioHeader:
    """The header of an audio file; None: not given, or not read."""

    duration_s: float | None = None
    sample_rate_hz: int | None = None
    channels: int | None = None
    there_s: float | None = None  # the file is truncated after this many seconds of duration_s; None: it is complete
    unfinished: bool = False  # its sizes were never written, so that engines may find no audio in it
    fault: str = ""  # one of AUDIO_FAULTS, if nothing of it can be analysed
    why: str = ""  # what is wrong with it, if something is

    @property
    def problem(self) -> str:
        """What is wrong with the file, in one line: the fault in words, and why."""
        return f"{self.fault.replace('_', ' ')}: {self.why}"


# --- work -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What shows that an audio file has not changed; None: not known."""

    audio_bytes: int | None = None
    audio_mtime_ns: int | None = None
    audio_sha256: str | None = None  # from the manifest; never computed
    header: AudioHeader = field(default=AudioHeader(), compare=False)  # if it was read anyway


ChunkKey = tuple[str, str]  # recording_id and chunk_id


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of audio to analyse; identity is (recording_id, chunk_id)."""

    recording_id: str
    chunk_id: str
    source_path: str  # as written in the source
    audio_path: str  # the file
    start_ms: int = 0
    end_ms: int | None = None
    # As it was when it was listed: resume compares it, and workers compare size and time before they read the audio.
    fingerprint: Fingerprint = field(default=Fingerprint(), compare=False)
    piece_of: str | None = None  # the chunk_id of the chunk that this is a part of
    is_cut: bool = False  # [start_ms, end_ms) of a longer file, to be cut out for the engine
    place: Place = field(default=NOWHERE, compare=False)  # of its recording

    @property
    def key(self) -> ChunkKey:
        return (self.recording_id, self.chunk_id)

    @property
    def name(self) -> str:
        if self.chunk_id == self.recording_id:
            return self.recording_id
        return f"{self.recording_id}/{self.chunk_id}"

    @property
    def audio_s(self) -> float | None:
        return None if self.end_ms is None else (self.end_ms - self.start_ms) / 1000


@dataclass(frozen=True, slots=True)
class Detection:
    """One detection; times are relative to the chunk's start."""

    start_ms: int
    end_ms: int
    label: str
    score: float | None
    label_name: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker to start: its device (or none, on the CPU) and its share of the cores."""

    slot: int
    device: Device | None
    device_id: int | None
    threads: int
    lean: bool = False  # uses as little device memory as the engine can: one thread, one chunk
    pipe: str | None = None  # the folder of the MPS daemon through which it shares its device; None: no daemon of ours


@dataclass(frozen=True, slots=True)
class ChunkStarted:
    """An engine has started a chunk."""

    chunk: Chunk
    at_ms: int


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The result of one attempt of one chunk."""

    chunk: Chunk
    started_at_ms: int
    ended_at_ms: int
    detections: tuple[Detection, ...] = ()
    audio_s: float | None = None
    error_class: str | None = None  # None: it worked
    error: str | None = None
    # False: lost together with other chunks, so not necessarily the cause; retried without counting the attempt.
    charged: bool = True
    pieces: int | None = None  # the number of pieces it was cut into; None: analysed as one
    rarities: tuple[Detection, ...] = ()  # of species that are not expected at its place in that week

    @property
    def ok(self) -> bool:
        return self.error_class is None


# --- probes -----------------------------------------------------------------------------------------------------------

FITS, TOO_LONG, NO_START = "fits", "too long", "no start"  # no start: the models alone fill the device


@dataclass(frozen=True, slots=True)
class Trial:
    """A test of one chunk length with an engine on one device."""

    length_s: float
    lean: bool  # with one thread, and no other worker
    outcome: str  # FITS, TOO_LONG or NO_START
    chunks: int = 0  # chunks done
    work_s: float | None = None  # without the start of the engine
    times_real_time: float | None = None
    peak_bytes: int | None = None  # peak device memory in use; None: not readable, or it ran out
    host_peak_bytes: int | None = None  # peak main memory of our processes
    start_up_s: float | None = None  # until the first chunk was begun


@dataclass(frozen=True, slots=True)
class ProbeKey:
    """The conditions of a probe: if any of these differ, another length may fit."""

    gpu: str  # the model's name; "cpu" without a device
    memory_bytes: int | None
    engine: str
    engine_version: str
    settings: str
    chunks_at_once: int = 1  # in all threads of all workers of a device
    workers: int = 1


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of all trials; None: not known, or there is none."""

    longest_s: float | None  # the longest that fits
    too_long_s: float | None  # the shortest that does not fit; None: every length fits
    safe_s: float | None  # the longest, less the margin
    best_s: float | None  # the shortest that is about as fast as the fastest
    times_real_time: float | None  # at the best length
    peak_bytes: int | None = None  # at the best length
    lean_longest_s: float | None = None  # with one thread and no other worker; not searched if every length fits
    lean_too_long_s: float | None = None
    lean_safe_s: float | None = None
    margin_percent: float = 10.0


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe of one device model; it has a result as soon as the trials with all threads are done."""

    key: ProbeKey
    trials: tuple[Trial, ...] = ()
    result: ProbeResult | None = None
    finished: bool = False
    at: str | None = None  # when the last trial ended, UTC


# --- cutting ----------------------------------------------------------------------------------------------------------


_LEAST_OWN_MS = 3000  # HawkEars analyses windows of 3 s: the last chunk must have one that no other chunk has
_SHORTEST_S = 1.0
_LONGEST_S = 86_400.0
_LEAST_STEP_S = 1.0  # from the start of one chunk to the start of the next


@dataclass(frozen=True, slots=True)
class Cutting:
    """How recordings are cut into chunks.

    ``rows``: whether rows of a manifest are parts of longer files; None: decide by their length. ``chunk_length_s`` and
    ``overlap_s`` are for complete recordings (folders, lists, audio files); without a length each is one chunk.
    """

    rows: bool | None = None
    chunk_length_s: float | None = None
    overlap_s: float = 0.0

    @property
    def cuts_recordings(self) -> bool:
        return self.chunk_length_s is not None

    def problems(self) -> list[str]:
        """Return the mistakes in these values, with the names of the options."""
        length_s = self.chunk_length_s
        overlap = f"--overlap {self.overlap_s:g}"
        if length_s is None:
            return [f"{overlap} needs --chunk-length SECONDS"] if self.overlap_s else []
        problems = []
        if not _SHORTEST_S <= length_s <= _LONGEST_S:
            problems.append(f"--chunk-length {length_s:g} must be from {_SHORTEST_S:g} to {_LONGEST_S:g} seconds")
        if self.overlap_s < 0:
            problems.append(f"{overlap} must not be negative")
        elif length_s - self.overlap_s < _LEAST_STEP_S and not problems:
            least = f"at least {_LEAST_STEP_S:g} s shorter than --chunk-length {length_s:g}"
            problems.append(f"{overlap} must be {least}, so that each chunk adds new audio")
        return problems

    def stretches(self, audio_ms: int) -> Sequence[tuple[int, int]]:
        """Return start and end of the chunks of a complete recording; each overlaps with the next.

        If the last chunk would add less than three seconds, the previous one is extended instead.
        """
        if self.chunk_length_s is None:
            return [(0, audio_ms)]
        length_ms = round(self.chunk_length_s * 1000)
        overlap_ms = round(self.overlap_s * 1000)
        step_ms = length_ms - overlap_ms
        more_ms = audio_ms - overlap_ms - _LEAST_OWN_MS  # the latest start of the last chunk
        starts = range(0, (1 + max(0, more_ms // step_ms)) * step_ms, step_ms)
        return [*((start, start + length_ms) for start in starts[:-1]), (starts[-1], audio_ms)]


NO_CUTTING = Cutting()


# --- names ------------------------------------------------------------------------------------------------------------


_FIELDS = {"study_area": "[^/]+?", "location": "[^/]+?", "date": "[0-9]{8}", "time": "[0-9]{6}"}
_KNOWN = ", ".join(f"{{{field}}}" for field in _FIELDS)
_TOKEN = re.compile(r"\{(?P<field>[^{}/]*)\}|(?P<folders>\*\*/)|(?P<any>\*)|(?P<one>\?)|[^{}*?]+")
_OF_DIGITS = ("{date}", "{time}")


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A valid pattern for the paths of recordings."""

    text: str
    regex: re.Pattern[str]
    is_full: bool  # matched against the full path, not the path relative to the source's root

    def read(self, path: str, below: str | None) -> Mapping[str, str] | None:
        """Return the fields of a path; None: no match. ``below``: the path relative to the root; None: not below it."""
        compared = path if self.is_full else below
        if compared is None:
            return None
        match = self.regex.fullmatch(normalize("NFC", compared))
        return None if match is None else match.groupdict()


def parse_pattern(text: str) -> NamePattern:
    """Parse a pattern for the folders and file names of recordings.

        {study_area}/ARU_data/SM/{location}/*/Data/*_{date}_{time}.wav

    A name in braces is a field, * and ? match characters of one name, ** matches any folders; the rest is literal.
    A ValueError describes the mistake, in words that follow the pattern.
    """
    is_full = text.startswith(("/", "**/"))
    path = normalize("NFC", text).removeprefix("./").removeprefix("/")
    _check_pattern(text, path)
    ending = re.search(r"(\.(wav|flac))?$", path, re.IGNORECASE)  # recorders write .WAV as well as .wav
    assert ending is not None
    regex = _TOKEN.sub(_part, path.removesuffix(ending[0]))
    if ending[0]:
        regex += f"(?i:{re.escape(ending[0])})"
    if is_full:
        regex = f"/{regex}"
    return NamePattern(text, re.compile(regex), is_full)


def _check_pattern(text: str, path: str) -> None:
    """Raise a ValueError for the first mistake."""
    fields = re.findall(r"\{([^{}/]*)\}", path)
    unknown = [field for field in fields if field not in _FIELDS]
    twice = sorted({field for field in fields if fields.count(field) > 1})
    for is_wrong, mistake in (
        (not text, "is empty"),
        (not path or path.endswith("/"), "ends with /, but must end with a file name"),
        ("//" in path, "has // in it"),
        (re.search(r"\*\*(?!/)|[^/]\*\*", path), "has ** that is not a complete folder name, as in a/**/b"),
        (re.search(r"[{}]", re.sub(r"\{[^{}/]*\}", "", path)), "has an unmatched { or }"),
        (unknown, f"has {{{''.join(unknown[:1])}}}; the known fields are {_KNOWN}"),
        (not fields, f"has no field; the known fields are {_KNOWN}"),
        (twice, f"has {{{''.join(twice[:1])}}} twice"),
        ("time" in fields and "date" not in fields, "has {time} without {date}"),
    ):
        if is_wrong:
            raise ValueError(mistake)


def _part(token: re.Match[str]) -> str:
    """Translate a part of a pattern into a regular expression."""
    if token["folders"]:
        return "(?:[^/]+/)*?"
    if token["any"]:
        return "[^/]*"
    if token["one"]:
        return "[^/]"
    if token["field"] is None:
        return re.escape(token[0])

    group = f"(?P<{token['field']}>{_FIELDS[token['field']]})"
    if token[0] not in _OF_DIGITS:
        return group
    # Do not match inside a serial number.
    if not token.string[: token.start()].endswith(_OF_DIGITS):
        group = f"(?<![0-9]){group}"
    if not token.string[token.end() :].startswith(_OF_DIGITS):
        group = f"{group}(?![0-9])"
    return group


def parse_patterns(texts: Sequence[str]) -> tuple[tuple[NamePattern, ...], list[str]]:
    """Parse several patterns; return the valid ones, and the mistakes in the others."""
    patterns = []
    mistakes = []
    for text in texts:
        try:
            patterns.append(parse_pattern(text))
        except ValueError as error:
            mistakes.append(f"{text!r} {error}")
    return tuple(patterns), mistakes


def parse_time_zone(text: str) -> tzinfo | None:
    """Return the time zone of a recorder: an offset such as -07:00, or a name such as America/Yellowknife; "": None."""
    if not text:
        return None
    with suppress(ValueError):
        return datetime.strptime(text, "%z").tzinfo
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # late: the recorder needs no time zones, and stays smaller

    with suppress(ValueError, OSError, ZoneInfoNotFoundError):
        return ZoneInfo(text)
    raise ValueError(f"{text!r} is neither an offset such as -07:00 nor a time zone such as America/Yellowknife")
