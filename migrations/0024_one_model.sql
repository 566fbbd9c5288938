-- What is believed of collectives is part of the planner's memory: no coefficients are fitted besides.
DROP TABLE coefficients;
DROP INDEX intervals_to_fit;
ALTER TABLE intervals DROP COLUMN settled;
ALTER TABLE intervals DROP COLUMN fitted;
ALTER TABLE intervals DROP COLUMN alpha_s;
ALTER TABLE intervals DROP COLUMN beta_s;
ALTER TABLE intervals DROP COLUMN model_sync_us;
ALTER TABLE open_intervals DROP COLUMN alpha_s;
ALTER TABLE open_intervals DROP COLUMN beta_s;
ALTER TABLE open_intervals DROP COLUMN model_sync_us;
ALTER TABLE open_intervals DROP COLUMN moved_us;
