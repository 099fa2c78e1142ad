"""What a device, its processes and the machine around it said at one instant, and thinned out for charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# What a sample holds; the `sample` table has a column for each. None: the device did not say.
METRICS = (
    "utilization_percent",
    "memory_utilization_percent",
    "memory_used_bytes",
    "temperature_c",
    "power_w",
    "energy_j",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "throttle_reasons",
    "sm_activity_percent",
    "sm_occupancy_percent",
    "busy_percent",
    "tensor_percent",
    "dram_percent",
    "pcie_rx_bytes_per_s",
    "pcie_tx_bytes_per_s",
    "fan_percent",
    "encoder_percent",
    "decoder_percent",
    "ecc_errors",
)
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
