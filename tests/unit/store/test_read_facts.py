"""What report, monitor and live page read of a task or job database, as whole values."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rooms.root import SystemClock
from rooms.store import (
    Completeness,
    DeviceFacts,
    MergeOrder,
    StateTime,
    TaskFacts,
    Trail,
    merge,
    read_accounts,
    read_chart_data,
    read_job,
    read_processes,
    read_tasks,
)
from support.behaviour import lay_out, pretty
from support.pages import Pages
from support.task_files import START_MS, TaskFile

JOB = "live"


def plain(value: Any) -> Any:
    """Return facts without what is different on every machine, or has its default value."""
    if isinstance(value, dict):
        left_out = ("task_id", "device_id", "heard_at_ms", "settings", "trail", "spark", "utilization_counts", "means")
        return {str(k): plain(v) for k, v in value.items() if k not in left_out and v not in (None, (), {}, 0, 0.0)}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value


def test_tasks_and_devices(tmp_path: Path, pages: Pages) -> None:
    run = lay_out(JOB, tmp_path / "run")
    said = {}
    for path in sorted((run / "tasks").glob("*.sqlite"))[:3]:
        tasks = read_tasks(path)
        (account,) = read_accounts(path, tasks)
        now, so_far = ([plain(asdict(device)) for device in one.its_devices[:1]] for one in (tasks[0], account))
        said[f"{path.stem}.json"] = pretty({"task": plain(asdict(replace(tasks[0], its_devices=()))), "now": now,
                                            "so far": so_far})  # fmt: skip
        assert read_tasks(path, known=[tasks[0].name]) == ()
        trail = tasks[0].its_devices[0].trail
        assert len(trail.utilization_percent) == len(trail.power_w) > 1 and trail.step_ms >= 1000
    merge(MergeOrder([run], run / "job.sqlite"), SystemClock())
    one = read_tasks(run / "job.sqlite")
    assert {task.name for task in one} == {path.stem for path in (run / "tasks").glob("*.sqlite")}
    for task in one:
        (alone,) = read_tasks(run / "tasks" / f"{task.name}.sqlite")
        ours, theirs = ([(d.reading, d.trail, d.work, d.chunks, d.rate) for d in t.its_devices] for t in (task, alone))
        assert ours == theirs, "a job database says the same as the task's own file"
    chart = read_chart_data(run / "job.sqlite")
    said["chart.json"] = pretty({
        "sets_of_settings": chart.sets_of_settings, "versions": chart.versions, "durations": len(chart.durations),
        "stretches": {" ".join(key): [len(found.from_ms), *sorted(set(found.states))]
                      for key, found in sorted(chart.stretches.items())},
        "given_up": {" ".join(key): found.states.count("lost") for key, found in sorted(chart.given_up.items())},
    })  # fmt: skip
    pages(said)
    (run / "text.sqlite").write_text("text")
    assert read_processes(run / "text.sqlite") == {}


def fresh(run: Path) -> tuple[int, int, int, tuple[int, ...], list[bool]]:
    job = read_job(run / "job.sqlite")
    freshness = job.merged
    changed = [task.changed for task in sorted(job.tasks, key=lambda task: task.name)]
    return freshness.changed, freshness.gone, freshness.new, freshness.new_indices, changed


def test_what_has_changed_since_the_merge_is_counted_and_copies_are_no_change(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = TaskFile(run, index=0, states={"a": "done"}).write()
    running = TaskFile(run, index=1, states={"b": "done"}, ended_at_ms=None).write()
    merge(MergeOrder([run], run / "job.sqlite"), SystemClock())
    assert fresh(run) == (0, 0, 0, (), [False, False])
    shutil.copytree(run, tmp_path / "copy")  # shutil.copytree keeps the times; cp does not
    late = START_MS // 1000 + 100_000  # the task that runs was silent by then
    for path in (tmp_path / "copy" / "tasks").iterdir():
        os.utime(path, (late, late))
    os.utime(tmp_path / "copy" / "job.sqlite", (late, late))
    assert fresh(tmp_path / "copy")[0] == 0, "another time, the same seal"
    os.utime(ended, (late, late))
    assert fresh(run) == (0, 0, 0, (), [False, False]), "the file of an ended task does not change"
    os.utime(running, (late, late))
    assert fresh(run) == (1, 0, 0, (), [False, True])
    TaskFile(run, index=5, states={"c": "done"}).write()
    TaskFile(run, index=0, job_id="local17", states={"d": "done"}).write()
    (run / "tasks" / ".hidden_1.r0.gpu1.sqlite").touch()
    assert fresh(run) == (1, 0, 2, (5,), [False, True])
    ended.write_bytes(ended.read_bytes() + b"x")
    assert fresh(run)[0] == 2
    running.unlink()
    assert fresh(run) == (1, 1, 2, (5,), [False, False])
    ended.unlink()
    assert fresh(run)[:2] == (0, 1), "the file of an ended task may go"


# --- figures that follow ----------------------------------------------------------------------------------------------

DEVICE = DeviceFacts("t", "n", 0, "GPU-0", "0", "V100", "nvml", span_s=100.0, energy_integrated_j=500.0)


@pytest.mark.parametrize(
    ("counter_j", "span_s", "source", "energy_j", "measured_s"),
    [
        (700.0, 90.0, "counter", 700.0, 90.0), (700.0, 89.9, "integrated power", 500.0, 30.0),
        (700.0, 0.0, "integrated power", 500.0, 30.0), (None, 95.0, "integrated power", 500.0, 30.0),
    ],
)  # fmt: skip
def test_energy_is_the_counters_where_it_covers_nearly_all_of_the_time(
    counter_j: float | None, span_s: float, source: str, energy_j: float, measured_s: float
) -> None:
    states = {"working": StateTime(80.0, 20.0, 5.0, 100.0), "idle": StateTime(20.0, 10.0, None, 25.0)}
    device = replace(DEVICE, energy_counter_j=counter_j, energy_counter_span_s=span_s, states=states)
    assert (device.energy_source, device.energy_j, device.energy_measured_s) == (source, energy_j, measured_s)
    assert device.state_energy_j == pytest.approx({"working": energy_j * 0.8, "idle": energy_j * 0.2})
    assert (device.total_s, device.state_s) == (100.0, {"working": 80.0, "idle": 20.0})
    unsplit = replace(device, states={"working": StateTime(80.0)})
    assert unsplit.state_energy_j == {"unknown": energy_j}
    blind = replace(DEVICE, energy_integrated_j=None)
    assert (blind.energy_source, blind.energy_j, blind.energy_measured_s, blind.state_energy_j) == (None, None, 0.0, {})


def test_the_other_figures_of_a_device_and_a_task() -> None:
    trail = Trail(0, 1000, (10, None, 20), (50, 50, 50), (None,) * 3, (7, 8, 9))
    device = replace(DEVICE, utilization_counts={0: 1, 50: 3}, throttled={"gpu_idle": 4, "sw_power_cap": 2},
                     memory_total_bytes=200, trail=trail)  # fmt: skip
    assert (device.utilization_mean_percent, device.held_back) == (37.5, {"sw_power_cap": 2})
    assert (DEVICE.utilization_mean_percent, DEVICE.memory_percent, Trail().means) == (None, None, None)
    means = device.trail.means
    assert means is not None and (means.utilization_percent, means.temperature_c, means.power_w) == (15, None, 8)
    assert replace(device, means=means).memory_percent == 25.0
    assert (device.card, replace(device, uuid=None).card) == (("n", "GPU-0"), ("n", "0"))
    assert (device.label, replace(device, index=None, token="x").label) == ("0", "x")
    task = TaskFacts("4821_7.r0.n", "4821", 7, devices=2, started_at_ms=START_MS, last_sign_ms=START_MS + 10_000,
                     done=4, failed=1, failed_before=2, before=3, pending=5, audio_s=120.0,
                     heard_at_ms=START_MS + 12_000, silent_after_s=60.0, its_devices=(device,),
                     working_on=("a",))  # fmt: skip
    assert (task.wall_s, task.gpu_s, task.rate, task.chunks_per_s) == (10.0, 20.0, 12.0, 0.4)
    assert (task.failed_for_good, task.settled, task.chunks, task.ends_at_ms) == (3, 10, 15, START_MS + 22_500)
    assert (task.label, replace(task, procid=2, job_id="").label, task.part) == (
        "4821_7",
        "7.p2",
        (7, None, None, None),
    )
    idle = replace(task, done=0, audio_s=0.0)
    assert (idle.rate, idle.chunks_per_s, idle.ends_at_ms, replace(task, pending=0).ends_at_ms) == (None,) * 4
    assert task.at(START_MS + 72_000) is task
    silent = task.at(START_MS + 72_001)
    assert (silent.state, silent.alive, silent.ends_at_ms, silent.its_devices[0].alive) == ("silent", True, None, False)
    killed = task.as_killed()
    assert (killed.state, killed.verdict, killed.alive, killed.working_on) == ("killed", "killed", False, ())
    assert killed.its_devices[0].trouble == "its task was killed" and killed.its_devices[0].shown == means
    assert [replace(task, state=state).begun for state in ("running", "waiting", "unbegun")] == [True, False, False]
    whole = Completeness(4, None, 4, 4, 0, 0, 0, 0)
    assert [c.complete for c in (whole, replace(whole, done=3), replace(whole, expected=None))] == [True, False, False]
