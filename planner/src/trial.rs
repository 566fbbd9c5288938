//! When to ask for a trial, and of what.

use crate::solve::Costs;
use crate::{MAX_TRIAL_CANDIDATES, Memory, Snapshot, TrialRequest, Trigger, words};
use flexcomm_domain::{Seconds, Selector, Strategy, Timestamp};
use rand::{Rng, RngCore};
use std::collections::BTreeSet;

/// Given-up trials stretch the time to the next one up to this many times.
const MAX_BACK_OFF: u32 = 8;

/// Takes note of an answer that came or of one that did not come in time.
pub(crate) fn settle(s: &Snapshot, memory: &mut Memory, now: Timestamp) {
    let trial = &mut memory.trial;
    if s.profiles.measured_at.is_some() && s.profiles.measured_at != trial.answered_at {
        trial.answered_at = s.profiles.measured_at;
        trial.pending = false;
        trial.given_up = 0;
    }
    let asked = trial.asked_at.filter(|_| trial.pending);
    if asked.is_some_and(|at| now.since(at) >= s.config.trial_timeout_s) {
        trial.pending = false;
        trial.given_up = trial.given_up.saturating_add(1);
    }
}

/// Ways of selecting that may be chosen and that no trial has measured.
pub(crate) fn unmeasured(s: &Snapshot) -> BTreeSet<Selector> {
    let measured = |x: &Selector| s.profiles.by_selector.get(x).is_some_and(|p| !p.is_assumed());
    let may_be_chosen = s.space().strategies().into_iter().filter(|x| !x.is_dense()).map(|x| x.selector());
    may_be_chosen.filter(|x| !measured(x)).collect()
}

/// What a trial is decided on.
pub(crate) struct Look<'a> {
    pub(crate) s: &'a Snapshot,
    pub(crate) memory: &'a Memory,
    pub(crate) costs: Option<&'a Costs>,
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
        let unmeasured = unmeasured(s);
        if !unmeasured.is_empty() {
            let names: Vec<String> = unmeasured.iter().map(ToString::to_string).collect();
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
        let blind = s.in_force.is_some() && age >= s.config.trial_review_dense_s && self.compressing_could_win();
        let age = words::time(age.get());
        blind.then(|| format!("the last trial was {age} ago and no gain in force shows whether it still holds"))
    }

    /// Whether dense runs and a candidate would be better by the margin if it lost nothing.
    fn compressing_could_win(&self) -> bool {
        let Some(costs) = self.costs.filter(|_| self.s.strategy().is_dense()) else { return false };
        let dense = costs.in_force.what.t_step.get() * (1.0 - self.s.config.hysteresis);
        costs.all.iter().any(|p| !p.blocked && !p.strategy().is_dense() && p.what.t_step.get() < dense)
    }
}

/// The request and its predicted cost in seconds. One candidate per selector and ratio, by the collective that
/// is cheapest for it now, of what is not measured yet first, then the cheapest, and no more than fit the budget: a trial
/// on a slow network that began with the most expensive would end without a result.
pub(crate) fn request(s: &Snapshot, costs: Option<&Costs>, why: String) -> Option<(TrialRequest, f64)> {
    let all = candidates(s, costs);
    let skip = all.len().div_ceil(MAX_TRIAL_CANDIDATES).max(1);
    let iterations = f64::from(s.config.trial_iterations);
    let cost = |x: Strategy| (costs.and_then(|c| c.find(&x)).map_or(0.0, |p| p.what.t_step.get() * iterations), x);
    let mut priced: Vec<(f64, Strategy)> = all.into_iter().step_by(skip).map(cost).collect();
    let new = unmeasured(s);
    let known = |x: &Strategy| !new.contains(&x.selector());
    priced.sort_by(|a, b| known(&a.1).cmp(&known(&b.1)).then(a.0.total_cmp(&b.0)));
    let most = s.config.trial_budget_s;
    let mut total = 0.0;
    let fits = |(i, (cost, _)): &(usize, (f64, Strategy))| {
        total += SLACK * cost;
        *i == 0 || SNAPSHOTS_S + total <= most.get()
    };
    let kept: Vec<(f64, Strategy)> = priced.into_iter().enumerate().take_while(fits).map(|(_, x)| x).collect();
    let cost: f64 = kept.iter().map(|x| x.0).sum();
    let candidates: Vec<Strategy> = kept.into_iter().map(|x| x.1).collect();
    if candidates.is_empty() {
        return None;
    }
    let known = costs.is_some().then_some(SNAPSHOTS_S + SLACK * cost);
    let budget = known.and_then(|t| Seconds::new(t.min(most.get())).ok()).unwrap_or(most);
    Some((TrialRequest { candidates, iterations: s.config.trial_iterations, budget, why }, cost))
}

/// A trial may take this many times its predicted time: beyond it the model is off.
const SLACK: f64 = 2.0;
/// Time allowed for snapshots and restores, seconds.
const SNAPSHOTS_S: f64 = 1.0;

fn candidates(s: &Snapshot, costs: Option<&Costs>) -> Vec<Strategy> {
    let cost = |x: &Strategy| costs.and_then(|c| c.find(x)).map_or(0.0, |p| p.what.t_sync.get());
    let mut kept: Vec<Strategy> = Vec::new();
    for strategy in s.space().strategies().into_iter().filter(|x| !x.is_dense()) {
        let same = |k: &&mut Strategy| k.selector() == strategy.selector() && k.cr() == strategy.cr();
        match kept.iter_mut().find(same) {
            Some(other) if cost(&strategy) < cost(other) => *other = strategy,
            Some(_) => {}
            None => kept.push(strategy),
        }
    }
    kept
}
