"""Telemetry: of badcjobs record, alone or around any command, and of a run, which writes it beside its results."""

import csv
import getpass
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from rooms.telemetry import RECORDING_MARK, ProcessLookup
from support.badcjobs_program import NOT_LATE, QUICK, array_task, assert_refused, rows
from support.cases import read_data
from support.fake_nvml import no_driver
from support.waiting import wait_for

OFTEN = ("--interval", 0.05)
NO_PROCESS = 2**22 + 17
# As in the contract; what is not known yet is a question mark.
HEARTBEAT = re.compile(
    r"heartbeat cpu=(\d+%|\?) mem=(\d+%|\?) gpu=(\d+%|\?) devices=(\d+(?:/\d+)?) chunks=(\d+)/(\d+)"
    r" rate=(\d+(?:\.\d+)?x|\?) eta=(\d\d:\d\d:\d\d|\?)"
)
SLOWLY = ("--engine", "demo", "--engine-arg=--burn-s=0.3")
BEATS = ("--config", "run.heartbeat_every_s=0.2")
AN_HOUR = """
import re, sys
from pathlib import Path
from rooms.model import METRICS, HostReading, Reading
from rooms.telemetry import TelemetryWriter
def read_peak():
    return int(re.findall(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[0])
writer = TelemetryWriter(Path(sys.argv[1]), 1)
for second in range(3600):
    with writer.batch():
        reading = Reading(**{name: second for name in METRICS})
        writer.write_tick(second * 1000, [(device, reading) for device in range(4)], HostReading(50.0, second, 2**36))
    if second == 60:
        after_a_minute = read_peak()
print(read_peak() - after_a_minute)
"""
SECRET = "/services/T0123/xyzzy"
# Busy with children of its own, as an engine that runs a program for each chunk is.
COMMAND = """python3 -c 'import time
while time.process_time() < 0.5: pass' && printf 'start_time,end_time,label,score\\n' > "$2" """


@pytest.fixture
def out(site):
    return site.folder / "recording.sqlite"


def test_devices_are_recorded_with_their_alerts_and_processes_and_the_recorders_cost(site, out):
    """One process on device 0 is this test, which started the recording but is not below it; one does not exist."""
    processes = f"processes = [[{os.getpid()}, 50], [{NO_PROCESS}, 100]]"
    (site.folder / "load.toml").write_text(
        f"[[device]]\nindex = 0\nload = [[0, 80]]\n{processes}\n"
        '[[device]]\nindex = 1\nload = [[0, 10]]\nlost_at_s = 2.7\nback_at_s = 3.0\nfault = [[2.5, "Xid 31"]]\n'
    )
    site.script("tell", "cat >> reported; echo >> reported; sleep 77")
    (site.folder / "lab.toml").write_text(f'[alerts]\ntemperature_c = 60\ncommand = "./tell {SECRET}"\n')
    options = ("--simulate", "load.toml", "--config", "lab.toml", "--duration", 3.5, *OFTEN)
    done = site.badcjobs("record", "--out", out, *options)
    assert done.exit_code == 0, done.stderr
    recorded = r"badcjobs: 2 devices recorded for \d+\.\d s: .*\nnext: badcjobs --config=lab.toml report "
    assert re.match(recorded, done.stdout)
    assert rows(out, "PRAGMA integrity_check") == [("ok",)]
    assert rows(out, "SELECT verdict, exit_code, engine FROM task") == [("done", 0, None)]
    assert rows(out, f"SELECT reason FROM gap WHERE device_id IS NULL AND {NOT_LATE}") == [], "no call holds it up"
    alerts = """SELECT device_index, kind, severity, message, a.ended_at_ms > a.started_at_ms FROM alert a
                JOIN device USING (device_id) ORDER BY device_index, kind"""
    assert rows(out, alerts) == [
        (0, "thermal", "warning", "device 0 is at 71 °C; the limit is 60 °C", None),
        (1, "fault", "critical", "device 1 reports Xid 31", 1),
        (1, "lost", "critical", "device 1 cannot be read: GPU is lost (simulated)", 1),
    ]
    said = re.findall(r"alert (ended|\(\w+\))", done.stderr)
    assert sorted(said) == ["(fault)", "(lost)", "(thermal)", "ended", "ended"]
    assert json.loads((site.folder / "reported").read_text().splitlines()[0])["kind"] == "thermal"
    assert "alert calls were still running at the end" in done.stderr
    assert not any(b"xyzzy" in path.read_bytes() for path in (out, *site.out.rglob("*.*")))
    ours, unknown = rows(out, "SELECT pid, user, ours, memory_peak_bytes, last_at_ms > first_at_ms FROM process")
    assert unknown == (NO_PROCESS, None, None, 100 * 2**20, 1)
    assert (ours[0], ours[1:3] in ((getpass.getuser(), 0), (None, None))) == (os.getpid(), True)
    cost = "SELECT backend, interval_s, ticks, reading_s > 0, reading_s < cpu_s, memory_bytes < 45 << 20 FROM recorder"
    ((ticks,),) = rows(out, "SELECT count(DISTINCT at_ms) FROM sample")
    assert rows(out, cost) == [("simulated", 0.05, ticks, 1, 1, 1)]
    assert rows(out, "SELECT DISTINCT source FROM metric_source WHERE metric = 'busy_percent'") == [("simulated",)]
    assert list(site.local.iterdir()) == []


def test_an_hour_of_samples_of_four_devices_needs_hardly_more_memory_than_a_minute(out):
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    more_kib = int(subprocess.check_output([sys.executable, "-c", AN_HOUR, str(out)], env=environ))
    assert rows(out, "SELECT count(*) FROM sample") == [(4 * 3600,)]
    assert more_kib < 1024


def test_text_has_a_line_per_device_and_instant(site):
    files = [site.folder / f"recording.{ending}" for ending in ("csv", "jsonl")]
    commands = [("record", "--out", out, "--simulate", 2, "--duration", 0.4, *OFTEN) for out in files]
    assert [done.exit_code for done in site.badcjobs_each(commands)] == [0, 0]
    documents = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert {document["device_index"] for document in documents} == {0, 1}
    with files[0].open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["device_index"] for line in lines} == {"0", "1"}
    assert [site.badcjobs("report", file).stdout.split("\n")[0] for file in files] == [
        "recording.csv: recorded", "recording.jsonl: recorded"
    ]  # fmt: skip


def test_samples_are_streamed_until_their_reader_is_gone_the_command_ends_or_the_disk_is_full(site):
    around, timed = site.badcjobs_each([
        ("record", "--out", "-", "--simulate", 2, *OFTEN, "--", "sh", "-c", "echo its own; sleep 0.3; exit 7"),
        ("record", "--out", "-", "--simulate", 1, "--duration", 0.5, "--interval", 0.1),
    ])  # fmt: skip
    lines = [json.loads(line) for line in around.stdout.splitlines()]
    assert ({line["device_index"] for line in lines}, around.exit_code, "its own" in around.stderr) == ({0, 1}, 7, True)
    times_ms = [json.loads(line)["at_ms"] for line in timed.stdout.splitlines()]
    assert (timed.exit_code, 2 <= len(times_ms) <= 6) == (0, True)
    assert all(later - earlier >= 50 for earlier, later in pairwise(times_ms))
    argv = [sys.executable, "-m", "badcjobs", "record", "--out", "-", "--simulate", "1", "--interval", "0.05"]
    pipes = {"stderr": subprocess.PIPE, "env": site.environ(), "cwd": site.folder}
    for ends, code in (("reader", 0), ("signal", 0), ("disk", 4)):
        with (
            Path("/dev/full").open("wb") as full,
            subprocess.Popen(argv, stdout=full if ends == "disk" else subprocess.PIPE, **pipes) as one,
        ):
            if ends != "disk":
                assert json.loads(one.stdout.readline())["uuid"]
                one.stdout.close() if ends == "reader" else one.send_signal(signal.SIGINT)
            assert (one.wait(60), b"Traceback" in one.stderr.read()) == (code, False), ends
    assert_refused(site.badcjobs("record", "--out", "-"), 3, "there is no GPU to record", "--simulate 2")


def test_a_commands_options_output_and_exit_code_are_its_own_also_without_a_gpu(site, out):
    busy = "python3 -c 'import time\nwhile time.process_time() < 1.2: pass'"
    site.script("said.sh", f"echo $*; {busy}; exit 3")
    bad, record, simulated = site.folder / "bad.sqlite", ("record", *OFTEN, "--out"), ("--simulate", 1, "--")
    first, killed, missing, without = site.badcjobs_each([
        (*record, "bad.sqlite", *simulated, "./said.sh", "--out", "x", "--json", "-v"),
        (*record, "killed.sqlite", *simulated, "sh", "-c", "kill -9 $$"),
        (*record, "missing.sqlite", *simulated, "no-such-program"),
        (*record, out, "--", "sh", "-c", "sleep 0.3; exit 5"),
    ], [{}, {}, {}, no_driver()])  # fmt: skip
    assert (first.exit_code, first.stdout) == (3, "--out x --json -v\n")
    assert "1 device recorded" in first.stderr and first.stderr.endswith("\nnext: badcjobs report bad.sqlite\n")
    assert rows(bad, "SELECT exit_code, verdict FROM task") == [(3, "failed")]
    used = rows(bad, "SELECT at_ms, cpu_cores, processes FROM usage_sample ORDER BY at_ms")
    assert sum(later[1] * (later[0] - sooner[0]) / 1000 for sooner, later in pairwise(used)) > 0.9, "seconds of CPU"
    assert max(processes for *_, processes in used) >= 2
    assert rows(site.folder / "killed.sqlite", "SELECT exit_code, verdict FROM task") == [(137, "failed")]
    assert (killed.exit_code, missing.exit_code, without.exit_code) == (137, 127, 5)
    assert "no-such-program" in missing.stderr and "Traceback" not in missing.stderr
    assert "no GPU to record" in without.stderr
    assert rows(out, "SELECT count(*) > 0, (SELECT count(*) FROM sample) FROM host_sample") == [(1, 0)]
    merged, document = site.badcjobs_each([("merge", bad, "--out", "merged/job.sqlite"), ("report", bad, "--json")])
    assert merged.stdout.startswith("merged: 1 task failed\n")
    assert (document.json["verdict"], document.json["tasks_by_verdict"]) == ("failed", {"failed": 1})
    assert not (site.folder / "job.sqlite").exists(), "report writes nothing"


def test_what_cannot_be_recorded_is_refused_before_the_command(site, out, pages):
    wrong = "[alert]\n[alerts]\ntemprature_c = 60\nmemory_percent = -1\npower_percent = 101\n"
    (site.folder / "wrong.toml").write_text(wrong)
    (site.folder / "open.toml").write_text(f'[alerts]\ncommand = "\'tell {SECRET}"\n')
    assert site.badcjobs("record", "--out", out, "--simulate", 1, "--duration", 0.1).exit_code == 0
    before = out.read_bytes()
    commands = read_data("record_commands.txt").format(out=out).splitlines()[2:]
    environs = [{**no_driver(), "PATH": "/nowhere"} if "--simulate" not in one else {} for one in commands]
    outcomes = site.badcjobs_each([("record", *one.split()) for one in commands], environs)
    both = zip(commands, outcomes, strict=True)
    said = [f"$ badcjobs record {one}\n{done.stdout}{done.stderr}exit code {done.exit_code}\n" for one, done in both]
    has_amd = "there is an AMD GPU, but the Python package amdsmi is not installed (pip install 'badcjobs[amd]')"
    text = "\n".join(said).replace(f"{site.folder}/", "").replace(str(site.folder), ".").replace(has_amd, "no AMD GPU")
    assert "xyzzy" not in text
    pages({"refused.txt": text})
    assert not [name for name in ("ran", "new.sqlite") if (site.folder / name).exists()]
    assert out.read_bytes() == before
    assert site.badcjobs("record", "--out", out, "--simulate", 1, "--duration", 0.1, "--force").exit_code == 0
    assert out.read_bytes() != before


def test_ctrl_c_ends_a_recording_well_and_term_is_passed_on(site, out):
    script = f"trap 'exit 7' TERM; touch {site.folder}/up; while :; do sleep 0.02; done"
    alone = site.start("record", "--out", out, "--simulate", 1, *OFTEN)
    around = site.start("record", "--out", "around.sqlite", "--simulate", 1, "--", "sh", "-c", script)
    late = ("--out", "late.sqlite", "--simulate", 1, "--duration", 0.3, "--", "sleep", 60)
    assert site.badcjobs("record", *late, timeout_s=40).exit_code == 143
    wait_for(lambda: (site.folder / "up").exists() and site.count_now("sample") > 2, "both record")
    alone.send(signal.SIGINT)
    around.send(signal.SIGTERM)
    assert (alone.wait().exit_code, around.wait().exit_code) == (0, 7)
    assert rows(out, "SELECT verdict FROM task") == [("done",)]


def test_a_killed_recording_leaves_its_file_and_what_the_command_left_running(site, out):
    """A process that has left its parents behind is known by its environment."""
    script = site.script("detach.sh", f"(setsid sleep 60 & echo $! > {site.folder}/pid.new)\n"
                         f"mv {site.folder}/pid.new {site.folder}/pid\nsleep 60")  # fmt: skip
    program = site.start("record", "--out", out, "--simulate", 2, *OFTEN, "--", script)
    wait_for(lambda: (site.folder / "pid").exists() and site.count_now("sample") >= 8, "the command runs")
    pid = int((site.folder / "pid").read_text())
    (order,) = site.local.glob("*/recorder.json")
    mark = json.loads(order.read_text())["mark"]
    lookup = ProcessLookup(wrapper_pid=program.pid, marks=[f"{RECORDING_MARK}={mark}"])
    assert lookup.look_up(pid).ours is True
    program.kill()
    wait_for(lambda: rows(out, "SELECT verdict FROM task") == [("killed",)] and not site.recorders(), "it is published")
    assert rows(out, "PRAGMA integrity_check") == [("ok",)]
    assert rows(out, "SELECT count(*) >= 8 FROM sample") == [(1,)]
    left = site.processes("sleep")
    assert pid in [process.pid for process in left], "the work goes on without its recorder"
    for process in (*left, *site.processes("detach.sh")):
        process.kill()
    assert list(site.local.iterdir()) == []


def test_two_recordings_in_one_job_do_not_disturb_each_other(site):
    """Inside Slurm both have the same name; killing one must not end what belongs to the other."""
    job = {"SLURM_JOB_ID": "77", "SLURMD_NODENAME": "gpu-01", "CUDA_VISIBLE_DEVICES": "0"}
    run = site.start_run(site.manifest(99), "--engine", "demo", "--engine-arg=--burn-s=0.3", "--simulate", 1, env=job)
    wait_for(lambda: site.workers() and site.count_now("sample"), "the run is at work")
    (worker,) = site.workers()
    record = site.start("record", "--out", site.folder / "beside.sqlite", "--simulate", 1, *OFTEN, env=job)
    wait_for(lambda: len(site.recorders()) == 2 and (site.folder / "beside.sqlite").exists(), "both record")
    record.kill()
    wait_for(lambda: len(site.recorders()) == 1, "its recorder is gone")
    assert worker.is_running(), "it was ended from outside"
    run.send(signal.SIGTERM)
    assert run.wait().exit_code == 75
    assert site.rows("SELECT pid FROM worker") == [(worker.pid,)], "no other had to take its place"


def log_of(site):
    return site.task_database().with_suffix(".log").read_text()


def heartbeats(site):
    lines = [line[line.index("heartbeat ") :] for line in log_of(site).splitlines() if " heartbeat " in line]
    found = [HEARTBEAT.fullmatch(line) for line in lines]
    assert None not in found, lines
    return [one.groups() for one in found if one]


def test_a_run_logs_heartbeats_calls_a_command_at_an_alert_and_keeps_its_secret(site):
    """Device 0 is idle although work waits, device 2 is lost from the start."""
    loads = "".join(f"[[device]]\nindex = {n}\nload = [[0, {load}]]\n" for n, load in enumerate((0, 60)))
    (site.folder / "load.toml").write_text(f"{loads}[[device]]\nindex = 2\nlost_at_s = 0\n")
    site.script("tell", 'cat >> reported; echo >> reported; echo "$BADCJOBS_ALERT_STATE" >> states')
    (site.folder / "lab.toml").write_text(f'[alerts]\nidle_s = 0.4\ncommand = "./tell {SECRET}"\n')
    files = ("--simulate", site.folder / "load.toml", "--config", site.folder / "lab.toml")
    done = site.run(site.manifest(12), *SLOWLY, *files, *BEATS)
    assert done.exit_code == 0, done.stderr
    beats = heartbeats(site)
    assert len(beats) >= 3
    cpu, memory, gpu, devices, settled, total, rate, eta = beats[-1]
    assert "?" not in (cpu, memory, rate, eta)
    assert gpu == "30%", "the mean over the devices that could be read"
    assert (devices, total, 0 < int(settled) <= 12) == ("2/3", "12", True)
    ((ticks,),) = site.rows("SELECT ticks FROM recorder")
    cost = rf"recorder: {ticks} samples with simulated in \d+ s; [\d.]+ s of CPU.*, \d+ MiB, at most"
    assert len(re.findall(cost, log_of(site))) == 1
    alerts = "SELECT kind, severity, threshold, peak >= 0.4, ended_at_ms IS NULL FROM alert WHERE kind = 'idle'"
    assert site.rows(alerts) == [("idle", "warning", 0.4, 1, 0)], "it ends when no work waits any more"
    assert log_of(site).count("WARNING alert (idle): device 0 has been idle for 0.4 s while work is waiting") == 1
    calls = [json.loads(line) for line in (site.folder / "reported").read_text().splitlines()]
    assert [(call["kind"], call["state"]) for call in calls if call["kind"] == "idle"] == [
        ("idle", "begin"), ("idle", "end"),
    ]  # fmt: skip
    assert calls[0]["task"] == site.task_database().stem
    ((settings,),) = site.rows("SELECT value FROM meta WHERE key = 'settings'")
    assert json.loads(settings)["alerts"]["command"] == "./tell …"
    assert "xyzzy" not in done.stderr
    assert not any(b"xyzzy" in path.read_bytes() for path in site.out.rglob("*.*"))
    site.out = site.folder / "one device"
    assert site.run(site.manifest(12), *SLOWLY, "--simulate", 3, "--max-gpus", 1, *BEATS).exit_code == 0
    assert {devices for _, _, _, devices, *_ in heartbeats(site)} == {"1"}, "those that get work"


def test_without_telemetry_there_is_no_recorder_and_every_summary_says_so(site):
    job = {**array_task(0, [0]), "CUDA_VISIBLE_DEVICES": "0,1"}
    program = site.start_run(site.manifest(4), *SLOWLY, "--simulate", 2, "--no-emit-gpu-telemetry", *BEATS, env=job)
    wait_for(lambda: site.count_now("attempt"), "chunks are running")
    assert (len(site.workers()) >= 1, site.recorders()) == (True, [])
    done = program.wait()
    assert done.exit_code == 0, done.stderr
    assert "telemetry off (--no-emit-gpu-telemetry)" in done.stdout
    tables = ("sample", "host_sample", "usage_sample", "gap", "device")
    assert [site.count(table) for table in tables] == [0, 0, 0, 0, 2]
    assert site.rows("SELECT telemetry, memory_limit_bytes, time_limit_s FROM task") == [(0, None, None)]
    assert {gpu for _, _, gpu, *_ in heartbeats(site)} <= {"?"}
    merged = site.badcjobs("merge", site.out, "--json").json
    assert (merged["tasks_without_telemetry"], merged["energy_wh"]) == (1, None)
    assert merged["devices"][0]["utilization_mean_percent"] is None, "unknown is not zero"


def test_a_failed_try_is_kept_with_the_last_sample_of_its_device(site):
    command = ("--command", "sh -c 'sleep 2; exit 1' {input} {output}", "--retries", 0, "--simulate", 1, *QUICK)
    assert site.run(site.manifest(1), *command).exit_code == 1
    ((state, ended_at_ms, device_id),) = site.rows("SELECT gpu_state, ended_at_ms, device_id FROM attempt")
    found = json.loads(state)
    assert ended_at_ms - 2000 < found["at_ms"] <= ended_at_ms
    sample = "SELECT memory_used_bytes, power_w FROM sample WHERE device_id = ? AND at_ms = ?"
    assert site.rows(sample, device_id, found["at_ms"]) == [(found["memory_used_bytes"], found["power_w"])]
    assert "fan_percent" not in found or found["fan_percent"] is not None


def test_a_task_in_the_emulation_writes_what_it_was_given_and_what_its_processes_use(site):
    engine = site.script("engine", COMMAND)
    done = site.badcjobs(
        "submit", site.manifest(6), "--out", site.out, "--cluster", "local", "--wait", "--tasks", 1,
        "--gpus-per-task", 2, "--mem", "2G", "--time", "00:30:00", "--", "--simulate", 2,
        "--command", f"{engine} {{input}} {{output}}",
        timeout_s=90,
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    ((memory_bytes, time_s),) = site.rows("SELECT memory_limit_bytes, time_limit_s FROM task")
    assert memory_bytes == 2 * 2**30 and 1500 < time_s <= 1800
    used = site.rows("SELECT at_ms, cpu_cores, memory_bytes, processes FROM usage_sample ORDER BY at_ms")
    assert used[0][1] is None, "a first reading has no time behind it"
    cpu_s = sum(later[1] * (later[0] - sooner[0]) / 1000 for sooner, later in pairwise(used))
    assert 2.9 <= cpu_s < 12, "programs that come and go are counted: six times half a second"
    assert all(5e6 < memory_bytes < 2e9 for _, _, memory_bytes, _ in used)
    assert max(processes for *_, processes in used) >= 2, "the wrapper and its recorder, at least"
    totals = rows(site.out / "job.sqlite", "SELECT usage_samples, memory_peak_bytes FROM task_total")
    assert totals == [(len(used), max(memory_bytes for _, _, memory_bytes, _ in used))]


# ``BADCJOBS_TEST_COVERAGE_S=60 python -m pytest -s tests/flow/test_telemetry.py -k full_load``: for the full minute.
SECONDS = float(os.environ.get("BADCJOBS_TEST_COVERAGE_S", "3"))
INTERVAL_MS = 500


def test_under_full_load_99_percent_of_the_time_is_covered_by_samples_or_named_gaps(site, out):
    """Samples cover what lies between them if that is at most one and a half intervals; a start takes two seconds."""
    words = ("--simulate", 2, "--interval", INTERVAL_MS / 1000, "--duration", SECONDS)
    with ExitStack() as stack:
        for _ in range(2 * len(os.sched_getaffinity(0))):  # two processes per core compute as fast as they can
            burning = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(burning.kill)
        done = site.badcjobs("record", "--out", out, *words, timeout_s=SECONDS + 60)
    assert done.exit_code == 0, done.stderr
    ((began_ms, ended_ms),) = rows(out, "SELECT t.started_at_ms, max(r.last_at_ms) FROM task t, recorder r")
    assert ended_ms - began_ms >= 1000 * SECONDS
    of_device = "coalesce(device_id, ?1) = ?1 AND metric IS NULL AND length(reason) > 5"
    devices = rows(out, "SELECT device_id FROM device")
    assert len(devices) == 2
    for (device,) in devices:
        sampled = [at for (at,) in rows(out, "SELECT at_ms FROM sample WHERE device_id = ? ORDER BY 1", device)]
        far = [(one, next_) for one, next_ in pairwise([*sampled, ended_ms]) if next_ - one > 1.5 * INTERVAL_MS]
        far += [(began_ms, sampled[0])] if sampled[0] - began_ms > 2000 else []
        gaps = rows(out, f"SELECT from_ms, to_ms FROM gap WHERE {of_device}", device)
        named_ms = sum(max(0, min(to, end) - max(from_, start)) for start, end in far for from_, to in gaps)
        open_ms = sum(end - start for start, end in far) - named_ms
        print(f"{open_ms} of {ended_ms - began_ms} ms are not covered")
        assert open_ms <= 0.01 * (ended_ms - began_ms)
