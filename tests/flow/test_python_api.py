"""The Python API as a user writes it: scripts of their own, run by a Python of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.badcjobs_program import ON_CPU, Site, rows
from support.fake_nvml import fake_nvml_folder
from support.waiting import wait_for


def run_script(
    site: Site, text: str, *args: object, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    script = site.folder / "user_script.py"
    script.write_text(textwrap.dedent(text))
    argv = [sys.executable, str(script), *map(str, args)]
    return subprocess.run(
        argv, env=site.environ(env), cwd=site.folder, capture_output=True, text=True, timeout=60, check=False
    )


TRAINING = """
    import json, sys, time
    from badcjobs import AlertLimits, Recorder

    alerts = []

    def on_alert(alert):
        alerts.append([alert.kind, alert.device_index, alert.over, alert.message])
        raise RuntimeError("a bug of mine")

    with Recorder(sys.argv[1], 0.05, simulate=2, on_alert=on_alert, limits=AlertLimits(temperature_c=50)) as recorder:
        for epoch in range(3):
            with recorder.mark(f"epoch {epoch}"):
                time.sleep(0.15)
        during = recorder.stats()
    print(json.dumps({"during": during, "after": recorder.stats(), "alerts": alerts}))
"""


@pytest.fixture(scope="module")
def training(shared_site: Site) -> tuple[Path, dict, str]:
    out = shared_site.folder / "run.sqlite"
    done = run_script(shared_site, TRAINING, out)
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout), done.stderr


def test_a_training_loop_leaves_a_task_database_with_samples_and_marks(training: tuple[Path, dict, str]) -> None:
    out, _, _ = training
    assert rows(out, "PRAGMA integrity_check") == [("ok",)]
    assert rows(out, "SELECT verdict, exit_code, engine, devices FROM task") == [("done", 0, None, 2)]
    assert rows(out, "SELECT count(*) >= 10, count(DISTINCT device_id) FROM sample") == [(1, 2)]
    marks = rows(out, "SELECT name, ended_at_ms - started_at_ms BETWEEN 140 AND 2000 FROM mark ORDER BY started_at_ms")
    assert marks == [("epoch 0", 1), ("epoch 1", 1), ("epoch 2", 1)]
    assert rows(
        out,
        """SELECT count(*) > 0 FROM mark m JOIN sample s ON s.at_ms BETWEEN m.started_at_ms AND m.ended_at_ms
           WHERE m.name = 'epoch 1'""",
    ) == [(1,)]
    assert rows(out, "SELECT count(*) FROM recorder") == [(1,)]


def test_stats_are_there_during_the_run_and_afterwards(training: tuple[Path, dict, str]) -> None:
    out, said, _ = training
    during, after = said["during"], said["after"]
    ((instants,),) = rows(out, "SELECT count(DISTINCT at_ms) FROM sample")
    assert 0 < during["sample_count"] <= after["sample_count"] == instants
    assert 0 < during["monitoring_duration_seconds"] <= after["monitoring_duration_seconds"] < 30
    assert list(after["gpu_stats"]) == ["0", "1"]
    first = after["gpu_stats"]["0"]
    assert first["name"] == "Simulated GPU"
    assert first["utilization"]["samples"] == instants
    assert 0 <= first["utilization"]["min"] <= first["utilization"]["mean"] <= first["utilization"]["max"] <= 100
    assert 0 < first["memory_usage_percent"]["p50"] < 100


def test_on_alert_hears_each_alert_once_and_its_own_bug_stays_in_the_log(training: tuple[Path, dict, str]) -> None:
    _, said, stderr = training
    begun = [alert[:3] for alert in said["alerts"] if alert[0] == "thermal"]
    assert sorted(begun) == [["thermal", 0, False], ["thermal", 1, False]]
    assert stderr.count("RuntimeError: a bug of mine") == len(said["alerts"])


def test_nothing_stays_on_the_node(training: tuple[Path, dict, str], shared_site: Site) -> None:
    assert list(shared_site.local.iterdir()) == []
    assert shared_site.processes() == []


def test_an_error_in_the_users_code_is_theirs_and_the_recording_says_that_it_failed(site: Site) -> None:
    done = run_script(
        site,
        """
        import sys
        from badcjobs import Recorder
        with Recorder(sys.argv[1], 0.05, simulate=1) as recorder:
            with recorder.mark("boom"):
                raise ZeroDivisionError("mine")
        """,
        site.folder / "run.sqlite",
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ZeroDivisionError: mine")
    assert rows(site.folder / "run.sqlite", "SELECT verdict FROM task") == [("failed",)]
    assert rows(site.folder / "run.sqlite", "SELECT ended_at_ms IS NOT NULL FROM mark") == [(1,)]


def test_on_a_machine_without_a_gpu_the_machine_alone_is_recorded_with_one_warning(site: Site) -> None:
    done = run_script(
        site,
        """
        import json, sys, time
        from badcjobs import Recorder, list_devices
        with Recorder(sys.argv[1], 0.05) as recorder:
            time.sleep(0.3)
        print(json.dumps([list_devices(), recorder.stats()]))
        """,
        site.folder / "run.sqlite",
        env={"LD_LIBRARY_PATH": str(fake_nvml_folder()), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") <= 3, done.stderr
    assert done.stderr.count("no GPU to record") == 1
    devices, stats = json.loads(done.stdout)
    assert devices == []
    assert stats["gpu_stats"] == {}
    assert stats["sample_count"] >= 2
    assert rows(site.folder / "run.sqlite", "SELECT count(*) >= 2 FROM host_sample") == [(1,)]


def test_a_notebook_that_never_stops_its_recorder_still_has_its_file(site: Site) -> None:
    done = run_script(
        site,
        """
        import sys, time
        from badcjobs import Recorder
        recorder = Recorder(sys.argv[1], 0.05, simulate=1).start()
        time.sleep(0.3)
        """,
        site.folder / "run.sqlite",
    )
    assert done.returncode == 0, done.stderr
    assert rows(site.folder / "run.sqlite", "SELECT verdict, (SELECT count(*) > 2 FROM sample) FROM task") == [
        ("done", 1)
    ]


def test_a_program_that_is_killed_still_has_its_file_even_when_its_child_lives_on(site: Site) -> None:
    """A forked child holds the pipes of its parent open; the recorder must notice the death all the same."""
    out = site.folder / "run.sqlite"
    done = run_script(
        site,
        """
        import os, signal, sys, time
        from badcjobs import Recorder
        recorder = Recorder(sys.argv[1], 0.05, simulate=1).start()
        if os.fork() == 0:
            recorder.stop()  # not the child's to stop
            os.close(1), os.close(2)
            for _ in range(1000):
                if os.path.exists("seen"):
                    break
                time.sleep(0.02)
            os._exit(0)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        out,
    )
    assert done.returncode == -9
    wait_for(
        lambda: rows(out, "SELECT verdict FROM task") == [("killed",)] and not site.recorders(), "the last publication"
    )
    assert site.processes(), "the child lives on"
    (site.folder / "seen").touch()
    assert rows(out, "SELECT count(*) > 2 FROM sample") == [(1,)]


def test_text_is_written_for_people_who_want_no_database(site: Site) -> None:
    done = run_script(
        site,
        """
        import json, sys, time
        from badcjobs import Recorder
        with Recorder(sys.argv[1], 0.05, simulate=1) as recorder:
            time.sleep(0.3)
        print(json.dumps(recorder.stats()))
        """,
        site.folder / "run.jsonl",
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (site.folder / "run.jsonl").read_text().splitlines()]
    assert len(lines) >= 3
    assert json.loads(done.stdout)["gpu_stats"]["0"]["power_draw_w"]["samples"] >= 2


def test_listed_devices_are_those_of_the_gpus_command(site: Site) -> None:
    script = """
        import json
        from dataclasses import asdict
        from badcjobs import list_devices
        print(json.dumps([[asdict(device) for device in list_devices(all=all, simulate=4)] for all in (False, True)]))
    """
    env = {"CUDA_VISIBLE_DEVICES": "2"}
    mine, everything = json.loads(run_script(site, script, env=env).stdout)
    shown = [
        site.badcjobs("gpus", "--simulate", 4, "--json", *more, env=env).json["devices"] for more in ((), ("--all",))
    ]
    for ours, theirs in zip((mine, everything), shown, strict=True):
        names = ("index", "uuid", "token", "name", "memory_total_bytes", "backend", "granted", "why")
        assert [{name: device[name] for name in names} for device in ours] == [
            {name: device[name] for name in names} for device in theirs
        ]
    assert [device["index"] for device in mine] == [2]
    assert len(everything) == 4


def test_a_merged_job_is_opened_for_reading(site: Site) -> None:
    assert site.run(site.manifest(3), *ON_CPU).exit_code == 0
    site.merged()
    script = """
        import json, sys
        from badcjobs import open_job
        from badcjobs.errors import BadInput
        job = open_job(sys.argv[1])
        try:
            job.query("DELETE FROM chunk")
            refused = False
        except BadInput:
            refused = True
        chunks = job.query("SELECT status, count(*) AS many FROM chunk GROUP BY status")
        by_name = job.query("SELECT chunk_id FROM chunk WHERE chunk_id = ?", "c001")
        print(json.dumps([job.summary(), chunks, by_name, list(job.tables), refused], default=str))
    """
    done = run_script(site, script, site.out)
    assert done.returncode == 0, done.stderr
    summary, chunks, by_name, tables, refused = json.loads(done.stdout)
    told = site.badcjobs("report", site.out, "--json").json
    assert (summary["verdict"], summary["done"]) == (told["verdict"], told["done"]) == ("done", 3)
    assert set(summary) == set(told)
    assert chunks == [{"status": "done", "many": 3}]
    assert by_name == [{"chunk_id": "c001"}]
    assert {"chunk", "sample", "job_summary"} <= set(tables)
    assert refused
    assert run_script(site, script, site.out / "job.sqlite").returncode == 0
