//! What is believed of a job: fed by every snapshot, asked for samples of what each candidate costs.

use crate::memory::LinkSummary;
use crate::{Measured, PolicyConfig, Snapshot};
use flexcomm_domain::{Collective, CompressionRatio, Gain, Link, LinkMatrix, Seconds, Selector, Strategy, Timestamp};
use flexcomm_estimation::exchange::Seen;
use flexcomm_estimation::gains::Assumed;
use flexcomm_estimation::{Changes, CompressTimes, CriticalPath, DRAWS, Draws, Exchange, Gains, Shape};
use flexcomm_optimizer::{Evaluated, Evaluator, Problem, Quality, Times, known_gain, selected_by_one};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Estimates of latencies follow a change within so many seconds.
const LATENCIES_FOLLOW_S: f64 = 3.0;
/// Half of a live trial's iterations: for how long its residuals have filled, in the mean.
const TRIAL_STEPS: f64 = 0.5 * crate::TRIAL_ITERATIONS as f64;
/// For how long those of shadow trials have.
const SHADOW_STEPS: f64 = 60.0;
/// A step's median over few steps is off by so much, as a share; over many by less.
const STEP_NOISE: f64 = 0.08;
const TRIAL_GAIN_NOISE: f64 = 0.05;
const TRIAL_TIME_NOISE: f64 = 0.1;
/// Longest time that beliefs widen by between two snapshots: a controller that was away for longer has restarted.
const MOST_PASSED_S: f64 = 60.0;
/// Links claim another network where their step takes so many times the longest of the newest steps: the cost model is off by less,
/// token buckets and shared memory included.
const CONTRADICTION: f64 = 4.0;
/// Longest time that a candidate is priced with, seconds: a month per step is as bad as any more.
const LONGEST_S: f64 = 2.6e6;
/// Fewer steps contradict nothing.
const LEAST_STEPS: u64 = 10;

/// What is believed of a job.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Beliefs {
    at: Option<Timestamp>,
    exchange: Exchange,
    gains: Gains,
    compress: CompressTimes,
    changes: Changes,
    /// Points of trials that were observed.
    tried: Vec<(Selector, CompressionRatio, Gain)>,
    /// The newest steps that were observed.
    steps: Option<Measured>,
    /// When the newest test was reported that was observed.
    tested: Option<Timestamp>,
}

/// A candidate with samples of what it costs.
#[derive(Debug, Clone)]
pub(crate) struct Priced {
    /// At the medians.
    pub(crate) what: Evaluated,
    /// What a step waits for the collective by the cost model alone.
    pub(crate) model_sync: Seconds,
    /// What the policy minimises, by sample; empty where it does not admit the candidate.
    pub(crate) scores: Vec<f64>,
    /// Their mean; infinite where it is not admitted.
    pub(crate) mean: f64,
}

impl Beliefs {
    /// Observes what is new in a snapshot of a job whose strategy has been in force for `stayed_s`.
    pub(crate) fn observe(&mut self, s: &Snapshot, now: Timestamp, stayed_s: f64) {
        let passed_s = self.at.replace(now).map_or(0.0, |at| now.since(at).get()).min(MOST_PASSED_S);
        self.exchange.widen(passed_s);
        self.gains.widen(passed_s);
        self.compress.widen(passed_s);
        self.changes.watch(passed_s);
        if self.observe_links(s, now) {
            self.observe_strategies(s, now, stayed_s);
        }
        self.round();
    }

    /// As it is stored, so that what is decided again from that is the same.
    fn round(&mut self) {
        self.exchange.round();
        self.gains.round();
        self.compress.round();
    }

    pub(crate) fn clamp_times(&mut self, now: Timestamp) {
        for at in [&mut self.at, &mut self.tested] {
            *at = at.map(|t| t.min(now));
        }
        self.changes.clamp_times(now);
    }

    /// Latencies and throughput tests. Answers whether there are links at all.
    fn observe_links(&mut self, s: &Snapshot, now: Timestamp) -> bool {
        let Some(links) = &s.links else { return false };
        let last = self.changes.last();
        let since_change = last.is_none_or(|at| now.since(at).get() > links.age.get() + LATENCIES_FOLLOW_S);
        let summary = LinkSummary::of(&links.matrix);
        if self.exchange.latency(summary.alpha_mean_s, since_change) {
            self.changes.note(now);
        }
        self.exchange.begin(8.0 / summary.bandwidth_mean_bps);
        let newest = self.tested;
        for test in links.tests.iter().filter(|test| newest.is_none_or(|at| test.at > at)) {
            self.tested = self.tested.max(Some(test.at));
            if self.exchange.test(test.from, test.to, test.bandwidth.beta()) {
                self.changes.note(now);
            }
        }
        true
    }

    /// What trials found, and what the newest steps took and kept.
    fn observe_strategies(&mut self, s: &Snapshot, now: Timestamp, stayed_s: f64) {
        let Some(problem) = self.problem(s) else { return };
        let evaluator = Evaluator::new(&problem);
        self.observe_trials(s, &evaluator);
        let is_new = |m: &&Measured| Some(*m) != self.steps.as_ref() || self.exchange.wants_steps();
        let Some(m) = s.measured_now().filter(is_new).copied() else { return };
        self.steps = Some(m);
        let strategy = s.strategy();
        let Ok(evaluated) = evaluator.evaluate(&strategy) else { return };
        let few = (1.0 + 4.0 / m.steps as f64).sqrt();
        let seen = Seen { seconds: m.t_sync.get(), sd: STEP_NOISE * few, compress_s: m.t_comp.get() };
        let path = path(&evaluated, self.exchange.common());
        if self.exchange.steps(&strategy, path, &shape(s), seen) {
            self.changes.note(now);
        }
        if strategy.is_dense() {
            return;
        }
        let of = (strategy.selector(), strategy.cr());
        let table_s = table(s).t_comp(of.0, of.1, size(s));
        self.compress.observe(of, m.t_comp.get(), table_s, STEP_NOISE * few);
        let assumed = assumed(evaluated.gain.get(), s.ranks);
        let noise = m.gain_spread.max(0.03) * few;
        self.gains.observe(of, assumed, m.gain.get(), stayed_s / m.t_step.get().max(1e-6), noise);
    }

    fn observe_trials(&mut self, s: &Snapshot, evaluator: &Evaluator<'_>) {
        let (size, times) = (size(s), table(s));
        for (selector, profile) in &s.profiles.by_selector {
            for point in profile.points() {
                let found = (*selector, point.cr, point.gain);
                if self.tried.contains(&found) {
                    continue;
                }
                let of = (*selector, point.cr);
                self.tried.retain(|(selector, cr, _)| (*selector, *cr) != of);
                self.tried.push(found);
                let Some(strategy) = any_of(of) else { continue };
                let filled = if s.profiles.long_run { SHADOW_STEPS } else { TRIAL_STEPS };
                let fixed = evaluator.evaluate(&strategy).map_or(0.5, |e| e.gain.get());
                let assumed = assumed(fixed, s.ranks);
                self.gains.observe(of, assumed, point.gain.get(), filled, TRIAL_GAIN_NOISE);
                self.compress.observe(of, point.t_comp_s, times.t_comp(*selector, point.cr, size), TRIAL_TIME_NOISE);
            }
        }
    }

    /// Seconds to the next change of the network, as expected.
    pub(crate) fn lasts_s(&self) -> f64 {
        self.changes.next_in_s()
    }

    /// For how long the network has been as it is, seconds.
    pub(crate) fn unchanged_s(&self, now: Timestamp) -> f64 {
        self.changes.last().map_or(self.changes.watched_s(), |at| now.since(at).get())
    }

    /// Whether latencies and bandwidths are known since they changed last: what is not will be measured soon.
    pub(crate) fn knows_network(&mut self) -> bool {
        self.exchange.knows_network()
    }

    /// Whether steps have shown that the network changed, and no test has confirmed it since.
    pub(crate) fn network_suspected(&self) -> bool {
        self.exchange.network_suspected()
    }

    /// The optimizer's problem over links of the latencies that are measured and the bandwidths that are believed.
    fn problem(&mut self, s: &Snapshot) -> Option<Problem> {
        let links = s.links.as_ref()?;
        let node = |rank: usize| links.nodes.get(rank).copied().unwrap_or(rank as u32);
        let matrix = LinkMatrix::from_fn(links.matrix.ranks(), |from, to| {
            let measured = links.matrix.get(from, to);
            if from == to || node(from) == node(to) {
                return measured;
            }
            let beta = self.exchange.beta(node(from), node(to));
            Link::new(measured.alpha.get(), 8.0 / beta).unwrap_or(measured)
        });
        Some(s.problem(&matrix.ok()?, BTreeMap::new()))
    }

    /// The strategies with samples of their price; one whose time leaves the range of a duration is left out.
    pub(crate) fn price(&mut self, s: &Snapshot, strategies: &[Strategy]) -> Vec<Priced> {
        let Some(problem) = self.problem(s) else { return Vec::new() };
        let evaluator = Evaluator::new(&problem);
        let all: Vec<Evaluated> = strategies.iter().filter_map(|x| evaluator.evaluate(x).ok()).collect();
        let compressors: Vec<_> = all.iter().map(|e| (e.strategy.selector(), e.strategy.cr())).collect();
        let draws = Draws::shared();
        let mut comp = self.compress.sampled(&compressors, draws, 0);
        let times = table(s);
        for (samples, (selector, cr)) in comp.iter_mut().zip(&compressors) {
            let table_s = if selector.family.is_none() { 0.0 } else { times.t_comp(*selector, *cr, size(s)) };
            samples.iter_mut().for_each(|factor| *factor *= table_s);
        }
        let from = self.compress.rows(all.len());
        let common = self.exchange.common();
        let paths: Vec<_> = all.iter().map(|e| (e.strategy, path(e, common))).collect();
        let waits_s = self.steps.filter(|m| m.version == s.version()).map(|m| m.t_sync.get());
        let in_force = all.iter().position(|e| e.strategy == s.strategy()).zip(waits_s);
        let sync = self.exchange.sampled(&paths, (&shape(s), &comp), in_force, draws, from);
        let from = from + self.exchange.rows(all.len());
        let of: Vec<_> = all.iter().zip(&compressors).map(|(e, of)| (*of, assumed(e.gain.get(), s.ranks))).collect();
        let gains = self.gains.sampled(&of, draws, from);
        self.round();
        let each = all.into_iter().zip(comp).zip(sync).zip(gains);
        each.map(|(((e, comp), sync), gains)| priced(s, e, [&comp, &sync, &gains])).collect()
    }

    /// The step that the links claim for the strategy in force, where its newest steps show a network that is far faster: then one of
    /// them is wrong, and it is not the steps.
    pub(crate) fn contradicted(s: &Snapshot) -> Option<Seconds> {
        let (links, m) = (s.links.as_ref()?, s.measured_now()?);
        let scatter = m.scatter.filter(|_| m.steps >= LEAST_STEPS)?;
        let problem = s.problem(&links.matrix, BTreeMap::new());
        let claimed = Evaluator::new(&problem).evaluate(&s.strategy()).ok()?;
        let unfitted_s = problem.compute.get() + claimed.terms.alpha_s + claimed.terms.beta_s;
        let longest_s = CONTRADICTION * scatter.step_high.get();
        (claimed.t_step.get() > longest_s && unfitted_s > longest_s).then_some(claimed.t_step)
    }
}

/// A candidate of these samples: seconds of compressing, of waiting, and gains.
fn priced(s: &Snapshot, model: Evaluated, [comp, sync, gains]: [&[f64]; 3]) -> Priced {
    let (strategy, ranks) = (model.strategy, s.ranks as usize);
    let compute = s.compute.unwrap_or(Seconds::ZERO);
    let known = strategy.is_dense() || known_gain(strategy.family()).is_some();
    let seconds = |v: f64| Seconds::new(v.min(LONGEST_S)).unwrap_or(Seconds::ZERO);
    let quality = |gain: f64| match known {
        true => model.quality(),
        false => Quality::of(&strategy, Gain::new(gain.clamp(1e-6, 1.0)).unwrap_or(Gain::FULL), ranks),
    };
    let at = |comp: f64, sync: f64, gain: f64| {
        let Quality { gain, variance, .. } = quality(gain);
        let t_step = seconds(compute.get() + comp + sync);
        Evaluated { t_comp: seconds(comp), t_sync: seconds(sync), t_step, gain, variance, ..model.clone() }
    };
    // Factors of a matrix keep little of the gradient, most of which is noise. What they keep less than is usual is not noise: a
    // residual that another compressor has left, above all.
    let (exponent, low_rank) = (s.config.policy.time_to_quality().exponent(), strategy.spec().rank().is_some());
    let missing = |gain: f64| match low_rank {
        true => (model.gain.get() / gain.clamp(1e-6, 1.0)).max(1.0).powf(exponent),
        false => 1.0,
    };
    let score = |comp: f64, sync: f64, gain: f64| {
        let score = match &s.config.policy {
            // By far the most calls, and all of a score but the time and the steps is the same for all samples.
            PolicyConfig::TimeToQuality(_) if known => (compute.get() + comp + sync) * model.quality().steps(exponent),
            PolicyConfig::TimeToQuality(_) => (compute.get() + comp + sync) * quality(gain).steps(exponent),
            other => other.policy().score(&at(comp, sync, gain), compute).unwrap_or(f64::INFINITY),
        };
        score * missing(gain)
    };
    // Times that are hardly known are log-normal, and their mean is that of the tail.
    let what = at(median(comp), median(sync), median(gains));
    let admitted = s.config.policy.policy().score(&what, compute).is_some_and(f64::is_finite);
    let scores: Vec<f64> = match admitted {
        true => (0..DRAWS).map(|k| score(comp[k], sync[k], gains[k])).collect(),
        false => Vec::new(),
    };
    let mean = if admitted { mean(&scores) } else { f64::INFINITY };
    Priced { model_sync: model.t_sync, mean, scores, what }
}

fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len().max(1) as f64
}

fn median(x: &[f64]) -> f64 {
    let mut sorted = x.to_vec();
    let middle = sorted.len() / 2;
    *sorted.select_nth_unstable_by(middle, f64::total_cmp).1
}

fn path(of: &Evaluated, common: f64) -> CriticalPath {
    CriticalPath { alpha_s: of.terms.alpha_s, beta_s: of.terms.beta_s, common }
}

fn size(s: &Snapshot) -> (u64, usize) {
    (s.gradient_values, s.ranks as usize)
}

/// The table without the job's speed, which is believed here.
fn table(s: &Snapshot) -> Times {
    s.times.clone().at_speed(1.0)
}

fn shape(s: &Snapshot) -> Shape {
    Shape::new(&s.buckets, s.compute.map_or(0.0, Seconds::get))
}

/// What is assumed of gains before they are measured; `fixed` is that of a compressor without ratios.
fn assumed(fixed: f64, ranks: u32) -> Assumed {
    /// What settled top-k keeps at a hundredth of the values (docs/decisions/gains-left-early.md).
    const AT: (f64, f64) = (0.01, 0.09);
    let (own, cr) =
        (Gain::new(AT.1).unwrap_or(Gain::FULL), CompressionRatio::new(AT.0).unwrap_or(CompressionRatio::DENSE));
    Assumed { fixed, of_selection: selected_by_one(own, cr, ranks as usize).get() / own.get() }
}

/// Any strategy of a selector at a ratio.
fn any_of((selector, cr): (Selector, CompressionRatio)) -> Option<Strategy> {
    let spec = selector.family.at(cr).ok()?;
    Collective::ALL.iter().find_map(|collective| Strategy::fitting(spec, *collective, selector.selection))
}
