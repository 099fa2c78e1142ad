"""What the charts of a report are drawn from: the thinned samples of each device, column by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
