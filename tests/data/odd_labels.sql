-- Detections of an own detector, and what readers of labels may not take.
DELETE FROM detection;
UPDATE recording SET sample_rate_hz = 16000 WHERE recording_id = 'ra';
INSERT INTO detection (task_id, recording_id, chunk_id, start_ms, end_ms, label, label_name, score)
SELECT task_id, 'ra', 'a', column1, column2, column3, column4, column5 FROM task, (VALUES
    (100, 2600, 'AMRO', 'American Robin', 0.87654),
    (100, 2600, 'AMRO', NULL, NULL),            -- no score
    (1001, 1004, 'SORA', NULL, 0.5),            -- too short for two decimals
    (5, 5, 'SORA', NULL, 0.5),                  -- empty
    (-5, 5, 'SORA', NULL, 0.5),                 -- begins before the recording
    (0, 10, 'SORA', NULL, 1.0004),              -- 1.000
    (0, 10, 'LOUD', 'Loud sound', 3.5),         -- a score above 1
    (0, 10, 'SORA', NULL, 9e999),               -- endless
    (0, 10, 'SORA', NULL, -0.4),                -- a negative score
    (0, 10, 'a' || char(9) || 'b' || char(10) || 'c', NULL, 0.25),  -- white space
    (7, 77, 'Strix varia', 'Owl', 0.5),         -- a scientific name, of the taxonomy
    (7, 77, 'sora', NULL, 0.5),                 -- HawkEars takes any case
    (8, 88, '"Sora" bird', NULL, 0.5),          -- quotes
    (8, 88, 'Noise', 'Noise', 0.5));            -- a class that HawkEars' program hides
INSERT INTO rarity SELECT task_id, 'rb', 'b', 1000, 2000, 'SORA', 'Sora', 0.7 FROM task;
