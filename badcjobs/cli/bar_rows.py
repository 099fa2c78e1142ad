"""What the progress bars of ``badcjobs run`` say, and how much of it fits; progress_bars.py draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from badcjobs.live.text_fit import in_ascii, rate, span
from badcjobs.report.words import count, plain
from badcjobs.task.progress import DeviceWorkNow, WorkNow

_WIDEST = 100  # what is shorter than the window does not break when the window shrinks
_NARROW = 60
_LONGEST_LABEL = 28
_SHORTEST_NAME = 12  # less of a chunk's name says nothing


@dataclass(frozen=True, slots=True)
class BarRow:
    """One line: a label, a bar that is filled to ``share`` (0 to 1), and words."""

    label: str
    share: float
    words: str


@dataclass(frozen=True, slots=True)
class BarTable:
    """All lines; the bars are equally wide and begin below each other."""

    rows: tuple[BarRow, ...]
    label_width: int
    bar_width: int


def bar_table(work: WorkNow, *, columns: int, lines: int, ascii_only: bool = False) -> BarTable:
    """Return a line for each device and one for all that fit; in a low terminal the last devices have none."""
    width = max(1, min(columns - 1, _WIDEST))
    narrow = width < _NARROW
    devices = work.devices[: max(0, lines - 3)]
    said = [(_label(one, narrow), work.share_of(one), _device_parts(work, one), _doing(work, one)) for one in devices]
    said.append(("all", work.share, _all_parts(work), ""))
    show = in_ascii if ascii_only else plain
    labels = [_cut(show(label), min(_LONGEST_LABEL, width // 3), ascii_only) for label, *_ in said]
    label_width, bar_width = max(map(cell_len, labels)), width // 5
    room = width - label_width - bar_width - 2
    rows = (
        BarRow(label, share, _fit([show(part) for part in parts], show(name), room, ascii_only))
        for label, (_, share, parts, name) in zip(labels, said, strict=True)
    )
    return BarTable(tuple(rows), label_width, bar_width)


def _label(device: DeviceWorkNow, narrow: bool) -> str:
    return device.label.split("  ")[0] if narrow else device.label


def _device_parts(work: WorkNow, device: DeviceWorkNow) -> list[str]:
    return [count(device.done, "chunk"), rate(work.rate_of(device))]


def _doing(work: WorkNow, device: DeviceWorkNow) -> str:
    return ", ".join(device.working_on) or work.pause


def _all_parts(work: WorkNow) -> list[str]:
    """Return the parts in the order of their worth: where there is no room, the last ones are left out."""
    now = work.progress
    rests = [f"{now.retrying:,} to try again"] if now.retrying else []
    end = [f"ETA {span(now.eta_s)}"] if now.eta_s is not None or not rests else rests
    failed = [f"{now.failed:,} failed"] if now.failed else []
    said = [f"{now.chunks_settled:,}/{now.chunks_total:,}", *end, rate(now.rate), *failed]
    return said if end is rests else [*said, *rests]


def _fit(parts: Sequence[str], name: str, room: int, ascii_only: bool) -> str:
    """Return as many parts as there is room for, and of the name as much as does."""
    said = _cut(parts[0], room, ascii_only)
    for part in parts[1:]:
        if cell_len(said) + 2 + cell_len(part) > room:
            return said
        said += f"  {part}"
    left = room - cell_len(said) - 2
    enough = left >= min(_SHORTEST_NAME, cell_len(name))
    return f"{said}  {_cut(name, left, ascii_only)}" if name and enough else said


def _cut(text: str, room: int, ascii_only: bool) -> str:
    """Return a text cut to so many columns; a sign of Chinese takes two."""
    if cell_len(text) <= room:
        return text
    return set_cell_size(text, max(0, room - 1)).rstrip() + ("~" if ascii_only else "…") * (room > 0)
