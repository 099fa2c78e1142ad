"""Going on where earlier tasks stopped: what is done with the same audio stays done, and looking is cheap."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from support.audio import make_wav
from support.badcjobs_program import CHUNK_S, ON_CPU, Site, array_task, assert_refused, loud, rows
from support.file_calls import FileCalls
from support.task_files import TaskFile

LEFT_ALONE = ("--config", "run.retry_failed=false")


def statuses(site: Site) -> dict[str, list[str]]:
    """Return what the task that started last says: the chunks of each state."""
    last = max(site.task_databases(), key=lambda path: rows(path, "SELECT started_at_ms FROM task"))
    found: dict[str, list[str]] = {}
    for chunk_id, status in rows(last, "SELECT chunk_id, status FROM chunk ORDER BY chunk_id"):
        found.setdefault(status, []).append(chunk_id)
    return found


def audio(site: Site, name: str) -> Path:
    return site.folder / "audio" / f"{name}.wav"


def rewrite_in_place(path: Path) -> None:
    """Let a recording of the same length, and so of the same size, take its place."""
    make_wav(path, CHUNK_S, 1000, loud=loud(2), tone_hz=150)


def test_only_what_is_done_with_the_same_audio_is_skipped_and_the_new_result_counts(site: Site) -> None:
    """A file rewritten, a longer one, a chunk cut otherwise; then failures left alone, repaired, and tried again."""
    manifest = site.manifest(8)
    audio(site, "c006").write_bytes(b"not a wav file")
    audio(site, "c007").write_bytes(b"not a wav file")
    assert site.run(manifest, *ON_CPU).exit_code == 1
    attempts = site.count("attempt")
    again = site.run(manifest, *ON_CPU, *LEFT_ALONE, "--json")
    assert (again.exit_code, again.json["chunks"]) == (1, {"skipped": 8})
    assert "failed in earlier tasks, not tried again (run.retry_failed = false): 2 chunks\n" in again.stderr
    assert [(one["chunk_id"], one["error_class"]) for one in again.json["failed"]] == [
        ("c006", "bad_audio"), ("c007", "bad_audio"),
    ]  # fmt: skip
    assert (site.count("attempt"), site.count("worker")) == (attempts, 1), "nobody was started for them"

    rewrite_in_place(audio(site, "c000"))
    make_wav(audio(site, "c001"), 2 * CHUNK_S, 1000)
    manifest.write_text(manifest.read_text().replace("c002.wav,1200,1800", "c002.wav,1300,1900"))
    rewrite_in_place(audio(site, "c006"))
    changed = site.run(manifest, *ON_CPU, *LEFT_ALONE)
    assert changed.exit_code == 1, changed.stderr
    assert "done earlier, but with different audio, so analysed again: 3 chunks\n" in changed.stderr
    assert "already done, skipped: 3 chunks\n" in changed.stderr
    assert statuses(site) == {"done": ["c000", "c001", "c002", "c006"], "skipped": ["c003", "c004", "c005", "c007"]}
    job = site.merged()
    assert rows(job, "SELECT chunk_id FROM chunk WHERE status != 'done'") == [("c007",)]
    heard = rows(job, "SELECT chunk_id, count(*) FROM detection GROUP BY 1")
    assert heard[:1] == [("c000", 2)], "that of the new audio"

    tried = site.run(manifest, *ON_CPU)  # job.sqlite knows the new audio
    assert (tried.exit_code, statuses(site)["failed"], len(statuses(site)["skipped"])) == (1, ["c007"], 7)
    assert "8 of 8" not in site.run(manifest, *ON_CPU, "--no-resume").stdout
    assert statuses(site) == {"done": [f"c00{number}" for number in range(7)], "failed": ["c007"]}
    refused = site.run(manifest, *ON_CPU, "--no-resume", *LEFT_ALONE)
    assert_refused(refused, 2, "retry_failed = false needs --resume")


def test_a_checksum_outlives_a_copy_without_times_and_a_folder_that_has_grown_is_brought_up_to_date(site: Site) -> None:
    manifest = site.manifest(2)
    summed = manifest.read_text().replace("0,,", f"0,{'a' * 64},")
    manifest.write_text(summed)
    assert site.run(manifest, *ON_CPU).exit_code == 0
    for name in ("c000", "c001"):
        os.utime(audio(site, name), ns=(1, 1))
    manifest.write_text(summed.replace("a" * 64, "b" * 64, 1))
    assert "1 done, 1 skipped of 2" in site.run(manifest, *ON_CPU).stdout
    folder = site.folder / "recordings"
    site.out = site.folder / "other"
    for name in ("a", "b"):
        make_wav(folder / f"{name}.wav", 0.3, 1000)
    assert site.run(folder, *ON_CPU).exit_code == 0
    os.utime(folder / "b.wav", ns=(1, 1))
    make_wav(folder / "c.wav", 0.3, 1000)
    assert site.run(folder, *ON_CPU).exit_code == 0
    assert statuses(site) == {"skipped": ["a"], "done": ["b", "c"]}


# --- what looking back costs ------------------------------------------------------------------------------------------


def calls_of_first_task(site: Site, tasks: int) -> Counter[tuple[str, str]]:
    """Run the first of so many tasks, two chunks each, after all others have published; return what it touched.

    Without the task's own files: how often it looks at those depends on the time it takes.
    """
    manifest = site.manifest(2 * tasks)
    TaskFile(site.out, job_id="4000", states={"old": "done"}, samples=0).write()
    site.merged()
    TaskFile(site.out, job_id="4001", states={"late": "done"}, samples=0).write()
    for index in range(1, tasks):
        TaskFile(site.out, job_id="4821", index=index, states={f"c{index}": "done"}, samples=0).write()
    calls = FileCalls(site.folder, site.folder.parent / f"calls-{tasks}")
    env = {**array_task(0, range(tasks)), **calls.environ}
    done = site.run(manifest, *ON_CPU, "--config", "run.publish_every_s=60", env=env)
    assert done.exit_code == 0, done.stderr
    found: Counter[tuple[str, str]] = Counter()
    for (call, path), many in calls.count().items():
        name = str(path.relative_to(site.folder))
        if name.startswith(("run/", "audio/")) and "4821_0." not in name:
            found[call, name] += many
    return found


def test_opens_and_stats_are_constant_in_the_size_of_the_array_and_audio_is_looked_at_once(tmp_path: Path) -> None:
    sums = []
    for tasks in (3, 9):
        calls = calls_of_first_task(Site(tmp_path / str(tasks)), tasks)
        touched = {path for _, path in calls}
        assert {path for path in touched if path.startswith("audio/")} == {"audio/c000.wav", f"audio/c{tasks:03d}.wav"}
        assert not [path for path in touched if "4821_" in path], "the databases of its siblings"
        looked = [calls["open", f"run/{name}"] > 0 for name in ("job.sqlite", "tasks/4001_0.r0.gpu1.sqlite")]
        assert looked == [True, True]
        assert calls["open", "run/tasks/4000_0.r0.gpu1.sqlite"] == 0, "job.sqlite lists it"
        sums.append([sum(many for (kind, _), many in calls.items() if kind == call) for call in ("open", "stat")])
    assert sums[0] == sums[1]

    site = Site(tmp_path / "site")
    manifest = site.manifest(2)
    for cut, kinds in (("auto", ("stat", "open")), ("false", ("stat",))):
        # A stat for the fingerprint, a header for its length: the file may be longer than the row.
        site.out = site.folder / cut
        options = ON_CPU if cut == "auto" else (*ON_CPU, "--config", f"run.cut={cut}")
        assert site.run(manifest, *options).exit_code == 0
        seen = FileCalls(site.folder / "audio", tmp_path / f"calls {cut}")
        assert "2 skipped of 2" in site.run(manifest, *options, env=seen.environ).stdout
        assert seen.count() == {(call, audio(site, name)): 1 for call in kinds for name in ("c000", "c001")}
