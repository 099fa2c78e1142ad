"""What was heard on the recording's own clock, each sound once: SQL for a view of the job database.

Neighbouring chunks may share a stretch of their recording, and then both have what lies in it. The rule is that of
workers/joints.py, where long audio is cut into pieces (a test compares the two): the joint of two neighbours is the
middle of what they share; what lies wholly beyond it is the neighbour's to tell; what reaches across it and was heard
in both is one sound, that begins as the first has it, ends as the second has it, and has the higher score.

Few detections reach across a joint. Only those are kept aside and compared; all the others go straight through.
"""

from __future__ import annotations

_COLUMNS = "task_id, recording_id, chunk_id, start_ms, end_ms, label, label_name, score"

# A joint is there for two chunks that follow each other and share something; not where one lies within the other.
_MEET_BEFORE = """lag(start_ms) OVER around < start_ms AND lag(end_ms) OVER around < end_ms
                    AND lag(end_ms) OVER around > start_ms"""
_MEET_AFTER = """lead(start_ms) OVER around > start_ms AND lead(end_ms) OVER around > end_ms
                    AND lead(start_ms) OVER around < end_ms"""

JOINED = f"""WITH RECURSIVE
    -- Every chunk that is done, and the joints with the chunks before and after it (NULL: they share nothing).
    placed AS MATERIALIZED (
        SELECT task_id, recording_id, chunk_id, start_ms,
            CASE WHEN {_MEET_BEFORE}
                THEN (lag(end_ms) OVER around + start_ms) / 2 END AS joint_before_ms,
            CASE WHEN {_MEET_AFTER}
                THEN (end_ms + lead(start_ms) OVER around) / 2 END AS joint_after_ms
        FROM (SELECT task_id, recording_id, chunk_id, start_ms,
                  coalesce(end_ms, start_ms + CAST(audio_s * 1000 AS INTEGER)) AS end_ms
              FROM chunk WHERE status = 'done')
        WINDOW around AS (PARTITION BY recording_id ORDER BY start_ms, end_ms, chunk_id)
    ),
    -- What was heard, on the recording's clock; what lies beyond a joint is left to the neighbour.
    heard AS NOT MATERIALIZED (
        SELECT d.rowid AS heard_id, p.task_id, d.recording_id, d.chunk_id, p.start_ms + d.start_ms AS start_ms,
            p.start_ms + d.end_ms AS end_ms, d.label, d.label_name, d.score,
            CASE WHEN p.start_ms + d.start_ms < p.joint_before_ms THEN p.joint_before_ms END AS across_before_ms,
            CASE WHEN p.start_ms + d.end_ms > p.joint_after_ms THEN p.joint_after_ms END AS across_after_ms
        FROM placed p JOIN detection d ON d.recording_id = p.recording_id AND d.chunk_id = p.chunk_id
        WHERE (p.joint_before_ms IS NULL OR p.start_ms + d.end_ms > p.joint_before_ms)
          AND (p.joint_after_ms IS NULL OR p.start_ms + d.start_ms < p.joint_after_ms
               OR p.start_ms + d.end_ms <= p.joint_after_ms)
    ),
    -- The few that reach across a joint.
    across AS MATERIALIZED (
        SELECT * FROM heard WHERE across_before_ms IS NOT NULL OR across_after_ms IS NOT NULL
    ),
    -- Those of the later chunk choose their twins in the earlier one in turn.
    late AS MATERIALIZED (
        SELECT *, row_number() OVER (
            PARTITION BY recording_id, across_before_ms, label ORDER BY start_ms, end_ms, heard_id) AS turn
        FROM across WHERE across_before_ms IS NOT NULL
    ),
    choice (recording_id, joint_ms, label, turn, late_id, end_ms, label_name, score, early_id, taken) AS (
        SELECT recording_id, across_before_ms, label, 0, NULL, NULL, NULL, NULL, NULL, ',' FROM late WHERE turn = 1
        UNION ALL
        SELECT c.recording_id, c.joint_ms, c.label, l.turn, l.heard_id, l.end_ms, l.label_name, l.score,
            (SELECT heard_id FROM (
                SELECT e.heard_id, e.start_ms, e.end_ms,
                    abs(e.start_ms - l.start_ms) + abs(e.end_ms - l.end_ms) AS apart_ms
                FROM across e
                WHERE e.recording_id = l.recording_id AND e.across_after_ms = l.across_before_ms
                  AND e.label = l.label
                  AND instr(c.taken || coalesce(c.early_id || ',', ''), ',' || e.heard_id || ',') = 0)
             ORDER BY apart_ms, start_ms, end_ms, heard_id LIMIT 1),
            c.taken || coalesce(c.early_id || ',', '')
        FROM choice c JOIN late l ON l.recording_id = c.recording_id AND l.across_before_ms = c.joint_ms
            AND l.label = c.label AND l.turn = c.turn + 1
    ),
    twins AS MATERIALIZED (
        SELECT CAST(early_id AS INTEGER) AS early_id, CAST(late_id AS INTEGER) AS late_id, end_ms, label_name, score
        FROM choice WHERE early_id IS NOT NULL
    ),
    -- A sound may go on through several chunks: from twin to twin, as far as it goes.
    grown (last_id, {_COLUMNS}) AS (
        SELECT heard_id, {_COLUMNS} FROM across WHERE heard_id NOT IN (SELECT late_id FROM twins)
        UNION ALL
        SELECT t.late_id, g.task_id, g.recording_id, g.chunk_id, g.start_ms, t.end_ms, g.label,
            CASE WHEN coalesce(t.score > g.score, t.score IS NOT NULL) THEN t.label_name ELSE g.label_name END,
            CASE WHEN coalesce(t.score > g.score, t.score IS NOT NULL) THEN t.score ELSE g.score END
        FROM grown g JOIN twins t ON t.early_id = g.last_id
    ),
    joined AS NOT MATERIALIZED (
        SELECT {_COLUMNS} FROM heard WHERE across_before_ms IS NULL AND across_after_ms IS NULL
        UNION ALL
        SELECT {_COLUMNS} FROM grown WHERE last_id NOT IN (SELECT early_id FROM twins)
    )
"""
