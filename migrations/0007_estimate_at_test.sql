-- The estimated bandwidth when the newest test arrived: only an estimate that was far lower already is outweighed by faster tests.
ALTER TABLE link_tests ADD COLUMN estimate_bps REAL;
