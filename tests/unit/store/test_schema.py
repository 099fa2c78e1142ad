"""The tables as the contract promises them: names, units, NULL for the unknown, and few bytes."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from rooms.cli import read_topic
from rooms.model import METRICS, HostReading, Reading
from rooms.root import DatabaseProblem
from rooms.store import (
    JOB_TABLES,
    JOB_VIEWS,
    SCHEMA_VERSION,
    create_live,
    open_job_database,
    open_sealed,
    read_job,
    read_only_uri,
)
from rooms.telemetry import TelemetryWriter
from support.databases import change, query
from support.pages import Pages
from support.task_files import START_MS, TaskFile, merge_run

from badcjobs import __version__


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    run = tmp_path_factory.mktemp("run")
    task = TaskFile(run, states={"a": "done", "b": "failed"}).write()
    merge_run(run)
    return {"task": task, "job": run / "job.sqlite"}


def columns(path: Path, table: str) -> list[tuple[str, str, int]]:
    return [(row[1], row[2], row[3]) for row in query(path, f"PRAGMA table_info({table})")]


def test_tables(databases: dict[str, Path], pages: Pages) -> None:
    """Other people's queries name these: a change of a page is a change of the schema."""
    said = {}
    for kind, path in databases.items():
        lines = []
        for form, table, sql in query(path, "SELECT type, name, sql FROM sqlite_master WHERE type != 'index'"):
            marks = " ".join(mark for mark in ("STRICT", "WITHOUT ROWID") if mark in sql.rpartition(")")[2])
            lines.append(f"{form} {table} {marks}".rstrip())
            lines += [f"    {name} {sql_type}{' NOT NULL' * needed}" for name, sql_type, needed in columns(path, table)]
            keys = query(path, f"PRAGMA foreign_key_list({table})")
            lines += sorted(f"    {key[3]} → {key[2]} ({key[4]})" for key in keys)
        said[f"{kind}.txt"] = "\n".join(lines)
        assert query(path, "PRAGMA foreign_key_check") == []
        assert (query(path, "PRAGMA user_version"), path.read_bytes()[68:72]) == ([(SCHEMA_VERSION,)], b"BADC")
    indexes = query(databases["job"], "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
    said["indexes.txt"] = "\n".join(" ".join(sql.split()) for _, sql in sorted(indexes))
    pages(said)
    with closing(open_sealed(databases["task"])) as db, pytest.raises(sqlite3.OperationalError, match="readonly"):
        db.execute("DELETE FROM task")


def test_every_column_is_explained_in_the_database_and_in_the_guide(databases: dict[str, Path]) -> None:
    job, page = databases["job"], read_topic("tables")
    told = {(table, column): text for table, column, text in query(job, "SELECT * FROM column_help")}
    tables = query(job, "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
    assert set(told) == {(table, column[0]) for (table,) in tables for column in columns(job, table)}
    assert all(len(text) >= 4 for text in told.values())
    for table in (*JOB_TABLES, *JOB_VIEWS):
        assert f"## {table.name}\n" in page
        assert [c.name for c in table.columns if f"    {c.name} " not in page] == []


def test_what_a_device_or_machine_did_not_say_is_null_and_never_zero(tmp_path: Path) -> None:
    with closing(TelemetryWriter(tmp_path / "x.sqlite", 1)) as writer:
        readings = [(7, Reading()), (8, Reading(utilization_percent=0))]
        writer.write_tick(START_MS, readings, HostReading(None, None, None))
        writer.write_tick(START_MS + 1, [(7, Reading(power_w=1.5))], None)
    silent, idle, _ = query(tmp_path / "x.sqlite", f"SELECT {', '.join(METRICS)} FROM sample ORDER BY at_ms, device_id")
    assert silent == (None,) * len(METRICS)
    assert idle == (0, *(None,) * (len(METRICS) - 1))
    assert query(tmp_path / "x.sqlite", "SELECT cpu_percent, memory_used_bytes FROM host_sample") == [(None, None)]
    with closing(create_live(tmp_path / "y.sqlite")) as db, pytest.raises(sqlite3.IntegrityError):
        db.execute("INSERT INTO sample (task_id, device_id, at_ms, temperature_c) VALUES (1, 1, 1, 'warm')")


def test_views(tmp_path: Path, pages: Pages) -> None:
    """The common questions, of a task that has ended and of one that was killed: until the last sign of it."""
    TaskFile(
        tmp_path, index=0, states={"a": "done", "b": "failed", "c": "poison"}, devices=2, samples=5,
        reading=Reading(utilization_percent=60, memory_used_bytes=2**30, temperature_c=55, power_w=100.0, energy_j=9.0,
                        busy_percent=12.5),
        gaps=[(1000, 3000, "the recorder was late")],
    ).write()  # fmt: skip
    TaskFile(tmp_path, index=1, states={"d": "done", "e": "pending"}, ended_at_ms=None, samples=0).write()
    merge_run(tmp_path)
    said = {}
    for view in ("task_summary", "device_summary", "chunk_summary", "job_summary", "recording_detection"):
        names = [name for name, _, _ in columns(tmp_path / "job.sqlite", view) if name not in ("task_id", "device_id")]
        order = "ORDER BY (SELECT name FROM task t WHERE t.task_id = v.task_id), device_index" * (view[:3] == "dev")
        rows = query(tmp_path / "job.sqlite", f"SELECT {', '.join(names)} FROM {view} v {order}")
        rows = rows if order else sorted(rows, key=repr)
        said[f"{view}.txt"] = "\n\n".join(
            "\n".join(f"{name} = {value!r}" for name, value in zip(names, row, strict=True)) for row in rows
        )
    pages(said)


def test_a_path_with_any_letters_can_be_opened_and_what_is_not_a_job_database_is_named(
    tmp_path: Path, pages: Pages
) -> None:
    path = tmp_path / "a b?c#d%e ü.sqlite"
    create_live(path).close()
    for uri in (read_only_uri(path, sealed=True), read_only_uri(path, sealed=False)):
        with closing(sqlite3.connect(uri, uri=True)) as db:
            assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    open_job_database(path).close()
    wrong = [TaskFile(tmp_path, states={"a": "done"}).write()]
    wrong += [tmp_path / f"{name}.sqlite" for name in ("newer", "other", "empty", "text")]
    wrong[1].write_bytes(path.read_bytes()[:60] + (99).to_bytes(4, "big") + path.read_bytes()[64:])
    change(wrong[2], "CREATE TABLE x (y)")
    wrong[3].touch()
    wrong[4].write_text("text" * 2000)
    said = []
    for there in ("", "there is a job database beside them\n"):
        said.append(there)
        for given in wrong:
            with pytest.raises(DatabaseProblem) as refused:
                read_job(given)
            said.append(f"{refused.value}\n".replace(str(tmp_path), "HERE").replace(__version__, "VERSION"))
        (tmp_path / "job.sqlite").touch()
    pages({"said.txt": "".join(said)})
