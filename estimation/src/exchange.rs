//! How long a job waits for its collectives.
//!
//! The exchange of a bucket that has a share s of the gradient takes ((a r + f/L) A + s b B) d. A and B are the latency and bandwidth terms of
//! the strategy's critical path, L is the mean latency, so that A/L is how many messages follow one another, and the rest is believed, in
//! logarithms: a, by how much latencies differ from those that were measured last; b, the seconds per byte of the network; r, how many
//! times a latency counts, and f, what software takes for a message, both the same for all collectives of a job; d, a factor of the
//! collective and of the strategy. What is seen of it is what backward does not hide ([`crate::step`]).
//!
//! Bandwidth belongs to NICs: a link has the slower one of what its sender sends and its receiver receives, each a common part and what
//! the NIC differs by. So one test between two nodes tells of all links after a change.
//!
//! Latencies and tests, as agents measure them, are observations; the job's own steps are, too, and show a change of the network first. A
//! step that is far off is a change of the network and not of the collective. Which of latency and bandwidth it was is known when
//! latencies have been measured since; until then nothing is learned from steps, and samples are those of networks in which the strategy
//! in force takes what it takes. A network that was there before is recognised ([`crate::networks`]): by its latency, or by what steps take
//! where its latency is that of the one that is over.

mod deviations;
mod recent;
mod throughput;

use crate::draws::{DRAWS, Draws};
use crate::joint::{Joint, Normal, Row};
use crate::networks::{self, Network, Networks};
use crate::step::{Cost, Costs, Shape};
use deviations::Deviation;
use flexcomm_domain::{Collective, CompressionRatio, Selector, Strategy};
use recent::Recent;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use throughput::SHORT_SD;
pub use throughput::{TestKind, test_sd};

/// Seconds on the critical path of the exchange of a whole gradient: latencies as measured, bandwidths as expected when it was reckoned.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CriticalPath {
    /// Of latencies alone.
    pub alpha_s: f64,
    /// What the bytes add.
    pub beta_s: f64,
    /// [`Exchange::common`] at that time.
    pub common: f64,
}

/// Logarithm of the seconds that software takes for each message on the critical path: a tenth of a millisecond where processors are free,
/// many milliseconds where ranks wait for one.
const SOFTWARE: Normal = Normal::new(-9.2, 1.5);
/// About the network where nothing is measured since it changed, in logarithms.
const UNKNOWN_SD: f64 = 2.0;
/// Logarithm of a collective's factor,
const OF_COLLECTIVE: Normal = Normal::new(0.1, 0.3);
/// and of one strategy's, besides.
const OF_ONE: Normal = Normal::new(0.0, 0.08);
/// The share of computing in which buckets become ready.
const BACKWARD: Normal = Normal::new(BACKWARD_SHARE, 0.15);
/// Share of computing in which buckets become ready, before it is measured.
pub const BACKWARD_SHARE: f64 = 0.6;
const BACKWARD_RANGE: (f64, f64) = (0.0, 0.95);
/// Of latency: a message may leave only when its receiver has asked for it.
const ROUND_TRIPS: Normal = Normal::new(0.3, 0.4);
/// Least that is seen of an exchange, seconds.
const LEAST_SEEN_S: f64 = 1e-5;
/// By how much the times of computing differ between steps, as a share.
const UNEVEN: f64 = 0.02;
/// Strategies whose own factors are remembered.
const MOST_KNOWN: usize = 24;

/// Measured latencies are off by so much, in logarithms,
const LATENCY_SD: f64 = 0.15;
/// and throughput tests by so much.
const BANDWIDTH_SD: f64 = 0.25;
/// After so long a network that does not change has moved by as much as a test is off, seconds.
pub const TEST_TELLS_S: f64 = BANDWIDTH_SD * BANDWIDTH_SD / WALK;
/// How a network moves without changing: variance per second.
const WALK: f64 = 4e-4;
/// What explains a step is at most so far from what is believed, as a logarithm.
const MOST_SLOWER: f64 = 4.0 * UNKNOWN_SD;
/// Bisections that find it to within 2e-4.
const BISECTIONS: usize = 16;
/// What a NIC differs by from the others.
const OF_NIC: Normal = Normal::new(0.0, 0.4);
const NIC_WALK: f64 = 1e-4;
/// Nodes whose own differences are remembered.
const MOST_NICS: usize = 64;
/// Seconds per byte of 1 Gbit/s.
const GIGABIT: f64 = -18.64;
/// How a job's own factors move: variance per second.
const DRIFT: f64 = 5e-6;
/// By how much what an earlier run of a job has shown may be another now: variance,
const ANOTHER_RUN: f64 = 0.02;
/// and what a job of another size or model has shown.
const ANOTHER_JOB: f64 = 0.04;
/// What software takes depends on what else the processors do: variance, for a later run,
const SOFTWARE_RUN: f64 = 0.25;
/// and for another job.
const SOFTWARE_JOB: f64 = 1.0;
/// A network is known where its latencies and its bandwidth are known to within this standard deviation, in logarithms.
const KNOWN_SD: f64 = 0.3;
/// What is so many standard deviations off is a change.
const CHANGE: f64 = 4.0;
/// Steps of a network that is back take what they took, within this, in logarithms.
const FITS: f64 = 0.15;
#[expect(clippy::large_enum_variant, reason = "a job has some dozens")]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
enum Key {
    /// Logarithm of latencies over those measured last.
    Latency,
    /// Logarithm of seconds per byte, of all NICs alike.
    Bandwidth,
    /// How much slower than that a node sends,
    Up(u32),
    /// or receives.
    Down(u32),
    /// The share of computing in which buckets become ready.
    Backward,
    /// Logarithm of how many times a message's latency counts.
    RoundTrips,
    /// Logarithm of the seconds that software takes for each message.
    Software,
    Collective(Collective),
    One(Collective, Selector, CompressionRatio),
}

/// What steps that took far more or less than expected are put down to.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
enum Cause {
    /// Nothing is unexplained.
    #[default]
    None,
    /// The network, which tests have not shown since.
    Network {
        /// Its bandwidth as it was believed before.
        before: f64,
        /// Whether steps take longer than expected.
        #[serde(default)]
        slower: bool,
        /// Nodes between which tests have found that since.
        same: Vec<u32>,
    },
    /// Tests have found the network as it was: the collective.
    Collective,
}

/// Where waits were seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// In steps of the strategy in force.
    Steps,
    /// In a trial's iterations, beside training on another.
    Trial,
}

/// Samples of what steps wait for, all on the same networks.
#[derive(Debug, Clone)]
pub struct Waits {
    /// Seconds, by plan.
    pub of_plans: Vec<Vec<f64>>,
    /// Logarithms of seconds per byte.
    pub bandwidth: Vec<f64>,
}

/// What is believed of a job's exchanges.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Exchange {
    joint: Joint<Key>,
    /// The mean latency as measured last, seconds.
    latency_s: Option<f64>,
    /// Whether latencies were measured since the network changed.
    confirmed: bool,
    /// Whether the newest steps were not learned from, since latencies were not measured anew yet.
    waiting: bool,
    cause: Cause,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    deviations: Vec<Deviation>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    recent: Vec<Recent>,
    #[serde(skip_serializing_if = "Networks::is_empty")]
    networks: Networks,
    /// Whether the network has changed and was not recognised since.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    is_new: bool,
    /// Logarithm of the latency that two measurements in a row found.
    #[serde(skip_serializing_if = "Option::is_none")]
    settled: Option<f64>,
    /// The same of the network that steps or a test showed to be over, absent where its latency did: another one of that latency is
    /// recognised by what steps take alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    left: Option<f64>,
    /// Logarithm of the seconds per byte that were expected first.
    first: Option<f64>,
}

/// A strategy with the critical path of the whole gradient, and which of several each group of a step's buckets has.
pub type Of = (Strategy, CriticalPath);

fn key_of(strategy: &Strategy) -> Key {
    Key::One(strategy.collective(), strategy.selector(), strategy.cr())
}

impl Exchange {
    /// So many seconds have passed.
    pub fn widen(&mut self, seconds: f64) {
        for at in 0..self.joint.len() {
            match self.joint.keys()[at] {
                Key::Latency | Key::Bandwidth => self.joint.widen(at, WALK * seconds),
                Key::Collective(_) | Key::Backward | Key::RoundTrips | Key::Software => {
                    self.joint.widen(at, DRIFT * seconds);
                }
                Key::One(..) => {}
                Key::Up(_) | Key::Down(_) => self.joint.widen(at, NIC_WALK * seconds),
            }
        }
        self.revert_deviations(seconds);
        self.age_recent(seconds);
    }

    /// What it tells of a later run of the same job: how its collectives behave, and nothing of the network.
    #[must_use]
    pub fn carried_over(mut self) -> Self {
        self.forget_deviations();
        let doubt = |key: &Key| match key {
            Key::Collective(_) | Key::Backward | Key::RoundTrips => Some(ANOTHER_RUN),
            Key::Software => Some(SOFTWARE_RUN),
            Key::One(..) => Some(0.0),
            Key::Latency | Key::Bandwidth | Key::Up(_) | Key::Down(_) => None,
        };
        Self { joint: self.joint.carried_over(doubt), ..Self::default() }
    }

    /// What it tells of a job of another size or model on the same backend: how collectives behave.
    #[must_use]
    pub fn of_another_job(mut self) -> Self {
        self.forget_deviations();
        let doubt = |key: &Key| match key {
            Key::Collective(_) | Key::RoundTrips => Some(ANOTHER_JOB),
            Key::Software => Some(SOFTWARE_JOB),
            _ => None,
        };
        Self { joint: self.joint.carried_over(doubt), ..Self::default() }
    }

    fn network(&mut self) -> [usize; 2] {
        let unknown = |mean| Normal::new(mean, UNKNOWN_SD);
        let (latency, bandwidth) = (unknown(0.0), unknown(self.first.unwrap_or(GIGABIT)));
        [self.joint.place(&Key::Latency, latency), self.joint.place(&Key::Bandwidth, bandwidth)]
    }

    /// Takes in the mean latency as it is measured now, and whether it was measured since the network changed. Answers whether it has
    /// changed.
    pub fn latency(&mut self, alpha_s: f64, since_change: bool) -> bool {
        if !(alpha_s > 0.0 && alpha_s.is_finite()) {
            return false;
        }
        let [latency, bandwidth] = self.network();
        let known = self.network_now();
        let before = self.latency_s.replace(alpha_s);
        let later = before.map_or(0.0, |before| (alpha_s / before).ln());
        // Where links change one after the other, their mean passes through what is the latency of no network.
        let is_settled = later != 0.0 && networks::is_same_latency(later, 0.0);
        if is_settled || before.is_none() {
            self.settled = Some(alpha_s.ln());
        }
        let news = later != 0.0 || before.is_none() || since_change && !self.confirmed;
        if !news {
            return false;
        }
        self.confirmed |= since_change || before.is_none();
        self.joint.shift(latency, -later);
        let far = self.is_far((latency, LATENCY_SD));
        if far {
            self.cause = Cause::None;
            self.forget_deviations();
            self.leave(known);
            (self.left, self.settled) = (None, self.settled.filter(|_| is_settled));
            self.joint.forget(latency, UNKNOWN_SD);
            // Bandwidth was measured on the network before.
            self.joint.widen(bandwidth, 1.0);
        }
        self.joint.observe(&[(latency, 1.0)], Normal::new(0.0, LATENCY_SD));
        let is_another = self.left.is_none_or(|left| !networks::is_same_latency(left, alpha_s.ln()));
        if self.is_new && is_settled && is_another && self.joint.of(bandwidth).sd > KNOWN_SD {
            // Not against what tests have found since.
            let believed = self.joint.of(bandwidth);
            self.recognise(|other| (other.bandwidth.mean - believed.mean).abs() < CHANGE * believed.sd);
        }
        far && before.is_some()
    }

    /// The network as it is, where it is known.
    fn network_now(&mut self) -> Option<Network> {
        let is_known = self.confirmed && self.knows_network();
        let latency = self.settled.filter(|_| is_known)?;
        let [_, bandwidth] = self.network();
        Some(Network { latency, bandwidth: self.joint.of(bandwidth) })
    }

    /// It is another from now on.
    fn leave(&mut self, known: Option<Network>) {
        self.undo_recent();
        if let Some(known) = known {
            self.networks.remember(known);
        }
        if known.is_some() || !self.is_new {
            (self.is_new, self.left) = (true, self.settled);
        }
    }

    /// Whether one of those that were seen before and pass is back, by its latency; its bandwidth is believed then.
    fn recognise(&mut self, passes: impl Fn(&Network) -> bool) -> bool {
        let recalled = self.settled.and_then(|latency| self.networks.recall(latency, passes));
        let Some(recalled) = recalled else { return false };
        let [_, bandwidth] = self.network();
        self.joint.forget(bandwidth, UNKNOWN_SD);
        self.joint.observe(&[(bandwidth, 1.0)], recalled);
        self.is_new = false;
        true
    }

    /// What is expected of the first network: seconds per byte.
    pub fn begin(&mut self, beta: f64) {
        if beta > 0.0 && beta.is_finite() {
            self.first.get_or_insert(beta.ln());
        }
    }

    /// Takes in a throughput test from one node to another: seconds per byte, and what it tells. Answers whether the network has changed.
    pub fn test(&mut self, (from, to): (u32, u32), beta: f64, kind: TestKind) -> bool {
        if !(beta > 0.0 && beta.is_finite()) {
            return false;
        }
        let (up, down) = (Key::Up(from), Key::Down(to));
        self.joint.place_among(&up, OF_NIC, |key| matches!(key, Key::Up(_)), MOST_NICS);
        self.joint.place_among(&down, OF_NIC, |key| matches!(key, Key::Down(_)), MOST_NICS);
        // What is forgotten for them moves the places of others.
        let [_, common] = self.network();
        let (up, down) = (self.joint.place(&up, OF_NIC), self.joint.place(&down, OF_NIC));
        let (slower_up, slower_down) = (self.joint.of(up), self.joint.of(down));
        let difference = (slower_up.mean - slower_down.mean) / slower_up.sd.hypot(slower_down.sd).max(1e-9);
        let row = match difference {
            x if x > 1.0 => vec![(common, 1.0), (up, 1.0)],
            x if x < -1.0 => vec![(common, 1.0), (down, 1.0)],
            _ => vec![(common, 1.0), (up, 0.5), (down, 0.5)],
        };
        let believed = self.joint.sum(&row);
        let of_nics = believed.mean - self.joint.of(common).mean;
        let is_lower_bound = kind == TestKind::LowerBound;
        if is_lower_bound && beta.ln() >= believed.mean {
            // That a link is at least so fast is no news where it is believed to be faster.
            self.explain((from, to), beta.ln() - of_nics, true);
            return false;
        }
        let kind = match kind {
            // All of them are off alike: what they tell is learned once, but a token bucket makes no link look slower.
            TestKind::Short if believed.sd <= SHORT_SD => match beta.ln() > believed.mean + BANDWIDTH_SD {
                true => TestKind::Whole,
                false => return false,
            },
            kind => kind,
        };
        let seen = Normal::new(beta.ln(), kind.sd());
        let far = self.joint.is_far(&row, seen, CHANGE);
        if far {
            let known = self.network_now();
            self.forget_deviations();
            self.leave(known);
            self.joint.forget(common, UNKNOWN_SD);
            for at in [up, down] {
                self.joint.widen(at, OF_NIC.sd * OF_NIC.sd);
            }
        }
        self.joint.observe(&row, seen);
        if kind != TestKind::Short {
            self.explain((from, to), beta.ln() - of_nics, is_lower_bound);
        }
        far
    }

    /// Seconds per byte from one node to another, as expected, given the numbers of so many nodes.
    pub fn betas(&mut self, nodes: usize) -> impl Fn(usize, usize) -> f64 + use<> {
        let common = self.common().ln();
        let of = |key: Key| self.joint.find(&key).map_or(0.0, |at| self.joint.of(at).mean);
        let slower: Vec<(f64, f64)> = (0..nodes as u32).map(|node| (of(Key::Up(node)), of(Key::Down(node)))).collect();
        move |from, to| (common + slower[from].0.max(slower[to].1)).exp()
    }

    /// Seconds per byte that all NICs have in common, as expected.
    pub fn common(&mut self) -> f64 {
        let [_, common] = self.network();
        self.joint.of(common).mean.exp()
    }

    fn is_far(&self, (at, sd): (usize, f64)) -> bool {
        self.joint.is_far(&[(at, 1.0)], Normal::new(0.0, sd), CHANGE)
    }

    /// Takes in what steps waited for their exchange, of which each group of the shape's buckets had one of these strategies. Answers
    /// whether the network has changed.
    pub fn steps(&mut self, of: &[Of], by_group: &[usize], shape: &Shape, seen: &Seen) -> bool {
        self.waited(of, by_group, shape, seen, Source::Steps)
    }

    fn waited(&mut self, of: &[Of], by_group: &[usize], shape: &Shape, seen: &Seen, source: Source) -> bool {
        let paths = || of.iter().map(|(_, path)| *path);
        let numbers = paths().flat_map(|path| [path.alpha_s, path.beta_s]).chain(seen.compress_s.iter().copied());
        let usable = numbers.chain([seen.seconds, seen.sd, shape.compute.median_s]).all(|v| v.is_finite() && v >= 0.0);
        let has_all = seen.compress_s.len() == of.len() && by_group.iter().all(|of_group| *of_group < of.len());
        if !usable || !has_all || paths().all(|path| path.alpha_s + path.beta_s == 0.0) {
            return false;
        }
        // A trial that finds what is expected leaves nothing behind: no factor of what steps have shown is given up for it.
        let before_trial = (source == Source::Trial).then(|| self.joint.clone());
        for (strategy, _) in of {
            self.joint.place_among(&key_of(strategy), OF_ONE, |key| matches!(key, Key::One(..)), MOST_KNOWN);
        }
        let places: Vec<Places> = of.iter().map(|(strategy, _)| self.places(strategy)).collect();
        let floor_s = floor_s(shape);
        let compress_s = &seen.compress_s;
        let seen = {
            let seconds = seen.seconds + floor_s;
            Normal::new(seconds.ln(), seen.sd.hypot(floor_s / seconds))
        };
        let logarithm = |at: &[f64]| {
            let factors = |place: &Places| place.factors(place.own.map_or(0.0, |own| at[own]), |i| at[i]);
            let each = places.iter().zip(of).zip(compress_s);
            let costs: Vec<Cost> =
                each.map(|((place, (_, path)), compress_s)| factors(place).cost(*path, *compress_s)).collect();
            (shape.exposed(backward_s(shape.compute.median_s, at[places[0].backward]), |group| costs[by_group[group]])
                + floor_s)
                .ln()
        };
        let mut all: Vec<usize> = places.iter().flat_map(Places::all).collect();
        all.sort_unstable();
        all.dedup();
        let around = |at: &[f64]| derived(&logarithm, &all, at);
        let mut learned = self.joint.clone();
        let off = learned.observe_along(places[0].software, seen, around);
        let far = off.abs() > CHANGE;
        let of_trial = source == Source::Trial;
        if let Some(before) = before_trial.filter(|_| !far) {
            self.joint = before;
            return false;
        }
        let collectives: BTreeSet<Collective> = of.iter().map(|(strategy, _)| strategy.collective()).collect();
        // One that is tried again after it has deviated does so again.
        let knows_network = self.knows_network();
        let again = self.confirmed
            && knows_network
            && self.deviations.iter().any(|of| !of.runs && collectives.contains(&of.collective));
        // One that deviated takes what is usual again.
        let is_usual_again = || {
            let mut at = self.joint.means();
            let deviating = |of: &Of| self.deviations.iter().any(|deviation| deviation.collective == of.0.collective());
            let deviating: Vec<usize> =
                places.iter().zip(of).filter(|(_, of)| deviating(of)).map(|(place, _)| place.collective).collect();
            deviating.iter().for_each(|place| at[*place] = OF_COLLECTIVE.mean);
            !deviating.is_empty() && (logarithm(&at) - seen.mean).abs() < CHANGE * seen.sd.hypot(OF_COLLECTIVE.sd)
        };
        let is_collective = || {
            let explained = self.explains(&places[0], &logarithm, seen.mean);
            of_trial || self.cause == Cause::Collective || !explained || again || is_usual_again()
        };
        let collective = far && is_collective();
        // Until latencies have been measured anew it is one change, however far off steps still are.
        let same = !self.confirmed && matches!(self.cause, Cause::Network { .. });
        // What is not known and has been measured anew is learned from whatever steps take.
        let learns = self.confirmed && !knows_network;
        if collective {
            if !of_trial {
                self.cause = Cause::None;
            }
            collectives.iter().for_each(|collective| self.deviates(*collective));
        } else if far && !learns {
            let [latency, bandwidth] = self.network();
            let known = self.network_now();
            if !matches!(self.cause, Cause::Network { .. }) {
                let (before, slower) = (self.joint.of(bandwidth).mean, off > 0.0);
                self.cause = Cause::Network { before, slower, same: Vec::new() };
            }
            self.leave(known);
            let at = self.joint.means();
            // One that was seen before, of the same latency, on which steps take what they take?
            let fits = |other: &Network| {
                let mut at = at.clone();
                (at[latency], at[bandwidth]) = (0.0, other.bandwidth.mean);
                let is_left = known.is_some_and(|known| known.is_same(other));
                !is_left && (logarithm(&at) - seen.mean).abs() < FITS + 2.0 * seen.sd
            };
            self.joint.forget(latency, UNKNOWN_SD);
            if self.confirmed && self.recognise(fits) {
                self.joint.observe(&[(latency, 1.0)], Normal::new(0.0, LATENCY_SD));
            } else {
                self.joint.forget(bandwidth, UNKNOWN_SD);
                self.confirmed = false;
            }
        } else if self.cause == Cause::Collective && !of_trial {
            self.cause = Cause::None;
        }
        // Which of the two it was is known once latencies have been measured anew.
        self.waiting = if of_trial { self.waiting } else { !self.confirmed };
        if self.confirmed {
            if !of_trial {
                self.note_recent(&collectives);
            }
            if far {
                self.joint.observe_along(places[0].software, seen, around);
            } else {
                self.joint = learned;
            }
            self.end_deviations(&collectives);
        }
        if !of_trial {
            self.deviations
                .iter_mut()
                .for_each(|deviation| deviation.runs = collectives.contains(&deviation.collective));
        }
        far && !collective && !same && !learns
    }

    /// Takes in what a trial's iterations waited for the exchange of a strategy, beside training on another: where that is far from what
    /// is believed, it is the collective. It says nothing else, as so few iterations tell less than steps, nor of a network that is not known.
    pub fn trial(&mut self, of: &Of, shape: &Shape, seen: &Seen) {
        if self.confirmed && self.knows_network() {
            self.waited(std::slice::from_ref(of), &vec![0; shape.shares().len()], shape, seen, Source::Trial);
        }
    }

    /// Whether steps wait for so long on any network, however slow or fast; `logarithm` of what they wait, by the values of all quantities.
    fn explains(&self, places: &Places, logarithm: &impl Fn(&[f64]) -> f64, seen: f64) -> bool {
        let on = |slower: f64| {
            let mut at = self.joint.means();
            at[places.latency] += slower;
            at[places.bandwidth] += slower;
            logarithm(&at)
        };
        (on(-MOST_SLOWER)..on(MOST_SLOWER)).contains(&seen)
    }

    fn places(&mut self, strategy: &Strategy) -> Places {
        let [latency, bandwidth] = self.network();
        Places {
            latency,
            bandwidth,
            backward: self.joint.place(&Key::Backward, BACKWARD),
            round_trips: self.joint.place(&Key::RoundTrips, ROUND_TRIPS),
            software: self.joint.place(&Key::Software, SOFTWARE),
            latency_s: self.latency_s.unwrap_or(f64::INFINITY),
            collective: self.joint.place(&Key::Collective(strategy.collective()), OF_COLLECTIVE),
            own: self.joint.find(&key_of(strategy)),
        }
    }

    /// What steps wait for their exchange, in samples of each plan: which of these strategies each group of the shape's buckets has.
    /// `compute_s` is what forward and backward take, in samples, `compress_s` compressing a whole gradient, in samples of each strategy.
    ///
    /// Where the network is not known since it changed, the samples are those in which `in_force` (which of the plans, and the seconds
    /// that its steps wait) takes what it takes.
    pub fn sampled(
        &mut self,
        of: &[Of],
        plans: &[Vec<usize>],
        (shape, compute_s, compress_s): (&Shape, &[f64], &[&[f64]]),
        in_force: Option<(usize, f64)>,
        (draws, from): (&Draws, usize),
    ) -> Waits {
        let in_force = in_force.filter(|_| !self.knows_network());
        let places: Vec<_> = of.iter().map(|(strategy, _)| self.places(strategy)).collect();
        let Some(any) = places.first().copied() else {
            return Waits { of_plans: vec![vec![0.0; DRAWS]; plans.len()], bandwidth: vec![0.0; DRAWS] };
        };
        let samples = self.joint.samples(draws, from);
        let backward_s: Vec<f64> = samples[any.backward]
            .iter()
            .zip(compute_s)
            .map(|(share, compute_s)| backward_s(*compute_s, *share))
            .collect();
        // All strategies see the same network.
        let mut network: Vec<Factors> = (0..DRAWS).map(|k| any.factors(0.0, |at| samples[at][k])).collect();
        let factor = |(i, places): (usize, &Places)| -> Vec<f64> {
            let own = |k: usize| match places.own {
                Some(own) => samples[own][k],
                None => OF_ONE.sd * draws.row(from + samples.len() + i)[k],
            };
            (0..DRAWS).map(|k| (samples[places.collective][k] + own(k)).exp()).collect()
        };
        let factors: Vec<Vec<f64>> = places.iter().enumerate().map(factor).collect();
        if let Some((i, seen_s)) = in_force {
            let (plan, least_s) = (&plans[i], floor_s(shape));
            for (k, network) in network.iter_mut().enumerate() {
                let waits_s = |slower: f64| {
                    let on = network.slower(slower);
                    shape.exposed(backward_s[k], |group| {
                        let i = plan[group];
                        Factors { collective: factors[i][k], ..on }.cost(of[i].1, compress_s[i][k])
                    })
                };
                let slower = slower(waits_s, seen_s.max(least_s));
                // Of waits that are noise it is known that they are no longer.
                *network = network.slower(if seen_s <= least_s { slower.min(1.0) } else { slower });
            }
        }
        let costs = |(i, (_, path)): (usize, &Of)| -> Costs<'_> {
            let each = network.iter().zip(&factors[i]);
            let each = each.map(|(on, factor)| Factors { collective: *factor, ..*on }.cost(*path, 0.0));
            let (each_s, all_s) = each.map(|cost| (cost.each_s, cost.all_s)).unzip();
            Costs { each_s, all_s, compress_s: compress_s[i] }
        };
        let costs: Vec<Costs<'_>> = of.iter().enumerate().map(costs).collect();
        let sample = |plan: &Vec<usize>| -> Vec<f64> {
            if plan.iter().all(|i| of[*i].1.alpha_s + of[*i].1.beta_s <= 0.0) {
                return vec![0.0; DRAWS];
            }
            shape.exposed_samples(&backward_s, |group| &costs[plan[group]])
        };
        Waits {
            of_plans: plans.iter().map(sample).collect(),
            bandwidth: network.iter().map(|on| on.bandwidth.ln()).collect(),
        }
    }

    /// What the exchange of a whole gradient takes by each strategy, and the seconds in which the shape's buckets become ready, as
    /// expected.
    pub fn expected(&mut self, of: &[Of], shape: &Shape) -> (Vec<Cost>, f64) {
        let places: Vec<Places> = of.iter().map(|(strategy, _)| self.places(strategy)).collect();
        let at = self.joint.means();
        let cost = |(place, (_, path)): (&Places, &Of)| {
            place.factors(place.own.map_or(0.0, |own| at[own]), |i| at[i]).cost(*path, 0.0)
        };
        let backward = places.first().map_or(BACKWARD.mean, |place| at[place.backward]);
        (places.iter().zip(of).map(cost).collect(), backward_s(shape.compute.median_s, backward))
    }

    /// Keeps what is stored of it: numbers of single precision.
    pub fn round(&mut self) {
        self.joint.round();
        self.networks.round();
    }

    /// How many rows of draws [`Self::sampled`] takes for so many strategies.
    pub fn rows(&self, strategies: usize) -> usize {
        self.joint.len() + strategies
    }

    /// Whether latencies and bandwidths are known since they changed last.
    pub fn knows_network(&mut self) -> bool {
        self.network_sd() < KNOWN_SD
    }

    /// The larger standard deviation of latencies and bandwidth, in logarithms.
    fn network_sd(&mut self) -> f64 {
        self.network().map(|at| self.joint.of(at).sd).into_iter().fold(0.0, f64::max)
    }

    /// Whether the newest steps can be learned from now and could not be when they were taken in.
    pub fn wants_steps(&self) -> bool {
        self.waiting && self.confirmed
    }

    /// Whether steps have shown that the network changed, and no test has confirmed it since.
    pub fn network_suspected(&self) -> bool {
        matches!(self.cause, Cause::Network { .. })
    }
}

/// Where the quantities are that one strategy's exchange depends on.
#[derive(Debug, Clone, Copy)]
struct Places {
    latency: usize,
    bandwidth: usize,
    backward: usize,
    round_trips: usize,
    software: usize,
    collective: usize,
    own: Option<usize>,
    /// The mean latency as measured, of which a critical path has so many.
    latency_s: f64,
}

impl Places {
    fn all(&self) -> Vec<usize> {
        let mut all =
            vec![self.latency, self.bandwidth, self.backward, self.round_trips, self.software, self.collective];
        all.extend(self.own);
        all
    }

    /// Where quantities have these values.
    fn factors(&self, own: f64, value: impl Fn(usize) -> f64) -> Factors {
        Factors {
            collective: (value(self.collective) + own).exp(),
            latency: (value(self.latency) + value(self.round_trips)).exp(),
            software: value(self.software).exp() / self.latency_s,
            bandwidth: value(self.bandwidth).exp(),
        }
    }
}

/// What one strategy's exchange depends on, as factors.
#[derive(Debug, Clone, Copy)]
struct Factors {
    /// Of all of it.
    collective: f64,
    /// Of latencies as measured.
    latency: f64,
    /// What software takes for a message, in latencies as measured.
    software: f64,
    /// Seconds per byte.
    bandwidth: f64,
}

impl Factors {
    /// On a network that is so many times slower.
    fn slower(&self, times: f64) -> Self {
        Self { latency: self.latency * times, bandwidth: self.bandwidth * times, ..*self }
    }

    /// What the exchange of a whole gradient takes.
    fn cost(&self, path: CriticalPath, compress_s: f64) -> Cost {
        Cost {
            each_s: self.collective * path.alpha_s * (self.latency + self.software),
            all_s: self.collective * path.beta_s * self.bandwidth / path.common,
            compress_s,
        }
    }
}

/// How many times slower a network has to be for steps to wait for so long, by bisection; as it is where none explains that.
fn slower(waits_s: impl Fn(f64) -> f64, seen_s: f64) -> f64 {
    let (mut low, mut high) = (-MOST_SLOWER, MOST_SLOWER);
    if !(waits_s(low.exp()) < seen_s && seen_s < waits_s(high.exp())) {
        return 1.0;
    }
    for _ in 0..BISECTIONS {
        let middle = 0.5 * (low + high);
        if waits_s(middle.exp()) < seen_s { low = middle } else { high = middle }
    }
    (0.5 * (low + high)).exp()
}

/// What a step waits is the end of its exchange less that of computing, each of which varies: less than this is noise.
fn floor_s(shape: &Shape) -> f64 {
    LEAST_SEEN_S + UNEVEN * shape.compute.median_s
}

/// Seconds in which buckets become ready, which is this share of computing.
fn backward_s(compute_s: f64, share: f64) -> f64 {
    share.clamp(BACKWARD_RANGE.0, BACKWARD_RANGE.1) * compute_s
}

/// Step of numerical derivatives.
const STEP: f64 = 1e-3;

/// The derivatives of a function by some quantities, and its value.
fn derived(of: &impl Fn(&[f64]) -> f64, by: &[usize], at: &[f64]) -> (Row, f64) {
    let mut moved = at.to_vec();
    let mut slope = |i: usize| {
        let mut shifted = |by: f64| {
            moved[i] = at[i] + by;
            let value = of(&moved);
            moved[i] = at[i];
            value
        };
        (shifted(STEP) - shifted(-STEP)) / (2.0 * STEP)
    };
    (by.iter().map(|i| (*i, slope(*i))).collect(), of(at))
}

/// What steps showed.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    /// Seconds that they waited.
    pub seconds: f64,
    /// Their noise, in logarithms.
    pub sd: f64,
    /// Seconds that compressing a whole gradient takes by each strategy.
    pub compress_s: Vec<f64>,
}

#[cfg(test)]
mod tests;
