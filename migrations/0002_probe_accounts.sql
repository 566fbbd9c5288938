-- What each node may still spend on throughput tests, in seconds' worth of the share of its capacity. A debt must
-- outlive the controller, and the node's silence.
CREATE TABLE probe_accounts (node TEXT PRIMARY KEY, level_s REAL NOT NULL, stored_us INTEGER NOT NULL) STRICT;
