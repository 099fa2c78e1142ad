"""Prometheus' text: one table of names, values that are known, labels that are escaped, and promtool is content."""

from __future__ import annotations

import math
import os
import re
import shutil
import sqlite3
import subprocess
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.live import open_run
from rooms.model import Reading
from rooms.report import COUNTER, METRICS, SERVED, Metric, job_samples, prometheus_text, summarize, summarize_database
from rooms.root import SystemClock
from rooms.store import MergeOrder, merge
from support import needs
from support.live_run import write_live_run
from support.summaries import FINDINGS, JOB, NASTY, PROOF, TASK, device


def job_text(run: str = "july") -> str:
    summary = replace(summarize(JOB, (3,), PROOF), findings=FINDINGS)
    return prometheus_text(job_samples(summary, run))


def value(text: str, series: str) -> float:
    [line] = [line for line in text.splitlines() if line.startswith(f"{series} ")]
    return float(line.rpartition(" ")[2])


def check(text: str) -> subprocess.CompletedProcess[str]:
    """Ask promtool; what it says of style is an exit code of 3."""
    if shutil.which("promtool") is None:
        needs.missing("promtool", "promtool (Debian package prometheus) is not installed")
    return subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)


def test_promtool_is_content_with_every_metric_there_is() -> None:
    samples = [(m.name, 1.5, dict.fromkeys(m.labels, "x")) for m in METRICS]
    done = check(prometheus_text(samples))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_promtool_is_content_with_a_job_whatever_it_is_called() -> None:
    done = check(job_text(NASTY))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_promtool_is_not_content_with_everything() -> None:
    assert check('badcjobs_chunks{run="a"b"} 1\n').returncode != 0
    style = check("# HELP badcjobs_wrong_total x\n# TYPE badcjobs_wrong_total gauge\nbadcjobs_wrong_total 1\n")
    assert style.returncode != 0


def test_no_series_is_there_twice_not_even_of_slices_that_share_an_index() -> None:
    slices = [replace(device(), uuid=f"MIG-{n}", token=f"MIG-{n}") for n in range(3)]
    unread = [replace(device(), uuid=None, index=None, token=str(n)) for n in range(3)]
    text = prometheus_text(job_samples(summarize(replace(JOB, devices=(*slices, *unread))), "july"))
    series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series)) > 100


def test_a_job_says_every_metric_of_the_table() -> None:
    names = {name for name, _, _ in job_samples(replace(summarize(JOB, (3,), PROOF), findings=FINDINGS), "july")}
    assert names == {metric.name for metric in METRICS if metric.where != SERVED}


def test_the_names_of_the_contract_are_there_with_their_labels() -> None:
    text = job_text()
    labels = f'{{device="0",uuid="GPU-0",task="{TASK.name}"}}'
    assert value(text, f"badcjobs_gpu_temperature_celsius{labels}") == 66
    assert value(text, f"badcjobs_gpu_utilization_percent{labels}") == 70
    assert value(text, f"badcjobs_gpu_power_watts{labels}") == 210.5
    assert value(text, f"badcjobs_gpu_energy_joules_total{labels}") == 734_400
    assert f"badcjobs_gpu_memory_used_bytes{labels}" not in text, "the last reading did not say it"
    assert value(text, 'badcjobs_chunks{run="july",state="done"}') == 100
    assert value(text, 'badcjobs_tasks{run="july",verdict="running"}') == 1
    assert value(text, 'badcjobs_audio_seconds_total{run="july"}') == 360_000
    assert value(text, 'badcjobs_findings{run="july",severity="note"}') == 0
    assert value(text, 'badcjobs_alerts_total{run="july",kind="thermal",severity="warning"}') == 3


def test_an_alert_is_open_while_its_task_goes_on_in_the_merged_job_as_in_the_live_view(tmp_path: Path) -> None:
    now_ms = time.time_ns() // 10**6
    files = write_live_run(tmp_path, 24, now_ms=now_ms, seconds=5)
    with closing(sqlite3.connect(files[22])) as db, db:  # this one was killed, and left its alert as it was
        db.execute("UPDATE task SET verdict = 'killed'")
    series = 'badcjobs_alerts_open{run="july",kind="thermal",severity="warning"}'
    run = open_run(tmp_path, SystemClock())
    assert value(run.prometheus(run.look()), series.replace("july", tmp_path.name)) == 1
    merge(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock())
    merged = prometheus_text(job_samples(summarize_database(tmp_path / "job.sqlite"), "july"))
    assert value(merged, series) == 1
    assert value(merged, series.replace("open", "total")) == 2


def test_a_merge_that_has_fallen_behind_is_a_number_to_alert_on(tmp_path: Path) -> None:
    files, job = write_live_run(tmp_path, 3, now_ms=time.time_ns() // 10**6, seconds=5), tmp_path / "job.sqlite"
    merge(MergeOrder([tmp_path], job), SystemClock())
    series = 'badcjobs_tasks_outdated{run="july"}'

    def told() -> str:
        return prometheus_text(job_samples(summarize_database(job), "july"))

    assert value(told(), series) == 0
    os.utime(files[0], (1, 1))  # published again
    assert value(behind := told(), series) == 1
    assert check(behind).returncode == 0
    merge(MergeOrder([tmp_path], job), SystemClock())
    assert value(told(), series) == 0
    (tmp_path / "tasks").rename(tmp_path / "elsewhere")
    assert series not in told(), "nobody knows"


def test_the_states_add_up_to_the_time_and_energy_of_the_run() -> None:
    text = job_text()
    for of_states, total in (
        ("badcjobs_state_gpu_seconds_total", "badcjobs_granted_gpu_seconds_total"),
        ("badcjobs_state_energy_joules_total", "badcjobs_energy_joules_total"),
    ):
        parts = [float(found) for found in re.findall(rf"^{of_states}{{.*}} (\S+)$", text, re.MULTILINE)]
        assert len(parts) == 5
        assert sum(parts) == pytest.approx(value(text, f'{total}{{run="july"}}'), rel=0.01)


def test_what_is_not_known_or_no_number_is_left_out_with_its_head() -> None:
    odd = [("badcjobs_source_rows", None, {}), ("badcjobs_speed_ratio", math.nan, {}),
           ("badcjobs_left_gpu_seconds", math.inf, {})]  # fmt: skip
    assert prometheus_text(odd) == ""
    unknown = replace(
        device(),
        reading=Reading(),
        read_at_ms=None,
        energy_counter_j=None,
        energy_integrated_j=None,
        power_limit_w=None,
    )
    text = prometheus_text(job_samples(summarize(replace(JOB, devices=(unknown,))), "july"))
    assert "badcjobs_gpu_power" not in text
    assert "badcjobs_energy_joules_total" not in text
    assert "badcjobs_source_rows" not in text


def test_a_name_outside_the_table_is_refused() -> None:
    with pytest.raises(KeyError, match="badcjobs_surprise"):
        prometheus_text([("badcjobs_surprise", 1, {})])


def test_labels_are_escaped_and_empty_ones_are_none() -> None:
    text = prometheus_text([("badcjobs_chunks", 2, {"run": 'a"b\\c\nd', "state": ""})])
    assert text.splitlines()[-1] == 'badcjobs_chunks{run="a\\"b\\\\c\\nd"} 2'
    assert prometheus_text([("badcjobs_info", 1, {})]).endswith("badcjobs_info 1\n")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_is_named_after_the_rules(metric: Metric) -> None:
    assert re.fullmatch(r"badcjobs_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == COUNTER)
    assert metric.help and metric.unit
    assert not metric.help.endswith(".")
