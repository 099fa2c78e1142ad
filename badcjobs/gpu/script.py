"""What simulated devices shall do, as a user writes it down in TOML::

    [[device]]
    index = 1
    load = [[0, 95], [60, 4.5]]      # percent from a second on; idle before the first; no load: a wave around 80 %
    lost_at_s = 120
    back_at_s = 180
    unsupported = ["energy_j"]
    name = "Simulated A100"
    memory_total_mib = 40960
    slowdown_c = 87
    processes = [[4711, 900]]        # on it all the time: process id, MiB
    fault = [[90, "Xid 79"]]         # reported once, at that second

Seconds count from the start of the simulation. Reading the file is left to ``choose.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from badcjobs.errors import BadInput
from badcjobs.model import METRICS


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """One device of the simulation; the fields are the keys of the script."""

    index: int
    load: tuple[tuple[float, float], ...] | None = None  # (from_s, percent), in order; None: the wave
    lost_at_s: float | None = None
    back_at_s: float | None = None
    unsupported: tuple[str, ...] = ()
    name: str = "Simulated GPU"
    memory_total_mib: int = 16 * 1024
    slowdown_c: int | None = None
    processes: tuple[tuple[int, int], ...] | None = None  # (pid, MiB); None: it does not list them
    fault: tuple[tuple[float, str], ...] = ()  # (at_s, what it reports)


@dataclass(frozen=True, slots=True)
class SimulationScript:
    """The devices that differ from the default."""

    devices: tuple[SimulatedDevice, ...] = ()


def parse_script(document: Mapping[str, Any], source: str = "the simulation script") -> SimulationScript:
    """Understand a script; raise BadInput that names every mistake at once."""
    tables = document.get("device", [])
    mistakes = [f"unknown key {key!r}; only [[device]] tables are known" for key in document if key != "device"]
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        mistakes.append("'device' is not a list of tables: write [[device]] above each device")
        tables = []
    for number, table in enumerate(tables, start=1):
        mistakes += [f"device table {number}: {mistake}" for mistake in _find_mistakes(table)]
    indices = [table["index"] for table in tables if _is_count(table.get("index"), 0)]
    mistakes += [f"two tables for device {index}" for index in sorted(set(indices)) if indices.count(index) > 1]
    if mistakes:
        raise BadInput(f"{source} has {len(mistakes)} mistake(s)", why="\n".join(mistakes))
    return SimulationScript(tuple(_build_device(table) for table in tables))


def _build_device(table: Mapping[str, Any]) -> SimulatedDevice:
    values = dict(table)
    if "load" in values:
        values["load"] = tuple((float(from_s), float(percent)) for from_s, percent in values["load"])
    values["unsupported"] = tuple(values.get("unsupported", ()))
    if "processes" in values:
        values["processes"] = tuple((pid, mib) for pid, mib in values["processes"])
    values["fault"] = tuple((float(at_s), text) for at_s, text in values.get("fault", ()))
    return SimulatedDevice(**values)


def _find_mistakes(table: Mapping[str, Any]) -> Iterator[str]:
    if "index" not in table:
        yield "'index' is missing"
    for key, value in table.items():
        if key not in _EXPECTED:
            yield f"unknown key {key!r}; known are {', '.join(_EXPECTED)}"
        elif not _EXPECTED[key][0](value):
            yield f"{key} = {value!r} is not {_EXPECTED[key][1]}"
    lost_at_s: Any = table.get("lost_at_s")
    back_at_s: Any = table.get("back_at_s")
    if _is_number(back_at_s) and not (_is_number(lost_at_s) and lost_at_s < back_at_s):
        yield "'back_at_s' needs an earlier 'lost_at_s'"


def _is_number(value: Any, low: float = 0, high: float = float("inf")) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_count(value: Any, low: int) -> bool:
    return isinstance(value, int) and _is_number(value, low)


def _is_pairs(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)


def _is_load(value: Any) -> bool:
    if not _is_pairs(value):
        return False
    numbers = all(_is_number(from_s) and _is_number(percent, 0, 100) for from_s, percent in value)
    return numbers and all(earlier[0] < later[0] for earlier, later in pairwise(value))


def _is_processes(value: Any) -> bool:
    return _is_pairs(value) and all(_is_count(pid, 1) and _is_count(mib, 0) for pid, mib in value)


def _is_faults(value: Any) -> bool:
    return _is_pairs(value) and all(_is_number(at_s) and isinstance(text, str) and text for at_s, text in value)


def _is_metrics(value: object) -> bool:
    return isinstance(value, list) and all(name in METRICS for name in value)


_EXPECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "index": (lambda value: _is_count(value, 0), "a whole number from 0"),
    "load": (_is_load, "a list of [from_s, percent] in order of time, with percent from 0 to 100"),
    "lost_at_s": (_is_number, "a number of seconds"),
    "back_at_s": (_is_number, "a number of seconds"),
    "unsupported": (_is_metrics, f"a list of metrics out of {', '.join(METRICS)}"),
    "name": (lambda value: isinstance(value, str), "a text"),
    "memory_total_mib": (lambda value: _is_count(value, 1), "a whole number of MiB"),
    "slowdown_c": (lambda value: _is_count(value, 1), "a whole number of °C"),
    "processes": (_is_processes, "a list of [pid, MiB]"),
    "fault": (_is_faults, 'a list of [at_s, "what it reports"]'),
}
