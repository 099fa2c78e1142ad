"""The job database as data: the tables of all tasks, the tables that merge adds, and views for common questions."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from badcjobs.store.connect import as_sqlite_utils, file_uri, open_uri
from badcjobs.store.schema import (
    CHUNK,
    LAST_SIGN,
    OF_A_CHUNK,
    SOUND,
    STRETCH_FIGURES,
    TABLES,
    TableDef,
    ddl_script,
)
from badcjobs.version import __version__


class ViewDef(NamedTuple):
    """One view, and the meaning of a row; ``columns`` maps ``expression AS name`` to the meaning of the column."""

    name: str
    help: str
    columns: Mapping[str, str]
    source: str = ""

    @property
    def meanings(self) -> dict[str, str]:
        """The meaning of each column, by its name."""
        return {definition.rpartition(" AS ")[2]: meaning for definition, meaning in self.columns.items()}

    def select(self) -> str:
        """Return its SELECT statement."""
        columns = ",\n    ".join(self.columns)
        return f"SELECT\n    {columns}\n{self.source}"


def _from(table: str, alias: str, *names: str) -> dict[str, str]:
    """Return columns of a table, with their meaning there."""
    meanings = TABLES[table].meanings
    return {f"{alias}.{name} AS {name}": meanings[name] for name in names}


def _metric(alias: str, metric: str) -> str:
    keys = " AND ".join(f"{alias}.{key} = d.{key}" for key in ("task_id", "device_id"))
    return f"LEFT JOIN metric_summary {alias} ON {keys} AND {alias}.metric = '{metric}'"


_GAPS = """(SELECT sum(g.to_ms - g.from_ms) / 1000.0 FROM gap g
      WHERE g.task_id = d.task_id AND g.metric IS NULL AND (g.device_id = d.device_id OR g.device_id IS NULL))"""

_AUDIO_S = """(SELECT sum(c.audio_s) FROM chunk c WHERE c.task_id = t.task_id AND c.status = 'done')
        - (SELECT total(o.overlap_s) FROM overlap o WHERE o.task_id = t.task_id)"""
_AUDIO_OF_JOB_S = """(SELECT sum(audio_s) - (SELECT total(overlap_s) FROM overlap)
     FROM chunk WHERE status = 'done')"""
_GPU_S = "(SELECT sum(wall_s * devices) FROM task_summary)"
_CHUNKS = "SELECT count(*) FROM chunk c WHERE c.task_id = t.task_id AND c.status"
DEVICE_SUMMARY = ViewDef(
    "device_summary",
    "One row per device of a task attempt: what was measured on it.",
    {
        **_from(
            "device",
            "d",
            "device_id",
            "task_id",
            "uuid",
            "device_index",
            "name",
            "memory_total_bytes",
            "backend",
        ),
        "t.samples AS samples": "number of samples",
        "u.mean AS utilization_mean_percent": "mean of utilization_percent",
        "u.p50 AS utilization_p50_percent": "its median, by nearest rank",
        "u.p95 AS utilization_p95_percent": "its 95th percentile, by nearest rank",
        "u.maximum AS utilization_max_percent": "its maximum",
        "b.mean AS busy_mean_percent": "mean of busy_percent, the most exact figure; see metric_source",
        "CAST(m.maximum AS INTEGER) AS memory_peak_bytes": "peak memory in use, by all processes",
        "CAST(c.maximum AS INTEGER) AS temperature_max_c": "highest temperature",
        "p.mean AS power_mean_w": "mean power draw",
        "t.energy_counter_j AS energy_j": "energy by the device's energy counter",
        "t.energy_counter_span_s AS energy_span_s": "from the first to the last reading of the counter",
        "t.energy_integrated_j AS energy_integrated_j": "power integrated over the readings",
        "(t.last_at_ms - t.first_at_ms) / 1000.0 AS span_s": "from the first reading to the last",
        f"{_GAPS} AS gap_s": "time without any reading, from `gap`",
    },
    source=f"""FROM device d JOIN device_total t USING (device_id)
        {_metric("u", "utilization_percent")} {_metric("b", "busy_percent")} {_metric("m", "memory_used_bytes")}
        {_metric("c", "temperature_c")} {_metric("p", "power_w")}""",
)
VIEWS = (
    ViewDef(
        "task_summary",
        "One row per array task attempt: its running time and its chunks by state.",
        {
            **_from(
                "task",
                "t",
                "task_id",
                "name",
                "job_id",
                "array_index",
                "restart",
                "node",
                "shard_count",
                "verdict",
                "exit_code",
                "telemetry",
                "devices",
                "started_at_ms",
            ),
            f"{LAST_SIGN} AS last_sign_ms": "when it ended; of a killed or running task, the latest time in its data",
            f"({LAST_SIGN} - t.started_at_ms) / 1000.0 AS wall_s": "from its start to last_sign_ms",
            f"({_CHUNKS} = 'done') AS done": "chunks that are done, with the result of this task",
            f"({_CHUNKS} IN ('failed', 'poison')) AS failed": "the same for failed or poison",
            f"({_CHUNKS} = 'pending') AS pending": "the same for not started or not finished",
            f"{_AUDIO_S} AS audio_s": "length of the chunks that are done, without overlaps",
            **_from("task", "t", "slurm_state", "slurm_exit_code"),
        },
        source="FROM task t",
    ),
    DEVICE_SUMMARY,
    ViewDef(
        "chunk_summary",
        "How many chunks are in each state, and why.",
        {
            **_from("chunk", "c", "status", "error_class"),
            "count(*) AS chunks": "how many",
            "sum(c.audio_s) AS audio_s": "their length together, with overlaps",
            "sum(c.detections) AS detections": "number of detections in them, with overlaps",
        },
        source="FROM chunk c GROUP BY c.status, c.error_class",
    ),
    ViewDef(
        "job_summary",
        "The complete job in one row.",
        {
            "(SELECT count(*) FROM task) AS tasks": "array task attempts",
            "(SELECT count(*) FROM chunk) AS chunks": "chunks that the tasks have listed",
            "(SELECT count(*) FROM chunk WHERE status = 'done') AS done": "chunks done",
            "(SELECT count(*) FROM chunk WHERE status IN ('failed', 'poison')) AS failed": "chunks failed or poison",
            "(SELECT count(*) FROM chunk WHERE status = 'pending') AS pending": "chunks not started or not finished",
            "(SELECT count(*) FROM chunk WHERE status = 'skipped') AS skipped": "chunks that were skipped",
            f"{_AUDIO_OF_JOB_S} / 3600.0 AS audio_hours": "length of the chunks done, without overlaps",
            f"{_GPU_S} / 3600.0 AS gpu_hours": "for each task, its wall time × the devices granted",
            "(SELECT count(*) FROM recording_detection) AS detections": "number of detections, without overlaps",
        },
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
_SORT_CACHE_KIB = 8_000  # measured: more memory sorts no faster

_RIVAL = "(recording_id, chunk_id, task_id) REFERENCES rival_chunk (recording_id, chunk_id, task_id)"

_RECORDING_DETECTION = TableDef(
    "recording_detection",
    "The detections of each recording on its own clock; a detection in two overlapping chunks is there once.",
    {
        "study_area TEXT": "recording.study_area",
        "location TEXT": "recording.location",
        "recorded_at TEXT": "recording.recorded_at",
        "recording_id TEXT NOT NULL": "the recording, as in the source",
        "chunk_id TEXT NOT NULL": "the chunk with the detection, or with its start",
        "task_id INTEGER NOT NULL REFERENCES task (task_id)": "the task that analysed that chunk: task.task_id",
        "start_ms INTEGER NOT NULL": "from the recording's start",
        "end_ms INTEGER NOT NULL": "from the recording's start",
        **SOUND,
    },
    parent=OF_A_CHUNK,
)
ADDED_TABLES = (
    TableDef(
        "source_file",
        "The files that merge found: one row per file, read or not.",
        {
            "path TEXT NOT NULL": "the file, relative to the job database's folder if it is below it",
            "task_id INTEGER REFERENCES task (task_id)": "the task in it; NULL: its rows are not here",
            "status TEXT NOT NULL": "merged, recovered, salvaged, copy, kept or skipped",
            "reason TEXT": "why it was not simply merged",
            "size_bytes INTEGER": "its size when it was read",
            "mtime_ns INTEGER": "its modification time when it was read",
            "rows INTEGER": "number of its rows in this database",
            "rows_lost INTEGER": "number of rows that are lost; NULL: not known",
            "last_sign_ms INTEGER": "the latest time in it",
            "checksum TEXT": "checksum in its seal; NULL: it has no seal",
        },
        key="path",
    ),
    TableDef(
        "task_meta",
        "The table `meta` of each task's own file: its settings, its environment, its folders.",
        {
            "task_id INTEGER NOT NULL REFERENCES task (task_id)": "task.task_id",
            "key TEXT NOT NULL": "name",
            "value TEXT": "value; structured values are JSON",
        },
        key="task_id, key",
    ),
    TABLES["recording"]._replace(
        name="task_recording",
        help="The table `recording` of each task's own file: the history of `recording`.",
    ),
    TABLES["chunk"]._replace(
        name="rival_chunk",
        help="The result of another attempt of a chunk, which the merge rule did not choose: the history of `chunk`.",
        key="recording_id, chunk_id, task_id",
    ),
    TABLES["detection"]._replace(
        name="rival_detection",
        help="The detections of those attempts: the history of `detection`.",
        parent=_RIVAL,
    ),
    _RECORDING_DETECTION,
    _RECORDING_DETECTION._replace(
        name="recording_rarity",
        help="The rows of `rarity` on the clock of their recordings, like recording_detection.",
    ),
    TableDef(
        "overlap",
        "A chunk that is done and begins before the end of the chunk before it, which is done, too.",
        {
            "task_id INTEGER NOT NULL REFERENCES task (task_id)": "the task that analysed it: task.task_id",
            **CHUNK,
            "overlap_s REAL NOT NULL": "seconds of audio that both have",
        },
        key="recording_id, chunk_id",
        parent=OF_A_CHUNK,
    ),
    TableDef(
        "job_figure",
        "Figures of the whole job, computed by the last merge.",
        {
            "topic TEXT NOT NULL": "totals, or cost: of the tries that succeeded",
            "name TEXT NOT NULL": "what it is, with its unit",
            "value ANY": "the figure; NULL: not known",
        },
        key="topic, name",
    ),
    TableDef(
        "label_total",
        "The detections of each label, without overlaps.",
        {
            "label TEXT PRIMARY KEY": "code of the species or sound",
            "label_name TEXT": "its name, where the engine gives one",
            "detections INTEGER NOT NULL": "how many",
        },
    ),
    TableDef(
        "job_stretch",
        "The samples of all devices together, in at most 400 stretches of equal length.",
        {
            "from_ms INTEGER PRIMARY KEY": "when it starts",
            "to_ms INTEGER NOT NULL": "when it ends",
            **STRETCH_FIGURES,
        },
    ),
)
_RECORDING = TABLES["recording"]._replace(
    help="One recording of the job: each fact as the last task knows it that knows it.",
    key="recording_id",
)
JOB_TABLES = (*{**TABLES, "recording": _RECORDING}.values(), *ADDED_TABLES)

_HELP = ViewDef(
    "column_help",
    "The meaning of every column of every table and view.",
    {
        "column1 AS table_name": "the table or view",
        "column2 AS column_name": "the column",
        "column3 AS help": "what it means",
    },
)


def _help_values() -> str:
    rows = []
    described: tuple[TableDef | ViewDef, ...] = (*JOB_TABLES, *VIEWS, _HELP)
    for table in described:
        for column in table.meanings.items():
            texts = [text.replace("'", "''") for text in (table.name, *column)]
            rows.append("('" + "', '".join(texts) + "')")
    return ",\n".join(rows)


# Not a table: those have a ``task_id``.
JOB_VIEWS = (
    *VIEWS,
    _HELP._replace(source=f"FROM (VALUES\n{_help_values()})"),
)

# Created after all rows are written: sorting once is cheaper than updating an index with each row.
_READ_BY_CHUNK = ("detection", "rarity", "attempt")
_READ_BY_TASK = (
    "device",
    "gap",
    "worker",
    "alert",
    "detection",
    "rarity",
    "rival_chunk",
    "rival_detection",
    "device_total",
    "device_work",
    "mark",
)
_INDEXES = (
    ("chunk", ("task_id", "status", "audio_s")),
    ("sample", ("task_id", "device_id", "at_ms")),
    *((table, ("recording_id", "chunk_id")) for table in _READ_BY_CHUNK),
    *((table, ("task_id",)) for table in _READ_BY_TASK),
)


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
        tool.executescript(ddl_script(table.ddl(ORDERED_BY.get(table.name)) for table in JOB_TABLES))
        for view in JOB_VIEWS:
            tool.create_view(view.name, view.select())
        tool.table("meta").insert({"key": "made_by", "value": f"badcjobs {__version__}"})
    return db


def create_indexes(db: sqlite3.Connection) -> None:
    """Create indexes of the job database that do not exist yet."""
    db.execute(f"PRAGMA cache_size = -{_SORT_CACHE_KIB}")
    tool = as_sqlite_utils(db)
    for table, columns in _INDEXES:
        tool.table(table).create_index(columns, if_not_exists=True)
