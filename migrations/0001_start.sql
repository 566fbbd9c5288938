-- Times are microseconds since the Unix epoch by the controller's clock, unless a column says otherwise.
-- Unsigned 64-bit numbers are stored as the signed number of the same bits.

-- Counters that must survive a restart: orders_epoch, scenario_id.
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;

CREATE TABLE nodes (
    node TEXT PRIMARY KEY,
    instance INTEGER NOT NULL,
    addr TEXT NOT NULL,
    echo_port INTEGER NOT NULL,
    throughput_port INTEGER NOT NULL,
    may_shape INTEGER NOT NULL,
    software TEXT NOT NULL,
    registered_us INTEGER NOT NULL,
    -- Reports up to and including this one are stored or set aside.
    acked_seq INTEGER NOT NULL DEFAULT 0
) STRICT;

-- The newest estimate of each directed link.
CREATE TABLE links (
    src TEXT NOT NULL,
    dst TEXT NOT NULL,
    latency_us REAL NOT NULL,
    latency_confidence REAL NOT NULL,
    latency_age_ms REAL NOT NULL,
    bandwidth_bps REAL,
    bandwidth_confidence REAL NOT NULL,
    bandwidth_age_ms REAL NOT NULL,
    jitter_us REAL NOT NULL,
    loss_out REAL NOT NULL,
    loss_back REAL NOT NULL,
    received_us INTEGER NOT NULL,
    PRIMARY KEY (src, dst)
) STRICT, WITHOUT ROWID;

CREATE TABLE link_history (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    src TEXT NOT NULL,
    dst TEXT NOT NULL,
    received_us INTEGER NOT NULL,
    latency_us REAL NOT NULL,
    bandwidth_bps REAL
) STRICT;
CREATE INDEX link_history_by_link ON link_history (src, dst, id);

-- The newest active test of each direction; one grant fills two rows.
CREATE TABLE link_tests (
    src TEXT NOT NULL,
    dst TEXT NOT NULL,
    bandwidth_bps REAL NOT NULL,
    received_us INTEGER NOT NULL,
    -- The estimated latency at that time.
    latency_us REAL,
    PRIMARY KEY (src, dst)
) STRICT, WITHOUT ROWID;

CREATE TABLE paths (
    src TEXT NOT NULL,
    dst TEXT NOT NULL,
    hops TEXT NOT NULL,
    received_us INTEGER NOT NULL,
    PRIMARY KEY (src, dst)
) STRICT, WITHOUT ROWID;

CREATE TABLE jobs (
    job TEXT PRIMARY KEY,
    world INTEGER NOT NULL,
    gradient_values INTEGER NOT NULL,
    backend TEXT NOT NULL,
    created_us INTEGER NOT NULL,
    -- When its last rank left; null while it runs.
    ended_us INTEGER,
    loss REAL,
    accuracy REAL
) STRICT;

CREATE TABLE ranks (
    job TEXT NOT NULL,
    rank INTEGER NOT NULL,
    node TEXT NOT NULL,
    codecs TEXT NOT NULL,
    collectives TEXT NOT NULL,
    seen_us INTEGER NOT NULL,
    left_us INTEGER,
    PRIMARY KEY (job, rank)
) STRICT, WITHOUT ROWID;

-- A window of the newest steps.
CREATE TABLE steps (
    job TEXT NOT NULL,
    step INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    version INTEGER NOT NULL,
    strategy TEXT NOT NULL,
    received_us INTEGER NOT NULL,
    compute_us REAL NOT NULL,
    comp_us REAL NOT NULL,
    sync_us REAL NOT NULL,
    wait_us REAL,
    step_us REAL NOT NULL,
    bytes_sent INTEGER NOT NULL,
    gain REAL NOT NULL,
    PRIMARY KEY (job, step, rank)
) STRICT, WITHOUT ROWID;

-- Loss and accuracy over a job's steps.
CREATE TABLE progress (
    job TEXT NOT NULL,
    step INTEGER NOT NULL,
    received_us INTEGER NOT NULL,
    loss REAL,
    accuracy REAL,
    PRIMARY KEY (job, step)
) STRICT, WITHOUT ROWID;

-- Immutable once written; only applied_at_step is filled in later.
CREATE TABLE decisions (
    job TEXT NOT NULL,
    version INTEGER NOT NULL,
    parent INTEGER NOT NULL,
    strategy TEXT NOT NULL,
    digest INTEGER NOT NULL,
    decided_us INTEGER NOT NULL,
    reason TEXT NOT NULL,
    applied_at_step INTEGER,
    PRIMARY KEY (job, version)
) STRICT, WITHOUT ROWID;

CREATE TABLE decision_reports (
    job TEXT NOT NULL,
    version INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    report TEXT NOT NULL,
    PRIMARY KEY (job, version)
) STRICT, WITHOUT ROWID;

CREATE TABLE applied (
    job TEXT NOT NULL,
    version INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    step INTEGER NOT NULL,
    received_us INTEGER NOT NULL,
    PRIMARY KEY (job, version, rank)
) STRICT, WITHOUT ROWID;

CREATE TABLE trials (
    job TEXT NOT NULL,
    id INTEGER NOT NULL,
    asked_us INTEGER NOT NULL,
    why TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'done', 'aborted')),
    candidates TEXT NOT NULL,
    iterations INTEGER NOT NULL,
    budget_ms INTEGER NOT NULL,
    ended_us INTEGER,
    aborted TEXT,
    PRIMARY KEY (job, id)
) STRICT, WITHOUT ROWID;

CREATE TABLE trial_reports (
    job TEXT NOT NULL,
    id INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    outcomes TEXT NOT NULL,
    aborted TEXT,
    cost_us REAL NOT NULL,
    received_us INTEGER NOT NULL,
    PRIMARY KEY (job, id, rank)
) STRICT, WITHOUT ROWID;

-- Predicted and measured time of runs of steps under one decision.
CREATE TABLE intervals (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job TEXT NOT NULL,
    version INTEGER NOT NULL,
    strategy TEXT NOT NULL,
    from_step INTEGER NOT NULL,
    to_step INTEGER NOT NULL,
    at_us INTEGER NOT NULL,
    predicted_sync_us REAL,
    measured_sync_us REAL NOT NULL,
    predicted_step_us REAL,
    measured_step_us REAL NOT NULL,
    settled INTEGER NOT NULL,
    -- The model's terms, and whether the coefficients have been fitted to this interval.
    alpha_s REAL,
    beta_s REAL,
    fitted INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX intervals_by_job ON intervals (job, id);

-- The interval that is being measured: what was predicted when it began.
CREATE TABLE open_intervals (
    job TEXT PRIMARY KEY,
    version INTEGER NOT NULL,
    from_step INTEGER NOT NULL,
    began_us INTEGER NOT NULL,
    predicted_sync_us REAL,
    predicted_step_us REAL,
    alpha_s REAL,
    beta_s REAL,
    -- The last time that decision or links moved.
    moved_us INTEGER NOT NULL
) STRICT;

-- One row: the fitted coefficients of every (backend, collective).
CREATE TABLE coefficients (id INTEGER PRIMARY KEY CHECK (id = 1), book TEXT NOT NULL) STRICT;

CREATE TABLE planner_memory (job TEXT PRIMARY KEY, memory TEXT NOT NULL) STRICT;

-- One row: what the network should look like (lab only).
CREATE TABLE scenario (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    order_id INTEGER NOT NULL,
    wanted TEXT,
    set_us INTEGER NOT NULL
) STRICT;

CREATE TABLE shape_reports (
    node TEXT PRIMARY KEY,
    order_id INTEGER NOT NULL,
    error TEXT,
    received_us INTEGER NOT NULL
) STRICT;

-- Reports that were not stored, by reason.
CREATE TABLE set_aside (
    reason TEXT PRIMARY KEY,
    count INTEGER NOT NULL,
    last_detail TEXT NOT NULL,
    last_us INTEGER NOT NULL
) STRICT;
