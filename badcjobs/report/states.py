"""What all devices of a job did with their time and energy: the states add up to the whole. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from badcjobs.report.device_summary import UNKNOWN_STATE, DeviceSummary

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


@dataclass(frozen=True, slots=True)
class Together:
    """All states in one."""

    gpu_hours: float
    busy_hours: float | None
    energy_wh: float | None
    measured_percent: float | None


def together(states: Mapping[str, StateSummary]) -> Together:
    """Return the sum of all states."""
    found = states.values()
    hours = sum(state.gpu_hours for state in found)
    busy = [state.busy_hours for state in found if state.busy_hours is not None]
    energies = [state.energy_wh for state in found if state.energy_wh is not None]
    measured = sum(state.gpu_hours * (state.measured_percent or 0.0) for state in found)
    return Together(
        hours, sum(busy) if busy else None, sum(energies) if energies else None, measured / hours if hours else None
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
    seconds = {state: sum(device.state_s.get(state, 0.0) for device in devices) for state in STATE_WORDS}
    missing_s = gpu_s - sum(seconds.values())
    if missing_s > _ROUNDING_S:
        seconds[UNKNOWN_STATE] += missing_s
    joules = {state: [d.state_energy_j[state] for d in devices if state in d.state_energy_j] for state in STATE_WORDS}
    busy_s = {state: [d.state_busy_s[state] for d in devices if state in d.state_busy_s] for state in STATE_WORDS}
    measured_s = {state: sum(device.state_measured_s.get(state, 0.0) for device in devices) for state in STATE_WORDS}
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
