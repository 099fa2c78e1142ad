"""Reads what ``sbatch --array=`` takes: ``0-9``, ``1-20:2``, ``0-19%4``, ``3,7,11-15``. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from badcjobs.errors import BadInput

_PART = re.compile(r"(?P<first>[0-9]+)(-(?P<last>[0-9]+)(:(?P<step>[0-9]+))?)?")
_LARGEST = 4_000_001  # what MaxArraySize can be at most


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """The indices of an array in ascending order, and how many of its tasks may run at a time (None: all)."""

    indices: tuple[int, ...]
    step: int = 1  # as Slurm tells it in SLURM_ARRAY_TASK_STEP: that of a range, and 1 for a list
    parallel: int | None = None

    def __str__(self) -> str:
        first, last = self.indices[0], self.indices[-1]
        regular = list(self.indices) == list(range(first, last + 1, self.step))
        text = ",".join(map(str, self.indices)) if not regular or first == last else f"{first}-{last}"
        text += f":{self.step}" if regular and self.step > 1 else ""
        return text + (f"%{self.parallel}" if self.parallel else "")


def parse_array(text: str) -> ArraySpec:
    """Read an array specification; an index that is named twice counts once, as in Slurm."""
    parts, percent, limit = text.strip().partition("%")
    if percent and not (limit.isascii() and limit.isdecimal()):
        raise _wrong(text, f"after % there must be a number, not {limit!r}")
    indices: set[int] = set()
    step = 1
    for part in parts.split(","):
        chosen = _parse_part(part, text)
        indices.update(chosen)
        step = chosen.step if len(chosen) > 1 else step
    return ArraySpec(tuple(sorted(indices)), step, int(limit or 0) or None)


def _parse_part(part: str, text: str) -> range:
    found = _PART.fullmatch(part.strip())
    if found is None:
        raise _wrong(text, f"{part!r} is neither a number nor a range")
    first, step = int(found["first"]), int(found["step"] or 1)
    last = int(found["last"] or first)
    if last < first:
        raise _wrong(text, f"{part!r} ends before it begins")
    if step < 1:
        raise _wrong(text, f"{part!r} has a step of 0")
    if last > _LARGEST:
        raise _wrong(text, f"no Slurm has an index as large as {last}")
    return range(first, last + 1, step)


def _wrong(text: str, why: str) -> BadInput:
    return BadInput(f"--array={text} is no array", why=why, fix="--array=0-9   (or 1-20:2, or 0-19%4, or 3,7)")
