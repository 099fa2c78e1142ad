"""Stories of a device: what a reader says step by step; a page shows each reading as the difference from the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rooms.model import METRICS, InventoryDevice, Reading
from rooms.root import DeviceUnreadable


class Step(NamedTuple):
    """After some seconds, in a part of which every device works, settings change and a device is read."""

    seconds: float
    worked_s: float
    last: bool  # force a full reading, as at the end of a run
    device: str  # "1.0": a slice
    changes: dict[str, object]


def step(seconds: float = 5, worked_s: float = 0, *, last: bool = False, device: str = "0", **changes: object) -> Step:
    return Step(seconds, worked_s, last, device, changes)


Story = tuple[Sequence[Step], str, dict[str, object]]


def story(*steps: Step, asked: str = "", **settings: object) -> Story:
    """Return a story; ``asked`` are the calls to count in the end, on device 0 (1 for slices)."""
    return steps, asked, settings


def shown(reading: Reading) -> dict[str, str]:
    """Return what a reading says, by metric."""
    said = {}
    for metric in METRICS:
        value = getattr(reading, metric)
        if value is not None:
            number = f"{value:.6g}" if isinstance(value, float) else str(value)
            said[metric] = number + (f" ({reading.sources[metric]})" if metric in reading.sources else "")
        said[metric] = said.get(metric, "–") + (f" [{reading.missing[metric]}]" if metric in reading.missing else "")
    for process in reading.processes or ():
        said[f"process {process.pid}"] = f"{process.memory_used_bytes} bytes, {process.sm_percent} %"
    said["processes"] = "–" if reading.processes is None else str(len(reading.processes))
    said["processes"] += f" [{reading.missing['processes']}]" if "processes" in reading.missing else ""
    return {**said, "faults": ", ".join(reading.faults) or "–"}


def tell(
    told: Story, read: Callable[[Step], Reading], calls: Callable[[str, int], int], usual: dict[str, str]
) -> Iterator[str]:
    """Yield what every reading says, as the difference from the one before, and of the first from the usual one."""
    steps, asked, _ = told
    before = dict(usual)
    for now in steps:
        try:
            said = shown(read(now))
        except DeviceUnreadable as error:
            yield f"  +{now.seconds:g} s {now.device}: unreadable: {error}"
            continue
        names = [name for name in {**before, **said} if said.get(name, "–") != before.get(name, "–")]
        changed = ", ".join(f"{name} {said.get(name, '–')}" for name in names)
        yield f"  +{now.seconds:g} s {now.device}: {changed or 'the same'}"
        before = said
        usual.update({} if usual else said)
    if asked:
        yield "  asked: " + ", ".join(f"{call} {calls(call, int(steps[0].device[0]))}" for call in asked.split())


FACTS = ", ".join(InventoryDevice.__slots__)


def facts_of(devices: Sequence[InventoryDevice]) -> list[str]:
    """Return a line for each device."""
    return [", ".join(str(getattr(one, fact)) for fact in one.__slots__) for one in devices] or ["–"]
