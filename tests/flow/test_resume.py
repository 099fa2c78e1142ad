"""Going on where earlier tasks stopped: what is done with the same audio stays done, and looking is cheap."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from support.audio import make_wav
from support.badcjobs_program import CHUNK_S, ON_CPU, Site, array_task, assert_refused, loud, rows
from support.file_calls import FileCalls
from support.task_files import TaskFile


def statuses(site: Site) -> list[tuple[str, str]]:
    """Return what the task that started last says of each chunk."""
    last = max(site.task_databases(), key=lambda path: rows(path, "SELECT started_at_ms FROM task"))
    return rows(last, "SELECT chunk_id, status FROM chunk ORDER BY chunk_id")


def audio(site: Site, name: str) -> Path:
    return site.folder / "audio" / f"{name}.wav"


def rewrite_in_place(path: Path) -> None:
    """Let a recording of the same length, and so of the same size, take its place."""
    make_wav(path, CHUNK_S, 1000, loud=loud(2), tone_hz=150)


# --- audio that changes -----------------------------------------------------------------------------------------------


def test_a_changed_file_is_done_again_and_its_new_result_is_the_one_that_counts(site: Site) -> None:
    manifest = site.manifest(3)
    assert site.run(manifest, *ON_CPU).exit_code == 0
    rewrite_in_place(audio(site, "c000"))
    again = site.run(manifest, *ON_CPU)
    assert again.exit_code == 0, again.stderr
    assert "done earlier, but with different audio, so analysed again: 1 chunk\n" in again.stderr
    assert "already done, skipped: 2 chunks" in again.stderr
    assert statuses(site) == [("c000", "done"), ("c001", "skipped"), ("c002", "skipped")]
    assert rows(site.merged(), "SELECT chunk_id, count(*) FROM detection GROUP BY 1") == [
        ("c000", 2), ("c001", 1), ("c002", 2),
    ]  # fmt: skip
    third = site.run(manifest, *ON_CPU)
    assert "3 skipped of 3" in third.stdout, "job.sqlite knows the new audio"


def test_audio_that_becomes_longer_or_is_cut_otherwise_is_done_again(site: Site) -> None:
    manifest = site.manifest(3)
    assert site.run(manifest, *ON_CPU).exit_code == 0
    make_wav(audio(site, "c001"), 2 * CHUNK_S, 1000)
    manifest.write_text(manifest.read_text().replace("c002.wav,1200,1800", "c002.wav,1300,1900"))
    assert site.run(manifest, *ON_CPU).exit_code == 0
    assert statuses(site) == [("c000", "skipped"), ("c001", "done"), ("c002", "done")]


def test_a_checksum_in_the_manifest_outlives_a_copy_without_times(site: Site) -> None:
    manifest = site.manifest(2)
    summed = manifest.read_text().replace("0,,", f"0,{'a' * 64},")
    manifest.write_text(summed)
    assert site.run(manifest, *ON_CPU).exit_code == 0
    for name in ("c000", "c001"):
        os.utime(audio(site, name), ns=(1, 1))
    assert "2 skipped of 2" in site.run(manifest, *ON_CPU).stdout
    manifest.write_text(summed.replace("a" * 64, "b" * 64, 1))
    assert "1 done, 1 skipped of 2" in site.run(manifest, *ON_CPU).stdout


def test_a_folder_that_has_grown_and_changed_is_brought_up_to_date(site: Site) -> None:
    folder = site.folder / "recordings"
    for name in ("a", "b"):
        make_wav(folder / f"{name}.wav", 0.3, 1000)
    assert site.run(folder, *ON_CPU).exit_code == 0
    os.utime(folder / "b.wav", ns=(1, 1))
    make_wav(folder / "c.wav", 0.3, 1000)
    assert site.run(folder, *ON_CPU).exit_code == 0
    assert statuses(site) == [("a", "skipped"), ("b", "done"), ("c", "done")]


def test_without_resume_all_is_done_again(site: Site) -> None:
    manifest = site.manifest(2)
    assert site.run(manifest, *ON_CPU).exit_code == 0
    assert "2 done of 2" in site.run(manifest, *ON_CPU, "--no-resume").stdout


# --- chunks that failed -----------------------------------------------------------------------------------------------


@pytest.fixture
def with_a_failure(site: Site) -> Path:
    """A run of three chunks, one of which has failed for good."""
    manifest = site.manifest(3)
    audio(site, "c001").write_bytes(b"not a wav file")
    assert site.run(manifest, *ON_CPU).exit_code == 1
    return manifest


def test_what_failed_is_tried_again(site: Site, with_a_failure: Path) -> None:
    again = site.run(with_a_failure, *ON_CPU, "--json")
    assert (again.exit_code, again.json["chunks"]) == (1, {"failed": 1, "skipped": 2})


def test_what_failed_can_be_left_alone_and_is_still_named(site: Site, with_a_failure: Path) -> None:
    attempts = site.count("attempt")
    again = site.run(with_a_failure, *ON_CPU, "--config", "run.retry_failed=false", "--json")
    assert "failed in earlier tasks, not tried again (run.retry_failed = false): 1 chunk\n" in again.stderr
    assert (again.exit_code, again.json["chunks"]) == (1, {"skipped": 3})
    assert [(failed["chunk_id"], failed["error_class"]) for failed in again.json["failed"]] == [("c001", "bad_audio")]
    assert (site.count("attempt"), site.count("worker")) == (attempts, 1), "nobody was started for it"
    assert rows(site.merged(), "SELECT chunk_id, status FROM chunk WHERE status != 'done'") == [("c001", "failed")]


def test_a_file_that_was_repaired_is_tried_in_any_case(site: Site, with_a_failure: Path) -> None:
    rewrite_in_place(audio(site, "c001"))
    again = site.run(with_a_failure, *ON_CPU, "--config", "run.retry_failed=false", "--json")
    assert (again.exit_code, again.json["chunks"]) == (0, {"done": 1, "skipped": 2})


def test_leaving_failures_alone_without_looking_back_is_refused(site: Site) -> None:
    refused = site.run(site.manifest(1), *ON_CPU, "--no-resume", "--config", "run.retry_failed=false")
    assert_refused(refused, 2, "retry_failed = false needs --resume")


# --- what looking back costs ------------------------------------------------------------------------------------------


def calls_of_first_task(site: Site, tasks: int) -> Counter[tuple[str, Path]]:
    """Run the first of so many tasks, two chunks each, after all others have published; return what it touched."""
    manifest = site.manifest(2 * tasks)
    TaskFile(site.out, job_id="4000", states={"old": "done"}, samples=0).write()
    site.merged()
    TaskFile(site.out, job_id="4001", states={"late": "done"}, samples=0).write()
    for index in range(1, tasks):
        TaskFile(site.out, job_id="4821", index=index, states={f"c{index}": "done"}, samples=0).write()
    calls = FileCalls(site.folder, site.folder.parent / f"calls-{tasks}")
    done = site.run(
        manifest, *ON_CPU, "--config", "run.publish_every_s=60", env={**array_task(0, range(tasks)), **calls.environ}
    )
    assert done.exit_code == 0, done.stderr
    return Counter({(call, path.relative_to(site.folder)): many for (call, path), many in calls.count().items()})


def others(calls: Counter[tuple[str, Path]]) -> Counter[tuple[str, str]]:
    """Leave out the task's own files: how often it looks at those depends on the time it takes."""
    whose = {(call, str(path)): many for (call, path), many in calls.items() if "4821_0." not in path.name}
    return Counter({(call, path): many for (call, path), many in whose.items() if path.startswith(("run/", "audio/"))})


def test_opens_and_stats_are_constant_in_the_size_of_the_array(tmp_path: Path) -> None:
    small, large = (others(calls_of_first_task(Site(tmp_path / str(tasks)), tasks)) for tasks in (3, 40))
    for calls, tasks in ((small, 3), (large, 40)):
        touched = {path for _, path in calls}
        assert {path for path in touched if path.startswith("audio/")} == {"audio/c000.wav", f"audio/c{tasks:03d}.wav"}
        assert not [path for path in touched if "4821_" in path], "the databases of its siblings"
        assert calls["open", "run/job.sqlite"] > 0
        assert calls["open", "run/tasks/4001_0.r0.gpu1.sqlite"] > 0
        assert calls["open", "run/tasks/4000_0.r0.gpu1.sqlite"] == 0, "job.sqlite lists it"
    for call in ("open", "stat"):
        assert sum(many for (kind, _), many in small.items() if kind == call) == sum(
            many for (kind, _), many in large.items() if kind == call
        )


def test_the_audio_is_looked_at_once_when_the_work_is_listed(tmp_path: Path) -> None:
    site = Site(tmp_path / "site")
    manifest = site.manifest(2)
    assert site.run(manifest, *ON_CPU).exit_code == 0
    calls = FileCalls(site.folder / "audio", tmp_path / "calls")
    assert "2 skipped of 2" in site.run(manifest, *ON_CPU, env=calls.environ).stdout
    # A stat for the fingerprint, a header for its length: the file may be longer than the row.
    assert calls.count() == {(call, audio(site, name)): 1 for call in ("stat", "open") for name in ("c000", "c001")}
    without = FileCalls(site.folder / "audio", tmp_path / "calls without")
    site.out = site.folder / "uncut"
    assert site.run(manifest, *ON_CPU, "--config", "run.cut=false").exit_code == 0
    assert "2 skipped of 2" in site.run(manifest, *ON_CPU, "--config", "run.cut=false", env=without.environ).stdout
    assert without.count() == {("stat", audio(site, "c000")): 1, ("stat", audio(site, "c001")): 1}
