"""The tables of a task database as data: the DDL, the guide's page and ``column_help`` all come from this description.

Each table except ``meta`` has a ``task_id``; an unknown value is NULL, never 0; times are in ms, UTC.

A change here needs a new SCHEMA_VERSION; files with another version are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from badcjobs.model import CHARTED

SCHEMA_VERSION = 1
APPLICATION_ID = 0x42414443  # "BADC": identifies our SQLite files
STATES = ("working", "failed", "lost", "start_up", "waiting", "idle")  # of a device; the first that applies


class TableDef(NamedTuple):
    """One table, and the meaning of a row; ``columns`` maps the SQL definition of each column to its meaning."""

    name: str
    help: str
    columns: Mapping[str, str]
    key: str | None = None
    parent: str | None = None  # a foreign key of several columns

    @property
    def meanings(self) -> dict[str, str]:
        """The meaning of each column, by its name."""
        return {definition.split()[0]: meaning for definition, meaning in self.columns.items()}

    def ddl(self, ordered_by: str | None = None) -> str:
        """Return the CREATE TABLE statement; with a key ``ordered_by`` the table stores its rows in that order."""
        lines = list(self.columns)
        key = ordered_by or self.key
        if key:
            lines.append(f"PRIMARY KEY ({key})")
        if self.parent:
            lines.append(f"FOREIGN KEY {self.parent}")
        kind = "STRICT, WITHOUT ROWID" if ordered_by else "STRICT"
        body = ",\n    ".join(lines)
        return f"CREATE TABLE {self.name} (\n    {body}\n) {kind};"


_TASK_ID = {"task_id INTEGER NOT NULL REFERENCES task (task_id)": "its task: task.task_id"}
_DEVICE_ID = {"device_id INTEGER NOT NULL REFERENCES device (device_id)": "device.device_id"}
_RECORDING_ID = {"recording_id TEXT NOT NULL": "the recording, as in the source"}
CHUNK = {**_RECORDING_ID, "chunk_id TEXT NOT NULL": "the chunk; unique together with recording_id"}
OF_A_CHUNK = "(recording_id, chunk_id) REFERENCES chunk (recording_id, chunk_id)"
SOUND = {
    "label TEXT NOT NULL": "code of the species or sound",
    "label_name TEXT": "its name, where the engine gives one",
    "score REAL": "the engine's confidence",
}

_DETECTION = TableDef(
    "detection",
    "A detection in a chunk that is done; times count from the chunk's start.",
    {
        **_TASK_ID,
        **CHUNK,
        "start_ms INTEGER NOT NULL": "from the chunk's start",
        "end_ms INTEGER NOT NULL": "from the chunk's start",
        **SOUND,
    },
    parent=OF_A_CHUNK,
)
_OWN = (
    TableDef(
        "meta",
        "Facts about this file: versions, the settings of the run, the environment of the task.",
        {
            "key TEXT NOT NULL": "name",
            "value TEXT": "value; structured values are JSON",
        },
        key="key",
    ),
    TableDef(
        "task",
        "One attempt of one array task.",
        {
            "task_id INTEGER PRIMARY KEY": "a number computed from its name and start; the same in every file",
            "name TEXT NOT NULL": "<job>_<index>.r<restart>.<node>, as in the file names",
            "job_id TEXT NOT NULL": "the array's job id, the job's, or local<start>-<pid> outside Slurm",
            "array_index INTEGER NOT NULL": "SLURM_ARRAY_TASK_ID; 0 without an array",
            "restart INTEGER NOT NULL": "how often it was restarted",
            "node TEXT NOT NULL": "SLURMD_NODENAME, else the host name",
            "procid INTEGER": "SLURM_PROCID in a step of several tasks",
            "pid INTEGER": "process id of the wrapper on that node",
            "shard_index INTEGER": "number of the part of the source that this task processes, from 0",
            "shard_count INTEGER": "number of parts of the source",
            "engine TEXT": "hawkears, command or demo; NULL: a recording without an engine",
            "telemetry INTEGER NOT NULL": "1: with the recorder; 0: --no-emit-gpu-telemetry",
            "devices INTEGER": "number of devices granted, whether used or not",
            "workers INTEGER": "number of workers planned",
            "cpus INTEGER": "cores of the allocation",
            "version TEXT NOT NULL": "badcjobs version that wrote it",
            "started_at_ms INTEGER NOT NULL": "when the wrapper started",
            "ended_at_ms INTEGER": "when it ended; NULL: it has not ended, or was killed",
            "exit_code INTEGER": "its exit code; NULL as above",
            "verdict TEXT": "done, failed, stopped or killed; NULL: still running when this was published",
            "slurm_state TEXT": "Slurm's state: TIMEOUT, NODE_FAIL, …; ENDED: not given; NULL: no hook (slurm/)",
            "slurm_exit_code TEXT": "Slurm's exit code and signal, as 0:9; NULL as above",
            "slurm_reason TEXT": "its source: jobcomp (the controller), an epilog (the node), emulation",
            "memory_limit_bytes INTEGER": "memory requested from Slurm on this node; NULL: not known",
            "time_limit_s REAL": "from its start to its time limit; NULL: not known",
        },
    ),
    TableDef(
        "device",
        "One device granted to a task.",
        {
            "device_id INTEGER PRIMARY KEY": "a number computed from task and UUID; the same in every file",
            **_TASK_ID,
            "uuid TEXT": "the device's UUID; NULL: no library to read it",
            "device_index INTEGER": "its index among the devices visible to this task",
            "token TEXT NOT NULL": "its entry in CUDA_VISIBLE_DEVICES",
            "name TEXT": "model name",
            "memory_total_bytes INTEGER": "memory of the device",
            "power_limit_w REAL": "power limit",
            "pci_bus_id TEXT": "PCI address",
            "driver TEXT": "driver version",
            "backend TEXT NOT NULL": "what read it: nvml, nvidia-smi, amd, simulated, replay or none",
            "why TEXT NOT NULL": "why it was chosen",
            "slowdown_c INTEGER": "temperature at which it starts to slow down",
            "vendor TEXT": "nvidia, amd, intel or other",
            "parent_uuid TEXT": "the card of this MIG slice; NULL: it is not a slice",
        },
    ),
    TableDef(
        "sample",
        "One reading of one device at one instant.",
        {
            **_TASK_ID,
            **_DEVICE_ID,
            "at_ms INTEGER NOT NULL": "when it was read",
            "utilization_percent INTEGER": "share of the recent past in which a kernel ran",
            "memory_utilization_percent INTEGER": "the same for reading or writing device memory",
            "memory_used_bytes INTEGER": "memory in use, by all processes",
            "temperature_c INTEGER": "temperature of the chip",
            "power_w REAL": "power draw of the board",
            "energy_j REAL": "energy counter since the driver was loaded; every few seconds, else NULL",
            "sm_clock_mhz INTEGER": "clock of the multiprocessors",
            "memory_clock_mhz INTEGER": "clock of the memory",
            "throttle_reasons INTEGER": "NVML's bit mask of reasons for a lowered clock",
            "sm_activity_percent REAL": "share of multiprocessors in use; NULL: not measured",
            "sm_occupancy_percent REAL": "share of warps resident; NULL: not measured",
            "busy_percent REAL": "share of the time since its last value in which work ran; see metric_source",
            "tensor_percent REAL": "share of the time in which tensor cores worked; NULL: not measured",
            "dram_percent REAL": "share of the memory bandwidth in use; NULL: not measured",
            "pcie_rx_bytes_per_s INTEGER": "received over PCIe since its last value",
            "pcie_tx_bytes_per_s INTEGER": "sent over PCIe since its last value",
            "fan_percent INTEGER": "fan speed; NULL: no fan, or not read this time",
            "encoder_percent INTEGER": "use of the video encoder",
            "decoder_percent INTEGER": "use of the video decoder",
            "ecc_errors INTEGER": "uncorrected memory errors since the driver was loaded",
        },
    ),
    TableDef(
        "host_sample",
        "The machine around the devices at one instant.",
        {
            **_TASK_ID,
            "at_ms INTEGER NOT NULL": "when it was read",
            "cpu_percent REAL": "all cores of the machine together, 100 = all busy",
            "memory_used_bytes INTEGER": "memory in use on the machine",
            "memory_total_bytes INTEGER": "memory of the machine",
        },
    ),
    TableDef(
        "usage_sample",
        "What the task's own processes used at one instant: the wrapper, its workers and their child processes.",
        {
            **_TASK_ID,
            "at_ms INTEGER NOT NULL": "when it was read",
            "cpu_cores REAL": "cores kept busy since the previous reading",
            "memory_bytes INTEGER": "their memory in total; see source",
            "read_bytes_per_s REAL": "bytes from read() since the previous reading; NULL: not available",
            "processes INTEGER": "number of processes",
            "source TEXT NOT NULL": "how memory was measured: pss (shared pages counted once) or rss",
        },
    ),
    TableDef(
        "gap",
        "A period without readings, and why.",
        {
            **_TASK_ID,
            "device_id INTEGER REFERENCES device (device_id)": "device.device_id; NULL: all devices",
            "metric TEXT": "the missing column of `sample`; NULL: all columns",
            "from_ms INTEGER NOT NULL": "the last reading before it",
            "to_ms INTEGER NOT NULL": "the first reading after it, or the last known moment without one",
            "reason TEXT NOT NULL": "why, in words",
        },
    ),
    TableDef(
        "worker",
        "One engine process or, for engines that start a process per chunk, one slot for them.",
        {
            "worker_id INTEGER PRIMARY KEY": "a number computed from task and sequence; the same in every file",
            **_TASK_ID,
            "device_id INTEGER REFERENCES device (device_id)": "device.device_id; NULL: on the CPU",
            "pid INTEGER": "process id; NULL: a new process for each chunk",
            "engine TEXT NOT NULL": "which engine",
            "started_at_ms INTEGER NOT NULL": "when it was started",
            "ended_at_ms INTEGER": "when it ended; NULL: with its task",
            "exit_code INTEGER": "its exit code; negative: the signal that ended it; NULL: not known",
        },
    ),
    TableDef(
        "chunk",
        "One row of the source and its final state.",
        {
            **_TASK_ID,
            **CHUNK,
            "source_path TEXT NOT NULL": "its audio file, as in the source",
            "audio_path TEXT NOT NULL": "its audio file, as it was opened",
            "start_ms INTEGER NOT NULL": "where it starts in the recording",
            "end_ms INTEGER": "where it ends in the recording; NULL: not known",
            "status TEXT NOT NULL": "done, failed, poison, pending or skipped (done or failed elsewhere)",
            "attempts INTEGER NOT NULL": "tries so far in this task",
            "device_id INTEGER REFERENCES device (device_id)": "where the last try ran",
            "worker_id INTEGER REFERENCES worker (worker_id)": "which worker made the last try",
            "started_at_ms INTEGER": "when the last try started",
            "ended_at_ms INTEGER": "when the last try ended",
            "audio_s REAL": "seconds of audio; NULL: not known",
            "detections INTEGER": "number of detections; NULL: not done here",
            "error_class TEXT": "why it failed, as a class",
            "error TEXT": "why it failed, in the engine's words",
            "audio_bytes INTEGER": "size of its audio file when the chunks were listed; NULL: not known",
            "audio_mtime_ns INTEGER": "when that file was last changed, in ns since 1970; NULL: not known",
            "audio_sha256 TEXT": "its checksum in the manifest; NULL: the manifest has none",
            "is_cut INTEGER NOT NULL DEFAULT 0": "1: start_ms to end_ms of a longer file, cut before use",
        },
        key="recording_id, chunk_id",
    ),
    TableDef(
        "recording",
        "One recording of the task's part of the source: facts from its path and, if it was read, its header.",
        {
            **_TASK_ID,
            **_RECORDING_ID,
            "source_path TEXT NOT NULL": "its audio file, as in the source; the first of several files",
            "study_area TEXT": "where it was made; NULL: not in its path",
            "location TEXT": "the station; NULL: not in its path",
            "recorded_at TEXT": "start by the audio recorder's clock, ISO 8601; NULL: no date in its name",
            "duration_s REAL": "length of its audio file; NULL: its header was not read",
            "sample_rate_hz INTEGER": "samples per second; NULL as above",
            "channels INTEGER": "number of channels; NULL as above",
            "pattern TEXT": "the pattern of the config that matches its path; NULL: the built-in rule",
            "latitude REAL": "where it was made, for the filter of species; NULL: not given",
            "longitude REAL": "as latitude",
            "region TEXT": "eBird region, which counts before the coordinates; NULL: not given",
            "recorded_on TEXT": "date that the filter of species uses, ISO 8601; NULL: not known",
            "location_name TEXT": "name of the place in the list or manifest; NULL: not given",
            "left_out TEXT": "why it has no chunks: no_place (--filelist); NULL: it is analysed",
            "no_county INTEGER": "1: its coordinates are in no county, so the filter is off; NULL: not known",
        },
        key="task_id, recording_id",
    ),
    TableDef(
        "attempt",
        "One try of one chunk.",
        {
            **_TASK_ID,
            "attempt_id INTEGER NOT NULL": "number of the try within its task",
            **CHUNK,
            "try_number INTEGER NOT NULL": "1 for the first try of this chunk in this task",
            "worker_id INTEGER REFERENCES worker (worker_id)": "worker.worker_id",
            "device_id INTEGER REFERENCES device (device_id)": "device.device_id",
            "started_at_ms INTEGER NOT NULL": "when it started",
            "ended_at_ms INTEGER": "when it ended; NULL: it has not ended",
            "outcome TEXT": "done, failed or lost (with its batch); NULL: interrupted",
            "error_class TEXT": "why it failed, as a class",
            "error TEXT": "why it failed, in the engine's words",
            "gpu_state TEXT": "JSON: the device's last sample before it failed; NULL: done, or not known",
            "pieces INTEGER": "number of pieces if it was too long for the device; NULL: analysed in one piece",
        },
        key="task_id, attempt_id",
        parent=OF_A_CHUNK,
    ),
    TableDef(
        "decision",
        "An automatic decision of the wrapper, and why.",
        {
            **_TASK_ID,
            "at_ms INTEGER NOT NULL": "when",
            "code TEXT NOT NULL": "workers.…, mps.…, memory_limit.…, staging.…, retry.…, node.…, short_audio, …",
            "subject TEXT": "its subject: the model of the device, the chunk, or an ending; NULL: the task",
            "figures TEXT NOT NULL": "JSON: the figures behind it, by name; what is not known is left out",
            "reason TEXT NOT NULL": "code and figures as a sentence",
        },
    ),
    _DETECTION,
    _DETECTION._replace(
        name="rarity",
        help="A detection that HawkEars keeps apart: of a species that is not expected at that place in that week.",
    ),
    TableDef(
        "alert",
        "An alert: a threshold was crossed; with start, end and peak.",
        {
            **_TASK_ID,
            "device_id INTEGER REFERENCES device (device_id)": "device.device_id",
            "kind TEXT NOT NULL": "kind of alert",
            "severity TEXT NOT NULL": "warning or critical",
            "started_at_ms INTEGER NOT NULL": "when it started",
            "ended_at_ms INTEGER": "when it ended; NULL: it had not ended",
            "peak REAL": "worst value",
            "threshold REAL": "the limit",
            "message TEXT NOT NULL": "the message",
        },
    ),
    TableDef(
        "process",
        "One process that was seen on a device, of this task or not.",
        {
            **_TASK_ID,
            **_DEVICE_ID,
            "pid INTEGER NOT NULL": "process id on the host",
            "name TEXT": "name of the program; NULL: not visible",
            "user TEXT": "its user; NULL: not visible",
            "ours INTEGER": "1: of this task; 0: not of this task; NULL: not known (other PID namespace)",
            "first_at_ms INTEGER NOT NULL": "when it was first seen",
            "last_at_ms INTEGER NOT NULL": "when it was last seen",
            "memory_peak_bytes INTEGER": "peak of its device memory; NULL: not available",
        },
        key="task_id, device_id, pid, first_at_ms",
    ),
    TableDef(
        "metric_source",
        "The source of a metric of a device, for metrics with several sources.",
        {
            **_TASK_ID,
            **_DEVICE_ID,
            "metric TEXT NOT NULL": "the column of `sample`",
            "source TEXT NOT NULL": "gpm, processes, utilization, dcgmi, …",
            "from_ms INTEGER NOT NULL": "from when on",
        },
        key="task_id, device_id, metric, from_ms",
    ),
    TableDef(
        "recorder",
        "One process of the recorder, and its cost.",
        {
            **_TASK_ID,
            "pid INTEGER NOT NULL": "its process id",
            "backend TEXT NOT NULL": "what read the devices, as device.backend",
            "why TEXT NOT NULL": "why this backend",
            "interval_s REAL NOT NULL": "requested time between two samples",
            "started_at_ms INTEGER NOT NULL": "when it started",
            "last_at_ms INTEGER NOT NULL": "when this row was last updated",
            "ticks INTEGER NOT NULL": "instants sampled",
            "cpu_s REAL NOT NULL": "processor time it has used",
            "memory_bytes INTEGER": "peak of its memory",
            "worst_late_s REAL NOT NULL": "the largest delay of a sample",
            "reading_s REAL NOT NULL": "time it has spent reading devices",
        },
        key="task_id, started_at_ms, pid",
    ),
    TableDef(
        "mark",
        "A period that a program named with Recorder.mark(name).",
        {
            **_TASK_ID,
            "name TEXT NOT NULL": "the name",
            "started_at_ms INTEGER NOT NULL": "when it started",
            "ended_at_ms INTEGER": "when it ended; NULL: it had not ended",
        },
    ),
    TableDef(
        "process_sample",
        "One process on one device at one instant.",
        {
            **_TASK_ID,
            **_DEVICE_ID,
            "at_ms INTEGER NOT NULL": "when it was read",
            "pid INTEGER NOT NULL": "process id on the host",
            "memory_used_bytes INTEGER": "its device memory",
            "sm_percent INTEGER": "its share of the multiprocessors",
        },
    ),
)


def stretch_columns(metric: str) -> tuple[str, str, str]:
    """Return the columns of a metric in a table of stretches: its smallest, mean and largest reading."""
    name, unit = metric.rsplit("_", 1)
    return f"{name}_min_{unit}", f"{name}_mean_{unit}", f"{name}_max_{unit}"


STRETCH_FIGURES = {
    f"{column} REAL": f"{adjective} of `sample.{metric}` in it"
    for metric in CHARTED
    for column, adjective in zip(stretch_columns(metric), ("smallest", "mean", "largest"), strict=True)
}

# Computed from the rows of the other tables; not salvaged from a damaged file, but computed again.
_DERIVED = (
    TableDef(
        "device_total",
        "Totals of the samples of one device, computed at publication.",
        {
            "device_id INTEGER PRIMARY KEY REFERENCES device (device_id)": "device.device_id",
            **_TASK_ID,
            "samples INTEGER NOT NULL": "number of samples",
            "first_at_ms INTEGER": "time of the first sample",
            "last_at_ms INTEGER": "time of the last sample",
            "energy_counter_j REAL": "last minus first reading of the energy counter",
            "energy_counter_span_s REAL": "from its first reading to its last",
            "energy_integrated_j REAL": "power integrated over the samples, without gaps of more than 15 s",
        },
    ),
    TableDef(
        "metric_summary",
        "One metric of one device over all its samples.",
        {
            **_TASK_ID,
            **_DEVICE_ID,
            "metric TEXT NOT NULL": "the column of `sample`",
            "samples INTEGER NOT NULL": "number of samples with a value",
            "minimum REAL NOT NULL": "the smallest",
            "mean REAL NOT NULL": "the mean",
            "p50 REAL NOT NULL": "the median, by nearest rank",
            "p95 REAL NOT NULL": "95th percentile, by nearest rank",
            "maximum REAL NOT NULL": "the largest",
        },
    ),
    TableDef(
        "utilization_count",
        "How many samples of a device have each utilization; use it for percentiles over several devices.",
        {
            **_TASK_ID,
            **_DEVICE_ID,
            "utilization_percent INTEGER NOT NULL": "as in `sample`",
            "samples INTEGER NOT NULL": "how many",
        },
    ),
    TableDef(
        "throttle_count",
        "How many samples of a device have each reason for a lowered clock; a sample may have several.",
        {
            **_TASK_ID,
            **_DEVICE_ID,
            "reason TEXT NOT NULL": "NVML's name of the bit in throttle_reasons; gpu_idle is not a slowdown",
            "samples INTEGER NOT NULL": "how many",
        },
    ),
    TableDef(
        "device_time",
        "The time of a device by state; the states of one device add up to the time of its task.",
        {
            **_TASK_ID,
            **_DEVICE_ID,
            "state TEXT NOT NULL": "working, failed, lost, start_up, waiting or idle; see guide report",
            "total_s REAL NOT NULL": "seconds in this state",
            "measured_s REAL NOT NULL": "the part of total_s in which its power is known",
            "busy_s REAL": "the part of total_s in which the device worked; NULL: not measured",
            "energy_j REAL": "power integrated over it; NULL: not measured",
        },
    ),
    TableDef(
        "attempt_cost",
        "The cost of one try of one chunk; tries at the same time on one device share it equally.",
        {
            **_TASK_ID,
            "attempt_id INTEGER NOT NULL": "attempt.attempt_id",
            "state TEXT NOT NULL": "working (done, or in progress), failed or lost, as in device_time",
            "gpu_s REAL NOT NULL": "its share of the device's time",
            "busy_s REAL": "its share of the time in which the device worked; NULL: not measured",
            "energy_j REAL": "its share of the energy; NULL: not measured",
        },
        key="task_id, attempt_id",
    ),
    TableDef(
        "device_work",
        "What was done on one device, and how it was used; computed at publication.",
        {
            "device_id INTEGER PRIMARY KEY REFERENCES device (device_id)": "device.device_id",
            **_TASK_ID,
            "workers INTEGER NOT NULL": "engine processes, or slots for them; a restarted one counts again",
            "done INTEGER NOT NULL": "tries that succeeded",
            "failed INTEGER NOT NULL": "tries that failed",
            "lost INTEGER NOT NULL": "tries that were lost with their worker, or interrupted",
            "audio_s REAL NOT NULL": "length of the chunks that are done, with overlaps",
            "chunk_p50_s REAL": "duration of the tries that succeeded: the median, by nearest rank",
            "chunk_p95_s REAL": "the 95th percentile",
            "chunk_max_s REAL": "the longest",
            "last_end_ms INTEGER": "end of the last try that has ended",
            "gave_up TEXT": "the error class with which its workers ended before all work was done; NULL: they did not",
            "under_way INTEGER NOT NULL": "tries in progress, counted as working",
            "under_way_s REAL NOT NULL": "their time, split between tries at the same time",
            "spark TEXT NOT NULL": "JSON: mean utilization in 20 parts of the task's time, in percent; null: no sample",
            "last_reading TEXT NOT NULL": "JSON: the last value of each metric, if it is not older than 25 s",
        },
    ),
    TableDef(
        "device_stretch",
        "The samples of a device in at most 120 stretches of equal length, with its states in each.",
        {
            **_TASK_ID,
            **_DEVICE_ID,
            "from_ms INTEGER NOT NULL": "when it starts",
            "to_ms INTEGER NOT NULL": "when it ends",
            "state TEXT NOT NULL": "the longest state in it; see device_time",
            "samples INTEGER NOT NULL": "number of samples in it; 0: the columns that follow are NULL",
            **STRETCH_FIGURES,
            **{f"{state}_s REAL NOT NULL": f"seconds of it in the state {state}" for state in STATES},
        },
    ),
    TableDef(
        "task_total",
        "What a task's own processes and its machine used; computed at publication.",
        {
            "task_id INTEGER PRIMARY KEY REFERENCES task (task_id)": "task.task_id",
            "usage_samples INTEGER NOT NULL": "number of rows of `usage_sample`",
            "cpu_mean_cores REAL": "mean of cpu_cores while chunks were processed",
            "memory_peak_bytes INTEGER": "peak memory of its processes",
            "read_mean_bytes_per_s REAL": "mean of read_bytes_per_s while chunks were processed",
            "host_cpu_mean_percent REAL": "mean of host_sample.cpu_percent while chunks were processed",
            "host_memory_peak_bytes INTEGER": "peak memory in use on the machine",
        },
    ),
)

DERIVED = tuple(table.name for table in _DERIVED)
TABLES = {table.name: table for table in (*_OWN, *_DERIVED)}

# When a task ``t`` ended or, without an end (killed, or still running), the latest time in its data.
LAST_SIGN = """coalesce(t.ended_at_ms, max(
        t.started_at_ms,
        coalesce((SELECT max(to_ms) FROM gap g WHERE g.task_id = t.task_id), 0),
        coalesce((SELECT max(at_ms) FROM host_sample h WHERE h.task_id = t.task_id), 0),
        coalesce((SELECT max(coalesce(ended_at_ms, started_at_ms)) FROM attempt a WHERE a.task_id = t.task_id), 0)))"""


def columns_of(name: str) -> tuple[str, ...]:
    """Return the column names of one table of a task database, in order."""
    return tuple(TABLES[name].meanings)


def insert_sql(name: str, columns: Collection[str] = ()) -> str:
    """Return the statement that inserts a row into one table of a task database; without columns: a complete row."""
    names = columns or columns_of(name)
    return f"INSERT INTO {name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


def ddl_script(creations: Iterable[str]) -> str:
    """Return the SQL that creates tables in one transaction, and marks the file as ours."""
    marks = [
        f"PRAGMA application_id = {APPLICATION_ID};",
        f"PRAGMA user_version = {SCHEMA_VERSION};",
    ]
    return "\n".join(["BEGIN;", *creations, *marks, "COMMIT;"])
