"""The job database as data: the tables of all tasks, the tables that merge adds, and views for common questions."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.store.connect import as_sqlite_utils, file_uri, open_uri
from badcjobs.store.schema import LAST_SIGN, TABLE_BY_NAME, TABLES, Column, TableDef, ddl_script, define_table
from badcjobs.version import __version__


@dataclass(frozen=True, slots=True)
class ViewDef:
    """One view, and the meaning of a row; each column's SQL is an expression over ``source``."""

    name: str
    help: str
    columns: tuple[Column, ...]
    source: str

    def select(self) -> str:
        """Return its SELECT statement."""
        lines = [f"    {column.sql} AS {column.name}" for column in self.columns]
        tail = f"\n{self.source}" if self.source else ""
        return "SELECT\n" + ",\n".join(lines) + tail


def define_view(name: str, meaning: str, *columns: Column, source: str = "") -> ViewDef:
    """Return a view with these columns."""
    return ViewDef(name, meaning, columns, source)


def _from(table: str, alias: str, *names: str) -> tuple[Column, ...]:
    """Return columns of a table, with their meaning there."""
    by_name = {column.name: column for column in TABLE_BY_NAME[table].columns}
    return tuple(Column(name, f"{alias}.{name}", by_name[name].help) for name in names)


def _chunks(which: str) -> str:
    return f"(SELECT count(*) FROM chunk c WHERE c.task_id = t.task_id AND c.status {which})"


def _of_job(total: str, which: str) -> str:
    return f"(SELECT {total} FROM chunk WHERE status {which})"


def _metric(alias: str, metric: str) -> str:
    keys = " AND ".join(f"{alias}.{key} = d.{key}" for key in ("task_id", "device_id"))
    return f"LEFT JOIN metric_summary {alias} ON {keys} AND {alias}.metric = '{metric}'"


_GAPS = """(SELECT sum(g.to_ms - g.from_ms) / 1000.0 FROM gap g
      WHERE g.task_id = d.task_id AND g.metric IS NULL AND (g.device_id = d.device_id OR g.device_id IS NULL))"""

DEVICE_SUMMARY = define_view(
    "device_summary",
    "One row per device of a task attempt: what was measured on it.",
    *_from("device", "d", "device_id", "task_id", "uuid", "device_index", "name", "memory_total_bytes"),
    *_from("device", "d", "backend"),
    Column("samples", "t.samples", "number of samples"),
    Column("utilization_mean_percent", "u.mean", "mean of utilization_percent"),
    Column("utilization_p50_percent", "u.p50", "its median, by nearest rank"),
    Column("utilization_p95_percent", "u.p95", "its 95th percentile, by nearest rank"),
    Column("utilization_max_percent", "u.maximum", "its maximum"),
    Column("busy_mean_percent", "b.mean", "mean of busy_percent, the most exact figure; see metric_source"),
    Column("memory_peak_bytes", "CAST(m.maximum AS INTEGER)", "peak memory in use, by all processes"),
    Column("temperature_max_c", "CAST(c.maximum AS INTEGER)", "highest temperature"),
    Column("power_mean_w", "p.mean", "mean power draw"),
    Column("energy_j", "t.energy_counter_j", "energy by the device's energy counter"),
    Column("energy_span_s", "t.energy_counter_span_s", "from the first to the last reading of the counter"),
    Column("energy_integrated_j", "t.energy_integrated_j", "power integrated over the readings"),
    Column("span_s", "(t.last_at_ms - t.first_at_ms) / 1000.0", "from the first reading to the last"),
    Column("gap_s", _GAPS, "time without any reading, from `gap`"),
    source=f"""FROM device d JOIN device_total t USING (device_id)
        {_metric("u", "utilization_percent")} {_metric("b", "busy_percent")} {_metric("m", "memory_used_bytes")}
        {_metric("c", "temperature_c")} {_metric("p", "power_w")}""",
)
VIEWS = (
    define_view(
        "task_summary",
        "One row per array task attempt: its running time and its chunks by state.",
        *_from("task", "t", "task_id", "name", "job_id", "array_index", "restart", "node", "shard_count"),
        *_from("task", "t", "verdict", "exit_code", "telemetry", "devices", "started_at_ms"),
        Column("last_sign_ms", LAST_SIGN, "when it ended; of a killed or running task, the latest time in its data"),
        Column("wall_s", f"({LAST_SIGN} - t.started_at_ms) / 1000.0", "from its start to last_sign_ms"),
        Column("done", _chunks("= 'done'"), "chunks that are done, with the result of this task"),
        Column("failed", _chunks("IN ('failed', 'poison')"), "the same for failed or poison"),
        Column("pending", _chunks("= 'pending'"), "the same for not started or not finished"),
        Column(
            "audio_s",
            """(SELECT sum(c.audio_s) FROM chunk c WHERE c.task_id = t.task_id AND c.status = 'done')
        - (SELECT total(o.overlap_s) FROM overlap o WHERE o.task_id = t.task_id)""",
            "length of the chunks that are done, without overlaps",
        ),
        *_from("task", "t", "slurm_state", "slurm_exit_code"),
        source="FROM task t",
    ),
    DEVICE_SUMMARY,
    define_view(
        "chunk_summary",
        "How many chunks are in each state, and why.",
        *_from("chunk", "c", "status", "error_class"),
        Column("chunks", "count(*)", "how many"),
        Column("audio_s", "sum(c.audio_s)", "their length together, with overlaps"),
        Column("detections", "sum(c.detections)", "number of detections in them, with overlaps"),
        source="FROM chunk c GROUP BY c.status, c.error_class",
    ),
    define_view(
        "job_summary",
        "The complete job in one row.",
        Column("tasks", "(SELECT count(*) FROM task)", "array task attempts"),
        Column("chunks", "(SELECT count(*) FROM chunk)", "chunks that the tasks have listed"),
        Column("done", _of_job("count(*)", "= 'done'"), "chunks done"),
        Column("failed", _of_job("count(*)", "IN ('failed', 'poison')"), "chunks failed or poison"),
        Column("pending", _of_job("count(*)", "= 'pending'"), "chunks not started or not finished"),
        Column("skipped", _of_job("count(*)", "= 'skipped'"), "chunks that were skipped"),
        Column(
            "audio_hours",
            "(SELECT sum(audio_s) - (SELECT total(overlap_s) FROM overlap) FROM chunk WHERE status = 'done') / 3600.0",
            "length of the chunks done, without overlaps",
        ),
        Column(
            "gpu_hours",
            "(SELECT sum(wall_s * devices) FROM task_summary) / 3600.0",
            "for each task, its wall time × the devices granted",
        ),
        Column("detections", "(SELECT count(*) FROM recording_detection)", "number of detections, without overlaps"),
    ),
)


# These tables are read by task and time and store their rows in that order. Samples need no key: merge copies all
# samples of a task together, device by device, and SQLite copies them faster without one.
ORDERED_BY = {
    "host_sample": "task_id, at_ms",
    "process_sample": "task_id, device_id, at_ms, pid",
    "attempt": "task_id, attempt_id",
    "metric_summary": "task_id, device_id, metric",
    "utilization_count": "task_id, device_id, utilization_percent",
    "usage_sample": "task_id, at_ms",
    "throttle_count": "task_id, device_id, reason",
    "device_time": "task_id, device_id, state",
    "attempt_cost": "task_id, attempt_id",
    "device_stretch": "task_id, device_id, from_ms",
}
_CACHE_KIB = 4_000  # a small cache makes appending faster: it fits into the cache of the processor
SORT_CACHE_KIB = 8_000  # measured: more memory sorts no faster

_RIVAL = "(recording_id, chunk_id, task_id) REFERENCES rival_chunk (recording_id, chunk_id, task_id)"

_RECORDING_DETECTION = define_table(
    "recording_detection",
    "The detections of each recording on its own clock; a detection in two overlapping chunks is there once.",
    Column("study_area", "TEXT", "recording.study_area"),
    Column("location", "TEXT", "recording.location"),
    Column("recorded_at", "TEXT", "recording.recorded_at"),
    Column("recording_id", "TEXT NOT NULL", "the recording, as in the source"),
    Column("chunk_id", "TEXT NOT NULL", "the chunk with the detection, or with its start"),
    Column("task_id", "INTEGER NOT NULL REFERENCES task (task_id)", "the task that analysed that chunk: task.task_id"),
    Column("start_ms", "INTEGER NOT NULL", "from the recording's start"),
    Column("end_ms", "INTEGER NOT NULL", "from the recording's start"),
    *(column for column in TABLE_BY_NAME["detection"].columns if column.name in ("label", "label_name", "score")),
    parent="(recording_id, chunk_id) REFERENCES chunk (recording_id, chunk_id)",
)
ADDED_TABLES = (
    define_table(
        "source_file",
        "The files that merge found: one row per file, read or not.",
        Column("path", "TEXT NOT NULL", "the file, relative to the job database's folder if it is below it"),
        Column("task_id", "INTEGER REFERENCES task (task_id)", "the task in it; NULL: its rows are not here"),
        Column("status", "TEXT NOT NULL", "merged, recovered, salvaged, copy, kept or skipped"),
        Column("reason", "TEXT", "why it was not simply merged"),
        Column("size_bytes", "INTEGER", "its size when it was read"),
        Column("mtime_ns", "INTEGER", "its modification time when it was read"),
        Column("rows", "INTEGER", "number of its rows in this database"),
        Column("rows_lost", "INTEGER", "number of rows that are lost; NULL: not known"),
        Column("last_sign_ms", "INTEGER", "the latest time in it"),
        Column("checksum", "TEXT", "checksum in its seal; NULL: it has no seal"),
        key="path",
    ),
    define_table(
        "task_meta",
        "The table `meta` of each task's own file: its settings, its environment, its folders.",
        Column("task_id", "INTEGER NOT NULL REFERENCES task (task_id)", "task.task_id"),
        Column("key", "TEXT NOT NULL", "name"),
        Column("value", "TEXT", "value; structured values are JSON"),
        key="task_id, key",
    ),
    replace(
        TABLE_BY_NAME["recording"],
        name="task_recording",
        help="The table `recording` of each task's own file: the history of `recording`.",
    ),
    replace(
        TABLE_BY_NAME["chunk"],
        name="rival_chunk",
        help="The result of another attempt of a chunk, which the merge rule did not choose: the history of `chunk`.",
        key="recording_id, chunk_id, task_id",
    ),
    replace(
        TABLE_BY_NAME["detection"],
        name="rival_detection",
        help="The detections of those attempts: the history of `detection`.",
        parent=_RIVAL,
    ),
    _RECORDING_DETECTION,
    replace(
        _RECORDING_DETECTION,
        name="recording_rarity",
        help="The rows of `rarity` on the clock of their recordings, like recording_detection.",
    ),
    define_table(
        "overlap",
        "A chunk that is done and begins before the end of the chunk before it, which is done, too.",
        Column("task_id", "INTEGER NOT NULL REFERENCES task (task_id)", "the task that analysed it: task.task_id"),
        *TABLE_BY_NAME["chunk"].columns[1:3],
        Column("overlap_s", "REAL NOT NULL", "seconds of audio that both have"),
        key="recording_id, chunk_id",
        parent="(recording_id, chunk_id) REFERENCES chunk (recording_id, chunk_id)",
    ),
)
_RECORDING = replace(
    TABLE_BY_NAME["recording"],
    help="One recording of the job: each fact as the last task knows it that knows it.",
    key="recording_id",
)
JOB_TABLES = (*(_RECORDING if table.name == "recording" else table for table in TABLES), *ADDED_TABLES)

_HELP = define_view(
    "column_help",
    "The meaning of every column of every table and view.",
    Column("table_name", "column1", "the table or view"),
    Column("column_name", "column2", "the column"),
    Column("help", "column3", "what it means"),
)
_DESCRIBED: tuple[TableDef | ViewDef, ...] = (*JOB_TABLES, *VIEWS, _HELP)
_MEANINGS = [(one.name, column.name, column.help) for one in _DESCRIBED for column in one.columns]
_VALUES = ",\n".join("(" + ", ".join("'" + text.replace("'", "''") + "'" for text in row) + ")" for row in _MEANINGS)
JOB_VIEWS = (*VIEWS, replace(_HELP, source=f"FROM (VALUES\n{_VALUES})"))  # not a table: those have a ``task_id``

# Created after all rows are written: sorting once is cheaper than updating an index with each row.
INDEXES = {
    "chunk_by_task": ("chunk", ("task_id", "status", "audio_s")),
    "detection_by_chunk": ("detection", ("recording_id", "chunk_id")),
    "rarity_by_chunk": ("rarity", ("recording_id", "chunk_id")),
    "attempt_by_chunk": ("attempt", ("recording_id", "chunk_id")),
    "rival_chunk_by_task": ("rival_chunk", ("task_id",)),
    "sample_by_time": ("sample", ("task_id", "device_id", "at_ms")),
    **{
        f"{table}_by_task": (table, ("task_id",))
        for table in (
            "device",
            "gap",
            "worker",
            "alert",
            "detection",
            "rarity",
            "rival_detection",
            "device_total",
            "mark",
        )
    },
}


def open_draft(path: Path, *, new: bool) -> sqlite3.Connection:
    """Open the draft of a job database, which is not visible to readers until it is renamed.

    It needs no locks, which some shared filesystems do not support, and no fsync until it is complete.
    """
    db = open_uri(file_uri(path, "nolock=1"))
    if new:
        db.execute("PRAGMA page_size = 16384")
    db.execute("PRAGMA journal_mode = MEMORY")
    db.execute("PRAGMA synchronous = OFF")
    db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    db.execute("PRAGMA secure_delete = OFF")  # faster where SQLite is built to overwrite deleted data
    if new:
        tool = as_sqlite_utils(db)
        tool.executescript(ddl_script(JOB_TABLES, ORDERED_BY))
        for view in JOB_VIEWS:
            tool.create_view(view.name, view.select())
        tool.table("meta").insert({"key": "made_by", "value": f"badcjobs {__version__}"})
    return db


def create_indexes(db: sqlite3.Connection, names: Collection[str] = tuple(INDEXES)) -> None:
    """Create the indexes of the job database that do not exist yet."""
    db.execute(f"PRAGMA cache_size = -{SORT_CACHE_KIB}")
    tool = as_sqlite_utils(db)
    for name in names:
        table, columns = INDEXES[name]
        tool.table(table).create_index(columns, name, if_not_exists=True)


def index_samples(db: sqlite3.Connection) -> None:
    """Create the index of the samples early, to find those of one task while other tasks are still to be merged."""
    create_indexes(db, ("sample_by_time",))
