//! Pure: when to change and why. `decide(snapshot, now, rng) -> (decision, report)`.
//!
//! No IO, no clock, no ambient randomness: the same snapshot, time and state of the generator give the same
//! answer byte for byte, so every decision that was ever made can be replayed from what was stored with it.
//! One call costs some milliseconds; a caller calls it for each job at every look, about once a second.
//!
//! # One decision from beginning to end
//!
//! ResNet50 on 8 ranks runs `topk@0.011/allgather` as version 1. Its network falls from 25 Gbit/s to 250 Mbit/s.
//!
//! 1. **Gather** (the caller). It fills a [`Snapshot`]: the link matrix and the newest throughput tests, what trials found, the medians
//!    of the newest steps, the decision in force, the settings ([`Config`]), and the [`Memory`] that the last call returned.
//! 2. **Observe** (`beliefs.rs`). Latencies, tests, trials and steps are observations of what `flexcomm-estimation` believes, each with
//!    its noise. Steps show the change first: half a second where 40 ms were expected is no noise, so the network has changed and is not
//!    known. Until latencies and bandwidths are measured anew, its samples are those in which the strategy in force takes what its
//!    steps take. What steps keep tells little of gradients while they compress what a strategy before them has left.
//! 3. **Price** (`beliefs.rs`). Every candidate gets 256 samples of what it costs by the policy: seconds for the progress of a dense step.
//!    Samples are common: in one of them all candidates see the same network, the same machine and the same gains.
//!    Where the gradient has several buckets, NSGA-II searches plans of a strategy for each group of them (`plans.rs`), and the best it finds
//!    are priced, too: early buckets, which backward hides, stay dense or nearly, and late ones are compressed.
//! 4. **Measure** (`information.rs`, `trial.rs`). Where nothing is surely better, a live trial is asked for if knowing the best candidate would save
//!    more, until the network changes next, than the trial takes (by a policy that does not minimise time, once for what no trial has measured). What knowing bandwidths would save is reported: the caller tests links where that is more than a
//!    test takes.
//! 5. **Choose** (`decide.rs`). A candidate replaces the strategy in force when it is better with the probability asked for, and saves
//!    more than the switch costs until the network changes next (at least 20 s and 20 steps) or the job ends (by a policy that does not minimise
//!    time: 2 % of the score). One that is less sure is
//!    tried in earnest when what it would save from then on outweighs what the attempt may lose, at most twice on each network unless it is
//!    better in the mean. Before the first step, what computing takes is believed like the rest, so that a job
//!    on a slow network is decided on at once. A change comes after the dwell time and when the last one is in force
//!    on all ranks; back to dense a job goes at once when its steps are slower than dense ones would be,
//!    or its loss rises beyond its noise: then until the loss is as low again. Where the loss does not fall at all since the run began, dense is
//!    tried for a hundred steps.
//!    What is set for the job alone ([`JobPolicy`]) limits the candidates, puts a pinned plan in the place of the choice, and makes of a
//!    change a report where it only observes.
//! 6. **Report** (`report.rs`). What was seen and what changed, every alternative with its times, what it saves and how surely, the front,
//!    the sentence why. No change is a decision too and has its sentence.
//! 7. **Check** (the caller, with [`check`]). [`checker`] shares no code with the above and judges from the snapshot. A violation:
//!    nothing is published, the old memory is kept, and an error is logged.
//! 8. **Apply and record** (the caller). Decision, report and memory are stored in one transaction, then the
//!    decision is published, and the trial, if one is asked for, is ordered.
//!
//! # What may be relied on
//!
//! Versions grow by one. Between two changes lies the dwell time, except for one back to dense. A change is
//! expected to save more than the switch costs, or is a try whose expected gain exceeds what it may lose. A clock that jumps back costs two dwell times at most. `tests/planner/properties.rs` checks
//! versions, the dwell time, replay and clock jumps.

pub mod beliefs;
mod candidates;
pub mod checker;
mod config;
mod decide;
mod information;
mod loss;
pub mod memory;
mod plans;
mod policy;
mod report;
mod snapshot;
mod trial;
mod words;

pub use candidates::{Allowed, AllowedError, LeftOut, NOT_EMPTY};
pub use checker::{Violation, check};
pub use config::{Config, ConfigError, MAX_CRS};
pub use decide::{contradicted, decide};
pub use flexcomm_optimizer::PolicyConfig;
pub use loss::{LOSS_POINTS, LossWatch};
pub use memory::Memory;
pub use plans::{Buckets, ByBucket};
pub use policy::{JobPolicy, JobPolicyError, Pin, rfc3339};
pub use report::{Alternative, Keep, Observed, Outcome, Report, TrialRequest, Verdict};
pub use snapshot::{
    InForce, LinkTest, Links, Losses, MeanLoss, Measured, Offer, Profiles, Scatter, Snapshot, SnapshotError, TrialWaits,
};
pub use trial::{one_of_each, thinned};

/// Most candidates in one trial: what the wire carries.
pub const MAX_TRIAL_CANDIDATES: usize = 16;

/// Iterations per candidate of a trial, as in the paper.
pub const TRIAL_ITERATIONS: u32 = 10;
