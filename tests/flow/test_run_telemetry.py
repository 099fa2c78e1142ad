"""What a run writes beside its results: heartbeats, alerts, what it used; and runs without telemetry."""

from __future__ import annotations

import json
import re
from itertools import pairwise

from support.badcjobs_program import QUICK, Site, array_task, rows
from support.waiting import wait_for

# As in the contract; what is not known yet is a question mark.
HEARTBEAT = re.compile(
    r"heartbeat cpu=(\d+%|\?) mem=(\d+%|\?) gpu=(\d+%|\?) devices=(\d+) chunks=(\d+)/(\d+) rate=(\d+(?:\.\d+)?x|\?)"
    r" eta=(\d\d:\d\d:\d\d|\?)"
)
SLOWLY = ("--engine", "demo", "--engine-arg=--burn-s=0.3")
OFTEN = ("--config", "run.heartbeat_every_s=0.2")
SECRET = "/services/T0123/xyzzy"
# Busy with children of its own, as an engine that runs a program for each chunk is.
COMMAND = """python3 -c 'import time
while time.process_time() < 0.5: pass' && printf 'start_time,end_time,label,score\\n' > "$2" """


def log_of(site: Site) -> str:
    return site.task_database().with_suffix(".log").read_text()


def heartbeats(site: Site) -> list[tuple[str, ...]]:
    lines = [line[line.index("heartbeat ") :] for line in log_of(site).splitlines() if " heartbeat " in line]
    found = [HEARTBEAT.fullmatch(line) for line in lines]
    assert None not in found, lines
    return [one.groups() for one in found if one]


def test_a_run_logs_heartbeats_calls_a_command_at_an_alert_and_keeps_its_secret(site: Site) -> None:
    """Device 0 is idle although work waits, device 2 is lost from the start."""
    loads = "".join(f"[[device]]\nindex = {n}\nload = [[0, {load}]]\n" for n, load in enumerate((0, 60)))
    (site.folder / "load.toml").write_text(f"{loads}[[device]]\nindex = 2\nlost_at_s = 0\n")
    site.script("tell", 'cat >> told; echo >> told; echo "$BADCJOBS_ALERT_STATE" >> states')
    (site.folder / "lab.toml").write_text(f'[alerts]\nidle_s = 0.4\ncommand = "./tell {SECRET}"\n')
    files = ("--simulate", site.folder / "load.toml", "--config", site.folder / "lab.toml")
    done = site.run(site.manifest(12), *SLOWLY, *files, *OFTEN)
    assert done.exit_code == 0, done.stderr
    beats = heartbeats(site)
    assert len(beats) >= 3
    cpu, memory, gpu, devices, settled, total, rate, eta = beats[-1]
    assert "?" not in (cpu, memory, rate, eta)
    assert gpu == "30%", "the mean over the devices that could be read"
    assert (devices, total, 0 < int(settled) <= 12) == ("3", "12", True)
    ((ticks,),) = site.rows("SELECT ticks FROM recorder")
    cost = rf"recorder: {ticks} samples with simulated in \d+ s; [\d.]+ s of CPU.*, \d+ MiB, at most"
    assert len(re.findall(cost, log_of(site))) == 1
    alerts = "SELECT kind, severity, threshold, peak >= 0.4, ended_at_ms IS NULL FROM alert WHERE kind = 'idle'"
    assert site.rows(alerts) == [("idle", "warning", 0.4, 1, 0)], "it ends when no work waits any more"
    assert log_of(site).count("WARNING alert (idle): device 0 has been idle for 0.4 s while work is waiting") == 1
    calls = [json.loads(line) for line in (site.folder / "told").read_text().splitlines()]
    assert [(call["kind"], call["state"]) for call in calls if call["kind"] == "idle"] == [
        ("idle", "begin"), ("idle", "end"),
    ]  # fmt: skip
    assert calls[0]["task"] == site.task_database().stem
    ((settings,),) = site.rows("SELECT value FROM meta WHERE key = 'settings'")
    assert json.loads(settings)["alerts"]["command"] == "./tell …"
    assert "xyzzy" not in done.stderr
    assert not any(b"xyzzy" in path.read_bytes() for path in site.out.rglob("*.*"))


def test_without_telemetry_there_is_no_recorder_and_every_summary_says_so(site: Site) -> None:
    job = {**array_task(0, [0]), "CUDA_VISIBLE_DEVICES": "0,1"}
    program = site.start_run(site.manifest(4), *SLOWLY, "--simulate", 2, "--no-emit-gpu-telemetry", *OFTEN, env=job)
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


def test_a_failed_try_is_kept_with_the_last_sample_of_its_device(site: Site) -> None:
    command = ("--command", "sh -c 'sleep 0.6; exit 1' {input} {output}", "--retries", 0, "--simulate", 1, *QUICK)
    assert site.run(site.manifest(1), *command).exit_code == 1
    ((state, ended_at_ms, device_id),) = site.rows("SELECT gpu_state, ended_at_ms, device_id FROM attempt")
    found = json.loads(state)
    assert ended_at_ms - 2000 < found["at_ms"] <= ended_at_ms
    sample = "SELECT memory_used_bytes, power_w FROM sample WHERE device_id = ? AND at_ms = ?"
    assert site.rows(sample, device_id, found["at_ms"]) == [(found["memory_used_bytes"], found["power_w"])]
    assert "fan_percent" not in found or found["fan_percent"] is not None


def test_a_task_in_the_emulation_writes_what_it_was_given_and_what_its_processes_use(site: Site) -> None:
    engine = site.script("engine", COMMAND)
    done = site.badcjobs(
        "submit", site.manifest(6), "--out", site.out, "--cluster", "local", "--wait", "--tasks", 1,
        "--gpus-per-task", 2, "--mem", "2G", "--time", "00:30:00", "--", "--simulate", 2,
        "--command", f"{engine} {{input}} {{output}}",
        env={"BADCJOBS_LOCK_DIR": str(site.folder / "locks")}, timeout_s=90,
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
