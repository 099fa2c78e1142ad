"""When the time of this task is over: read from --time-left, Slurm's variable, or the answer of squeue.

Who asks squeue, and what is done with the answer, is deadline.py's business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from badcjobs.model import Allocation

END_VARIABLE = "SLURM_JOB_END_TIME"  # set by newer versions of Slurm only
_LONGEST_S = 100 * 366 * 86_400  # what is further away is no date, but a number that stands for "no limit"
_SECONDS = re.compile(r"[0-9]{1,10}(\.[0-9]*)?")
_CLOCK = re.compile(
    r"(?:(?:(?P<days>[0-9]{1,5})-)?(?P<hours>[0-9]{1,7}):)?(?P<minutes>[0-9]{1,7}):(?P<seconds>[0-5]?[0-9])"
)


@dataclass(frozen=True, slots=True)
class EndTime:
    """The instant at which the time is over, and who says so."""

    at_ms: int
    source: str


def end_words(end: EndTime | None, now_ms: int) -> str:
    """Return which end a task works to and who says so, for its log."""
    if end is None:
        return "time: no end is known; working until all is done"
    at = datetime.fromtimestamp(end.at_ms / 1000, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"time: until {at}, {timedelta(seconds=(end.at_ms - now_ms) // 1000)} from now, says {end.source}"


def parse_time_left(text: str) -> float:
    """Read seconds, ``M:S``, ``H:M:S`` or ``D-H:M:S``, the forms in which ``squeue -o %L`` says it.

    Raises ValueError for anything else.
    """
    text = text.strip()
    if _SECONDS.fullmatch(text):
        return float(text)
    parts = _CLOCK.fullmatch(text)
    if parts is None or (parts["hours"] is not None and int(parts["minutes"]) > 59):
        raise ValueError(text)
    days, hours, minutes, seconds = (int(part or 0) for part in parts.group("days", "hours", "minutes", "seconds"))
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def read_end_variable(facts: Mapping[str, str], now_ms: int) -> EndTime | None:
    """Return the end that Slurm's variable gives; None where it is not set, or cannot be true any more.

    It is written once, when the job starts: after ``scontrol update TimeLimit=…`` an end in the past is an old one.
    """
    text = facts.get(END_VARIABLE, "").strip()
    at_ms = int(text) * 1000 if text.isascii() and text.isdecimal() else None
    return EndTime(at_ms, END_VARIABLE) if at_ms is not None and _can_be(at_ms, now_ms) else None


def parse_squeue_end(text: str, now_ms: int) -> EndTime | None:
    """Read the output of ``squeue -h -o %e``; None where it names no end: NONE, Unknown, N/A, or nothing at all.

    Epoch seconds or a local date. Of several lines (a heterogeneous job, a banner) the earliest end counts.
    """
    ends = [at_ms for line in text.splitlines() if (at_ms := _instant_ms(line.strip())) is not None]
    known = [at_ms for at_ms in ends if _can_be(at_ms, now_ms)]
    return EndTime(min(known), "squeue") if known else None


def squeue_question(allocation: Allocation) -> list[str]:
    """Return the command that asks for our end alone: an array's own number would name all its tasks."""
    index = "" if allocation.array_index is None else f"_{allocation.array_index}"
    return ["squeue", "-h", "-j", f"{allocation.job_id}{index}", "-o", "%e"]


def _instant_ms(text: str) -> int | None:
    if text.isascii() and text.isdecimal():
        return int(text) * 1000
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000) if "T" in text else None
    except (ValueError, OverflowError, OSError):
        return None


def _can_be(at_ms: int, now_ms: int) -> bool:
    return now_ms < at_ms <= now_ms + _LONGEST_S * 1000
