"""Facts of one device → its summary; and all devices together: what they did with their time and energy. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from badcjobs.report.words import count
from badcjobs.store.read_model import DeviceFacts

_COUNTER_COVERS = 0.9  # the counter is read every few seconds: short tasks end between two readings
UNKNOWN_STATE = "unknown"
_METRICS = ("utilization_percent", "busy_percent", "memory_used_bytes", "temperature_c", "power_w")
# The keys of a device in the JSON document, in their order; see DeviceSummary.to_dict for those that are not its own.
DEVICE_KEYS = (
    "task", "node", "index", "uuid", "token", "name", "backend", "samples", "busy_mean_percent",
    "utilization_mean_percent", "utilization_p50_percent", "utilization_p95_percent", "utilization_max_percent",
    "memory_peak_bytes", "memory_total_bytes", "temperature_max_c", "power_mean_w", "energy_j", "energy_source",
    "gap_s", "power_limit_w", "metrics", "state_s", "state_busy_s", "state_energy_j", "state_measured_s",
    "energy_measured_s", "throttled", "workers", "tries_done", "tries_failed", "tries_lost", "audio_hours",
    "chunk_p50_s", "chunk_p95_s", "chunk_max_s", "spark", "last",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceSummary(DeviceFacts):
    """One device of one task: its facts, and what they amount to; None where nothing was read."""

    @classmethod
    def of(cls, device: DeviceFacts) -> DeviceSummary:
        """Return the summary of a device."""
        return cls(**{one.name: getattr(device, one.name) for one in fields(device)})

    @property
    def label(self) -> str:
        """What people call it: its index or, where it has none, its token."""
        return self.token if self.index is None else str(self.index)

    @property
    def utilization_mean_percent(self) -> float | None:
        """The plain utilization, which is blind to light load; busy_mean_percent is the best figure there is."""
        total = sum(self.utilization_counts.values())
        return sum(value * many for value, many in self.utilization_counts.items()) / total if total else None

    @property
    def energy_source(self) -> str | None:
        """The counter where it saw nearly the whole time, else power integrated over the samples."""
        span_s = self.energy_counter_span_s
        if self.energy_counter_j is not None and span_s and span_s >= _COUNTER_COVERS * (self.span_s or 0.0):
            return "counter"
        return None if self.energy_integrated_j is None else "integrated power"

    @property
    def energy_j(self) -> float | None:
        """The energy that it used, as far as it was measured."""
        return self.energy_counter_j if self.energy_source == "counter" else self.energy_integrated_j

    @property
    def energy_measured_s(self) -> float:
        """For how long energy_j was measured: what was used before and after is not in it."""
        if self.energy_source is None:
            return 0.0
        return (self.energy_counter_span_s or 0.0) if self.energy_source == "counter" else sum(self.measured_s.values())

    @property
    def state_s(self) -> dict[str, float]:
        """Its time by state."""
        return {state: time.total_s for state, time in self.states.items()}

    @property
    def measured_s(self) -> dict[str, float]:
        """For so much of the time in each state its power is known."""
        return {state: time.measured_s for state, time in self.states.items()}

    @property
    def state_energy_j(self) -> dict[str, float]:
        """Its energy shared out over its states in the ratio of what was measured in each; adds up to energy_j."""
        energy_j = self.energy_j
        if energy_j is None:
            return {}
        measured = {state: time.energy_j for state, time in self.states.items() if time.energy_j is not None}
        total_j = sum(measured.values())
        if total_j <= 0:
            return {UNKNOWN_STATE: energy_j}
        return {state: energy_j * (joules / total_j) for state, joules in measured.items()}

    @property
    def held_back(self) -> dict[str, int]:
        """Why its clock was lowered: reason → samples."""
        return {reason: many for reason, many in self.throttled.items() if reason != "gpu_idle"}

    def to_dict(self) -> dict[str, Any]:
        """Return it as it stands in the JSON document: DEVICE_KEYS."""
        work, counts = self.work, self.utilization_counts
        others = {
            "utilization_p50_percent": percentile(counts, 50),
            "utilization_p95_percent": percentile(counts, 95),
            "utilization_max_percent": max(counts, default=None),
            "metrics": {name: asdict(self.metrics[name]) for name in _METRICS if name in self.metrics},
            "state_busy_s": {state: time.busy_s for state, time in self.states.items() if time.busy_s is not None},
            "state_measured_s": self.measured_s,
            "throttled": self.held_back,
            "workers": work.workers,
            "tries_done": work.done,
            "tries_failed": work.failed,
            "tries_lost": work.lost,
            "audio_hours": work.audio_s / 3600,
            "chunk_p50_s": work.chunk_p50_s,
            "chunk_p95_s": work.chunk_p95_s,
            "chunk_max_s": work.chunk_max_s,
        }
        return {key: others[key] if key in others else getattr(self, key) for key in DEVICE_KEYS}


def percentile(counts: Mapping[int, int], share_percent: int) -> int | None:
    """Return the smallest value that at least this share of the samples does not exceed (nearest rank)."""
    total = sum(counts.values())
    seen = 0
    for value in sorted(counts):
        seen += counts[value]
        if seen * 100 >= total * share_percent:
            return value
    return None


# In the order of the table device_time, each as people say it.
STATE_WORDS = {
    "working": "working",
    "failed": "on chunks that failed",
    "lost": "on work that was lost",
    "start_up": "starting up",
    "waiting": "waiting for a chunk",
    "idle": "without a worker",
    UNKNOWN_STATE: "not known",
}
NEARLY_ALL = 99.0  # percent: who measured less has to say so
_MOST = 90.0  # percent of one state
_ROUNDING_S = 1.0


@dataclass(frozen=True, slots=True)
class StateSummary:
    """What all devices did in one state; None: not measured."""

    gpu_hours: float
    share_percent: float | None  # of the time of all devices
    busy_hours: float | None
    energy_wh: float | None
    energy_share_percent: float | None  # of the energy of all devices that said
    measured_percent: float | None = None  # for so much of its time the power of the devices is known


def together(states: Mapping[str, StateSummary]) -> StateSummary:
    """Return the sum of all states."""
    found = states.values()
    hours = sum(state.gpu_hours for state in found)
    busy = [state.busy_hours for state in found if state.busy_hours is not None]
    energies = [state.energy_wh for state in found if state.energy_wh is not None]
    measured = sum(state.gpu_hours * (state.measured_percent or 0.0) for state in found)
    return StateSummary(
        gpu_hours=hours,
        share_percent=100.0,
        busy_hours=sum(busy) if busy else None,
        energy_wh=sum(energies) if energies else None,
        energy_share_percent=100.0 if energies else None,
        measured_percent=measured / hours if hours else None,
    )


def partly_measured(states: Mapping[str, StateSummary]) -> bool:
    """Say whether energies are told of which a part is missing: then every table says how much was measured."""
    whole = together(states)
    if whole.energy_wh is None:
        return False
    shares = [state.measured_percent for state in states.values() if state.measured_percent is not None]
    return (whole.measured_percent or 0.0) < NEARLY_ALL or min(shares, default=100.0) < _MOST


def add_up_states(devices: Sequence[DeviceSummary], gpu_s: float) -> dict[str, StateSummary]:
    """Return the states of all devices together; time that no device accounts for has a state of its own."""
    seconds = {
        state: sum(device.states[state].total_s for device in devices if state in device.states)
        for state in STATE_WORDS
    }
    missing_s = gpu_s - sum(seconds.values())
    if missing_s > _ROUNDING_S:
        seconds[UNKNOWN_STATE] += missing_s
    joules: dict[str, list[float]] = {state: [] for state in STATE_WORDS}
    busy_s: dict[str, list[float]] = {state: [] for state in STATE_WORDS}
    measured_s = dict.fromkeys(STATE_WORDS, 0.0)
    for device in devices:
        for state, energy_j in device.state_energy_j.items():
            joules[state].append(energy_j)
        for state, time in device.states.items():
            measured_s[state] += time.measured_s
            busy_s[state] += [] if time.busy_s is None else [time.busy_s]
    total_s, total_j = sum(seconds.values()), sum(map(sum, joules.values()))
    return {
        state: StateSummary(
            gpu_hours=seconds[state] / 3600,
            share_percent=100 * seconds[state] / total_s if total_s > 0 else None,
            busy_hours=sum(busy_s[state]) / 3600 if busy_s[state] else None,
            energy_wh=sum(joules[state]) / 3600 if joules[state] else None,
            energy_share_percent=100 * sum(joules[state]) / total_j if joules[state] and total_j > 0 else None,
            measured_percent=100 * min(1.0, measured_s[state] / seconds[state]) if seconds[state] > 0 else None,
        )
        for state in STATE_WORDS
        if seconds[state] > 0 or joules[state]
    }


def card(device: DeviceFacts) -> tuple[str, str]:
    """Return what tells a device from all others, whichever task it works for."""
    return device.node, device.uuid or device.token


def cards(devices: Iterable[DeviceFacts]) -> int:
    """Return how many devices these are, each counted once."""
    return len({card(device) for device in devices})


def rows_words(devices: Collection[DeviceFacts], one: str = "device") -> str:
    """Return how many devices of tasks these are, and say so where one of them has served several tasks."""
    return count(len(devices), one) + of_tasks(devices)


def of_tasks(devices: Collection[DeviceFacts]) -> str:
    """Return what goes behind a count of devices that were counted once for each task that had them."""
    return "" if cards(devices) == len(devices) else " of array tasks"
