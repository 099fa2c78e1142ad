"""``badcjobs run`` outside Slurm: one task, from the manifest to a task database that can be trusted row by row."""

from __future__ import annotations

import csv
import re
import shutil
import socket
from pathlib import Path

import pytest
from support.audio import make_wav
from support.badcjobs_program import ON_CPU, Outcome, Site, loud, rows

CHUNKS = 12
CONTRACT_TABLES = {
    "task": "task_id job_id array_index restart node started_at_ms ended_at_ms exit_code verdict",
    "device": "device_id task_id uuid device_index name memory_total_bytes backend",
    "sample": "device_id task_id at_ms utilization_percent memory_utilization_percent memory_used_bytes temperature_c"
    " power_w energy_j sm_clock_mhz memory_clock_mhz throttle_reasons sm_activity_percent sm_occupancy_percent",
    "gap": "task_id device_id from_ms to_ms reason",
    "worker": "worker_id task_id device_id pid engine started_at_ms ended_at_ms exit_code",
    "chunk": "task_id chunk_id recording_id source_path start_ms end_ms status attempts device_id worker_id"
    " started_at_ms ended_at_ms audio_s detections error_class error",
    "attempt": "attempt_id task_id recording_id chunk_id try_number worker_id device_id started_at_ms ended_at_ms"
    " outcome error_class error",
    "detection": "task_id recording_id chunk_id start_ms end_ms label label_name score",
    "alert": "task_id kind severity device_id started_at_ms ended_at_ms peak threshold message",
    "host_sample": "task_id at_ms cpu_percent memory_used_bytes",
    "process_sample": "task_id",
    "meta": "",
}


@pytest.fixture(scope="module")
def finished(shared_site: Site) -> Outcome:
    """A whole run on two simulated devices, slow enough for readings while chunks are running."""
    manifest = shared_site.manifest(CHUNKS)
    return shared_site.run(
        manifest, "--engine", "demo", "--engine-arg=--burn-s=0.2", "--simulate", 2, "--interval", 0.05, "--json"
    )


@pytest.fixture(scope="module")
def database(finished: Outcome, shared_site: Site) -> Path:
    assert finished.exit_code == 0, finished.stderr
    return shared_site.task_database()


def manifest_rows(site: Site) -> list[dict[str, str]]:
    with (site.folder / "manifest.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_of_the_manifest_is_a_chunk_that_is_done(database: Path, shared_site: Site) -> None:
    found = rows(database, "SELECT recording_id, chunk_id, source_path, start_ms, end_ms, status, attempts FROM chunk")
    assert sorted(found) == sorted(
        (r["recording_id"], r["chunk_id"], r["source_path"], int(r["start_ms"]), int(r["end_ms"]), "done", 1)
        for r in manifest_rows(shared_site)
    )


def test_the_detections_are_the_loud_stretches_of_each_chunk(database: Path) -> None:
    found = rows(database, "SELECT chunk_id, start_ms, end_ms FROM detection ORDER BY chunk_id, start_ms")
    assert found == [
        (f"c{i:03d}", round(start_s * 1000), round(end_s * 1000))
        for i in range(CHUNKS)
        for start_s, end_s in loud(i % 3)
    ]
    counted = rows(database, "SELECT chunk_id, detections FROM chunk ORDER BY chunk_id")
    assert counted == [(f"c{i:03d}", i % 3) for i in range(CHUNKS)]


def test_every_attempt_can_be_joined_to_its_worker_and_its_device(database: Path) -> None:
    found = rows(
        database,
        """SELECT a.chunk_id, a.outcome, w.engine, d.uuid, c.status
           FROM attempt a
           JOIN worker w ON w.worker_id = a.worker_id AND w.device_id = a.device_id
           JOIN device d ON d.device_id = a.device_id
           JOIN chunk c ON c.recording_id = a.recording_id AND c.chunk_id = a.chunk_id AND c.worker_id = a.worker_id
           WHERE a.started_at_ms >= w.started_at_ms AND a.ended_at_ms <= w.ended_at_ms""",
    )
    assert sorted(chunk for chunk, *_ in found) == [f"c{i:03d}" for i in range(CHUNKS)]
    assert {tuple(kind) for _, *kind, _, _ in found} == {("done", "demo")}
    assert len({uuid for _, _, _, uuid, _ in found}) == 2, "one of the two devices had nothing to do"


def test_samples_can_be_joined_to_the_chunk_that_was_running(database: Path) -> None:
    found = rows(
        database,
        """SELECT a.device_id, count(DISTINCT a.chunk_id), count(*) FROM sample s JOIN attempt a
           ON a.device_id = s.device_id AND s.at_ms BETWEEN a.started_at_ms AND a.ended_at_ms GROUP BY a.device_id""",
    )
    assert len(found) == 2
    assert sum(chunks for _, chunks, _ in found) >= CHUNKS // 2  # a busy machine may miss one now and then


def test_every_sample_belongs_to_a_device_and_to_the_life_of_the_task(database: Path) -> None:
    ((samples, joined),) = rows(
        database,
        """SELECT count(*), sum(s.at_ms BETWEEN t.started_at_ms AND t.ended_at_ms)
           FROM sample s JOIN device d USING (device_id, task_id) JOIN task t USING (task_id)""",
    )
    ((all_samples,),) = rows(database, "SELECT count(*) FROM sample")
    assert samples == joined == all_samples > 0


def test_the_machine_around_the_devices_is_recorded_as_well(database: Path) -> None:
    ((many, memory),) = rows(database, "SELECT count(*), min(memory_used_bytes) FROM host_sample")
    assert many > 3
    assert memory > 0


def test_the_task_row_says_when_it_was_and_how_it_ended(database: Path) -> None:
    ((job_id, index, restart, node, code, verdict, wall_ms),) = rows(
        database,
        "SELECT job_id, array_index, restart, node, exit_code, verdict, ended_at_ms - started_at_ms FROM task",
    )
    assert re.fullmatch(r"local\d{13}-\d+", job_id)
    assert (index, restart, node) == (0, 0, socket.gethostname().split(".")[0])
    assert (code, verdict) == (0, "done")
    assert 1000 < wall_ms < 60_000


def test_the_tables_and_columns_are_those_of_the_contract(database: Path) -> None:
    for table, columns in CONTRACT_TABLES.items():
        there = {row[1] for row in rows(database, f"PRAGMA table_info({table})")}
        assert there, f"no table {table}"
        assert set(columns.split()) <= there, table
    assert rows(database, "PRAGMA user_version") != [(0,)]
    assert rows(database, "PRAGMA integrity_check") == [("ok",)]


def test_a_value_that_the_device_did_not_give_is_null_and_not_zero(database: Path) -> None:
    assert rows(database, "SELECT DISTINCT tensor_percent, fan_percent FROM sample") == [(None, None)]


def test_the_run_folder_holds_the_files_of_the_contract_and_nothing_else(database: Path, shared_site: Site) -> None:
    name = rf"local\d+-\d+_0\.r0\.{re.escape(socket.gethostname().split('.')[0])}"
    there = sorted(str(path.relative_to(shared_site.out)) for path in shared_site.out.rglob("*") if path.is_file())
    assert len(there) == 3
    assert there[0] == "run.toml"
    assert re.fullmatch(rf"tasks/{name}\.log", there[1])
    assert re.fullmatch(rf"tasks/{name}\.sqlite", there[2])


def test_nothing_stays_behind_on_the_node(finished: Outcome, shared_site: Site) -> None:
    assert list(shared_site.local.iterdir()) == []
    assert shared_site.processes() == []


def test_the_result_as_json_is_one_document_that_agrees_with_the_database(finished: Outcome, database: Path) -> None:
    end = finished.json
    assert (end["exit_code"], end["verdict"], end["chunks"]) == (0, "done", {"done": CHUNKS})
    assert (end["devices"], end["workers"], end["failed"], end["telemetry"]) == (2, 2, [], "on")
    assert end["audio_s"] == pytest.approx(CHUNKS * 0.6)
    assert Path(end["database"]).name == database.name


def test_the_log_tells_the_life_of_the_task_in_about_ten_lines(database: Path, finished: Outcome) -> None:
    log = database.with_suffix(".log").read_text()
    assert f"shard 0/1: {CHUNKS} chunks" in log
    assert "task ends: done, exit code 0" in log
    assert len(log.splitlines()) <= 12
    assert "shard 0/1" in finished.stderr, "the same is said on stderr"


def test_a_second_run_does_nothing_twice_and_the_short_summaries_say_so(site: Site) -> None:
    manifest = site.manifest(3)
    first = site.run(manifest, *ON_CPU)
    assert first.exit_code == 0
    assert "3 done of 3" in first.stdout
    assert f"badcjobs merge {site.out}" in first.stdout
    assert len(first.stdout.splitlines()) <= 8
    again = site.run(manifest, *ON_CPU)
    assert again.exit_code == 0
    assert "3 skipped of 3" in again.stdout
    assert len(site.task_databases()) == 2, "a second run never overwrites the first"
    assert (site.count("attempt"), site.count("chunk", "status = 'done'")) == (3, 3)
    assert site.count("worker") == 1, "nothing to do, yet a worker was started"


def test_a_folder_of_audio_is_a_source_whose_recordings_are_named_by_their_paths(site: Site) -> None:
    for name in ("north/dawn.wav", "north/dusk.wav", "south.wav"):
        make_wav(site.folder / "audio" / name, 0.3, 1000)
    assert site.run(site.folder / "audio", *ON_CPU).exit_code == 0
    assert site.rows("SELECT recording_id, status, audio_s FROM chunk ORDER BY 1") == [
        ("north/dawn", "done", 0.3), ("north/dusk", "done", 0.3), ("south", "done", 0.3),
    ]  # fmt: skip


def test_relative_paths_of_a_manifest_start_at_the_root(site: Site) -> None:
    manifest = site.manifest(3)
    manifest.write_text(manifest.read_text().replace(f"{site.folder}/audio/", ""))
    (site.folder / "elsewhere").mkdir()
    shutil.move(manifest, site.folder / "elsewhere" / "manifest.csv")
    assert site.run(site.folder / "elsewhere" / "manifest.csv", *ON_CPU, "--root", "audio").exit_code == 0
    assert site.count("chunk", "status = 'done'") == 3
