"""What may stand behind the question mark of an address: each parameter with its meaning and its limits. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


class WrongQuestion(Exception):
    """Something that is asked in a wrong way; becomes an answer in JSON with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a query; None as its default means: all."""

    name: str
    kind: str  # integer, boolean or string
    help: str
    default: int | bool | str | None = None
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()
    example: str | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """Return it as JSON Schema."""
        limits = {"minimum": self.low, "maximum": self.high, "default": self.default, "enum": list(self.choices)}
        longest = {"maxLength": _LONGEST} if self.kind == "string" and not self.choices else {}
        return {"type": self.kind, **longest, **{k: v for k, v in limits.items() if v not in (None, [])}}

    def parse(self, text: str) -> int | bool | str:
        """Return the value, or raise WrongQuestion with what would be right."""
        if self.kind == "integer":
            return self._integer(text)
        if self.kind == "boolean":
            if text not in _BOOLEANS:
                raise self._wrong(text, "true or false")
            return _BOOLEANS[text]
        if self.choices and text not in self.choices:
            raise self._wrong(text, f"one of {', '.join(self.choices)}")
        if len(text) > _LONGEST:
            raise self._wrong(text[:20] + "…", f"at most {_LONGEST} characters")
        return text

    def _integer(self, text: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= 12):
            raise self._wrong(text[:20], "a whole number")
        value = int(text)
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            raise self._wrong(text, f"from {self.low} to {self.high}")
        return value

    def _wrong(self, text: str, wanted: str) -> WrongQuestion:
        return WrongQuestion(400, f"{self.name}={text}: must be {wanted}")


_LONGEST = 200


def parse_query(pairs: Sequence[tuple[str, str]], known: Sequence[Parameter]) -> Mapping[str, Any]:
    """Return the values of all parameters; raise WrongQuestion for what is unknown, repeated or out of range."""
    by_name = {parameter.name: parameter for parameter in known}
    values: dict[str, Any] = {parameter.name: parameter.default for parameter in known}
    seen: set[str] = set()
    for name, text in pairs:
        if name not in by_name:
            there = f"there is {', '.join(by_name)}" if by_name else "there is none here"
            raise WrongQuestion(400, f"unknown parameter {name[:40]!r}: {there}")
        if name in seen:
            raise WrongQuestion(400, f"parameter {name} is given twice")
        seen.add(name)
        values[name] = by_name[name].parse(text)
    return values
