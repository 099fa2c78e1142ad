"""The tables of a task database as data: the DDL, the guide's page and ``column_help`` all come from this description.

Each table except ``meta`` has a ``task_id``; an unknown value is NULL, never 0; times are in ms, UTC.

A change here needs a new SCHEMA_VERSION; files with another version are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from badcjobs.model import CHARTED
from badcjobs.store.accounting import STATES

SCHEMA_VERSION = 1
APPLICATION_ID = 0x42414443  # "BADC": identifies our SQLite files


class Column(NamedTuple):
    """One column: its SQL type with constraints, and its meaning."""

    name: str
    sql: str
    help: str


@dataclass(frozen=True, slots=True)
class TableDef:
    """One table, and the meaning of a row."""

    name: str
    help: str
    columns: tuple[Column, ...]
    key: str | None
    parent: str | None  # a foreign key of several columns

    def ddl(self, ordered_by: str | None = None) -> str:
        """Return the CREATE TABLE statement; with a key ``ordered_by`` the table stores its rows in that order."""
        lines = [f"    {c.name} {c.sql}" for c in self.columns]
        key = ordered_by or self.key
        if key:
            lines.append(f"    PRIMARY KEY ({key})")
        if self.parent:
            lines.append(f"    FOREIGN KEY {self.parent}")
        kind = "STRICT, WITHOUT ROWID" if ordered_by else "STRICT"
        return f"CREATE TABLE {self.name} (\n" + ",\n".join(lines) + f"\n) {kind}"


def define_table(
    name: str, meaning: str, *columns: Column, key: str | None = None, parent: str | None = None
) -> TableDef:
    """Return a table with these columns."""
    return TableDef(name, meaning, columns, key, parent)


_TASK_ID = Column("task_id", "INTEGER NOT NULL REFERENCES task (task_id)", "its task: task.task_id")
_DEVICE_ID = Column("device_id", "INTEGER NOT NULL REFERENCES device (device_id)", "device.device_id")
_CHUNK = (
    Column("recording_id", "TEXT NOT NULL", "the recording, as in the source"),
    Column("chunk_id", "TEXT NOT NULL", "the chunk; unique together with recording_id"),
)

_OF_A_CHUNK = "(recording_id, chunk_id) REFERENCES chunk (recording_id, chunk_id)"

_DETECTION = define_table(
    "detection",
    "A detection in a chunk that is done; times count from the chunk's start.",
    _TASK_ID,
    *_CHUNK,
    Column("start_ms", "INTEGER NOT NULL", "from the chunk's start"),
    Column("end_ms", "INTEGER NOT NULL", "from the chunk's start"),
    Column("label", "TEXT NOT NULL", "code of the species or sound"),
    Column("label_name", "TEXT", "its name, where the engine gives one"),
    Column("score", "REAL", "the engine's confidence"),
    parent=_OF_A_CHUNK,
)
_OWN = (
    define_table(
        "meta",
        "Facts about this file: versions, the settings of the run, the environment of the task.",
        Column("key", "TEXT NOT NULL", "name"),
        Column("value", "TEXT", "value; structured values are JSON"),
        key="key",
    ),
    define_table(
        "task",
        "One attempt of one array task.",
        Column("task_id", "INTEGER PRIMARY KEY", "a number computed from its name and start; the same in every file"),
        Column("name", "TEXT NOT NULL", "<job>_<index>.r<restart>.<node>, as in the file names"),
        Column("job_id", "TEXT NOT NULL", "the array's job id, the job's, or local<start>-<pid> outside Slurm"),
        Column("array_index", "INTEGER NOT NULL", "SLURM_ARRAY_TASK_ID; 0 without an array"),
        Column("restart", "INTEGER NOT NULL", "how often it was restarted"),
        Column("node", "TEXT NOT NULL", "SLURMD_NODENAME, else the host name"),
        Column("procid", "INTEGER", "SLURM_PROCID in a step of several tasks"),
        Column("pid", "INTEGER", "process id of the wrapper on that node"),
        Column("shard_index", "INTEGER", "number of the part of the source that this task processes, from 0"),
        Column("shard_count", "INTEGER", "number of parts of the source"),
        Column("engine", "TEXT", "hawkears, command or demo; NULL: a recording without an engine"),
        Column("telemetry", "INTEGER NOT NULL", "1: with the recorder; 0: --no-emit-gpu-telemetry"),
        Column("devices", "INTEGER", "number of devices granted, whether used or not"),
        Column("workers", "INTEGER", "number of workers planned"),
        Column("cpus", "INTEGER", "cores of the allocation"),
        Column("version", "TEXT NOT NULL", "badcjobs version that wrote it"),
        Column("started_at_ms", "INTEGER NOT NULL", "when the wrapper started"),
        Column("ended_at_ms", "INTEGER", "when it ended; NULL: it has not ended, or was killed"),
        Column("exit_code", "INTEGER", "its exit code; NULL as above"),
        Column("verdict", "TEXT", "done, failed, stopped or killed; NULL: still running when this was published"),
        Column("slurm_state", "TEXT", "Slurm's state: TIMEOUT, NODE_FAIL, …; ENDED: not given; NULL: no hook (slurm/)"),
        Column("slurm_exit_code", "TEXT", "Slurm's exit code and signal, as 0:9; NULL as above"),
        Column("slurm_reason", "TEXT", "its source: jobcomp (the controller), an epilog (the node), emulation"),
        Column("memory_limit_bytes", "INTEGER", "memory requested from Slurm on this node; NULL: not known"),
        Column("time_limit_s", "REAL", "from its start to its time limit; NULL: not known"),
    ),
    define_table(
        "device",
        "One device granted to a task.",
        Column("device_id", "INTEGER PRIMARY KEY", "a number computed from task and UUID; the same in every file"),
        _TASK_ID,
        Column("uuid", "TEXT", "the device's UUID; NULL: no library to read it"),
        Column("device_index", "INTEGER", "its index among the devices visible to this task"),
        Column("token", "TEXT NOT NULL", "its entry in CUDA_VISIBLE_DEVICES"),
        Column("name", "TEXT", "model name"),
        Column("memory_total_bytes", "INTEGER", "memory of the device"),
        Column("power_limit_w", "REAL", "power limit"),
        Column("pci_bus_id", "TEXT", "PCI address"),
        Column("driver", "TEXT", "driver version"),
        Column("backend", "TEXT NOT NULL", "what read it: nvml, nvidia-smi, amd, simulated, replay or none"),
        Column("why", "TEXT NOT NULL", "why it was chosen"),
        Column("slowdown_c", "INTEGER", "temperature at which it starts to slow down"),
        Column("vendor", "TEXT", "nvidia, amd, intel or other"),
        Column("parent_uuid", "TEXT", "the card of this MIG slice; NULL: it is not a slice"),
    ),
    define_table(
        "sample",
        "One reading of one device at one instant.",
        _TASK_ID,
        _DEVICE_ID,
        Column("at_ms", "INTEGER NOT NULL", "when it was read"),
        Column("utilization_percent", "INTEGER", "share of the recent past in which a kernel ran"),
        Column("memory_utilization_percent", "INTEGER", "the same for reading or writing device memory"),
        Column("memory_used_bytes", "INTEGER", "memory in use, by all processes"),
        Column("temperature_c", "INTEGER", "temperature of the chip"),
        Column("power_w", "REAL", "power draw of the board"),
        Column("energy_j", "REAL", "energy counter since the driver was loaded; every few seconds, else NULL"),
        Column("sm_clock_mhz", "INTEGER", "clock of the multiprocessors"),
        Column("memory_clock_mhz", "INTEGER", "clock of the memory"),
        Column("throttle_reasons", "INTEGER", "NVML's bit mask of reasons for a lowered clock"),
        Column("sm_activity_percent", "REAL", "share of multiprocessors in use; NULL: not measured"),
        Column("sm_occupancy_percent", "REAL", "share of warps resident; NULL: not measured"),
        Column("busy_percent", "REAL", "share of the time since its last value in which work ran; see metric_source"),
        Column("tensor_percent", "REAL", "share of the time in which tensor cores worked; NULL: not measured"),
        Column("dram_percent", "REAL", "share of the memory bandwidth in use; NULL: not measured"),
        Column("pcie_rx_bytes_per_s", "INTEGER", "received over PCIe since its last value"),
        Column("pcie_tx_bytes_per_s", "INTEGER", "sent over PCIe since its last value"),
        Column("fan_percent", "INTEGER", "fan speed; NULL: no fan, or not read this time"),
        Column("encoder_percent", "INTEGER", "use of the video encoder"),
        Column("decoder_percent", "INTEGER", "use of the video decoder"),
        Column("ecc_errors", "INTEGER", "uncorrected memory errors since the driver was loaded"),
    ),
    define_table(
        "host_sample",
        "The machine around the devices at one instant.",
        _TASK_ID,
        Column("at_ms", "INTEGER NOT NULL", "when it was read"),
        Column("cpu_percent", "REAL", "all cores of the machine together, 100 = all busy"),
        Column("memory_used_bytes", "INTEGER", "memory in use on the machine"),
        Column("memory_total_bytes", "INTEGER", "memory of the machine"),
    ),
    define_table(
        "usage_sample",
        "What the task's own processes used at one instant: the wrapper, its workers and their child processes.",
        _TASK_ID,
        Column("at_ms", "INTEGER NOT NULL", "when it was read"),
        Column("cpu_cores", "REAL", "cores kept busy since the previous reading"),
        Column("memory_bytes", "INTEGER", "their memory in total; see source"),
        Column("read_bytes_per_s", "REAL", "bytes from read() since the previous reading; NULL: not available"),
        Column("processes", "INTEGER", "number of processes"),
        Column("source", "TEXT NOT NULL", "how memory was measured: pss (shared pages counted once) or rss"),
    ),
    define_table(
        "gap",
        "A period without readings, and why.",
        _TASK_ID,
        Column("device_id", "INTEGER REFERENCES device (device_id)", "device.device_id; NULL: all devices"),
        Column("metric", "TEXT", "the missing column of `sample`; NULL: all columns"),
        Column("from_ms", "INTEGER NOT NULL", "the last reading before it"),
        Column("to_ms", "INTEGER NOT NULL", "the first reading after it, or the last known moment without one"),
        Column("reason", "TEXT NOT NULL", "why, in words"),
    ),
    define_table(
        "worker",
        "One engine process or, for engines that start a process per chunk, one slot for them.",
        Column("worker_id", "INTEGER PRIMARY KEY", "a number computed from task and sequence; the same in every file"),
        _TASK_ID,
        Column("device_id", "INTEGER REFERENCES device (device_id)", "device.device_id; NULL: on the CPU"),
        Column("pid", "INTEGER", "process id; NULL: a new process for each chunk"),
        Column("engine", "TEXT NOT NULL", "which engine"),
        Column("started_at_ms", "INTEGER NOT NULL", "when it was started"),
        Column("ended_at_ms", "INTEGER", "when it ended; NULL: with its task"),
        Column("exit_code", "INTEGER", "its exit code; negative: the signal that ended it; NULL: not known"),
    ),
    define_table(
        "chunk",
        "One row of the source and its final state.",
        _TASK_ID,
        *_CHUNK,
        Column("source_path", "TEXT NOT NULL", "its audio file, as in the source"),
        Column("audio_path", "TEXT NOT NULL", "its audio file, as it was opened"),
        Column("start_ms", "INTEGER NOT NULL", "where it starts in the recording"),
        Column("end_ms", "INTEGER", "where it ends in the recording; NULL: not known"),
        Column("status", "TEXT NOT NULL", "done, failed, poison, pending or skipped (done or failed elsewhere)"),
        Column("attempts", "INTEGER NOT NULL", "tries so far in this task"),
        Column("device_id", "INTEGER REFERENCES device (device_id)", "where the last try ran"),
        Column("worker_id", "INTEGER REFERENCES worker (worker_id)", "which worker made the last try"),
        Column("started_at_ms", "INTEGER", "when the last try started"),
        Column("ended_at_ms", "INTEGER", "when the last try ended"),
        Column("audio_s", "REAL", "seconds of audio; NULL: not known"),
        Column("detections", "INTEGER", "number of detections; NULL: not done here"),
        Column("error_class", "TEXT", "why it failed, as a class"),
        Column("error", "TEXT", "why it failed, in the engine's words"),
        Column("audio_bytes", "INTEGER", "size of its audio file when the chunks were listed; NULL: not known"),
        Column("audio_mtime_ns", "INTEGER", "when that file was last changed, in ns since 1970; NULL: not known"),
        Column("audio_sha256", "TEXT", "its checksum in the manifest; NULL: the manifest has none"),
        Column("is_cut", "INTEGER NOT NULL DEFAULT 0", "1: start_ms to end_ms of a longer file, cut before use"),
        key="recording_id, chunk_id",
    ),
    define_table(
        "recording",
        "One recording of the task's part of the source: facts from its path and, if it was read, its header.",
        _TASK_ID,
        _CHUNK[0],
        Column("source_path", "TEXT NOT NULL", "its audio file, as in the source; the first of several files"),
        Column("study_area", "TEXT", "where it was made; NULL: not in its path"),
        Column("location", "TEXT", "the station; NULL: not in its path"),
        Column("recorded_at", "TEXT", "start by the audio recorder's clock, ISO 8601; NULL: no date in its name"),
        Column("duration_s", "REAL", "length of its audio file; NULL: its header was not read"),
        Column("sample_rate_hz", "INTEGER", "samples per second; NULL as above"),
        Column("channels", "INTEGER", "number of channels; NULL as above"),
        Column("pattern", "TEXT", "the pattern of the config that matches its path; NULL: the built-in rule"),
        Column("latitude", "REAL", "where it was made, for the filter of species; NULL: not given"),
        Column("longitude", "REAL", "as latitude"),
        Column("region", "TEXT", "eBird region, which counts before the coordinates; NULL: not given"),
        Column("recorded_on", "TEXT", "date that the filter of species uses, ISO 8601; NULL: not known"),
        Column("location_name", "TEXT", "name of the place in the list or manifest; NULL: not given"),
        Column("left_out", "TEXT", "why it has no chunks: no_place (--filelist); NULL: it is analysed"),
        Column("no_county", "INTEGER", "1: its coordinates are in no county, so the filter is off; NULL: not known"),
        key="task_id, recording_id",
    ),
    define_table(
        "attempt",
        "One try of one chunk.",
        _TASK_ID,
        Column("attempt_id", "INTEGER NOT NULL", "number of the try within its task"),
        *_CHUNK,
        Column("try_number", "INTEGER NOT NULL", "1 for the first try of this chunk in this task"),
        Column("worker_id", "INTEGER REFERENCES worker (worker_id)", "worker.worker_id"),
        Column("device_id", "INTEGER REFERENCES device (device_id)", "device.device_id"),
        Column("started_at_ms", "INTEGER NOT NULL", "when it started"),
        Column("ended_at_ms", "INTEGER", "when it ended; NULL: it has not ended"),
        Column("outcome", "TEXT", "done, failed or lost (with its batch); NULL: interrupted"),
        Column("error_class", "TEXT", "why it failed, as a class"),
        Column("error", "TEXT", "why it failed, in the engine's words"),
        Column("gpu_state", "TEXT", "JSON: the device's last sample before it failed; NULL: done, or not known"),
        Column("pieces", "INTEGER", "number of pieces if it was too long for the device; NULL: analysed in one piece"),
        key="task_id, attempt_id",
        parent=_OF_A_CHUNK,
    ),
    define_table(
        "decision",
        "An automatic decision of the wrapper, and why.",
        _TASK_ID,
        Column("at_ms", "INTEGER NOT NULL", "when"),
        Column("code", "TEXT NOT NULL", "workers.…, mps.…, memory_limit.…, staging.…, short_audio, left_out, gave_up"),
        Column("subject", "TEXT", "its subject: the model of the device, the chunk, or an ending; NULL: the task"),
        Column("figures", "TEXT NOT NULL", "JSON: the figures behind it, by name; what is not known is left out"),
        Column("reason", "TEXT NOT NULL", "code and figures as a sentence"),
    ),
    _DETECTION,
    replace(
        _DETECTION,
        name="rarity",
        help="A detection that HawkEars keeps apart: of a species that is not expected at that place in that week.",
    ),
    define_table(
        "alert",
        "An alert: a threshold was crossed; with start, end and peak.",
        _TASK_ID,
        Column("device_id", "INTEGER REFERENCES device (device_id)", "device.device_id"),
        Column("kind", "TEXT NOT NULL", "kind of alert"),
        Column("severity", "TEXT NOT NULL", "warning or critical"),
        Column("started_at_ms", "INTEGER NOT NULL", "when it started"),
        Column("ended_at_ms", "INTEGER", "when it ended; NULL: it had not ended"),
        Column("peak", "REAL", "worst value"),
        Column("threshold", "REAL", "the limit"),
        Column("message", "TEXT NOT NULL", "the message"),
    ),
    define_table(
        "process",
        "One process that was seen on a device, of this task or not.",
        _TASK_ID,
        _DEVICE_ID,
        Column("pid", "INTEGER NOT NULL", "process id on the host"),
        Column("name", "TEXT", "name of the program; NULL: not visible"),
        Column("user", "TEXT", "its user; NULL: not visible"),
        Column("ours", "INTEGER", "1: of this task; 0: not of this task; NULL: not known (other PID namespace)"),
        Column("first_at_ms", "INTEGER NOT NULL", "when it was first seen"),
        Column("last_at_ms", "INTEGER NOT NULL", "when it was last seen"),
        Column("memory_peak_bytes", "INTEGER", "peak of its device memory; NULL: not available"),
        key="task_id, device_id, pid, first_at_ms",
    ),
    define_table(
        "metric_source",
        "The source of a metric of a device, for metrics with several sources.",
        _TASK_ID,
        _DEVICE_ID,
        Column("metric", "TEXT NOT NULL", "the column of `sample`"),
        Column("source", "TEXT NOT NULL", "gpm, processes, utilization, dcgmi, …"),
        Column("from_ms", "INTEGER NOT NULL", "from when on"),
        key="task_id, device_id, metric, from_ms",
    ),
    define_table(
        "recorder",
        "One process of the recorder, and its cost.",
        _TASK_ID,
        Column("pid", "INTEGER NOT NULL", "its process id"),
        Column("backend", "TEXT NOT NULL", "what read the devices, as device.backend"),
        Column("why", "TEXT NOT NULL", "why this backend"),
        Column("interval_s", "REAL NOT NULL", "requested time between two samples"),
        Column("started_at_ms", "INTEGER NOT NULL", "when it started"),
        Column("last_at_ms", "INTEGER NOT NULL", "when this row was last updated"),
        Column("ticks", "INTEGER NOT NULL", "instants sampled"),
        Column("cpu_s", "REAL NOT NULL", "processor time it has used"),
        Column("memory_bytes", "INTEGER", "peak of its memory"),
        Column("worst_late_s", "REAL NOT NULL", "the largest delay of a sample"),
        Column("reading_s", "REAL NOT NULL", "time it has spent reading devices"),
        key="task_id, started_at_ms, pid",
    ),
    define_table(
        "mark",
        "A period that a program named with Recorder.mark(name).",
        _TASK_ID,
        Column("name", "TEXT NOT NULL", "the name"),
        Column("started_at_ms", "INTEGER NOT NULL", "when it started"),
        Column("ended_at_ms", "INTEGER", "when it ended; NULL: it had not ended"),
    ),
    define_table(
        "process_sample",
        "One process on one device at one instant.",
        _TASK_ID,
        _DEVICE_ID,
        Column("at_ms", "INTEGER NOT NULL", "when it was read"),
        Column("pid", "INTEGER NOT NULL", "process id on the host"),
        Column("memory_used_bytes", "INTEGER", "its device memory"),
        Column("sm_percent", "INTEGER", "its share of the multiprocessors"),
    ),
)

# Computed from the rows of the other tables; not salvaged from a damaged file, but computed again.
_DERIVED = (
    define_table(
        "device_total",
        "Totals of the samples of one device, computed at publication.",
        Column("device_id", "INTEGER PRIMARY KEY REFERENCES device (device_id)", "device.device_id"),
        _TASK_ID,
        Column("samples", "INTEGER NOT NULL", "number of samples"),
        Column("first_at_ms", "INTEGER", "time of the first sample"),
        Column("last_at_ms", "INTEGER", "time of the last sample"),
        Column("energy_counter_j", "REAL", "last minus first reading of the energy counter"),
        Column("energy_counter_span_s", "REAL", "from its first reading to its last"),
        Column("energy_integrated_j", "REAL", "power integrated over the samples, without gaps of more than 15 s"),
    ),
    define_table(
        "metric_summary",
        "One metric of one device over all its samples.",
        _TASK_ID,
        _DEVICE_ID,
        Column("metric", "TEXT NOT NULL", "the column of `sample`"),
        Column("samples", "INTEGER NOT NULL", "number of samples with a value"),
        Column("minimum", "REAL NOT NULL", "the smallest"),
        Column("mean", "REAL NOT NULL", "the mean"),
        Column("p50", "REAL NOT NULL", "the median, by nearest rank"),
        Column("p95", "REAL NOT NULL", "95th percentile, by nearest rank"),
        Column("maximum", "REAL NOT NULL", "the largest"),
    ),
    define_table(
        "utilization_count",
        "How many samples of a device have each utilization; use it for percentiles over several devices.",
        _TASK_ID,
        _DEVICE_ID,
        Column("utilization_percent", "INTEGER NOT NULL", "as in `sample`"),
        Column("samples", "INTEGER NOT NULL", "how many"),
    ),
    define_table(
        "throttle_count",
        "How many samples of a device have each reason for a lowered clock; a sample may have several.",
        _TASK_ID,
        _DEVICE_ID,
        Column("reason", "TEXT NOT NULL", "NVML's name of the bit in throttle_reasons; gpu_idle is not a slowdown"),
        Column("samples", "INTEGER NOT NULL", "how many"),
    ),
    define_table(
        "device_time",
        "The time of a device by state; the states of one device add up to the time of its task.",
        _TASK_ID,
        _DEVICE_ID,
        Column("state", "TEXT NOT NULL", "working, failed, lost, start_up, waiting or idle; see guide report"),
        Column("total_s", "REAL NOT NULL", "seconds in this state"),
        Column("measured_s", "REAL NOT NULL", "the part of total_s in which its power is known"),
        Column("busy_s", "REAL", "the part of total_s in which the device worked; NULL: not measured"),
        Column("energy_j", "REAL", "power integrated over it; NULL: not measured"),
    ),
    define_table(
        "attempt_cost",
        "The cost of one try of one chunk; tries at the same time on one device share it equally.",
        _TASK_ID,
        Column("attempt_id", "INTEGER NOT NULL", "attempt.attempt_id"),
        Column("state", "TEXT NOT NULL", "working (done, or in progress), failed or lost, as in device_time"),
        Column("gpu_s", "REAL NOT NULL", "its share of the device's time"),
        Column("busy_s", "REAL", "its share of the time in which the device worked; NULL: not measured"),
        Column("energy_j", "REAL", "its share of the energy; NULL: not measured"),
        key="task_id, attempt_id",
    ),
    define_table(
        "device_stretch",
        "The samples of a device in at most 120 stretches of equal length, with its states in each.",
        _TASK_ID,
        _DEVICE_ID,
        Column("from_ms", "INTEGER NOT NULL", "when it starts"),
        Column("to_ms", "INTEGER NOT NULL", "when it ends"),
        Column("state", "TEXT NOT NULL", "the longest state in it; see device_time"),
        Column("samples", "INTEGER NOT NULL", "number of samples in it; 0: the columns that follow are NULL"),
        *(
            Column(f"{metric}_{part}_{unit}", "REAL", f"{word} of `sample.{metric}_{unit}` in it")
            for metric, unit in (name.rsplit("_", 1) for name in CHARTED)
            for part, word in (("min", "smallest"), ("mean", "mean"), ("max", "largest"))
        ),
        *(Column(f"{state}_s", "REAL NOT NULL", f"seconds of it in the state {state}") for state in STATES),
    ),
    define_table(
        "task_total",
        "What a task's own processes and its machine used; computed at publication.",
        Column("task_id", "INTEGER PRIMARY KEY REFERENCES task (task_id)", "task.task_id"),
        Column("usage_samples", "INTEGER NOT NULL", "number of rows of `usage_sample`"),
        Column("cpu_mean_cores", "REAL", "mean of cpu_cores while chunks were processed"),
        Column("memory_peak_bytes", "INTEGER", "peak memory of its processes"),
        Column("read_mean_bytes_per_s", "REAL", "mean of read_bytes_per_s while chunks were processed"),
        Column("host_cpu_mean_percent", "REAL", "mean of host_sample.cpu_percent while chunks were processed"),
        Column("host_memory_peak_bytes", "INTEGER", "peak memory in use on the machine"),
    ),
)

TABLES = (*_OWN, *_DERIVED)
DERIVED = tuple(table.name for table in _DERIVED)
TABLE_BY_NAME = {table.name: table for table in TABLES}

# When a task ``t`` ended or, without an end (killed, or still running), the latest time in its data.
LAST_SIGN = """coalesce(t.ended_at_ms, max(
        t.started_at_ms,
        coalesce((SELECT max(to_ms) FROM gap g WHERE g.task_id = t.task_id), 0),
        coalesce((SELECT max(at_ms) FROM host_sample h WHERE h.task_id = t.task_id), 0),
        coalesce((SELECT max(coalesce(ended_at_ms, started_at_ms)) FROM attempt a WHERE a.task_id = t.task_id), 0)))"""


def columns_of(name: str) -> tuple[str, ...]:
    """Return the column names of one table of a task database, in order."""
    return tuple(column.name for column in TABLE_BY_NAME[name].columns)


def insert_sql(name: str, columns: Collection[str] = ()) -> str:
    """Return the statement that inserts a row into one table of a task database; without columns: a complete row."""
    names = columns or columns_of(name)
    return f"INSERT INTO {name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


def ddl_script(tables: Sequence[TableDef] = TABLES, ordered_by: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the SQL that creates the tables of a task database, or those given, in one transaction."""
    creations = [f"{table.ddl(ordered_by.get(table.name))};" for table in tables]
    marks = [f"PRAGMA application_id = {APPLICATION_ID};", f"PRAGMA user_version = {SCHEMA_VERSION};"]
    return "\n".join(["BEGIN;", *creations, *marks, "COMMIT;"])
