"""The work: chunks of audio, how recordings are cut and named, what becomes of each try, and what a probe finds out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from unicodedata import normalize

from badcjobs.model.devices import Device


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


# --- work -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells that an audio file is still the one it was; None: not known."""

    audio_bytes: int | None = None
    audio_mtime_ns: int | None = None
    audio_sha256: str | None = None  # as the manifest gives it; nobody reads the audio for it
    header: AudioHeader = field(default=AudioHeader(), compare=False)  # where it was read anyway


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of audio to analyse; identity is (recording_id, chunk_id)."""

    recording_id: str
    chunk_id: str
    source_path: str  # as the source says
    audio_path: str  # where it lies
    start_ms: int = 0
    end_ms: int | None = None
    # What it was when it was listed: resume compares it, and workers its size and time before they read the audio.
    fingerprint: Fingerprint = field(default=Fingerprint(), compare=False)
    piece_of: str | None = None  # the chunk_id of the chunk that this is a piece of
    is_cut: bool = False  # it is [start_ms, end_ms) of a longer file, to be cut out before an engine gets it

    @property
    def key(self) -> tuple[str, str]:
        return (self.recording_id, self.chunk_id)

    @property
    def name(self) -> str:
        return self.recording_id if self.chunk_id == self.recording_id else f"{self.recording_id}/{self.chunk_id}"

    @property
    def audio_s(self) -> float | None:
        return None if self.end_ms is None else (self.end_ms - self.start_ms) / 1000


@dataclass(frozen=True, slots=True)
class Detection:
    """Something heard; times count from the chunk's start."""

    start_ms: int
    end_ms: int
    label: str
    score: float | None
    label_name: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One place for an engine process: a device (or none, on the CPU) and its share of the cores."""

    slot: int
    device: Device | None
    device_id: int | None
    threads: int
    lean: bool = False  # with as little memory of the device as the engine can do with: one thread, one chunk


@dataclass(frozen=True, slots=True)
class ChunkStarted:
    """An engine has begun a chunk."""

    chunk: Chunk
    at_ms: int


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What became of one try of one chunk."""

    chunk: Chunk
    started_at_ms: int
    ended_at_ms: int
    detections: tuple[Detection, ...] = ()
    audio_s: float | None = None
    error_class: str | None = None  # None: it worked
    error: str | None = None
    # False: lost together with others and not proven guilty; tried again in smaller company, at no charge.
    charged: bool = True
    pieces: int | None = None  # it was cut into so many; None: analysed whole

    @property
    def ok(self) -> bool:
        return self.error_class is None


# --- probes -----------------------------------------------------------------------------------------------------------

FITS, TOO_LONG, NO_START = "fits", "too long", "no start"  # the last: its models alone fill the device


@dataclass(frozen=True, slots=True)
class Trial:
    """Chunks of one length, given to an engine on one device."""

    length_s: float
    lean: bool  # with one thread, and nothing beside it
    outcome: str  # FITS, TOO_LONG or NO_START
    chunks: int = 0  # that were done
    work_s: float | None = None  # their time without the start of the engine
    times_real_time: float | None = None
    peak_bytes: int | None = None  # the most memory of the device in use; None: nobody could read it, or it ran out
    host_peak_bytes: int | None = None  # the most memory that our processes held on the node


@dataclass(frozen=True, slots=True)
class ProbeKey:
    """What a probe is about: with anything else here, another length may fit."""

    gpu: str  # the model's name; "cpu" without a device
    memory_bytes: int | None
    engine: str
    engine_version: str
    settings: str
    chunks_at_once: int = 1  # in all the threads of all the workers of a device
    workers: int = 1


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What all trials together say; None: not known, or there is none."""

    longest_s: float | None  # that fits
    too_long_s: float | None  # the shortest that does not; None: all that was tried fits
    safe_s: float | None  # the longest, less the margin
    best_s: float | None  # the shortest of those that are about as fast as the fastest
    times_real_time: float | None  # at the best length
    peak_bytes: int | None = None  # at the best length
    lean_longest_s: float | None = None  # with one thread, and nothing beside it; not searched where all fits as usual
    lean_too_long_s: float | None = None
    lean_safe_s: float | None = None
    margin_percent: float = 10.0


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe of one model of device; there is a result as soon as the usual way is known."""

    key: ProbeKey
    trials: tuple[Trial, ...] = ()
    result: ProbeResult | None = None
    finished: bool = False
    at: str | None = None  # when the last trial ended, UTC


# --- cutting ----------------------------------------------------------------------------------------------------------


_SLACK_MS = 1000  # a row and its file may differ by so much: recorders, and those who round, are not exact
_LEAST_OF_ITS_OWN_MS = 3000  # HawkEars listens to windows of 3 s: a last chunk has one that no other has
_SHORTEST_S = 1.0
_LONGEST_S = 86_400.0
_LEAST_STEP_S = 1.0  # from the begin of one chunk to that of the next


@dataclass(frozen=True, slots=True)
class Cutting:
    """How recordings become chunks.

    ``rows``: whether rows of a manifest are stretches of longer files; None: those that look so. ``chunk_length_s``
    and ``overlap_s`` are for whole recordings (folders, lists, audio files); without a length each is one chunk.
    """

    rows: bool | None = None
    chunk_length_s: float | None = None
    overlap_s: float = 0.0

    @property
    def cuts_recordings(self) -> bool:
        return self.chunk_length_s is not None

    def problems(self) -> list[str]:
        """Return what is wrong with these values, in the words of the command line."""
        length_s, overlap_s = self.chunk_length_s, self.overlap_s
        if length_s is None:
            return [f"--overlap {overlap_s:g} goes with --chunk-length SECONDS"] if overlap_s else []
        found = []
        if not _SHORTEST_S <= length_s <= _LONGEST_S:
            found.append(f"--chunk-length {length_s:g} must be from {_SHORTEST_S:g} to {_LONGEST_S:g} seconds")
        if overlap_s < 0:
            found.append(f"--overlap {overlap_s:g} must not be negative")
        elif length_s - overlap_s < _LEAST_STEP_S and not found:
            least = f"at least {_LEAST_STEP_S:g} s shorter than --chunk-length {length_s:g}"
            found.append(f"--overlap {overlap_s:g} must be {least}, for each chunk begins where the last one is over")
        return found

    def stretches(self, audio_ms: int) -> Sequence[tuple[int, int]]:
        """Return start and end of the chunks that cover a whole recording, each sharing the overlap with the next.

        What would be left for a last one that has less than three seconds of its own goes to the one before.
        """
        if self.chunk_length_s is None:
            return [(0, audio_ms)]
        length_ms, overlap_ms = round(self.chunk_length_s * 1000), round(self.overlap_s * 1000)
        step_ms = length_ms - overlap_ms
        more_ms = audio_ms - overlap_ms - _LEAST_OF_ITS_OWN_MS  # where the last one begins at the latest
        starts = range(0, (1 + max(0, more_ms // step_ms)) * step_ms, step_ms)
        return [*((start, start + length_ms) for start in starts[:-1]), (starts[-1], audio_ms)]


AS_IT_COMES = Cutting()


def is_stretch(start_ms: int, end_ms: int, audio_ms: int) -> bool:
    """Say whether a row can only be a part of its file: that is longer than the row, and reaches to its end."""
    return is_longer(start_ms, end_ms, audio_ms) and not is_beyond(end_ms, audio_ms)


def is_longer(start_ms: int, end_ms: int, audio_ms: int) -> bool:
    """Say whether a file has clearly more audio than its row."""
    return audio_ms - (end_ms - start_ms) > _SLACK_MS


def is_beyond(end_ms: int, audio_ms: int) -> bool:
    """Say whether a row ends clearly behind the end of its file."""
    return end_ms - audio_ms > _SLACK_MS


# --- names ------------------------------------------------------------------------------------------------------------


_FIELDS = {"study_area": "[^/]+?", "location": "[^/]+?", "date": "[0-9]{8}", "time": "[0-9]{6}"}
_KNOWN = ", ".join(f"{{{field}}}" for field in _FIELDS)
_TOKEN = re.compile(r"\{(?P<field>[^{}/]*)\}|(?P<folders>\*\*/)|(?P<any>\*)|(?P<one>\?)|[^{}*?]+")
_OF_DIGITS = ("{date}", "{time}")


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A pattern that can be used."""

    text: str
    regex: re.Pattern[str]
    is_full: bool  # it is compared with the whole path, and not with that below the source's root

    def read(self, path: str, below: str | None) -> Mapping[str, str] | None:
        """Return what a path tells; None: it does not fit. ``below``: from the root on; None: it is not below it."""
        compared = path if self.is_full else below
        found = None if compared is None else self.regex.fullmatch(normalize("NFC", compared))
        return None if found is None else found.groupdict()


def parse_pattern(text: str) -> NamePattern:
    """Read a pattern that says what folders and file names of recordings mean, as a scientist writes it.

        {study_area}/ARU_data/SM/{location}/*/Data/*_{date}_{time}.wav

    A name in braces is what is read, * and ? stand for letters of one name, ** for any folders; all else is itself.
    A ValueError says, in words that follow the pattern, what is wrong with it.
    """
    is_full = text.startswith(("/", "**/"))
    path = normalize("NFC", text).removeprefix("./").removeprefix("/")
    fields = re.findall(r"\{([^{}/]*)\}", path)
    unknown = [field for field in fields if field not in _FIELDS]
    twice = sorted({field for field in fields if fields.count(field) > 1})
    for wrong, words in (
        (not text, "is empty"),
        (not path or path.endswith("/"), "ends with /, but has to end with a file name"),
        ("//" in path, "has // in it"),
        (re.search(r"\*\*(?!/)|[^/]\*\*", path), "has ** that is not a folder of its own, as in a/**/b"),
        (re.search(r"[{}]", re.sub(r"\{[^{}/]*\}", "", path)), "has a { or } that stands alone"),
        (unknown, f"has {{{''.join(unknown[:1])}}}; what can be read is {_KNOWN}"),
        (not fields, f"reads nothing: it has none of {_KNOWN}"),
        (twice, f"has {{{''.join(twice[:1])}}} twice"),
        ("time" in fields and "date" not in fields, "has {time} without {date}"),
    ):
        if wrong:
            raise ValueError(words)
    ending = re.search(r"(\.(wav|flac))?$", path, re.IGNORECASE)  # recorders write .WAV as well as .wav
    name = path.removesuffix(ending[0]) if ending else path
    regex = _TOKEN.sub(_part, name) + (f"(?i:{re.escape(ending[0])})" if ending else "")
    return NamePattern(text, re.compile(("/" if is_full else "") + regex), is_full)


def _part(token: re.Match[str]) -> str:
    """Return a part of a pattern as a regular expression."""
    field = token["field"]
    if field is None:
        folders, any_letters = "(?:[^/]+/)*?" if token["folders"] else "", "[^/]*" if token["any"] else ""
        return folders or any_letters or ("[^/]" if token["one"] else re.escape(token[0]))
    group = f"(?P<{field}>{_FIELDS[field]})"
    if token[0] not in _OF_DIGITS:
        return group
    before, after = token.string[: token.start()], token.string[token.end() :]  # not part of a serial number
    group = group if before.endswith(_OF_DIGITS) else f"(?<![0-9]){group}"
    return group if after.startswith(_OF_DIGITS) else f"{group}(?![0-9])"


def parse_patterns(texts: Sequence[str]) -> tuple[tuple[NamePattern, ...], list[str]]:
    """Read several, and return those that can be used, and what is wrong with the others."""
    patterns, wrong = [], []
    for text in texts:
        try:
            patterns.append(parse_pattern(text))
        except ValueError as error:
            wrong.append(f"{text!r} {error}")
    return tuple(patterns), wrong
