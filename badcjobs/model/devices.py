"""Devices: what a machine has and a task was given, what they said at one instant, and where alerts begin."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

_ROCR_UUID = re.compile(r"GPU-[0-9A-Fa-f]{16}")  # the only form that ROCR_VISIBLE_DEVICES takes; amdsmi has another
_FIRST_DRIVER_WITH_MIG_UUIDS = 470


@dataclass(frozen=True, slots=True)
class StandIn:
    """What takes the place of this machine's devices: simulated ones, or a recording; paths are absolute."""

    simulate: int | None = None
    script: str | None = None  # TOML: how simulated devices behave
    replay: str | None = None  # a task database
    ledger: str | None = None  # folder: what programs pretend to use of simulated devices


@dataclass(frozen=True, slots=True)
class InventoryDevice:
    """A device that a reader found on this machine, ours or not."""

    index: int
    uuid: str
    name: str
    backend: str
    memory_total_bytes: int | None = None
    power_limit_w: float | None = None
    pci_bus_id: str | None = None
    driver: str | None = None
    slowdown_c: int | None = None  # where the device begins to slow down
    memory_reserved_bytes: int = 0  # what the driver keeps for itself, and nobody can have
    vendor: str = "nvidia"
    # A MIG slice has the index of its card, which is listed just before its slices.
    parent_uuid: str | None = None
    slice: str | None = None  # "<gpu instance>/<compute instance>", as in the old tokens MIG-GPU-<uuid>/gi/ci


@dataclass(frozen=True, slots=True)
class Device:
    """A device granted to this task, and how we know."""

    token: str
    why: str
    index: int | None = None
    uuid: str | None = None
    name: str | None = None
    backend: str = "none"
    memory_total_bytes: int | None = None
    power_limit_w: float | None = None
    pci_bus_id: str | None = None
    driver: str | None = None
    slowdown_c: int | None = None
    memory_reserved_bytes: int = 0
    vendor: str = "nvidia"
    parent_uuid: str | None = None

    @property
    def pin(self) -> str:
        """What shows a worker this device alone: its UUID, or the token (AMD: the index) where UUIDs do not serve."""
        if self.uuid is None:
            return self.token
        if self.vendor == "amd" and not _ROCR_UUID.fullmatch(self.uuid):
            return self.token if self.index is None else str(self.index)
        major = (self.driver or "").partition(".")[0]
        if self.uuid.startswith("MIG-") and major.isdecimal() and int(major) < _FIRST_DRIVER_WITH_MIG_UUIDS:
            return self.token
        return self.uuid


# --- readings ---------------------------------------------------------------------------------------------------------


# NVML's bits in throttle_reasons; the first is no throttling, the others are.
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
COUNTERS = ("energy_j", "throttle_reasons", "ecc_errors")  # of these a mean says nothing


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


@dataclass(slots=True)  # not frozen: one is made for each device and second, and freezing takes 4 µs of 30
class Reading:
    """One device at one instant; None: it does not say, or was not asked this time."""

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
    busy_percent: float | None = None  # share of the time since it was last given in which the device worked
    tensor_percent: float | None = None
    dram_percent: float | None = None
    pcie_rx_bytes_per_s: int | None = None
    pcie_tx_bytes_per_s: int | None = None
    fan_percent: int | None = None
    encoder_percent: int | None = None
    decoder_percent: int | None = None
    ecc_errors: int | None = None  # uncorrected, since the driver was loaded
    missing: Mapping[str, str] = field(default_factory=dict)  # metric → why the device did not give it
    sources: Mapping[str, str] = field(default_factory=dict)  # metric → where it is from, if there are several ways
    processes: tuple[ProcessReading, ...] | None = None  # None: not asked this time
    faults: tuple[str, ...] = ()  # what the device reported since the last reading: "Xid 79", …


_NO_METRICS = ("missing", "sources", "processes", "faults")
# What a sample holds; the `sample` table has a column for each.
METRICS = tuple(one.name for one in fields(Reading) if one.name not in _NO_METRICS)


@dataclass(frozen=True, slots=True)
class HostReading:
    """The machine around the devices at one instant."""

    cpu_percent: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None


@dataclass(frozen=True, slots=True)
class UsageReading:
    """What the task's own processes used together at one instant: the wrapper, and all that it has started."""

    cpu_cores: float | None  # kept busy since the reading before; None: there was none
    memory_bytes: int
    read_bytes_per_s: float | None  # since the reading before; None: there was none, or it is not to be seen
    processes: int
    source: str  # of its memory: pss (pages that several share are counted once) or rss


@dataclass(frozen=True, slots=True)
class MemoryHeld:
    """The main memory that the task's own processes held together, at a moment of the monotonic clock."""

    memory_bytes: int
    at_s: float


# --- charts -----------------------------------------------------------------------------------------------------------

CHARTED = ("utilization_percent", "memory_used_bytes", "temperature_c", "power_w")


@dataclass(frozen=True, slots=True)
class Envelope:
    """The smallest, the mean and the largest reading of one metric in each stretch; NaN: there was none."""

    low: Sequence[float]
    mean: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True, slots=True)
class Stretches:
    """One device of one task over time, as the table ``device_stretch`` has it; all columns are of one length."""

    from_ms: Sequence[int]
    to_ms: Sequence[int]
    states: Sequence[str]  # the one that lasted longest in each
    metrics: Mapping[str, Envelope]  # one for each of CHARTED
    # Of short ones with several states: place → state → seconds.
    mixed: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChartData:
    """What the page shows beyond the summary."""

    stretches: Mapping[tuple[str, str], Stretches] = field(default_factory=dict)  # by task name and the device's token
    # The same of devices that had tries under way, as it is when their task runs no more: these are lost.
    given_up: Mapping[tuple[str, str], Stretches] = field(default_factory=dict)
    durations: Mapping[int, int] = field(default_factory=dict)  # ms of a try that ended well → how many
    sets_of_settings: int = 0  # how many different ones there are among the tasks
    versions: tuple[str, ...] = ()  # of badcjobs, that the tasks ran with


# --- alerts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AlertLimits:
    """Where alerts begin; the fields are the keys of the table [alerts]."""

    temperature_c: float | None = None  # None: where the device slows down, else 83
    memory_percent: float = 90.0
    power_percent: float = 95.0
    idle_s: float = 300.0  # without work for so long, while work waits
    energy_percent: float = 5.0  # counter against integrated power

    def problems(self) -> list[str]:
        """Return what is wrong with these limits, a sentence each."""
        found = []
        for name, value in asdict(self).items():
            if name == "temperature_c" and value is None:
                continue
            if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
                found.append(f"{name} = {value!r} must be a number above 0")
            elif name.endswith("_percent") and value > 100:
                found.append(f"{name} = {value!r} must be at most 100")
        return found


@dataclass(frozen=True, slots=True)
class AlertHooks:
    """A command or none; the fields are keys of the table [alerts].

    The command's line may hold a secret: it is never logged and never stored.
    """

    command: str | None = field(default=None, repr=False)
    min_interval_s: float = 600.0  # between two calls for one kind of trouble on one device

    def problems(self) -> list[str]:
        """Return what is wrong with them, a sentence each, without their secrets."""
        found = []
        if self.command is not None and not isinstance(self.command, str):
            found.append("command must be a text")
        elif self.command is not None:
            try:
                words = shlex.split(self.command)
                if not words or not words[0] or "\0" in self.command:
                    found.append("command must name a program")
            except ValueError as error:
                found.append(f"command cannot be taken apart into words: {str(error).lower()}")
        number = self.min_interval_s
        if type(number) not in (int, float) or not math.isfinite(number) or number < 0:
            found.append(f"min_interval_s = {number!r} must be a number, 0 or above")
        return found

    def without_secrets(self) -> dict[str, object]:
        """Return what may be stored and shown: of the command only its program."""
        program = None if self.command is None else shlex.split(self.command)[0]
        return {"command": program and f"{program} …", "min_interval_s": self.min_interval_s}
