"""What report, monitor and live page read of a task or job database, as whole values."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rooms.model import Reading
from rooms.store import (
    Completeness,
    DeviceFacts,
    StateTime,
    TaskFacts,
    Trail,
    read_accounts,
    read_chart_data,
    read_job,
    read_processes,
    read_tasks,
)
from support.behaviour import lay_out, pretty
from support.pages import Pages
from support.task_files import START_MS, TaskFile, merge_run


def plain(value: Any) -> Any:
    """Return facts without what is different on every machine, or has its default value."""
    if isinstance(value, dict):
        left_out = ("task_id", "device_id", "heard_at_ms", "settings", "trail", "spark", "utilization_counts", "means")
        return {str(k): plain(v) for k, v in value.items() if k not in left_out and v not in (None, (), {}, 0, 0.0)}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value


def test_tasks_and_devices(tmp_path: Path, pages: Pages) -> None:
    run = lay_out("live", tmp_path / "run")
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
    merge_run(run)
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
    merge_run(run)
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


def figures(facts: Any, names: str) -> str:
    return ", ".join(f"{name} = {getattr(facts, name)}" for name in names.split())


def test_figures_that_follow(pages: Pages) -> None:
    device = DeviceFacts("t", "n", 0, "GPU-0", "0", "V100", "nvml", span_s=100.0, energy_integrated_j=500.0)
    states = {"working": StateTime(80.0, 20.0, 5.0, 100.0), "idle": StateTime(20.0, 10.0, None, 25.0)}
    energy, said = "energy_source energy_j energy_measured_s state_energy_j total_s state_s", {}
    for counter_j, span_s in ((700.0, 90.0), (700.0, 89.9), (700.0, 0.0), (None, 95.0)):
        its = replace(device, energy_counter_j=counter_j, energy_counter_span_s=span_s, states=states)
        said[f"energy: {counter_j} J counted in {span_s} of 100 s"] = figures(its, energy)
    said["energy: not by state"] = figures(replace(its, states={"working": StateTime(80.0)}), energy)
    said["energy: not known"] = figures(replace(device, energy_integrated_j=None), energy)
    trail = Trail(0, 1000, (10, None, 20), (50, 50, 50), (None,) * 3, (7, 8, 9))
    assert trail.means == Reading(utilization_percent=15, memory_used_bytes=50, power_w=8) and Trail().means is None
    full = replace(device, utilization_counts={0: 1, 50: 3}, throttled={"gpu_idle": 4, "sw_power_cap": 2},
                   memory_total_bytes=200, means=trail.means, trail=trail)  # fmt: skip
    names = "utilization_mean_percent held_back memory_percent card label"
    said["device"], said["device: not known"] = figures(full, names), figures(device, names)
    said["device: no index"] = figures(replace(device, uuid=None, index=None, token="x"), "card label")
    task = TaskFacts("4821_7.r0.n", "4821", 7, devices=2, started_at_ms=START_MS, last_sign_ms=START_MS + 10_000,
                     done=4, failed=1, failed_before=2, before=3, pending=5, audio_s=120.0,
                     heard_at_ms=START_MS + 12_000, silent_after_s=60.0, its_devices=(full,),
                     working_on=("a",))  # fmt: skip
    killed, names = task.as_killed(), "state verdict alive working_on wall_s gpu_s rate chunks_per_s failed_for_good "
    names += "settled chunks ends_at_ms label part begun"
    tasks = {
        "": task, "step": replace(task, procid=2, job_id="", state="waiting"), "all done": replace(task, pending=0),
        "idle": replace(task, done=0, audio_s=0.0, state="unbegun"), "silent": task.at(START_MS + 72_001),
        "killed": killed,
    }  # fmt: skip
    said |= {f"task: {name}": figures(one, names) for name, one in tasks.items()}
    said["device of a killed task"] = figures(killed.its_devices[0], "trouble alive")
    pages({"figures.txt": "\n".join(f"{name}\n    {text}" for name, text in said.items())})
    assert task.at(START_MS + 72_000) is task and killed.its_devices[0].shown == trail.means
    assert not tasks["silent"].its_devices[0].alive
    whole = Completeness(4, None, 4, 4, 0, 0, 0, 0)
    assert [c.complete for c in (whole, replace(whole, done=3), replace(whole, expected=None))] == [True, False, False]
