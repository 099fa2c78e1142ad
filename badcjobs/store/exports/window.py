"""The time window of an export: how people write it, and what it is in SQL.

Half-open, [from, to): two windows that meet share no reading and lose none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from badcjobs.errors import BadInput

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LAST_MS = 2**63 - 1  # SQLite's largest integer
_DATE_IN_DIGITS = re.compile(r"(19|20)\d{2}(\d{2}){0,2}")  # 20260701 would be a moment in 1970
_FORMS = "a time is 2026-07-01, 2026-07-01T06:30, 2026-07-01T06:30:00-07:00, …Z, or UTC milliseconds; naive means UTC"

# How a table says when: one instant, or a stretch that may not have ended.
_INSTANT = "at_ms"
_STRETCHES = (
    ("from_ms", "to_ms"),
    ("started_at_ms", "ended_at_ms"),
    ("started_at_ms", "last_sign_ms"),
    ("first_at_ms", "last_at_ms"),
)
# What was heard has the time of the chunk it was heard in; its own times count from the chunk's start.
_THROUGH = {"detection": "chunk", "rival_detection": "rival_chunk"}


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time in UTC milliseconds; None: open at that end."""

    from_ms: int | None = None
    to_ms: int | None = None

    def __bool__(self) -> bool:
        return self.from_ms is not None or self.to_ms is not None

    def holds(self, instant: str) -> str:
        """Return the SQL condition for an instant inside the window."""
        parts = [] if self.from_ms is None else [f"{instant} >= {self.from_ms}"]
        parts += [] if self.to_ms is None else [f"{instant} < {self.to_ms}"]
        return " AND ".join(parts)

    def overlaps(self, start: str, end: str) -> str:
        """Return the SQL condition for a stretch with a moment inside the window; one without an end goes on."""
        parts = [f"{start} IS NOT NULL"]
        if self.to_ms is not None:
            parts.append(f"{start} < {self.to_ms}")
        if self.from_ms is not None:  # the last part keeps a stretch of no length that lies on the edge
            parts.append(f"({end} IS NULL OR {end} > {self.from_ms} OR {start} >= {self.from_ms})")
        return " AND ".join(parts)


def parse_window(from_text: str | None, to_text: str | None) -> Window:
    """Return the window that two options say, or name everything that is wrong with them."""
    mistakes: list[str] = []
    from_ms = _parse_option("--from", from_text, mistakes)
    to_ms = _parse_option("--to", to_text, mistakes)
    if mistakes:
        raise BadInput("; ".join(mistakes), why=_FORMS, fix="--from 2026-07-01 --to 2026-07-02T06:30Z")
    if from_ms is not None and to_ms is not None and from_ms >= to_ms:
        raise BadInput(
            f"--from {from_text} is not before --to {to_text}",
            why="the window is from (included) to (excluded), so nothing is in it",
            fix=f"--from {to_text} --to {from_text}" if from_ms > to_ms else None,
        )
    return Window(from_ms, to_ms)


def _parse_option(option: str, text: str | None, mistakes: list[str]) -> int | None:
    try:
        return None if text is None else parse_moment(text)
    except ValueError:
        mistakes.append(f"{option} {text} is not a time")
        return None


def parse_moment(text: str) -> int:
    """Return UTC milliseconds from an ISO-8601 date or date-time, or from milliseconds; ValueError: neither."""
    text = text.strip()
    if re.fullmatch(r"-?[0-9]+", text):
        if _DATE_IN_DIGITS.fullmatch(text) or abs(int(text)) > _LAST_MS:
            raise ValueError(text)
        return int(text)
    moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))  # Python 3.10 knows no Z
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def condition(table: str, columns: Sequence[str], window: Window) -> str | None:
    """Return the SQL condition that keeps a table's rows inside the window; None: its rows have no time."""
    if table in _THROUGH:
        through = window.overlaps("c.started_at_ms", "c.ended_at_ms")
        return (
            f"EXISTS (SELECT 1 FROM {_THROUGH[table]} c WHERE c.recording_id = {table}.recording_id "
            f"AND c.chunk_id = {table}.chunk_id AND c.task_id = {table}.task_id AND {through})"
        )
    if _INSTANT in columns:
        return window.holds(_INSTANT)
    for start, end in _STRETCHES:
        if start in columns and end in columns:
            return window.overlaps(start, end)
    return None
