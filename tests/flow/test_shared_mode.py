"""Without node-local disk: the safe mode beside the run folder, told, whole, and tidied up."""

from __future__ import annotations

from support.badcjobs_program import Site, rows
from support.live_files import live_folders, live_rows
from support.waiting import wait_for

ENGINE = ("--engine", "demo", "--engine-arg=--burn-s=0.15", "--simulate", 2)
SHARED = (*ENGINE, "--config", "run.live_mode=shared", "--config", "run.publish_every_s=600")
DONE = "SELECT 1 FROM chunk WHERE status = 'done'"


def meta(site: Site) -> dict[str, str]:
    return dict(site.rows("SELECT key, value FROM meta WHERE key LIKE 'live%'"))


def test_the_mode_is_chosen_by_the_disk_or_by_the_user_and_told(site: Site) -> None:
    ended = site.run(site.manifest(2), *ENGINE)
    (line,) = [line for line in ended.stderr.splitlines() if "live files: " in line]
    assert "INFO" in line and str(site.local) in line and "WAL on node-local disk" in line
    assert meta(site)["live_mode"] == "local"
    site.out = site.folder / "second"
    ended = site.run(site.manifest(2), *ENGINE, env={"TMPDIR": str(site.folder / "nowhere")})
    (line,) = [line for line in ended.stderr.splitlines() if "live files: " in line]
    assert "safe mode" in line and f"there is no node-local folder {site.folder / 'nowhere'}" in line
    assert (ended.exit_code, meta(site)["live_mode"]) == (0, "shared")
    refused = site.run(site.manifest(1), *ENGINE, "--config", "run.live_mode=fast")
    assert refused.exit_code == 2
    assert '--config run.live_mode = "fast" must be one of auto, local, shared' in refused.stderr


def test_a_recorder_that_is_killed_twice_loses_nothing_and_the_run_leaves_nothing_behind(site: Site) -> None:
    program = site.start_run(site.manifest(60), *SHARED)
    (folder,) = wait_for(lambda: live_folders(site), "the live files are there")
    assert folder.parent == site.out / "tasks" and folder.name.startswith(".live-")
    for _ in range(2):
        before = len(live_rows(site, "SELECT 1 FROM sample"))
        wait_for(lambda before=before: len(live_rows(site, "SELECT 1 FROM sample")) > before + 3, "it is at work")  # type: ignore[misc]
        (recorder,) = site.recorders()
        recorder.kill()
        wait_for(lambda: recorder.pid not in [other.pid for other in site.recorders()], "it is dead")  # noqa: B023
    wait_for(lambda: "continues without telemetry" in program.stderr, "it was given up")
    written = set(live_rows(site, "SELECT device_id, at_ms FROM sample"))
    ended = program.wait()
    assert ended.exit_code == 0, ended.stderr
    assert written <= set(site.rows("SELECT device_id, at_ms FROM sample"))
    assert len(site.gaps()) == 2
    assert meta(site)["live_folder"] == str(folder)
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 60)]
    assert sorted(path.suffix for path in (site.out / "tasks").iterdir()) == [".log", ".sqlite"]
    assert list(site.local.iterdir()) == []


def test_a_killed_wrapper_is_published_for_and_the_folder_of_a_dead_node_is_no_task_database(site: Site) -> None:
    program = site.start_run(site.manifest(20), *SHARED)
    wait_for(lambda: len(live_rows(site, DONE)) >= 2 and live_rows(site, "SELECT 1 FROM sample"), "they are at work")
    program.kill()
    wait_for(lambda: not site.processes(), "everybody is gone")
    assert rows(site.task_database(), "PRAGMA integrity_check") == [("ok",)]
    assert site.count("chunk", "status = 'done'") >= 2 and site.count("sample") > 0
    assert live_folders(site) == []
    site.out = site.folder / "second"
    program = site.start_run(site.manifest(300), *SHARED[:-2], "--config", "run.heartbeat_every_s=0.3")
    wait_for(lambda: live_rows(site, DONE) and site.task_databases(), "work")
    wait_for(lambda: [line for line in program.stderr.splitlines() if "gpu=" in line and "%" in line], "a known pulse")
    for process in site.processes():
        process.suspend()
    for process in site.processes():
        process.kill()
    program.wait()
    assert len(live_folders(site)) == 1
    assert rows(site.merged(), "SELECT count(*) FROM task") == [(1,)]
