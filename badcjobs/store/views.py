"""The views of the job database: the common questions, answered in SQL that anyone can read."""

from __future__ import annotations

# When a task ended, or (killed, or still running) the last moment anything was heard of it.
_LAST_SIGN = """
    coalesce(t.ended_at_ms, max(
        t.started_at_ms,
        coalesce((SELECT max(to_ms) FROM gap g WHERE g.task_id = t.task_id), 0),
        coalesce((SELECT max(at_ms) FROM host_sample h WHERE h.task_id = t.task_id), 0),
        coalesce((SELECT max(ended_at_ms) FROM attempt a WHERE a.task_id = t.task_id), 0)))"""

VIEWS = {
    "task_summary": f"""
CREATE VIEW task_summary AS
SELECT
    t.task_id, t.name, t.job_id, t.array_index, t.restart, t.node, t.shard_count, t.verdict, t.exit_code,
    t.telemetry, t.devices,
    t.started_at_ms,
    {_LAST_SIGN} AS last_sign_ms,
    ({_LAST_SIGN} - t.started_at_ms) / 1000.0 AS wall_s,
    (SELECT count(*) FROM chunk c WHERE c.task_id = t.task_id AND c.status = 'done') AS done,
    (SELECT count(*) FROM chunk c WHERE c.task_id = t.task_id AND c.status IN ('failed', 'poison')) AS failed,
    (SELECT count(*) FROM chunk c WHERE c.task_id = t.task_id AND c.status = 'pending') AS pending,
    (SELECT sum(c.audio_s) FROM chunk c WHERE c.task_id = t.task_id AND c.status = 'done') AS audio_s
FROM task t""",
    "device_summary": """
CREATE VIEW device_summary AS
SELECT
    d.device_id, d.task_id, d.uuid, d.device_index, d.name, d.memory_total_bytes, d.backend,
    count(s.at_ms) AS samples,
    avg(s.utilization_percent) AS utilization_mean_percent,
    max(s.utilization_percent) AS utilization_max_percent,
    max(s.memory_used_bytes) AS memory_peak_bytes,
    max(s.temperature_c) AS temperature_max_c,
    avg(s.power_w) AS power_mean_w,
    max(s.energy_j) - min(s.energy_j) AS energy_j,
    (max(s.at_ms) FILTER (WHERE s.energy_j IS NOT NULL) - min(s.at_ms) FILTER (WHERE s.energy_j IS NOT NULL)) / 1000.0
        AS energy_span_s,
    (max(s.at_ms) - min(s.at_ms)) / 1000.0 AS span_s,
    (SELECT sum(g.to_ms - g.from_ms) / 1000.0 FROM gap g
      WHERE g.task_id = d.task_id AND g.metric IS NULL AND (g.device_id = d.device_id OR g.device_id IS NULL)) AS gap_s
FROM device d LEFT JOIN sample s ON s.task_id = d.task_id AND s.device_id = d.device_id
GROUP BY d.device_id""",
    "chunk_summary": """
CREATE VIEW chunk_summary AS
SELECT status, error_class, count(*) AS chunks, sum(audio_s) AS audio_s, sum(detections) AS detections
FROM chunk GROUP BY status, error_class""",
    "job_summary": """
CREATE VIEW job_summary AS
SELECT
    (SELECT count(*) FROM task) AS tasks,
    (SELECT count(*) FROM chunk) AS chunks,
    (SELECT count(*) FROM chunk WHERE status = 'done') AS done,
    (SELECT count(*) FROM chunk WHERE status IN ('failed', 'poison')) AS failed,
    (SELECT count(*) FROM chunk WHERE status = 'pending') AS pending,
    (SELECT count(*) FROM chunk WHERE status = 'skipped') AS skipped,
    (SELECT sum(audio_s) FROM chunk WHERE status = 'done') / 3600.0 AS audio_hours,
    (SELECT sum(wall_s * devices) FROM task_summary) / 3600.0 AS gpu_hours,
    (SELECT count(*) FROM detection) AS detections""",
}
