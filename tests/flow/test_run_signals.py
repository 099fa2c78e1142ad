"""Warnings, TERM, Ctrl-C and the end of the time: what is running comes to its end, the rest is for the next run.

By hand, 50 deadlines: pytest tests/flow/test_run_signals.py --count 100 -s
"""

import json
import random
import re
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from rooms.store import read_job
from support.audio import make_wav
from support.badcjobs_program import MANIFEST_HEADER, ON_CPU, Site, array_task, assert_refused, rows
from support.slow_files import slow_files, somebody_waits
from support.task_files import merge_run
from support.waiting import wait_for

CHUNKS = 6


class Stage:
    """A run on two devices whose chunks wait until the test lets them finish."""

    def __init__(self, site, *args, chunks=CHUNKS):
        self.site, self.gate = site, site.folder / "gate"
        self.gate.unlink(missing_ok=True)
        gated = f'while [ ! -e {self.gate} ]; do sleep 0.02; done\necho start_time,end_time,label,score > "$2"'
        script = site.script("gated.sh", f'[ "$BADCJOBS_CHUNK_ID" = bad ] && exit 1\n{gated}')
        manifest = site.manifest(chunks)
        manifest.write_text(manifest.read_text().replace("rec0,c000", "rec0,bad"))
        self.command = ("--command", f"{script} {{input}} {{output}}", "--simulate", 2, "--retries", 0, *args)
        self.program = site.start_run(manifest, *self.command)
        bad = "outcome = 'failed'"
        wait_for(lambda: site.count_now("attempt", bad) and self.running == len(self.programs()) == 2, "two run")

    @property
    def running(self):
        return self.site.count_now("attempt", "ended_at_ms IS NULL")

    def programs(self):
        """Return the programs of the chunks; the wrapper has their name on its command line, too."""
        return [process for process in self.site.processes("gated.sh") if process.name() == "gated.sh"]

    def send(self, signum):
        self.program.send(signum)
        wait_for(lambda: f"{signum.name}: starting nothing new" in self.program.stderr, f"{signum.name} was heard")

    def finish(self):
        """Let the running chunks finish and wait for the end of the run."""
        self.gate.touch()
        return self.program.wait()

    def assert_left(self, exit_code, outcomes, verdict="stopped"):
        """Check the last state of the task; the bad chunk has failed in any case."""
        assert self.site.rows("SELECT verdict, exit_code FROM task") == [(verdict, exit_code)]
        assert self.site.rows("SELECT outcome, count(*) FROM attempt GROUP BY 1") == outcomes
        assert self.site.processes() == []
        assert list(self.site.local.iterdir()) == []


def test_running_chunks_finish_and_the_next_run_does_exactly_what_is_left(site):
    stage = Stage(site)
    stage.send(signal.SIGTERM)
    stage.program.send(signal.SIGTERM)  # twice in the same breath is one message
    stopped = stage.finish()
    assert stopped.exit_code == 75, stopped.stderr
    assert "run the same command again" in stopped.stdout and "bad" in stopped.stdout
    stage.assert_left(75, [("done", 2), ("failed", 1)])
    again = site.run(site.folder / "manifest.csv", *stage.command, "--json")
    assert (again.exit_code, again.json["chunks"]) == (1, {"done": 3, "failed": 1, "skipped": 2})
    job = site.merged()
    assert rows(job, "SELECT status, count(*) FROM chunk GROUP BY 1") == [("done", 5), ("failed", 1)]
    assert rows(job, "SELECT count(*), count(DISTINCT chunk_id) FROM attempt") == [(7, 6)]


def test_a_stop_that_comes_when_all_that_is_left_is_running_is_no_stop(site):
    """And TERM to the programs of chunks is not held against them: they are started again."""
    stage = Stage(site, chunks=3)
    for program in stage.programs():
        program.terminate()
    wait_for(lambda: site.count_now("attempt") == 5 and len(stage.programs()) == 2, "both are running again")
    stage.send(signal.SIGTERM)
    assert stage.finish().exit_code == 1
    stage.assert_left(1, [(None, 2), ("done", 2), ("failed", 1)], "failed")


def test_a_second_ctrl_c_stops_at_once_and_a_term_after_a_warning_when_its_grace_is_over(site):
    stage = Stage(site)
    stage.send(signal.SIGINT)
    stage.program.send(signal.SIGINT)
    assert stage.program.wait().exit_code == 130
    stage.assert_left(130, [(None, 2), ("failed", 1)])
    site.out = site.folder / "warned"
    stage = Stage(site, "--config", "run.grace_s=0")
    stage.send(signal.SIGUSR1)
    samples = site.count_now("sample")
    wait_for(lambda: site.count_now("sample") > samples + 4, "time goes by")
    assert stage.running == 2
    stage.program.send(signal.SIGTERM)
    assert stage.program.wait().exit_code == 75
    stage.assert_left(75, [(None, 2), ("failed", 1)])


def test_term_to_every_process_of_the_job_loses_no_chunk_and_no_telemetry(site):
    program = site.start_run(site.manifest(CHUNKS), "--engine", "demo", "--engine-arg=--burn-s=0.8", "--simulate", 2)
    running = "ended_at_ms IS NULL"
    wait_for(lambda: site.count_now("sample") and site.count_now("attempt", running) == 2, "two chunks run")
    sent_ms = time.time() * 1000
    for process in site.processes():
        process.terminate()
    stopped = program.wait()
    assert stopped.exit_code == 75, stopped.stderr
    assert site.count("attempt", "outcome IS NOT 'done'") == 0
    assert site.count("chunk", "status = 'done'") >= 2
    assert site.gaps() == [], "the recorder must not obey it either"
    assert site.count("sample", f"at_ms > {sent_ms}") > 0


def test_a_signal_before_the_work_has_begun_ends_it_with_nothing_started(site):
    """During a long listing; and while a filesystem does not answer."""
    manifest = site.manifest(2)
    header, row = manifest.read_text().splitlines()[:2]
    recording, _, *rest = row.split(",")
    lines = (",".join((recording, f"n{number}", *rest)) for number in range(200_000))
    manifest.write_text("\n".join([header, *lines]) + "\n")
    program = site.start_run(manifest, *ON_CPU)
    wait_for(lambda: list(site.out.glob("tasks/*.log")), "the listing to begin")
    program.send(signal.SIGTERM)
    assert_refused(program.wait(60), 75, "SIGTERM arrived before any work was started")
    assert (site.out.exists(), list(site.local.iterdir())) == (False, [])
    for number in range(40):
        make_wav(site.folder / "audio" / f"{number}-slow.wav", 1, 100)
    program = site.start_run(site.folder / "audio", *ON_CPU, env=slow_files(site))
    wait_for(lambda: somebody_waits(site), "a listing that reads a header")
    program.send(signal.SIGINT)
    assert_refused(program.wait(60), 130, "SIGINT arrived before any work was started")
    assert not site.out.exists()


def test_a_task_asks_for_its_end_and_stops_before_it_with_nothing_killed(site):
    slow = ("--engine", "demo", "--cpu-workers", 2, "--no-emit-gpu-telemetry", "--engine-arg=--burn-s=0.3")
    squeue = site.script("squeue", f'echo "$*" >> {site.folder}/asked\necho $(($(date +%s) + 4))')
    env = {**array_task(0, (0,)), "PATH": f"{squeue.parent}:{site.environ()['PATH']}"}
    manifest = site.manifest(60)
    stopped = site.run(manifest, *slow, env=env)
    assert stopped.exit_code == 75, stopped.stderr
    assert re.search(r"time: until \d{4}-\d\d-\d\d \d\d:\d\d UTC, [234]\.\d s from now \(squeue\)", stopped.stderr)
    assert "the time limit is near; run the same command again" in stopped.stdout
    assert (site.folder / "asked").read_text() == "-h -j 4821_0 -o %e\n", "once"
    assert site.rows("SELECT verdict, exit_code, ended_at_ms - started_at_ms < 5000 FROM task") == [("stopped", 75, 1)]
    ((done, left),) = site.rows("SELECT sum(status = 'done'), sum(status = 'pending') FROM chunk")
    assert (done >= 1, done + left) == (True, 60)
    assert site.rows("SELECT outcome, count(*) FROM attempt GROUP BY 1") == [("done", done)], "killed in flight"
    late = site.run(manifest, *slow, "--config", "run.stop_after=0", env=array_task(0, (0,), job_id=4900))
    assert late.exit_code == 75, "without any time nothing is started"
    assert site.count("worker", "task_id = (SELECT task_id FROM task WHERE job_id = '4900')") == 0
    env = {**array_task(0, (0,), job_id=5000), "PATH": "/usr/bin:/bin"}
    left = site.run(manifest, *slow, "--shard", "0/30", env=env)
    assert (left.exit_code, "time: no time limit is known" in left.stderr) == (0, True)


ENDS = ("stop-after", signal.SIGTERM, "stop-after", signal.SIGUSR1, "stop-after", signal.SIGUSR2)


def live_through(number, site, chance):
    """Run one emulated deadline, with another end, other devices and chunks of other lengths each time.

    The *last moment* is the one after which a device need not work any more: the signal, or the end of the time less
    what is reserved for publishing and the margin (a tenth of the time each, where it is as short as here). On a busy
    machine all takes longer: by as much as the slowest chunk of the same run took longer than it had to.
    """
    end, devices, after_s = ENDS[number % len(ENDS)], chance.randint(1, 4), chance.uniform(5, 7)
    audio, manifest = site.folder / "a.wav", site.folder / "manifest.csv"
    lines = [MANIFEST_HEADER]
    for count in range(15 * devices):  # the length in the manifest tells, nearly, how long a chunk takes
        chunk_s = chance.uniform(0.3, 1.2)
        chunk_id = f"{count}-{chunk_s * chance.uniform(0.9, 1.1):.3f}"
        lines.append(f"rec,{chunk_id},{audio},0,{round(chunk_s * 100_000)},0,,")
    audio.write_bytes(b"OggS")  # some format that only the engine reads
    manifest.write_text("\n".join(lines) + "\n")
    script = site.script("work.sh", 'sleep ${BADCJOBS_CHUNK_ID#*-}\necho start_time,end_time,label,score > "$2"')
    options = ["--command", f"{script} {{input}} {{output}}", "--simulate", devices, "--no-emit-gpu-telemetry"]
    options += ["--config", f"run.stop_after={after_s / 60:.5f}"] * (end == "stop-after")
    program, signal_ms = site.start_run(manifest, *options), None
    if end != "stop-after":
        wait_for(lambda: site.count_now("chunk", "status = 'done'") >= 2 * devices, "the middle of the work")
        signal_ms = time.time() * 1000
        program.send(end)
    ended = program.wait()
    assert ended.exit_code == 75, ended.stderr
    assert site.rows("SELECT DISTINCT outcome FROM attempt") == [("done",)], "a chunk was killed in flight"
    ((started_ms,),) = site.rows("SELECT started_at_ms FROM task")
    attempts = site.rows("SELECT chunk_id, started_at_ms, ended_at_ms FROM attempt")
    late_ms = max(to_ms - from_ms - 1000 * float(chunk.split("-")[1]) for chunk, from_ms, to_ms in attempts)
    last_ends = [at_ms for (at_ms,) in site.rows("SELECT max(ended_at_ms) FROM attempt GROUP BY device_id")]
    idle_ms = (signal_ms or started_ms + 800 * after_s) - min(last_ends)
    median_ms = statistics.median(to_ms - from_ms for _, from_ms, to_ms in attempts)
    print(f"{number} {end!s}: {devices} devices, {median_ms=:.0f}, {late_ms=:.0f}, {idle_ms=:.0f}")
    assert (len(last_ends), idle_ms <= median_ms + late_ms) == (devices, True), "a device was idle"
    if signal_ms is None:
        assert max(last_ends) <= started_ms + 900 * after_s + late_ms, "a chunk ended in the time for publishing"
    else:
        assert max(from_ms for _, from_ms, _ in attempts) <= signal_ms + 500 + late_ms, "begun after the signal"


@pytest.mark.timeout(0)
def test_nothing_is_killed_in_flight_and_no_device_stands_idle_for_long(tmp_path, seed, pytestconfig):
    count = max(2, pytestconfig.getoption("--count") // 2)
    print(f"\n{count} deadlines")

    def one(number):
        with closing(Site(tmp_path / f"site-{number}")) as site:
            live_through(number, site, random.Random(seed + number))

    with ThreadPoolExecutor(5) as pool:  # side by side: they sleep most of the time
        list(pool.map(one, range(count)))


TWO_CORES = {**array_task(0, (0,)), "SLURM_CPUS_PER_TASK": "2", "CUDA_VISIBLE_DEVICES": "0"}


def test_workers_are_added_while_that_pays_and_the_next_run_begins_where_this_one_ended(site):
    """The work waits more than it computes, as HawkEars does: with each worker more is done."""
    program = site.script("work.sh", 'sleep 0.12\necho start_time,end_time,label,score > "$2"')
    command = f"{program} {{input}} {{output}}"
    work = ("--command", command, "--simulate", 1, "--config", "run.stage=never", "--no-emit-gpu-telemetry")
    work += ("--workers-per-gpu", "auto")
    manifest = site.manifest(1200)
    task = site.start_run(manifest, *work, env={**TWO_CORES, "SLURM_MEM_PER_NODE": "64000"})
    wait_for(lambda: "there are no cores for more" in task.stderr, "no cores for more")
    task.send(signal.SIGTERM)
    assert task.wait().exit_code == 75
    asked = (
        "SELECT code, subject, figures ->> 'workers', reason FROM decision WHERE code LIKE 'workers.%' ORDER BY at_ms"
    )
    *decisions, (*last, why) = site.rows(asked)
    assert decisions == [
        ("workers.start", "Simulated GPU", 1, "start: 2 cores and 16.0 GiB of GPU memory per device"),
        ("workers.try_more", "Simulated GPU", 2, "trying 1 more"),
    ]
    assert last == ["workers.no_cores", "Simulated GPU", 2]
    assert "2 per device changed the rate by +" in why
    assert site.rows("SELECT count(DISTINCT worker_id) FROM attempt") == [(2,)]
    assert site.rows("SELECT workers FROM task") == [(1,)]
    merge_run(site.out)
    assert [task.workers for task in read_job(site.out / "job.sqlite").tasks] == [2], "the last that was chosen"
    for file in (site.out / "learned.json", Path(site.environ()["XDG_CACHE_HOME"]) / "badcjobs" / "learned.json"):
        (lesson,) = json.loads(file.read_text())["lessons"][f"command {command}"].items()
        rates, memory, each = (lesson[1].pop(name) for name in ("rates", "memory_bytes", "worker_bytes"))
        assert memory == 16 * 2**30 and each > 2**20, "memory is watched without telemetry, too"
        assert lesson == ("Simulated GPU, 2 cores, chunks of 10 s", {"workers": 2, "settled": True, "chunk_s": 0.6})
        assert rates.keys() == {"1", "2"} and rates["2"] > 1.05 * rates["1"]
    little = {"SLURM_MEM_PER_NODE": str(round(1.5 * each / 2**20)), "SLURM_RESTART_COUNT": "1"}
    task = site.start_run(manifest, *work, env={**TWO_CORES, **little})
    wait_for(lambda: "workers: 1, engine command" in task.stderr, "the next run")
    task.send(signal.SIGINT)
    assert task.wait().exit_code == 130
    known = "start: an earlier run found 2 to be best; 2 cores and 16,384 MiB of GPU memory per device"
    assert f"{known}; 1 instead of 2: the job has {little['SLURM_MEM_PER_NODE']} MiB of main memory" in task.stderr
