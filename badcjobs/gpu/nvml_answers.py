"""Put one question to one device, and learn from what NVML answers.

Cards, drivers, bindings and MIG modes differ in what they answer. A refusal holds for good and is never put to the
device again; any other failure holds for this time; a device that is gone is the business of whoever reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Way = Callable[[Any, Any], Any]  # (pynvml, handle) → the answer

_UNINITIALIZED, _INVALID_ARGUMENT, _GPU_IS_LOST = 1, 2, 15
_GONE = (_UNINITIALIZED, _GPU_IS_LOST)
# Not Supported, Insufficient Permissions, Function Not Found; a version of a call that the driver does not know, or no
# longer.
_FOR_GOOD = frozenset((3, 4, 13, 25, 26))

_NOT_AVAILABLE = (2**32 - 1, 2**64 - 1)  # how NVML writes "no value" into a number


class NoAnswer(Exception):
    """There is no answer now; the text is the reason."""


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
