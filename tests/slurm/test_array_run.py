"""The main ring: a real array over a real manifest, from sbatch to the merged job database, row by row."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.audio import make_wav
from support.databases import query
from support.slurm_cluster import JobEnd, SlurmCluster
from support.waiting import wait_for

TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "array.sbatch"
TASKS = 4


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Badcjobs as jobs find it."""
    path = tmp_path / "bin" / "badcjobs"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m badcjobs "$@"\n')
    path.chmod(0o755)
    return path


def make_manifest(folder: Path, chunks: int, *, broken: tuple[int, ...] = ()) -> Path:
    """Write audio with one loud stretch in each chunk, at a place that tells the chunk."""
    manifest = folder / "manifest.csv"
    with manifest.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(
            ("recording_id", "chunk_id", "source_path", "start_ms", "end_ms", "overlap_ms", "sha256", "notes")
        )
        for number in range(chunks):
            path = make_wav(folder / f"{number}.wav", seconds=2, loud=((number % 10 / 10, number % 10 / 10 + 0.5),))
            if number in broken:
                path.write_bytes(b"not a wav file")
            start_ms = number // 3 * 2000
            rows.writerow((f"rec{number % 3}", f"c{number:03d}", path.name, start_ms, start_ms + 2000, 0, "", ""))
    return manifest


def submit(cluster: SlurmCluster, folder: Path, program: Path, *args: str, options: tuple[str, ...] = ()) -> int:
    arguments = " ".join(args)
    export = f"ALL,SOURCE={folder / 'manifest.csv'},OUT={folder / 'out'},BADCJOBS={program},BADCJOBS_ARGS={arguments}"
    return cluster.sbatch(
        TEMPLATE, f"--array=0-{TASKS - 1}", "--gpus-per-node=2", *options, f"--export={export}", cwd=folder
    )


def merge(folder: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "badcjobs", "merge", str(folder / "out"), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def logs(folder: Path) -> str:
    return "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))


def test_an_array_of_four_tasks_with_two_gpus_each_does_every_row_exactly_once(
    slurm_cluster: SlurmCluster, tmp_path: Path, program: Path
) -> None:
    manifest = make_manifest(tmp_path, chunks=50)
    job_id = submit(slurm_cluster, tmp_path, program, "--simulate=4", "--engine=demo", "--interval=0.2")
    ends = slurm_cluster.wait(job_id, timeout_s=120)
    assert ends == {f"{job_id}_{index}": JobEnd("COMPLETED", 0) for index in range(TASKS)}, logs(tmp_path)

    summary = merge(tmp_path)
    job = tmp_path / "out" / "job.sqlite"
    with manifest.open() as file:
        expected = [
            (row["recording_id"], row["chunk_id"], row["source_path"], int(row["start_ms"]), int(row["end_ms"]), "done")
            for row in csv.DictReader(file)
        ]
    columns = "recording_id, chunk_id, source_path, start_ms, end_ms, status"
    assert query(job, f"SELECT {columns} FROM chunk ORDER BY chunk_id") == sorted(expected, key=lambda row: row[1])
    assert (summary["verdict"], summary["done"], summary["tasks"]) == ("done", 50, TASKS)

    # Row i of the manifest went to array task i % 4, and nowhere else.
    places = query(job, "SELECT chunk_id, array_index FROM chunk JOIN task USING (task_id)")
    assert dict(places) == {f"c{n:03d}": n % TASKS for n in range(50)}

    # Each loud stretch was found where it was put.
    heard = query(job, "SELECT chunk_id, start_ms, end_ms FROM detection ORDER BY chunk_id")
    assert heard == [(f"c{n:03d}", n % 10 * 100, n % 10 * 100 + 500) for n in range(50)]

    # Two devices per task, the ones Slurm granted; tasks that ran side by side on a node share none.
    devices = query(job, "SELECT task_id, token, device_index, uuid FROM device")
    assert Counter(task for task, *_ in devices) == {task: 2 for (task,) in query(job, "SELECT task_id FROM task")}
    assert all(token == str(index) for _, token, index, _ in devices)
    assert query(job, "SELECT count(DISTINCT device_id) FROM worker") == [(2 * TASKS,)]
    assert query(job, "SELECT count(DISTINCT device_id) FROM sample") == [(2 * TASKS,)]
    together = """SELECT count(*) FROM task a JOIN task b ON a.task_id < b.task_id AND a.node = b.node
                  AND a.started_at_ms < b.ended_at_ms AND b.started_at_ms < a.ended_at_ms
                  JOIN device x ON x.task_id = a.task_id JOIN device y ON y.task_id = b.task_id AND y.uuid = x.uuid"""
    assert query(job, together) == [(0,)]


def test_each_worker_sees_its_own_device_and_no_other(
    slurm_cluster: SlurmCluster, tmp_path: Path, program: Path
) -> None:
    make_manifest(tmp_path, chunks=16)
    spy = tmp_path / "spy"
    spy.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "e = os.environ\n"
        "label = e['CUDA_VISIBLE_DEVICES'] + ' ' + e['BADCJOBS_DEVICE_UUID'] + ' ' + e['BADCJOBS_CHUNK_ID']\n"
        "open(sys.argv[2], 'w').write('start_time,end_time,label,score\\n0,1,' + label + ',1\\n')\n"
    )
    spy.chmod(0o755)
    config = tmp_path / "spy.toml"
    config.write_text(f"[run]\ncommand = '{spy} {{input}} {{output}}'\nsimulate = 4\n")
    job_id = submit(slurm_cluster, tmp_path, program, f"--config={config}")
    ends = slurm_cluster.wait(job_id, timeout_s=120)
    assert {end.state for end in ends.values()} == {"COMPLETED"}, logs(tmp_path)
    merge(tmp_path)
    seen = query(
        tmp_path / "out" / "job.sqlite",
        """SELECT d.label, v.uuid || ' ' || v.uuid || ' ' || c.chunk_id
           FROM detection d JOIN chunk c USING (recording_id, chunk_id) JOIN device v ON v.device_id = c.device_id""",
    )
    assert len(seen) == 16
    assert all(label == expected for label, expected in seen)


def test_a_chunk_that_fails_for_good_makes_its_task_exit_1_and_only_its_task(
    slurm_cluster: SlurmCluster, tmp_path: Path, program: Path
) -> None:
    make_manifest(tmp_path, chunks=20, broken=(6,))
    job_id = submit(slurm_cluster, tmp_path, program, "--simulate=4", "--engine=demo", "--config=run.backoff_s=0.05")
    ends = slurm_cluster.wait(job_id, timeout_s=120)
    assert {key: end.exit_code for key, end in ends.items()} == {
        f"{job_id}_{index}": int(index == 6 % TASKS) for index in range(TASKS)
    }, logs(tmp_path)
    summary = merge(tmp_path)
    assert (summary["verdict"], summary["done"], summary["failed"]) == ("failed", 19, 1)
    assert query(tmp_path / "out" / "job.sqlite", "SELECT chunk_id, error_class FROM chunk WHERE status='failed'") == [
        ("c006", "bad_audio")
    ]
    assert "rec0 c006 (bad_audio)" in logs(tmp_path)


CANCELLED_CHUNKS = 280  # seven seconds of work in each task: on a busy machine the last begins seconds after the first


def test_a_cancelled_array_stops_in_order_and_goes_on_when_some_indices_are_submitted_again(
    slurm_cluster: SlurmCluster, tmp_path: Path, program: Path
) -> None:
    make_manifest(tmp_path, chunks=CANCELLED_CHUNKS)
    args = ("--simulate=4", "--engine=demo", "--engine-arg=--burn-s=0.2")
    first = submit(slurm_cluster, tmp_path, program, *args)
    wait_for(lambda: len(list((tmp_path / "out" / "tasks").glob("*.sqlite"))) == TASKS, "every task has begun")
    slurm_cluster.run(["scancel", str(first)])
    assert {end.state for end in slurm_cluster.wait(first, timeout_s=120).values()} == {"CANCELLED"}
    wait_for(lambda: [code for (code,) in exit_codes(tmp_path)] == [75] * TASKS, "every task has stopped")
    summary = merge(tmp_path)
    assert summary["verdict"] == "stopped"
    assert summary["left"] and summary["chunks"] == CANCELLED_CHUNKS

    for indices in ("1,3", "0,2"):
        again = submit(slurm_cluster, tmp_path, program, *args, options=(f"--array={indices}",))
        ends = slurm_cluster.wait(again, timeout_s=120)
        assert {end.exit_code for end in ends.values()} == {0}, logs(tmp_path)
    summary = merge(tmp_path)
    assert (summary["verdict"], summary["done"], summary["chunks"]) == ("done", CANCELLED_CHUNKS, CANCELLED_CHUNKS)
    # Nothing that was done the first time was done again.
    twice = """SELECT count(*) FROM (SELECT 1 FROM attempt WHERE outcome = 'done'
               GROUP BY recording_id, chunk_id HAVING count(*) > 1)"""
    assert query(tmp_path / "out" / "job.sqlite", twice) == [(0,)]


def exit_codes(folder: Path) -> list[tuple[int | None]]:
    databases = sorted((folder / "out" / "tasks").glob("*.sqlite"))
    return [query(path, "SELECT exit_code FROM task")[0] for path in databases]
