"""Adds up a task's samples when they are published, so that the summary of an array need not read millions of rows."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from badcjobs.model import COUNTERS, METRICS
from badcjobs.store.account_rows import LONGEST_STEP_MS, write_accounts
from badcjobs.store.schema import DERIVED

GAUGES = tuple(metric for metric in METRICS if metric not in COUNTERS)
_BLOCK_ROWS = 20_000

_Row = tuple[object, ...]
_Points = Sequence[tuple[int, float | None]]  # time, value


def write_figures(db: sqlite3.Connection, task_id: int) -> None:
    """Add up the samples of every device of one task, and keep its accounts, anew."""
    for table in DERIVED:
        db.execute(f"DELETE FROM {table} WHERE task_id = ?", (task_id,))
    devices = db.execute("SELECT device_id FROM device WHERE task_id = ? ORDER BY device_id", (task_id,))
    for (device_id,) in devices.fetchall():
        figures = DeviceFigures()
        for rows in _blocks(db, task_id, device_id):
            figures.take(rows)
        figures.write(db, task_id, device_id)
    write_accounts(db, task_id)


def _blocks(db: sqlite3.Connection, task_id: int, device_id: int) -> Iterator[list[_Row]]:
    cursor = db.execute(
        f"""SELECT at_ms, energy_j, {", ".join(GAUGES)} FROM sample
            WHERE task_id = ? AND device_id = ? ORDER BY at_ms""",
        (task_id, device_id),
    )
    while rows := cursor.fetchmany(_BLOCK_ROWS):
        yield rows


class DeviceFigures:
    """The figures of one device, from its samples in the order of time."""

    def __init__(self) -> None:
        self._samples = 0
        self._span_ms: tuple[int, int] | None = None
        self._counter: list[tuple[int, float]] = []  # first and last reading
        self._power = PowerIntegral()
        self._counts: dict[str, Counter[float]] = {metric: Counter() for metric in GAUGES}

    def take(self, rows: Sequence[Sequence[object]]) -> None:
        """Take the next samples: time, energy counter, gauges."""
        times, counter, *gauges = zip(*rows, strict=True)
        self._samples += len(rows)
        self._span_ms = (self._span_ms or (times[0], 0))[0], times[-1]
        known = [(at_ms, joules) for at_ms, joules in zip(times, counter, strict=True) if joules is not None]
        if known:
            self._counter = [(self._counter or known)[0], known[-1]]
        self._power.take(list(zip(times, gauges[GAUGES.index("power_w")], strict=True)))
        for metric, values in zip(GAUGES, gauges, strict=True):
            self._counts[metric].update(values)

    def write(self, db: sqlite3.Connection, task_id: int, device_id: int) -> None:
        """Write the rows of the three tables."""
        for counts in self._counts.values():
            del counts[None]  # what the device did not say
        first_ms, last_ms = self._span_ms or (None, None)
        total = (device_id, task_id, self._samples, first_ms, last_ms, *self._energy(), self._power.joules)
        db.execute("INSERT INTO device_total VALUES (?, ?, ?, ?, ?, ?, ?, ?)", total)
        db.executemany(
            "INSERT INTO metric_summary VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(task_id, device_id, metric, *describe(counts)) for metric, counts in self._counts.items() if counts],
        )
        db.executemany(
            "INSERT INTO utilization_count VALUES (?, ?, ?, ?)",
            [(task_id, device_id, *pair) for pair in sorted(self._counts["utilization_percent"].items())],
        )

    def _energy(self) -> tuple[float | None, float | None]:
        """Return what the energy counter counted, and over how many seconds."""
        if not self._counter:
            return None, None
        (first_ms, first_j), (last_ms, last_j) = self._counter[0], self._counter[-1]
        return last_j - first_j, (last_ms - first_ms) / 1000


class PowerIntegral:
    """Power over time, by trapezoids."""

    def __init__(self) -> None:
        self._before: tuple[int, float] | None = None
        self._steps = 0
        self._double_millijoules = 0.0

    def take(self, points: _Points) -> None:
        """Take the next readings."""
        for at_ms, power_w in points:
            if power_w is None:
                continue
            if self._before is not None:
                step_ms = at_ms - self._before[0]
                if step_ms <= LONGEST_STEP_MS:
                    self._double_millijoules += (power_w + self._before[1]) * step_ms
                    self._steps += 1
            self._before = (at_ms, power_w)

    @property
    def joules(self) -> float | None:
        """The energy; None: there were no two neighbouring readings."""
        return self._double_millijoules / 2000 if self._steps else None


def describe(counts: Mapping[float, int]) -> tuple[int, float, float, float, float, float]:
    """Return samples, minimum, mean, p50, p95 and maximum of values that came so many times each."""
    values = sorted(counts)
    reached = list(accumulate(counts[value] for value in values))
    mean = sum(value * counts[value] for value in values) / reached[-1]
    return reached[-1], values[0], mean, _rank(values, reached, 50), _rank(values, reached, 95), values[-1]


def _rank(values: Sequence[float], reached: Sequence[int], share_percent: int) -> float:
    """Return the smallest value that at least this share does not exceed."""
    return next(v for v, many in zip(values, reached, strict=True) if many * 100 >= reached[-1] * share_percent)
