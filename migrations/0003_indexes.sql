-- What the coefficients were not fitted to yet: a handful of rows, looked for in every pass.
CREATE INDEX intervals_to_fit ON intervals (job, id) WHERE settled AND NOT fitted;
-- What was measured since the links moved.
CREATE INDEX intervals_by_time ON intervals (job, at_us);
-- Jobs that run, among a thousand that ended.
CREATE INDEX jobs_running ON jobs (created_us) WHERE ended_us IS NULL;
