-- What a rank's training script set for the job, as JSON; NULL: nothing.
ALTER TABLE ranks ADD COLUMN policy TEXT;
