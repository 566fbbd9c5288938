-- By which the gains of the ranks are weighted; null from older trainers.
ALTER TABLE steps ADD COLUMN energy REAL;
