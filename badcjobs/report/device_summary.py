"""Facts of one device → its summary. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from badcjobs.model import DeviceFacts, MetricFacts

_COUNTER_COVERS = 0.9  # the counter is read every few seconds: short tasks end between two readings
UNKNOWN_STATE = "unknown"
_METRICS = ("utilization_percent", "busy_percent", "memory_used_bytes", "temperature_c", "power_w")


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """One device of one task; None where nothing was read."""

    task: str
    node: str
    index: int | None
    uuid: str | None
    token: str
    name: str | None
    backend: str
    samples: int
    busy_mean_percent: float | None  # the best figure there is; the plain utilization is blind to light load
    utilization_mean_percent: float | None
    utilization_p50_percent: int | None
    utilization_p95_percent: int | None
    utilization_max_percent: int | None
    memory_peak_bytes: int | None
    memory_total_bytes: int | None
    temperature_max_c: int | None
    power_mean_w: float | None
    energy_j: float | None
    energy_source: str | None  # counter, or integrated power
    gap_s: float
    power_limit_w: float | None = None
    metrics: Mapping[str, MetricFacts] = field(default_factory=dict)  # those people ask for; job.sqlite has them all
    state_s: Mapping[str, float] = field(default_factory=dict)
    state_busy_s: Mapping[str, float] = field(default_factory=dict)
    state_energy_j: Mapping[str, float] = field(default_factory=dict)  # adds up to energy_j
    state_measured_s: Mapping[str, float] = field(default_factory=dict)  # for so much of it the power is known
    energy_measured_s: float = 0.0  # for so long energy_j was measured: what was used before and after is not in it
    throttled: Mapping[str, int] = field(default_factory=dict)  # reason → samples
    workers: int = 0
    tries_done: int = 0
    tries_failed: int = 0
    tries_lost: int = 0
    audio_hours: float = 0.0
    chunk_p50_s: float | None = None
    chunk_p95_s: float | None = None
    chunk_max_s: float | None = None
    spark: tuple[float | None, ...] = ()  # mean utilization over its time, in at most 20 columns
    last: Mapping[str, float] = field(default_factory=dict)  # its last reading

    @property
    def label(self) -> str:
        """What people call it: its index or, where it has none, its token."""
        return self.token if self.index is None else str(self.index)


def summarize_device(device: DeviceFacts) -> DeviceSummary:
    """Say what the facts of a device amount to."""
    counts, work = device.utilization_counts, device.work
    total = sum(counts.values())
    energy_j, energy_source = _energy(device)
    return DeviceSummary(
        task=device.task,
        node=device.node,
        index=device.index,
        uuid=device.uuid,
        token=device.token,
        name=device.name,
        backend=device.backend,
        samples=device.samples,
        busy_mean_percent=device.busy_mean_percent,
        utilization_mean_percent=sum(value * many for value, many in counts.items()) / total if total else None,
        utilization_p50_percent=percentile(counts, 50),
        utilization_p95_percent=percentile(counts, 95),
        utilization_max_percent=max(counts, default=None),
        memory_peak_bytes=device.memory_peak_bytes,
        memory_total_bytes=device.memory_total_bytes,
        temperature_max_c=device.temperature_max_c,
        power_mean_w=device.power_mean_w,
        energy_j=energy_j,
        energy_source=energy_source,
        gap_s=device.gap_s,
        power_limit_w=device.power_limit_w,
        metrics={name: device.metrics[name] for name in _METRICS if name in device.metrics},
        state_s={state: time.total_s for state, time in device.states.items()},
        state_busy_s={state: time.busy_s for state, time in device.states.items() if time.busy_s is not None},
        state_energy_j=_share_out(energy_j, device),
        state_measured_s={state: time.measured_s for state, time in device.states.items()},
        energy_measured_s=_measured_s(device, energy_source),
        throttled={reason: many for reason, many in device.throttled.items() if reason != "gpu_idle"},
        workers=work.workers,
        tries_done=work.done,
        tries_failed=work.failed,
        tries_lost=work.lost,
        audio_hours=work.audio_s / 3600,
        chunk_p50_s=work.chunk_p50_s,
        chunk_p95_s=work.chunk_p95_s,
        chunk_max_s=work.chunk_max_s,
        spark=device.spark,
        last=device.last,
    )


def _energy(device: DeviceFacts) -> tuple[float | None, str | None]:
    """Take the counter where it saw nearly the whole time, else power integrated over the samples."""
    span_s = device.energy_counter_span_s
    if device.energy_counter_j is not None and span_s and span_s >= _COUNTER_COVERS * (device.span_s or 0.0):
        return device.energy_counter_j, "counter"
    if device.energy_integrated_j is not None:
        return device.energy_integrated_j, "integrated power"
    return None, None


def _measured_s(device: DeviceFacts, energy_source: str | None) -> float:
    if energy_source is None:
        return 0.0
    if energy_source == "counter":
        return device.energy_counter_span_s or 0.0
    return sum(time.measured_s for time in device.states.values())


def _share_out(energy_j: float | None, device: DeviceFacts) -> dict[str, float]:
    """Share the energy of a device out over its states in the ratio of what was measured in each."""
    if energy_j is None:
        return {}
    measured = {state: time.energy_j for state, time in device.states.items() if time.energy_j is not None}
    total_j = sum(measured.values())
    if total_j <= 0:
        return {UNKNOWN_STATE: energy_j}
    return {state: energy_j * (joules / total_j) for state, joules in measured.items()}


def percentile(counts: Mapping[int, int], share_percent: int) -> int | None:
    """Return the smallest value that at least this share of the samples does not exceed (nearest rank)."""
    total = sum(counts.values())
    seen = 0
    for value in sorted(counts):
        seen += counts[value]
        if seen * 100 >= total * share_percent:
            return value
    return None
