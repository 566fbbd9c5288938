//! Every limit of the controller, with its reason.

use std::time::Duration;

/// Most nodes: N² links are stored and drawn.
pub const MAX_NODES: usize = 512;

/// Most jobs that are kept; ended ones without a step go first, then the longest ended.
pub const MAX_JOBS: usize = 1024;

/// Largest body with reports: a full batch of full step reports is about 5 MB as JSON, twice that with the energies of hundreds
/// of buckets.
pub const MAX_BODY: usize = 16 << 20;

/// Largest report as JSON: an agent takes no longer line from a trainer.
pub const MAX_REPORT: usize = flexcomm_wire::MAX_LINE;

/// Largest body of any other request: a scenario that names every node is 40 kB. What bodies have up to here is not counted
/// against [`BODY_BUDGET`], so that heartbeats are heard while large bodies fill it.
pub const MAX_SMALL_BODY: usize = 64 << 10;

/// Bytes of bodies above [`MAX_SMALL_BODY`] that are held at once, in arrival or being read: four of the largest. An agent
/// that is told to come again loses nothing, its spool keeps the reports.
pub const BODY_BUDGET: usize = 4 * MAX_BODY;

/// Longest time a request may take, streams excepted: a client that waits longer has given up.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Longest time without a whole head of a request: from the connection or the last answer on. Longer than the usual 15 s
/// between two scrapes, so that a scraper keeps its connection.
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(20);

/// Largest head of a request, and what is buffered of a body: tokens and addresses are a few hundred bytes.
pub const HEADER_BYTES: usize = 64 << 10;

/// Longest time in which a client takes nothing of its answer. Streams are sent a ping more often, so that a dead agent's
/// ends by it.
pub const UNREAD_TIMEOUT: Duration = Duration::from_secs(20);

/// Descriptors that are asked for at most: what streams and requests of [`MAX_NODES`] agents need, many times over, and
/// at [`HEADER_BYTES`] each no more memory than a server has.
pub const DESCRIPTORS: u64 = 16_384;

/// Descriptors that are no connections: the database with its log, index and readers, the runtime, the log.
pub const OTHER_DESCRIPTORS: u64 = 128;

/// Most order streams at once: two per node leaves room for one that reconnects before its old one is seen
/// as dead.
pub const MAX_STREAMS: usize = 2 * MAX_NODES;

/// Comment ping on a stream: the agent notices a dead controller, proxies keep the connection.
pub const STREAM_PING: Duration = Duration::from_secs(5);

/// Steps kept per job: at 10 steps/s the newest three minutes; the planner looks at fewer than 100.
pub const STEP_WINDOW: u64 = 2048;

/// Points of loss and accuracy kept per job: one per report, so a day of one report every 20 s.
pub const PROGRESS: u64 = 5000;

/// Link estimates kept per directed link: at one every two seconds the last 34 minutes.
pub const LINK_HISTORY: u64 = 1024;

/// Intervals kept per job.
pub const INTERVALS: u64 = 5000;

/// Decisions kept per job: reports are about 20 kB each, so 40 MB at most.
pub const DECISIONS: u64 = 2000;

/// Bytes of snapshots kept per job, newest first: some 2,000 of 8 ranks at 16 kB each, some 100 of 64 ranks at 300 kB, two of
/// 512 ranks at 16 MB.
pub const SNAPSHOT_BYTES: u64 = 32 << 20;

/// Bytes of snapshots after which one answer of a list ends.
pub const SNAPSHOT_PAGE_BYTES: usize = 4 << 20;

/// Snapshots in one answer of a list: each comes with its report.
pub const SNAPSHOT_PAGE: u32 = 100;

/// Trials whose results make a job's profile: candidates of older ones have been tried again since.
pub const PROFILE_TRIALS: u32 = 8;

/// Trials kept per job.
pub const TRIALS: u64 = 500;

/// Entries that one answer of a list holds when the query does not say, and at most.
pub const PAGE_DEFAULT: u32 = 100;
/// See [`PAGE_DEFAULT`].
pub const PAGE_MOST: u32 = 5000;

/// Ended jobs in the list of jobs: the page reads it every second. Older ones are still found by name.
pub const LIST_ENDED: usize = 50;

/// A job whose agents have all been silent for this long has ended.
pub const LOST_AFTER_S: f64 = 3600.0;

/// ... and a job of which a rank has left, when the agents of those that have not have been silent for this long: no rank
/// trains without the others.
pub const LEFT_BEHIND_S: f64 = 60.0;

/// Runs kept of a job's name besides the newest: for people who ask how the last ones went.
pub const RUNS: u64 = 50;

/// Ranks that no agent has announced this long after their job's first are missing: all ranks of a job start together.
pub const ANNOUNCED_WITHIN_S: f64 = 60.0;

/// Least steps of an interval: fewer have no median.
pub const INTERVAL_STEPS: usize = 10;

/// ... and least time in microseconds, so that fast steps do not make more intervals than slow ones.
pub const INTERVAL_US: f64 = 1e6;

/// ... but never more steps than this: fewer than the loop looks back.
pub const INTERVAL_MOST_STEPS: usize = 100;

/// Steps that the measured medians span.
pub const MEASURED_STEPS: usize = 40;

/// Longest text that is stored (reasons, versions): more is cut.
pub const MAX_TEXT: usize = flexcomm_wire::MAX_TEXT;

/// See [`flexcomm_wire::MAX_INTEGER`].
pub const MAX_INTEGER: u64 = flexcomm_wire::MAX_INTEGER;
