"""/metrics of a run that goes on: the same names, labels and values as in the file of a report."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from rooms.live import open_run, open_run_view
from rooms.model import Submitted
from rooms.report import METRICS, SERVED, TEXTFILE, job_samples, prometheus_text, summarize_database
from rooms.root import Clock, SystemClock
from rooms.store import MergeOrder, Record, merge, write_record
from support.hand_clock import HandClock
from support.task_files import START_MS, TaskFile

NOW = SystemClock()
OF_A_READING = {m.name for m in METRICS if m.of in ("reading", "host")}


def series(text: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def names(found: dict[str, float]) -> set[str]:
    return {name.partition("{")[0] for name in found}


def served(folder: Path, clock: Clock = NOW) -> dict[str, float]:
    source = open_run(folder, clock)
    return series(source.prometheus(source.look()))


def reported(folder: Path, clock: Clock = NOW) -> dict[str, float]:
    merge(MergeOrder([folder], folder / "job.sqlite"), NOW)
    summary = summarize_database(folder / "job.sqlite", now_ms=clock.now_ms())
    return series(prometheus_text(job_samples(summary, folder.name)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run of which one task has failed and was followed by another, one was stopped and one goes on."""
    folder = tmp_path / "july"
    manifest = tmp_path / "manifest.csv"
    rows = "".join(f"rec,{name},{name}.wav,0,30000\n" for name in "abcdefgh")
    manifest.write_text(f"recording_id,chunk_id,source_path,start_ms,end_ms\n{rows}")
    TaskFile(folder, index=0, states={"a": "done", "b": "failed"}, verdict="failed", gaps=[(1000, 3000, "x")]).write()
    TaskFile(folder, index=1, states={"c": "done", "d": "pending"}, verdict="stopped", devices=2).write()
    now_ms = NOW.now_ms()
    states = {"e": "done", "f": "done", "g": "pending", "h": "pending"}
    goes_on = TaskFile(folder, index=2, states=states, ended_at_ms=None, samples=30, started_at_ms=now_ms - 30_000,
                       chunk_ended_at_ms=now_ms - 2_000).write()  # fmt: skip
    alert = "INSERT INTO alert SELECT task_id, device_id, 'thermal', 'warning', ?, ?, 90, 83, 'hot' FROM device"
    with closing(sqlite3.connect(goes_on)) as db, db:
        db.executemany(alert, [(START_MS, ended_at_ms) for ended_at_ms in (None, now_ms)])
    (folder / "run.toml").write_text(f'[run]\nsource = ["{manifest}"]\n[array]\nfirst = 0\nstep = 1\ncount = 3\n')
    return folder


@pytest.mark.parametrize("hours_later", [0, 1])
def test_what_both_tell_is_the_same_in_both(run: Path, hours_later: int) -> None:
    clock = HandClock(NOW.now_ms() + hours_later * 3_600_000)
    live, file = served(run, clock), reported(run, clock)
    elsewhere = OF_A_READING | {metric.name for metric in METRICS if metric.where == TEXTFILE}
    known = {name: value for name, value in file.items() if name.partition("{")[0] not in elsewhere}
    assert len(known) > 80 and {name: live.get(name) for name in known} == pytest.approx(known)


def test_rows_that_are_in_no_task_yet_are_of_the_source_and_no_chunks_in_both(run: Path) -> None:
    first = 'badcjobs_%s{run="july"}'
    of_source, pending = first % "source_rows", 'badcjobs_chunks{run="july",state="pending"}'
    with (run.parent / "manifest.csv").open("a") as manifest:
        manifest.writelines(f"rec,{name},{name}.wav,0,30000\n" for name in "ijkl")
    job = Submitted("4821", None, (0, 1, 2, 3))
    write_record(run, Record("slurm", job, (), chunks=12, submitted_at_ms=START_MS))
    for told in (served(run), reported(run)):
        assert (told[of_source], told[pending]) == (12, 3)
    assert served(run)[first % "audio_left_seconds"] == pytest.approx(reported(run)[first % "audio_left_seconds"])


def test_a_task_that_went_silent_has_no_end_no_open_alerts_and_no_readings(run: Path) -> None:
    later = HandClock(NOW.now_ms() + 600_000)
    told = 'badcjobs_tasks{run="july",verdict="%s"}'
    alerts = 'badcjobs_alerts_%s{run="july",kind="thermal",severity="warning"}'
    for tell in (served, reported):
        before, after = tell(run), tell(run, later)
        assert (before[told % "running"], before.get(told % "silent")) == (1, None)
        assert (after.get(told % "running"), after[told % "silent"]) == (None, 1)
        assert "badcjobs_predicted_end_timestamp_seconds" in names(before) - names(after)
        assert (before[alerts % "open"], after[alerts % "open"], after[alerts % "total"]) == (1, 0, 2)
    assert not names(served(run, later)) & {name for name in OF_A_READING if "host" in name}
    assert open_run_view(run, later).look().alerts == () != open_run_view(run, NOW).look().alerts


def test_every_metric_is_told_where_the_table_says(run: Path) -> None:
    live, file = names(served(run)), names(reported(run))
    # What these devices never said: no device of this run has a temperature, a clock, or was ever slowed down.
    silent = {m.name for m in METRICS} - live - file
    assert silent == {
        "badcjobs_gpu_busy_percent", "badcjobs_gpu_memory_utilization_percent", "badcjobs_gpu_memory_used_bytes",
        "badcjobs_gpu_temperature_celsius", "badcjobs_gpu_sm_clock_hertz", "badcjobs_gpu_memory_clock_hertz",
        "badcjobs_gpu_throttled_samples_total",
    }  # fmt: skip
    for metric in METRICS:
        if metric.name not in silent:
            assert (metric.name in live) == (metric.where != TEXTFILE), metric.name
            assert (metric.name in file) == (metric.where != SERVED), metric.name


def test_the_end_is_predicted_as_if_parts_that_no_task_has_listed_were_as_large_as_the_others(tmp_path: Path) -> None:
    def seconds_left(folder: Path, parts: int) -> float:
        now_ms = NOW.now_ms()
        states = {"a": "done", "b": "done", "c": "pending"}
        times = {"started_at_ms": now_ms - 30_000, "chunk_ended_at_ms": now_ms - 1000, "ended_at_ms": None}
        TaskFile(folder, states=states, shard=(0, parts), samples=30, **times).write()  # type: ignore[arg-type]
        (left,) = (value for name, value in served(folder).items() if name.startswith("badcjobs_left_gpu_seconds"))
        return left

    whole = seconds_left(tmp_path / "one", 1)
    assert seconds_left(tmp_path / "part", 4) == pytest.approx(10 * whole, rel=0.01)  # 10 of 12 chunks, not 1 of 3
