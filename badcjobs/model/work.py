"""The work: chunks of audio, who does them, and what becomes of each try."""

from __future__ import annotations

from dataclasses import dataclass, field

from badcjobs.model.devices import Device
from badcjobs.model.recordings import AudioHeader


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
