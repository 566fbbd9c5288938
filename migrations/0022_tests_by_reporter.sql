-- Bandwidths are what throughput tests found: agents estimate latencies alone.
ALTER TABLE links DROP COLUMN bandwidth_bps;
ALTER TABLE links DROP COLUMN bandwidth_confidence;
ALTER TABLE links DROP COLUMN bandwidth_age_ms;
-- Of each direction the newest test by each end, and its newest that was a lower bound: where one end is wrong about its links, the other's
-- tests count.
ALTER TABLE link_tests RENAME TO old_link_tests;
CREATE TABLE link_tests (
    src TEXT NOT NULL,
    dst TEXT NOT NULL,
    -- Which end made it.
    reporter TEXT NOT NULL,
    -- Whether the link may be faster.
    is_lower_bound INTEGER NOT NULL,
    bandwidth_bps REAL NOT NULL,
    -- Newer than every test of the direction before it, whatever the clock says.
    received_us INTEGER NOT NULL,
    -- The estimated latency at that time.
    latency_us REAL,
    PRIMARY KEY (src, dst, reporter, is_lower_bound)
) STRICT, WITHOUT ROWID;
-- Which end made the tests from before is not known.
INSERT INTO link_tests SELECT src, dst, src, is_lower_bound, bandwidth_bps, received_us, latency_us FROM old_link_tests;
DROP TABLE old_link_tests;
