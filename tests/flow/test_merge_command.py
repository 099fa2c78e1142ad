"""``badcjobs merge`` and ``badcjobs report`` of a real array: the numbers are right, whatever lies around."""

from __future__ import annotations

import re
import subprocess

from support.badcjobs_program import ON_CPU, Site, array_task, assert_refused, rows
from support.damage import garbage_page, page_with
from support.task_files import TaskFile

NASTY = "<script>alert(1)</script>"
CHUNKS = 10


def test_a_job_is_what_its_tasks_are_and_report_says_what_merge_said(site: Site) -> None:
    """Take an array of two tasks with two devices each; one has no energy counter, one chunk always fails."""
    manifest = site.manifest(CHUNKS)
    manifest.write_text(manifest.read_text().replace("rec2,c006", f"{NASTY},c006"))
    (site.folder / "audio" / "c006.wav").write_bytes(b"not audio")
    script = site.folder / "devices.toml"
    script.write_text('[[device]]\nindex = 1\nunsupported = ["energy_j"]\nload = [[0, 20], [0.7, 90]]\n')
    words = (manifest, "--engine", "demo", "--engine-arg=--burn-s=0.25", "--simulate", script)
    envs = [{"CUDA_VISIBLE_DEVICES": "0,1", **array_task(index, (0, 1))} for index in (0, 1)]
    programs = [site.start_run(*words, env=env) for env in envs]
    assert [program.wait().exit_code for program in programs] == [1, 0]
    told = site.badcjobs("merge", site.out)
    summary = site.badcjobs("merge", site.out, "--json").json
    job = site.out / "job.sqlite"
    for table in ("task", "device", "sample", "host_sample", "gap", "worker", "chunk", "attempt", "detection"):
        apart = sorted(site.rows(f"SELECT * FROM {table}"), key=repr)
        assert apart and sorted(rows(job, f"SELECT * FROM {table}"), key=repr) == apart, table
    heard = sum(i % 3 for i in range(CHUNKS) if i != 6)
    wanted = {"tasks": 2, "tasks_by_verdict": {"failed": 1, "done": 1}, "verdict": "failed", "chunks": CHUNKS,
              "done": 9, "failed": 1, "left": 0, "tries": CHUNKS + 2, "detections": heard}  # fmt: skip
    assert {key: summary[key] for key in wanted} == wanted
    sources = {(device["index"], device["energy_source"]) for device in summary["devices"]}
    assert sources == {(0, "counter"), (1, "integrated power")}
    (failed,) = summary["failed_chunks"]
    assert (failed["recording_id"], failed["chunk_id"], failed["error_class"]) == (NASTY, "c006", "bad_audio")
    assert [gap["reason"] for gap in summary["gaps"] if gap["metric"]] == ["Not Supported (simulated)"]

    page = site.folder / "elsewhere.html"
    again = site.badcjobs("report", site.out, "--html", page)
    assert told.stdout.startswith(again.stdout.rstrip())
    assert page.read_text() == (site.out / "report.html").read_text()
    files = {"files": summary["files"], "removed": None, "why_no_report": None}  # what merge alone knows
    assert {**site.badcjobs("report", job, "--json").json, **files} == summary
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


def test_a_chunk_has_one_final_state_and_the_job_database_alone_tells_what_is_done(
    site: Site,
) -> None:
    manifest = site.manifest(6)
    for again in ([], ["--no-resume"], []):  # done, done a second time, found done
        assert site.run(manifest, *ON_CPU, *again).exit_code == 0
    job = site.merged()
    assert rows(job, "SELECT status, count(*) FROM chunk GROUP BY 1") == [("done", 6)]
    sums = "SELECT count(*), (SELECT count(*) FROM attempt WHERE outcome = 'done') FROM detection"
    assert rows(job, sums) == [(6, 12)]
    for path in (site.out / "tasks").iterdir():
        path.unlink()
    assert site.run(manifest, *ON_CPU, "--json").json["chunks"] == {"skipped": 6}
