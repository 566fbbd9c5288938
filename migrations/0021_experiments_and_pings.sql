-- What experiments took since a job's run began: throughput tests between its nodes in one row, with id 0, and each trial in one of its own.
CREATE TABLE experiments (
    job TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('throughput-test', 'live-trial', 'shadow-trial')),
    id INTEGER NOT NULL,
    count INTEGER NOT NULL,
    seconds REAL NOT NULL,
    bytes INTEGER NOT NULL,
    cpu_s REAL NOT NULL,
    PRIMARY KEY (job, kind, id)
) STRICT, WITHOUT ROWID;
-- Whether latency and losses are those of ICMP, since the peer answers no UDP echo.
ALTER TABLE links ADD COLUMN by_icmp INTEGER NOT NULL DEFAULT 0;
