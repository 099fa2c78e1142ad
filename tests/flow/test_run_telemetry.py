"""The heartbeat line, and runs without telemetry."""

from __future__ import annotations

import re

import psutil
from support.badcjobs_program import Site, wait_for

# As in the contract; what nobody knows yet is a question mark.
HEARTBEAT = re.compile(
    r"heartbeat cpu=(\d+%|\?) mem=(\d+%|\?) gpu=(\d+%|\?) devices=(\d+) chunks=(\d+)/(\d+) rate=(\d+x|\?)"
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
    done = site.run(site.manifest(9), *SLOWLY, "--simulate", 3, "--simulate-script", script, "--heartbeat-every", 0.2)
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
        site.manifest(4), *SLOWLY, "--simulate", 2, "--no-emit-gpu-telemetry", "--heartbeat-every", 0.2
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


def kind(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    return "worker" if "demo_worker" in words else "recorder" if "badcjobs.recording" in words else "wrapper"
