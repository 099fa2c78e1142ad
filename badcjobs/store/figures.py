"""Computes the totals of a task at publication: samples and time of its devices, cost of its tries."""

from __future__ import annotations

import json
import sqlite3
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from badcjobs.model import CHARTED, COUNTERS, METRICS, THROTTLE_BITS, Reading, known_values
from badcjobs.store.schema import DERIVED, LAST_SIGN, STATES, insert_sql

LONGEST_STEP_MS = 15_000  # readings further apart are a gap
MOST_STRETCHES = 120
_SHORTEST_STRETCH_MS = 1000

# A try ``a`` of a task ``t`` by a worker ``w``; none of the three had ended at the last publication.
UNDER_WAY = "(a.outcome IS NULL AND t.verdict IS NULL AND t.ended_at_ms IS NULL AND w.ended_at_ms IS NULL)"

GAUGES = tuple(metric for metric in METRICS if metric not in COUNTERS)
_OVER_TIME = (
    "energy_j",
    "power_w",
    "busy_percent",
    "utilization_percent",
)
_BLOCK_ROWS = 20_000
_RECENT_MS = 25_000  # some metrics are read every 20 s
_SAMPLES = f"""
    SELECT at_ms, {", ".join(METRICS)} FROM sample
    WHERE task_id = ? AND device_id = ? ORDER BY at_ms"""


def write_figures(db: sqlite3.Connection, task_id: int) -> None:
    """Compute the totals of one task again: the samples and times of its devices, the cost of its tries."""
    for table in DERIVED:
        db.execute(f"DELETE FROM {table} WHERE task_id = ?", (task_id,))
    lives = f"SELECT started_at_ms, {LAST_SIGN} FROM task t WHERE task_id = ?"
    from_ms, to_ms = db.execute(lives, (task_id,)).fetchone()
    devices = db.execute("SELECT device_id FROM device WHERE task_id = ? ORDER BY device_id", (task_id,)).fetchall()
    for (device_id,) in devices:
        busy, energy, last_values = _write_totals(db, task_id, device_id)
        tries = db.execute(_TRIES, (to_ms, task_id, device_id)).fetchall()
        worker_lives = db.execute(_LIVES, (to_ms, task_id, device_id)).fetchall()
        spans = list(make_spans(from_ms, to_ms, tries, worker_lives))
        by_state, by_try = sum_by_state(spans, busy, energy)
        states = {attempt_id: state for attempt_id, _, _, state in tries}
        times = [(task_id, device_id, state, *astuple(time)) for state, time in sorted(by_state.items())]
        costs = [
            (task_id, attempt_id, states[attempt_id], time.total_s, time.busy_s, time.energy_j)
            for attempt_id, time in sorted(by_try.items())
        ]
        db.executemany(insert_sql("device_time"), times)
        db.executemany(insert_sql("attempt_cost"), costs)
        _write_stretches(db, task_id, device_id, spans)
        db.execute(_WORK, {"task": task_id, "device": device_id, "last": json.dumps(last_values)})
    db.execute(_THROTTLING, {"task": task_id})
    db.execute(_TASK_TOTAL, {"task": task_id})


# A try or a worker without an end gets the end of its task, which is the first parameter.
_TRIES = f"""
    SELECT a.attempt_id, a.started_at_ms,
           coalesce(a.ended_at_ms, w.ended_at_ms, ?),
           CASE WHEN a.outcome = 'done' OR {UNDER_WAY} THEN 'working'
                WHEN a.outcome = 'failed' THEN 'failed' ELSE 'lost' END
    FROM attempt a JOIN task t USING (task_id)
    LEFT JOIN worker w USING (worker_id)
    WHERE a.task_id = ? AND a.device_id = ?"""
_LIVES = """
    SELECT w.started_at_ms, min(a.started_at_ms),
           coalesce(w.ended_at_ms, ?)
    FROM worker w LEFT JOIN attempt a ON a.task_id = w.task_id
        AND a.worker_id = w.worker_id
    WHERE w.task_id = ? AND w.device_id = ? GROUP BY w.worker_id"""


def _write_totals(
    db: sqlite3.Connection, task_id: int, device_id: int
) -> tuple[Cumulated, Cumulated, Mapping[str, float]]:
    """Write the totals of one device; return its busy seconds and joules over time, and its last reading.

    Without a better metric, busy is the plain utilization. The samples are read block by block.
    """
    counts: dict[str, Counter[Any]] = {metric: Counter() for metric in GAUGES}
    points: dict[str, list[tuple[int, float | None]]] = {name: [] for name in _OVER_TIME}
    cursor = db.execute(_SAMPLES, (task_id, device_id))
    recent: list[tuple[Any, ...]] = []
    while rows := cursor.fetchmany(_BLOCK_ROWS):
        recent = [row for row in (*recent, *rows) if row[0] > rows[-1][0] - _RECENT_MS]
        times, *columns = zip(*rows, strict=True)
        for metric, values in zip(METRICS, columns, strict=True):
            if metric in counts:
                counts[metric].update(values)
            if metric in points:
                points[metric] += zip(times, values, strict=True)
    for metric in counts:
        del counts[metric][None]  # readings without a value
    energy = Cumulated(power_steps(points["power_w"]))
    busy_metric = "busy_percent" if counts["busy_percent"] else "utilization_percent"
    counted: tuple[float | None, float | None] = (None, None)
    counter = [(at_ms, joules) for at_ms, joules in points["energy_j"] if joules is not None]
    if counter:
        joules = sum(max(0.0, after - before) for (_, before), (_, after) in pairwise(counter))  # it may restart from 0
        counted = (joules, (counter[-1][0] - counter[0][0]) / 1000)
    times_ms = [at_ms for at_ms, _ in points["energy_j"]]
    span = (min(times_ms, default=None), max(times_ms, default=None))
    db.execute(
        insert_sql("device_total"),
        (device_id, task_id, len(times_ms), *span, *counted, energy.total),
    )
    figures = [(task_id, device_id, metric, *distribution(counts[metric])) for metric in GAUGES if counts[metric]]
    db.executemany(insert_sql("metric_summary"), figures)
    utilization = sorted(counts["utilization_percent"].items())
    db.executemany(insert_sql("utilization_count"), [(task_id, device_id, *pair) for pair in utilization])
    return Cumulated(busy_steps(points[busy_metric])), energy, _last_values(recent)


def _last_values(recent: Sequence[tuple[Any, ...]]) -> dict[str, float]:
    """Return the last reading by metric, without unknown values, from rows of ``_SAMPLES``."""
    if not recent:
        return {}
    readings = [Reading(**dict(zip(METRICS, row[1:], strict=True))) for row in reversed(recent)]
    last = readings[0].completed(readings[1:])
    return known_values({metric: getattr(last, metric) for metric in METRICS})


def _write_stretches(db: sqlite3.Connection, task_id: int, device_id: int, spans: Sequence[Span]) -> None:
    if not spans:
        return
    from_ms = spans[0].from_ms
    to_ms = spans[-1].to_ms
    seconds_each = -(-(to_ms - from_ms) // (MOST_STRETCHES * 1000))  # rounded up to full seconds
    width_ms = max(_SHORTEST_STRETCH_MS, seconds_each * 1000)
    seconds = state_seconds(spans, from_ms, width_ms)
    figures = ", ".join(f"min({name}), avg({name}), max({name})" for name in CHARTED)
    place = {
        "from_ms": from_ms,
        "to_ms": to_ms,
        "width": width_ms,
        "task": task_id,
        "device": device_id,
    }
    measured_sql = f"""
        SELECT (at_ms - :from_ms) / :width, count(*), {figures} FROM sample
        WHERE task_id = :task AND device_id = :device
            AND at_ms >= :from_ms AND at_ms < :to_ms GROUP BY 1"""
    measured = {number: row for number, *row in db.execute(measured_sql, place)}
    nothing = [0, *[None] * (3 * len(CHARTED))]
    sql = insert_sql("device_stretch")
    for number, states in sorted(seconds.items()):
        begin_ms = from_ms + number * width_ms
        about = (begin_ms, min(to_ms, begin_ms + width_ms), states.most_common(1)[0][0])
        each_s = (float(states[state]) for state in STATES)
        db.execute(sql, (task_id, device_id, *about, *measured.get(number, nothing), *each_s))


# The mean utilization of a device in 20 parts of the task's time, in whole percent; null: no sample.
_SPARK = """
    SELECT json_group_array(percent) FROM (
        SELECT CAST(round(sum(utilization_mean_percent * samples)
                          / sum(iif(utilization_mean_percent IS NULL, 0, samples))) AS INTEGER) AS percent
        FROM device_stretch, (
            SELECT min(from_ms) AS first_ms, max(to_ms) AS last_ms
            FROM device_stretch WHERE task_id = :task)
        WHERE task_id = :task AND device_id = :device
        GROUP BY (from_ms - first_ms) * 20 / (last_ms - first_ms) ORDER BY from_ms)"""
# Percentiles by nearest rank. Who reads it decides by the time whether tries under way are lost.
_WORK = f"""
    INSERT INTO device_work
    SELECT :device, :task,
           (SELECT count(*) FROM worker WHERE task_id = :task AND device_id = :device),
           count(*) FILTER (WHERE outcome = 'done'),
           count(*) FILTER (WHERE outcome = 'failed'),
           count(*) FILTER (WHERE (outcome IS NULL OR outcome = 'lost') AND NOT is_under_way),
           (SELECT total(audio_s) FROM chunk
            WHERE task_id = :task AND device_id = :device AND status = 'done'),
           max(done_s) FILTER (WHERE number <= (many + 1) / 2),
           max(done_s) FILTER (WHERE number <= (95 * many + 99) / 100),
           max(done_s), max(ended_at_ms),
           max(error_class) FILTER (WHERE error_class IN ('gpu_lost', 'ran_on_cpu')),
           count(*) FILTER (WHERE is_under_way),
           total(gpu_s) FILTER (WHERE is_under_way),
           ({_SPARK}), :last
    FROM (SELECT a.outcome, a.ended_at_ms, a.error_class, k.gpu_s,
                 {UNDER_WAY} AS is_under_way,
                 iif(a.outcome = 'done', (a.ended_at_ms - a.started_at_ms) / 1000.0, NULL) AS done_s,
                 row_number() OVER (PARTITION BY a.outcome
                                    ORDER BY a.ended_at_ms - a.started_at_ms) AS number,
                 count(*) OVER (PARTITION BY a.outcome) AS many
          FROM attempt a JOIN task t USING (task_id)
          LEFT JOIN worker w USING (worker_id)
          LEFT JOIN attempt_cost k USING (task_id, attempt_id)
          WHERE a.task_id = :task AND a.device_id = :device)"""
# One sample may show several reasons.
_BITS = ", ".join(f"({bit}, '{reason}')" for bit, reason in THROTTLE_BITS.items())
_THROTTLING = f"""
    INSERT INTO throttle_count
    SELECT :task, device_id, column2, sum(many) FROM (
        SELECT device_id, throttle_reasons AS mask, count(*) AS many
        FROM sample
        WHERE task_id = :task AND throttle_reasons > 0 GROUP BY 1, 2)
    JOIN (VALUES {_BITS}) ON mask & column1 GROUP BY device_id, column2"""
# Means are over the time in which chunks were processed, without start-up and end. The readings are not evenly spaced;
# each stands for the time since the one before.
_AT_WORK = """at_ms BETWEEN (SELECT min(started_at_ms) FROM attempt WHERE task_id = :task)
              AND (SELECT max(ended_at_ms) FROM attempt WHERE task_id = :task AND outcome IN ('done', 'failed'))"""
_SPACED = """(SELECT *, at_ms - lag(at_ms) OVER (ORDER BY at_ms) AS span_ms
              FROM usage_sample WHERE task_id = :task)"""
_TASK_TOTAL = f"""
    INSERT INTO task_total SELECT :task,
        (SELECT count(*) FROM usage_sample WHERE task_id = :task),
        (SELECT sum(cpu_cores * span_ms) / sum(span_ms) FROM {_SPACED}
            WHERE cpu_cores IS NOT NULL AND {_AT_WORK}),
        (SELECT max(memory_bytes) FROM usage_sample
            WHERE task_id = :task),
        (SELECT sum(read_bytes_per_s * span_ms) / sum(span_ms)
            FROM {_SPACED}
         WHERE read_bytes_per_s IS NOT NULL AND {_AT_WORK}),
        (SELECT avg(cpu_percent) FROM host_sample
            WHERE task_id = :task AND {_AT_WORK}),
        (SELECT max(memory_used_bytes) FROM host_sample WHERE task_id = :task)"""


def distribution(counts: Mapping[float, int]) -> tuple[int, float, float, float, float, float]:
    """Return samples, minimum, mean, p50, p95 and maximum of values, given how often each occurs."""
    values = sorted(counts)
    total = sum(counts.values())
    mean = sum(value * counts[value] for value in values) / total
    reached = list(accumulate(counts[value] for value in values))
    # By nearest rank: the smallest value with at least this share of the samples up to it.
    p50 = values[bisect_left(reached, total * 50 / 100)]
    p95 = values[bisect_left(reached, total * 95 / 100)]
    return total, values[0], mean, p50, p95, values[-1]


# --- the time and energy of a device by state and by try, without a database ------------------------------------------
# A device has exactly one state at each moment of its task, the first of these that applies:
#
#     working   it processes a chunk that succeeds in the end, or that a running task has not finished yet
#     failed    it processes only chunks that fail
#     lost      it processes only chunks without a result: their worker or their task was killed
#     start_up  the task prepares, or a worker runs that has not started its first chunk
#     waiting   workers run, but none of them has a chunk
#     idle      no worker runs

Try = tuple[int, int, int, str]  # one try of a chunk: attempt_id, start and end (ms), working, failed or lost
Life = tuple[int, int | None, int]  # one worker: start, start of its first chunk (None: it had none), end (ms)


class Span(NamedTuple):
    """A period in which the state and the tries in progress do not change."""

    from_ms: int
    to_ms: int
    state: str
    attempt_ids: tuple[int, ...] = ()  # the tries in progress, which share it equally


def make_spans(from_ms: int, to_ms: int, tries: Sequence[Try], lives: Sequence[Life]) -> Iterator[Span]:
    """Yield what the device did between two moments, without holes or overlaps."""
    stretches: list[tuple[int, int, str, int | None]] = [(a, b, state, attempt_id) for attempt_id, a, b, state in tries]
    for start_ms, began_ms, end_ms in lives:
        stretches.append((start_ms, end_ms, "waiting", None))
        stretches.append((start_ms, end_ms if began_ms is None else began_ms, "start_up", None))
    if lives:
        stretches.append((from_ms, min(life[0] for life in lives), "start_up", None))
    events = []  # when, +1 or -1, state, attempt_id
    for begin_ms, end_ms, state_at, attempt_id in stretches:
        begin_ms, end_ms = max(begin_ms, from_ms), min(end_ms, to_ms)
        if begin_ms < end_ms:
            events += [(begin_ms, 1, state_at, attempt_id), (end_ms, -1, state_at, attempt_id)]
    present: Counter[str] = Counter()
    in_progress = set[int]()
    at_ms = from_ms
    # In order of time; ends come before starts of the same moment.
    for when_ms, more, state_at, attempt_id in [
        *sorted(events, key=lambda event: event[:2]),
        (to_ms, 0, "", None),
    ]:
        if when_ms > at_ms:
            yield Span(
                at_ms,
                when_ms,
                next((s for s in STATES if present[s]), "idle"),
                tuple(sorted(in_progress)),
            )
            at_ms = when_ms
        present[state_at] += more
        if attempt_id is not None:
            in_progress ^= {attempt_id}  # it starts, or ends


class Cumulated:
    """A quantity that grows over time, and how much of that time was measured."""

    def __init__(self, steps: Iterable[tuple[int, int, float]]) -> None:
        """Take steps (from, to, amount added) in order of time; they do not overlap."""
        self._steps = list(steps)
        self._totals = [0.0, *accumulate(step[2] for step in self._steps)]
        self._measured_ms = [0, *accumulate(step[1] - step[0] for step in self._steps)]

    @property
    def total(self) -> float | None:
        """The amount at the end; None: nothing was measured."""
        return self._totals[-1] if self._steps else None

    def until(self, at_ms: int) -> tuple[float, float]:
        """Return the amount at a moment, and how many milliseconds before it were measured."""
        place = bisect_right(self._steps, at_ms, key=itemgetter(0)) - 1
        if place < 0:
            return 0.0, 0.0
        begin_ms, end_ms, added = self._steps[place]
        part_ms = min(at_ms, end_ms) - begin_ms
        share = part_ms / (end_ms - begin_ms)
        return self._totals[place] + added * share, self._measured_ms[place] + part_ms

    def within(self, span: Span) -> tuple[float, float]:
        """Return the amount added during a span, and how many milliseconds of it were measured."""
        after = self.until(span.to_ms)
        before = self.until(span.from_ms)
        return after[0] - before[0], after[1] - before[1]


Points = Sequence[tuple[int, float | None]]
Steps = Iterator[tuple[int, int, float]]  # from, to, amount added


def power_steps(points: Points) -> Steps:
    """Yield the joules between neighbouring readings of power."""
    for a_ms, a_w, b_ms, b_w in _neighbours(points):
        yield a_ms, b_ms, (a_w + b_w) / 2 * (b_ms - a_ms) / 1000


def busy_steps(points: Points) -> Steps:
    """Yield the busy seconds between neighbouring readings; a reading is the busy share since the one before it."""
    for a_ms, _, b_ms, percent in _neighbours(points):
        yield a_ms, b_ms, percent / 100 * (b_ms - a_ms) / 1000


def _neighbours(points: Points) -> Iterator[tuple[int, float, int, float]]:
    """Yield pairs of readings that follow each other, without gaps between them."""
    measured = [(at_ms, value) for at_ms, value in points if value is not None]
    return ((*a, *b) for a, b in pairwise(measured) if 0 < b[0] - a[0] <= LONGEST_STEP_MS)


@dataclass(frozen=True, slots=True)
class StateTime:
    """The time of a device in one state, or of one try, and what was measured in it; None: not measured."""

    total_s: float = 0.0
    measured_s: float = 0.0  # the part of it in which the power is known
    busy_s: float | None = None
    energy_j: float | None = None

    def plus(self, spent: StateTime, share: float = 1.0) -> StateTime:
        """Return this time with a share of another one added; a negative share subtracts, but never below 0."""

        def total(value: float | None, more: float | None) -> float | None:
            if more is None or (value is None and share < 0):
                return value
            return max(0.0, (value or 0.0) + share * more)

        return StateTime(
            max(0.0, self.total_s + share * spent.total_s),
            max(0.0, self.measured_s + share * spent.measured_s),
            total(self.busy_s, spent.busy_s),
            total(self.energy_j, spent.energy_j),
        )


def sum_by_state(
    spans: Iterable[Span], busy: Cumulated, energy: Cumulated
) -> tuple[dict[str, StateTime], dict[int, StateTime]]:
    """Return the time, busy seconds and joules of a device by state, and by try; tries at the same time share them."""
    states: dict[str, StateTime] = {}
    tries: dict[int, StateTime] = {}
    for span in spans:
        busy_s, busy_ms = busy.within(span)
        energy_j, energy_ms = energy.within(span)
        measured = (busy_s if busy_ms > 0 else None, energy_j if energy_ms > 0 else None)
        spent = StateTime((span.to_ms - span.from_ms) / 1000, energy_ms / 1000, *measured)
        states[span.state] = states.get(span.state, StateTime()).plus(spent)
        for attempt_id in span.attempt_ids:
            tries[attempt_id] = tries.get(attempt_id, StateTime()).plus(spent, 1 / len(span.attempt_ids))
    return states, tries


def state_seconds(spans: Iterable[Span], from_ms: int, width_ms: int) -> dict[int, Counter[str]]:
    """Return the seconds of each state in stretches of equal width, by the number of the stretch from 0."""
    by_stretch: dict[int, Counter[str]] = {}
    for span in spans:
        at_ms = span.from_ms
        while at_ms < span.to_ms:
            number = (at_ms - from_ms) // width_ms
            end_ms = min(span.to_ms, from_ms + (number + 1) * width_ms)
            by_stretch.setdefault(number, Counter())[span.state] += (end_ms - at_ms) / 1000  # type: ignore[assignment]
            at_ms = end_ms
    return by_stretch
