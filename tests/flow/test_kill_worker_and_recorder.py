"""kill -9 of a worker or of the recorder: the first costs a retry, the second a gap, and neither the run."""

from __future__ import annotations

from support.badcjobs_program import NOT_LATE, Program, Site, rows
from support.waiting import wait_for

ENGINE = ("--engine", "demo", "--engine-arg=--burn-s=0.4", "--simulate", 2)


def start(site: Site, chunks: int = 6) -> Program:
    program = site.start_run(site.manifest(chunks), *ENGINE)
    wait_for(lambda: site.count_now("sample") and site.count_now("attempt", "ended_at_ms IS NULL"), "all is running")
    return program


def kill_the_recorder(site: Site) -> int:
    """Kill the recorder once it has written something, and return its process id."""
    samples = site.count_now("sample")
    wait_for(lambda: site.count_now("sample") > samples, "the recorder is at work")
    (recorder,) = site.recorders()
    recorder.kill()
    wait_for(lambda: recorder.pid not in [other.pid for other in site.recorders()], "it is dead")
    return int(recorder.pid)


def test_a_killed_worker_costs_a_retry_and_nothing_else(site: Site) -> None:
    program = start(site)
    wait_for(lambda: site.count_now("attempt", "ended_at_ms IS NULL") == 2, "both workers have a chunk")
    victim = site.workers()[0]
    victim.kill()
    done = program.wait()
    assert done.exit_code == 0, done.stderr
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 6)]
    failed = site.rows("SELECT chunk_id, try_number, error_class FROM attempt WHERE outcome = 'lost'")
    assert [attempt[1:] for attempt in failed] == [(1, "worker_died")]
    assert site.rows("SELECT outcome FROM attempt WHERE chunk_id = ? AND try_number = 2", failed[0][0]) == [("done",)]
    assert site.rows("SELECT exit_code FROM worker WHERE pid = ?", victim.pid) == [(-9,)]
    assert site.count("worker") == 3, "a new worker has taken its place"
    assert site.rows("SELECT count(*), sum(detections) FROM chunk") == [(6, site.count("detection"))]


def test_a_killed_recorder_is_started_again_and_the_hole_is_a_gap(site: Site) -> None:
    program = start(site)
    kill_the_recorder(site)
    done = program.wait()
    assert done.exit_code == 0, done.stderr
    assert "restarting it" in done.stderr
    ((from_ms, to_ms, reason, device, metric),) = site.rows(
        f"SELECT from_ms, to_ms, reason, device_id, metric FROM gap WHERE {NOT_LATE}"
    )
    assert reason == "the recorder died and was restarted"
    assert (device, metric) == (None, None), "it concerns every device"
    around = "SELECT sum(at_ms <= ?), sum(at_ms > ? AND at_ms < ?), sum(at_ms >= ?) FROM sample"
    ((before, inside, after),) = site.rows(around, from_ms, from_ms, to_ms, to_ms)
    assert before > 0
    assert inside == 0
    assert after > 0
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 6)]


def test_a_recorder_that_is_killed_twice_is_given_up_but_never_the_run(site: Site) -> None:
    program = start(site)
    first = kill_the_recorder(site)
    assert kill_the_recorder(site) != first
    done = program.wait()
    assert done.exit_code == 0, done.stderr
    assert "continues without telemetry" in done.stderr
    assert "telemetry incomplete" in done.stdout
    assert site.rows("SELECT verdict, exit_code FROM task") == [("done", 0)]
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 6)]
    gaps = site.rows(f"SELECT from_ms, to_ms, reason FROM gap WHERE {NOT_LATE} ORDER BY from_ms")
    assert len(gaps) == 2
    ((last_sample_ms, ended_at_ms),) = site.rows("SELECT max(at_ms), (SELECT ended_at_ms FROM task) FROM sample")
    from_ms, to_ms, reason = gaps[1]
    assert "recorder" in reason
    assert from_ms == last_sample_ms, "a gap starts with the last reading before it"
    assert ended_at_ms - to_ms < 1000
    assert list(site.local.iterdir()) == []


def test_a_recorder_that_dies_with_the_last_chunk_leaves_a_gap_too(site: Site) -> None:
    """There may be no time to start it again; one way or the other, a gap tells of it."""
    pid = site.folder / "recorder.pid"
    heard = 'echo start_time,end_time,label,score > "$2"'
    script = site.script("last.sh", f"while [ ! -e {pid} ]; do sleep 0.02; done\n{heard}\nkill -9 $(cat {pid})")
    program = site.start_run(site.manifest(1), "--command", f"{script} {{input}} {{output}}", "--simulate", 1)
    wait_for(lambda: site.count_now("sample") >= 2, "the recorder is at work")
    (recorder,) = site.recorders()
    pid.with_suffix(".new").write_text(str(recorder.pid))
    pid.with_suffix(".new").rename(pid)
    done = program.wait()
    assert done.exit_code == 0, done.stderr
    ended_ms = site.rows("SELECT ended_at_ms FROM attempt")[0][0]
    ((from_ms, to_ms),) = site.rows(f"SELECT from_ms, to_ms FROM gap WHERE {NOT_LATE}")
    assert from_ms <= ended_ms <= to_ms
    assert site.count("sample", f"at_ms = {from_ms}") == 1, "a gap starts with the last reading before it"


def test_a_recorder_that_cannot_even_start_is_a_gap_as_long_as_the_task(site: Site) -> None:
    (site.folder / "broken").mkdir()
    (site.folder / "broken" / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'badcjobs.telemetry.recorder_process' in sys.orig_argv:\n"
        "    os.write(2, b'no recorder today')\n"
        "    os._exit(1)\n"
    )
    done = site.run(site.manifest(3), *ENGINE, env={"PYTHONPATH": str(site.folder / "broken")})
    assert done.exit_code == 0, done.stderr
    assert "telemetry incomplete: the recorder exited with 1: no recorder today" in done.stdout
    assert site.rows("SELECT g.from_ms = t.started_at_ms, g.to_ms - t.ended_at_ms < 1000 FROM gap g, task t") == [
        (1, 1)
    ]
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 3)]


def test_a_recorder_that_hangs_holds_up_the_end_for_seconds_and_not_for_ever(site: Site) -> None:
    """Drivers do hang; nothing that the recorder would have to answer may be waited for without a limit."""
    program = start(site, chunks=2)
    (recorder,) = site.recorders()
    recorder.suspend()
    done = program.wait(timeout_s=90)
    assert done.exit_code == 0, done.stderr
    assert "telemetry incomplete: the recorder did not answer" in done.stdout
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 2)]
    ((last_sample_ms, from_ms),) = site.rows("SELECT max(at_ms), (SELECT max(from_ms) FROM gap) FROM sample")
    assert from_ms == last_sample_ms
    assert list(site.local.iterdir()) == []


def test_a_recorder_file_that_cannot_be_read_costs_the_telemetry_and_not_the_results(site: Site) -> None:
    program = start(site)
    kill_the_recorder(site)
    kill_the_recorder(site)
    wait_for(lambda: "continues without telemetry" in program.stderr, "it was given up")
    (recorder_file,) = site.local.glob("*/recorder.sqlite")
    recorder_file.with_name("recorder.sqlite-wal").unlink(missing_ok=True)
    recorder_file.write_bytes(b"a disk that went bad" * 500)
    done = program.wait()
    assert done.exit_code == 0, done.stderr
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 6)]
    assert site.rows("SELECT verdict, exit_code FROM task") == [("done", 0)]
    assert site.count("gap") > 0
    assert rows(site.merged(), "SELECT count(*) FROM chunk WHERE status = 'done'") == [(6,)]
