"""Reads what tries that had not ended had cost when their task was last heard of: whether it is lost, a clock says."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator

from badcjobs.model import UnderWay
from badcjobs.store.account_rows import UNDER_WAY

Times = tuple[tuple[int, int], ...]  # from, to in ms, one after another

_TRIES = f"""
    SELECT a.device_id, sum({UNDER_WAY}), total(c.gpu_s), sum(c.busy_s), sum(c.energy_j)
    FROM attempt a JOIN task t USING (task_id) LEFT JOIN worker w USING (worker_id)
    LEFT JOIN attempt_cost c ON c.task_id = a.task_id AND c.attempt_id = a.attempt_id AND c.state = 'working'
    WHERE a.outcome IS NULL AND a.device_id IS NOT NULL GROUP BY 1"""
_OPEN = f"""
    WITH open AS (
        SELECT a.task_id, a.device_id, min(a.started_at_ms) AS from_ms
        FROM attempt a JOIN task t USING (task_id) LEFT JOIN worker w USING (worker_id)
        WHERE {UNDER_WAY} AND a.device_id IS NOT NULL GROUP BY 1, 2)"""
_FROM_TO = f"""{_OPEN}
    SELECT o.device_id, o.from_ms, max(s.to_ms)
    FROM open o JOIN device_stretch s USING (task_id, device_id) GROUP BY 1"""
_DONE_BESIDE = f"""{_OPEN}
    SELECT a.device_id, a.started_at_ms, a.ended_at_ms FROM attempt a JOIN open o USING (task_id, device_id)
    WHERE a.outcome = 'done' AND a.ended_at_ms > o.from_ms ORDER BY 1, 2"""


def read_under_way(db: sqlite3.Connection) -> dict[int, UnderWay]:
    """Return it by device; the accounts have it in the state working."""
    alone = read_alone(db)
    found = {}
    for device_id, tries, total_s, busy_s, energy_j in db.execute(_TRIES):
        alone_ms = sum(to_ms - from_ms for from_ms, to_ms in alone.get(device_id, ()))
        found[device_id] = UnderWay(tries, total_s, busy_s, energy_j, alone_ms / 1000)
    return found


def read_alone(db: sqlite3.Connection) -> dict[int, Times]:
    """Return by device when such tries were in flight, and none beside them that was done in the end."""
    done: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for device_id, from_ms, to_ms in db.execute(_DONE_BESIDE):
        done[device_id].append((from_ms, to_ms))
    return {
        device_id: tuple(_without(from_ms, to_ms, done[device_id]))
        for device_id, from_ms, to_ms in db.execute(_FROM_TO)
    }


def _without(from_ms: int, to_ms: int, others: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield what is left of a time without others, which come in order of their beginnings."""
    for begin_ms, end_ms in others:
        if from_ms < min(begin_ms, to_ms):
            yield from_ms, min(begin_ms, to_ms)
        from_ms = max(from_ms, end_ms)
    if from_ms < to_ms:
        yield from_ms, to_ms
