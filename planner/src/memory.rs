//! What the planner remembers from one call to the next. The caller stores it and hands it back unread.

use crate::Config;
pub use crate::blocks::{Blocked, Evidence, MAX_BLOCKED, Scope};
use flexcomm_domain::{CompressionRatio, Gain, LinkMatrix, Seconds, Selector, Strategy, Timestamp, Version};
use flexcomm_optimizer::Terms;
use serde::{Deserialize, Serialize};

/// Most strategies whose measured times are remembered: the ones tried lately, not a history.
pub const MAX_SEEN: usize = 16;

/// Most ratios for which the trial bias is remembered.
pub const MAX_BIASES: usize = 16;

/// Noise of the links' estimates that is assumed until it is seen: that of two estimates each 10 % off.
const ASSUMED_NOISE: f64 = 0.1;
/// Links that move for so many times the time that they should be steady for do so for good.
const UNSTEADY_AT_MOST: f64 = 5.0;

/// How long a change of the network may stay unseen by the links while steps already show it, seconds.
const UNSEEN_S: f64 = 10.0;

/// Weight of the newest difference in the mean: some thirty looks count.
const NOISE_MEMORY: f64 = 1.0 / 16.0;

/// Everything that is carried over. `Default` is a planner that knows nothing: safe after any loss.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// Time of the last call, to notice a clock that jumped back.
    pub last_call: Timestamp,
    /// From when the dwell time of the strategy in force counts.
    pub dwell_from: Option<Timestamp>,
    /// When everything was last solved.
    pub solved_at: Option<Timestamp>,
    /// The links that were last solved for.
    pub links: Option<LinkSummary>,
    /// The links at the last look.
    pub last_links: Option<LinkSummary>,
    /// While the links move from one look to the next.
    pub moving: Option<Moving>,
    /// Since when bandwidth has been lower than it was and not every link measured since, at every look.
    pub fallen_since: Option<Timestamp>,
    /// How much two estimates of the same links differ in the mean, as a share; absent before the second.
    pub link_noise: Option<f64>,
    /// The predicted step time of the strategy in force when last solved, seconds.
    pub predicted_step_s: Option<f64>,
    /// The gain that changes are measured against.
    pub gain: Option<GainReference>,
    /// The trial bias of the ratios that were in force.
    pub bias: Vec<Bias>,
    /// How gains have moved since the ratio in force was first seen to be biased.
    pub drift: Option<Drift>,
    /// What steps kept of strategies that no trial has measured.
    pub shown: Vec<Shown>,
    /// When the profile that was last solved with was measured.
    pub profile_at: Option<Timestamp>,
    /// A better strategy was found but deferred (dwell, not yet applied), or the guard has just rolled back:
    /// look again.
    #[serde(alias = "held_back")]
    pub deferred: Option<DeferredChange>,
    /// How many times in a row that everything was solved an alternative was better by the small margin.
    pub leads: u32,
    /// What is known of trials.
    pub trial: TrialMemory,
    /// The strategy before the one in force.
    pub previous: Option<Strategy>,
    /// Since when the guard has seen a regression without a break, and under which decision.
    #[serde(alias = "complaint")]
    pub regression: Option<Regression>,
    /// The decision that the guard has already judged and left in force, so that it says so once.
    #[serde(alias = "guard_spoke")]
    pub judged: Option<Version>,
    /// What the newest decision was made for, until its settled steps have kept it.
    pub promise: Option<Promise>,
    /// Measured times of strategies that were in force lately, newest last.
    pub seen: Vec<Seen>,
    /// Strategies not to return to for a while.
    pub blocked: Vec<Blocked>,
    /// A decision made on assumed gains because the links moved before a trial could answer.
    pub assumed: Option<Version>,
    /// A decision that need not stay for the dwell time: a rollback whose reason the links explain, or one that was made on
    /// assumed gains which are measured now.
    pub dwell_waived: Option<Version>,
}

/// A change of the network in the making: estimates of its links follow it one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Moving {
    /// The first look at which links had moved.
    pub since: Timestamp,
    /// The last one.
    pub until: Timestamp,
    /// The links before it; absent in what older versions remembered.
    pub from: Option<LinkSummary>,
}

/// Mean and worst of the links between a job's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkSummary {
    /// Mean one-way latency, seconds.
    pub alpha_mean_s: f64,
    /// Highest one-way latency, seconds.
    pub alpha_worst_s: f64,
    /// Bandwidth that moves the same bytes in the mean time, bit/s.
    pub bandwidth_mean_bps: f64,
    /// Lowest bandwidth, bit/s.
    pub bandwidth_worst_bps: f64,
}

impl LinkSummary {
    /// Of all links between different ranks; with one rank, of its own.
    pub fn of(matrix: &LinkMatrix) -> Self {
        let (mut count, mut alpha, mut beta) = (0.0, 0.0, 0.0);
        for link in matrix.between() {
            count += 1.0;
            alpha += link.alpha.get();
            beta += link.bandwidth.beta();
        }
        let worst = matrix.worst();
        Self {
            alpha_mean_s: alpha / count,
            alpha_worst_s: worst.alpha.get(),
            bandwidth_mean_bps: 8.0 * count / beta,
            bandwidth_worst_bps: worst.bandwidth.get(),
        }
    }

    /// Whether mean or worst moved by `share` or more; latencies must also move by `latency_floor` seconds.
    pub fn moved(&self, to: &Self, share: f64, latency_floor: f64) -> bool {
        let latency = |a: f64, b: f64| (a - b).abs() >= latency_floor && relative(a, b) >= share;
        latency(self.alpha_mean_s, to.alpha_mean_s)
            || latency(self.alpha_worst_s, to.alpha_worst_s)
            || relative(self.bandwidth_mean_bps, to.bandwidth_mean_bps) >= share
            || relative(self.bandwidth_worst_bps, to.bandwidth_worst_bps) >= share
    }
}

/// How much larger the larger of two positive numbers is, as a share: 0.25 for (4, 5) and for (5, 4).
pub(crate) fn relative(a: f64, b: f64) -> f64 {
    let (low, high) = if a <= b { (a, b) } else { (b, a) };
    if low > 0.0 {
        high / low - 1.0
    } else if high > 0.0 {
        f64::MAX
    } else {
        0.0
    }
}

/// The gain in force at some point, against which changes are measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GainReference {
    /// Under which decision.
    pub version: Version,
    /// The gain.
    pub gain: Gain,
}

/// A trial's bias for a ratio: its settled steps keep the trial's gain to this power.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Bias {
    /// Of which selector.
    pub selector: Selector,
    /// At which ratio.
    pub cr: CompressionRatio,
    /// Above 1: the trial overrated it.
    pub power: f64,
    /// What the settled steps kept last.
    pub shown: Gain,
    /// Which profile it is against.
    pub profile_at: Option<Timestamp>,
    /// Whether the residual had not settled: then it overrates by at least so much.
    #[serde(default)]
    pub unsettled: bool,
}

/// What steps kept where no trial says anything.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Shown {
    /// Of which selector.
    pub selector: Selector,
    /// At which ratio.
    pub cr: CompressionRatio,
    /// Of settled steps, or the least of those before.
    pub gain: Gain,
}

/// What all ratios share of how gains move as training goes on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Drift {
    /// Gains are what trials say to the power of [`Bias::power`] times this.
    pub power: f64,
    /// The profile under which it was seen.
    pub profile_at: Option<Timestamp>,
    /// What it was seen of.
    pub selector: Selector,
}

/// A change that is due when the strategy in force has settled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeferredChange {
    /// The share by which a new strategy must be better.
    pub margin: f64,
    /// What moved, as the beginning of a sentence.
    pub cause: String,
}

/// The guard's open regression.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Regression {
    /// Under which decision.
    pub version: Version,
    /// Since when.
    pub since: Timestamp,
}

/// What is known of the trials that were asked for.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TrialMemory {
    /// When the last one was asked for.
    pub asked_at: Option<Timestamp>,
    /// What it was predicted to cost, seconds.
    pub cost_s: f64,
    /// Whether its answer is still awaited.
    pub pending: bool,
    /// When the trial of the newest answer that was seen ended.
    pub answered_at: Option<Timestamp>,
    /// How many were given up one after the other.
    pub given_up: u32,
}

/// What a strategy was measured to cost while it was in force.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// Which.
    pub strategy: Strategy,
    /// Its medians.
    pub cost: crate::Measured,
    /// Over which links.
    pub links: LinkSummary,
    /// The cost model's terms of it on those links; absent in what older versions remembered.
    pub terms: Option<Terms>,
    /// When it was noted.
    #[serde(default)]
    pub at: Timestamp,
    /// Whether links moved so soon after that the times may be of the network after the move.
    #[serde(default)]
    pub doubted: bool,
}

/// What a strategy was chosen for.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Promise {
    /// By which decision.
    pub version: Version,
    /// The gain that was believed of it.
    pub gain: Gain,
}

impl Memory {
    /// Brings every remembered time to the present: after a clock that jumped back, nothing lies in the future
    /// but blocks, and those by no more than their longest time.
    pub(crate) fn heal(&mut self, now: Timestamp, config: &Config) {
        let cap = |at: &mut Option<Timestamp>| *at = at.map(|t| t.min(now));
        cap(&mut self.dwell_from);
        cap(&mut self.solved_at);
        cap(&mut self.fallen_since);
        cap(&mut self.trial.asked_at);
        if let Some(moving) = &mut self.moving {
            *moving = Moving { since: moving.since.min(now), until: moving.until.min(now), ..*moving };
        }
        if let Some(regression) = &mut self.regression {
            regression.since = regression.since.min(now);
        }
        self.seen.iter_mut().for_each(|seen| seen.at = seen.at.min(now));
        self.heal_blocks(now, config);
        self.last_call = now;
    }

    /// Takes note of whether the links move, and learns how noisy their estimates are when they do not.
    pub(crate) fn note_links(&mut self, links: &LinkSummary, config: &Config, now: Timestamp) {
        let (share, latency_floor) = (config.link_change, config.latency_floor_s.get());
        let Some(before) = self.last_links.replace(*links).filter(|b| b != links) else { return };
        if before.moved(links, share, latency_floor) {
            let open = self.moving.filter(|m| now.since(m.until) < config.links_settle_s);
            let new = Moving { since: now, until: now, from: Some(before) };
            self.moving = Some(Moving { until: now, ..open.unwrap_or(new) });
            let late = self.seen.iter_mut().filter(|seen| now.since(seen.at).get() < UNSEEN_S);
            late.for_each(|seen| seen.doubted = true);
            return;
        }
        let bandwidth = relative(before.bandwidth_mean_bps, links.bandwidth_mean_bps);
        let late = (before.alpha_mean_s - links.alpha_mean_s).abs() >= latency_floor;
        let latency = if late { relative(before.alpha_mean_s, links.alpha_mean_s) } else { 0.0 };
        let noise = self.link_noise.unwrap_or(ASSUMED_NOISE);
        self.link_noise = Some(noise + (bandwidth.max(latency) - noise) * NOISE_MEMORY);
    }

    /// How long ago the links moved last, while they are not steady for long enough to act on. A network that never
    /// is steady is acted on all the same.
    pub(crate) fn unsteady(&self, config: &Config, now: Timestamp) -> Option<Seconds> {
        let moving = self.moving?;
        let (ago, settle) = (now.since(moving.until), config.links_settle_s);
        let patient = now.since(moving.since).get() < UNSTEADY_AT_MOST * settle.get();
        (ago < settle && patient).then_some(ago)
    }

    /// The noise of the links' estimates, assumed while nothing is known.
    pub(crate) fn noise(&self) -> f64 {
        self.link_noise.unwrap_or(ASSUMED_NOISE)
    }

    /// Remembers a trial's bias, instead of an earlier one's.
    pub(crate) fn note_bias(&mut self, new: Bias) {
        replace(&mut self.bias, new, |b| (b.selector, b.cr));
    }

    /// Remembers what steps kept, instead of what earlier ones did.
    pub(crate) fn note_shown(&mut self, new: Shown) {
        replace(&mut self.shown, new, |shown| (shown.selector, shown.cr));
    }

    /// Remembers what the strategy in force costs; the newest measurement of a strategy counts. Those of dense are kept: what
    /// compressing must beat is known for the whole run.
    pub(crate) fn remember(&mut self, seen: Seen) {
        self.seen.retain(|s| s.strategy != seen.strategy);
        if self.seen.len() >= MAX_SEEN {
            let oldest = self.seen.iter().position(|s| !s.strategy.is_dense()).unwrap_or(0);
            self.seen.remove(oldest);
        }
        self.seen.push(seen);
    }
}

/// Puts it last, instead of what was known of the same ratio; the oldest goes where there are [`MAX_BIASES`].
fn replace<T>(known: &mut Vec<T>, new: T, of: impl Fn(&T) -> (Selector, CompressionRatio)) {
    known.retain(|other| of(other) != of(&new));
    if known.len() >= MAX_BIASES {
        known.remove(0);
    }
    known.push(new);
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::Link;
    use proptest::prelude::{prop_assert, proptest};

    #[test]
    fn what_earlier_builds_remembered_is_read() {
        let text = r#"{"held_back":{"margin":0.1,"cause":"links"},"complaint":{"version":3,"since":5},"guard_spoke":2,
            "blocked":[{"strategy":"none/dense-ring","scope":"collective","until":9,"strikes":4,"why":"slow"}]}"#;
        let memory: Memory = serde_json::from_str(text).unwrap();
        assert_eq!((memory.deferred.as_ref().unwrap().cause.as_str(), memory.judged), ("links", Some(Version(2))));
        assert_eq!((memory.regression.unwrap().version, memory.blocked[0].failures), (Version(3), 4));
        let now = serde_json::to_string(&memory).unwrap();
        for former in ["held_back", "complaint", "guard_spoke", "strikes"] {
            assert!(!now.contains(former), "{now}");
        }
        assert_eq!(serde_json::from_str::<Memory>(&now).unwrap(), memory);
    }

    #[test]
    fn a_clock_that_jumped_back_leaves_nothing_in_the_future() {
        let mut memory = Memory { dwell_from: Some(Timestamp(9_000_000)), ..Memory::default() };
        memory.heal(Timestamp(1_000_000), &Config::default());
        assert_eq!(memory.dwell_from, Some(Timestamp(1_000_000)));
    }

    proptest! {
        #[test]
        fn ten_percent_of_noise_on_both_sides_is_no_move(
            alpha in 1e-5..0.2f64, bandwidth in 1e5..1e12f64, n in 0.9..1.1f64, m in 0.9..1.1f64, o in 0.9..1.1f64
        ) {
            let summary = |alpha, bandwidth| LinkSummary::of(
                &LinkMatrix::uniform(4, Link::new(alpha, bandwidth).unwrap()).unwrap());
            let (a, b) = (summary(alpha * n, bandwidth * m), summary(alpha * m, bandwidth * o));
            prop_assert!(!a.moved(&b, 0.25, 0.0));
            prop_assert!(a.moved(&summary(alpha * n, bandwidth * m / 1.3), 0.25, 50e-6));
        }
    }
}
