"""The figures of a task: what its samples add up to, checked against the plainest way to say the same."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rooms.model import Reading
from rooms.store import LONGEST_STEP_MS, Cumulated, distribution, power_steps
from support.databases import query
from support.task_files import TaskFile

VALUES = st.lists(st.integers(0, 100), min_size=1, max_size=200)


@given(VALUES)
def test_mean_and_percentiles_are_those_of_the_sorted_values(values: list[int]) -> None:
    counts = {value: values.count(value) for value in values}
    samples, minimum, mean, p50, p95, maximum = distribution(counts)
    ordered = sorted(values)
    assert (samples, minimum, maximum) == (len(values), ordered[0], ordered[-1])
    assert mean == pytest.approx(sum(values) / len(values))
    assert p50 == ordered[-(-len(values) * 50 // 100) - 1]  # nearest rank
    assert p95 == ordered[-(-len(values) * 95 // 100) - 1]


@given(st.lists(st.tuples(st.integers(1, 30_000), st.none() | st.floats(0, 700)), max_size=60))
@example([(1, 100.0), (15_000, 200.0), (15_001, 300.0)])
def test_power_is_integrated_over_neighbours_and_never_across_a_hole(steps: list[tuple[int, float | None]]) -> None:
    at_ms, points = 0, []
    for step_ms, power_w in steps:
        at_ms += step_ms
        points.append((at_ms, power_w))
    known = [(at, power) for at, power in points if power is not None]
    parts = [(b + a) / 2 * (t2 - t1) / 1000 for (t1, a), (t2, b) in pairwise(known) if t2 - t1 <= 15_000]
    assert Cumulated(power_steps(points, LONGEST_STEP_MS)).total == (pytest.approx(sum(parts)) if parts else None)


def test_a_published_file_has_its_figures_and_what_was_not_said_has_none(tmp_path: Path) -> None:
    path = TaskFile(tmp_path, samples=4, devices=2, reading=Reading(utilization_percent=80, power_w=250.0)).write()
    assert query(path, "SELECT DISTINCT metric, samples, mean, p95 FROM metric_summary ORDER BY 1") == [
        ("power_w", 4, 250.0, 250.0),
        ("utilization_percent", 4, 80.0, 80.0),
    ]
    assert query(path, "SELECT samples, energy_counter_j, energy_integrated_j FROM device_total") == [
        (4, None, 750.0),
        (4, None, 750.0),
    ]
    assert query(path, "SELECT DISTINCT utilization_percent, samples FROM utilization_count") == [(80, 4)]


def test_a_device_without_samples_has_a_total_of_none(tmp_path: Path) -> None:
    path = TaskFile(tmp_path, samples=0).write()
    assert query(path, "SELECT samples, first_at_ms, energy_integrated_j FROM device_total") == [(0, None, None)]
    assert query(path, "SELECT count(*) FROM metric_summary") == [(0,)]
