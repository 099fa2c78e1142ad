"""The Python API as a user writes it: scripts of their own, run by a Python of their own."""

import json
import subprocess
import sys

from support.badcjobs_program import rows
from support.cases import read_parts
from support.fake_nvml import no_driver
from support.waiting import wait_for

SCRIPTS = read_parts("user_scripts.txt")


def run_script(site, name, env=None):
    argv = [sys.executable, "-c", SCRIPTS[name]]
    return subprocess.run(argv, env=site.environ(env), cwd=site.folder, capture_output=True, text=True, timeout=60)


def test_a_training_loop_is_recorded_with_marks_alerts_and_statistics(site):
    done = run_script(site, "a training loop")
    assert done.returncode == 0, done.stderr
    out, (document, *seen) = site.folder / "run.sqlite", done.stdout.splitlines()
    assert seen == ["seen"] * 2, "an error in the user's code is theirs"
    said = json.loads(document)
    during, after = said["during"], said["after"]
    assert rows(out, "PRAGMA integrity_check") == [("ok",)]
    wall_s = after["monitoring_duration_seconds"]
    task = "SELECT verdict, exit_code, engine, devices, (ended_at_ms - started_at_ms) / 1000.0 FROM task"
    assert rows(out, task) == [("done", 0, None, 2, wall_s)]
    marks = """SELECT name, (SELECT count(*) > 0 FROM sample s WHERE s.at_ms BETWEEN m.started_at_ms AND m.ended_at_ms)
               FROM mark m ORDER BY started_at_ms"""
    assert rows(out, marks) == [("epoch 0", 1), ("epoch 1", 1), ("epoch 2", 1)]
    ((instants,),) = rows(out, "SELECT count(DISTINCT at_ms) FROM sample")
    assert 0 < during["sample_count"] <= after["sample_count"] == instants
    assert 0 < during["monitoring_duration_seconds"] <= after["monitoring_duration_seconds"]
    assert list(after["gpu_stats"]) == ["0", "1"]
    first = after["gpu_stats"]["0"]
    assert (first["name"], first["utilization"]["samples"]) == ("Simulated GPU", instants)
    begun = [alert[:3] for alert in said["alerts"] if alert[0] == "thermal"]
    assert sorted(begun) == [["thermal", 0, False], ["thermal", 1, False]]
    assert done.stderr.count("on_alert failed") == len(said["alerts"]) >= 2
    assert len((site.folder / "run.jsonl").read_text().splitlines()) >= 3
    assert said["text"]["gpu_stats"]["0"]["power_draw_w"]["samples"] >= 2
    ends = {"lasting": [("done", 0)], "failed": [("failed", 1)], "again": [("done", 0)]}
    assert {name: rows(site.folder / f"{name}.sqlite", "SELECT verdict, exit_code FROM task") for name in ends} == ends
    assert rows(site.folder / "failed.sqlite", "SELECT name, ended_at_ms IS NOT NULL FROM mark") == [("boom", 1)]
    assert list(site.local.iterdir()) == [] and site.processes() == [], "nothing stays on the node"


def test_on_a_machine_without_a_gpu_the_machine_alone_is_recorded_with_one_warning(site):
    done = run_script(site, "no GPU", {**no_driver(), "PATH": "/usr/bin:/bin"})
    assert (done.returncode, done.stderr.count("no GPU to record"), done.stderr.count("\n") <= 3) == (0, 1, True)
    assert json.loads(done.stdout) == [[], {}]
    assert rows(site.folder / "run.sqlite", "SELECT count(*) >= 2 FROM host_sample") == [(1,)]


def test_a_program_that_is_killed_still_has_its_file_even_when_its_child_lives_on(site):
    """A forked child holds the pipes of its parent open; the recorder must notice the death all the same."""
    assert run_script(site, "killed").returncode == -9
    sql, last = "SELECT verdict, (SELECT count(*) > 2 FROM sample) FROM task", [("killed", 1)]
    wait_for(lambda: rows(site.folder / "run.sqlite", sql) == last and not site.recorders(), "the last publication")
    assert site.processes(), "the child lives on"
    (site.folder / "seen").touch()
