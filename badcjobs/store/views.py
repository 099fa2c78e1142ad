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
    t.samples,
    u.mean AS utilization_mean_percent,
    u.p50 AS utilization_p50_percent,
    u.p95 AS utilization_p95_percent,
    u.maximum AS utilization_max_percent,
    CAST(m.maximum AS INTEGER) AS memory_peak_bytes,
    CAST(c.maximum AS INTEGER) AS temperature_max_c,
    p.mean AS power_mean_w,
    t.energy_counter_j AS energy_j,
    t.energy_counter_span_s AS energy_span_s,
    t.energy_integrated_j,
    (t.last_at_ms - t.first_at_ms) / 1000.0 AS span_s,
    (SELECT sum(g.to_ms - g.from_ms) / 1000.0 FROM gap g
      WHERE g.task_id = d.task_id AND g.metric IS NULL AND (g.device_id = d.device_id OR g.device_id IS NULL)) AS gap_s
FROM device d
JOIN device_total t USING (device_id)
LEFT JOIN metric_summary u
    ON u.task_id = d.task_id AND u.device_id = d.device_id AND u.metric = 'utilization_percent'
LEFT JOIN metric_summary m
    ON m.task_id = d.task_id AND m.device_id = d.device_id AND m.metric = 'memory_used_bytes'
LEFT JOIN metric_summary c
    ON c.task_id = d.task_id AND c.device_id = d.device_id AND c.metric = 'temperature_c'
LEFT JOIN metric_summary p
    ON p.task_id = d.task_id AND p.device_id = d.device_id AND p.metric = 'power_w'""",
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
