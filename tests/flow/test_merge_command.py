"""``badcjobs merge`` and ``badcjobs report`` of a real array: the numbers are right, whatever lies around."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise
from math import ceil

import pytest
from support.badcjobs_program import ON_CPU, Site, array_task, assert_refused, rows
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


def test_the_numbers_of_a_job_are_those_of_its_samples_and_report_says_what_merge_said(finished: Site) -> None:
    told = finished.badcjobs("merge", finished.out)
    summary = finished.badcjobs("merge", finished.out, "--json").json
    job = finished.out / "job.sqlite"
    for table in ("task", "device", "sample", "host_sample", "gap", "worker", "chunk", "attempt", "detection"):
        apart = sorted(finished.rows(f"SELECT * FROM {table}"), key=repr)
        assert apart and sorted(rows(job, f"SELECT * FROM {table}"), key=repr) == apart, table
    assert (summary["tasks"], summary["tasks_by_verdict"], summary["verdict"]) == (
        2,
        {"failed": 1, "done": 1},
        "failed",
    )
    assert [summary[key] for key in ("chunks", "done", "failed", "left", "tries")] == [CHUNKS, 9, 1, 0, CHUNKS + 2]
    assert summary["detections"] == sum(i % 3 for i in range(CHUNKS) if i != 6)
    (failed,) = summary["failed_chunks"]
    assert (failed["recording_id"], failed["chunk_id"], failed["error_class"]) == (NASTY, "c006", "bad_audio")
    assert [gap["reason"] for gap in summary["gaps"] if gap["metric"]] == ["Not Supported (simulated)"]

    tasks = finished.rows("SELECT started_at_ms, ended_at_ms, devices FROM task")
    wall_s = (max(end for _, end, _ in tasks) - min(start for start, _, _ in tasks)) / 1000
    gpu_s = sum((end - start) / 1000 * devices for start, end, devices in tasks)
    figures = {
        "audio_hours": 9 * 0.6 / 3600, "wall_s": wall_s, "times_real_time": 9 * 0.6 / wall_s, "gpu_hours": gpu_s / 3600,
        "audio_hours_per_gpu_hour": 9 * 0.6 / gpu_s,
    }  # fmt: skip
    assert {name: summary[name] for name in figures} == pytest.approx(figures)

    devices, joules = {(d["task"], d["index"]): d for d in summary["devices"]}, 0.0
    for name in NAMES:
        database = finished.out / "tasks" / f"{name}.sqlite"
        for device_id, index in rows(database, "SELECT device_id, device_index FROM device"):
            columns = "at_ms, utilization_percent, memory_used_bytes, power_w, energy_j"
            samples = rows(database, f"SELECT {columns} FROM sample WHERE device_id = ? ORDER BY at_ms", device_id)
            busy, device = sorted(sample[1] for sample in samples), devices.pop((name, index))
            integrated = sum((a[3] + b[3]) / 2 * (b[0] - a[0]) / 1000 for a, b in pairwise(samples))
            energy = integrated if index else samples[-1][4] - samples[0][4]
            joules += energy
            wanted = {
                "samples": len(samples), "utilization_mean_percent": sum(busy) / len(busy), "energy_j": energy,
                "utilization_p50_percent": busy[ceil(0.50 * len(busy)) - 1], "utilization_max_percent": busy[-1],
                "utilization_p95_percent": busy[ceil(0.95 * len(busy)) - 1],
                "memory_peak_bytes": max(sample[2] for sample in samples),
            }  # fmt: skip
            assert {name: device[name] for name in wanted} == pytest.approx(wanted)
            assert device["energy_source"] == ("integrated power" if index else "counter")
    assert devices == {} and summary["energy_wh"] == pytest.approx(joules / 3600)

    page = finished.folder / "elsewhere.html"
    again = finished.badcjobs("report", finished.out, "--html", page)
    assert told.stdout.startswith(again.stdout.rstrip())
    assert page.read_text() == (finished.out / "report.html").read_text()
    files = {"files": summary["files"], "removed": None, "why_no_report": None}  # what merge alone knows
    assert {**finished.badcjobs("report", job, "--json").json, **files} == summary
    text = page.read_text()
    assert NASTY not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    ours = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)  # Bokeh's licence names addresses
    for word in ("<img", "<iframe", "src=", "url(", "@import", "http:", "https:"):
        assert word not in ours.lower(), f"the page is not alone: {word}"


def test_a_job_database_with_damaged_pages_is_put_aside_by_the_line_to_paste(site: Site) -> None:
    TaskFile(site.out, states={"a-chunk-that-failed": "failed"}).write()
    job = site.merged()
    garbage_page(job, page_with(job, b"a-chunk-that-failed: no luck"), seed=3)
    line = f"mv {job} {job}.damaged && badcjobs merge {site.out}"
    assert_refused(site.badcjobs("report", site.out), 4, "malformed", f"\n  try: {line}\n")
    moved, merge = line.split(" && ")
    subprocess.run(moved.split(), check=True)
    (site.out / "report.html").unlink()
    (site.out / "report.html").mkdir()
    again = site.badcjobs(*merge.split()[1:], "--json")
    assert (again.exit_code, again.json["failed"], again.json["why_no_report"]) == (0, 1, "Is a directory")
    pages = [site.folder / "no folder" / "july.html", site.out]
    missing, folder = site.badcjobs_each([("report", site.out, "--html", page) for page in pages])
    assert_refused(missing, 2, "july.html cannot be written", f"\n  try: mkdir -p '{pages[0].parent}'\n")
    assert_refused(folder, 2, f"{site.out} cannot be written", "\n  try: ls -ld ")


def test_a_chunk_has_one_final_state_however_often_it_was_listed_and_the_job_database_alone_tells_what_is_done(
    site: Site,
) -> None:
    manifest = site.manifest(6)
    program = site.start_run(manifest, "--engine", "demo", "--engine-arg=--burn-s=30", "--simulate", 1)
    try:
        wait_for(site.task_databases, "the first publication")
        told = site.badcjobs("merge", site.out, "--json")  # a run that is still at it
    finally:
        program.kill()
    running = (told.json["tasks_by_verdict"], told.json["left"], told.json["verdict"])
    assert running == ({"running": 1}, 6, "stopped"), told.stderr
    site.out = site.folder / "second"
    for again in ([], ["--no-resume"], []):  # done, done a second time, found done
        assert site.run(manifest, *ON_CPU, *again).exit_code == 0
    job = site.merged()
    assert rows(job, "SELECT status, count(*) FROM chunk GROUP BY 1") == [("done", 6)]
    assert rows(job, "SELECT count(*), (SELECT count(*) FROM attempt WHERE outcome = 'done') FROM detection") == [
        (6, 12)
    ]
    for path in (site.out / "tasks").iterdir():
        path.unlink()
    assert site.run(manifest, *ON_CPU, "--json").json["chunks"] == {"skipped": 6}
