"""A reading in the making: several files ask, this is where their answers come together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from badcjobs.gpu.sane import LIMITS, why_absurd
from badcjobs.model import METRICS, ProcessReading, Reading

_PLACES = {metric: place for place, metric in enumerate(METRICS)}  # METRICS has the order of Reading's fields
_NOTHING: list[Any] = [None] * len(METRICS)
_NO_SOURCES: Mapping[str, str] = {}


class Refusals:
    """Why one device does not give some metrics, for good."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = reasons  # never changed in place: readings hold on to it
        self._absurd: dict[str, str] = {}

    def add(self, metrics: Iterable[str], reason: str) -> None:
        self.reasons = {**self.reasons, **dict.fromkeys(metrics, reason)}

    def why_absurd(self, metric: str, value: float) -> str:
        """Return the reason for the first value that could not be: each new text would be a gap of its own."""
        return self._absurd.setdefault(metric, why_absurd(value))


class Draft:
    """What is known so far; made anew for every reading, so it does little until something goes wrong."""

    __slots__ = ("_failed", "_refusals", "_sources", "processes", "row")

    def __init__(self, refusals: Refusals) -> None:
        self.row = _NOTHING.copy()
        self.processes: tuple[ProcessReading, ...] | None = None
        self._refusals = refusals
        self._failed: dict[str, str] | None = None
        self._sources: dict[str, str] | None = None

    @property
    def is_empty(self) -> bool:
        """Say whether no metric was given."""
        return self.row == _NOTHING

    @property
    def missing(self) -> Mapping[str, str]:
        """Metric → why it was not given, now or for good."""
        return {**self._refusals.reasons, **self._failed} if self._failed else self._refusals.reasons

    def value(self, metric: str) -> Any:
        return self.row[_PLACES[metric]]

    def give(self, metric: str, value: float, source: str) -> None:
        """Write down a metric for which there are several sources."""
        low, high = LIMITS[metric]
        if not low <= value <= high:
            self.doubt(metric, value)
            return
        self.row[_PLACES[metric]] = value
        self._sources = self._sources or {}
        self._sources[metric] = source
        if self._failed:
            self._failed.pop(metric, None)

    def miss(self, metrics: Iterable[str], reason: str, *, for_good: bool) -> None:
        """Write down why these were not given."""
        if for_good:
            self._refusals.add(metrics, reason)
        else:
            self._failed = {**(self._failed or {}), **dict.fromkeys(metrics, reason)}

    def doubt(self, metric: str, value: float) -> None:
        """Write down that the device gave what cannot be."""
        self.miss([metric], self._refusals.why_absurd(metric, value), for_good=False)

    def finish(self, faults: tuple[str, ...]) -> Reading:
        """Return the reading."""
        fields = [*self.row, self.missing, self._sources or _NO_SOURCES, self.processes, faults]
        return Reading(*fields)
