-- What a rank's training script set for the job, as JSON; NULL: nothing.
ALTER TABLE ranks ADD COLUMN policy TEXT;

-- Releases before this one wrote this where an operator had taken a policy back.
UPDATE jobs SET policy = NULL WHERE policy = '{"kinds":null}';
