"""``badcjobs record``: the recorder alone, or around any command, whose exit code is its own."""

from __future__ import annotations

import csv
import getpass
import json
import os
import re
import signal
from pathlib import Path

import pytest
from rooms.telemetry import RECORDING_MARK, ProcessLookup
from support.badcjobs_program import NOT_LATE, Site, assert_refused, rows
from support.fake_nvml import fake_nvml_folder
from support.waiting import wait_for

OFTEN = ("--interval", 0.05)
SECRET = "/services/T0123/xyzzy"
NO_PROCESS = 2**22 + 17


def no_driver() -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(fake_nvml_folder())}


@pytest.fixture
def out(site: Site) -> Path:
    return site.folder / "recording.sqlite"


def test_devices_are_recorded_with_their_alerts_and_processes_and_the_recorders_cost(site: Site, out: Path) -> None:
    """One process on device 0 is this test, which started the recording but is not below it; one does not exist."""
    processes = f"processes = [[{os.getpid()}, 50], [{NO_PROCESS}, 100]]"
    (site.folder / "load.toml").write_text(
        f"[[device]]\nindex = 0\nload = [[0, 80]]\n{processes}\n"
        '[[device]]\nindex = 1\nload = [[0, 10]]\nlost_at_s = 1.2\nback_at_s = 1.5\nfault = [[1.0, "Xid 31"]]\n'
    )
    site.script("tell", "cat >> told; echo >> told; sleep 77")
    (site.folder / "lab.toml").write_text(f'[alerts]\ntemperature_c = 60\ncommand = "./tell {SECRET}"\n')
    options = ("--simulate", "load.toml", "--config", "lab.toml", "--duration", 2.2, *OFTEN)
    done = site.badcjobs("record", "--out", out, *options)
    assert done.exit_code == 0, done.stderr
    assert re.match(r"badcjobs: 2 devices recorded for \d+\.\d s: ", done.stdout)
    assert rows(out, "PRAGMA integrity_check") == [("ok",)]
    assert rows(out, "SELECT verdict, exit_code, engine FROM task") == [("done", 0, None)]
    assert rows(out, f"SELECT count(*) FROM gap WHERE device_id IS NULL AND {NOT_LATE}") == [(0,)], (
        "no call holds it up"
    )
    alerts = """SELECT device_index, kind, severity, message, a.ended_at_ms > a.started_at_ms FROM alert a
                JOIN device USING (device_id) ORDER BY device_index, kind"""
    assert rows(out, alerts) == [
        (0, "thermal", "warning", "device 0 is at 71 °C; the limit is 60 °C", None),
        (1, "fault", "critical", "device 1 reports Xid 31", 1),
        (1, "lost", "critical", "device 1 can no longer be read: GPU is lost (simulated)", 1),
    ]
    said = re.findall(r"alert (ended|\(\w+\))", done.stderr)
    assert sorted(said) == ["(fault)", "(lost)", "(thermal)", "ended", "ended"]
    assert json.loads((site.folder / "told").read_text().splitlines()[0])["kind"] == "thermal"
    assert "alert calls were still running at the end" in done.stderr
    assert not any(b"xyzzy" in path.read_bytes() for path in (out, *site.out.rglob("*.*")))
    ours, unknown = rows(out, "SELECT pid, user, ours, memory_peak_bytes, last_at_ms > first_at_ms FROM process")
    assert unknown == (NO_PROCESS, None, None, 100 * 2**20, 1)
    assert (ours[0], ours[1:3] in ((getpass.getuser(), 0), (None, None))) == (os.getpid(), True)
    cost = (
        "SELECT backend, interval_s, ticks, reading_s > 0, reading_s < cpu_s, memory_bytes < 45 * 1048576 FROM recorder"
    )
    ((ticks,),) = rows(out, "SELECT count(DISTINCT at_ms) FROM sample")
    assert rows(out, cost) == [("simulated", 0.05, ticks, 1, 1, 1)]
    assert rows(out, "SELECT DISTINCT source FROM metric_source WHERE metric = 'busy_percent'") == [("simulated",)]
    assert list(site.local.iterdir()) == []


def test_text_has_a_line_per_device_and_instant(site: Site) -> None:
    files = [site.folder / f"recording.{ending}" for ending in ("csv", "jsonl")]
    commands = [("record", "--out", out, "--simulate", 2, "--duration", 0.4, *OFTEN) for out in files]
    assert [done.exit_code for done in site.badcjobs_each(commands)] == [0, 0]
    documents = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert {document["device_index"] for document in documents} == {0, 1}
    assert all(document["power_w"] > 0 and document["tensor_percent"] is None for document in documents)
    with files[0].open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["device_index"] for line in lines} == {"0", "1"}
    assert all(line["at"].endswith("Z") and int(line["at_ms"]) > 0 for line in lines)
    assert all(0 <= int(line["utilization_percent"]) <= 100 for line in lines)
    assert {line["tensor_percent"] for line in lines} == {""}, "unknown is empty, not zero"
    refused = site.badcjobs("report", files[0])
    assert_refused(refused, 4, "recording.csv cannot be read", "badcjobs record --out ")


def test_a_commands_options_output_and_exit_code_are_its_own(site: Site) -> None:
    busy = "python3 -c 'import time\nwhile time.process_time() < 1.2: pass'"
    site.script("said.sh", f"echo $*; {busy}; exit 3")
    first, killed, missing = site.badcjobs_each([
        ("record", "--out", "bad.sqlite", "--simulate", 1, *OFTEN, "--", "./said.sh", "--out", "x", "--json", "-v"),
        ("record", "--out", "killed.sqlite", "--simulate", 1, *OFTEN, "--", "sh", "-c", "kill -9 $$"),
        ("record", "--out", "missing.sqlite", "--simulate", 1, *OFTEN, "--", "no-such-program"),
    ])  # fmt: skip
    assert (first.exit_code, first.stdout) == (3, "--out x --json -v\n")
    assert "1 device recorded" in first.stderr
    bad = site.folder / "bad.sqlite"
    assert rows(bad, "SELECT exit_code, verdict FROM task") == [(3, "failed")]
    assert rows(bad, "SELECT max(cpu_cores) > 0.2, max(processes) >= 2 FROM usage_sample") == [(1, 1)]
    assert rows(site.folder / "killed.sqlite", "SELECT exit_code, verdict FROM task") == [(137, "failed")]
    assert (killed.exit_code, missing.exit_code) == (137, 127)
    assert "no-such-program" in missing.stderr
    assert "Traceback" not in missing.stderr
    said, merged, document = site.badcjobs_each([
        ("report", bad), ("merge", bad, "--out", "merged/job.sqlite"), ("report", bad, "--json"),
    ])  # fmt: skip
    assert said.stdout.startswith("bad.sqlite: 1 task failed\n")
    assert merged.stdout.startswith("merged: 1 task failed\n")
    assert (document.json["verdict"], document.json["tasks_by_verdict"]) == ("failed", {"failed": 1})
    assert not (site.folder / "job.sqlite").exists(), "report writes nothing"


def test_without_a_gpu_a_command_is_run_and_the_machine_recorded(site: Site, out: Path) -> None:
    refused = site.badcjobs("record", "--out", out, "--duration", 1, env=no_driver())
    assert_refused(refused, 3, "no GPU to record", "driver", "--simulate 2")
    assert not out.exists()
    done = site.badcjobs("record", "--out", out, *OFTEN, "--", "sh", "-c", "sleep 0.3; exit 5", env=no_driver())
    assert (done.exit_code, "no GPU to record" in done.stderr) == (5, True)
    assert rows(out, "SELECT count(*) > 0, (SELECT count(*) FROM sample) FROM host_sample") == [(1, 0)]


def test_what_cannot_be_recorded_is_refused_before_the_command_runs(site: Site, out: Path) -> None:
    ran = site.folder / "ran"
    (site.folder / "wrong.toml").write_text(
        "[alert]\n[alerts]\ntemprature_c = 60\nmemory_percent = -1\npower_percent = 101\n"
    )
    (site.folder / "open.toml").write_text(f'[alerts]\ncommand = "\'tell {SECRET}"\n')
    wrong = {
        ("--out", out, "--interval", "1e12"): ("1000000000000.0 is not in the range 0.01<=x<=86400",),
        ("--out", out, "--interval", "nan"): ("nan",),
        ("--out", "/proc/x.sqlite"): ("/proc/x.sqlite cannot be written",),
        ("--out", "gpu use.txt"): ("unknown extension", "\n  try: write to gpu use.sqlite\n"),
        ("--out", "recording"): ("unknown extension", "\n  try: write to recording.sqlite\n"),
        ("--out", "."): ("unknown extension", "\n  try: write to recording.sqlite\n"),
        ("--out", out, "--config", "wrong.toml"): (
            "wrong.toml, line 1: alert: unknown key; did you mean alerts?", "temprature_c", "memory_percent = -1",
            "power_percent = 101",
        ),
        ("--out", out, "--config", "open.toml"): ("[alerts] command cannot be",),
    }  # fmt: skip
    outcomes = site.badcjobs_each([("record", "--simulate", 1, *args, "--", "touch", ran) for args in wrong])
    for refused, words in zip(outcomes, wrong.values(), strict=True):
        assert_refused(refused, 2, *words)
        assert "xyzzy" not in refused.stderr
    assert not ran.exists()
    assert not out.exists()


def test_a_recording_is_not_overwritten_nor_played_onto_itself_under_whatever_name(site: Site, out: Path) -> None:
    out.write_text("precious")
    short = ("--simulate", 1, "--duration", 0.1)
    assert_refused(site.badcjobs("record", "--out", out, *short), 2, "already exists", "--force")
    assert out.read_text() == "precious"
    assert site.badcjobs("record", "--out", out, *short, "--force").exit_code == 0
    before = out.read_bytes()
    (site.folder / "link.sqlite").symlink_to(out)
    (site.folder / "twin.sqlite").hardlink_to(out)
    names = (out, "recording.sqlite", "link.sqlite", "twin.sqlite")
    commands = [("record", "--simulate", out, "--out", name, "--force", "--duration", 0.1) for name in names]
    for refused in site.badcjobs_each(commands):
        assert_refused(refused, 2, "is the recording that --simulate plays", "-again.sqlite")
    assert out.read_bytes() == before
    assert (site.folder / "link.sqlite").is_symlink()


# --- signals and kills ------------------------------------------------------------------------------------------------


def test_ctrl_c_is_a_good_ending_for_the_recorder_alone(site: Site, out: Path) -> None:
    program = site.start("record", "--out", out, "--simulate", 1, *OFTEN)
    wait_for(lambda: site.count_now("sample") > 2, "samples")
    program.send(signal.SIGINT)
    assert program.wait().exit_code == 0
    assert rows(out, "SELECT verdict FROM task") == [("done",)]


def test_term_is_passed_on_to_the_command_and_sent_when_the_time_is_over(site: Site, out: Path) -> None:
    script = f"trap 'exit 7' TERM; touch {site.folder}/up; while :; do sleep 0.02; done"
    program = site.start("record", "--out", out, "--simulate", 1, "--", "sh", "-c", script)
    late = ("--out", "late.sqlite", "--simulate", 1, "--duration", 0.3, "--", "sleep", 60)
    assert site.badcjobs("record", *late, timeout_s=40).exit_code == 143
    wait_for(lambda: (site.folder / "up").exists(), "the command runs")
    program.send(signal.SIGTERM)
    assert program.wait().exit_code == 7


def test_a_killed_recording_leaves_its_file_and_what_the_command_left_running(site: Site, out: Path) -> None:
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


def test_two_recordings_in_one_job_do_not_disturb_each_other(site: Site) -> None:
    """Inside Slurm both have the same name; killing one must not end what belongs to the other."""
    job = {"SLURM_JOB_ID": "77", "SLURMD_NODENAME": "gpu-01", "CUDA_VISIBLE_DEVICES": "0"}
    run = site.start_run(site.manifest(400), "--engine", "demo", "--engine-arg=--burn-s=0.5", "--simulate", 1, env=job)
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
