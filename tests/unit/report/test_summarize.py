"""What a job's facts amount to: percentiles, energy, the verdict, and None for what nobody knows."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.model import NameGaps, Reading
from rooms.report import (
    finish_job,
    job_samples,
    moment,
    page,
    prometheus_text,
    removal_text,
    running_s,
    summarize,
    summarize_database,
    summary_text,
)
from rooms.root import DatabaseProblem, SystemClock
from rooms.store import (
    Completeness,
    DeviceFacts,
    GapFacts,
    JobFacts,
    MergeOrder,
    TaskFacts,
    merge,
    percentile,
    read_job,
)
from support.damage import garbage_page, page_with
from support.hand_clock import HandClock
from support.powerless import powerless_folder
from support.task_files import START_MS, TaskFile

TASK = TaskFacts(
    "4821_0.r0.gpu1", "4821", 0, 0, "gpu1", 4, "done", 0, 1, 2, START_MS, START_MS + 3_600_000, 3, 0, 0, 900.0
)
DEVICE = DeviceFacts(
    task="4821_0.r0.gpu1", node="gpu1", index=0, uuid="GPU-0", token="0", name="Tesla V100", backend="nvml",
    memory_total_bytes=16 * 2**30, samples=4, memory_peak_bytes=2**30, temperature_max_c=60, power_mean_w=200.0,
    energy_counter_j=720_000.0, energy_counter_span_s=3590.0, span_s=3600.0, gap_s=0.0, energy_integrated_j=700_000.0,
    utilization_counts={50: 2, 90: 2},
)  # fmt: skip
UNKNOWN = replace(
    DEVICE, samples=0, memory_peak_bytes=None, temperature_max_c=None, power_mean_w=None, energy_counter_j=None,
    energy_counter_span_s=None, span_s=None, energy_integrated_j=None, utilization_counts={},
)  # fmt: skip
JOB = JobFacts(
    tasks=(TASK,), devices=(DEVICE,),
    chunks={"done": 3}, audio_done_s=7200.0, done_of_unknown_length=0, tries=3, failed=(),
    labels=(("LOUD", "Loud sound", 5), ("SOFT", None, 2)), gaps=(), file_remarks=(),
)  # fmt: skip


def device(**changes: object) -> DeviceFacts:
    [summary] = summarize(replace(JOB, devices=(replace(DEVICE, **changes),))).devices  # type: ignore[arg-type]
    return summary


# --- percentiles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "p50", "p95"),
    [
        ({0: 1}, 0, 0),
        ({70: 1}, 70, 70),
        ({0: 1, 100: 1}, 0, 100),
        ({10: 1, 20: 1, 30: 1}, 20, 30),
        ({10: 1, 20: 1, 30: 1, 40: 1}, 20, 40),
        ({0: 95, 100: 5}, 0, 0),
        ({0: 94, 100: 6}, 0, 100),
        (dict.fromkeys(range(1, 101), 1), 50, 95),
        ({80: 0, 90: 1}, 90, 90),
    ],
)
def test_percentiles_are_values_that_were_measured_by_nearest_rank(counts: dict[int, int], p50: int, p95: int) -> None:
    assert (percentile(counts, 50), percentile(counts, 95)) == (p50, p95)


@settings(deadline=None)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=200), st.integers(1, 100))
def test_a_percentile_is_the_sample_at_its_rank(values: list[int], share: int) -> None:
    expected = sorted(values)[math.ceil(len(values) * share / 100) - 1]
    assert percentile(Counter(values), share) == expected


def test_utilization_is_weighted_by_how_often_it_was_measured() -> None:
    [summary] = summarize(replace(JOB, devices=(device(utilization_counts={0: 1, 100: 3}),))).to_dict()["devices"]
    assert (summary["utilization_mean_percent"], summary["utilization_max_percent"]) == (75.0, 100)
    assert (summary["utilization_p50_percent"], summary["utilization_p95_percent"]) == (100, 100)


# --- energy -----------------------------------------------------------------------------------------------------------


def test_the_counter_is_taken_where_it_saw_nearly_the_whole_time() -> None:
    summary = device()
    assert (summary.energy_j, summary.energy_source) == (720_000.0, "counter")
    assert device(energy_counter_span_s=0.9 * 3600).energy_source == "counter"


@pytest.mark.parametrize("span_s", [0.0, None, 1.0, 0.89 * 3600])
def test_power_is_integrated_where_the_counter_saw_too_little(span_s: float | None) -> None:
    summary = device(energy_counter_span_s=span_s)
    assert (summary.energy_j, summary.energy_source) == (700_000.0, "integrated power")


def test_a_device_without_counter_and_power_has_no_energy() -> None:
    summary = device(energy_counter_j=None, energy_integrated_j=None)
    assert (summary.energy_j, summary.energy_source) == (None, None)


def test_the_jobs_energy_is_that_of_the_devices_that_said_and_counts_them() -> None:
    summary = summarize(replace(JOB, devices=(DEVICE, UNKNOWN, DEVICE)))
    assert summary.energy_wh == pytest.approx(400.0)
    assert summary.energy_devices == 2
    assert "known for 2 of 3 devices" in summary_text(summary, "july")


# --- the verdict ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "missing", "verdict"),
    [
        ({"done": 3}, [], "done"),
        ({"done": 3, "skipped": 2}, [], "stopped"),  # their results are in a file that was not given
        ({}, [], "done"),
        ({"done": 3, "failed": 1}, [], "failed"),
        ({"done": 3, "poison": 1}, [], "failed"),
        ({"done": 3, "pending": 1}, [], "stopped"),
        ({"done": 3, "pending": 1, "failed": 1}, [], "stopped"),
        ({"done": 3}, [2], "stopped"),
        ({"done": 3, "failed": 1}, [2], "stopped"),
    ],
)
def test_work_left_comes_before_failures_and_both_before_done(
    chunks: dict[str, int], missing: list[int], verdict: str
) -> None:
    summary = summarize(replace(JOB, chunks=chunks), missing)
    assert summary.verdict == verdict
    assert summary.tasks_missing == tuple(missing)
    assert summary.chunks == sum(chunks.values())


PROOF = Completeness(3, None, 3, 3, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("chunks", "proof", "verdict"),
    [
        ({"done": 3}, PROOF, "done"),
        ({"done": 3}, replace(PROOF, strangers=1), "done"),
        ({"done": 3}, replace(PROOF, expected=None, why_unknown="gone", not_listed=None, strangers=None), "done"),
        ({"done": 3}, replace(PROOF, expected=4, not_listed=1), "stopped"),
        ({"done": 2, "failed": 1}, replace(PROOF, done=2, failed=1), "failed"),
        ({"done": 2, "failed": 1}, replace(PROOF, expected=4, done=2, failed=1, not_listed=1), "stopped"),
        ({"done": 2, "pending": 1}, replace(PROOF, expected=None, done=2, pending=1), "stopped"),
    ],
)
def test_rows_of_the_source_that_no_task_has_are_work_left(
    chunks: dict[str, int], proof: Completeness, verdict: str
) -> None:
    summary = summarize(replace(JOB, chunks=chunks), proof.missing_indices, proof)
    assert (summary.verdict, summary.completeness) == (verdict, proof)


def test_a_headline_that_is_too_long_goes_on_in_the_next_line() -> None:
    proof = Completeness(
        1_000_000, None, 880_000, 720_000, 3_000, 2_000, 115_000, 40_000, 120_000, 0, missing_indices=(3, 7, 8, 9)
    )
    text = summary_text(summarize(JOB, proof.missing_indices, proof), "july")
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "120,000 rows of array index 3,7-9 not started" in " ".join(text.split())


def test_recordings_whose_paths_tell_less_than_those_of_others_are_counted() -> None:
    some = NameGaps(120, 3, "a/x.wav", 1, "y.wav", 120, "a/x.wav", 2, "a/z_20230501.wav")
    text = " ".join(summary_text(summarize(replace(JOB, recording_names=some)), "july").split())
    assert (
        "recordings 3 of 120 have no date in the name (e.g. a/x.wav); 2 of 120 have a date but no time in the"
        " name (e.g. a/z_20230501.wav); 1 of 120 has no study area in the path (e.g. y.wav) speed" in text
    )
    for gaps in (None, NameGaps(9, 9, "a", 9, "a", 9, "a"), NameGaps(9, 0, None, 0, None, 9, "a", 9, "a")):
        summary = summarize(replace(JOB, recording_names=gaps))
        assert "recordings" not in summary_text(summary, "july")
        assert summary.to_dict()["recording_names"] == (None if gaps is None else asdict(gaps))


def test_the_remark_on_a_file_is_whole_however_long_its_path_is() -> None:
    near, far = "tasks/4821_0.r0.gpu1.sqlite", f"/scratch/{'a-rather-long-folder-name/' * 5}tasks/x.sqlite"
    why = "salvaged: truncated: 3 of 1,403 rows (sample 2, attempt 1) were on pages that are not there any more"
    summary = summarize(replace(JOB, file_remarks=((near, why), (far, why))))
    lines = summary_text(summary, "july").splitlines()
    assert " ".join(" ".join(lines).split()).endswith(f"file {near}: {why} file {far}: {why}")
    assert [line for line in lines if len(line) > 100] == [f"    {far}:"], "a path is not cut"


def test_the_reason_why_a_file_was_not_removed_is_whole() -> None:
    path = "/scratch/st-somebody-1/a-folder/of-some-length/tasks/4821_0.r0.gpu1.sqlite"
    text = removal_text(["a"], [(path, "its task had not ended when it was merged")])
    assert f"not removed {path}: its task had not ended when it was merged" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100


def test_commands_wait_for_tasks_that_are_still_running() -> None:
    proof = replace(PROOF, done=2, pending=1, finish=("sbatch --array=1 …", "badcjobs run m.csv --out=july"))
    running = summary_text(summarize(replace(JOB, tasks=(replace(TASK, verdict=None),)), (), proof), "july")
    assert "to finish it, once no task of it is running, submit the same script again" in running
    ended = summary_text(summarize(JOB, (), proof), "july")
    assert ended.endswith(
        "    sbatch --array=1 …\n\n  or do all that is left in one run:\n    badcjobs run m.csv --out=july"
    )


HEARD = replace(TASK, verdict=None, heard_at_ms=START_MS + 3_600_000, silent_after_s=120.0)


def test_a_task_that_should_have_been_heard_of_is_silent_and_no_longer_running() -> None:
    proof = replace(PROOF, done=2, pending=1, finish=("badcjobs run m.csv --out=july",))
    facts = replace(JOB, tasks=(TASK, replace(HEARD, name="4821_1.r0.gpu2")))
    for late_ms, state in ((0, "running"), (120_000, "running"), (120_001, "silent")):
        summary = summarize(facts, (), proof, now_ms=START_MS + 3_600_000 + late_ms)
        assert summary.tasks_by_verdict == {"done": 1, state: 1}
    assert summary.tasks_silent == ("4821_1.r0.gpu2",)
    text = " ".join(summary_text(summary, "july").split())
    assert "2 (1 done, 1 silent); last update from a silent task: 2027-01-15 09:00 UTC" in text
    assert "task 4821_1.r0.gpu2: silent, last update 2027-01-15 09:00 UTC; " in text
    assert "to finish it, unless its silent tasks are still running: badcjobs run m.csv --out=july" in text
    assert "silent, last update 2027-01-15 09:00 UTC" in page(summary, "july")
    assert summarize(facts, (), proof).tasks_silent == (), "nobody has said what time it is"


def test_slurms_word_that_a_task_was_killed_counts_before_its_silence() -> None:
    facts = replace(JOB, tasks=(replace(HEARD, slurm_state="NODE_FAIL"),))
    for now_ms in (None, START_MS, START_MS + 10**10):
        assert summarize(facts, now_ms=now_ms).tasks_by_verdict == {"killed": 1}


def test_array_tasks_that_may_still_wait_are_not_begun_while_others_run() -> None:
    proof = replace(PROOF, done=2, pending=1, missing_indices=(3,), finish=("sbatch --array=3 …", "badcjobs run m.csv"))
    running = summary_text(summarize(replace(JOB, tasks=(HEARD,)), (3,), proof, now_ms=START_MS), "july")
    assert "array index 3 not started, perhaps still in the queue" in " ".join(running.split())
    assert "to finish it, once no task of it is running or queued, submit" in running
    assert "no database from array index 3" in summary_text(summarize(JOB, (3,), proof), "july")


def test_a_task_whose_file_has_changed_since_the_merge_is_neither_silent_nor_running_for_ever(tmp_path: Path) -> None:
    files = [TaskFile(tmp_path, index=n, states={f"{n}": "pending"}, ended_at_ms=None).write() for n in (0, 1, 2)]
    late_ms = START_MS + 10**10
    merge(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock())
    assert len(summarize_database(tmp_path / "job.sqlite", now_ms=late_ms).tasks_silent) == 3
    os.utime(files[0])  # published again: what it says now, a merge would know
    assert summarize_database(tmp_path / "job.sqlite", now_ms=START_MS).tasks_by_verdict == {"running": 3}
    told = summarize_database(tmp_path / "job.sqlite", now_ms=late_ms)
    assert told.tasks_silent == ("4821_1.r0.gpu1", "4821_2.r0.gpu1")
    assert told.tasks_by_verdict == {"outdated": 1, "silent": 2}
    as_of = moment(told.merged.as_of_ms or 0)
    text = summary_text(told, "july")
    assert f"  merged      as of {as_of}; 1 task database has changed since\n" in text
    assert f"  to include what is new since the merge:\n    badcjobs merge {tmp_path}" in text
    assert told.to_dict()["merged"]["changed"] == 1
    again = finish_job(MergeOrder([tmp_path], tmp_path / "job.sqlite"), HandClock(late_ms)).summary
    assert (again.merged.changed, again.merged.command) == (0, None)
    assert "  merged  " not in summary_text(again, "july")


def test_a_silent_task_that_its_successor_has_published_does_not_run_again(tmp_path: Path) -> None:
    file, job = TaskFile(tmp_path, states={"a": "pending"}, ended_at_ms=None).write(), tmp_path / "job.sqlite"
    soon_ms = START_MS + 60_000
    merge(MergeOrder([tmp_path], job), SystemClock())
    os.utime(job, (START_MS // 1000 + 9000,) * 2)  # merged when it had been silent for long
    assert TaskFile(tmp_path, states={"a": "failed"}, ended_at_ms=None).write() == file  # again, for it or by it
    os.utime(file, (soon_ms // 1000,) * 2)
    told = summarize_database(job, now_ms=START_MS + 9_060_000)
    assert (told.tasks_by_verdict, told.merged.changed) == ({"outdated": 1}, 1)
    os.utime(job, (START_MS // 1000,) * 2)
    assert summarize_database(job, now_ms=soon_ms).tasks_by_verdict == {"running": 1}
    TaskFile(tmp_path, restart=1, states={"a": "done"}).write()  # the successor itself, not merged
    assert summarize_database(job, now_ms=START_MS + 9_060_000).tasks_by_verdict == {"outdated": 1}


def test_in_a_copy_of_a_run_with_new_times_a_silent_task_has_no_news(tmp_path: Path) -> None:
    late_s = START_MS // 1000 + 9000
    file = TaskFile(tmp_path / "run", states={"a": "pending"}, ended_at_ms=None).write()
    os.utime(file, (START_MS // 1000,) * 2)
    merge(MergeOrder([tmp_path / "run"], tmp_path / "run" / "job.sqlite"), SystemClock())
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=shutil.copyfile)
    job, its_file = tmp_path / "copy" / "job.sqlite", tmp_path / "copy" / "tasks" / file.name
    os.utime(job, (late_s, late_s))
    os.utime(its_file, (late_s, late_s))
    told = summarize_database(job, now_ms=1000 * late_s)
    assert (told.tasks_by_verdict, told.merged.changed, told.merged.command) == ({"silent": 1}, 0, None)
    assert f"silent, last update {moment(START_MS)}" in page(told, "copy"), "not when it was copied"
    its_file.write_bytes(bytes(file.stat().st_size))
    os.utime(its_file, (late_s, late_s))
    assert summarize_database(job, now_ms=1000 * late_s).merged.changed == 1


def freeze_array(run: Path, count: int) -> None:
    (run / "m.csv").write_text("recording_id,chunk_id,source_path,start_ms,end_ms\n")
    array = f"[array]\nfirst = 0\nstep = 1\ncount = {count}\n"
    (run / "run.toml").write_text(f'[run]\nsource = ["{run}/m.csv"]\n\n{array}')


def test_task_databases_that_are_new_since_the_merge_are_told_and_not_submitted_again(tmp_path: Path) -> None:
    TaskFile(tmp_path, index=0, states={"0": "done"}).write()
    freeze_array(tmp_path, 3)
    job = tmp_path / "job.sqlite"
    merge(MergeOrder([tmp_path], job), SystemClock())
    assert (before := summarize_database(job)).tasks_missing == (1, 2)
    assert [finding.kind for finding in before.findings] == ["tasks_missing"]
    for index in (1, 2):
        TaskFile(tmp_path, index=index, states={f"{index}": "done"}).write()
    (tmp_path / "tasks" / "notes.sqlite").touch()
    told = summarize_database(job)
    assert (told.merged.new, told.merged.new_indices, told.merged.changed) == (2, (1, 2), 0)
    assert (told.tasks_missing, told.findings) == ((), ())
    assert told.completeness is not None and told.completeness.unmerged_indices == (1, 2)
    assert told.completeness.finish == ()
    text = summary_text(told, "july")
    assert "2 task databases are not merged yet" in text and f"    badcjobs merge {tmp_path}" in text
    assert "july: not finished when it was merged" in text and "no database" not in text and "submit" not in text
    assert "2 task databases are not merged yet" in page(told, "july")
    assert 'badcjobs_tasks_outdated{run="july"} 2' in prometheus_text(job_samples(told, "july"))
    after = finish_job(MergeOrder([tmp_path], job), SystemClock()).summary
    assert (after.merged.new, after.merged.command, after.tasks_missing) == (0, None, ())


def test_where_the_folder_is_closed_to_us_nobody_says_that_all_is_up_to_date_or_missing() -> None:
    with powerless_folder() as folder:
        freeze_array(folder, 2)
        file, job = TaskFile(folder, index=0, states={"a": "done"}).write(), folder / "job.sqlite"
        merge(MergeOrder([folder], job), SystemClock())
        before = summarize_database(job)
        file.parent.chmod(0)
        told = summarize_database(job)
        file.parent.chmod(0o700)
    assert before.merged.closed is None and [finding.kind for finding in before.findings] == ["tasks_missing"]
    assert told.merged.closed == f"{file.parent} cannot be read: Permission denied"
    said = f"; whether anything is new since then is not known: {told.merged.closed}"
    assert said in " ".join(summary_text(told, "july").split())
    assert "badcjobs_tasks_outdated{" not in prometheus_text(job_samples(told, "july"))
    assert told.findings == ()


def test_an_ended_task_whose_file_has_changed_since_the_merge_is_news(tmp_path: Path) -> None:
    file, job = TaskFile(tmp_path, states={"a": "failed"}).write(), tmp_path / "job.sqlite"
    merge(MergeOrder([tmp_path], job), SystemClock())
    assert summarize_database(job).merged.changed == 0
    os.utime(file, (START_MS // 1000,) * 2)
    assert summarize_database(job).merged.changed == 0, "its time is that of a copy"
    with file.open("ab") as grown:
        grown.write(bytes(4096))
    assert summarize_database(job).merged.changed == 1


def test_a_job_database_that_was_copied_alone_tells_tasks_as_of_the_merge(tmp_path: Path) -> None:
    files = [TaskFile(tmp_path, index=n, states={f"{n}": "pending"}, ended_at_ms=None).write() for n in (0, 1)]
    for file, after_s in zip(files, (60, 9000), strict=True):  # one was silent already when the other was heard of
        os.utime(file, (START_MS // 1000 + after_s,) * 2)
    merge(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock())
    (tmp_path / "laptop").mkdir()
    alone = shutil.copy(tmp_path / "job.sqlite", tmp_path / "laptop" / "job.sqlite")
    told = summarize_database(alone, now_ms=START_MS + 10**10)
    assert told.tasks_silent == ("4821_0.r0.gpu1",)
    assert (told.merged.changed, told.merged.gone, told.merged.command) == (0, 1, None)
    text = " ".join(summary_text(told, "laptop").split())
    assert "; the state of 1 task that ran then is not known: its database is not here" in text


def test_the_report_of_a_job_that_has_ended_is_the_same_at_any_time(tmp_path: Path) -> None:
    TaskFile(tmp_path, states={"a": "done", "b": "pending"}, verdict="stopped").write()
    soon = finish_job(MergeOrder([tmp_path], tmp_path / "job.sqlite"), HandClock(START_MS)).summary
    assert soon == summarize_database(tmp_path / "job.sqlite", now_ms=START_MS + 10**12)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_rates_are_audio_over_wall_time_and_over_gpu_time() -> None:
    later = replace(TASK, started_at_ms=START_MS + 1_800_000, last_sign_ms=START_MS + 5_400_000, devices=1)
    summary = summarize(replace(JOB, tasks=(TASK, later)))
    assert summary.wall_s == 5400.0
    assert summary.gpu_hours == 3.0
    assert summary.audio_hours == 2.0
    assert summary.audio_hours_per_gpu_hour == pytest.approx(2 / 3)
    assert summary.times_real_time == pytest.approx(7200 / 5400)


def test_the_days_between_two_submissions_are_no_running_time() -> None:
    a_week_ms = 7 * 86_400_000
    again = replace(TASK, started_at_ms=START_MS + a_week_ms, last_sign_ms=START_MS + a_week_ms + 600_000)
    assert summarize(replace(JOB, tasks=(again, TASK))).wall_s == 3600 + 600


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=6))
def test_running_time_counts_every_second_in_which_a_task_ran_once(spans: list[tuple[int, int]]) -> None:
    tasks = [
        replace(TASK, started_at_ms=START_MS + 1000 * start, last_sign_ms=START_MS + 1000 * (start + length))
        for start, length in spans
    ]
    assert running_s(tasks) == len({second for start, length in spans for second in range(start, start + length)})


def test_chunks_of_unknown_length_are_told() -> None:
    summary = summarize(replace(JOB, done_of_unknown_length=2))
    assert summary.facts.done_of_unknown_length == 2
    assert "2 more chunks of unknown length" in summary_text(summary, "july")


def test_tasks_are_counted_by_verdict_and_an_open_one_is_running() -> None:
    tasks = (TASK, replace(TASK, verdict="killed", telemetry=0), replace(TASK, verdict=None))
    summary = summarize(replace(JOB, tasks=tasks))
    assert summary.tasks_by_verdict == {"done": 1, "killed": 1, "running": 1}
    assert (summary.tasks, summary.tasks_without_telemetry) == (3, 1)
    assert "off in 1 task" in summary_text(summary, "july")


def test_poison_counts_as_failed_and_detections_are_summed() -> None:
    summary = summarize(replace(JOB, chunks={"done": 1, "failed": 2, "poison": 3, "pending": 4, "skipped": 5}))
    assert (summary.done, summary.failed, summary.left, summary.skipped, summary.chunks) == (1, 5, 4, 5, 15)
    assert summary.detections == 7


def test_what_nobody_measured_is_none_and_never_zero() -> None:
    [silent] = summarize(replace(JOB, devices=(UNKNOWN,))).to_dict()["devices"]
    keys = ("utilization_mean_percent", "utilization_p50_percent", "utilization_p95_percent", "utilization_max_percent")
    more = ("memory_peak_bytes", "temperature_max_c", "power_mean_w", "energy_j")
    assert [silent[key] for key in (*keys, *more)] == [None] * 8


def test_a_job_without_devices_or_time_has_no_rates() -> None:
    idle = summarize(replace(JOB, tasks=(replace(TASK, devices=0, last_sign_ms=START_MS),), devices=()))
    assert (idle.audio_hours_per_gpu_hour, idle.times_real_time, idle.energy_wh) == (None, None, None)
    assert idle.gpu_hours == 0
    nothing = summarize(replace(JOB, tasks=(), devices=(), chunks={}, audio_done_s=0.0, labels=()))
    assert (nothing.wall_s, nothing.times_real_time, nothing.verdict) == (0.0, None, "done")
    summary_text(nothing, "nothing")


def test_the_summary_is_json_with_null_for_the_unknown() -> None:
    gaps = (GapFacts("GPU is lost", None, 2, 9.5, 1),)
    document = json.loads(json.dumps(summarize(replace(JOB, devices=(UNKNOWN,), gaps=gaps)).to_dict()))
    assert document["devices"][0]["utilization_mean_percent"] is None
    assert document["energy_wh"] is None
    assert document["gaps"] == [{"reason": "GPU is lost", "metric": None, "gaps": 2, "seconds": 9.5, "tasks": 1}]


# --- from real files --------------------------------------------------------------------------------------------------


def test_a_merged_job_says_what_its_samples_say(tmp_path: Path) -> None:
    chance = random.Random(3)
    for index in range(2):
        TaskFile(
            tmp_path, index=index, states={f"c{index}": "done", f"d{index}": "failed"}, devices=2, samples=11,
            reading=Reading(utilization_percent=chance.randint(0, 100), power_w=100.0),
            gaps=[(2000, 5000, "the recorder was late")],
        ).write()  # fmt: skip
    summary = finish_job(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock()).summary
    assert (summary.verdict, summary.tasks, summary.done, summary.failed) == ("failed", 2, 2, 2)
    assert len(summary.devices) == 4
    for found in summary.devices:
        assert (found.samples, found.gap_s, found.energy_source) == (11, 3.0, "integrated power")
        assert found.energy_j == pytest.approx(1000.0)  # 100 W for the 10 s from the first sample to the last
        assert percentile(found.utilization_counts, 50) == found.utilization_mean_percent
        assert found.memory_peak_bytes is None
    assert [(gap.reason, gap.gaps, gap.seconds, gap.tasks) for gap in summary.facts.gaps] == [
        ("the recorder was late", 2, 6.0, 2)
    ]
    assert [chunk.chunk_id for chunk in summary.facts.failed] == ["d0", "d1"]


def test_power_is_never_integrated_across_a_hole(tmp_path: Path) -> None:
    task = TaskFile(tmp_path, samples=3, reading=Reading(power_w=100.0))
    path = task.write()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE sample SET at_ms = at_ms + 3600000 WHERE at_ms = (SELECT max(at_ms) FROM sample)")
    [found] = finish_job(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock()).summary.devices
    assert found.energy_j == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("name", "merge"),
    [
        ("run/job.sqlite", "badcjobs merge {folder}/run"),
        ("run/july.db", "badcjobs merge {folder}/run -o {job}"),
        ("job.sqlite", "badcjobs merge RUN_FOLDER -o {job}"),
    ],
)
def test_a_damaged_job_database_is_put_aside_before_it_is_made_anew(tmp_path: Path, name: str, merge: str) -> None:
    TaskFile(tmp_path / "run", states={"a-chunk-that-failed": "failed"}).write()
    job = tmp_path / name
    finish_job(MergeOrder([tmp_path / "run"], job), SystemClock())
    garbage_page(job, page_with(job, b"a-chunk-that-failed: no luck"), seed=3)
    with pytest.raises(DatabaseProblem, match="cannot be read") as refused:
        read_job(job)
    assert refused.value.fix == f"mv {job} {job}.damaged && " + merge.format(folder=tmp_path, job=job)
