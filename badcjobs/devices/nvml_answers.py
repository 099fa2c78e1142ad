"""One question to one device, the reading that is built from the answers, and the budget of expensive calls.

Cards, drivers, bindings and MIG modes differ in what they answer. A refusal holds for good and is never put to the
device again; any other failure holds for this time; a device that is gone is the business of whoever reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from badcjobs.devices.plausible import LIMITS, NoAnswer, why_absurd
from badcjobs.model import METRICS, ProcessReading, Reading

Way = Callable[[Any, Any], Any]  # (pynvml, handle) → the answer

_UNINITIALIZED, _INVALID_ARGUMENT, _GPU_IS_LOST = 1, 2, 15
_GONE = (_UNINITIALIZED, _GPU_IS_LOST)
# Not Supported, Insufficient Permissions, Function Not Found; a version of a call that the driver does not know, or no
# longer.
_FOR_GOOD = frozenset((3, 4, 13, 25, 26))

_NOT_AVAILABLE = (2**32 - 1, 2**64 - 1)  # how NVML writes "no value" into a number


class Line:
    """One question to one device, put in the first way that it has not refused."""

    __slots__ = ("_invalid_is_for_good", "_why", "ways")

    def __init__(self, *ways: Way, to_slice: bool = False) -> None:
        self.ways = ways
        self._why = ""
        self._invalid_is_for_good = to_slice  # what slices say to calls that are meant for whole cards

    @property
    def refused(self) -> bool:
        """Say whether there is no use in asking again."""
        return not self.ways

    def ask(self, nvml: Any, handle: Any) -> Any:
        """Return the answer; raise NoAnswer, or NVML's own error when the device is gone."""
        while self.ways:
            try:
                return self.ways[0](nvml, handle)
            except NoAnswer:
                raise
            except Exception as error:  # broad: one question's trouble must not become its neighbour's
                self._learn(error)
        raise NoAnswer(self._why)

    def _learn(self, error: Exception) -> None:
        """Cross out a way that was refused; raise whatever is no refusal."""
        raise_if_gone(error)
        if not (is_refusal(error) or (self._invalid_is_for_good and code_of(error) == _INVALID_ARGUMENT)):
            raise NoAnswer(reason_of(error)) from error
        self._why = self._why or reason_of(error)
        self.ways = self.ways[1:]


def raise_if_gone(error: Exception) -> None:
    """Raise the error again when it is about all of the device, not about one question."""
    if code_of(error) in _GONE:
        raise error


def is_refusal(error: Exception) -> bool:
    """Say whether the same question would get the same answer for ever."""
    # AttributeError: this version of the binding does not have the call at all.
    return code_of(error) in _FOR_GOOD or isinstance(error, AttributeError)


def code_of(error: Exception) -> int | None:
    """Return NVML's error code; None when it is no error of NVML's."""
    return getattr(error, "value", None)


def reason_of(error: Exception) -> str:
    """Say in words why there is no answer."""
    if isinstance(error, AttributeError):
        return f"this version of nvidia-ml-py has no {error.name}"
    return str(error) or repr(error)


def is_shut_down(error: Exception) -> bool:
    """Say whether NVML itself has to be started again."""
    return code_of(error) == _UNINITIALIZED


def check(number: Any) -> Any:
    """Return the number; raise NoAnswer when it is the one that NVML writes for "no value"."""
    if number in _NOT_AVAILABLE:
        raise NoAnswer("Not Available")
    return number


# --- the reading -----------------------------------------------------------------------------------------------------

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


class ReadingBuilder:
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


# --- the budget ------------------------------------------------------------------------------------------------------

_EXPENSIVE_S = 0.5e-3  # who takes so long is left out the next time; who takes twice as long, the next two times
_MOST_TURNS = 4


class NvmlCallBudget:
    """Rate-limits an expensive NVML call: knows how many turns it is still left out."""

    def __init__(self, most_turns: int = _MOST_TURNS) -> None:
        self._most_turns = most_turns
        self._turns_off = 0
        self._took_before_s = 0.0

    def is_due(self) -> bool:
        """Say whether it is asked this time, and count the turn."""
        self._turns_off -= 1
        return self._turns_off < 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the question while it is asked."""
        started_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - started_s
        # The shorter of the last two: one that took long may only have been interrupted.
        self._turns_off = min(self._most_turns, int(min(took_s, self._took_before_s) / _EXPENSIVE_S))
        self._took_before_s = took_s

    def force_full_read(self) -> None:
        """Ask it the next time, whatever it costs."""
        self._turns_off = 0
