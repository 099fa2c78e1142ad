"""``badcjobs record``: the recorder alone, or around any command, whose exit code is its own."""

from __future__ import annotations

import csv
import getpass
import json
import os
import re
import signal
from itertools import pairwise
from pathlib import Path

import pytest
from rooms.telemetry import RECORDING_MARK, ProcessLookup
from support.badcjobs_program import NOT_LATE, Site, assert_refused, rows
from support.fake_nvml import no_driver
from support.pages import Pages
from support.waiting import wait_for

OFTEN = ("--interval", 0.05)
SECRET = "/services/T0123/xyzzy"
NO_PROCESS = 2**22 + 17


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
    assert rows(out, f"SELECT reason FROM gap WHERE device_id IS NULL AND {NOT_LATE}") == [], "no call holds it up"
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
    cost = "SELECT backend, interval_s, ticks, reading_s > 0, reading_s < cpu_s, memory_bytes < 45 << 20 FROM recorder"
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
    assert {(line["device_index"], line["tensor_percent"]) for line in lines} == {("0", ""), ("1", "")}
    assert all(line["at"].endswith("Z") and int(line["at_ms"]) > 0 for line in lines)
    assert all(0 <= int(line["utilization_percent"]) <= 100 for line in lines)
    assert_refused(site.badcjobs("report", files[0]), 4, "recording.csv cannot be read", "badcjobs record --out ")


def test_a_commands_options_output_and_exit_code_are_its_own_also_without_a_gpu(site: Site, out: Path) -> None:
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
    assert "1 device recorded" in first.stderr
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


WRONG_CONFIG = "[alert]\n[alerts]\ntemprature_c = 60\nmemory_percent = -1\npower_percent = 101\n"


def test_what_cannot_be_recorded_is_refused_before_the_command_runs_and_no_recording_is_overwritten(
    site: Site, out: Path, pages: Pages
) -> None:
    (site.folder / "wrong.toml").write_text(WRONG_CONFIG)
    (site.folder / "open.toml").write_text(f'[alerts]\ncommand = "\'tell {SECRET}"\n')
    assert site.badcjobs("record", "--out", out, "--simulate", 1, "--duration", 0.1).exit_code == 0
    before = out.read_bytes()
    (site.folder / "link.sqlite").symlink_to(out)
    (site.folder / "twin.sqlite").hardlink_to(out)
    commands = [
        *(f"--out new.sqlite --simulate 1 {options} -- touch ran"
          for options in ("--interval 1e12", "--interval nan", "--config wrong.toml", "--config open.toml")),
        *(f"--out {name} --simulate 1 -- touch ran" for name in ("/proc/x.sqlite", "gpu.txt", "recording", ".")),
        "--out new.sqlite --duration 1", "--out recording.sqlite --simulate 1 --duration 0.1",
        *(f"--simulate recording.sqlite --out {name} --force --duration 0.1"
          for name in (str(out), "recording.sqlite", "link.sqlite", "twin.sqlite")),
    ]  # fmt: skip
    environs = [{**no_driver(), "PATH": "/nowhere"} if "--simulate" not in one else {} for one in commands]
    outcomes = site.badcjobs_each([("record", *one.split()) for one in commands], environs)
    said = [f"$ badcjobs record {one}\n{done.stdout}{done.stderr}exit code {done.exit_code}\n"
            for one, done in zip(commands, outcomes, strict=True)]  # fmt: skip
    has_amd = "there is an AMD GPU, but the Python package amdsmi is not installed (pip install 'badcjobs[amd]')"
    text = "\n".join(said).replace(f"{site.folder}/", "").replace(str(site.folder), ".").replace(has_amd, "no AMD GPU")
    assert "xyzzy" not in text
    pages({"refused.txt": text})
    assert not [name for name in ("ran", "new.sqlite") if (site.folder / name).exists()]
    assert out.read_bytes() == before and (site.folder / "link.sqlite").is_symlink()
    assert site.badcjobs("record", "--out", out, "--simulate", 1, "--duration", 0.1, "--force").exit_code == 0
    assert out.read_bytes() != before


# --- signals and kills ------------------------------------------------------------------------------------------------


def test_ctrl_c_is_a_good_ending_for_the_recorder_alone_and_term_is_passed_on_and_sent_when_the_time_is_over(
    site: Site, out: Path
) -> None:
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
