"""Writes down where a metric is read from, for those that can be had in several ways: once, and when it changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from badcjobs.model import Reading


class SourceWriter(Protocol):
    """Where sources are written."""

    def write_source(self, device_id: int, metric: str, source: str, from_ms: int) -> None: ...


class SourceBook:
    """Knows where each metric of each device was read from last."""

    def __init__(self, writer: SourceWriter) -> None:
        self._writer = writer
        self._written: dict[tuple[int, str], str] = {}
        self._news: dict[tuple[int, str], str] = {}  # what the disk may yet refuse

    def write(self, at_ms: int, readings: Sequence[tuple[int, Reading]], unreadable: Mapping[int, str]) -> None:
        """Write what is new in these readings."""
        self._news.clear()
        for device_id, reading in readings:
            for metric, source in reading.sources.items():
                if self._written.get((device_id, metric)) != source:
                    self._writer.write_source(device_id, metric, source, at_ms)
                    self._news[device_id, metric] = source

    def finish(self) -> None:
        """Do nothing: a source has no end."""

    def written(self) -> None:
        """Remember what the disk has taken."""
        self._written.update(self._news)
        self._news.clear()
