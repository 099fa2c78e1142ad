"""Devices that were slower than others of their model: the table of the page, and what it rests on in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from badcjobs.report.cards import cards, rows_words
from badcjobs.report.page_parts import Cell, Table
from badcjobs.report.page_tables import with_unit
from badcjobs.report.summarize import DeviceSummary, Summary
from badcjobs.report.words import UNKNOWN, count, natural, number

MOST_STRAGGLERS = 200
SLOW_PERCENT = 80  # of the median speed: what makes a straggler
_LEAST_CHUNKS = 3
_LEAST_DEVICES = 3  # two cannot say which of them is the slow one
_HEADS = ("<task", "<node", "<device", "of the median speed", "× real time", "chunk p50", "p95", "max",
          "hottest", "<held back by")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Who was slow, and what was compared with what."""

    table: Table
    compared: int  # devices of tasks
    words: str  # what was compared and what could not be; '': there was no device
    nobody: str  # what stands for the table where it is empty


@dataclass(frozen=True, slots=True)
class _Peers:
    """The devices of one model that did enough work to be compared, with their speeds."""

    name: str
    devices: Sequence[DeviceSummary]

    @property
    def usual(self) -> float:
        return median(_speed(device) for device in self.devices)


def find_stragglers(summary: Summary) -> Stragglers:
    """Return the devices of tasks that were slower than the median of their model, the slowest first."""
    judged = _compared(summary)
    found = [(100 * _speed(device) / peers.usual, device) for peers in judged for device in peers.devices]
    slow = sorted(
        (one for one in found if one[0] <= SLOW_PERCENT),
        key=lambda one: (round(one[0]), natural(one[1].task), one[1].label),
    )
    caption = f"Devices with {SLOW_PERCENT} % of the median speed of their model or less, while working"
    if len(slow) > MOST_STRAGGLERS:
        caption += f": the {MOST_STRAGGLERS} slowest of {len(slow):,}"
    table = Table("straggler-table", caption, _HEADS, [_row(*one) for one in slow[:MOST_STRAGGLERS]])
    nobody = f"Each of them had more than {SLOW_PERCENT} % of that speed."
    return Stragglers(table, len(found), _words(summary, judged), nobody)


def _compared(summary: Summary) -> list[_Peers]:
    by_model: dict[str, list[DeviceSummary]] = defaultdict(list)
    for device in summary.devices:
        if device.tries_done >= _LEAST_CHUNKS and _speed(device) > 0:
            by_model[device.name or UNKNOWN].append(device)
    return [_Peers(name, peers) for name, peers in by_model.items() if cards(peers) >= _LEAST_DEVICES]


def _speed(device: DeviceSummary) -> float:
    working_s = device.state_s.get("working", 0.0)
    return device.audio_hours * 3600 / working_s if working_s > 0 else 0.0


def _words(summary: Summary, judged: Sequence[_Peers]) -> str:
    if not summary.devices:
        return ""
    needed = f"that takes {_LEAST_DEVICES} devices of one model with {_LEAST_CHUNKS} chunks of known length each"
    if not judged:
        return f"Nobody was compared: {needed}."
    compared = [device for peers in judged for device in peers.devices]
    usual = "; ".join(f"{number(peers.usual)} × real time on {peers.name}" for peers in judged)
    words = f"Compared while working: {rows_words(compared)}, with the median of the model: {usual}."
    left = len(summary.devices) - len(compared)
    return f"{words} {count(left, 'other was', 'others were')} not compared: {needed}." if left else words


def _row(percent: float, d: DeviceSummary) -> list[str | Cell]:
    speed = _speed(d)
    held = ", ".join(reason.replace("_", " ") for reason in sorted(d.throttled)) or UNKNOWN
    seconds = [with_unit(value, "s", 1) for value in (d.chunk_p50_s, d.chunk_p95_s, d.chunk_max_s)]
    return [
        d.task, d.node, d.label, Cell(f"{percent:.0f} %", percent), Cell(number(speed), speed),
        *seconds, with_unit(d.temperature_max_c, "°C", 0), held,
    ]  # fmt: skip
