-- What the cost model alone said of the collective, before the strategy's own newest intervals corrected it.
ALTER TABLE intervals ADD COLUMN model_sync_us REAL;
ALTER TABLE open_intervals ADD COLUMN model_sync_us REAL;
