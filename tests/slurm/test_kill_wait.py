"""What Slurm leaves of a task that it cancels in the middle of chunks that will not end: KillWait=30, and KillWait=5.

Both jobs are run at the same time. A short grace saves CI a quarter of a minute; with the one that a user has, which
leaves less of the 30 s: pytest tests/slurm/test_kill_wait.py --count 100
"""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.badcjobs_program import MANIFEST_HEADER
from support.databases import query
from support.slurm_cluster import SlurmCluster
from support.waiting import wait_for

QUICK, CHUNKS, DEVICES = 6, 12, 2
KILL_WAIT_S = 30.0
SHORT_GRACE_S, GRACE_S, REST_S = 4.0, 20.0, 6.0  # what is left after the grace is for publishing, on any machine

# TERM reaches every process of a job; these do not obey it, like a program deep in a driver.
HANGING = r"""#!/bin/sh
if [ ${BADCJOBS_CHUNK_ID#c} -ge QUICK ] && [ ! -e finish ]; then
    trap '' TERM
    touch hangs-$BADCJOBS_CHUNK_ID
    sleep 300
fi
printf 'start_time,end_time,label,score\n0,1,%s,0.5\n' $BADCJOBS_CHUNK_ID > "$2"
"""


@dataclass
class Cancelled:
    """A job on a cluster, from its submission to whatever its end leaves."""

    cluster: SlurmCluster
    folder: Path
    grace_s: float
    sent_ms: int = 0

    def submit(self) -> int:
        lines = [
            "#!/bin/bash",
            f"export TMPDIR={self.folder}/local",
            "mkdir -p $TMPDIR",
            f"exec {sys.executable} -m badcjobs run manifest.csv --out run --simulate 4"
            f" --command '{self.folder}/hanging.sh {{input}} {{output}}'"
            + (f" --config run.grace_s={self.grace_s}" if self.grace_s != GRACE_S else ""),
        ]
        (self.folder / "job.sh").write_text("\n".join(lines) + "\n")
        return self.cluster.sbatch(self.folder / "job.sh", f"--gpus-per-node={DEVICES}", cwd=self.folder)

    def prepare(self) -> int:
        self.folder.mkdir()
        rows = [MANIFEST_HEADER]
        for number in range(CHUNKS):
            (self.folder / f"{number}.wav").write_bytes(b"any audio")
            rows.append(f"rec,c{number},{number}.wav,{number * 1000},{number * 1000 + 1000},0,,")
        (self.folder / "manifest.csv").write_text("\n".join(rows) + "\n")
        (self.folder / "hanging.sh").write_text(HANGING.replace("QUICK", str(QUICK)))
        (self.folder / "hanging.sh").chmod(0o755)
        return self.submit()

    def cancel(self, job_id: int) -> None:
        """Send what a time limit sends: TERM, and after KillWait KILL; every device has a chunk that hangs by then."""
        wait_for(lambda: len(list(self.folder.glob("hangs-*"))) == DEVICES, f"chunks hang\n{self.log}", timeout_s=60)
        wait_for(self._is_recorded, "there are readings")
        self.sent_ms = int(time.time() * 1000)
        self.cluster.run(["scancel", str(job_id)])

    def _is_recorded(self) -> bool:
        try:
            (live,) = self.folder.glob("local/*/recorder.sqlite")
            return query(live, "SELECT count(*) FROM sample") > [(DEVICES,)]
        except (ValueError, sqlite3.Error):
            return False  # it has not begun, or is in the middle of beginning

    @property
    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self.folder.glob("slurm-*.out"))

    @property
    def database(self) -> Path:
        return min((self.folder / "run" / "tasks").glob("*.sqlite"))

    def processes(self) -> list[int]:
        """Return whatever runs in the folder or has it on its command line."""
        return [process.pid for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return str(self.folder) in process.cwd() or process.environ().get("TMPDIR") == f"{self.folder}/local"
        except psutil.Error:
            return False  # gone meanwhile, or somebody else's


@pytest.fixture(scope="module")
def cancelled(
    slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[dict[str, Cancelled]]:
    """Two jobs that were cancelled, with much time and with little, and have come to their end."""
    folder = tmp_path_factory.mktemp("kill-wait")
    with SlurmCluster(nodes=1, gpus=4, kill_wait_s=round(KILL_WAIT_S)) as patient:
        assert slurm_cluster.shape.kill_wait_s == 5
        grace_s = GRACE_S if pytestconfig.getoption("--count") >= 50 else SHORT_GRACE_S
        jobs = {
            "30 s": Cancelled(patient, folder / "30", grace_s),
            "5 s": Cancelled(slurm_cluster, folder / "5", GRACE_S),
        }
        job_ids = {name: job.prepare() for name, job in jobs.items()}
        for name, job in jobs.items():
            job.cancel(job_ids[name])
        for job in jobs.values():
            wait_for(lambda job=job: not job.processes(), "everybody is gone", timeout_s=KILL_WAIT_S + 15)
        yield jobs


@pytest.fixture(params=["30 s", "5 s"])
def job(cancelled: dict[str, Cancelled], request: pytest.FixtureRequest) -> Cancelled:
    return cancelled[request.param]


def test_finished_chunks_and_their_detections_are_kept_and_the_others_stay_pending(job: Cancelled) -> None:
    assert query(job.database, "PRAGMA integrity_check") == [("ok",)]
    states = query(job.database, "SELECT chunk_id, status FROM chunk WHERE status != 'pending' ORDER BY chunk_id")
    assert states == [(f"c{number}", "done") for number in range(QUICK)], job.log
    assert query(job.database, "SELECT label FROM detection ORDER BY 1") == [(f"c{n}",) for n in range(QUICK)]
    assert query(job.database, "SELECT count(*) FROM chunk") == [(CHUNKS,)]


def test_with_30_s_everything_is_published_and_in_order_before_the_kill(cancelled: dict[str, Cancelled]) -> None:
    job = cancelled["30 s"]
    ((verdict, exit_code, ended_at_ms),) = query(job.database, "SELECT verdict, exit_code, ended_at_ms FROM task")
    assert (verdict, exit_code) == ("stopped", 75), job.log
    assert "SIGTERM: ending what is still running" in job.log, "it gave them all the time that there was"
    published_s = job.database.stat().st_mtime - job.sent_ms / 1000
    assert job.grace_s < published_s < job.grace_s + REST_S
    assert GRACE_S + REST_S < KILL_WAIT_S
    assert ended_at_ms - job.sent_ms < 1000 * published_s
    assert list((job.folder / "local").iterdir()) == [], "nothing stays on the node"


def test_with_5_s_the_kill_comes_first_and_the_readings_until_the_signal_are_there(
    cancelled: dict[str, Cancelled],
) -> None:
    job = cancelled["5 s"]
    assert "task ends" not in job.log, "then this proves nothing"
    assert query(job.database, "SELECT exit_code FROM task") == [(None,)]
    assert query(job.database, "SELECT count(DISTINCT device_id) FROM sample") == [(DEVICES,)]
    ((last_ms,),) = query(job.database, "SELECT max(at_ms) FROM sample")
    assert last_ms > job.sent_ms - 3000


def test_the_same_command_finishes_what_was_left(job: Cancelled) -> None:
    (job.folder / "finish").touch()
    again = job.submit()
    (end,) = job.cluster.wait(again).values()
    assert (end.state, end.exit_code) == ("COMPLETED", 0), job.log
    last = max((job.folder / "run" / "tasks").glob("*.sqlite"), key=lambda path: path.stat().st_mtime)
    assert query(last, "SELECT status, count(*) FROM chunk GROUP BY 1 ORDER BY 1") == [
        ("done", CHUNKS - QUICK), ("skipped", QUICK),
    ]  # fmt: skip
