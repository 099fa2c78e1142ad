"""``--workers-per-gpu auto``: measured in the run, written down, and known to the next run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support.badcjobs_program import QUICK, Site
from support.waiting import wait_for

WITHOUT_TELEMETRY = "--no-emit-gpu-telemetry"  # a simulated device has little memory left, and would say so
ONE_DEVICE = ("--simulate", "1", "--config", "run.stage=never", *QUICK)
THREE_CORES = {
    "SLURM_JOB_ID": "4821",
    "SLURMD_NODENAME": "gpu-01",
    "SLURM_CPUS_PER_TASK": "3",
    "CUDA_VISIBLE_DEVICES": "0",
}


@pytest.fixture
def work(site: Site) -> tuple[object, ...]:
    """Work that waits more than it computes, as HawkEars does; with each worker more is done."""
    program = site.folder / "work.sh"
    program.write_text('sleep 0.2\nprintf "start_time,end_time,label,score\\n" > "$2"\n')
    return (site.manifest(2000), "--engine", "command", "--command", f"sh {program} {{input}} {{output}}", *ONE_DEVICE)


def stop_after(
    site: Site, work: tuple[object, ...], words: str, *more: str, environ: dict[str, str] = THREE_CORES
) -> str:
    task = site.start("run", *work, *more, "--out", site.out, "--workers-per-gpu", "auto", env=environ)
    wait_for(lambda: words in task.stderr, words, 60)
    task.send(signal.SIGTERM)
    assert task.wait().exit_code == 75
    return task.stderr


def test_workers_are_added_while_that_pays_and_the_next_run_begins_where_this_one_ended(
    site: Site, work: tuple[object, ...]
) -> None:
    stop_after(site, work, "there are no cores for more", WITHOUT_TELEMETRY)
    decisions = site.rows("SELECT value, reason, subject FROM decision WHERE kind = 'workers_per_gpu' ORDER BY at_ms")
    assert [value for value, *_ in decisions] == [1, 2, 3, 3]
    assert decisions[0][1].startswith("start: 3 cores and 16 GiB of GPU memory per device")
    assert "2 per device changed the rate by +" in decisions[2][1]
    assert {subject for *_, subject in decisions} == {"Simulated GPU"}
    assert site.rows("SELECT count(DISTINCT worker_id) FROM attempt") == [(3,)]

    lesson = {"workers": 3, "cores": 3, "settled": True}
    for file in (site.out / "learned.json", Path(site.environ()["XDG_CACHE_HOME"]) / "badcjobs" / "learned.json"):
        (subject,) = json.loads(file.read_text())["lessons"].items()
        assert subject == (f"command {work[work.index('--command') + 1]}", {"Simulated GPU": lesson})

    stderr = stop_after(site, work, "workers: 3, engine command", WITHOUT_TELEMETRY)
    assert "workers per device: 3; start: an earlier run found 3 to be best" in stderr


def test_little_memory_begins_with_one_worker_and_a_device_that_this_one_fills_by_half_gets_no_second(
    site: Site, work: tuple[object, ...]
) -> None:
    little = {"SLURM_CPUS_PER_TASK": "8", "SLURM_MEM_PER_NODE": "6144"}
    stop_after(site, work, "of a device's memory", environ={**THREE_CORES, **little})
    decisions = site.rows("SELECT value, reason FROM decision WHERE kind = 'workers_per_gpu' ORDER BY at_ms")
    assert [value for value, _ in decisions] == [1, 1]
    assert "the job has 6.0 GiB of main memory, and a worker may need 4.0 GiB" in decisions[0][1]


def test_one_worker_per_device_is_what_you_get_if_you_do_not_ask(site: Site) -> None:
    outcome = site.run(site.manifest(4), "--engine", "demo", "--simulate", "2", *QUICK)
    assert outcome.exit_code == 0
    assert site.rows("SELECT workers FROM task") == [(2,)]
    assert site.rows("SELECT kind FROM decision") == [("staging",)]
    assert not (site.out / "learned.json").exists()


@pytest.mark.parametrize("wrong", ["0", "-1", "many", "1.5", "65", ""])
def test_a_number_of_workers_that_is_none_is_refused(site: Site, wrong: str) -> None:
    outcome = site.run(site.manifest(1), "--engine", "demo", "--simulate", "1", f"--workers-per-gpu={wrong}")
    assert outcome.exit_code == 2
    assert f'--workers-per-gpu = "{wrong}" must be a whole number from 1 to 64, or auto' in outcome.stderr
