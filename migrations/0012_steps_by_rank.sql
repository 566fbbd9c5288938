-- Newest step and window of each rank by itself: what one rank claims must not move the window of the others.
CREATE INDEX steps_by_rank ON steps (job, rank, step);
