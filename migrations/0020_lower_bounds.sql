-- Whether the link may be faster than the newest test of it, which windows bounded or which was over within a few round trips.
ALTER TABLE link_tests ADD COLUMN is_lower_bound INTEGER NOT NULL DEFAULT 0;
