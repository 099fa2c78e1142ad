"""kill -9 of the wrapper, of a worker or of the recorder, at a chosen moment: what it costs, and what is written."""

import os
import re
import shutil
import signal
import sys
from contextlib import suppress

import psutil
import pytest
from rooms.root import Launcher, SystemClock
from rooms.workers import EngineStart, HawkEarsEngine
from support.badcjobs_program import NOT_LATE, array_task, rows
from support.fake_hawkears import fake_package_environ, hawkears_options, make_fake_root
from support.live_files import committed, halves, live_folders, live_rows
from support.stand_ins import install
from support.waiting import processes, wait_for

ENGINE = ("--engine", "demo", "--engine-arg=--burn-s=0.4", "--simulate", 2)
STATES = "SELECT status, count(*) FROM chunk GROUP BY status"
RUNNING = "SELECT 1 FROM attempt WHERE ended_at_ms IS NULL"
SAMPLES = "SELECT at_ms, device_id FROM sample"
both_modes = pytest.mark.parametrize("mode", ["local", "shared"])  # the live files: on the node, or in the run folder


def start(site, chunks, *, mode="local", publish_every_s=0.1, engine=ENGINE):
    """Start a run on two devices and wait until both have a chunk and telemetry is written."""
    config = ("--config", f"run.live_mode={mode}", "--config", f"run.publish_every_s={publish_every_s}")
    program = site.start_run(site.manifest(chunks), *engine, *config)
    wait_for(lambda: live_rows(site, SAMPLES) and len(live_rows(site, RUNNING)) == 2, "all is running")
    return program


def kill_the_recorder(site):
    """Kill the recorder once it has written something, and return its process id."""
    samples = len(live_rows(site, SAMPLES))
    wait_for(lambda: len(live_rows(site, SAMPLES)) > samples and site.recorders(), "the recorder is at work")
    (recorder,) = site.recorders()
    recorder.kill()
    wait_for(lambda: recorder.pid not in [other.pid for other in site.recorders()], "it is dead")
    return int(recorder.pid)


@both_modes
def test_a_killed_wrapper_is_published_by_its_recorder_and_the_next_run_does_what_is_left(site, mode):
    """Publishing is so rare that what is in the file afterwards can only be the recorder's work."""
    program = start(site, 10, mode=mode, publish_every_s=600)
    done_now = "SELECT 1 FROM chunk WHERE status = 'done'"
    wait_for(lambda: len(live_rows(site, done_now)) >= 2 and live_rows(site, RUNNING), "half way")
    program.kill()
    wait_for(lambda: not site.processes(), "recorder and workers are gone", timeout_s=40)
    database = site.task_database()
    assert rows(database, "PRAGMA integrity_check") == [("ok",)]
    assert rows(database, "SELECT verdict, exit_code, ended_at_ms > started_at_ms FROM task") == [("killed", None, 1)]
    done = rows(database, "SELECT chunk_id, detections FROM chunk WHERE status = 'done'")
    heard = dict(rows(database, "SELECT chunk_id, count(*) FROM detection GROUP BY 1"))
    assert (len(done) >= 2, heard) == (True, {chunk_id: many for chunk_id, many in done if many})
    cut_short = """SELECT DISTINCT c.status, a.ended_at_ms FROM attempt a JOIN chunk c USING (recording_id, chunk_id)
                   WHERE a.outcome IS NULL"""
    assert rows(database, cut_short) == [("pending", None)]
    last = "SELECT count(DISTINCT device_id), max(at_ms) >= (SELECT max(started_at_ms) FROM attempt) FROM sample"
    assert rows(database, last) == [(2, 1)], "the telemetry up to the kill is in the same file"
    assert list(site.local.iterdir()) == live_folders(site) == []
    files = {path.name for path in site.out.rglob("*") if path.is_file()} - {"job.sqlite", "report.html"}
    assert files == {"run.toml", database.name, f"{database.stem}.log"}

    again = site.run(site.folder / "manifest.csv", *ENGINE, "--json")
    assert again.json["chunks"] == {"done": 10 - len(done), "skipped": len(done)}, again.stderr
    job = site.merged()
    assert rows(job, STATES) == [("done", 10)]
    assert rows(job, "SELECT count(*) FROM attempt WHERE outcome = 'done'") == [(10,)], "each was done once"
    heard = dict(rows(job, "SELECT chunk_id, count(*) FROM detection GROUP BY 1"))
    assert heard == {f"c{i:03d}": i % 3 for i in range(10) if i % 3}
    assert rows(job, "SELECT verdict FROM task ORDER BY verdict") == [("done",), ("killed",)]


@both_modes
def test_a_node_that_dies_loses_at_most_what_was_not_published_yet(site, mode):
    """All processes at once, and the node's disk with them; what stays in the run folder is no task database."""
    gate, heard = site.folder / "gate", 'echo start_time,end_time,label,score > "$2"'
    text = f"while [ ${{BADCJOBS_CHUNK_ID#c}} -ge 2 ] && [ ! -e {gate} ]; do sleep 0.02; done\n{heard}"
    engine = ("--command", f"{site.script('gated.sh', text)} {{input}} {{output}}", "--simulate", 2)
    start(site, 8, mode=mode, engine=engine)
    wait_for(lambda: site.task_databases() and site.count("chunk", "status = 'done'") >= 2, "it is published")
    wait_for(lambda: site.count("sample"), "samples are published")
    everybody = site.processes()
    for process in everybody:
        with suppress(psutil.NoSuchProcess):  # a short one may end by itself
            process.suspend()
    known = {row for folder in live_folders(site) for half in halves(folder) for row in committed(half, SAMPLES)}
    for process in everybody:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    wait_for(lambda: not site.processes(), "everybody is gone")
    rescued = site.badcjobs("merge", *live_folders(site), "-o", site.folder / "rescued.sqlite")
    assert rescued.exit_code == 0, rescued.stdout
    for folder in site.local.iterdir():
        shutil.rmtree(folder)
    assert len(live_folders(site)) == (mode == "shared")
    assert rows(site.task_database(), "PRAGMA integrity_check") == [("ok",)]
    lost = known - set(rows(site.task_database(), SAMPLES))
    newest_ms = max(at_ms for at_ms, _ in known)
    assert newest_ms - min((at_ms for at_ms, _ in lost), default=newest_ms) < 5000, "published every 0.1 s"
    assert rows(site.merged(), "SELECT count(*) FROM task") == [(1,)]
    gate.touch()
    again = site.run(site.folder / "manifest.csv", *engine, "--config", f"run.live_mode={mode}")
    assert again.exit_code == 0, again.stderr
    assert rows(site.merged(), STATES) == [("done", 8)]


def test_a_recorder_that_is_restarted_while_work_waits_still_reports_an_idle_device(site):
    idle = "".join(f"[[device]]\nindex = {n}\nload = [[0, 0]]\n" for n in range(2))
    (site.folder / "idle.toml").write_text(idle)
    (site.folder / "lab.toml").write_text("[alerts]\nidle_s = 4\n")
    files = ("--simulate", site.folder / "idle.toml", "--config", site.folder / "lab.toml")
    program = start(site, 60, engine=(*ENGINE[:-2], *files))
    alerts = "SELECT device_id FROM alert WHERE kind = 'idle'"
    assert live_rows(site, alerts) == []
    kill_the_recorder(site)
    wait_for(lambda: live_rows(site, alerts) or not program.running, "an alert")
    program.send(signal.SIGTERM)
    assert program.wait().exit_code == 75 and len(site.rows(alerts)) == 2


@both_modes
def test_a_killed_worker_costs_a_retry_and_a_killed_recorder_a_gap_and_a_stopped_wrapper_nothing(site, mode):
    """A recorder that is killed a second time is given up, but never the run."""
    program = start(site, 12, mode=mode, publish_every_s=600)
    program.send(signal.SIGSTOP)  # as in a suspended job: it is not dead
    before = len(live_rows(site, SAMPLES))
    wait_for(lambda: len(live_rows(site, SAMPLES)) > before + 6, "the recorder goes on")
    program.send(signal.SIGCONT)
    victim = site.workers()[0]
    victim.kill()
    assert kill_the_recorder(site) != kill_the_recorder(site)
    wait_for(lambda: "continues without telemetry" in program.stderr, "it was given up")
    written = set(live_rows(site, SAMPLES))
    done = program.wait()
    assert done.exit_code == 0, done.stderr
    assert "restarting it" in done.stderr and "telemetry incomplete" in done.stdout
    reported = "SELECT verdict, exit_code, (SELECT value FROM meta WHERE key = 'live_mode') FROM task"
    assert site.rows(reported) == [("done", 0, mode)]
    assert ("safe mode" in done.stderr) == (mode == "shared")
    assert site.rows(STATES) == [("done", 12)]
    ((chunk_id, *why),) = site.rows("SELECT chunk_id, try_number, error_class FROM attempt WHERE outcome = 'lost'")
    assert why == [1, "worker_died"]
    assert site.rows("SELECT outcome FROM attempt WHERE chunk_id = ? AND try_number = 2", chunk_id) == [("done",)]
    assert site.rows("SELECT exit_code FROM worker WHERE pid = ?", victim.pid) == [(-9,)]
    assert site.count("worker") == 3, "a new worker has taken its place"
    assert site.rows("SELECT sum(detections) FROM chunk") == [(site.count("detection"),)]
    assert written <= set(site.rows(SAMPLES))
    first, second = site.rows(f"SELECT from_ms, to_ms, device_id, metric, reason FROM gap WHERE {NOT_LATE} ORDER BY 1")
    assert first[2:] == (None, None, "the recorder died and was restarted")
    assert site.rows("SELECT count(*), count(DISTINCT pid) FROM recorder") == [(2, 2)], "each has a row of its costs"
    around = "SELECT sum(at_ms <= ?1) > 0, sum(at_ms > ?1 AND at_ms < ?2), sum(at_ms >= ?2) > 0 FROM sample"
    assert site.rows(around, first[0], first[1]) == [(1, 0, 1)]
    last = "SELECT max(at_ms) = ?, (SELECT ended_at_ms FROM task) - ? < 1000 FROM sample"
    assert (site.rows(last, second[0], second[1]), "recorder" in second[4]) == ([(1, 1)], True), "to the end"
    assert sorted(path.suffix for path in (site.out / "tasks").iterdir()) == [".log", ".sqlite"]
    assert list(site.local.iterdir()) == []


def start_gated(site):
    """Start a run whose one chunk is done, and who is named in it killed, once there is a file gate."""
    gate, heard = site.folder / "gate", 'echo start_time,end_time,label,score > "$2"'
    text = f"while [ ! -e {gate} ]; do sleep 0.02; done\n{heard}\n[ ! -s {gate} ] || kill -9 $(cat {gate})"
    command = f"{site.script('gated.sh', text)} {{input}} {{output}}"
    return site.start_run(site.manifest(1), "--command", command, "--simulate", 1)


def test_a_recorder_file_that_cannot_be_read_costs_the_telemetry_and_not_the_results(site):
    program = start_gated(site)
    kill_the_recorder(site)
    kill_the_recorder(site)
    wait_for(lambda: "continues without telemetry" in program.stderr, "it was given up")
    (recorder_file,) = site.local.glob("*/recorder.sqlite")
    recorder_file.with_name("recorder.sqlite-wal").unlink(missing_ok=True)
    recorder_file.write_bytes(b"a disk that went bad" * 500)
    (site.folder / "gate").touch()
    done = program.wait()
    assert done.exit_code == 0, done.stderr
    assert site.rows("SELECT verdict, exit_code FROM task") == [("done", 0)]
    assert site.count("gap") > 0
    assert rows(site.merged(), STATES) == [("done", 1)]


def test_a_recorder_that_dies_with_the_last_chunk_leaves_a_gap_too(site):
    """There may be no time to start it again."""
    program = start_gated(site)
    wait_for(lambda: site.count_now("sample") >= 2, "the recorder is at work")
    (recorder,) = site.recorders()
    (site.folder / "new").write_text(str(recorder.pid))
    (site.folder / "new").rename(site.folder / "gate")
    assert program.wait().exit_code == 0
    ended_ms = site.rows("SELECT ended_at_ms FROM attempt")[0][0]
    ((from_ms, to_ms),) = site.rows(f"SELECT from_ms, to_ms FROM gap WHERE {NOT_LATE}")
    assert from_ms <= ended_ms <= to_ms
    assert site.count("sample", f"at_ms = {from_ms}") == 1, "a gap starts with the last reading before it"


def beginning_with(site, code):
    """Return the environment of a Python that runs this code first."""
    install(site.folder / "first" / "sitecustomize.py", code)
    return {"PYTHONPATH": os.pathsep.join([str(site.folder / "first"), site.environ()["PYTHONPATH"]])}


def test_a_recorder_that_cannot_start_is_a_gap_as_long_as_the_task(site):
    ends = "    os.write(2, b'no recorder today')\n    os._exit(1)\n"
    code = f"import os, sys\nif any('recorder_process' in word for word in sys.orig_argv):\n{ends}"
    done = site.run(site.manifest(3), *ENGINE, env=beginning_with(site, code))
    assert done.exit_code == 0, done.stderr
    assert "telemetry incomplete: the recorder exited with 1: no recorder today" in done.stdout
    gap = "SELECT g.from_ms = t.started_at_ms, g.to_ms - t.ended_at_ms < 1000 FROM gap g, task t"
    assert (site.rows(gap), site.rows(STATES)) == ([(1, 1)], [("done", 3)])


def test_a_recorder_that_hangs_holds_up_the_end_for_seconds_and_not_for_ever(site):
    """Drivers do hang; the wrapper waits for an answer of the recorder only with a limit."""
    program = start(site, 8)
    (recorder,) = site.recorders()
    recorder.suspend()
    done = program.wait(timeout_s=90)
    assert done.exit_code == 0, done.stderr
    assert "telemetry incomplete: the recorder did not answer" in done.stdout
    assert site.rows(STATES) == [("done", 8)]
    assert site.rows("SELECT max(at_ms) = (SELECT max(from_ms) FROM gap) FROM sample") == [(1,)]
    assert list(site.local.iterdir()) == []


@both_modes
def test_live_files_are_removed_as_soon_as_they_are_published_and_not_after_the_recorders_exit(site, mode):
    """Slurm kills wrapper and recorder at once; what they leave on a node then stays there."""
    code = "import atexit, sys, time\nif any('recorder_process' in word for word in sys.orig_argv):\n"
    env = beginning_with(site, f"{code}    atexit.register(time.sleep, 60)\n")
    program = site.start_run(site.manifest(2), *ENGINE, "--config", f"run.live_mode={mode}", env=env)
    ended = "SELECT verdict FROM task WHERE verdict IS NOT NULL"
    wait_for(lambda: site.rows(ended) and not live_folders(site), "the end is published, and the live files are gone")
    both = [program.pid, *(recorder.pid for recorder in site.recorders())]
    for pid in both:
        os.kill(pid, signal.SIGKILL)
    assert (len(both), program.wait().exit_code) == (2, -9), "neither had exited"
    assert site.rows(ended) == [("done",)]


# A chunk's program with a child, and with a daemon that has left its session; none of them hears TERM.
PROGRAM = """trap '' TERM
setsid sh -c 'touch {folder}/up-$BADCJOBS_CHUNK_ID; exec sleep 300' &
sleep 300 &
while [ ! -e {folder}/finish ]; do sleep 0.05; done
kill %1 %2 2> /dev/null
echo start_time,end_time,label,score > "$2"
"""
# What no test can make happen from outside: an error that no one has thought of, in the middle of the wrapper's work.
BUG = """
import ctypes, os, sys, threading, time
def strike(main):
    while not os.path.exists("bug"):
        time.sleep(0.02)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(RuntimeError))
if "run" in sys.orig_argv:
    threading.Thread(target=strike, args=(threading.main_thread().ident,), daemon=True).start()
"""
ENDS = {"SIGTERM": (75, "stopped"), "SIGINT": (130, "stopped"), "SIGHUP": (75, "stopped"), "SIGKILL": (-9, "killed")}


def start_programs(site, **env):
    """Start a run on two devices, and wait until both have a chunk's program, its child and its daemon."""
    script = site.script("program.sh", PROGRAM.format(folder=site.folder))
    options = ("--command", f"{script} {{input}} {{output}}", "--simulate", 2, "--config", "run.grace_s=0")
    program = site.start_run(site.manifest(4), *options, env=env)
    wait_for(lambda: len(list(site.folder.glob("up-*"))) == 2 and site.count_now("sample"), "all are up")
    wait_for(lambda: len(site.processes("sleep 300")) == 4, "children and daemons are there")
    return program


@pytest.mark.parametrize("end", [*ENDS, "a bug"])
def test_nobody_outlives_a_wrapper(site, end):
    (site.out / "tasks").mkdir(parents=True)
    (site.out / "tasks" / "4821_0.r0.gpu-01.log").touch()  # this is the second run in one job
    program = start_programs(site, **array_task(0, (0,)), CUDA_VISIBLE_DEVICES="0,1", **beginning_with(site, BUG))
    if end == "a bug":
        (site.folder / "bug").touch()
    else:
        program.send(signal.Signals[end])
    ended = program.wait()
    exit_code, verdict = ENDS.get(end, (70, "killed"))
    assert (ended.exit_code, "RuntimeError" in ended.stderr) == (exit_code, end == "a bug"), ended.stderr
    wait_for(lambda: not site.processes(), "everybody is gone", timeout_s=40)
    assert site.rows("PRAGMA integrity_check") == [("ok",)]
    assert site.rows("SELECT verdict, name FROM task") == [(verdict, "4821_0.r1.gpu-01")]
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY 1") == [("pending", 4)]


def test_no_worker_outlives_wrapper_and_recorder_killed_at_once_and_the_next_run_ends_the_rest(site):
    program = start_programs(site)
    (recorder,) = site.recorders()
    recorder.kill()
    program.kill()
    wait_for(lambda: not site.processes("program.sh"), "the workers died with their wrapper", timeout_s=40)
    assert not site.recorders()
    (site.folder / "finish").touch()
    again = site.run(site.folder / "manifest.csv", "--command", f"{site.folder}/program.sh {{input}} {{output}}",
                     "--simulate", 2, "--config", "run.grace_s=0")  # fmt: skip
    assert again.exit_code == 0, again.stderr
    wait_for(lambda: not site.processes(), "what they had started is ended, too", timeout_s=40)
    assert rows(site.task_databases()[0], "SELECT verdict FROM task") == [("killed",)]
    assert list(site.local.iterdir()) == [], "and nothing of theirs stays on the node"


def test_a_hawkears_that_is_killed_while_it_is_asked_for_its_abilities_is_asked_again(tmp_path):
    killed = tmp_path / "killed"
    text = f'#!/bin/sh\n[ -e {killed} ] || {{ touch {killed}; kill -9 $$; }}\nexec {sys.executable} "$@"\n'
    python = install(tmp_path / "python", text)
    environ = {"PATH": os.environ["PATH"], **fake_package_environ()}
    root = make_fake_root(tmp_path / "root")
    start = EngineStart((), environ, Launcher("test"), SystemClock())
    answer = HawkEarsEngine(start, str(python), root).query(())
    assert killed.exists() and answer.get("versions", {}).get("hawkears") == "2.3.0", answer


def test_by_default_workers_are_forked_as_many_as_the_memory_holds_and_replaced_at_once(site):
    """Who is killed costs no more than the chunks in hand: a worker, and the parent, with which all workers end."""
    slow = {"FAKE_HAWKEARS_S": "0.2", "FAKE_HAWKEARS_IMPORT_S": "4", **fake_package_environ()}
    granted = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_CPUS_PER_TASK": "4", "SLURM_MEM_PER_NODE": "4096"}
    options = ("--simulate", 1, "--config", "run.backoff_s=0.05", "--config", "run.publish_every_s=600")
    words = (site.manifest(90), "--out", site.out, *hawkears_options(site.folder), *options)
    task = site.start("run", *words, env={**array_task(0, (0,)), **granted, **slow})

    def workers(forked_from):
        return processes(lambda one: one.ppid() == int(forked_from) and "--parent" in one.cmdline())

    def parents():
        return re.findall(r"forked from process (\d+), which has imported HawkEars", task.stderr)

    wait_for(lambda: site.count_now("chunk", "status = 'done'") > 4, "both are at work")
    (first,) = parents()
    killed, kept = workers(first)
    killed.kill()
    died_ms = SystemClock().now_ms()
    new = "SELECT a.started_at_ms FROM attempt a JOIN worker w USING (worker_id) WHERE w.started_at_ms >= ?"
    ((works_ms,), *_) = wait_for(lambda: site.now(new, died_ms), "another worker")
    assert works_ms - died_ms < 3000, "it imports nothing"
    assert kept in workers(first) and len(workers(first)) == 2
    psutil.Process(int(first)).kill()
    done = task.wait()
    assert done.exit_code == 0, done.stderr
    said = "workers are started one by one, not forked: the process that forks workers has ended"
    assert (done.stderr.count(said), len(parents())) == (1, 1)
    assert site.rows(STATES) == [("done", 90)]
    assert site.count("attempt", "outcome = 'done'") == 90, "and none twice"
    sql = "SELECT code, figures ->> 'workers', figures ->> 'before_memory' FROM decision WHERE code LIKE 'workers.%'"
    assert site.rows(sql)[0] == ("workers.start_as_memory_holds", 2, 4)


def test_a_signal_while_hawkears_is_imported_ends_the_task_at_once(site):
    """An import may take minutes."""
    slow = {"FAKE_HAWKEARS_S": "0.2", "FAKE_HAWKEARS_IMPORT_S": "10", **fake_package_environ()}
    words = (site.manifest(90), "--out", site.out, *hawkears_options(site.folder), "--simulate", 1)
    words = (*words, "--workers-per-gpu", 2, "--config", "run.grace_s=0")
    task = site.start("run", *words, env={**slow, "CUDA_VISIBLE_DEVICES": "0"})

    def parents():
        return processes(lambda one: "--parent" in one.cmdline() and one.ppid() == task.pid)

    wait_for(parents, "it imports")
    task.send(signal.SIGTERM)
    began_s = SystemClock().monotonic_s()
    assert task.wait().exit_code == 75, task.stderr
    assert SystemClock().monotonic_s() - began_s < 8, "it does not wait for the import"
    assert (site.processes(), list(site.local.iterdir())) == ([], [])
