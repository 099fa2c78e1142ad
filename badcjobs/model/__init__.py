"""The nouns that travel between stages: frozen, typed, with the unit in each name.

No behaviour beyond what a noun knows about itself; no imports from the rest of the package.
"""

from badcjobs.model.arrays import Allocation, ArrayOrder, ArrayShape, CutShort, JobStates, Submitted
from badcjobs.model.devices import AlertLimits, Device, InventoryDevice, StandIn
from badcjobs.model.facts import (
    AlertFacts,
    Completeness,
    CostFacts,
    DecisionFacts,
    DeviceFacts,
    DeviceWork,
    ErrorFacts,
    FailedChunk,
    ForeignProcess,
    Freshness,
    GapFacts,
    JobFacts,
    MetricFacts,
    StateTime,
    TaskFacts,
    UnderWay,
)
from badcjobs.model.findings import NOTE, PROBLEM, SEVERITIES, WARNING, Finding
from badcjobs.model.flac import FlacInfo, begin_with_length, read_flac_info
from badcjobs.model.names import TaskKey, stable_id
from badcjobs.model.paces import Progress, expected_end_ms
from badcjobs.model.probes import FITS, NO_START, TOO_LONG, Probed, ProbeKey, ProbeResult, Trial
from badcjobs.model.readings import (
    COUNTERS,
    METRICS,
    THROTTLE_BITS,
    HostReading,
    MemoryHeld,
    ProcessReading,
    Reading,
    UsageReading,
)
from badcjobs.model.recordings import AudioHeader, NameGaps, RecordingName
from badcjobs.model.silence import is_silent, publish_interval_s, silent_after_s
from badcjobs.model.stretches import CHARTED, ChartData, Envelope, Stretches
from badcjobs.model.wav_sizes import MOST_CHUNKS, UNTOLD, is_made_up, only_chunks
from badcjobs.model.work import Chunk, ChunkResult, ChunkStarted, Detection, Fingerprint, WorkerPlan

__all__ = [
    "CHARTED",
    "COUNTERS",
    "FITS",
    "METRICS",
    "MOST_CHUNKS",
    "NOTE",
    "NO_START",
    "PROBLEM",
    "SEVERITIES",
    "THROTTLE_BITS",
    "TOO_LONG",
    "UNTOLD",
    "WARNING",
    "AlertFacts",
    "AlertLimits",
    "Allocation",
    "ArrayOrder",
    "ArrayShape",
    "AudioHeader",
    "ChartData",
    "Chunk",
    "ChunkResult",
    "ChunkStarted",
    "Completeness",
    "CostFacts",
    "CutShort",
    "DecisionFacts",
    "Detection",
    "Device",
    "DeviceFacts",
    "DeviceWork",
    "Envelope",
    "ErrorFacts",
    "FailedChunk",
    "Finding",
    "Fingerprint",
    "FlacInfo",
    "ForeignProcess",
    "Freshness",
    "GapFacts",
    "HostReading",
    "InventoryDevice",
    "JobFacts",
    "JobStates",
    "MemoryHeld",
    "MetricFacts",
    "NameGaps",
    "ProbeKey",
    "ProbeResult",
    "Probed",
    "ProcessReading",
    "Progress",
    "Reading",
    "RecordingName",
    "StandIn",
    "StateTime",
    "Stretches",
    "Submitted",
    "TaskFacts",
    "TaskKey",
    "Trial",
    "UnderWay",
    "UsageReading",
    "WorkerPlan",
    "begin_with_length",
    "expected_end_ms",
    "is_made_up",
    "is_silent",
    "only_chunks",
    "publish_interval_s",
    "read_flac_info",
    "silent_after_s",
    "stable_id",
]
