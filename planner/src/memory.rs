//! What the planner remembers from one call to the next. The caller stores it and hands it back unread.

use crate::Config;
use flexcomm_domain::{CompressionRatio, Gain, LinkMatrix, Seconds, Selector, Strategy, Timestamp, Version};
use serde::{Deserialize, Serialize};

/// Most strategies whose measured times are remembered: the ones tried lately, not a history.
pub const MAX_SEEN: usize = 16;
/// Most strategies that are blocked at once; the block that ends first is dropped.
pub const MAX_BLOCKED: usize = 16;

/// Most ratios of which it is remembered how far trials flattered them.
pub const MAX_BIASES: usize = 16;

/// Noise of the links' estimates that is assumed until it is seen: that of two estimates each 10 % off.
const ASSUMED_NOISE: f64 = 0.1;
/// Links that move for so many times the time that they should be steady for do so for good.
const UNSTEADY_AT_MOST: f64 = 5.0;

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
    /// How far trials flattered the ratios that were in force.
    pub bias: Vec<Bias>,
    /// When the profile that was last solved with was measured.
    pub profile_at: Option<Timestamp>,
    /// A better strategy was found but held back (dwell, not yet applied), or the guard has just rolled back:
    /// look again.
    pub held_back: Option<HeldBack>,
    /// How many times in a row that everything was solved an alternative was better by the small margin.
    pub leads: u32,
    /// What is known of trials.
    pub trial: TrialMemory,
    /// The strategy before the one in force.
    pub previous: Option<Strategy>,
    /// Since when the guard has had something to complain of without a break, and under which decision.
    pub complaint: Option<Complaint>,
    /// The decision that the guard has already judged and left in force, so that it says so once.
    pub guard_spoke: Option<Version>,
    /// Measured times of strategies that were in force lately, newest last.
    pub seen: Vec<Seen>,
    /// Strategies not to return to for a while.
    pub blocked: Vec<Blocked>,
}

/// A change of the network in the making: estimates of its links follow it one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Moving {
    /// The first look at which links had moved.
    pub since: Timestamp,
    /// The last one.
    pub until: Timestamp,
    /// The links before it; absent in what older versions remembered.
    #[serde(default)]
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
        let n = matrix.ranks();
        let pairs = (0..n).flat_map(|from| (0..n).map(move |to| (from, to)));
        let (mut count, mut alpha, mut beta) = (0.0, 0.0, 0.0);
        for (from, to) in pairs.filter(|&(from, to)| n == 1 || from != to) {
            let link = matrix.get(from, to);
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

/// How far a trial flattered a ratio: its settled steps keep the trial's gain to this power.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Bias {
    /// Of which selector.
    pub selector: Selector,
    /// At which ratio.
    pub cr: CompressionRatio,
    /// Above 1: the trial flattered.
    pub power: f64,
    /// What the settled steps kept last.
    pub shown: Gain,
    /// Which profile it is against.
    pub profile_at: Option<Timestamp>,
}

/// A change that is due when the strategy in force has settled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeldBack {
    /// The share by which a new strategy must be better.
    pub margin: f64,
    /// What moved, as the beginning of a sentence.
    pub cause: String,
}

/// The guard's open complaint.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Complaint {
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
    /// When the newest answer that was seen ended.
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
}

/// Which part of a strategy failed: what else is not to be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// Communication took too long: every strategy over the same collective is blocked.
    Collective,
    /// Compressing took too long: every strategy with the same compressor is blocked.
    Compressor,
    /// Too much was lost: the same compressor is blocked at this ratio and at every smaller one; if one rank selected for
    /// all, only that way of selecting.
    Gain,
}

/// What the guard found wrong.
#[derive(Debug, Clone)]
pub(crate) struct Failed {
    pub(crate) strategy: Strategy,
    pub(crate) scope: Scope,
    pub(crate) why: String,
}

/// A strategy that was rolled back.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Blocked {
    /// Which.
    pub strategy: Strategy,
    /// What it shares with others that are blocked with it.
    pub scope: Scope,
    /// Not chosen before this.
    pub until: Timestamp,
    /// How many times it was rolled back.
    pub strikes: u32,
    /// What was measured, in words.
    pub why: String,
}

impl Blocked {
    /// Whether this block means that strategy, too.
    pub fn covers(&self, other: &Strategy) -> bool {
        self.scope.covers(&self.strategy, other)
    }
}

impl Scope {
    /// Whether what is wrong with `failed` is wrong with `other`, too.
    pub(crate) fn covers(self, failed: &Strategy, other: &Strategy) -> bool {
        match self {
            Self::Collective => failed.collective() == other.collective(),
            Self::Compressor => failed.compressor() == other.compressor(),
            Self::Gain => {
                let keeps_no_more = failed.selection().is_none() || failed.selection() == other.selection();
                failed.compressor() == other.compressor() && other.cr() <= failed.cr() && keeps_no_more
            }
        }
    }
}

impl Memory {
    /// Brings every remembered time to the present: after a clock that jumped back, nothing lies in the future
    /// but blocks, and those by no more than their longest time.
    pub(crate) fn heal(&mut self, now: Timestamp, block_max: Seconds) {
        let cap = |at: &mut Option<Timestamp>| *at = at.map(|t| t.min(now));
        cap(&mut self.dwell_from);
        cap(&mut self.solved_at);
        cap(&mut self.fallen_since);
        cap(&mut self.trial.asked_at);
        if let Some(moving) = &mut self.moving {
            *moving = Moving { since: moving.since.min(now), until: moving.until.min(now), ..*moving };
        }
        if let Some(complaint) = &mut self.complaint {
            complaint.since = complaint.since.min(now);
        }
        for blocked in &mut self.blocked {
            blocked.until = blocked.until.min(now.plus(block_max));
        }
        self.last_call = now;
    }

    /// The block that is in force for a strategy.
    pub fn blocked(&self, strategy: &Strategy, now: Timestamp) -> Option<&Blocked> {
        self.blocked.iter().find(|b| b.covers(strategy) && now < b.until)
    }

    /// Blocks a strategy and its kin for `first`, doubled each time up to `most`.
    pub(crate) fn block(&mut self, failed: Failed, now: Timestamp, first: Seconds, most: Seconds) {
        let same = |b: &Blocked| b.scope == failed.scope && b.covers(&failed.strategy);
        let strikes = self.blocked.iter().find(|b| same(b)).map_or(0, |b| b.strikes) + 1;
        self.blocked.retain(|b| !same(b));
        if self.blocked.len() >= MAX_BLOCKED {
            let first = self.blocked.iter().map(|b| b.until).min();
            self.blocked.retain(|b| Some(b.until) != first);
        }
        let length = (first.get() * f64::from(strikes.min(20) - 1).exp2()).min(most.get());
        let until = now.plus(Seconds::new(length).unwrap_or(most));
        let Failed { strategy, scope, why } = failed;
        self.blocked.push(Blocked { strategy, scope, until, strikes, why });
    }

    /// Ends the blocks on a strategy, keeping count of how often it failed.
    pub(crate) fn unblock(&mut self, strategy: &Strategy, now: Timestamp) {
        for blocked in self.blocked.iter_mut().filter(|b| b.covers(strategy)) {
            blocked.until = blocked.until.min(now);
        }
    }

    /// Takes note of whether the links move, and learns how noisy their estimates are when they do not.
    pub(crate) fn note_links(&mut self, links: &LinkSummary, config: &Config, now: Timestamp) {
        let (share, latency_floor) = (config.link_change, config.latency_floor_s.get());
        let Some(before) = self.last_links.replace(*links).filter(|b| b != links) else { return };
        if before.moved(links, share, latency_floor) {
            let open = self.moving.filter(|m| now.since(m.until) < config.links_settle_s);
            let new = Moving { since: now, until: now, from: Some(before) };
            self.moving = Some(Moving { until: now, ..open.unwrap_or(new) });
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

    /// How far the trial of this profile flattered the ratio, where that is known.
    pub(crate) fn known_bias(&mut self, of: (Selector, CompressionRatio, Option<Timestamp>)) -> Option<&mut Bias> {
        self.bias.iter_mut().find(|b| (b.selector, b.cr, b.profile_at) == of)
    }

    /// Remembers how far a trial flattered, instead of what an earlier one did.
    pub(crate) fn note_bias(&mut self, new: Bias) {
        let same = |b: &Bias| b.selector == new.selector && b.cr == new.cr;
        self.bias.retain(|b| !same(b));
        if self.bias.len() >= MAX_BIASES {
            self.bias.remove(0);
        }
        self.bias.push(new);
    }

    /// Remembers what the strategy in force costs; the newest measurement of a strategy counts.
    pub(crate) fn remember(&mut self, seen: Seen) {
        self.seen.retain(|s| s.strategy != seen.strategy);
        if self.seen.len() >= MAX_SEEN {
            self.seen.remove(0);
        }
        self.seen.push(seen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::Link;
    use proptest::prelude::{prop_assert, proptest};

    fn seconds(s: f64) -> Seconds {
        Seconds::new(s).unwrap()
    }

    /// One rank that selects for all keeps less than each for itself, never more.
    #[test]
    fn what_loses_too_much_says_nothing_of_ways_of_selecting_that_keep_more() {
        let covers = |failed: &str, other: &str| {
            let of = |text: &str| text.parse::<Strategy>().unwrap();
            Scope::Gain.covers(&of(failed), &of(other))
        };
        assert!(covers("topk@0.01/allgather", "topk@0.01/art-ring:star"));
        assert!(covers("topk@0.01/art-ring:star", "topk@0.004/art-tree:star"));
        assert!(!covers("topk@0.01/art-ring:star", "topk@0.01/allgather"));
        assert!(!covers("topk@0.01/art-ring:star", "topk@0.01/art-ring:var"));
        assert!(!covers("topk@0.01/allgather", "topk@0.1/allgather"));
    }

    #[test]
    fn blocks_double_and_end() {
        let mut memory = Memory::default();
        let strategy: Strategy = "topk@0.01/allgather".parse().unwrap();
        let failed = Failed { strategy, scope: Scope::Collective, why: "slow".into() };
        let length = |m: &Memory| m.blocked[0].until.since(Timestamp(0)).get();
        for expected in [10.0, 20.0, 25.0] {
            memory.block(failed.clone(), Timestamp(0), seconds(10.0), seconds(25.0));
            assert_eq!(length(&memory), expected);
        }
        let kin: Strategy = "mstopk@0.1/allgather".parse().unwrap();
        let other: Strategy = "topk@0.01/art-ring:star".parse().unwrap();
        assert!(memory.blocked(&strategy, Timestamp(24_999_999)).is_some());
        assert!(memory.blocked(&strategy, Timestamp(25_000_000)).is_none());
        assert!(memory.blocked(&kin, Timestamp(0)).is_some());
        assert!(memory.blocked(&other, Timestamp(0)).is_none());
        memory.unblock(&kin, Timestamp(3));
        assert!(memory.blocked(&strategy, Timestamp(3)).is_none());
    }

    #[test]
    fn a_clock_that_jumped_back_leaves_nothing_in_the_future() {
        let mut memory = Memory { dwell_from: Some(Timestamp(9_000_000)), ..Memory::default() };
        let failed = Failed { strategy: Strategy::DENSE_RING, scope: Scope::Collective, why: String::new() };
        memory.block(failed, Timestamp(9_000_000), seconds(5.0), seconds(20.0));
        memory.heal(Timestamp(1_000_000), seconds(20.0));
        assert_eq!(memory.dwell_from, Some(Timestamp(1_000_000)));
        assert!(memory.blocked[0].until <= Timestamp(21_000_000));
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
