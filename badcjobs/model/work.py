"""The work: chunks of audio, who does them, and what becomes of each try; and what a probe finds out."""

from __future__ import annotations

from dataclasses import dataclass, field

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
