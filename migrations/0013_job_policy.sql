-- What an operator allows a job, as JSON; NULL: everything. It belongs to the name: later runs under it keep it.
ALTER TABLE jobs ADD COLUMN policy TEXT;
