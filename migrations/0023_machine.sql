-- The kind of machine that a job's trainers run on: what compressing takes on one tells nothing of another.
ALTER TABLE jobs ADD COLUMN machine TEXT;
