"""Devices: those of a machine and of a task, their readings, chart data, and the limits for alerts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

_ROCR_UUID = re.compile(r"GPU-[0-9A-Fa-f]{16}")  # the only form that ROCR_VISIBLE_DEVICES accepts; amdsmi's differs


@dataclass(frozen=True, slots=True)
class StandIn:
    """What replaces the devices of this machine: simulated ones, or a recording; paths are absolute."""

    simulate: int | None = None
    script: str | None = None  # TOML: how simulated devices behave
    replay: str | None = None  # a task database
    ledger: str | None = None  # a folder: memory and load that programs pretend to use on simulated devices


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """The facts about a device that are read once."""

    memory_total_bytes: int | None = None
    power_limit_w: float | None = None
    pci_bus_id: str | None = None
    driver: str | None = None
    slowdown_c: int | None = None  # the temperature at which the device slows down
    memory_reserved_bytes: int = 0  # used by the driver itself
    vendor: str = "nvidia"
    # A MIG slice has the index of its card, which is listed directly before its slices.
    parent_uuid: str | None = None
    exclusive: bool = False  # only one process may use it, by its compute mode


@dataclass(frozen=True, slots=True)
class InventoryDevice(_Card):
    """A device that a reader found on this machine, granted to this task or not."""

    index: int
    uuid: str
    name: str
    backend: str
    slice: str | None = None  # "<gpu instance>/<compute instance>", as in the old tokens MIG-GPU-<uuid>/gi/ci


@dataclass(frozen=True, slots=True)
class Device(_Card):
    """A device granted to this task, and the reason."""

    token: str
    why: str
    index: int | None = None
    uuid: str | None = None
    name: str | None = None
    backend: str = "none"

    @property
    def pin(self) -> str:
        """The value that makes only this device visible: its UUID, or the token (AMD: the index) if UUIDs fail."""
        if self.uuid is None:
            return self.token
        if self.vendor == "amd" and not _ROCR_UUID.fullmatch(self.uuid):
            return self.token if self.index is None else str(self.index)
        return self.uuid


# --- readings ---------------------------------------------------------------------------------------------------------


# NVML's bits in throttle_reasons; the first one means idle, not throttled.
THROTTLE_BITS = {
    0x001: "gpu_idle",
    0x002: "clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
}
COUNTERS = ("energy_j", "throttle_reasons", "ecc_errors")  # a mean of these is meaningless


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One process on one device at one instant; pids are the host's."""

    pid: int
    memory_used_bytes: int | None = None
    sm_percent: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """A process on a device, with its name; None: not known, or not visible from here."""

    pid: int
    program: str | None
    user: str | None
    memory_used_bytes: int | None


@dataclass(slots=True)  # not frozen: there is one per device and second, and freezing takes 4 µs of 30
class Reading:
    """One device at one instant; None: not reported, or not read this time."""

    utilization_percent: int | None = None
    memory_utilization_percent: int | None = None
    memory_used_bytes: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    energy_j: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_reasons: int | None = None
    sm_activity_percent: float | None = None
    sm_occupancy_percent: float | None = None
    busy_percent: float | None = None  # share of the time since its last value in which the device worked
    tensor_percent: float | None = None
    dram_percent: float | None = None
    pcie_rx_bytes_per_s: int | None = None
    pcie_tx_bytes_per_s: int | None = None
    fan_percent: int | None = None
    encoder_percent: int | None = None
    decoder_percent: int | None = None
    ecc_errors: int | None = None  # uncorrected, since the driver was loaded
    missing: Mapping[str, str] = field(default_factory=dict)  # metric → why the device did not give it
    sources: Mapping[str, str] = field(default_factory=dict)  # metric → its source, if there are several
    processes: tuple[ProcessReading, ...] | None = None  # None: not read this time
    faults: tuple[str, ...] = ()  # reported since the last reading: "Xid 79", …

    def completed(self, before: Iterable[Reading]) -> Reading:
        """Return it with the metrics that are read every few seconds, from the readings before it, latest first."""
        reading = replace(self)
        for earlier in before:
            for metric in _SLOW_METRICS:
                if getattr(reading, metric) is None:
                    setattr(reading, metric, getattr(earlier, metric))
        return reading


T = TypeVar("T")


def not_none(values: Iterable[T | None]) -> list[T]:
    """Return the values that are known."""
    return [value for value in values if value is not None]


def known_values(values: Mapping[str, T | None]) -> dict[str, T]:
    """Return the values that are known, by name."""
    return {name: value for name, value in values.items() if value is not None}


def load_word(utilization_percent: float | None) -> str | None:
    """Return a word for the load of a device; None: not known."""
    if utilization_percent is None:
        return None
    return next((word for most, word in _LOAD_WORDS if utilization_percent <= most), "heavy")


_SLOW_METRICS = (
    "sm_activity_percent",
    "sm_occupancy_percent",
    "fan_percent",
    "encoder_percent",
    "decoder_percent",
)
_LOAD_WORDS = ((0, "idle"), (25, "light"), (75, "moderate"))  # up to this utilization
_NO_METRICS = (
    "missing",
    "sources",
    "processes",
    "faults",
)
# The metrics of a sample; the table `sample` has a column for each.
METRICS = tuple(part.name for part in fields(Reading) if part.name not in _NO_METRICS)


@dataclass(frozen=True, slots=True)
class HostReading:
    """The machine around the devices at one instant."""

    cpu_percent: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None


@dataclass(frozen=True, slots=True)
class UsageReading:
    """The total use of the task's own processes at one instant: the wrapper and all its descendants."""

    cpu_cores: float | None  # busy since the last reading; None: this is the first
    memory_bytes: int
    read_bytes_per_s: float | None  # since the last reading; None: this is the first, or not visible
    processes: int
    source: str  # of memory_bytes: pss (shared pages counted once) or rss


class MemoryHeld(NamedTuple):
    """The main memory of the task's own processes, at a time of the monotonic clock."""

    memory_bytes: int
    at_s: float


# --- charts -----------------------------------------------------------------------------------------------------------

CHARTED = (
    "utilization_percent",
    "memory_used_bytes",
    "temperature_c",
    "power_w",
)


class Envelope(NamedTuple):
    """Minimum, mean and maximum of one metric in each stretch of time; NaN: no reading."""

    low: Sequence[float]
    mean: Sequence[float]
    high: Sequence[float]


class Stretches(NamedTuple):
    """One device of one task over time, from the table ``device_stretch``; all columns have the same length."""

    from_ms: Sequence[int]
    to_ms: Sequence[int]
    states: Sequence[str]  # the longest state of each stretch
    metrics: Mapping[str, Envelope]  # one for each of CHARTED


class ChartData(NamedTuple):
    """What the page shows in addition to the summary."""

    together: Stretches | None  # all devices; None: there are no data over time
    # Reads a device by its device_id, and whether its task no longer runs: then its unfinished attempts are lost.
    stretches: Callable[[int, bool], Stretches | None]
    sets_of_settings: int  # how many different settings the tasks had
    versions: tuple[str, ...]  # of badcjobs, used by the tasks


# --- alerts -----------------------------------------------------------------------------------------------------------


def _limit(default: float | None, help: str, least: float = 0.1, **more: Any) -> Any:
    """Describe a number in the table [alerts], as ``settings.Setting`` does."""
    return field(default=default, metadata={"help": help, "least": least, **more})


@dataclass(frozen=True, slots=True)
class AlertLimits:
    """The limits for alerts; the fields are the keys of the table [alerts]."""

    temperature_c: float | None = _limit(
        None, "alert above this temperature; default: where the GPU slows down, else 83", example=83
    )
    memory_percent: float = _limit(90.0, "alert above this share of the GPU's memory", most=100.0)
    power_percent: float = _limit(95.0, "alert above this share of the power limit", most=100.0)
    idle_s: float = _limit(300.0, "alert when a GPU has no work for this long, while work is waiting")
    energy_percent: float = _limit(
        5.0, "alert when energy counter and integrated power differ by this much", most=100.0
    )
    utilization_percent: float | None = _limit(
        None,
        "alert when a GPU is above this utilization for 10 s, with its processes; default: no alert",
        most=100.0,
        example=95,
    )


def _check_command(text: str) -> str | None:
    try:
        words = shlex.split(text)
    except ValueError as error:
        return f"cannot be split into words: {str(error).lower()}"
    if not words or not words[0]:
        return "must name a program"
    return None


@dataclass(frozen=True, slots=True)
class AlertHooks:
    """The command to run on alerts, if any; the fields are keys of the table [alerts].

    The command line may contain a secret: it is never logged and never stored.
    """

    command: str | None = field(
        default=None,
        repr=False,
        metadata={
            "help": "called when an alert begins or ends; JSON on stdin",
            "example": "notify-lab",
            "check": _check_command,
            "runs": ("",),
            "secret": True,
        },
    )
    min_interval_s: float = _limit(600.0, "at most one call per kind of alert and device in this time", least=0.0)

    def without_secrets(self) -> dict[str, object]:
        """Return what may be stored and shown: only the program of the command."""
        command = None
        if self.command is not None:
            command = f"{shlex.split(self.command)[0]} …"
        return {"command": command, "min_interval_s": self.min_interval_s}
