"""Without node-local disk: the safe mode beside the run folder, told, whole, and tidied up."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
from rooms.devices import simulated_uuid
from rooms.model import StandIn, TaskKey
from rooms.root import LocalFolder
from rooms.store import TaskWriter, publish
from rooms.task import RecorderHalf
from rooms.telemetry import Sidecar, SidecarOrder
from support.badcjobs_program import Site, rows
from support.live_files import grow, live_folders, live_rows
from support.waiting import wait_for

ENGINE = ("--engine", "demo", "--engine-arg=--burn-s=0.15", "--simulate", 2)
SHARED = (*ENGINE, "--config", "run.live_mode=shared")


def meta(site: Site) -> dict[str, str]:
    return dict(site.rows("SELECT key, value FROM meta WHERE key LIKE 'live%'"))


def test_a_run_in_the_safe_mode_is_complete_and_leaves_nothing_behind(site: Site) -> None:
    program = site.start_run(site.manifest(8), *SHARED, "--config", "run.heartbeat_every_s=0.5")
    wait_for(lambda: live_folders(site), "the live files are there")
    (folder,) = live_folders(site)
    assert folder.parent == site.out / "tasks" and folder.name.startswith(".live-")
    ended = program.wait()
    assert ended.exit_code == 0, ended.stderr
    assert "safe mode for shared filesystems: run.live_mode = shared" in ended.stderr
    assert meta(site) == {
        "live_folder": str(folder),
        "live_filesystem": meta(site)["live_filesystem"],
        "live_mode": "shared",
    }
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 8)]
    assert site.count("sample") > 4 and site.gaps() == []
    names = sorted(path.suffix for path in (site.out / "tasks").iterdir())
    assert names == [".log", ".sqlite"]
    assert list(site.local.iterdir()) == []


def test_a_node_without_a_local_folder_says_so_and_works(site: Site) -> None:
    ended = site.run(site.manifest(3), *ENGINE, env={"TMPDIR": str(site.folder / "nowhere")})
    assert ended.exit_code == 0, ended.stderr
    (log,) = (site.out / "tasks").glob("*.log")
    (line,) = [line for line in log.read_text().splitlines() if "live files: " in line]
    assert "safe mode" in line and f"there is no node-local folder {site.folder / 'nowhere'}" in line
    assert meta(site)["live_mode"] == "shared"


def test_with_a_local_disk_the_log_says_that_it_is_used(site: Site) -> None:
    ended = site.run(site.manifest(2), *ENGINE)
    (line,) = [line for line in ended.stderr.splitlines() if "live files: " in line]
    assert "INFO" in line and str(site.local) in line and "WAL on node-local disk" in line
    assert meta(site)["live_mode"] == "local"


def test_the_heartbeat_knows_the_devices_in_the_safe_mode_too(site: Site) -> None:
    program = site.start_run(
        site.manifest(400), *SHARED, "--config", "run.heartbeat_every_s=0.3", "--config", "run.publish_every_s=0.5"
    )
    wait_for(lambda: "gpu=" in program.stderr and "gpu=?" not in program.stderr.split("heartbeat")[-1], "a known pulse")
    wait_for(lambda: [line for line in program.stderr.splitlines() if "gpu=" in line and "%" in line], "a share")
    program.kill()
    wait_for(lambda: not site.processes(), "the recorder has published and is gone")


def test_a_recorder_that_is_killed_twice_in_the_safe_mode_loses_nothing_it_had_written(site: Site) -> None:
    program = site.start_run(site.manifest(60), *SHARED)
    for _ in range(2):
        before = len(live_rows(site, "SELECT 1 FROM sample"))
        wait_for(lambda before=before: len(live_rows(site, "SELECT 1 FROM sample")) > before + 3, "it is at work")  # type: ignore[misc]
        (recorder,) = site.recorders()
        recorder.kill()
        wait_for(lambda: recorder.pid not in [other.pid for other in site.recorders()], "it is dead")  # noqa: B023
    wait_for(lambda: "continues without telemetry" in program.stderr, "it was given up")
    written = set(live_rows(site, "SELECT device_id, at_ms FROM sample"))
    ended = program.wait()
    assert ended.exit_code == 0, ended.stderr
    assert written <= set(site.rows("SELECT device_id, at_ms FROM sample"))
    assert len(site.gaps()) == 2
    assert live_folders(site) == []


def test_a_killed_wrapper_in_the_safe_mode_is_published_for(site: Site) -> None:
    program = site.start_run(site.manifest(20), *SHARED, "--config", "run.publish_every_s=600")
    wait_for(lambda: len(live_rows(site, "SELECT 1 FROM chunk WHERE status = 'done'")) >= 2, "some chunks are done")
    wait_for(lambda: live_rows(site, "SELECT 1 FROM sample"), "the recorder is at work")
    program.kill()
    wait_for(lambda: not site.processes(), "everybody is gone", timeout_s=40)
    assert rows(site.task_database(), "PRAGMA integrity_check") == [("ok",)]
    assert site.count("chunk", "status = 'done'") >= 2 and site.count("sample") > 0
    assert live_folders(site) == []
    assert rows(site.merged(), "SELECT count(*) FROM task") == [(1,)]


def test_a_live_folder_that_a_dead_node_left_is_no_task_database(site: Site) -> None:
    program = site.start_run(site.manifest(20), *SHARED)
    wait_for(lambda: live_rows(site, "SELECT 1 FROM chunk WHERE status = 'done'") and site.task_databases(), "work")
    for process in site.processes():
        process.suspend()
    for process in site.processes():
        process.kill()
    program.wait()
    assert len(live_folders(site)) == 1
    assert rows(site.merged(), "SELECT count(*) FROM task") == [(1,)]


def test_a_mode_that_does_not_exist_is_refused(site: Site) -> None:
    refused = site.run(site.manifest(1), *ENGINE, "--config", "run.live_mode=fast")
    assert refused.exit_code == 2
    assert '--config run.live_mode = "fast" must be one of auto, local, shared' in refused.stderr


# --- samples on time --------------------------------------------------------------------------------------------------

TICK_MS = 100
KEY = TaskKey("4821", 7, 0, "gpu3")


class Recording:
    """A recorder of its own process at 10 Hz over a file that is large already, published back to back."""

    def __init__(self, folder: Path, *, shared: bool) -> None:
        folder.mkdir()
        self.local = LocalFolder(folder / "live")
        self.local.path.mkdir()
        self.target = folder / "published.sqlite"
        grow(self.local.recorder_file, KEY.task_id, megabytes=25, shared=shared)
        self.writer = TaskWriter(self.local.wrapper_file, KEY, shared=shared)
        self.half = RecorderHalf(self.local, self.target, shared=shared)
        self.shared = shared

    def run(self, seconds: float) -> list[int]:
        """Record for some time and return how long each publication meanwhile took, in milliseconds."""
        now_ms = int(time.time() * 1000)
        order = SidecarOrder(
            mark="none", task_id=KEY.task_id, wrapper_pid=0, interval_s=TICK_MS / 1000, stand_in=StandIn(8),
            devices=[(number, simulated_uuid(number)) for number in range(8)], search_path=None,
            started_at_ms=now_ms, asked_at_ms=now_ms, recorder_file=str(self.local.recorder_file),
            wrapper_file=str(self.local.wrapper_file), publish_to=str(self.target),
            local_folder=str(self.local.path), shared=self.shared,
        )  # fmt: skip
        self.half.recorder = sidecar = Sidecar(order)
        sidecar.wait_until_ready(20)
        took_ms, end_s = list[int](), time.monotonic() + seconds
        while (began_s := time.monotonic()) < end_s:
            publish([self.writer.half, self.half.uri], self.target, workplace=self.local.path)
            took_ms.append(round(1000 * (time.monotonic() - began_s)))
        sidecar.stop(10)
        publish([self.writer.half, self.half.uri], self.target, workplace=self.local.path)
        sidecar.release(10)
        self.writer.close()
        return took_ms

    def largest_distance_ms(self) -> int:
        times = rows(self.target, "SELECT DISTINCT at_ms FROM sample WHERE at_ms > 1000000000000 ORDER BY at_ms")
        return max(int(after - before) for (before,), (after,) in pairwise(times))


@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
def test_publishing_delays_no_sample_by_more_than_a_tick(tmp_path: Path, shared: bool) -> None:
    """Where others keep the machine busy every sample may be late; one that waits for publishing waits to its end."""
    told, delayed = [], True
    while delayed and len(told) < 4:
        recording = Recording(tmp_path / str(len(told)), shared=shared)
        took_ms, distance_ms = recording.run(4), recording.largest_distance_ms()
        told.append({"publications, ms": took_ms, "largest distance, ms": distance_ms})
        delayed = distance_ms >= max(2 * TICK_MS, min(took_ms) / 2)
    print(json.dumps(told))
    assert not delayed, told
