"""Build the reading of a device from the answers of a library: what is asked, what is refused, what is plausible.

A broken sensor or program reports values such as 9999999999999999999 or -5. Recorded, such a value would become the
peak of a report, or not fit into SQLite. It becomes None, with a reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from badcjobs.model import ProcessReading, Reading
from badcjobs.seams import DeviceUnreadable, GpuReader, ReaderUnavailable

log = logging.getLogger(__name__)

Value = TypeVar("Value")
Call = Callable[[Any, Any], Any]  # (the library's Python package, handle) → the answer

# The plausible numbers of a unit, which is the end of the metric's name.
LIMITS = {
    "percent": (0, 100),
    "bytes": (0, 2**53),
    "s": (0, 2**53),  # bytes per second
    "c": (-50, 200),
    "w": (0, 10_000),
    "j": (0, 1e15),
    "mhz": (0, 100_000),
    "reasons": (0, 2**63 - 1),
    "errors": (0, 2**53),
    "index": (0, 2**16),
    "pid": (0, 2**32 - 1),
}


class NoAnswer(Exception):
    """A question has no answer now, or an implausible one; the text is the reason."""


def check_range(metric: str, value: Value) -> Value:
    """Return the value; raise NoAnswer if it is an implausible number."""
    if not isinstance(value, int | float):
        return value
    low, high = LIMITS[metric.rpartition("_")[2]]
    if not low <= value <= high:  # NaN fails this test too
        raise NoAnswer("implausible value")  # without the value: each new text would be a new gap
    return value


def or_none(metric: str, value: Value | None) -> Value | None:
    """Return the value, or None if it is implausible; for facts that are stored without a reason."""
    try:
        return check_range(metric, value)
    except NoAnswer:
        return None


def reason_of(error: Exception) -> str:
    """Return the text of a library's error, in one line."""
    text = getattr(error, "err_info", None) or error  # amdsmi has the text in err_info
    return " ".join(str(text).split()) or repr(error)


def try_call(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer of a library; None: the call failed."""
    try:
        return call(*arguments)
    except Exception as error:  # broad: a device is listed even if one of its facts is missing
        log.debug("%s: %s", call.__name__, reason_of(error))
        return None


def look_up(uuid: str, devices: Mapping[str, Value], reader: GpuReader) -> Value:
    """Return what a reader keeps for a device; it lists the devices if it does not know this one."""
    try:
        if uuid not in devices:
            reader.inventory()
    except ReaderUnavailable as error:
        raise DeviceUnreadable(str(error)) from error
    if uuid not in devices:
        raise DeviceUnreadable(f"{reader.backend} lists no device {uuid!r}")
    return devices[uuid]


class Question:
    """One question to one device, asked with the first call that the device has not refused.

    ``is_refusal`` returns whether an error is permanent; it raises the error of a device that is lost.
    """

    def __init__(self, metrics: tuple[str, ...], *calls: Call, is_refusal: Callable[[Exception], bool]) -> None:
        self.metrics = metrics
        self.calls = calls  # empty: the device has refused all of them
        self._is_refusal = is_refusal
        self._why = ""

    def ask(self, package: Any, handle: Any) -> Any:
        """Return the answer; raise NoAnswer, or the library's own error if the device is lost."""
        while self.calls:
            try:
                return self.calls[0](package, handle)
            except NoAnswer:
                raise
            except Exception as error:  # broad: one failed question must not affect the others
                if not self._is_refusal(error):
                    raise NoAnswer(reason_of(error)) from error
                self._why = self._why or reason_of(error)
                self.calls = self.calls[1:]
        raise NoAnswer(self._why)


class ReadingBuilder:
    """Builds the readings of one device, one after another; remembers what the device refuses permanently."""

    def __init__(self, refused: Mapping[str, str]) -> None:
        self._refused = refused  # never changed in place: readings share it
        self.begin()

    def begin(self) -> None:
        """Begin the next reading."""
        self.values: dict[str, Any] = {}
        self.processes: tuple[ProcessReading, ...] | None = None
        self._failed: dict[str, str] = {}
        self._sources: dict[str, str] = {}

    @property
    def missing(self) -> Mapping[str, str]:
        """Metric → why the device does not give it, now or permanently."""
        if not self._failed:
            return self._refused
        return {**self._refused, **self._failed}

    def ask(self, questions: Iterable[Question], package: Any, handle: Any) -> None:
        """Ask the questions that the device has not refused, and add the answers."""
        for question in questions:
            if not question.calls:
                continue
            metrics = question.metrics
            try:
                answer = question.ask(package, handle)
            except NoAnswer as reason:
                self.add_missing(metrics, str(reason), permanent=not question.calls)
                continue
            if len(metrics) == 1:
                self.add(metrics[0], answer)
            else:
                for metric, number in zip(metrics, answer, strict=True):
                    self.add(metric, number)

    def add(self, metric: str, value: float, source: str | None = None) -> None:
        """Add a value; ``source`` for a metric that has several."""
        try:
            self.values[metric] = check_range(metric, value)
        except NoAnswer as reason:
            self._failed[metric] = str(reason)
            return
        if source is not None:
            self._sources[metric] = source
            self._failed.pop(metric, None)

    def add_missing(self, metrics: Iterable[str], reason: str, *, permanent: bool = False) -> None:
        """Add the reason why these metrics have no value."""
        if permanent:
            self._refused = {**self._refused, **dict.fromkeys(metrics, reason)}
        else:
            self._failed.update(dict.fromkeys(metrics, reason))

    def use_utilization(self) -> None:
        """Use the utilization as busy time; if it is missing, use its reason."""
        utilization = self.values.get("utilization_percent")
        if utilization is not None:
            self.add("busy_percent", float(utilization), "utilization")
        elif "busy_percent" not in self.missing:
            self.add_missing(["busy_percent"], self.missing.get("utilization_percent", "Not Available"))

    def raise_if_empty(self) -> None:
        """Raise DeviceUnreadable if there is no value so far."""
        if not self.values:
            raise DeviceUnreadable(f"no metric can be read: {'; '.join(sorted(set(self.missing.values())))}")

    def finish(self) -> Reading:
        """Return the reading."""
        return Reading(**self.values, missing=self.missing, sources=self._sources, processes=self.processes)
