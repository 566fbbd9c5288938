//! Strategies that were rolled back, not chosen again for a while.
//!
//! What failed was seen to fail on one network. A block remembers those links and ends when they have moved by a factor
//! of two: whether to avoid the strategy was weighed on another network. Steps show a fall of the network before probes
//! do, so the guard may blame a strategy for what the links explain a moment later. Then it is cleared: the block ends,
//! its failure does not count, and what it was left for need not stay for the dwell time.
//!
//! Each failure doubles the next block. One is forgotten when after its block as long again has passed without another.

use crate::memory::LinkSummary;
use crate::{Config, Measured, Memory, words};
use flexcomm_domain::{Gain, Seconds, Strategy, Timestamp, Version};
use serde::{Deserialize, Serialize};

/// Most strategies that are blocked at once; the block that ends first is dropped.
pub const MAX_BLOCKED: usize = 16;

/// Links of which latency or bandwidth, mean or worst, has moved by this share or more, a factor of two, are another
/// network: no noise of estimates reaches it, and what was measured says little of it.
pub(crate) const OTHER_NETWORK: f64 = 1.0;

/// More failures than these make no block longer.
const MOST_FAILURES: u32 = 20;

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
    pub(crate) evidence: Evidence,
}

/// What a block rests on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// The links as known when it was made.
    pub links: LinkSummary,
    /// What the strategy was measured to cost.
    pub measured: Measured,
    /// The gain that it was chosen for, where that is what it failed to keep.
    pub promised: Option<Gain>,
}

/// A strategy that was rolled back.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Blocked {
    /// Which.
    pub strategy: Strategy,
    /// What it shares with others that are blocked with it.
    pub scope: Scope,
    /// When it was rolled back.
    #[serde(default)]
    pub at: Timestamp,
    /// Not chosen before this; once past, since when no failure has been forgotten.
    pub until: Timestamp,
    /// How many times it was rolled back, less what is forgotten.
    #[serde(alias = "strikes")]
    pub failures: u32,
    /// What was measured, in words.
    pub why: String,
    /// Absent when the links have explained it, and in what older versions remembered.
    pub evidence: Option<Evidence>,
}

/// What links that have moved mean for a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Review {
    Stands,
    /// They are another network.
    OtherNetwork,
    /// They explain what the steps took.
    Cleared,
}

/// Blocks that ended before their time.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    strategies: Vec<Strategy>,
    /// The last of them.
    cleared: bool,
}

impl Ended {
    /// What a trigger says of them; nothing when there are none.
    pub(crate) fn words(&self) -> Option<String> {
        match self.strategies.as_slice() {
            [] => None,
            [one] => {
                let why =
                    if self.cleared { "the links explain what its steps took" } else { "it failed on other links" };
                Some(format!("{} may be tried again: {why}", words::strategy(one)))
            }
            all => {
                Some(format!("{} strategies may be tried again: the links on which they failed have moved", all.len()))
            }
        }
    }
}

impl Blocked {
    /// Whether this block means that strategy, too.
    pub fn covers(&self, other: &Strategy) -> bool {
        self.scope.covers(&self.strategy, other)
    }

    /// Forgets the failures after which long enough has passed without another.
    fn forget(&mut self, now: Timestamp, config: &Config) {
        self.failures = self.failures.min(MOST_FAILURES);
        while self.failures > 0 {
            let again = self.until.plus(length(self.failures, config));
            if again > now {
                return;
            }
            (self.until, self.failures) = (again, self.failures - 1);
        }
    }

    fn review(&self, moved: &Moved<'_>, clears: impl Fn(&Self, &Evidence) -> bool) -> Review {
        let Some(evidence) = &self.evidence else { return Review::Stands };
        let config = moved.config;
        let by = |share| evidence.links.moved(moved.links, share, config.latency_floor_s.get());
        // Links that are acted on may be this old, so news of them may be this late.
        let news = moved.now.since(self.at) <= config.max_link_age_s;
        if news && by(config.link_change) && clears(self, evidence) {
            Review::Cleared
        } else if by(OTHER_NETWORK) {
            Review::OtherNetwork
        } else {
            Review::Stands
        }
    }
}

/// Links that blocks are looked at again on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moved<'a> {
    pub(crate) links: &'a LinkSummary,
    pub(crate) config: &'a Config,
    pub(crate) now: Timestamp,
}

/// How long a block lasts with so many failures.
fn length(failures: u32, config: &Config) -> Seconds {
    let doubled = config.block_s.get() * f64::from(failures.clamp(1, MOST_FAILURES) - 1).exp2();
    Seconds::new(doubled.min(config.block_max_s.get())).unwrap_or(config.block_max_s)
}

impl Scope {
    /// Whether what is wrong with `failed` is wrong with `other`, too.
    pub(crate) fn covers(self, failed: &Strategy, other: &Strategy) -> bool {
        match self {
            // Messages of any size are added up by the same allreduce: what takes too long of one takes no time of dense.
            Self::Collective => {
                let mixed = failed.collective().is_allreduce() && failed.family() != other.family();
                failed.collective() == other.collective() && !mixed
            }
            Self::Compressor => failed.family() == other.family(),
            Self::Gain => {
                let keeps_no_more = failed.selection().is_none() || failed.selection() == other.selection();
                failed.family() == other.family() && other.cr() <= failed.cr() && keeps_no_more
            }
        }
    }
}

impl Memory {
    /// The block that is in force for a strategy.
    pub fn blocked(&self, strategy: &Strategy, now: Timestamp) -> Option<&Blocked> {
        self.blocked.iter().find(|b| b.covers(strategy) && now < b.until)
    }

    /// Brings blocks to the present: after a clock that jumped back they end no later than their longest time, and
    /// those with no failure left are gone.
    pub(crate) fn heal_blocks(&mut self, now: Timestamp, config: &Config) {
        for blocked in &mut self.blocked {
            blocked.at = blocked.at.min(now);
            blocked.until = blocked.until.min(now.plus(config.block_max_s));
            blocked.forget(now, config);
        }
        self.blocked.retain(|b| b.failures > 0);
    }

    /// Blocks a strategy and its kin, for longer with each failure.
    pub(crate) fn block(&mut self, failed: Failed, now: Timestamp, config: &Config) {
        let same = |b: &Blocked| b.scope == failed.scope && b.covers(&failed.strategy);
        let failures = self.blocked.iter().find(|b| same(b)).map_or(0, |b| b.failures) + 1;
        self.blocked.retain(|b| !same(b));
        if self.blocked.len() >= MAX_BLOCKED {
            let first = self.blocked.iter().map(|b| b.until).min();
            self.blocked.retain(|b| Some(b.until) != first);
        }
        let Failed { strategy, scope, why, evidence } = failed;
        let failures = failures.min(MOST_FAILURES);
        let until = now.plus(length(failures, config));
        self.blocked.push(Blocked { strategy, scope, at: now, until, failures, why, evidence: Some(evidence) });
    }

    /// Ends the blocks on a strategy, keeping count of how often it failed.
    pub(crate) fn unblock(&mut self, strategy: &Strategy, now: Timestamp) {
        for blocked in self.blocked.iter_mut().filter(|b| b.covers(strategy)) {
            blocked.until = blocked.until.min(now);
        }
    }

    /// Ends the blocks that the links speak against, once they are steady. `clears` says whether they explain what was
    /// measured, `version` is in force.
    pub(crate) fn review_blocks(
        &mut self,
        moved: &Moved<'_>,
        version: Version,
        clears: impl Fn(&Self, &Blocked, &Evidence) -> bool,
    ) -> Ended {
        if self.unsteady(moved.config, moved.now).is_some() {
            return Ended::default();
        }
        let reviews: Vec<Review> =
            self.blocked.iter().map(|b| b.review(moved, |b, evidence| clears(self, b, evidence))).collect();
        // Steps on links that were known only later say nothing of those that were known before.
        let cleared = self.blocked.iter().zip(&reviews).filter(|(_, r)| **r == Review::Cleared);
        let stale: Vec<LinkSummary> = cleared.filter_map(|(b, _)| Some(b.evidence?.links)).collect();
        let (share, latency_floor) = (moved.config.link_change, moved.config.latency_floor_s.get());
        self.seen.retain(|x| stale.iter().all(|links| links.moved(&x.links, share, latency_floor)));
        let mut ended = Ended::default();
        let dwell_from = self.dwell_from;
        for (blocked, review) in self.blocked.iter_mut().zip(reviews).filter(|(_, r)| *r != Review::Stands) {
            if moved.now < blocked.until {
                ended.strategies.push(blocked.strategy);
                ended.cleared = review == Review::Cleared;
            }
            blocked.until = blocked.until.min(moved.now);
            if review == Review::Cleared {
                (blocked.failures, blocked.evidence) = (blocked.failures.saturating_sub(1), None);
                if dwell_from == Some(blocked.at) {
                    self.dwell_waived = Some(version);
                }
            }
        }
        self.blocked.retain(|b| b.failures > 0);
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Seen;
    use flexcomm_domain::Gain;
    use proptest::prelude::{prop, prop_assert, prop_assert_eq, proptest};

    fn seconds(s: f64) -> Seconds {
        Seconds::new(s).unwrap()
    }

    fn at(s: f64) -> Timestamp {
        Timestamp(((1000.0 + s) * 1e6).round() as u64)
    }

    fn config() -> Config {
        Config { block_s: seconds(10.0), block_max_s: seconds(25.0), ..Config::default() }
    }

    fn links(alpha_s: f64, bandwidth_bps: f64) -> LinkSummary {
        LinkSummary {
            alpha_mean_s: alpha_s,
            alpha_worst_s: alpha_s,
            bandwidth_mean_bps: bandwidth_bps,
            bandwidth_worst_bps: bandwidth_bps,
        }
    }

    fn failed(strategy: &str, scope: Scope) -> Failed {
        let measured = Measured {
            version: Version(1),
            steps: 50,
            t_step: seconds(1.0),
            t_comp: seconds(0.1),
            t_sync: seconds(0.8),
            gain: Gain::FULL,
            gain_spread: 0.0,
            scatter: None,
        };
        let evidence = Evidence { links: links(0.001, 1e9), measured, promised: None };
        Failed { strategy: strategy.parse().unwrap(), scope, why: "slow".into(), evidence }
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
        let collective =
            |failed: &str, other: &str| Scope::Collective.covers(&failed.parse().unwrap(), &other.parse().unwrap());
        assert!(collective("topk@0.01/allgather", "qsgd(s=7)/allgather"));
        assert!(!collective("powersgd(rank=2)/dense-ring", "none/dense-ring"));
        assert!(collective("none/dense-ring", "none/dense-ring"));
    }

    #[test]
    fn blocks_double_and_end() {
        let mut memory = Memory::default();
        let failed = failed("topk@0.01/allgather", Scope::Collective);
        let strategy = failed.strategy;
        for expected in [10.0, 20.0, 25.0] {
            memory.block(failed.clone(), at(0.0), &config());
            assert_eq!(memory.blocked[0].until, at(expected));
        }
        let kin: Strategy = "mstopk@0.1/allgather".parse().unwrap();
        let other: Strategy = "topk@0.01/art-ring:star".parse().unwrap();
        assert!(memory.blocked(&strategy, at(24.999)).is_some());
        assert!(memory.blocked(&strategy, at(25.0)).is_none());
        assert!(memory.blocked(&kin, at(0.0)).is_some());
        assert!(memory.blocked(&other, at(0.0)).is_none());
        memory.unblock(&kin, at(3.0));
        assert!(memory.blocked(&strategy, at(3.0)).is_none());
    }

    #[test]
    fn a_clock_that_jumped_back_makes_no_block_longer_than_the_longest() {
        let mut memory = Memory::default();
        memory.block(failed("none@1/dense-ring", Scope::Collective), at(9.0), &config());
        memory.heal_blocks(Timestamp(1_000_000), &config());
        assert_eq!(memory.blocked[0].until, Timestamp(26_000_000));
        assert_eq!(memory.blocked[0].at, Timestamp(1_000_000));
    }

    /// Three failures: blocked for 25 s; after its end forgotten one by one after 25, 20 and 10 s.
    #[test]
    fn failures_are_forgotten_after_as_long_as_their_block_took() {
        let mut memory = Memory::default();
        for _ in 0..3 {
            memory.block(failed("topk@0.01/allgather", Scope::Collective), at(0.0), &config());
        }
        for (now, left) in
            [(49.9, Some(3)), (50.0, Some(2)), (69.9, Some(2)), (70.0, Some(1)), (79.9, Some(1)), (80.0, None)]
        {
            memory.heal_blocks(at(now), &config());
            assert_eq!(memory.blocked.first().map(|b| b.failures), left, "after {now} s");
        }
    }

    fn review(memory: &mut Memory, links: &LinkSummary, now: f64, clears: bool) -> Ended {
        let config = config();
        memory.review_blocks(&Moved { links, config: &config, now: at(now) }, Version(2), |_, _, _| clears)
    }

    #[test]
    fn what_the_links_explain_is_no_strike_and_need_not_stay() {
        let mut memory = Memory { dwell_from: Some(at(0.0)), ..Memory::default() };
        memory.block(failed("topk@0.01/allgather", Scope::Collective), at(-30.0), &config());
        memory.block(failed("topk@0.01/allgather", Scope::Collective), at(0.0), &config());
        for (strategy, bandwidth) in
            [("topk@0.01/allgather", 1e9), ("none@1/dense-ring", 0.95e9), ("topk@0.1/allgather", 5e9)]
        {
            let cost = memory.blocked[0].evidence.unwrap().measured;
            let (strategy, links) = (strategy.parse().unwrap(), links(0.001, bandwidth));
            memory.remember(Seen { strategy, cost, links, terms: None, at: Timestamp(0), doubted: false });
        }
        assert!(review(&mut memory, &links(0.001, 0.9e9), 1.0, true).words().is_none(), "no news");
        let ended = review(&mut memory, &links(0.001, 0.7e9), 1.0, true);
        assert!(ended.words().unwrap().contains("explain"));
        assert_eq!(memory.seen.iter().map(|x| x.links).collect::<Vec<_>>(), [links(0.001, 5e9)]);
        assert_eq!((memory.blocked[0].failures, memory.blocked[0].until), (1, at(1.0)));
        assert_eq!(memory.dwell_waived, Some(Version(2)));
        assert!(review(&mut memory, &links(0.001, 0.1e9), 2.0, true).words().is_none());
        assert_eq!(memory.blocked[0].failures, 1, "taken back twice");
    }

    #[test]
    fn late_reports_clear_no_failure() {
        let mut memory = Memory { dwell_from: Some(at(0.0)), ..Memory::default() };
        let config = Config { block_s: seconds(300.0), ..Config::default() };
        memory.block(failed("topk@0.01/allgather", Scope::Collective), at(0.0), &config);
        assert!(review(&mut memory, &links(0.001, 0.7e9), 121.0, true).words().is_none());
        let ended = review(&mut memory, &links(0.001, 0.49e9), 121.0, true);
        assert!(ended.words().unwrap().contains("other links"));
        assert_eq!((memory.blocked[0].failures, memory.dwell_waived), (1, None));
    }

    /// Estimates follow a change link by link: what stands in between is no network to judge by.
    #[test]
    fn while_links_move_blocks_stand() {
        let mut memory = Memory::default();
        memory.block(failed("topk@0.01/allgather", Scope::Collective), at(0.0), &config());
        memory.note_links(&links(0.001, 1e9), &config(), at(0.0));
        memory.note_links(&links(0.001, 0.1e9), &config(), at(1.0));
        assert!(review(&mut memory, &links(0.001, 0.1e9), 2.9, true).words().is_none());
        assert!(review(&mut memory, &links(0.001, 0.1e9), 3.0, true).words().is_some());
    }

    proptest! {
        /// Steady links twice as fast or slow, in bandwidth or latency, end every block; links that moved by less end none
        /// that they do not explain.
        #[test]
        fn no_block_outlives_its_network(
            now in 0.0..9.9f64, alpha in 0.1..10.0f64, bandwidth in 0.05..20.0f64, scope in 0..3usize, clears: bool
        ) {
            let scope = [Scope::Collective, Scope::Compressor, Scope::Gain][scope];
            let mut memory = Memory::default();
            memory.block(failed("topk@0.01/allgather", scope), at(0.0), &config());
            let strategy = memory.blocked[0].strategy;
            let ended = review(&mut memory, &links(0.001 * alpha, 1e9 * bandwidth), now, clears);
            let moved = |by: f64| [alpha, bandwidth].iter().any(|f| *f >= by || *f <= 1.0 / by);
            let free = moved(2.0) || clears && moved(1.25);
            prop_assert_eq!(memory.blocked(&strategy, at(now)).is_none(), free);
            prop_assert_eq!(ended.words().is_some(), free);
        }

        /// Whatever failed whenever: after rests of twice the longest block nothing is held against it, failures that count never
        /// outnumber those that were, and a block is as long as they say.
        #[test]
        fn failures_decay(rests in prop::collection::vec(0.0..80.0f64, 1..40)) {
            let (mut memory, mut now, config) = (Memory::default(), 0.0, config());
            for (failures, rest) in rests.iter().enumerate() {
                now += rest;
                memory.heal_blocks(at(now), &config);
                let before = memory.blocked.first().map_or(0, |b| b.failures);
                prop_assert!(before as usize <= failures);
                memory.block(failed("topk@0.01/allgather", Scope::Collective), at(now), &config);
                let failures = memory.blocked[0].failures;
                prop_assert_eq!(failures, (before + 1).min(MOST_FAILURES));
                let lasts = (10.0 * 2f64.powi(failures as i32 - 1)).min(25.0);
                prop_assert!((memory.blocked[0].until.since(at(now)).get() - lasts).abs() < 1e-5);
                // From its end on one is forgotten after 25 s at the latest.
                let mut later = memory.clone();
                later.heal_blocks(at(now + lasts + 25.0 + 1e-3), &config);
                prop_assert!(later.blocked.first().map_or(0, |b| b.failures) < failures);
            }
            memory.heal_blocks(at(now + 25.0 + 25.0 * f64::from(MOST_FAILURES) + 1.0), &config);
            prop_assert!(memory.blocked.is_empty());
        }
    }
}
