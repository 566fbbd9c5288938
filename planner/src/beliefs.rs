//! What is believed of a job: fed by every snapshot, asked for samples of what each candidate costs.

mod sampled;

use crate::memory::LinkSummary;
use crate::plans::{self, Expected, Groups};
use crate::{Measured, Snapshot};
use flexcomm_domain::{
    Collective, CompressionRatio, Gain, Link, LinkMatrix, Plan, Seconds, Selector, Strategy, Timestamp,
};
use flexcomm_estimation::exchange::Seen;
use flexcomm_estimation::gains::Assumed;
use flexcomm_estimation::{
    Changes, CompressTimes, Compute, Cost, CriticalPath, Draws, Exchange, Gains, Quality, Shape, Times, known_gain,
    selected_by_one,
};
use flexcomm_optimizer::{Evaluated, Evaluator, Problem};
use rand::RngCore;
use sampled::Sampled;
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
/// What iterations of a trial wait is off by so much about what steps would, as a logarithm: all of them, and each besides.
const TRIAL_WAIT_NOISE: f64 = 0.5;
const ITERATION_NOISE: f64 = 0.5;
/// What a trial that ended longer ago waited for tells nothing of the network of now, seconds.
const TRIAL_TELLS_S: f64 = 60.0;
/// Longest time that beliefs widen by between two snapshots: a controller that was away for longer has restarted.
const MOST_PASSED_S: f64 = 60.0;
/// Links claim another network where their step takes so many times the longest of the newest steps: the cost model is off by less,
/// token buckets and shared memory included.
const CONTRADICTION: f64 = 4.0;
/// Longest time that a candidate is priced with, seconds: a month per step is as bad as any more.
const LONGEST_S: f64 = 2.6e6;
/// Largest ω/N of an unbiased compressor without error feedback: where the noise that it adds to the mean gradient has more energy than that, training
/// diverges at a learning rate that dense steps bear (docs/decisions/quality-without-memory.md).
const MOST_VARIANCE: f64 = 1.0;
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
    /// The number of the newest trial whose waits were observed.
    newest_trial: u64,
    /// The newest steps that were observed.
    steps: Option<Measured>,
    /// When the newest test was reported that was observed.
    tested: Option<Timestamp>,
    /// By group of buckets: the energy of what error feedback has not sent yet, in those of a gradient.
    residuals: Vec<f32>,
    /// Up to when.
    filled: Option<Timestamp>,
}

/// A candidate with samples of what it costs.
#[derive(Debug, Clone)]
pub(crate) struct Priced {
    pub(crate) plan: Plan,
    /// At the medians.
    pub(crate) what: Evaluated,
    /// (t_comp in s, t_sync in s, 1/gain) at the medians, as policies see them.
    pub(crate) objectives: [f64; 3],
    /// What the policy minimises, by sample; empty where it does not admit the candidate.
    pub(crate) scores: Vec<f64>,
    /// Their mean; infinite where it is not admitted.
    pub(crate) mean: f64,
    /// The logarithm of the steps that make the progress of a dense one, the median.
    pub(crate) log_steps: f64,
}

/// What plans cost.
#[derive(Debug, Default)]
pub(crate) struct Prices {
    pub(crate) plans: Vec<Priced>,
    /// Logarithms of seconds per byte, in the samples of the plans' scores.
    pub(crate) bandwidth: Vec<f64>,
    /// Plans by bucket that are known without a search.
    pub(crate) listed: Vec<Plan>,
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

    /// What they tell of a job of another size or model on the same backend.
    #[must_use]
    pub(crate) fn of_another_job(self, same_machine: bool) -> Self {
        let compress = if same_machine { self.compress.of_another_job() } else { CompressTimes::default() };
        Self { exchange: self.exchange.of_another_job(), compress, ..Self::default() }
    }

    /// What they tell of a later run of the same job.
    #[must_use]
    pub(crate) fn carried_over(self) -> Self {
        let (exchange, gains) = (self.exchange.carried_over(), self.gains.carried_over());
        Self { exchange, gains, compress: self.compress.carried_over(), ..Self::default() }
    }

    /// As it is stored, so that what is decided again from that is the same.
    fn round(&mut self) {
        self.exchange.round();
        self.gains.round();
        self.compress.round();
    }

    pub(crate) fn clamp_times(&mut self, now: Timestamp) {
        for at in [&mut self.at, &mut self.tested, &mut self.filled] {
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
            let Some(kind) = test.kind() else { continue };
            if self.exchange.test((test.from, test.to), test.bandwidth.beta(), kind) {
                self.changes.note(now);
            }
        }
        true
    }

    /// What trials found, and what the newest steps took and kept.
    fn observe_strategies(&mut self, s: &Snapshot, now: Timestamp, stayed_s: f64) {
        let Some(problem) = self.problem(s) else { return };
        let mut known = Known::over(&problem);
        // Of the links that strategies are evaluated over.
        let common = self.exchange.common();
        self.observe_trials(s, &mut known);
        self.observe_waits(s, (&mut known, common), now);
        let is_new = |m: &&Measured| Some(*m) != self.steps.as_ref() || self.exchange.wants_steps();
        let Some(m) = s.measured_now().filter(is_new).copied() else { return };
        self.steps = Some(m);
        let shape = shape(s);
        let Some((of, by_group)) = distinct(&[s.plan()], &shape, &mut known) else { return };
        let by_group = &by_group[0];
        let few = (1.0 + 4.0 / m.steps as f64).sqrt();
        let values = weights(shape.shares(), by_group, of.len());
        // What each takes of a whole gradient where all of them are off the table by the same factor.
        let times = table(s);
        let tables: Vec<f64> = of.iter().map(|e| table_s(s, &times, kind(e))).collect();
        let all_s: f64 = tables.iter().zip(&values).map(|(table_s, share)| table_s * share).sum();
        let factor = if all_s > 0.0 { m.t_comp.get() / all_s } else { 0.0 };
        let compress_s: Vec<f64> = match of.len() {
            1 => vec![m.t_comp.get()],
            _ => tables.iter().map(|table_s| table_s * factor).collect(),
        };
        let scatter = m.scatter.map_or(0.0, |scatter| scatter.of_sync_median(m.steps));
        let seen = Seen { seconds: m.t_sync.get(), sd: (STEP_NOISE * few).hypot(scatter), compress_s };
        let paths = paths(&of, common);
        if self.exchange.steps(&paths, by_group, &shape, &seen) {
            self.changes.note(now);
        }
        let energies = weights(shape.energies(), by_group, of.len());
        let gains: Vec<f64> = of.iter().map(|e| self.expected_gain(s, e)).collect();
        let stale = self.staleness(&gains, by_group, &shape);
        let parts = of.iter().zip(energies).zip(&gains).zip(stale);
        let parts: Vec<Part<'_>> =
            parts.map(|(((of, energy), gain), stale)| Part { of, energy, gain: *gain, stale }).collect();
        self.observe_kept(s, &parts, (&m, few), stayed_s);
        let passed_s = self.filled.replace(now).map_or(f64::INFINITY, |at| now.since(at).get());
        self.fill_residuals((&of, &gains), by_group, passed_s.min(stayed_s) / m.t_step.get().max(1e-6));
        let compressed = || of.iter().enumerate().filter(|(_, e)| !e.strategy.is_dense());
        for (i, e) in compressed() {
            let noise = STEP_NOISE * few * compressed().count() as f64;
            self.compress.observe(kind(e), seen.compress_s[i], tables[i], noise);
        }
    }

    /// What settled steps of a strategy keep, as expected.
    fn expected_gain(&mut self, s: &Snapshot, e: &Evaluated) -> f64 {
        if is_known(&e.strategy) { e.gain.get() } else { self.gains.expected(kind(e), assumed(e.gain.get(), s.ranks)) }
    }

    /// By strategy, the mean of [`staleness`] over its groups.
    fn staleness(&self, gains: &[f64], by_group: &[usize], shape: &Shape) -> Vec<f64> {
        let mut stale = vec![0.0; gains.len()];
        let known = self.residuals.len() == by_group.len();
        let total = weights(shape.energies(), by_group, gains.len());
        for ((residual, i), share) in self.residuals.iter().zip(by_group).zip(shape.energies()).filter(|_| known) {
            stale[*i] += share / total[*i].max(1e-9) * staleness(*residual, gains[*i]);
        }
        stale
    }

    /// So many steps later: what they do not send is added to the gradients after them.
    fn fill_residuals(&mut self, (of, gains): (&[Evaluated], &[f64]), by_group: &[usize], steps: f64) {
        self.residuals.resize(by_group.len(), 0.0);
        for (residual, i) in self.residuals.iter_mut().zip(by_group) {
            // Without a memory nothing is left.
            let keeps = of[*i].strategy.spec().memory().is_some();
            let gain = if keeps { gains[*i].clamp(1e-4, 1.0) } else { 1.0 };
            let settled = (1.0 - gain) / gain;
            *residual = (settled + (f64::from(*residual) - settled) * (1.0 - gain).powf(steps)) as f32;
        }
    }

    /// What steps kept of the gradient, but for what is known to keep its share. Of several strategies of which that is not known it is
    /// put down to all alike.
    fn observe_kept(&mut self, s: &Snapshot, parts: &[Part<'_>], (m, few): (&Measured, f64), stayed_s: f64) {
        let (known, compressed): (Vec<&Part<'_>>, Vec<_>) = parts.iter().partition(|part| is_known(&part.of.strategy));
        let known: f64 = known.iter().map(|part| part.energy * part.gain).sum();
        let share: f64 = compressed.iter().map(|part| part.energy).sum();
        if compressed.is_empty() || share <= 0.0 {
            return;
        }
        let steps = stayed_s / m.t_step.get().max(1e-6);
        // Of energies that are not known it is only about right.
        let kept = ((m.gain.get() - known) / share).clamp(1e-3, 0.999);
        let all: f64 = compressed.iter().map(|part| part.energy / share * part.gain).sum();
        let noise = m.gain_spread.max(0.03) * few;
        let noise = match compressed.len() {
            // All noise is that of what is not known.
            1 => noise * m.gain.get() / (share * kept).max(1e-6),
            several => noise * several as f64 / share,
        };
        for Part { of, gain, stale, .. } in compressed {
            let gain = (gain * kept / all.max(1e-9)).min(0.999);
            self.gains.observe(kind(of), assumed(of.gain.get(), s.ranks), gain, steps, noise.hypot(*stale));
        }
    }

    fn observe_trials(&mut self, s: &Snapshot, known: &mut Known<'_>) {
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
                let fixed = known.evaluated(&strategy).map_or(0.5, |e| e.gain.get());
                let assumed = assumed(fixed, s.ranks);
                let expected = self.gains.expected(of, assumed);
                let stale: Vec<f64> = self.residuals.iter().map(|residual| staleness(*residual, expected)).collect();
                // Live trials begin with training's residual, shadows with none.
                let stale = if s.profiles.long_run { 0.0 } else { mean(&stale) };
                self.gains.observe(of, assumed, point.gain.get(), filled, TRIAL_GAIN_NOISE.hypot(stale));
                self.compress.observe(of, point.t_comp_s, times.t_comp(*selector, point.cr, size), TRIAL_TIME_NOISE);
            }
        }
    }

    /// What the newest trial found collectives to take, where the network of now is that on which it ran.
    fn observe_waits(&mut self, s: &Snapshot, (known, common): (&mut Known<'_>, f64), now: Timestamp) {
        let Some(trial) = s.trial.as_ref().filter(|trial| trial.id > self.newest_trial) else { return };
        self.newest_trial = trial.id;
        let changed = self.changes.last().is_some_and(|at| at >= trial.asked);
        if changed || now.since(trial.ended).get() > TRIAL_TELLS_S {
            return;
        }
        let sd = TRIAL_WAIT_NOISE.hypot(ITERATION_NOISE / f64::from(trial.iterations.max(1)).sqrt());
        let (shape, times) = (shape(s), table(s));
        for (strategy, seconds) in &trial.sync {
            let Some(e) = known.evaluated(strategy) else { continue };
            let compress_s = vec![table_s(s, &times, kind(&e)) * self.compress.expected(kind(&e))];
            let of = paths(&[e], common);
            self.exchange.trial(&of[0], &shape, &Seen { seconds: seconds.get(), sd, compress_s });
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

    /// When the network was seen to change last.
    pub(crate) fn changed_at(&self) -> Option<Timestamp> {
        self.changes.last()
    }

    /// The links between ranks: latencies as measured, and bandwidths as believed.
    pub(crate) fn links(&mut self, s: &Snapshot) -> Option<LinkMatrix> {
        let measured = &s.links.as_ref()?.matrix;
        let beta = self.exchange.betas(measured.ranks());
        let believed = |from, to, link: Link| {
            Link::new(link.alpha.get(), 8.0 / beta(measured.node(from), measured.node(to))).unwrap_or(link)
        };
        Some(measured.clone().with(believed).with_local_links())
    }

    /// The optimizer's problem over these links.
    fn problem(&mut self, s: &Snapshot) -> Option<Problem> {
        Some(s.problem(&self.links(s)?, BTreeMap::new()))
    }

    /// Prices plans that the job could run: these, and of plans by bucket those that a search finds worth it. One whose time leaves the
    /// range of a duration is left out.
    pub(crate) fn price(&mut self, s: &Snapshot, mut plans: Vec<Plan>, rng: &mut (impl RngCore + ?Sized)) -> Prices {
        let Some(problem) = self.problem(s) else { return Prices::default() };
        let mut known = Known::over(&problem);
        let Searched { found, listed } = self.search(s, &mut known, rng);
        let new: Vec<Plan> = found.into_iter().filter(|plan| !plans.contains(plan)).collect();
        plans.extend(new);
        Prices { listed, ..self.sample(s, &mut known, plans) }
    }

    /// Plans by bucket that are worth pricing, by what is expected; none where the gradient is one bucket or nothing can be compressed.
    fn search(&mut self, s: &Snapshot, known: &mut Known<'_>, rng: &mut (impl RngCore + ?Sized)) -> Searched {
        let shape = shape(s);
        if s.ranks < 2 || shape.shares().len() < 2 {
            return Searched::default();
        }
        let mut of: Vec<Evaluated> = plans::options(s).iter().filter_map(|x| known.evaluated(x)).collect();
        of.retain(|e| !is_noisy(s, e, || self.expected_gain(s, e)));
        if of.iter().all(|e| e.strategy.is_dense()) {
            return Searched::default();
        }
        let law = s.delay();
        let paths = paths(&of, self.exchange.common());
        let (costs, backward_s) = self.exchange.expected(&paths, &shape);
        let times = table(s);
        let expected = |(e, mut cost): (&Evaluated, Cost)| {
            let of = kind(e);
            cost.compress_s = table_s(s, &times, of) * self.compress.expected(of);
            let quality = match is_known(&e.strategy) {
                true => e.quality(),
                false => quality(s, e)(self.expected_gain(s, e)),
            };
            Expected { cost, lost: quality.log_inverse_gain(), steps: quality.log_steps(law) }
        };
        let expected: Vec<Expected> = of.iter().zip(costs).map(expected).collect();
        let in_force = shape.by_group(s.plan()).into_iter().map(|x| of.iter().position(|e| e.strategy == *x)).collect();
        let groups = Groups::new((&shape, backward_s), &expected, &s.config.policy, in_force);
        let plan = |choice: &Vec<usize>| shape.plan(choice.iter().map(|i| &of[*i].strategy));
        let found = groups.found(rng.next_u64(), &s.policy).iter().filter_map(plan).collect();
        Searched { found, listed: groups.listed().iter().filter_map(plan).collect() }
    }

    /// The plans with samples of their price.
    fn sample(&mut self, s: &Snapshot, known: &mut Known<'_>, mut plans: Vec<Plan>) -> Prices {
        let shape = shape(s);
        plans.retain(|plan| plan.strategies().iter().all(|x| known.evaluated(x).is_some()));
        let each: Vec<&Plan> = plans.iter().collect();
        let Some((of, by_group)) = distinct(&each, &shape, known) else { return Prices::default() };
        let (of_kinds, kinds, kind_of) = kinds(&of);
        let draws = Draws::shared();
        let mut comp = self.compress.sampled(&kinds, draws, 0);
        let times = table(s);
        for (samples, kind) in comp.iter_mut().zip(&kinds) {
            let table_s = table_s(s, &times, *kind);
            samples.iter_mut().for_each(|factor| *factor *= table_s);
        }
        let from = self.compress.rows(kinds.len());
        let paths = paths(&of, self.exchange.common());
        let waits_s = self.steps.filter(|m| m.version == s.version()).map(|m| m.t_sync.get());
        let in_force = plans.iter().position(|plan| plan == s.plan()).zip(waits_s);
        let compress_s: Vec<&[f64]> = kind_of.iter().map(|kind| comp[*kind].as_slice()).collect();
        let compute_s = shape.compute.samples(draws.compute());
        let waits =
            self.exchange.sampled(&paths, &by_group, (&shape, &compute_s, &compress_s), in_force, (draws, from));
        let from = from + self.exchange.rows(of.len());
        let each: Vec<_> =
            kinds.iter().zip(&of_kinds).map(|(kind, e)| (*kind, assumed(e.gain.get(), s.ranks))).collect();
        let gains = self.gains.sampled(&each, draws, from);
        self.round();
        let sampled = Sampled::new(s, of_kinds, (compute_s, comp), gains);
        let each = plans.iter().zip(by_group).zip(waits.of_plans);
        let priced = |((plan, by_group), sync): ((&Plan, Vec<usize>), Vec<f64>)| {
            // Of a plan by bucket the last one's, of the buckets that there are.
            let last = &of[*by_group.last()?];
            let by_kind: Vec<usize> = by_group.iter().map(|i| kind_of[*i]).collect();
            let values = weights(shape.shares(), &by_kind, kinds.len());
            let energies = weights(shape.energies(), &by_kind, kinds.len());
            Some(sampled.priced(s, (plan, last), (&values, &energies), &sync))
        };
        Prices { plans: each.filter_map(priced).collect(), bandwidth: waits.bandwidth, listed: Vec::new() }
    }

    /// The step that the links claim for the strategy in force, where its newest steps show a network that is far faster: then one of
    /// them is wrong, and it is not the steps.
    pub(crate) fn contradicted(s: &Snapshot) -> Option<Seconds> {
        let (links, m) = (s.links.as_ref()?, s.measured_now()?);
        let scatter = m.scatter.filter(|_| m.steps >= LEAST_STEPS)?;
        let problem = s.problem(&links.matrix, BTreeMap::new());
        let claimed = Evaluator::new(&problem).evaluate(s.plan().alike()?).ok()?;
        (claimed.t_step.get() > CONTRADICTION * scatter.step_high.get()).then_some(claimed.t_step)
    }
}

/// Plans by bucket.
#[derive(Default)]
struct Searched {
    found: Vec<Plan>,
    /// What was searched from.
    listed: Vec<Plan>,
}

/// A strategy of the plan in force, as steps show it.
struct Part<'a> {
    of: &'a Evaluated,
    /// Its buckets' share of the gradient's energy.
    energy: f64,
    /// What its settled steps keep, as expected.
    gain: f64,
    /// See [`staleness`].
    stale: f64,
}

/// Strategies over links as they are believed, each evaluated once.
struct Known<'a> {
    evaluator: Evaluator<'a>,
    of: Vec<Evaluated>,
}

impl<'a> Known<'a> {
    fn over(problem: &'a Problem) -> Self {
        Self { evaluator: Evaluator::new(problem), of: Vec::new() }
    }

    /// None where it has no evaluation.
    fn evaluated(&mut self, strategy: &Strategy) -> Option<Evaluated> {
        if let Some(known) = self.of.iter().find(|e| e.strategy == *strategy) {
            return Some(known.clone());
        }
        let new = self.evaluator.evaluate(strategy).ok()?;
        self.of.push(new.clone());
        Some(new)
    }
}

/// What compressing costs and keeps depends on: the collectives that carry the messages make no difference.
type Kind = (Selector, CompressionRatio);

fn kind(of: &Evaluated) -> Kind {
    (of.strategy.selector(), of.strategy.cr())
}

/// A strategy of each kind, these kinds, and which of them each strategy is of.
fn kinds(of: &[Evaluated]) -> (Vec<Evaluated>, Vec<Kind>, Vec<usize>) {
    let (mut first, mut kinds): (Vec<Evaluated>, Vec<Kind>) = (Vec::new(), Vec::new());
    let place = |e: &Evaluated| {
        let kind = kind(e);
        kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
            first.push(e.clone());
            kinds.push(kind);
            kinds.len() - 1
        })
    };
    let kind_of = of.iter().map(place).collect();
    (first, kinds, kind_of)
}

/// Whether what a strategy keeps follows from its definition.
fn is_known(strategy: &Strategy) -> bool {
    strategy.is_dense() || known_gain(strategy.family()).is_some()
}

/// Whether a strategy of this gain adds more noise than [`MOST_VARIANCE`].
fn is_noisy(s: &Snapshot, of: &Evaluated, gain: impl FnOnce() -> f64) -> bool {
    let may_be = of.strategy.spec().is_unbiased_without_memory() && !is_known(&of.strategy);
    may_be && quality(s, of)(gain()).variance > MOST_VARIANCE
}

/// What a strategy leaves of the gradient, by its gain.
fn quality(s: &Snapshot, of: &Evaluated) -> impl Fn(f64) -> Quality {
    let by_gain = Quality::by_gain(&of.strategy, s.ranks as usize);
    move |gain| by_gain(Gain::new(gain.clamp(1e-6, 1.0)).unwrap_or(Gain::FULL))
}

/// The strategies of some plans, each once, and which of them each group of buckets has by plan; none where one has no evaluation.
fn distinct(plans: &[&Plan], shape: &Shape, known: &mut Known<'_>) -> Option<(Vec<Evaluated>, Vec<Vec<usize>>)> {
    let mut of: Vec<Evaluated> = Vec::new();
    let mut by_plan = Vec::with_capacity(plans.len());
    for plan in plans {
        let mut by_group = Vec::new();
        for strategy in shape.by_group(plan) {
            let place = of.iter().position(|e| e.strategy == *strategy);
            if place.is_none() {
                of.push(known.evaluated(strategy)?);
            }
            by_group.push(place.unwrap_or(of.len() - 1));
        }
        by_plan.push(by_group);
    }
    Some((of, by_plan))
}

/// What each of `count` strategies has of something of which these are the groups' shares.
fn weights(shares: impl Iterator<Item = f64>, by_group: &[usize], count: usize) -> Vec<f64> {
    let mut weights = vec![0.0; count];
    match by_group.first().filter(|first| by_group.iter().all(|of| of == *first)) {
        Some(all) => weights[*all] = 1.0,
        None => shares.zip(by_group).for_each(|(share, of)| weights[*of] += share),
    }
    weights
}

fn paths(of: &[Evaluated], common: f64) -> Vec<(Strategy, CriticalPath)> {
    of.iter().map(|e| (e.strategy, path(e, common))).collect()
}

/// What the table says of compressing a whole gradient, seconds.
fn table_s(s: &Snapshot, times: &Times, (selector, cr): Kind) -> f64 {
    times.t_comp(selector, cr, size(s))
}

/// How many times the energy that is compressed is that which settled steps of this gain compress, as a logarithm. It is more for a while
/// after a strategy that kept less: what that one left is not like a gradient, and what is kept of it tells little of gradients.
fn staleness(residual: f32, gain: f64) -> f64 {
    ((f64::from(residual) + 1.0) * gain).max(1.0).ln()
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

fn compute(s: &Snapshot) -> Compute {
    s.compute.map_or(Compute::UNKNOWN, |measured| Compute::measured(measured.get()))
}

fn shape(s: &Snapshot) -> Shape {
    Shape::new(&s.buckets, &s.energies, compute(s))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn residuals_fill_and_drain_by_gain_and_are_stale_where_another_strategy_left_more() {
        let mut beliefs = Beliefs::default();
        let links = flexcomm_domain::LinkMatrix::uniform(2, Link::new(1e-3, 1e9).unwrap()).unwrap();
        let problem = Problem::new(1_000_000, links);
        let of = |text: &str| Evaluator::new(&problem).evaluate(&text.parse().unwrap()).unwrap();
        let of: Vec<Evaluated> =
            ["topk(k=0.01)+ef(vanilla)/allgather", "powersgd(rank=4)+ef(vanilla)/dense-ring", "none/dense-ring"]
                .map(of)
                .into();
        let gains = [0.1, 0.5, 1.0];
        let shape = Shape::new(&[3, 1], &[], Compute::measured(0.1));
        assert_eq!(beliefs.staleness(&gains, &[1, 1], &shape), [0.0; 3], "nothing is known yet");
        beliefs.fill_residuals((&of, &gains), &[0, 2], 1000.0);
        // (1 - 0.1)/0.1, and nothing.
        assert_eq!(beliefs.residuals, [9.0, 0.0]);
        assert_eq!(beliefs.staleness(&gains, &[0, 0], &shape), [0.0; 3], "its own is settled");
        // Ten times a gradient's energy, of which settled steps of 0.5 compress two.
        let stale = beliefs.staleness(&gains, &[1, 1], &shape);
        assert!((stale[1] - 0.75 * 5f64.ln()).abs() < 1e-6, "{stale:?}");
        beliefs.fill_residuals((&of, &gains), &[1, 1], 20.0);
        assert!(beliefs.staleness(&gains, &[1, 1], &shape)[1] < 0.01);
        beliefs.fill_residuals((&of, &gains), &[2, 2], 1.0);
        assert_eq!(beliefs.residuals, [0.0, 0.0], "dense steps send it");
    }
}
