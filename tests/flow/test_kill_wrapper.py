"""kill -9 of the wrapper: the recorder publishes for it, everybody leaves, and the next run goes on."""

from __future__ import annotations

import signal

import pytest
from support.badcjobs_program import Site, array_task, rows
from support.waiting import wait_for

CHUNKS = 10
ENGINE = ("--engine", "demo", "--engine-arg=--burn-s=0.25", "--simulate", 2)


@pytest.fixture(scope="module")
def killed(shared_site: Site) -> Site:
    """A run whose wrapper was killed when some chunks were done and others were running."""
    # Published so rarely that what is in the file afterwards can only be the recorder's work.
    program = shared_site.start_run(shared_site.manifest(CHUNKS), *ENGINE, "--config", "run.publish_every_s=600")
    wait_for(
        lambda: (
            shared_site.count_now("chunk", "status = 'done'") >= 2
            and shared_site.count_now("attempt", "ended_at_ms IS NULL")
        ),
        "some chunks are done, others running",
    )
    program.kill()
    wait_for(lambda: not shared_site.processes(), "recorder and workers are gone", timeout_s=40)
    return shared_site


def test_the_task_database_is_whole_and_says_that_the_task_was_killed(killed: Site) -> None:
    database = killed.task_databases()[0]
    assert rows(database, "PRAGMA integrity_check") == [("ok",)]
    ((verdict, exit_code, wall_ms),) = rows(
        database, "SELECT verdict, exit_code, ended_at_ms - started_at_ms FROM task"
    )
    assert (verdict, exit_code) == ("killed", None)
    assert wall_ms > 0


def test_finished_chunks_stay_finished_with_their_detections(killed: Site) -> None:
    database = killed.task_databases()[0]
    done = rows(database, "SELECT chunk_id, detections FROM chunk WHERE status = 'done' ORDER BY 1")
    assert len(done) >= 2
    heard = dict(rows(database, "SELECT chunk_id, count(*) FROM detection GROUP BY 1"))
    assert {chunk_id: heard.get(chunk_id, 0) for chunk_id, _ in done} == dict(done)
    assert set(heard) <= {chunk_id for chunk_id, _ in done}


def test_the_chunks_that_were_running_are_pending_and_their_attempts_have_no_outcome(killed: Site) -> None:
    database = killed.task_databases()[0]
    cut_short = rows(
        database,
        """SELECT c.status, a.outcome, a.ended_at_ms FROM attempt a JOIN chunk c USING (recording_id, chunk_id)
           WHERE a.outcome IS NULL""",
    )
    assert cut_short
    assert set(cut_short) == {("pending", None, None)}
    assert rows(database, "SELECT count(*) FROM chunk") == [(CHUNKS,)]


def test_the_telemetry_up_to_the_kill_is_in_the_same_file(killed: Site) -> None:
    database = killed.task_databases()[0]
    assert rows(database, "SELECT count(DISTINCT device_id) FROM sample") == [(2,)]
    ((last_sample, last_attempt),) = rows(
        database, "SELECT max(at_ms), (SELECT max(started_at_ms) FROM attempt) FROM sample"
    )
    assert last_sample >= last_attempt


def test_nothing_stays_on_the_node_and_nothing_strange_in_the_run_folder(killed: Site) -> None:
    assert list(killed.local.iterdir()) == []
    names = {path.name for path in killed.out.rglob("*") if path.is_file()} - {"job.sqlite", "report.html"}
    stems = {path.stem for path in killed.task_databases()}
    assert names == {"run.toml"} | {f"{stem}.{ending}" for stem in stems for ending in ("log", "sqlite")}


def test_the_next_run_does_only_what_is_left_and_merged_each_chunk_is_done_once(killed: Site) -> None:
    done_before = killed.count("chunk", "status = 'done'")
    attempts_before = killed.count("attempt")
    again = killed.run(killed.folder / "manifest.csv", *ENGINE, "--json")
    assert again.exit_code == 0, again.stderr
    assert again.json["chunks"] == {"done": CHUNKS - done_before, "skipped": done_before}
    assert killed.count("attempt") - attempts_before == CHUNKS - done_before
    job = killed.merged()
    assert rows(job, "SELECT status, count(*) FROM chunk GROUP BY 1") == [("done", CHUNKS)]
    assert (
        rows(job, "SELECT chunk_id, count(*) FROM attempt WHERE outcome = 'done' GROUP BY 1 HAVING count(*) != 1") == []
    )
    heard = dict(rows(job, "SELECT chunk_id, count(*) FROM detection GROUP BY 1"))
    assert heard == {f"c{i:03d}": i % 3 for i in range(CHUNKS) if i % 3}
    assert rows(job, "SELECT verdict FROM task ORDER BY verdict") == [("done",), ("killed",)]


def test_a_daemon_below_a_killed_task_is_found_and_ended_by_the_recorder(site: Site) -> None:
    """It has left its session, so that nobody but the recorder knows it; this is the second run in one job."""
    script = site.script("daemon.sh", f"setsid sh -c 'touch {site.folder}/up; exec sleep 300' &\nexec sleep 300")
    (site.out / "tasks").mkdir(parents=True)
    (site.out / "tasks" / "4821_0.r0.gpu-01.log").touch()  # the first run has this name
    env = {**array_task(0, (0, 1)), "CUDA_VISIBLE_DEVICES": "0"}
    program = site.start_run(site.manifest(2), "--command", f"{script} {{input}} {{output}}", "--simulate", 1, env=env)
    wait_for(lambda: (site.folder / "up").exists() and site.count_now("sample"), "the daemon and the recorder are up")
    program.kill()
    wait_for(lambda: not site.processes(), "everybody is gone", timeout_s=40)
    assert site.task_database().name == "4821_0.r1.gpu-01.sqlite"
    assert site.rows("SELECT verdict FROM task") == [("killed",)]


def test_without_a_recorder_a_killed_task_still_leaves_what_it_had_published(site: Site) -> None:
    manifest = site.manifest(4)
    engine = ("--engine", "demo", "--engine-arg=--burn-s=0.3", "--simulate", 1, "--no-emit-gpu-telemetry")
    program = site.start_run(manifest, *engine)
    wait_for(lambda: site.task_databases() and site.workers(), "a worker runs")
    program.kill()
    wait_for(lambda: not site.processes(), "the workers are gone", timeout_s=40)
    assert rows(site.task_database(), "PRAGMA integrity_check") == [("ok",)]
    assert site.run(manifest, *engine).exit_code == 0
    assert rows(site.merged(), "SELECT status, count(*) FROM chunk GROUP BY 1") == [("done", 4)]


def test_a_wrapper_that_is_only_stopped_keeps_its_recorder(site: Site) -> None:
    """A stopped wrapper (SIGSTOP, as a suspended job gets it) is not a dead one."""
    program = site.start_run(site.manifest(4), *ENGINE)
    wait_for(lambda: site.count_now("sample"), "first samples")
    program.send(signal.SIGSTOP)
    before = site.count_now("sample")
    wait_for(lambda: site.count_now("sample") > before + 6, "the recorder goes on")
    program.send(signal.SIGCONT)
    done = program.wait()
    assert done.exit_code == 0, done.stderr
    assert site.rows("SELECT verdict FROM task") == [("done",)]
