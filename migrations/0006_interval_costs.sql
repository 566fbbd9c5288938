-- What a run of steps cost and sent besides its collective; null in rows of older versions.
ALTER TABLE intervals ADD COLUMN comp_us REAL;
ALTER TABLE intervals ADD COLUMN bytes_sent REAL;
ALTER TABLE intervals ADD COLUMN gain REAL;
