"""Adds up a task when it is published: the samples of its devices, what these did with their time, what tries cost."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from badcjobs.model import CHARTED, COUNTERS, METRICS, THROTTLE_BITS
from badcjobs.store.accounting import (
    STATES,
    Books,
    Cumulated,
    Span,
    Try,
    WorkerLife,
    busy_steps,
    keep_books,
    make_spans,
    power_steps,
    state_seconds,
)
from badcjobs.store.schema import DERIVED, insert_sql

LONGEST_STEP_MS = 15_000  # neighbouring readings may be joined, but not across a hole
MOST_STRETCHES = 120
_SHORTEST_STRETCH_MS = 1000

# A try ``a`` of a task ``t`` by a worker ``w``, none of which had ended when the task was last heard of.
UNDER_WAY = "(a.outcome IS NULL AND t.verdict IS NULL AND t.ended_at_ms IS NULL AND w.ended_at_ms IS NULL)"

_LAST_SIGN = """
    SELECT started_at_ms, coalesce(ended_at_ms, max(started_at_ms,
        coalesce((SELECT max(to_ms) FROM gap WHERE task_id = t.task_id), 0),
        coalesce((SELECT max(at_ms) FROM host_sample WHERE task_id = t.task_id), 0),
        coalesce((SELECT max(max(started_at_ms, coalesce(ended_at_ms, 0))) FROM attempt WHERE task_id = t.task_id), 0)))
    FROM task t WHERE task_id = ?"""


GAUGES = tuple(metric for metric in METRICS if metric not in COUNTERS)
_BLOCK_ROWS = 20_000


def write_figures(db: sqlite3.Connection, task_id: int) -> None:
    """Add up the samples of every device of one task, and keep its accounts, anew."""
    for table in DERIVED:
        db.execute(f"DELETE FROM {table} WHERE task_id = ?", (task_id,))
    lived = db.execute(_LAST_SIGN, (task_id,)).fetchone()  # None: a recorder's half alone
    devices = db.execute("SELECT device_id FROM device WHERE task_id = ? ORDER BY device_id", (task_id,)).fetchall()
    for (device_id,) in devices:
        busy, energy = _measured(db, task_id, device_id)
        figures = DeviceFigures()
        for rows in _blocks(db, task_id, device_id):
            figures.take(rows)
        figures.write(db, task_id, device_id, energy.total)
        if lived is not None:
            from_ms, to_ms = lived
            tries = _tries(db, task_id, device_id, to_ms)
            spans = list(make_spans(from_ms, to_ms, tries, _lives(db, task_id, device_id, to_ms)))
            books = keep_books(spans, busy, energy)
            _write_books(db, task_id, device_id, books, {one.attempt_id: one.state for one in tries})
            _write_stretches(db, task_id, device_id, spans)
    if lived is not None:
        _write_throttling(db, task_id)
        _write_task_total(db, task_id)


def _tries(db: sqlite3.Connection, task_id: int, device_id: int, to_ms: int) -> list[Try]:
    rows = db.execute(
        f"""SELECT a.attempt_id, a.started_at_ms, coalesce(a.ended_at_ms, w.ended_at_ms),
                   CASE WHEN a.outcome = 'done' OR {UNDER_WAY} THEN 'working'
                        WHEN a.outcome = 'failed' THEN 'failed' ELSE 'lost' END
            FROM attempt a JOIN task t USING (task_id) LEFT JOIN worker w USING (worker_id)
            WHERE a.task_id = ? AND a.device_id = ?""",
        (task_id, device_id),
    )
    return [
        Try(attempt_id, begin_ms, to_ms if end_ms is None else end_ms, state)
        for attempt_id, begin_ms, end_ms, state in rows
    ]


def _lives(db: sqlite3.Connection, task_id: int, device_id: int, to_ms: int) -> list[WorkerLife]:
    rows = db.execute(
        """SELECT w.started_at_ms, min(a.started_at_ms), w.ended_at_ms
           FROM worker w LEFT JOIN attempt a ON a.task_id = w.task_id AND a.worker_id = w.worker_id
           WHERE w.task_id = ? AND w.device_id = ? GROUP BY w.worker_id""",
        (task_id, device_id),
    )
    return [WorkerLife(begin_ms, began_ms, to_ms if end_ms is None else end_ms) for begin_ms, began_ms, end_ms in rows]


def _measured(db: sqlite3.Connection, task_id: int, device_id: int) -> tuple[Cumulated, Cumulated]:
    """Return busy seconds and joules over time; the plain utilization where nothing better was measured."""
    rows = db.execute(
        """SELECT at_ms, power_w, busy_percent, utilization_percent FROM sample
           WHERE task_id = ? AND device_id = ? ORDER BY at_ms""",
        (task_id, device_id),
    ).fetchall()
    watts = [(at_ms, power_w) for at_ms, power_w, _, _ in rows]
    busy = [(at_ms, busy_percent) for at_ms, _, busy_percent, _ in rows]
    if all(percent is None for _, percent in busy):
        busy = [(at_ms, percent) for at_ms, _, _, percent in rows]
    return Cumulated(busy_steps(busy, LONGEST_STEP_MS)), Cumulated(power_steps(watts, LONGEST_STEP_MS))


def _write_books(db: sqlite3.Connection, task_id: int, device_id: int, books: Books, states: Mapping[int, str]) -> None:
    times = [
        (task_id, device_id, state, account.seconds, account.measured_s, account.busy_s, account.energy_j)
        for state, account in sorted(books.states.items())
    ]
    costs = [
        (task_id, attempt_id, states[attempt_id], account.seconds, account.busy_s, account.energy_j)
        for attempt_id, account in sorted(books.tries.items())
    ]
    db.executemany(insert_sql("device_time"), times)
    db.executemany(insert_sql("attempt_cost"), costs)


def stretch_width_ms(span_ms: int) -> int:
    """Return how long a stretch is, in whole seconds, so that there are not too many."""
    seconds = -(-span_ms // (MOST_STRETCHES * 1000))
    return max(_SHORTEST_STRETCH_MS, seconds * 1000)


def _write_stretches(db: sqlite3.Connection, task_id: int, device_id: int, spans: Sequence[Span]) -> None:
    if not spans:
        return
    from_ms, to_ms = spans[0].from_ms, spans[-1].to_ms
    width_ms = stretch_width_ms(to_ms - from_ms)
    seconds = state_seconds(spans, from_ms, width_ms)
    figures = ", ".join(f"min({name}), avg({name}), max({name})" for name in CHARTED)
    measured = {
        row[0]: row[1:]
        for row in db.execute(
            f"""SELECT (at_ms - :from_ms) / :width AS number, count(*), {figures} FROM sample
                WHERE task_id = :task AND device_id = :device AND at_ms >= :from_ms AND at_ms < :to_ms GROUP BY 1""",
            {"from_ms": from_ms, "to_ms": to_ms, "width": width_ms, "task": task_id, "device": device_id},
        )
    }
    nothing = (0, *[None] * (3 * len(CHARTED)))
    db.executemany(
        insert_sql("device_stretch"),
        [
            (
                task_id,
                device_id,
                from_ms + number * width_ms,
                min(to_ms, from_ms + (number + 1) * width_ms),
                seconds[number].most_common(1)[0][0],
                *measured.get(number, nothing),
                *(float(seconds[number][state]) for state in STATES),
            )
            for number in sorted(seconds)
        ],
    )


def _write_throttling(db: sqlite3.Connection, task_id: int) -> None:
    found: Counter[tuple[int, str]] = Counter()
    masks = db.execute(
        """SELECT device_id, throttle_reasons, count(*) FROM sample
           WHERE task_id = ? AND throttle_reasons > 0 GROUP BY device_id, throttle_reasons""",
        (task_id,),
    )
    for device_id, mask, many in masks:
        for bit, reason in THROTTLE_BITS.items():
            if mask & bit:
                found[device_id, reason] += many
    rows = [(task_id, device_id, reason, many) for (device_id, reason), many in sorted(found.items())]
    db.executemany(insert_sql("throttle_count"), rows)


def _write_task_total(db: sqlite3.Connection, task_id: int) -> None:
    """Add up what was used; means are over the time in which chunks were worked on, start-up and end left out."""
    at_work = """at_ms BETWEEN (SELECT min(started_at_ms) FROM attempt WHERE task_id = :task)
                  AND (SELECT max(ended_at_ms) FROM attempt WHERE task_id = :task AND outcome IN ('done', 'failed'))"""
    # These readings are not evenly spaced; each speaks for the time since the one before.
    spaced = """(SELECT *, at_ms - lag(at_ms) OVER (ORDER BY at_ms) AS span_ms
                 FROM usage_sample WHERE task_id = :task)"""
    db.execute(
        f"""INSERT INTO task_total SELECT :task,
                (SELECT count(*) FROM usage_sample WHERE task_id = :task),
                (SELECT sum(cpu_cores * span_ms) / sum(span_ms) FROM {spaced}
                 WHERE cpu_cores IS NOT NULL AND {at_work}),
                (SELECT max(memory_bytes) FROM usage_sample WHERE task_id = :task),
                (SELECT sum(read_bytes_per_s * span_ms) / sum(span_ms) FROM {spaced}
                 WHERE read_bytes_per_s IS NOT NULL AND {at_work}),
                (SELECT avg(cpu_percent) FROM host_sample WHERE task_id = :task AND {at_work}),
                (SELECT max(memory_used_bytes) FROM host_sample WHERE task_id = :task)""",
        {"task": task_id},
    )


# --- samples ----------------------------------------------------------------------------------------------------------


def _blocks(db: sqlite3.Connection, task_id: int, device_id: int) -> Iterator[list[tuple[object, ...]]]:
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
        self._counts: dict[str, Counter[float]] = {metric: Counter() for metric in GAUGES}

    def take(self, rows: Sequence[Sequence[object]]) -> None:
        """Take the next samples: time, energy counter, gauges."""
        times, counter, *gauges = zip(*rows, strict=True)
        self._samples += len(rows)
        self._span_ms = (self._span_ms or (times[0], 0))[0], times[-1]
        known = [(at_ms, joules) for at_ms, joules in zip(times, counter, strict=True) if joules is not None]
        if known:
            self._counter = [(self._counter or known)[0], known[-1]]
        for metric, values in zip(GAUGES, gauges, strict=True):
            self._counts[metric].update(values)

    def write(self, db: sqlite3.Connection, task_id: int, device_id: int, joules: float | None) -> None:
        """Write the rows of the three tables; ``joules``: the power integrated over time."""
        for counts in self._counts.values():
            del counts[None]  # what the device did not say
        first_ms, last_ms = self._span_ms or (None, None)
        total = (device_id, task_id, self._samples, first_ms, last_ms, *self._energy(), joules)
        db.execute(insert_sql("device_total"), total)
        db.executemany(
            insert_sql("metric_summary"),
            [(task_id, device_id, metric, *describe(counts)) for metric, counts in self._counts.items() if counts],
        )
        db.executemany(
            insert_sql("utilization_count"),
            [(task_id, device_id, *pair) for pair in sorted(self._counts["utilization_percent"].items())],
        )

    def _energy(self) -> tuple[float | None, float | None]:
        """Return what the energy counter counted, and over how many seconds."""
        if not self._counter:
            return None, None
        (first_ms, first_j), (last_ms, last_j) = self._counter[0], self._counter[-1]
        return last_j - first_j, (last_ms - first_ms) / 1000


def describe(counts: Mapping[float, int]) -> tuple[int, float, float, float, float, float]:
    """Return samples, minimum, mean, p50, p95 and maximum of values that came so many times each."""
    values = sorted(counts)
    reached = list(accumulate(counts[value] for value in values))
    mean = sum(value * counts[value] for value in values) / reached[-1]
    return reached[-1], values[0], mean, _rank(values, reached, 50), _rank(values, reached, 95), values[-1]


def _rank(values: Sequence[float], reached: Sequence[int], share_percent: int) -> float:
    """Return the smallest value that at least this share does not exceed."""
    return next(v for v, many in zip(values, reached, strict=True) if many * 100 >= reached[-1] * share_percent)
