"""Judges the values that somebody gives to a template's keys, before they become lines of a job script. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from badcjobs.errors import BadInput
from badcjobs.scheduler.array_range import range_instead
from badcjobs.scheduler.array_spec import parse_array
from badcjobs.scheduler.local_gpus import count_gpus
from badcjobs.scheduler.local_values import parse_limit, parse_memory, parse_signal
from badcjobs.scheduler.script import Key

_DEPENDENCY = re.compile(r"singleton|after[a-z]*:\d+(?:[_+:,?]?[a-z:]*\d+)*")
_NAME = re.compile(r"[\w.@-]+")
_CONDITION = re.compile(r"[^\s<>]+")
_PLACEHOLDER = re.compile(r"<[a-z]+>")


@dataclass(frozen=True, slots=True)
class WrongValue:
    """A value that a template cannot take."""

    key: str
    value: str
    wanted: str
    example: str

    def __str__(self) -> str:
        return f"--set {self.key}={self.value}: wanted is {self.wanted}, such as {self.example}"


def wrong_values(keys: Sequence[Key], given: Sequence[str]) -> list[WrongValue]:
    """Return every value that sbatch, or the template itself, would not take; unknown keys are not looked at."""
    known = {key.name: key for key in keys}
    words = [(word.strip().replace("_", "-"), value) for word, _, value in (one.partition("=") for one in given)]
    together = {key.name: key.value for key in keys} | {name: value for name, value in words if value}
    found: list[WrongValue] = []
    for name, value in words:
        if name in known and value:
            found += [WrongValue(name, value, *wrong) for wrong in _judge(known[name], value)]
    said = {name for name, _ in words}
    if not found and together.keys() >= {"time", "signal"} and said & {"time", "signal"}:
        of = "time" if "time" in said else "signal"
        found += [WrongValue(of, together[of], *wrong) for wrong in _judge_lead(of, together)]
    return found


def example_of(option: str) -> str | None:
    """Return a value that sbatch takes for an option; None: not one that is judged here."""
    if option not in _KINDS:
        return None
    return _KINDS[option][1].partition(" or ")[0].partition(",")[0]


def _judge(key: Key, value: str) -> Iterator[tuple[str, str]]:
    """Yield what is wanted instead, and an example of it."""
    if key.name in ("source", "out", "image", "badcjobs", "apptainer"):
        if value.startswith("~"):
            yield "a path without ~, which no shell would replace there", "/path/to" + value[1:]
    elif key.name in _KINDS:
        wanted, example, is_good = _KINDS[key.name]
        if not is_good(value):
            yield wanted, example
        elif key.name == "array" and (instead := range_instead(parse_array(value))):
            yield "a range, for Slurm hides the spacing of a list from its tasks", instead
        elif key.required and not _fits_placeholder(key.value, value):
            yield f"the form {key.value}", _PLACEHOLDER.sub(value, key.value, count=1)


def _judge_lead(which: str, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Compare the time limit with its early warning, whichever of the two was set."""
    time_s, lead_s = parse_limit(values["time"]) or 0, parse_signal(values["signal"]).lead_s
    if time_s > lead_s:
        return
    if which == "signal":
        sender = values["signal"].partition("@")[0]
        yield f"fewer seconds than the {time_s:,} of its time limit, {values['time']}", f"{sender}@180"
    else:
        said = f"{time_s // 60} min" if time_s >= 60 else f"{time_s} s"
        yield f"more than the {lead_s} s of its early warning (this is {said})", _longer(lead_s)


def _longer(lead_s: int) -> str:
    """Return a time limit that leaves more than an hour before the warning."""
    return f"{max(2, lead_s // 3600 + 2)}:00:00"


def _fits_placeholder(form: str, value: str) -> bool:
    parts = [re.escape(part) for part in _PLACEHOLDER.split(form)]
    return re.fullmatch(r"[^<>\s]+".join(parts), value) is not None


def _taken_by(read: Callable[[str], object]) -> Callable[[str], bool]:
    """Return whether a reader takes a text, and makes something of it."""

    def is_good(text: str) -> bool:
        try:
            return bool(read(text))
        except (BadInput, ValueError):
            return False

    return is_good


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) > 0


def _is_count_or_range(text: str) -> bool:
    least, dash, most = text.partition("-")
    return _is_count(least) and (not dash or (_is_count(most) and int(most) >= int(least)))


_COUNT = ("a whole number above 0", "4", _is_count)
_A_NAME = ("a name without blanks", "st-pi-1", lambda text: _NAME.fullmatch(text) is not None)

# key → what is wanted, an example, whether a value is that
_KINDS: dict[str, tuple[str, str, Callable[[str], bool]]] = {
    "account": _A_NAME,
    "partition": (
        "names of partitions, with commas between",
        "gpu",
        lambda text: bool(re.fullmatch(r"[\w.,-]+", text)),
    ),
    "qos": ("a name without blanks", "normal", lambda text: _NAME.fullmatch(text) is not None),
    "constraint": ("features of a node, without blanks", "gpu_mem_32", lambda text: bool(_CONDITION.fullmatch(text))),
    "array": ("indices of an array", "0-9, 1-20:2 or 0-99%10", _taken_by(parse_array)),
    "time": ("a time limit", "12:00:00 or 1-00:00:00", _taken_by(parse_limit)),
    "mem": ("an amount of memory", "16G", _taken_by(lambda text: parse_memory(text) >= 0)),
    "gpus-per-node": ("a number of GPUs", "4 or v100:4", _taken_by(lambda text: count_gpus({"gpus-per-node": text}))),
    "nodes": ("a number of nodes", "2", _is_count_or_range),
    "ntasks": _COUNT,
    "ntasks-per-node": _COUNT,
    "cpus-per-task": _COUNT,
    "signal": ("a signal with its lead", "B:USR1@180", _taken_by(parse_signal)),
    "open-mode": ("append or truncate", "append", lambda text: text in ("append", "truncate")),
    "dependency": ("what Slurm is to wait for", "afterany:4821", lambda text: bool(_DEPENDENCY.fullmatch(text))),
}
