//! When to ask for a trial, and of what.

use crate::benefit_bound::BenefitBound;
use crate::solve::Costs;
use crate::{MAX_TRIAL_CANDIDATES, Memory, Snapshot, TrialRequest, Trigger, words};
use flexcomm_domain::{Seconds, Selector, Strategy, Timestamp};
use flexcomm_optimizer::{Space, known_gain};
use rand::{Rng, RngCore};
use std::collections::BTreeSet;

/// Given-up trials stretch the time to the next one up to this many times.
const MAX_BACK_OFF: u32 = 8;

/// Takes note of an answer that came or of one that did not come in time.
pub(crate) fn settle(s: &Snapshot, memory: &mut Memory, now: Timestamp) {
    let trial = &mut memory.trial;
    let ended = s.profiles.ended_at.filter(|at| trial.asked_at.is_none_or(|asked| *at >= asked));
    if ended.is_some() && ended != trial.answered_at {
        trial.answered_at = ended;
        trial.pending = false;
        trial.given_up = 0;
    }
    let asked = trial.asked_at.filter(|_| trial.pending);
    if asked.is_some_and(|at| now.since(at) >= s.config.trial_timeout_s) {
        trial.pending = false;
        trial.given_up = trial.given_up.saturating_add(1);
    }
}

/// Ways of selecting that may be chosen and that no trial has measured. What rounding keeps is known without one.
pub(crate) fn unmeasured(s: &Snapshot) -> BTreeSet<Selector> {
    let measured = |x: &Selector| s.profiles.by_selector.get(x).is_some_and(|p| !p.is_assumed());
    let may_be_chosen = s.space().strategies().into_iter().filter(|x| !x.is_dense()).map(|x| x.selector());
    may_be_chosen.filter(|x| !measured(x) && known_gain(x.family).is_none()).collect()
}

/// What a trial is decided on.
pub(crate) struct Look<'a> {
    pub(crate) s: &'a Snapshot,
    pub(crate) memory: &'a Memory,
    pub(crate) costs: Option<&'a Costs>,
    /// Whether the links behind the costs can be acted on.
    pub(crate) trusted: bool,
    pub(crate) now: Timestamp,
}

impl Look<'_> {
    /// Why a trial should run now: there is a reason, none is under way and the last is long enough ago.
    pub(crate) fn wanted(&self, triggers: &[Trigger], rng: &mut (impl RngCore + ?Sized)) -> Option<String> {
        let why = self.reason(triggers)?;
        let (s, trial) = (self.s, &self.memory.trial);
        if trial.pending || s.ranks < 2 {
            return None;
        }
        let back_off = f64::from(1 + trial.given_up.min(MAX_BACK_OFF));
        // Jobs that started together should not stop together for their next trials.
        let spread = if trial.given_up > 0 { rng.random_range(1.0..1.5) } else { 1.0 };
        // A trial that never answered cost nothing, as far as anyone knows.
        let share = if trial.given_up > 0 { 0.0 } else { trial.cost_s / s.config.trial_share };
        let wait = (s.config.trial_interval_s.get() * back_off * spread).max(share);
        let rested = trial.asked_at.is_none_or(|at| self.now.since(at).get() >= wait);
        rested.then_some(why)
    }

    fn reason(&self, triggers: &[Trigger]) -> Option<String> {
        let s = self.s;
        let dense = s.strategy().is_dense().then(|| BenefitBound::new(s, self.costs.filter(|_| self.trusted)));
        if dense.as_ref().is_some_and(|bound| self.moving() || !bound.holds(|_| true)) {
            return None;
        }
        let mut due = self.unmeasured_and_affordable();
        due.retain(|x| dense.as_ref().is_none_or(|bound| bound.holds(|of| of == x)));
        if !due.is_empty() {
            let names: Vec<String> = due.iter().map(ToString::to_string).collect();
            return Some(format!("nothing is measured yet of {}", names.join(", ")));
        }
        if let Some(moved) = triggers.iter().find(|t| matches!(t, Trigger::Gain { .. })) {
            return Some(moved.words());
        }
        let measured_at = s.profiles.measured_at.filter(|_| !s.space().compressors.is_empty())?;
        let age = self.now.since(measured_at);
        if age >= s.config.trial_review_s {
            return Some(format!("the last trial was {} ago", words::time(age.get())));
        }
        let blind = s.in_force.is_some() && age >= s.config.trial_review_dense_s && dense.is_some();
        let age = words::time(age.get());
        blind.then(|| format!("the last trial was {age} ago and no gain in force shows whether it still holds"))
    }

    /// Whether a first decision was made and links move: half of what they look like meanwhile never was.
    fn moving(&self) -> bool {
        self.s.in_force.is_some() && self.memory.unsteady(&self.s.config, self.now).is_some()
    }

    /// Of the unmeasured, those of which a trial could measure something now. The first trial need not be cheap; where
    /// only shadows answered it, none can run live, and one rank that selects for all has no shadow where gradients lie on a device.
    fn unmeasured_and_affordable(&self) -> BTreeSet<Selector> {
        let mut unmeasured = unmeasured(self.s);
        if self.s.profiles.measured_at.is_none() {
            return unmeasured;
        }
        unmeasured.retain(|x| self.s.profiles.tried_at.is_some() || x.selection.is_none());
        let candidates = candidates(self.s, self.costs);
        let fits = |x: &Strategy| within_budget(self.s, cost(self.s, self.costs, x));
        unmeasured.into_iter().filter(|of| candidates.iter().any(|x| x.selector() == *of && fits(x))).collect()
    }
}

/// The request and its predicted cost in seconds: what is [`worth`] asking for and fits the budget, or else the cheapest.
pub(crate) fn request(s: &Snapshot, costs: Option<&Costs>, why: String) -> Option<(TrialRequest, f64)> {
    let cost = |x: &Strategy| cost(s, costs, x);
    let (worth, most) = (worth(s, costs), s.config.trial_budget_s);
    let mut total = 0.0;
    let mut candidates: Vec<Strategy> = Vec::new();
    for strategy in &worth {
        let with = total + cost(strategy);
        if within_budget(s, with) {
            total = with;
            candidates.push(*strategy);
        }
    }
    if candidates.is_empty() {
        let cheapest = worth.into_iter().min_by(|a, b| cost(a).total_cmp(&cost(b)))?;
        total = cost(&cheapest);
        candidates.push(cheapest);
    }
    let known = costs.is_some().then_some(SNAPSHOTS_S + SLACK * total);
    let budget = known.and_then(|t| Seconds::new(t.min(most.get())).ok()).unwrap_or(most);
    Some((TrialRequest { candidates, iterations: s.config.trial_iterations, budget, why }, total))
}

/// Predicted seconds of a candidate's iterations.
fn cost(s: &Snapshot, costs: Option<&Costs>, x: &Strategy) -> f64 {
    let iterations = f64::from(s.config.trial_iterations);
    costs.and_then(|c| c.find(x)).map_or(0.0, |p| p.what.t_step.get() * iterations)
}

fn within_budget(s: &Snapshot, iterations_s: f64) -> bool {
    SNAPSHOTS_S + SLACK * iterations_s <= s.config.trial_budget_s.get()
}

/// One candidate per selector and ratio, by the collective that is cheapest for it now: of what is not measured yet
/// first, and in turns the cheapest and what looks best. Gains at ratios above the measured ones are well known, since
/// dense loses nothing, those below are not, so the range must be spanned; and a collective that has only sent short
/// messages says little of the long ones that may be chosen.
fn worth(s: &Snapshot, costs: Option<&Costs>) -> Vec<Strategy> {
    let mut cheapest = thinned(candidates(s, costs));
    let new = unmeasured(s);
    let known = |x: &Strategy| !new.contains(&x.selector());
    let time = |x: &Strategy| costs.and_then(|c| c.find(x)).map_or(0.0, |p| p.what.t_step.get());
    cheapest.sort_by(|a, b| known(a).cmp(&known(b)).then(time(a).total_cmp(&time(b))));
    let mut best = cheapest.clone();
    best.sort_by_cached_key(|x| (known(x), costs.and_then(|c| c.all.iter().position(|p| p.strategy() == *x))));
    let mut seen = BTreeSet::new();
    cheapest.into_iter().zip(best).flat_map(|(a, b)| [a, b]).filter(|x| seen.insert(*x)).collect()
}

/// As many as fit a trial: of each curve over the ratio evenly spread points, at other ratios than of the curve before, so that
/// together they span all ratios.
pub fn thinned(all: Vec<Strategy>) -> Vec<Strategy> {
    let (points_of_curves, points): (Vec<_>, Vec<_>) = all.into_iter().partition(|x| x.family().has_ratio());
    let room = MAX_TRIAL_CANDIDATES.saturating_sub(points.len()).max(1);
    let mut curves: Vec<Vec<Strategy>> = Vec::new();
    for point in &points_of_curves {
        match curves.iter_mut().find(|curve| curve[0].selector() == point.selector()) {
            Some(curve) => curve.push(*point),
            None => curves.push(vec![*point]),
        }
    }
    let (all, count) = (points_of_curves.len(), curves.len());
    let spread = |(number, curve): (usize, &Vec<Strategy>)| -> Vec<Strategy> {
        let kept = (room * curve.len() / all.max(1)).clamp(1, curve.len());
        (0..kept).map(|i| curve[(i * count + number) * curve.len() / (kept * count)]).collect()
    };
    let kept: Vec<Strategy> = curves.iter().enumerate().flat_map(spread).collect();
    kept.into_iter().take(room).chain(points).take(MAX_TRIAL_CANDIDATES).collect()
}

/// A trial may take this many times its predicted time: beyond it the model is off.
const SLACK: f64 = 2.0;
/// Time allowed for snapshots and restores, seconds.
const SNAPSHOTS_S: f64 = 1.0;

fn candidates(s: &Snapshot, costs: Option<&Costs>) -> Vec<Strategy> {
    let time = |x: &Strategy| costs.and_then(|c| c.find(x)).map_or(0.0, |p| p.what.t_sync.get());
    one_of_each(&s.space(), time)
}

/// Of what a trial can tell something of, one candidate per selector and ratio: that of the least `time`. Of dense and
/// rounding it is known what they lose.
pub fn one_of_each(space: &Space, time: impl Fn(&Strategy) -> f64) -> Vec<Strategy> {
    let mut kept: Vec<Strategy> = Vec::new();
    let lossy = |x: &Strategy| !x.is_dense() && known_gain(x.family()).is_none();
    for strategy in space.strategies().into_iter().filter(lossy) {
        let same = |k: &&mut Strategy| k.selector() == strategy.selector() && k.cr() == strategy.cr();
        match kept.iter_mut().find(same) {
            Some(other) if time(&strategy) < time(other) => *other = strategy,
            Some(_) => {}
            None => kept.push(strategy),
        }
    }
    kept
}
