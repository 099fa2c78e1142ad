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
from support.badcjobs_program import Site, assert_refused, rows
from support.fake_nvml import fake_nvml_folder
from support.waiting import wait_for

OFTEN = ("--interval", 0.05)


def no_driver() -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(fake_nvml_folder())}


@pytest.fixture
def out(site: Site) -> Path:
    return site.folder / "recording.sqlite"


def test_it_records_for_the_time_it_is_given(site: Site, out: Path) -> None:
    done = site.badcjobs("record", "--out", out, "--simulate", 2, "--duration", 0.5, *OFTEN)
    assert done.exit_code == 0, done.stderr
    assert re.match(r"badcjobs: 2 devices recorded for \d+\.\d s: ", done.stdout)
    assert rows(out, "PRAGMA integrity_check") == [("ok",)]
    ((devices, samples, span_ms),) = rows(
        out, "SELECT count(DISTINCT device_id), count(*), max(at_ms) - min(at_ms) FROM sample"
    )
    assert devices == 2
    assert samples >= 6
    assert 200 <= span_ms < 10_000
    assert rows(out, "SELECT verdict, exit_code, engine FROM task") == [("done", 0, None)]
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


def test_a_commands_options_and_output_are_its_own(site: Site, out: Path) -> None:
    script = site.script("said.sh", "echo $*; sleep 0.3")
    command = ("--", script, "--out", "x", "--json", "-v")
    done = site.badcjobs("record", "--out", out, "--simulate", 1, *OFTEN, *command)
    assert (done.exit_code, done.stdout) == (0, "--out x --json -v\n")
    assert "1 devices recorded" in done.stderr or "1 device recorded" in done.stderr
    assert rows(out, "SELECT count(*) >= 3 FROM sample") == [(1,)]


def test_the_commands_exit_code_is_returned(site: Site) -> None:
    scripts = {"exit 3": 3, "kill -9 $$": 137}
    files = [site.folder / f"{number}.sqlite" for number in range(len(scripts))]
    commands = [
        ("record", "--out", out, "--simulate", 1, "--", "sh", "-c", script)
        for out, script in zip(files, scripts, strict=True)
    ]
    for done, out, exit_code in zip(site.badcjobs_each(commands), files, scripts.values(), strict=True):
        assert done.exit_code == exit_code, done.stderr
        assert rows(out, "SELECT exit_code, verdict FROM task") == [(exit_code, "failed")]


def test_report_and_merge_read_a_recording_and_agree_with_the_end_of_its_command(site: Site) -> None:
    site.badcjobs_each([
        ("record", "--out", f"{name}.sqlite", "--simulate", 1, *OFTEN, "--", "sh", "-c", f"sleep 0.3; exit {exit_code}")
        for name, exit_code in (("good", 0), ("bad", 3))
    ])  # fmt: skip
    good, bad, merged, document = site.badcjobs_each([
        ("report", "good.sqlite"),
        ("report", "bad.sqlite"),
        ("merge", "bad.sqlite", "--out", "merged/job.sqlite"),
        ("report", "bad.sqlite", "--json"),
    ])  # fmt: skip
    assert good.stdout.startswith("good.sqlite: all done\n")
    assert bad.stdout.startswith("bad.sqlite: 1 task failed\n")
    assert merged.stdout.startswith("merged: 1 task failed\n")
    assert {done.exit_code for done in (good, bad, merged, document)} == {0}
    assert (document.json["verdict"], document.json["tasks_by_verdict"]) == ("failed", {"failed": 1})
    assert not (site.folder / "job.sqlite").exists(), "report writes nothing"


def test_report_reads_no_text_recording_and_names_the_kind_that_it_reads(site: Site) -> None:
    site.badcjobs("record", "--out", "lines.csv", "--simulate", 1, "--duration", 0.2, *OFTEN)
    refused = site.badcjobs("report", "lines.csv")
    assert_refused(refused, 4, "lines.csv cannot be read", "badcjobs record --out lines.sqlite")


def test_a_command_that_does_not_exist_is_said_in_the_shells_way(site: Site, out: Path) -> None:
    done = site.badcjobs("record", "--out", out, "--simulate", 1, "--", "no-such-program")
    assert done.exit_code == 127
    assert "no-such-program" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_recording_is_not_overwritten_by_accident(site: Site, out: Path) -> None:
    out.write_text("precious")
    refused = site.badcjobs("record", "--out", out, "--simulate", 1, "--duration", 0.1)
    assert_refused(refused, 2, "already exists", "--force")
    assert out.read_text() == "precious"
    assert site.badcjobs("record", "--out", out, "--simulate", 1, "--duration", 0.1, "--force").exit_code == 0
    assert rows(out, "SELECT verdict FROM task") == [("done",)]


def test_a_recording_is_never_played_onto_itself_under_whatever_name(site: Site, out: Path) -> None:
    assert site.badcjobs("record", "--out", out, "--simulate", 1, "--duration", 0.1).exit_code == 0
    before = out.read_bytes()
    (site.folder / "link.sqlite").symlink_to(out)
    (site.folder / "twin.sqlite").hardlink_to(out)
    names = (out, "recording.sqlite", "link.sqlite", "twin.sqlite")
    commands = [("record", "--simulate", out, "--out", name, "--force", "--duration", 0.1) for name in names]
    for refused in site.badcjobs_each(commands):
        assert_refused(refused, 2, "is the recording that --simulate plays", "-again.sqlite")
    assert out.read_bytes() == before
    assert (site.folder / "link.sqlite").is_symlink()


def test_numbers_and_places_that_cannot_be_used_are_refused_before_the_command_runs(site: Site, out: Path) -> None:
    ran = site.folder / "ran"
    wrong = {
        ("--out", out, "--interval", "1e12"): "1000000000000.0 is not in the range 0.01<=x<=86400",
        ("--out", out, "--interval", "nan"): "nan",
        ("--out", "/proc/x.sqlite"): "/proc/x.sqlite cannot be written",
    }
    outcomes = site.badcjobs_each([("record", "--simulate", 1, *args, "--", "touch", ran) for args in wrong])
    for refused, words in zip(outcomes, wrong.values(), strict=True):
        assert_refused(refused, 2, words, "\n  try: ")
    assert not ran.exists()
    assert not out.exists()


def test_what_a_command_leaves_running_is_ours_and_outlives_a_killed_recorder(site: Site, out: Path) -> None:
    """A process that has left its parents behind descends from nobody; its environment still tells."""
    script = site.script("detach.sh", f"(setsid sleep 60 & echo $! > {site.folder}/pid.new)\n"
                         f"mv {site.folder}/pid.new {site.folder}/pid\nsleep 60")  # fmt: skip
    program = site.start("record", "--out", out, "--simulate", 1, *OFTEN, "--", script)
    wait_for(lambda: (site.folder / "pid").exists(), "the command runs")
    pid = int((site.folder / "pid").read_text())
    (order,) = site.local.glob("*/recorder.json")
    mark = json.loads(order.read_text())["mark"]
    lookup = ProcessLookup(wrapper_pid=program.pid, marks=[f"{RECORDING_MARK}={mark}"])
    assert lookup.look_up(pid).ours is True
    program.kill()
    wait_for(lambda: rows(out, "SELECT verdict FROM task") == [("killed",)] and not site.recorders(), "it is published")
    left = site.processes("sleep")
    assert pid in [process.pid for process in left], "the work goes on without its recorder"
    for process in (*left, *site.processes("detach.sh")):
        process.kill()


def test_without_a_gpu_and_without_a_command_there_is_nothing_to_record(site: Site, out: Path) -> None:
    refused = site.badcjobs("record", "--out", out, "--duration", 1, env=no_driver())
    assert_refused(refused, 3, "no GPU to record", "driver", "--simulate 2")
    assert not out.exists()


def test_without_a_gpu_a_command_is_run_and_the_machine_recorded(site: Site, out: Path) -> None:
    done = site.badcjobs("record", "--out", out, *OFTEN, "--", "sh", "-c", "sleep 0.3; exit 5", env=no_driver())
    assert done.exit_code == 5
    assert "no GPU to record" in done.stderr
    assert rows(out, "SELECT count(*) > 0, (SELECT count(*) FROM sample) FROM host_sample") == [(1, 0)]


def test_ctrl_c_is_a_good_ending_for_the_recorder_alone(site: Site, out: Path) -> None:
    program = site.start("record", "--out", out, "--simulate", 1, *OFTEN)
    wait_for(lambda: site.count_now("sample") > 2, "samples")
    program.send(signal.SIGINT)
    assert program.wait().exit_code == 0
    assert rows(out, "SELECT verdict FROM task") == [("done",)]


def test_term_is_passed_on_to_the_command(site: Site, out: Path) -> None:
    program = site.start(
        "record", "--out", out, "--simulate", 1, "--", "sh", "-c",
        f"trap 'exit 7' TERM; touch {site.folder}/up; while :; do sleep 0.02; done",
    )  # fmt: skip
    wait_for(lambda: (site.folder / "up").exists(), "the command runs")
    program.send(signal.SIGTERM)
    assert program.wait().exit_code == 7


def test_when_the_time_is_over_the_command_gets_term(site: Site, out: Path) -> None:
    done = site.badcjobs("record", "--out", out, "--simulate", 1, "--duration", 0.3, "--", "sleep", "60", timeout_s=40)
    assert done.exit_code == 143


def test_a_killed_recording_still_leaves_its_file(site: Site, out: Path) -> None:
    program = site.start("record", "--out", out, "--simulate", 2, *OFTEN)
    wait_for(lambda: site.count_now("sample") >= 8, "samples")
    program.kill()
    wait_for(lambda: not site.processes(), "the recorder is gone", timeout_s=40)
    assert rows(out, "PRAGMA integrity_check") == [("ok",)]
    assert rows(out, "SELECT verdict, (SELECT count(*) >= 8 FROM sample) FROM task") == [("killed", 1)]
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


# --- alerts, processes, its own cost ----------------------------------------------------------------------------------


def test_limits_come_from_a_file_and_an_alert_is_said_once_and_written_with_begin_and_peak(
    site: Site, out: Path
) -> None:
    config = site.folder / "lab.toml"
    config.write_text("[run]\nengine = 'demo'\n[alerts]\ntemperature_c = 60\n")
    script = site.folder / "load.toml"
    script.write_text("[[device]]\nindex = 0\nload = [[0, 80]]\n[[device]]\nindex = 1\nload = [[0, 10]]\n")
    done = site.badcjobs(
        "record", "--out", out, "--simulate",  script, "--config", config, "--duration", 0.6,
        *OFTEN,
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    found = rows(
        out,
        """SELECT device_index, kind, severity, threshold, peak, a.ended_at_ms, a.started_at_ms >= t.started_at_ms
           FROM alert a JOIN device USING (device_id) JOIN task t ON t.task_id = a.task_id""",
    )
    assert found == [(0, "thermal", "warning", 60.0, 71.0, None, 1)]
    assert done.stderr.count("alert (thermal): device 0 is at 71 °C; the limit is 60 °C") == 1


def test_a_config_with_mistakes_is_refused_before_anything_is_recorded(site: Site, out: Path) -> None:
    config = site.folder / "lab.toml"
    config.write_text("[alert]\n[alerts]\ntemprature_c = 60\nmemory_percent = -1\npower_percent = 101\n")
    refused = site.badcjobs("record", "--out", out, "--simulate", 1, "--duration", 0.1, "--config", config)
    assert_refused(
        refused,
        2,
        "lab.toml, line 1: alert: unknown key; did you mean alerts?",
        "temprature_c",
        "memory_percent = -1",
        "power_percent = 101",
    )
    assert not out.exists()


def test_the_recorder_writes_what_it_cost_and_where_its_numbers_are_from(site: Site, out: Path) -> None:
    done = site.badcjobs("record", "--out", out, "--simulate", 2, "--duration", 0.5, *OFTEN)
    assert done.exit_code == 0, done.stderr
    ((backend, why, interval_s, ticks, cpu_s, memory_bytes, late_s, reading_s),) = rows(
        out, "SELECT backend, why, interval_s, ticks, cpu_s, memory_bytes, worst_late_s, reading_s FROM recorder"
    )
    assert (backend, interval_s) == ("simulated", 0.05)
    assert "simulated" in why
    assert ticks == rows(out, "SELECT count(DISTINCT at_ms) FROM sample")[0][0]
    assert 0 < reading_s < cpu_s < 10
    assert 2**22 < memory_bytes < 45 * 2**20
    assert 0 <= late_s < 30
    assert rows(out, "SELECT DISTINCT source FROM metric_source WHERE metric = 'busy_percent'") == [("simulated",)]


def test_processes_on_a_device_are_told_apart(site: Site, out: Path) -> None:
    """One simulated process is this test, which did start the recording but is not below it; one does not exist."""
    nobody = 2**22 + 17
    script = site.folder / "load.toml"
    script.write_text(f"[[device]]\nindex = 0\nprocesses = [[{os.getpid()}, 50], [{nobody}, 100]]\n")
    done = site.badcjobs(
        "record", "--out", out, "--simulate",  script, "--duration", 0.5, *OFTEN
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    found = rows(out, "SELECT pid, user, ours, memory_peak_bytes, last_at_ms > first_at_ms FROM process ORDER BY pid")
    test, unknown = found
    assert unknown == (nobody, None, None, 100 * 2**20, 1)
    assert test[0] == os.getpid()
    assert test[1:3] in ((getpass.getuser(), 0), (None, None)), "nobody is accused inside a PID namespace"
    assert rows(out, "SELECT count(*) > 3, count(DISTINCT pid) FROM process_sample") == [(1, 2)]


def test_a_lost_device_and_a_fault_are_alerts(site: Site, out: Path) -> None:
    script = site.folder / "load.toml"
    script.write_text(
        '[[device]]\nindex = 0\nlost_at_s = 1.2\nback_at_s = 1.5\n[[device]]\nindex = 1\nfault = [[1.0, "Xid 31"]]\n'
    )
    done = site.badcjobs(
        "record", "--out", out, "--simulate",  script, "--duration", 2.2, *OFTEN
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    found = rows(
        out,
        """SELECT device_index, kind, severity, message, ended_at_ms > started_at_ms
           FROM alert JOIN device USING (device_id) WHERE kind IN ('lost', 'fault') ORDER BY device_index""",
    )
    assert found == [
        (0, "lost", "critical", "device 0 can no longer be read: GPU is lost (simulated)", 1),
        (1, "fault", "critical", "device 1 reports Xid 31", 1),
    ]
    assert done.stderr.count("alert (lost): ") == 1
    over = [line for line in done.stderr.splitlines() if "alert ended after" in line]
    assert [line.split()[6] for line in over] == ["(lost):", "(fault):"]
    assert all(line.startswith("badcjobs: alert ended after ") for line in over)
