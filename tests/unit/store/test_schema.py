"""The tables as the contract promises them: names, units, NULL for the unknown, and few bytes."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rooms.cli import read_topic
from rooms.model import METRICS, HostReading, Reading, TaskKey, stable_id
from rooms.root import SystemClock
from rooms.store import (
    JOB_TABLES,
    JOB_VIEWS,
    SCHEMA_VERSION,
    MergeOrder,
    TaskWriter,
    columns_of,
    create_live,
    join_files,
    merge,
    read_only_uri,
)
from rooms.telemetry import TelemetryWriter
from support.databases import query
from support.task_files import START_MS, TaskFile

# Other people's queries name these.
CONTRACT = {
    "task": "task_id job_id array_index restart node started_at_ms ended_at_ms exit_code verdict",
    "device": "task_id device_id uuid device_index name memory_total_bytes backend",
    "sample": "task_id device_id at_ms utilization_percent memory_utilization_percent memory_used_bytes temperature_c"
    " power_w energy_j sm_clock_mhz memory_clock_mhz throttle_reasons sm_activity_percent sm_occupancy_percent",
    "gap": "task_id device_id from_ms to_ms reason",
    "worker": "task_id worker_id device_id pid engine started_at_ms ended_at_ms exit_code",
    "chunk": "task_id chunk_id recording_id source_path start_ms end_ms status attempts device_id worker_id"
    " started_at_ms ended_at_ms audio_s detections error_class error",
    "attempt": "task_id attempt_id recording_id chunk_id try_number worker_id device_id started_at_ms ended_at_ms"
    " outcome error_class error",
    "detection": "task_id recording_id chunk_id start_ms end_ms label label_name score",
    "alert": "task_id kind severity device_id started_at_ms ended_at_ms peak threshold message",
    "host_sample": "task_id at_ms cpu_percent memory_used_bytes",
    "process_sample": "task_id",
    "meta": "",
}
VIEWS = {"task_summary", "device_summary", "chunk_summary", "job_summary", "recording_detection", "column_help"}


@pytest.fixture(scope="module")
def task_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TaskFile(tmp_path_factory.mktemp("run"), states={"a": "done", "b": "failed"}).write()


@pytest.fixture(scope="module")
def job_database(task_database: Path) -> Path:
    target = task_database.parents[1] / "job.sqlite"
    merge(MergeOrder([task_database], target), SystemClock())
    return target


@pytest.fixture(params=["task", "job"])
def database(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{request.param}_database")
    return path


def tables_in(path: Path) -> Iterator[tuple[str, list[str], str]]:
    """Yield (table, columns, SQL)."""
    for name, sql in query(path, "SELECT name, sql FROM sqlite_master WHERE type = 'table'"):
        yield str(name), [str(row[1]) for row in query(path, f"PRAGMA table_info({name})")], str(sql)


def test_every_table_and_column_of_the_contract_is_there(database: Path) -> None:
    found = {name: set(columns) for name, columns, _ in tables_in(database)}
    for table, columns in CONTRACT.items():
        assert set(columns.split()) <= found[table], table


def test_every_table_except_meta_carries_the_task(database: Path) -> None:
    assert [name for name, columns, _ in tables_in(database) if "task_id" not in columns] == ["meta"]


def test_every_table_is_strict(database: Path) -> None:
    assert all("STRICT" in sql.rpartition(")")[2] for _, _, sql in tables_in(database))


def test_a_strict_table_refuses_a_text_where_a_number_belongs(tmp_path: Path) -> None:
    with closing(create_live(tmp_path / "x.sqlite")) as db, pytest.raises(sqlite3.IntegrityError):
        db.execute("INSERT INTO sample (task_id, device_id, at_ms, temperature_c) VALUES (1, 1, 1, 'warm')")


def test_the_version_and_the_owner_stand_in_the_header(database: Path) -> None:
    assert query(database, "PRAGMA user_version") == [(SCHEMA_VERSION,)]
    assert database.read_bytes()[68:72] == b"BADC"


def test_the_job_database_adds_the_files_and_the_views(job_database: Path) -> None:
    assert {name for name, _, _ in tables_in(job_database)} == {table.name for table in JOB_TABLES}
    views = {str(name) for (name,) in query(job_database, "SELECT name FROM sqlite_master WHERE type = 'view'")}
    assert views == VIEWS
    for view in views:
        query(job_database, f"SELECT * FROM {view}")


def test_every_column_is_explained(job_database: Path) -> None:
    told = {
        (str(table), str(column)): str(text) for table, column, text in query(job_database, "SELECT * FROM column_help")
    }
    there = {(name, column) for name, columns, _ in tables_in(job_database) for column in columns}
    for view in VIEWS:
        there |= {(view, str(row[1])) for row in query(job_database, f"PRAGMA table_info({view})")}
    assert set(told) == there
    assert all(len(text) >= 4 for text in told.values())


def test_the_guide_explains_the_same_columns() -> None:
    page = read_topic("tables")
    for table in (*JOB_TABLES, *JOB_VIEWS):
        assert f"## {table.name}\n" in page
        for column in table.columns:
            assert f"    {column.name} " in page


def test_columns_carry_their_unit() -> None:
    units = ("_ms", "_s", "_bytes", "_percent", "_c", "_w", "_j", "_mhz", "_ns", "_bytes_per_s", "_cores", "_hz")
    plain = {  # what has no unit: names, numbers, counts, texts
        "exit_code", "cpus", "devices", "workers", "telemetry", "restart", "array_index", "shard_index", "shard_count",
        "procid", "pid", "attempts", "try_number", "detections", "score", "device_index", "throttle_reasons", "peak",
        "threshold", "samples", "rows", "rows_lost", "ticks", "ecc_errors", "ours", "value", "pieces",
        "processes", "usage_samples", "channels", "is_cut",
        "minimum", "mean", "p50", "p95", "maximum",  # those of a metric, which has its own unit
    }  # fmt: skip
    for table in JOB_TABLES:
        for column in table.columns:
            if not column.sql.startswith("TEXT") and not column.name.endswith("_id") and column.name not in plain:
                assert column.name.endswith(units), f"{table.name}.{column.name}"


def test_a_sample_has_a_column_for_every_metric() -> None:
    assert set(METRICS) <= set(columns_of("sample"))


def test_what_a_device_did_not_say_is_null_and_never_zero(tmp_path: Path) -> None:
    with closing(TelemetryWriter(tmp_path / "x.sqlite", 1)) as writer:
        writer.write_tick(
            START_MS, [(7, Reading()), (8, Reading(utilization_percent=0))], HostReading(None, None, None)
        )
    silent, idle = query(tmp_path / "x.sqlite", f"SELECT {', '.join(METRICS)} FROM sample ORDER BY device_id")
    assert silent == (None,) * len(METRICS)
    assert idle == (0, *(None,) * (len(METRICS) - 1))
    assert query(tmp_path / "x.sqlite", "SELECT cpu_percent, memory_used_bytes FROM host_sample") == [(None, None)]


def test_a_machine_that_does_not_answer_has_no_host_sample(tmp_path: Path) -> None:
    with closing(TelemetryWriter(tmp_path / "x.sqlite", 1)) as writer:
        writer.write_tick(START_MS, [(7, Reading(power_w=1.5))], None)
    assert query(tmp_path / "x.sqlite", "SELECT count(*) FROM host_sample") == [(0,)]
    assert query(tmp_path / "x.sqlite", "SELECT count(*) FROM sample") == [(1,)]


@pytest.mark.parametrize(("devices", "with_host"), [(1, False), (4, True)], ids=["alone", "four, and the machine"])
def test_a_sample_takes_at_most_97_bytes_of_the_published_file(tmp_path: Path, devices: int, with_host: bool) -> None:
    """Take an hour at 1 Hz with the readings of a busy card."""
    key, chance = TaskKey("48213377", 127, 0, "se512"), random.Random(1)
    local = [tmp_path / "wrapper.sqlite", tmp_path / "recorder.sqlite"]
    TaskWriter(local[0], key).close()
    writer = TelemetryWriter(local[1], key.task_id)
    join_files(local, tmp_path / "empty.sqlite")
    ids = [stable_id(key.name, "device", f"GPU-{number}") for number in range(devices)]
    with writer.batch():
        for second in range(3600):
            readings = [(device_id, busy_reading(second, chance)) for device_id in ids]
            host = HostReading(chance.randint(0, 1000) / 10, 90 * 2**30 + 4096 * second, 192 * 2**30)
            writer.write_tick(START_MS + second * 1000 + chance.randint(0, 3), readings, host if with_host else None)
    writer.close()
    join_files(local, tmp_path / "joined.sqlite")
    grown = (tmp_path / "joined.sqlite").stat().st_size - (tmp_path / "empty.sqlite").stat().st_size
    assert grown / (3600 * devices) <= 97


def busy_reading(second: int, chance: random.Random) -> Reading:
    return Reading(
        utilization_percent=chance.randint(60, 100),
        memory_utilization_percent=chance.randint(20, 60),
        memory_used_bytes=13 * 2**30 + chance.randint(0, 2**28),
        temperature_c=chance.randint(50, 70),
        power_w=chance.randint(180_000, 290_000) / 1000,
        energy_j=(9_123_456_789 + 250_000 * second) / 1000 if second % 5 == 0 else None,
        sm_clock_mhz=1380,
        memory_clock_mhz=877,
        throttle_reasons=0,
    )


def test_a_path_with_any_letters_can_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "a b?c#d%e ü.sqlite"
    create_live(path).close()
    for sealed in (True, False):
        with closing(sqlite3.connect(read_only_uri(path, sealed=sealed), uri=True)) as db:
            assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


def test_a_file_opened_for_reading_cannot_be_written(task_database: Path) -> None:
    with (
        closing(sqlite3.connect(read_only_uri(task_database, sealed=True), uri=True)) as db,
        pytest.raises(sqlite3.OperationalError, match="readonly"),
    ):
        db.execute("DELETE FROM task")


# --- foreign keys -----------------------------------------------------------------------------------------------------


def test_every_foreign_key_holds(database: Path) -> None:
    keys = {name: query(database, f"PRAGMA foreign_key_list({name})") for name, _, _ in tables_in(database)}
    assert {name for name, found in keys.items() if not found} == {"meta", "task"}
    assert all(row[4] is not None for found in keys.values() for row in found)  # the column that is referred to
    assert query(database, "PRAGMA foreign_key_check") == []
