"""The views of the job database, as data: the common questions, answered in SQL that anyone can read."""

from __future__ import annotations

from dataclasses import dataclass

from badcjobs.store.recording_clock import JOINED
from badcjobs.store.schema import TABLE_BY_NAME, Column


@dataclass(frozen=True, slots=True)
class View:
    """One view and what a row of it is; each column's SQL is an expression over ``source``."""

    name: str
    help: str
    columns: tuple[Column, ...]
    source: str
    before: str = ""  # what SQL calls common table expressions: steps on the way, each with a name

    def ddl(self) -> str:
        """Return the CREATE VIEW statement."""
        lines = [f"    {column.sql} AS {column.name}" for column in self.columns]
        tail = f"\n{self.source}" if self.source else ""
        return f"CREATE VIEW {self.name} AS\n{self.before}SELECT\n" + ",\n".join(lines) + tail


def _from(table: str, alias: str, *names: str) -> tuple[Column, ...]:
    """Return columns taken over from a table, with their meaning there."""
    known = {column.name: column for column in TABLE_BY_NAME[table].columns}
    return tuple(Column(name, f"{alias}.{name}", known[name].help) for name in names)


def _chunks(which: str) -> str:
    return f"(SELECT count(*) FROM chunk c WHERE c.task_id = t.task_id AND c.status {which})"


def _of_job(what: str, which: str) -> str:
    return f"(SELECT {what} FROM chunk WHERE status {which})"


def _metric(alias: str, metric: str) -> str:
    return f"""LEFT JOIN metric_summary {alias}
    ON {alias}.task_id = d.task_id AND {alias}.device_id = d.device_id AND {alias}.metric = '{metric}'"""


# When a task ended, or (killed, or still running) the last moment anything was heard of it.
_LAST_SIGN = """coalesce(t.ended_at_ms, max(
        t.started_at_ms,
        coalesce((SELECT max(to_ms) FROM gap g WHERE g.task_id = t.task_id), 0),
        coalesce((SELECT max(at_ms) FROM host_sample h WHERE h.task_id = t.task_id), 0),
        coalesce((SELECT max(ended_at_ms) FROM attempt a WHERE a.task_id = t.task_id), 0)))"""
_GAPS = """(SELECT sum(g.to_ms - g.from_ms) / 1000.0 FROM gap g
      WHERE g.task_id = d.task_id AND g.metric IS NULL AND (g.device_id = d.device_id OR g.device_id IS NULL))"""

VIEWS = (
    View(
        "task_summary",
        "One row per array task attempt: how long it lived and what became of its chunks.",
        (
            *_from("task", "t", "task_id", "name", "job_id", "array_index", "restart", "node", "shard_count"),
            *_from("task", "t", "verdict", "exit_code", "telemetry", "devices", "started_at_ms"),
            Column("last_sign_ms", _LAST_SIGN, "when it ended; of a killed or running one, when it was last heard of"),
            Column("wall_s", f"({_LAST_SIGN} - t.started_at_ms) / 1000.0", "from its start to its last sign"),
            Column("done", _chunks("= 'done'"), "chunks whose final state, done, is this task's"),
            Column("failed", _chunks("IN ('failed', 'poison')"), "likewise, failed or poison"),
            Column("pending", _chunks("= 'pending'"), "likewise, not begun or not finished"),
            Column(
                "audio_s",
                "(SELECT sum(c.audio_s) FROM chunk c WHERE c.task_id = t.task_id AND c.status = 'done')",
                "length of the chunks that are done",
            ),
            *_from("task", "t", "slurm_state", "slurm_exit_code"),
        ),
        "FROM task t",
    ),
    View(
        "device_summary",
        "One row per device of a task attempt: what was measured on it.",
        (
            *_from("device", "d", "device_id", "task_id", "uuid", "device_index", "name", "memory_total_bytes"),
            *_from("device", "d", "backend"),
            Column("samples", "t.samples", "how many readings there are"),
            Column("utilization_mean_percent", "u.mean", "mean of utilization_percent over them"),
            Column("utilization_p50_percent", "u.p50", "its median, by nearest rank"),
            Column("utilization_p95_percent", "u.p95", "its 95th percentile, by nearest rank"),
            Column("utilization_max_percent", "u.maximum", "its maximum"),
            Column("busy_mean_percent", "b.mean", "mean of busy_percent: the best figure there is; see metric_source"),
            Column("memory_peak_bytes", "CAST(m.maximum AS INTEGER)", "most memory in use in any reading, by anybody"),
            Column("temperature_max_c", "CAST(c.maximum AS INTEGER)", "highest temperature"),
            Column("power_mean_w", "p.mean", "mean power draw"),
            Column("energy_j", "t.energy_counter_j", "what the energy counter counted"),
            Column("energy_span_s", "t.energy_counter_span_s", "from its first to its last reading"),
            Column("energy_integrated_j", "t.energy_integrated_j", "power integrated over the readings"),
            Column("span_s", "(t.last_at_ms - t.first_at_ms) / 1000.0", "from the first reading to the last"),
            Column("gap_s", _GAPS, "time without any reading, from `gap`"),
        ),
        "\n".join(
            [
                "FROM device d",
                "JOIN device_total t USING (device_id)",
                _metric("u", "utilization_percent"),
                _metric("b", "busy_percent"),
                _metric("m", "memory_used_bytes"),
                _metric("c", "temperature_c"),
                _metric("p", "power_w"),
            ]
        ),
    ),
    View(
        "chunk_summary",
        "How many chunks are in each state, and why.",
        (
            *_from("chunk", "c", "status", "error_class"),
            Column("chunks", "count(*)", "how many"),
            Column("audio_s", "sum(c.audio_s)", "their length together"),
            Column("detections", "sum(c.detections)", "what was heard in them"),
        ),
        "FROM chunk c GROUP BY c.status, c.error_class",
    ),
    View(
        "recording_detection",
        "What was heard in each recording, on its own clock; what chunks that overlap both heard is there once.",
        (
            *_from("recording", "r", "study_area", "location", "recorded_at"),
            Column("recording_id", "j.recording_id", "the recording, as the source names it"),
            Column("chunk_id", "j.chunk_id", "the chunk that heard it, or its begin"),
            Column("task_id", "j.task_id", "the task that analysed that chunk: task.task_id"),
            Column("start_ms", "j.start_ms", "from the recording's start"),
            Column("end_ms", "j.end_ms", "from the recording's start"),
            *_from("detection", "j", "label", "label_name", "score"),
        ),
        "FROM joined j LEFT JOIN recording r ON r.task_id = j.task_id AND r.recording_id = j.recording_id",
        before=JOINED,
    ),
    View(
        "job_summary",
        "The whole job in one row.",
        (
            Column("tasks", "(SELECT count(*) FROM task)", "array task attempts"),
            Column("chunks", "(SELECT count(*) FROM chunk)", "chunks that any task knew of"),
            Column("done", _of_job("count(*)", "= 'done'"), "chunks done"),
            Column("failed", _of_job("count(*)", "IN ('failed', 'poison')"), "chunks failed or poison"),
            Column("pending", _of_job("count(*)", "= 'pending'"), "chunks not begun or not finished"),
            Column("skipped", _of_job("count(*)", "= 'skipped'"), "chunks that were left out"),
            Column("audio_hours", _of_job("sum(audio_s)", "= 'done'") + " / 3600.0", "length of the chunks done"),
            Column(
                "gpu_hours",
                "(SELECT sum(wall_s * devices) FROM task_summary) / 3600.0",
                "for each task, its wall time × the devices it was granted",
            ),
            Column("detections", "(SELECT count(*) FROM detection)", "what was heard"),
        ),
        "",
    ),
)
