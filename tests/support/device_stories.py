"""Stories of a device: what a reader says step by step; a page shows each reading as the difference from the last."""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from rooms.model import METRICS, InventoryDevice, Reading
from rooms.root import DeviceUnreadable
from support.cases import read_data


class Step(NamedTuple):
    """After some seconds, in a part of which every device works, settings change and a device is read."""

    seconds: float
    worked_s: float
    last: bool  # force a full reading, as at the end of a run
    watched: bool  # a monitor shows the readings
    device: str  # "1.0": a slice
    changes: dict[str, str | None]


class Story(NamedTuple):
    """Settings, and what happens then; ``asked`` are the calls to count in the end, on the device of the first step."""

    name: str
    steps: Sequence[Step]
    asked: Sequence[str]
    settings: dict[str, Any]


def story_file(name: str) -> dict[str, list[Story]]:
    """Read the stories of a file in tests/data, whose head explains them, by topic."""
    text = re.sub(r"\n +", " ", read_data(name))
    parts = [part.partition("\n") for part in text.split("\n# ")[1:]]
    return {topic: [_story(line) for line in lines.splitlines() if line] for topic, _, lines in parts}


def _story(line: str) -> Story:
    name, _, rest = line.partition(":")
    rest, _, asked = rest.partition(" ? ")
    steps, _, settings = rest.partition(" | ")
    return Story(name, [*chain(*map(_steps, steps.split("; ")))], asked.split(), _changes(settings.split()))


def _steps(text: str) -> list[Step]:
    words = text.split()
    if not words:
        return []
    many, words = (int(words[0]), words[2:]) if "×" in words else (1, words)
    seconds, _, worked_s = words[0].partition("/")
    device = next((word[1:] for word in words if word.startswith("@")), "0")
    flags = ("last" in words, "watched" in words)
    return [Step(float(seconds), float(worked_s or 0), *flags, device, _changes(words))] * many


def _changes(words: Sequence[str]) -> dict[str, str | None]:
    pairs = [word.split("=", 1) for word in words if "=" in word]
    return {name: value or None for name, value in pairs}


def shown(reading: Reading) -> dict[str, str]:
    """Return what a reading says, by metric."""
    said = {}
    for metric in METRICS:
        value = getattr(reading, metric)
        said[metric] = "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        if value is not None and metric in reading.sources:
            said[metric] += f" ({reading.sources[metric]})"
    for process in reading.processes or ():
        said[f"process {process.pid}"] = f"{process.memory_used_bytes} bytes, {process.sm_percent} %"
    said["processes"] = "–" if reading.processes is None else str(len(reading.processes))
    said |= {name: f"{said[name]} [{reading.missing[name]}]" for name in reading.missing if name in said}
    return {**said, "faults": ", ".join(reading.faults) or "–"}


def tell(
    story: Story, read: Callable[[Step], Reading], calls: Callable[[str, int], int], usual: dict[str, str]
) -> Iterator[str]:
    """Yield what every reading says, as the difference from the one before, and of the first from the usual one."""
    before = dict(usual)
    yield story.name
    for now in story.steps:
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
    if story.asked:
        index = int(story.steps[0].device[0])
        yield "  asked: " + ", ".join(f"{call} {calls(call, index)}" for call in story.asked)


FACTS = ", ".join(InventoryDevice.__slots__)


def facts_of(devices: Sequence[InventoryDevice]) -> list[str]:
    """Return a line for each device."""
    return [", ".join(str(getattr(one, fact)) for fact in one.__slots__) for one in devices] or ["–"]
