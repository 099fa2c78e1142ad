"""The Python API as a user writes it: scripts of their own, run by a Python of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

from support.badcjobs_program import Site, rows
from support.fake_nvml import no_driver
from support.waiting import wait_for


def run_script(site: Site, text: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", textwrap.dedent(text)]
    return subprocess.run(argv, env=site.environ(env), cwd=site.folder, capture_output=True, text=True, timeout=60)


TRAINING = """
    import json, sys, time
    from badcjobs import AlertLimits, Recorder

    alerts = []

    def on_alert(alert):
        alerts.append([alert.kind, alert.device_index, alert.over, alert.message])
        raise RuntimeError("a bug of mine")

    def samples(recorder):
        return recorder.stats()["sample_count"]

    # In a notebook it may be that nobody stops it.
    lasting = Recorder("lasting.sqlite", 0.05, simulate=1).start()
    assert lasting.start() is lasting  # a second start changes nothing
    text = Recorder("run.jsonl", 0.05, simulate=1)
    limits = AlertLimits(temperature_c=50)
    with text, Recorder("run.sqlite", 0.05, simulate=2, on_alert=on_alert, limits=limits) as recorder:
        for epoch in range(3):
            with recorder.mark(f"epoch {epoch}"):
                before = samples(recorder)
                while samples(recorder) < before + 3:
                    time.sleep(0.01)
        during = recorder.stats()
    after = recorder.stats()
    recorder.stop()
    with recorder.mark("too late"):
        pass
    assert recorder.stats() == after
    print(json.dumps({"during": during, "after": after, "alerts": alerts, "text": text.stats()}))
    for name in ("failed", "again"):
        failing = Recorder(f"{name}.sqlite", 0.05, simulate=1)
        try:
            with failing, failing.mark("boom"):
                raise ZeroDivisionError("mine")
        except ZeroDivisionError:
            print("seen")
    Recorder("again.sqlite", 0.05, simulate=1, overwrite=True).start().stop()
"""


def test_a_training_loop_is_recorded_with_marks_alerts_and_statistics(site: Site) -> None:
    done = run_script(site, TRAINING)
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
    assert done.stderr.count("RuntimeError: a bug of mine") == len(said["alerts"])
    assert len((site.folder / "run.jsonl").read_text().splitlines()) >= 3
    assert said["text"]["gpu_stats"]["0"]["power_draw_w"]["samples"] >= 2
    ends = {"lasting": [("done", 0)], "failed": [("failed", 1)], "again": [("done", 0)]}
    assert {name: rows(site.folder / f"{name}.sqlite", "SELECT verdict, exit_code FROM task") for name in ends} == ends
    assert rows(site.folder / "failed.sqlite", "SELECT name, ended_at_ms IS NOT NULL FROM mark") == [("boom", 1)]
    assert list(site.local.iterdir()) == [] and site.processes() == [], "nothing stays on the node"


def test_on_a_machine_without_a_gpu_the_machine_alone_is_recorded_with_one_warning(site: Site) -> None:
    script = """
        import json, sys, time
        from badcjobs import Recorder, list_devices
        with Recorder("run.sqlite", 0.05) as recorder:
            while recorder.stats()["sample_count"] < 2:
                time.sleep(0.01)
        print(json.dumps([list_devices(), recorder.stats()["gpu_stats"]]))
    """
    env = {**no_driver(), "PATH": "/usr/bin:/bin"}
    done = run_script(site, script, env)
    assert (done.returncode, done.stderr.count("no GPU to record"), done.stderr.count("\n") <= 3) == (0, 1, True)
    assert json.loads(done.stdout) == [[], {}]
    assert rows(site.folder / "run.sqlite", "SELECT count(*) >= 2 FROM host_sample") == [(1,)]


def test_a_program_that_is_killed_still_has_its_file_even_when_its_child_lives_on(site: Site) -> None:
    """A forked child holds the pipes of its parent open; the recorder must notice the death all the same."""
    out = site.folder / "run.sqlite"
    script = """
        import os, signal, sys, time
        from badcjobs import Recorder
        recorder = Recorder("run.sqlite", 0.05, simulate=1).start()
        if os.fork() == 0:
            recorder.stop()  # not the child's to stop
            os.close(1), os.close(2)
            while not os.path.exists("seen"):
                time.sleep(0.02)
            os._exit(0)
        while recorder.stats()["sample_count"] < 4:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run_script(site, script).returncode == -9
    last = [("killed", 1)]
    sql = "SELECT verdict, (SELECT count(*) > 2 FROM sample) FROM task"
    wait_for(lambda: rows(out, sql) == last and not site.recorders(), "the last publication")
    assert site.processes(), "the child lives on"
    (site.folder / "seen").touch()
