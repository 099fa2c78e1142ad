"""Writes the accounts of a task when it is published: what its devices did with their time, what each try cost."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence

from badcjobs.model import THROTTLE_BITS
from badcjobs.store.accounting import (
    STATES,
    Books,
    Cumulated,
    Life,
    Span,
    Try,
    busy_steps,
    keep_books,
    make_spans,
    power_steps,
    state_seconds,
)
from badcjobs.store.schema import columns_of

LONGEST_STEP_MS = 15_000  # neighbouring readings may be joined, but not across a hole
MOST_STRETCHES = 120
_SHORTEST_STRETCH_MS = 1000

# A try ``a`` of a task ``t`` by a worker ``w``, none of which had ended when the task was last heard of.
UNDER_WAY = "(a.outcome IS NULL AND t.verdict IS NULL AND t.ended_at_ms IS NULL AND w.ended_at_ms IS NULL)"

_THINNED = ("utilization_percent", "memory_used_bytes", "temperature_c", "power_w")
_LAST_SIGN = """
    SELECT started_at_ms, coalesce(ended_at_ms, max(started_at_ms,
        coalesce((SELECT max(to_ms) FROM gap WHERE task_id = t.task_id), 0),
        coalesce((SELECT max(at_ms) FROM host_sample WHERE task_id = t.task_id), 0),
        coalesce((SELECT max(max(started_at_ms, coalesce(ended_at_ms, 0))) FROM attempt WHERE task_id = t.task_id), 0)))
    FROM task t WHERE task_id = ?"""


def write_accounts(db: sqlite3.Connection, task_id: int) -> None:
    """Write the accounts of every device of a task, and of its processes; its old ones are gone already."""
    row = db.execute(_LAST_SIGN, (task_id,)).fetchone()
    if row is None:
        return  # a recorder's half alone
    from_ms, to_ms = row
    for (device_id,) in db.execute(
        "SELECT device_id FROM device WHERE task_id = ? ORDER BY device_id", (task_id,)
    ).fetchall():
        tries = _tries(db, task_id, device_id, to_ms)
        spans = list(make_spans(from_ms, to_ms, tries, _lives(db, task_id, device_id, to_ms)))
        books = keep_books(spans, *_measured(db, task_id, device_id))
        _write_books(db, task_id, device_id, books, {one.attempt_id: one.state for one in tries})
        _write_stretches(db, task_id, device_id, spans)
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


def _lives(db: sqlite3.Connection, task_id: int, device_id: int, to_ms: int) -> list[Life]:
    rows = db.execute(
        """SELECT w.started_at_ms, min(a.started_at_ms), w.ended_at_ms
           FROM worker w LEFT JOIN attempt a ON a.task_id = w.task_id AND a.worker_id = w.worker_id
           WHERE w.task_id = ? AND w.device_id = ? GROUP BY w.worker_id""",
        (task_id, device_id),
    )
    return [Life(begin_ms, began_ms, to_ms if end_ms is None else end_ms) for begin_ms, began_ms, end_ms in rows]


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
    db.executemany(
        "INSERT INTO device_time VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (task_id, device_id, state, account.seconds, account.measured_s, account.busy_s, account.energy_j)
            for state, account in sorted(books.states.items())
        ],
    )
    db.executemany(
        "INSERT INTO attempt_cost VALUES (?, ?, ?, ?, ?, ?)",
        [
            (task_id, attempt_id, states[attempt_id], account.seconds, account.busy_s, account.energy_j)
            for attempt_id, account in sorted(books.tries.items())
        ],
    )


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
    figures = ", ".join(f"min({name}), avg({name}), max({name})" for name in _THINNED)
    measured = {
        row[0]: row[1:]
        for row in db.execute(
            f"""SELECT (at_ms - :from_ms) / :width AS number, count(*), {figures} FROM sample
                WHERE task_id = :task AND device_id = :device AND at_ms >= :from_ms AND at_ms < :to_ms GROUP BY 1""",
            {"from_ms": from_ms, "to_ms": to_ms, "width": width_ms, "task": task_id, "device": device_id},
        )
    }
    nothing = (0, *[None] * (3 * len(_THINNED)))
    places = ", ".join("?" * len(columns_of("device_stretch")))
    db.executemany(
        f"INSERT INTO device_stretch VALUES ({places})",
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
    db.executemany("INSERT INTO throttle_count VALUES (?, ?, ?, ?)", rows)


def _write_task_total(db: sqlite3.Connection, task_id: int) -> None:
    """Add up what was used; means are over the time in which chunks were worked on, start-up and end left out."""
    outcomes = ", ".join(f"'{outcome}'" for outcome in ("done", "failed"))
    at_work = f"""at_ms BETWEEN (SELECT min(started_at_ms) FROM attempt WHERE task_id = :task)
                  AND (SELECT max(ended_at_ms) FROM attempt WHERE task_id = :task AND outcome IN ({outcomes}))"""
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
