-- 64 bits of BLAKE3 over the row's other columns, checked whenever the row is read; null in rows of older versions, which
-- are read unchecked. applied_at_step of a decision is filled in later and is part of its seal then.
ALTER TABLE decisions ADD COLUMN seal INTEGER;
ALTER TABLE decision_reports ADD COLUMN seal INTEGER;
ALTER TABLE trials ADD COLUMN seal INTEGER;
ALTER TABLE trial_reports ADD COLUMN seal INTEGER;
ALTER TABLE coefficients ADD COLUMN seal INTEGER;
ALTER TABLE planner_memory ADD COLUMN seal INTEGER;
