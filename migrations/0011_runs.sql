-- A job's name may be used again: the run that has it now, how it ended, and what the runs before it had used up of
-- the numbers that only grow within a job.
ALTER TABLE jobs ADD COLUMN run TEXT;
ALTER TABLE jobs ADD COLUMN ended_how TEXT;
ALTER TABLE jobs ADD COLUMN first_version INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN first_trial INTEGER NOT NULL DEFAULT 0;
-- Whether the rank's connection ended without a goodbye.
ALTER TABLE ranks ADD COLUMN lost INTEGER NOT NULL DEFAULT 0;

-- Runs that another one has followed under the same name, in the order of their ids: times may be corrected.
CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    job TEXT NOT NULL,
    began_us INTEGER NOT NULL,
    run TEXT,
    world INTEGER NOT NULL,
    ended_us INTEGER NOT NULL,
    ended_how TEXT NOT NULL,
    step INTEGER,
    version INTEGER NOT NULL,
    loss REAL,
    accuracy REAL
) STRICT;
CREATE INDEX runs_by_job ON runs (job, id);
