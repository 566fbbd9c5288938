-- The test before the newest one: two that agree outweigh an estimate that its agent has not corrected yet.
ALTER TABLE link_tests ADD COLUMN previous_bps REAL;
