"""The heartbeat line, and runs without telemetry."""

from __future__ import annotations

import json
import re

import psutil
from support.badcjobs_program import QUICK, Site
from support.fake_nvml import fake_nvml_folder
from support.waiting import wait_for

# As in the contract; what nobody knows yet is a question mark.
HEARTBEAT = re.compile(
    r"heartbeat cpu=(\d+%|\?) mem=(\d+%|\?) gpu=(\d+%|\?) devices=(\d+) chunks=(\d+)/(\d+) rate=(\d+(?:\.\d+)?x|\?)"
    r" eta=(\d\d:\d\d:\d\d|\?)"
)
SLOWLY = ("--engine", "demo", "--engine-arg=--burn-s=0.3")


def heartbeats(site: Site) -> list[str]:
    lines = site.task_database().with_suffix(".log").read_text().splitlines()
    return [line[line.index("heartbeat ") :] for line in lines if " heartbeat " in line]


def test_the_log_has_heartbeats_in_the_form_that_scripts_read(site: Site) -> None:
    script = site.folder / "load.toml"
    script.write_text(
        """
        [[device]]
        index = 0
        load = [[0, 30]]
        [[device]]
        index = 1
        load = [[0, 60]]
        [[device]]
        index = 2
        lost_at_s = 0
        """
    )
    done = site.run(site.manifest(9), *SLOWLY, "--simulate", script, "--config", "run.heartbeat_every_s=0.2")
    assert done.exit_code == 0, done.stderr
    lines = heartbeats(site)
    assert len(lines) >= 3
    for line in lines:
        assert HEARTBEAT.fullmatch(line), line
    cpu, memory, gpu, devices, settled, total, rate, eta = HEARTBEAT.fullmatch(lines[-1]).groups()
    assert "?" not in (cpu, memory, rate, eta)
    assert gpu == "45%", "the mean over the devices that could be read"
    assert (devices, total) == ("3", "9")
    assert 0 < int(settled) <= 9


def test_without_telemetry_there_is_no_recorder_and_every_summary_says_so(site: Site) -> None:
    program = site.start_run(
        site.manifest(4), *SLOWLY, "--simulate", 2, "--no-emit-gpu-telemetry", "--config", "run.heartbeat_every_s=0.2"
    )
    wait_for(lambda: site.count_now("attempt"), "chunks are running")
    assert len(site.workers()) >= 1
    assert {kind(process) for process in site.processes()} == {"wrapper", "worker"}
    done = program.wait()
    assert done.exit_code == 0, done.stderr
    assert "telemetry off (--no-emit-gpu-telemetry)" in done.stdout
    assert (site.count("sample"), site.count("host_sample"), site.count("gap")) == (0, 0, 0)
    assert site.rows("SELECT telemetry FROM task") == [(0,)]
    assert site.count("device") == 2, "which devices there were is known all the same"
    assert all(HEARTBEAT.fullmatch(line)[3] == "?" for line in heartbeats(site))
    merged = site.badcjobs("merge", site.out)
    assert "off in 1 task (--no-emit-gpu-telemetry)" in merged.stdout
    as_json = site.badcjobs("merge", site.out, "--json").json
    assert as_json["tasks_without_telemetry"] == 1
    assert as_json["devices"][0]["utilization_mean_percent"] is None, "unknown is not zero"
    assert as_json["energy_wh"] is None


# --- what the task's log says -----------------------------------------------------------------------------------------


def log_of(site: Site) -> str:
    return site.task_database().with_suffix(".log").read_text()


def test_a_device_that_idles_while_work_waits_is_told_in_the_log_and_in_the_database(site: Site) -> None:
    """The simulated device has nothing to do although the demo engine is at work: that is what we want to hear of."""
    (site.folder / "load.toml").write_text("[[device]]\nindex = 0\nload = [[0, 0]]\n")
    (site.folder / "lab.toml").write_text("[alerts]\nidle_s = 0.4\n")
    stand_in = ("--simulate", site.folder / "load.toml", "--config", site.folder / "lab.toml")
    done = site.run(site.manifest(8), *SLOWLY, *stand_in)
    assert done.exit_code == 0, done.stderr
    found = site.rows("SELECT kind, severity, threshold, peak >= 0.4, ended_at_ms IS NULL FROM alert")
    assert found == [("idle", "warning", 0.4, 1, 0)], "it ends when no work waits any more"
    said = "device 0 has been idle for 0.4 s while work is waiting"
    assert log_of(site).count(f"WARNING alert (idle): {said}") == 1
    assert log_of(site).count("alert ended after") == 1


def test_devices_that_nothing_can_read_are_one_gap_each_and_one_warning_and_the_work_goes_on(site: Site) -> None:
    env = {"LD_LIBRARY_PATH": str(fake_nvml_folder()), "CUDA_VISIBLE_DEVICES": "0,1", "PATH": "/usr/bin:/bin"}
    done = site.run(site.manifest(6), *SLOWLY, env=env)
    assert done.exit_code == 0, done.stderr
    assert site.count("sample") == 0
    assert site.count("host_sample") > 2
    gaps = site.rows(
        """SELECT device_id, to_ms - from_ms, reason FROM gap
           WHERE device_id IS NOT NULL AND metric IS NULL ORDER BY device_id"""
    )
    assert len({device for device, _, _ in gaps}) == len(gaps) == 2
    ((wall_ms,),) = site.rows("SELECT max(at_ms) - min(at_ms) FROM host_sample")
    for _, length_ms, reason in gaps:
        assert length_ms >= 0.9 * wall_ms, "over the whole time"
        assert reason.startswith("no driver library to read it with: ")
    warnings = [line for line in log_of(site).splitlines() if " WARNING " in line and "cannot be read" in line]
    assert len(warnings) == 1, warnings
    assert "2 devices cannot be read: no driver library" in warnings[0]
    assert site.count("alert") == 0, "what was never there is not lost"


def test_the_log_ends_with_what_the_recorder_cost(site: Site) -> None:
    done = site.run(site.manifest(3), *SLOWLY, "--simulate", 1)
    assert done.exit_code == 0, done.stderr
    (line,) = [line for line in log_of(site).splitlines() if " recorder: " in line]
    said = r"recorder: \d+ samples with simulated in \d+ s; [\d.]+ s of CPU, \d+ MiB, at most"
    assert re.search(said, line), line
    ((ticks,),) = site.rows("SELECT ticks FROM recorder")
    assert f"recorder: {ticks} samples" in line


def test_a_recorder_that_was_killed_and_its_successor_each_write_their_cost(site: Site) -> None:
    program = site.start_run(site.manifest(12), *SLOWLY, "--simulate", 1)
    (first,) = wait_for(lambda: site.count_now("sample") > 2 and site.recorders(), "the recorder records")
    first.kill()
    done = program.wait()
    assert done.exit_code == 0, done.stderr
    lives = site.rows("SELECT pid, ticks > 0 FROM recorder ORDER BY started_at_ms")
    assert len(lives) == 2
    assert lives[0] == (first.pid, 1)


def kind(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    return (
        "worker"
        if "demo_worker" in words
        else "recorder"
        if "badcjobs.telemetry.recorder_process" in words
        else "wrapper"
    )


def test_a_failed_try_is_kept_with_the_last_sample_of_its_device(site: Site) -> None:
    command = "sh -c 'sleep 0.6; exit 1' {input} {output}"
    outcome = site.run(
        site.manifest(1), "--engine", "command", "--command", command, "--retries", "0", "--simulate", "1", *QUICK
    )
    assert outcome.exit_code == 1
    ((state, ended_at_ms, device_id),) = site.rows("SELECT gpu_state, ended_at_ms, device_id FROM attempt")
    found = json.loads(state)
    assert ended_at_ms - 2000 < found["at_ms"] <= ended_at_ms
    ((memory, power),) = site.rows(
        "SELECT memory_used_bytes, power_w FROM sample WHERE device_id = ? AND at_ms = ?", device_id, found["at_ms"]
    )
    assert (found["memory_used_bytes"], found["power_w"]) == (memory, power)
    assert "fan_percent" not in found or found["fan_percent"] is not None
