"""``--workers-per-gpu auto``: measured in the run, written down, and known to the next run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from support.badcjobs_program import QUICK, Site
from support.waiting import wait_for

TWO_CORES = {
    "SLURM_JOB_ID": "4821", "SLURMD_NODENAME": "gpu-01", "SLURM_CPUS_PER_TASK": "2", "CUDA_VISIBLE_DEVICES": "0",
}  # fmt: skip


def test_workers_are_added_while_that_pays_and_the_next_run_begins_where_this_one_ended(site: Site) -> None:
    """The work waits more than it computes, as HawkEars does: with each worker more is done."""
    program = site.script("work.sh", 'sleep 0.12\necho start_time,end_time,label,score > "$2"')
    command = f"{program} {{input}} {{output}}"
    work = ("run", site.manifest(1200), "--command", command, "--simulate", 1, "--config", "run.stage=never", *QUICK,
            "--out", site.out, "--no-emit-gpu-telemetry", "--workers-per-gpu", "auto")  # fmt: skip
    task = site.start(*work, env=TWO_CORES)
    wait_for(lambda: "there are no cores for more" in task.stderr, "no cores for more")
    task.send(signal.SIGTERM)
    assert task.wait().exit_code == 75
    decisions = site.rows("SELECT value, reason, subject FROM decision WHERE kind = 'workers_per_gpu' ORDER BY at_ms")
    assert [(value, subject) for value, _, subject in decisions] == [(n, "Simulated GPU") for n in (1, 2, 2)]
    assert decisions[0][1].startswith("start: 2 cores and 16 GiB of GPU memory per device")
    assert "2 per device changed the rate by +" in decisions[2][1]
    assert site.rows("SELECT count(DISTINCT worker_id) FROM attempt") == [(2,)]
    lesson = {"workers": 2, "cores": 2, "settled": True}
    for file in (site.out / "learned.json", Path(site.environ()["XDG_CACHE_HOME"]) / "badcjobs" / "learned.json"):
        lessons = json.loads(file.read_text())["lessons"]
        assert lessons == {f"command {command}": {"Simulated GPU": lesson}}
    little = {"SLURM_MEM_PER_NODE": "6144", "SLURM_RESTART_COUNT": "1"}
    task = site.start(*work, env={**TWO_CORES, **little})
    wait_for(lambda: "workers: 1, engine command" in task.stderr, "the next run")
    task.send(signal.SIGINT)
    assert task.wait().exit_code == 130
    known = "start: an earlier run found 2 to be best (2 cores and 16 GiB of GPU memory per device)"
    assert f"{known}; the job has 6.0 GiB of main memory, and a worker may need 4.0 GiB" in task.stderr
