-- The snapshot that each decision was made on, as JSON: with the report's time and seed it is decided again. Forgotten with
-- its decision, and before it where a job's snapshots are larger than the limit.
CREATE TABLE decision_snapshots (
    job TEXT NOT NULL,
    version INTEGER NOT NULL,
    software TEXT NOT NULL,
    snapshot TEXT NOT NULL,
    seal INTEGER,
    PRIMARY KEY (job, version)
) STRICT;
