-- Of each direction and end also the newest test that was over so soon that a shaper's token bucket may have let all of it pass: it replaces no
-- other.
ALTER TABLE link_tests RENAME TO old_link_tests;
CREATE TABLE link_tests (
    src TEXT NOT NULL,
    dst TEXT NOT NULL,
    -- Which end made it.
    reporter TEXT NOT NULL,
    -- Whether the link may be faster.
    is_lower_bound INTEGER NOT NULL,
    -- Whether it may be slower.
    is_short INTEGER NOT NULL,
    bandwidth_bps REAL NOT NULL,
    -- Newer than every test of the direction before it, whatever the clock says.
    received_us INTEGER NOT NULL,
    -- The estimated latency at that time.
    latency_us REAL,
    PRIMARY KEY (src, dst, reporter, is_lower_bound, is_short)
) STRICT, WITHOUT ROWID;
INSERT INTO link_tests SELECT src, dst, reporter, is_lower_bound, 0, bandwidth_bps, received_us, latency_us FROM old_link_tests;
DROP TABLE old_link_tests;
