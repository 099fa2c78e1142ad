"""Reads from a job database what the page of a report draws: the devices over time, how long chunks took, settings."""

from __future__ import annotations

import sqlite3
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from math import nan
from operator import itemgetter
from pathlib import Path
from sys import intern
from typing import Any

from badcjobs.errors import DatabaseProblem
from badcjobs.model import CHARTED, ChartData, Envelope, Stretches
from badcjobs.store.accounting import STATES
from badcjobs.store.job_file import open_job_database
from badcjobs.store.under_way_reader import Times, read_alone

_FIGURES = tuple(
    f"{metric}_{part}_{unit}"
    for metric, unit in (name.rsplit("_", 1) for name in CHARTED)
    for part in ("min", "mean", "max")
)

_ROUNDING_S = 0.0005
SHORT_MS = 1000  # of so short a stretch it is told how long each state lasted; a short task has no others


def read_chart_data(path: Path) -> ChartData:
    """Return what the page shows beyond the summary of a job database."""
    try:
        with closing(open_job_database(path)) as db:
            stretches = dict(read_stretches(db))
            return ChartData(
                stretches=_by_name(db, stretches),
                given_up=_by_name(db, _given_up(db, stretches)),
                durations=dict(db.execute(_DURATIONS)),
                sets_of_settings=db.execute(_SETS).fetchone()[0],
                versions=tuple(row[0] for row in db.execute(_VERSIONS)),
            )
    except sqlite3.Error as error:
        raise DatabaseProblem(f"{path} cannot be read", why=str(error)) from error


_DURATIONS = "SELECT ended_at_ms - started_at_ms, count(*) FROM attempt WHERE outcome = 'done' GROUP BY 1"
_SETS = "SELECT count(DISTINCT value) FROM task_meta WHERE key = 'settings'"
_VERSIONS = "SELECT DISTINCT version FROM task WHERE version IS NOT NULL ORDER BY 1"
_LAST = f"""
    SELECT from_ms, to_ms, {", ".join(f"{state}_s" for state in STATES)} FROM device_stretch
    WHERE device_id = :device AND task_id = (SELECT task_id FROM device WHERE device_id = :device)
    AND to_ms > :from_ms"""
_NAMES = "SELECT d.device_id, t.name, d.token FROM device d JOIN task t USING (task_id)"


def _by_name(db: sqlite3.Connection, stretches: Mapping[int, Stretches]) -> dict[tuple[str, str], Stretches]:
    names = {device_id: (task, token) for device_id, task, token in db.execute(_NAMES)}
    return {names[device_id]: found for device_id, found in stretches.items() if device_id in names}


def read_stretches(db: sqlite3.Connection) -> Iterator[tuple[int, Stretches]]:
    """Yield (device_id, its stretches), device by device."""
    columns = ", ".join(("device_id", "from_ms", "to_ms", "state", *_FIGURES))
    mixed = _mixed(db)
    rows = db.execute(f"SELECT {columns} FROM device_stretch ORDER BY task_id, device_id, from_ms")
    rows.arraysize = 1000
    for device_id, group in groupby(rows, itemgetter(0)):
        yield device_id, _stretches(group, mixed.get(device_id, {}))


def _mixed(db: sqlite3.Connection) -> dict[int, dict[int, dict[str, float]]]:
    """Return of each device, by its beginning, what states there were in a short stretch that had several."""
    longest = f"max({', '.join(f'{state}_s' for state in STATES)})"
    rows = db.execute(
        f"""SELECT device_id, from_ms, {", ".join(f"{state}_s" for state in STATES)} FROM device_stretch
            WHERE to_ms - from_ms <= {SHORT_MS} AND {longest} < (to_ms - from_ms) / 1000.0 - {_ROUNDING_S}"""
    )
    found: dict[int, dict[int, dict[str, float]]] = defaultdict(dict)
    for device_id, from_ms, *seconds in rows:
        found[device_id][from_ms] = {state: s for state, s in zip(STATES, seconds, strict=True) if s > 0}
    return found


def _stretches(rows: Iterable[Sequence[Any]], mixed: Mapping[int, Mapping[str, float]]) -> Stretches:
    _, from_ms, to_ms, states, *columns = zip(*rows, strict=True)
    figures = [_floats(column) for column in columns]
    return Stretches(
        array("q", from_ms),
        array("q", to_ms),
        tuple(map(intern, states)),
        {metric: Envelope(*figures[3 * n : 3 * n + 3]) for n, metric in enumerate(CHARTED)},
        {place: mixed[begin_ms] for place, begin_ms in enumerate(from_ms) if begin_ms in mixed} if mixed else {},
    )


def _given_up(db: sqlite3.Connection, stretches: Mapping[int, Stretches]) -> dict[int, Stretches]:
    """Return the stretches of devices that had tries under way, with the time of these in the state lost."""
    found = {}
    for device_id, times in read_alone(db).items():
        if times and device_id in stretches:
            rows = db.execute(_LAST, {"device": device_id, "from_ms": times[0][0]})
            found[device_id] = _with_lost(stretches[device_id], times, rows)
    return found


def _with_lost(device: Stretches, times: Times, rows: Iterable[Sequence[Any]]) -> Stretches:
    """Return the stretches with working time as lost; ``rows`` are those concerned: from, to, seconds by state."""
    places = {begin_ms: place for place, begin_ms in enumerate(device.from_ms)}
    states, mixed = list(device.states), dict(device.mixed)
    for from_ms, to_ms, *figures in rows:
        seconds = dict(zip(STATES, figures, strict=True))
        lost_s = min(seconds["working"], sum(max(0, min(to_ms, b) - max(from_ms, a)) for a, b in times) / 1000)
        seconds["working"], seconds["lost"] = seconds["working"] - lost_s, seconds["lost"] + lost_s
        parts = {state: s for state, s in seconds.items() if s > _ROUNDING_S}
        place = places[from_ms]
        states[place] = max(seconds, key=seconds.__getitem__)
        mixed.pop(place, None)
        if to_ms - from_ms <= SHORT_MS and len(parts) > 1:
            mixed[place] = parts
    return replace(device, states=tuple(states), mixed=mixed)


def _floats(column: Sequence[float | None]) -> array[float]:
    return array("d", [nan if value is None else value for value in column])
