"""What a task uses and what it was given, from end to end; and alerts that call somebody while it works."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from support.badcjobs_program import NOT_LATE, Site, array_task, assert_refused, rows

SECRET = "/services/T0123/xyzzy"
BUSY = ("--engine", "demo", "--engine-arg=--burn-s=0.4")
# Busy with children of its own, as an engine that runs a program for each chunk is.
COMMAND = """python3 -c 'import time
while time.process_time() < 0.5: pass' && printf 'start_time,end_time,label,score\\n' > "$2" """


def test_a_task_in_the_emulation_writes_what_it_was_given_and_what_its_processes_use(site: Site) -> None:
    engine = site.script("engine", COMMAND)
    done = site.badcjobs(
        "submit", site.manifest(12), "--out", site.out, "--cluster", "local", "--wait",
        "--tasks", 2, "--gpus-per-task", 1, "--mem", "2G", "--time", "00:30:00", "--", "--simulate", 2,
        "--command", f"{engine} {{input}} {{output}}",
        env={"BADCJOBS_LOCK_DIR": str(site.folder / "locks")}, timeout_s=90,
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    limits = site.rows("SELECT memory_limit_bytes, time_limit_s FROM task")
    assert [memory for memory, _ in limits] == [2 * 2**30] * 2
    assert all(1500 < time_s <= 1800 for _, time_s in limits)
    for database in site.task_databases():
        used = rows(database, "SELECT at_ms, cpu_cores, memory_bytes, processes FROM usage_sample ORDER BY at_ms")
        assert used[0][1] is None, "a first reading has no time behind it"
        cpu_s = sum(later[1] * (later[0] - sooner[0]) / 1000 for sooner, later in pairwise(used))
        assert 2.9 <= cpu_s < 12, "programs that come and go are counted: six times half a second"
        assert all(5e6 < memory_bytes < 2e9 for _, _, memory_bytes, _ in used)
        assert max(processes for *_, processes in used) >= 2, "the wrapper and its recorder, at least"
    ((samples, peak_bytes),) = rows(
        site.out / "job.sqlite", "SELECT sum(usage_samples), max(memory_peak_bytes) FROM task_total"
    )
    assert samples == site.count("usage_sample")
    assert peak_bytes == max(peak for (peak,) in site.rows("SELECT max(memory_bytes) FROM usage_sample"))


def test_what_nobody_has_asked_for_is_unknown_and_without_telemetry_nothing_is_read(site: Site) -> None:
    quiet = ("--engine", "demo", "--simulate", 1, "--no-emit-gpu-telemetry")
    assert site.run(site.manifest(3), *quiet, env={**array_task(0, [0]), "CUDA_VISIBLE_DEVICES": "0"}).exit_code == 0
    assert site.rows("SELECT memory_limit_bytes, time_limit_s FROM task") == [(None, None)]
    assert site.count("usage_sample") == 0


def test_a_command_under_record_is_told_what_it_uses(site: Site) -> None:
    out = site.folder / "recording.sqlite"
    busy = ("python3", "-c", "import time\nwhile time.process_time() < 1.2: pass")
    done = site.badcjobs("record", "--out", out, "--simulate", 1, "--interval", 0.1, "--", *busy)
    assert done.exit_code == 0, done.stderr
    assert rows(out, "SELECT max(cpu_cores) > 0.2, max(processes) >= 2 FROM usage_sample") == [(1, 1)]


# --- somebody is called -----------------------------------------------------------------------------------------------


def write_config(site: Site, **hooks: str) -> Path:
    config = site.folder / "lab.toml"
    keys = "".join(f"{name} = {json.dumps(value)}\n" for name, value in hooks.items())
    config.write_text(f"[alerts]\nidle_s = 0.4\ntemperature_c = 60\n{keys}")
    return config


def test_a_run_calls_a_command_at_the_begin_and_at_the_end_and_keeps_its_secret(site: Site) -> None:
    (site.folder / "load.toml").write_text("[[device]]\nindex = 0\nload = [[0, 0]]\n")
    site.script("tell", 'cat >> told; echo >> told; echo "$BADCJOBS_ALERT_STATE" >> states')
    config = write_config(site, command=f"./tell {SECRET}")
    stand_in = ("--simulate", site.folder / "load.toml", "--config", config)
    done = site.run(site.manifest(8), *BUSY, *stand_in)
    assert done.exit_code == 0, done.stderr
    got = [json.loads(line) for line in (site.folder / "told").read_text().splitlines()]
    assert [(news["kind"], news["state"]) for news in got] == [("idle", "begin"), ("idle", "end")]
    assert (site.folder / "states").read_text().split() == ["begin", "end"]
    assert got[0]["task"] == site.task_database().stem
    ((settings,),) = site.rows("SELECT value FROM meta WHERE key = 'settings'")
    assert json.loads(settings)["alerts"]["command"] == "./tell …"
    for file in [path for path in site.out.rglob("*") if path.is_file()]:
        assert b"xyzzy" not in file.read_bytes(), file
    assert "xyzzy" not in done.stderr


def test_a_command_that_hangs_leaves_no_gap_in_the_recording(site: Site) -> None:
    (site.folder / "load.toml").write_text("[[device]]\nindex = 0\nload = [[0, 80]]\n")
    out = site.folder / "recording.sqlite"
    site.script("tell", "cat >> told; sleep 77")
    done = site.badcjobs(
        "record", "--out", out, "--simulate",  site.folder / "load.toml",
        "--duration", 2, "--interval", 0.1, "--config", write_config(site, command="./tell"),
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert json.loads((site.folder / "told").read_text())["kind"] == "thermal"
    ((wall_ms,),) = rows(out, "SELECT ended_at_ms - started_at_ms FROM task")
    assert wall_ms < 5000, "the recording itself does not wait"
    assert rows(out, f"SELECT count(*) FROM gap WHERE metric IS NULL AND {NOT_LATE}") == [(0,)]
    assert rows(out, "SELECT count(*) >= 5 FROM sample") == [(1,)]
    assert "alert calls were still running at the end" in done.stderr


def test_a_command_that_cannot_be_parsed_is_refused_before_anything_happens(site: Site) -> None:
    config = write_config(site, command=f"'tell {SECRET}")
    refused = site.badcjobs("record", "--out", "r.sqlite", "--simulate", 1, "--duration", 0.1, "--config", config)
    also_refused = site.run(site.manifest(1), *BUSY, "--simulate", 1, "--config", config)
    for outcome in (refused, also_refused):
        assert_refused(outcome, 2, "[alerts] command cannot be")
        assert "xyzzy" not in outcome.stderr
