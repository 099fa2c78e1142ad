"""``badcjobs merge`` and ``badcjobs report``: the numbers are right, whatever the order and whatever lies around."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from support.badcjobs_program import ON_CPU, Outcome, Site, array_task, assert_refused, rows
from support.damage import garbage_page, page_with
from support.task_files import TaskFile
from support.waiting import wait_for

NASTY = "<script>alert(1)</script>"
CHUNKS = 10
NAMES = ("4821_0.r0.gpu-01", "4821_1.r0.gpu-01")


@pytest.fixture(scope="module")
def finished(shared_site: Site) -> Site:
    """An array of two tasks with two devices each; one device has no energy counter, one chunk always fails."""
    manifest = shared_site.manifest(CHUNKS)
    manifest.write_text(manifest.read_text().replace("rec2,c006", f"{NASTY},c006"))
    (shared_site.folder / "audio" / "c006.wav").write_bytes(b"not audio")
    script = shared_site.folder / "devices.toml"
    script.write_text('[[device]]\nindex = 1\nunsupported = ["energy_j"]\nload = [[0, 20], [0.7, 90]]\n')
    programs = [
        shared_site.start_run(
            manifest, "--engine", "demo", "--engine-arg=--burn-s=0.25", "--simulate",  script,
            env={"CUDA_VISIBLE_DEVICES": "0,1", **array_task(index, (0, 1))},
        )
        for index in (0, 1)
    ]  # fmt: skip
    assert [program.wait().exit_code for program in programs] == [1, 0]
    return shared_site


@pytest.fixture
def copied(finished: Site, site: Site) -> Site:
    """The same run, to play with."""
    shutil.copytree(finished.out, site.out)
    for made in ("job.sqlite", "report.html"):
        (site.out / made).unlink(missing_ok=True)
    return site


@pytest.fixture(scope="module")
def merged(finished: Site) -> Outcome:
    done = finished.badcjobs("merge", finished.out)
    assert done.exit_code == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def summary(finished: Site) -> dict[str, Any]:
    done = finished.badcjobs("merge", finished.out, "--json")
    assert done.exit_code == 0, done.stderr
    return dict(done.json)


def dump(database: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return the whole content of a database, in an order that does not depend on how it was written."""
    names = [name for (name,) in rows(database, "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
    return {name: sorted(rows(database, f"SELECT * FROM {name}"), key=repr) for name in sorted(names)}


# --- what a merge makes --------------------------------------------------------------------------------------------


def test_every_chunk_is_in_the_job_database_once_with_its_final_state(merged: Outcome, finished: Site) -> None:
    found = rows(finished.out / "job.sqlite", "SELECT chunk_id, status FROM chunk ORDER BY chunk_id")
    assert found == [(f"c{i:03d}", "failed" if i == 6 else "done") for i in range(CHUNKS)]


def test_every_row_of_the_task_databases_is_kept(merged: Outcome, finished: Site) -> None:
    job = finished.out / "job.sqlite"
    for table in ("task", "device", "sample", "host_sample", "gap", "worker", "chunk", "attempt", "detection"):
        apart = sorted(finished.rows(f"SELECT * FROM {table}"), key=repr)
        assert sorted(rows(job, f"SELECT * FROM {table}"), key=repr) == apart, table
        assert apart, f"nothing to compare in {table}"


def test_the_job_database_says_which_files_it_was_made_of(merged: Outcome, finished: Site) -> None:
    files = rows(finished.out / "job.sqlite", "SELECT path, status, reason FROM source_file ORDER BY path")
    assert files == [(f"tasks/{name}.sqlite", "merged", None) for name in NAMES]


def test_the_views_answer_the_common_questions(merged: Outcome, finished: Site) -> None:
    job = finished.out / "job.sqlite"
    assert rows(job, "SELECT tasks, chunks, done, failed, pending FROM job_summary") == [(2, CHUNKS, 9, 1, 0)]
    assert rows(job, "SELECT name, done, failed FROM task_summary ORDER BY 1") == [(NAMES[0], 4, 1), (NAMES[1], 5, 0)]
    assert rows(job, "SELECT count(*), min(samples) > 0 FROM device_summary") == [(4, 1)]
    assert rows(job, "SELECT status, chunks FROM chunk_summary ORDER BY 1") == [("done", 9), ("failed", 1)]


# --- the numbers ---------------------------------------------------------------------------------------------------


def test_tasks_chunks_and_tries_are_counted_right(summary: dict[str, Any], finished: Site) -> None:
    assert (summary["tasks"], summary["tasks_by_verdict"]) == (2, {"failed": 1, "done": 1})
    assert [summary[key] for key in ("chunks", "done", "failed", "left")] == [CHUNKS, 9, 1, 0]
    assert summary["tries"] == finished.count("attempt") == CHUNKS + 2
    assert summary["detections"] == finished.count("detection") == sum(i % 3 for i in range(CHUNKS) if i != 6)
    assert summary["verdict"] == "failed"


def test_speed_is_audio_over_time_and_over_device_time(summary: dict[str, Any], finished: Site) -> None:
    audio_s = 9 * 0.6
    tasks = finished.rows("SELECT started_at_ms, ended_at_ms, devices FROM task")
    assert max(start for start, _, _ in tasks) < min(end for _, end, _ in tasks), "they ran side by side"
    wall_s = (max(end for _, end, _ in tasks) - min(start for start, _, _ in tasks)) / 1000
    gpu_s = sum((end - start) / 1000 * devices for start, end, devices in tasks)
    assert summary["audio_hours"] == pytest.approx(audio_s / 3600)
    assert summary["wall_s"] == pytest.approx(wall_s)
    assert summary["times_real_time"] == pytest.approx(audio_s / wall_s)
    assert summary["gpu_hours"] == pytest.approx(gpu_s / 3600)
    assert summary["audio_hours_per_gpu_hour"] == pytest.approx(audio_s / gpu_s)


def samples_of_devices(site: Site) -> Iterator[tuple[tuple[str, int], list[tuple[Any, ...]]]]:
    """Yield (task, index) and (at_ms, utilization, memory, power, energy) of every device."""
    for database in site.task_databases():
        for device_id, index in rows(database, "SELECT device_id, device_index FROM device"):
            columns = "at_ms, utilization_percent, memory_used_bytes, power_w, energy_j"
            found = rows(database, f"SELECT {columns} FROM sample WHERE device_id = ? ORDER BY at_ms", device_id)
            yield (database.stem, index), found


def test_utilization_of_every_device_is_summarised_right(summary: dict[str, Any], finished: Site) -> None:
    told = {(d["task"], d["index"]): d for d in summary["devices"]}
    assert len(told) == 4
    for device, samples in samples_of_devices(finished):
        busy = sorted(sample[1] for sample in samples)
        assert told[device]["samples"] == len(samples) > 3
        assert told[device]["utilization_mean_percent"] == pytest.approx(sum(busy) / len(busy))
        assert told[device]["utilization_p50_percent"] == busy[ceil(0.50 * len(busy)) - 1]
        assert told[device]["utilization_p95_percent"] == busy[ceil(0.95 * len(busy)) - 1]
        assert told[device]["utilization_max_percent"] == busy[-1]
        assert told[device]["memory_peak_bytes"] == max(sample[2] for sample in samples)


def test_energy_is_the_counters_difference_or_power_over_time(summary: dict[str, Any], finished: Site) -> None:
    told = {(d["task"], d["index"]): (d["energy_j"], d["energy_source"]) for d in summary["devices"]}
    expected = {}
    for device, samples in samples_of_devices(finished):
        if device[1] == 0:
            expected[device] = samples[-1][4] - samples[0][4], "counter"
        else:
            joules = sum((a[3] + b[3]) / 2 * (b[0] - a[0]) / 1000 for a, b in pairwise(samples))
            expected[device] = joules, "integrated power"
    for device, (joules, source) in expected.items():
        assert told[device] == (pytest.approx(joules), source)
    total_wh = sum(joules for joules, _ in expected.values()) / 3600
    assert summary["energy_wh"] == pytest.approx(total_wh)


def test_the_failed_chunk_is_named_with_its_reason(summary: dict[str, Any], merged: Outcome) -> None:
    (failed,) = summary["failed_chunks"]
    assert (failed["recording_id"], failed["chunk_id"], failed["error_class"]) == (NASTY, "c006", "bad_audio")
    assert f"failed: {NASTY} c006 (bad_audio)" in merged.stdout


def test_a_metric_that_was_not_given_is_told_apart_from_gaps(summary: dict[str, Any], merged: Outcome) -> None:
    told = [(gap["metric"], gap["reason"]) for gap in summary["gaps"]]
    late = [reason for metric, reason in told if metric is None]  # on a machine too busy for ten readings a second
    assert all(reason.startswith("the recorder was late") for reason in late)
    assert [gap for gap in told if gap[0] is not None] == [("energy_j", "Not Supported (simulated)")]
    assert late or "no gaps" in merged.stdout
    assert "energy_j: Not Supported (simulated)" in merged.stdout


def test_the_summary_has_a_line_for_every_promise_and_fits_a_log(merged: Outcome) -> None:
    for word in ("tasks", "chunks", "audio", "× real time", "audio-hours per GPU-hour", "energy", "detections", "p95"):
        assert word in merged.stdout
    whole = ("  database", "  report", "    badcjobs ")  # paths, and commands to paste: never folded
    short = [line for line in merged.stdout.splitlines() if not line.startswith(whole)]
    assert max(len(line) for line in short) <= 100
    table = [line for line in short if "Simulated GPU" in line]
    assert len(table) == 8, "two tables of four devices"
    assert not any(line.endswith("…") for line in table), "a number was cut off"


# --- repeatable, in any order --------------------------------------------------------------------------------------


def test_the_order_of_the_files_does_not_matter(copied: Site) -> None:
    a, b = copied.task_databases()
    inputs = {"ab": (a, b), "ba": (b, a), "folder": (copied.out,)}
    commands = [("merge", *files, "-o", copied.out / f"{name}.db") for name, files in inputs.items()]
    assert [done.exit_code for done in copied.badcjobs_each(commands)] == [0, 0, 0]
    assert dump(copied.out / "ab.db") == dump(copied.out / "ba.db") == dump(copied.out / "folder.db")


def test_merging_again_gives_the_same_content_however_the_folder_was_given(copied: Site) -> None:
    absolute = dump(copied.merged())
    assert copied.badcjobs("merge", os.path.relpath(copied.out, copied.folder)).exit_code == 0
    assert dump(copied.out / "job.sqlite") == absolute


def test_a_task_that_comes_later_is_added(copied: Site) -> None:
    late = copied.out / "tasks" / f"{NAMES[1]}.sqlite"
    late.rename(copied.folder / "late")
    early = copied.badcjobs("merge", copied.out)
    assert early.exit_code == 0
    assert "run: not finished" in early.stdout
    assert "no database from array index 1" in early.stdout
    (copied.folder / "late").rename(late)
    whole = copied.badcjobs("merge", copied.out, "--json").json
    assert (whole["tasks"], whole["chunks"], whole["tasks_missing"], whole["verdict"]) == (2, CHUNKS, [], "failed")


def test_a_copy_of_a_task_database_counts_once_and_is_no_fault(copied: Site, summary: dict[str, Any]) -> None:
    shutil.copy(copied.task_databases()[0], copied.out / "tasks" / "a copy.sqlite")
    after = copied.badcjobs("merge", copied.out, "--json")
    assert after.exit_code == 0

    def told(document: dict[str, Any]) -> dict[str, Any]:
        proof = {**document["completeness"], "finish": []}  # the run folder is in the command
        return {**document, "completeness": proof, "file_remarks": [], "files": {}}

    assert told(after.json) == told(summary)
    assert after.json["files"] == {"read_now": 3, "by_status": {"copy": 1, "merged": 2}}


def test_a_run_that_is_still_at_it_can_be_merged(site: Site) -> None:
    program = site.start_run(site.manifest(6), "--engine", "demo", "--engine-arg=--burn-s=30", "--simulate", 1)
    try:
        wait_for(site.task_databases, "the first publication")
        told = site.badcjobs("merge", site.out, "--json")
    finally:
        program.kill()
    assert told.exit_code == 0, told.stderr
    assert (told.json["tasks_by_verdict"], told.json["left"], told.json["verdict"]) == ({"running": 1}, 6, "stopped")


def test_a_chunk_has_one_final_state_and_one_set_of_detections_however_often_it_was_listed(site: Site) -> None:
    manifest = site.manifest(6)
    for again in ([], ["--no-resume"], []):  # done, done a second time, found done
        assert site.run(manifest, *ON_CPU, *again).exit_code == 0
    assert site.count("detection") == 12
    job = site.merged()
    assert rows(job, "SELECT status, count(*) FROM chunk GROUP BY 1") == [("done", 6)]
    assert rows(job, "SELECT count(*) FROM detection") == [(6,)]
    assert rows(job, "SELECT count(*) FROM attempt") == [(12,)], "history is kept"
    for path in (site.out / "tasks").iterdir():
        path.unlink()
    left = site.run(manifest, *ON_CPU, "--json").json["chunks"]
    assert left == {"skipped": 6}, "the job database alone tells what is done"


# --- what cannot be read -------------------------------------------------------------------------------------------


def spoil(site: Site) -> dict[str, str]:
    """Put files that are no task databases next to those that are; return a word of each one's reason."""
    tasks = site.out / "tasks"
    healthy = site.task_databases()[0]
    (tasks / "garbage.sqlite").write_bytes(b"0123456789" * 1000)
    (tasks / "empty.sqlite").write_bytes(b"")
    (tasks / "cut in half.sqlite").write_bytes(healthy.read_bytes()[: healthy.stat().st_size // 2])
    with closing(sqlite3.connect(tasks / "foreign.sqlite")) as db:
        db.execute("CREATE TABLE task (task_id INTEGER, name TEXT)")
    shutil.copy(healthy, tasks / "newer.sqlite")
    with closing(sqlite3.connect(tasks / "newer.sqlite")) as db, db:  # a broken seal would make it a damaged one
        db.execute("PRAGMA secure_delete = ON")
        db.execute("DELETE FROM meta WHERE key = 'seal'")
        db.execute("PRAGMA user_version = 99")
    return {
        "garbage": "not a SQLite database", "empty": "empty", "cut in half": "copy of the task in",
        "foreign": "not a badcjobs database", "newer": "schema 99",
    }  # fmt: skip


def test_files_that_cannot_be_read_are_named_and_the_others_are_merged(
    copied: Site, merged: Outcome, finished: Site
) -> None:
    healthy = dump(finished.out / "job.sqlite")
    reasons = spoil(copied)
    done = copied.badcjobs("merge", copied.out)
    assert done.exit_code == 4
    assert "Traceback" not in done.stderr
    for name, reason in reasons.items():
        (line,) = [line for line in done.stdout.splitlines() if f"tasks/{name}.sqlite" in line]
        assert reason in line
    after = dump(copied.out / "job.sqlite")
    assert {**after, "source_file": []} == {**healthy, "source_file": []}
    files = rows(copied.out / "job.sqlite", "SELECT path, status FROM source_file")
    assert sorted(files) == sorted(
        [(f"tasks/{name}.sqlite", "merged") for name in NAMES]
        + [(f"tasks/{name}.sqlite", "copy" if "copy" in reason else "skipped") for name, reason in reasons.items()]
    )


def test_files_that_cannot_be_read_are_named_in_json_too(copied: Site) -> None:
    reasons = spoil(copied)
    done = copied.badcjobs("merge", copied.out, "--json")
    assert (done.exit_code, done.json["tasks"]) == (4, 2)
    told = {Path(path).stem: reason for path, reason in done.json["file_remarks"]}
    assert set(told) == set(reasons)
    assert all(word in told[name] for name, word in reasons.items())


def test_report_judges_the_files_as_merge_does(copied: Site) -> None:
    spoil(copied)
    merged = copied.badcjobs("merge", copied.out, "--json")
    told, as_json = copied.badcjobs_each([("report", copied.out), ("report", copied.out, "--json")])
    assert (merged.exit_code, told.exit_code, as_json.exit_code) == (4, 4, 4)
    assert merged.json["lossy_files"] == as_json.json["lossy_files"] == 4, "the damaged copy has lost nothing"
    assert "file tasks/garbage.sqlite: skipped" in told.stdout
    assert told.stderr == ""


def test_a_job_database_with_damaged_pages_is_put_aside_by_the_line_to_paste(site: Site) -> None:
    TaskFile(site.out, states={"a-chunk-that-failed": "failed"}).write()
    job = site.merged()
    garbage_page(job, page_with(job, b"a-chunk-that-failed: no luck"), seed=3)
    refused = site.badcjobs("report", site.out)
    line = f"mv {job} {job}.damaged && badcjobs merge {site.out}"
    assert_refused(refused, 4, "malformed", f"\n  try: {line}\n")
    moved, merge = line.split(" && ")
    subprocess.run(moved.split(), check=True)
    again = site.badcjobs(*merge.split()[1:])
    assert again.exit_code == 0, again.stderr
    assert "1 failed" in again.stdout


def test_when_nothing_can_be_read_any_more_the_job_database_keeps_what_it_had(copied: Site) -> None:
    before = dump(copied.merged())
    for database in copied.task_databases():
        database.write_bytes(b"gone bad")
    again = copied.badcjobs("merge", copied.out)
    assert again.exit_code == 4
    for name in NAMES:
        assert f"tasks/{name}.sqlite: kept: kept from an earlier merge; the file now: not a SQLite" in again.stdout
    assert {**dump(copied.out / "job.sqlite"), "source_file": []} == {**before, "source_file": []}


def test_when_nothing_can_be_read_from_the_beginning_nothing_is_made(copied: Site) -> None:
    for database in copied.task_databases():
        database.write_bytes(b"gone bad")
    refused = copied.badcjobs("merge", copied.out)
    assert_refused(refused, 4, f"tasks/{NAMES[0]}.sqlite", f"tasks/{NAMES[1]}.sqlite", "not a SQLite database")
    assert not (copied.out / "job.sqlite").exists()


def test_a_folder_without_task_databases_is_a_clear_error(site: Site) -> None:
    site.out.mkdir()
    assert_refused(site.badcjobs("merge", site.out), 4, "no task database", "badcjobs merge RUN_FOLDER")
    assert list(site.out.iterdir()) == []


def test_a_job_database_that_cannot_be_written_is_a_clear_error(copied: Site) -> None:
    (copied.folder / "file").touch()
    refused = copied.badcjobs("merge", copied.out, "-o", copied.folder / "file" / "job.sqlite")
    assert_refused(refused, 4, "cannot be written")


# --- report --------------------------------------------------------------------------------------------------------


def test_the_page_is_self_contained_and_everything_on_it_is_escaped(merged: Outcome, finished: Site) -> None:
    page = (finished.out / "report.html").read_text()
    assert NASTY not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    ours = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)  # Bokeh's licence names addresses
    for word in ("<img", "<iframe", "src=", "url(", "@import", "http:", "https:"):
        assert word not in ours.lower(), f"the page is not alone: {word}"
    assert {address[0] for address in re.findall(r'href="([^"]*)"', ours)} == {"#", "d"}  # its own parts; data:
    devices = page.partition('id="device-table"')[2].partition("</tbody>")[0]
    assert "Model: Simulated GPU." in page and devices.count('<th scope="row"') == 4


def test_report_says_what_merge_said(merged: Outcome, summary: dict[str, Any], finished: Site) -> None:
    page = finished.folder / "elsewhere.html"
    told = finished.badcjobs("report", finished.out, "--html", page)
    assert told.exit_code == 0
    assert merged.stdout.startswith(told.stdout.rstrip())
    assert page.read_text() == (finished.out / "report.html").read_text()
    as_json = finished.badcjobs("report", finished.out / "job.sqlite", "--json")
    files = {"files": summary["files"], "removed": None, "why_no_report": None}  # what merge alone knows
    assert {**json.loads(as_json.stdout), **files} == summary


def test_a_merge_without_its_page_says_so_in_json_too(copied: Site) -> None:
    (copied.out / "report.html").mkdir()
    done = copied.badcjobs("merge", copied.out, "--json")
    assert (done.exit_code, done.json["why_no_report"]) == (0, "Is a directory")


def test_report_without_a_merged_job_says_how_to_get_one(copied: Site) -> None:
    refused = copied.badcjobs("report", copied.out)
    assert_refused(refused, 4, "job.sqlite does not exist", f"badcjobs merge {copied.out}")


def test_a_page_that_cannot_be_written_is_answered_with_a_line_to_paste(merged: Outcome, finished: Site) -> None:
    pages = [finished.folder / "no folder" / "july.html", finished.out]
    missing, folder = finished.badcjobs_each([("report", finished.out, "--html", page) for page in pages])
    assert_refused(missing, 2, "july.html cannot be written", f"\n  try: mkdir -p '{pages[0].parent}'\n")
    assert_refused(folder, 2, f"{finished.out} cannot be written", "\n  try: ls -ld ")
