"""What the progress bars of ``badcjobs run`` say, and how much of it fits; progress_bars.py draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from badcjobs.live.text_fit import in_ascii, rate, span
from badcjobs.report.words import count, plain
from badcjobs.task.progress import TaskProgress

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


def bar_table(work: TaskProgress, *, columns: int, lines: int, ascii_only: bool = False) -> BarTable:
    """Return a line for each device and one for all that fit; in a low terminal the last devices have none."""
    width = max(1, min(columns - 1, _WIDEST))
    share = work.chunks_settled / work.chunks_total if work.chunks_total else 1.0
    # No device has chunks of its own: the one that has done most is as far as the whole, and one that hangs falls back.
    most = max((device.done for device in work.devices), default=0) or 1
    said = []
    for device in work.devices[: max(0, lines - 3)]:
        label = device.label.split("  ")[0] if width < _NARROW else device.label
        seconds = device.audio_done_s / work.elapsed_s if device.audio_done_s > 0 and work.elapsed_s > 0 else None
        doing = ", ".join(device.working_on) or _pause(work)
        said.append((label, share * device.done / most, [count(device.done, "chunk"), rate(seconds)], doing))
    said.append(("all", share, _all_parts(work), ""))
    show = in_ascii if ascii_only else plain
    labels = [_cut(show(label), min(_LONGEST_LABEL, width // 3), ascii_only) for label, *_ in said]
    label_width, bar_width = max(map(cell_len, labels)), width // 5
    room = width - label_width - bar_width - 2
    rows = (
        BarRow(label, share, _fit([show(part) for part in parts], show(name), room, ascii_only))
        for label, (_, share, parts, name) in zip(labels, said, strict=True)
    )
    return BarTable(tuple(rows), label_width, bar_width)


def _pause(now: TaskProgress) -> str:
    """Return what a device is at that works on no chunk; nothing to say of the moment between two."""
    if now.retrying and now.chunks_total - now.chunks_settled <= now.retrying:
        return "waits to try again"
    return "" if now.chunks_settled or now.retrying else "starting"


def _all_parts(now: TaskProgress) -> list[str]:
    """Return the parts in the order of their worth: where there is no room, the last ones are left out."""
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
