//! Pure: when to change and why. `decide(snapshot, now, rng) -> (decision, report)`.
//!
//! No IO, no clock, no ambient randomness: the same snapshot, time and state of the generator give the same
//! answer byte for byte, so every decision that was ever made can be replayed from what was stored with it.
//! One call costs well under a millisecond; a caller calls it for each job at every look, about once a second.
//!
//! # One decision from beginning to end
//!
//! ResNet50 on 8 ranks runs `topk@0.011/allgather` as version 1. Its network falls from 25 Gbit/s to 250 Mbit/s.
//!
//! 1. **Gather** (the caller). It fills a [`Snapshot`]: the link matrix with the ages of its samples and
//!    its least confidence, the profile from the last trial, the fitted coefficients, the medians of the
//!    newest steps, the decision in force, the settings ([`Config`]), and the [`Memory`] that the last call
//!    returned. Steps show the change first: the guard sees half a second per step against 40 ms predicted, and
//!    waits, because no link has been measured anew since.
//! 2. **Price** (`solve.rs`). The optimizer predicts every candidate on the links of now: t_comp, t_sync, t_step
//!    and gain. What the job has measured itself outweighs what was fitted elsewhere (`calibration.rs`). Trials begin with a fresh residual and overrate small ratios: where settled steps kept less, or have
//!    drifted since, the profile follows them (`gains.rs`).
//! 3. **Trust**. Links too old or too uncertain: nothing is decided, the report says which and why. Else blocks that
//!    rest on other links than these end (`blocks.rs`).
//! 4. **Triggers** (`triggers.rs`). The mean bandwidth moved by more than 25 %, so it is time to solve again.
//!    Others are: the first decision, a new profile, predicted times that moved though the links did not, a
//!    change deferred before, a strategy no longer offered or admitted, a block that the links have ended, a regular
//!    review. A gain that moved by 10 % or more asks for a **trial** (`trial.rs`), whose profile is the trigger then.
//!    While dense runs none is asked for unless compressing would win provided that it lost nothing (`benefit_bound.rs`).
//!    Nothing of that: the answer is `nothing-moved`, with all predicted times all the same.
//! 5. **Guard** (`guard.rs`). Steps measured worse than predicted, or than dense, beyond a margin, for longer
//!    than the guard's timeout, on links measured since that do not move: where dense or the strategy before is known to
//!    be better, it is left for the best that remains, and what failed is blocked for a while, longer each time. Nothing
//!    known is better: the guard says so once and stays. A block ends early when the links have moved by a factor
//!    of two. When they explain soon after what the steps took, it was the network and counts as no failure (`blocks.rs`).
//! 6. **Choose** (`choose.rs`). The policy picks a point of the front among what is not blocked and clears its floor of
//!    the gain by a margin, which what is in force need not (`floor.rs`). It must win by
//!    the hysteresis (more when only noise can have moved it), save more over the horizon than the switch costs,
//!    and come after the dwell time, when the last decision is in force everywhere. Here it does: version 2,
//!    "bandwidth fell from 25 Gbit/s to 250 Mbit/s; topk at CR 0.001 by art-ring (star) predicted 61.5 ms per step
//!    at gain 0.437 against 536 ms per step at gain 0.582 for the one in force, topk at CR 0.011 by allgather
//!    (84.7 % better by time-to-quality)".
//! 7. **Report** (`report.rs`). What was seen, what moved, every alternative with its times and score, the
//!    front, what is blocked, the sentence why. No change is a decision too and has its sentence.
//! 8. **Check** (the caller, with [`check`]). [`checker`] shares no code with the above and has its own
//!    arithmetic. A violation: nothing is published, the old memory is kept, someone is told.
//! 9. **Apply and record** (the caller). Decision, report and memory are stored in one transaction, then the
//!    decision is published, and the trial, if one is asked for, is ordered.
//!
//! # What may be relied on
//!
//! Versions grow by one. Between two changes lies the dwell time, except for a rollback, and after one whose reason the
//! links have explained. No block outlives the network that it was made on. Except for a rollback, or when the strategy
//! in force is no longer offered or admitted, a change scores better by the policy than what it replaces. A gain about as
//! large as the policy's floor is left once and not taken again before it has risen by a margin (`floor.rs`), however
//! noisy it is. A clock that jumps back costs one dwell time at most. Memory that was lost costs a margin or a block,
//! never a wrong decision. `tests/properties.rs` holds all of this.
//!
//! # Adding a trigger
//!
//! A variant of [`Trigger`] with its words, a line in `triggers::find`, a case in `tests/decisions.rs`, and a
//! scenario in `sim/scenarios/` in which it matters.

mod benefit_bound;
mod blocks;
mod buckets;
mod calibration;
mod candidates;
pub mod checker;
mod choose;
mod config;
mod decide;
mod floor;
mod gains;
mod guard;
pub mod memory;
mod report;
mod snapshot;
mod solve;
mod trial;
mod triggers;
mod words;

pub use candidates::{Allowed, AllowedError, LeftOut, NOT_EMPTY};
pub use checker::{Violation, check};
pub use config::{Config, ConfigError, MAX_CRS};
pub use decide::decide;
pub use flexcomm_optimizer::{Bucket, PolicyConfig, Solver};
pub use memory::Memory;
pub use report::{Alternative, BucketReport, Keep, Observed, Outcome, Report, TrialRequest, Verdict};
pub use snapshot::{InForce, Links, Measured, Offer, Profiles, Scatter, Snapshot, SnapshotError};
pub use trial::{one_of_each, thinned};
pub use triggers::Trigger;

/// Most candidates in one trial: what the wire carries.
pub const MAX_TRIAL_CANDIDATES: usize = 16;
