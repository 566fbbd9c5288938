-- Momentum of the optimizer, as its trainers say it; NULL where they do not.
ALTER TABLE jobs ADD COLUMN momentum REAL;
