//! When to ask for a trial, and of what.

use crate::beliefs::Priced;
use crate::{MAX_TRIAL_CANDIDATES, Memory, Snapshot, TRIAL_ITERATIONS, TrialRequest};
use flexcomm_domain::{Seconds, Selector, Strategy, Timestamp};
use flexcomm_estimation::known_gain;
use flexcomm_optimizer::Space;
use rand::{Rng, RngCore};
use std::collections::BTreeSet;

/// Least ratio of the expected value of perfect information to a trial's cost: a trial yields less than perfect information.
pub(crate) const WORTH: f64 = 2.0;
/// A trial that has not answered so many seconds after its budget is given up.
const GRACE_S: f64 = 30.0;
/// Trials are not asked for more often than this, seconds.
const REST_S: f64 = 60.0;
/// Given-up trials stretch the time to the next one up to this many times.
const MAX_BACK_OFF: u32 = 8;
/// What was measured this long ago may be measured again, seconds.
const STALE_S: f64 = 600.0;
/// A trial may take this many times its predicted time: beyond it the model is off.
const SLACK: f64 = 2.0;
/// Time allowed for snapshots and restores, seconds.
pub(crate) const SNAPSHOTS_S: f64 = 1.0;
/// Largest slowdown that is learned: one pause of a machine does not end trials for good.
const MOST_SLOWDOWN: f64 = 10.0;
/// Most candidates of one selector in a trial, and how far their ratios are apart: the curve through them tells of the others.
const MOST_OF_SELECTOR: usize = 3;
const APART: f64 = 5.0;

/// Takes note of an answer that came or of one that did not come in time.
pub(crate) fn settle(s: &Snapshot, memory: &mut Memory, now: Timestamp) {
    let trial = &mut memory.trial;
    let ended = s.profiles.ended_at.filter(|at| trial.asked_at.is_none_or(|asked| *at >= asked));
    if ended.is_some() && ended != trial.answered_at {
        trial.answered_at = ended;
        trial.pending = false;
        trial.given_up = 0;
        let own = s.trial.as_ref().filter(|ran| Some(ran.asked) == trial.asked_at);
        if let Some((cost, expected_s)) = own.and_then(|ran| ran.cost).zip(trial.expected_s) {
            let times = (cost.get() / expected_s).clamp(1.0, MOST_SLOWDOWN);
            trial.slowdown = Some(trial.slowdown.map_or(times, |before| (before * times).sqrt()));
        }
        trial.expected_s = None;
    }
    let asked = trial.asked_at.filter(|_| trial.pending);
    if asked.is_some_and(|at| now.since(at).get() >= s.config.trial_budget_s.get() + GRACE_S) {
        trial.pending = false;
        trial.expected_s = None;
        trial.given_up = trial.given_up.saturating_add(1);
    }
}

/// Ways of selecting that may be chosen and that no trial has measured. What rounding keeps is known without one.
pub(crate) fn unmeasured(s: &Snapshot) -> BTreeSet<Selector> {
    let measured = |x: &Selector| s.profiles.by_selector.get(x).is_some_and(|p| !p.is_assumed());
    let may_be_chosen = s.space().strategies().into_iter().filter(|x| !x.is_dense()).map(|x| x.selector());
    may_be_chosen.filter(|x| !measured(x) && known_gain(x.family).is_none()).collect()
}

/// Whether a trial may be asked for: none is under way, the last is long enough ago, and there is something to measure.
pub(crate) fn may_ask(s: &Snapshot, memory: &Memory, now: Timestamp, rng: &mut (impl RngCore + ?Sized)) -> bool {
    let trial = &memory.trial;
    if trial.pending || s.ranks < 2 || s.config.trial_budget_s.get() <= 0.0 {
        return false;
    }
    // Jobs that started together should not stop together for their next trials.
    let spread = if trial.given_up > 0 { rng.random_range(1.0..1.5) } else { 1.0 };
    let rest_s = REST_S * f64::from(1 + trial.given_up.min(MAX_BACK_OFF)) * spread;
    let rested = trial.asked_at.is_none_or(|at| now.since(at).get() >= rest_s);
    let stale = s.profiles.measured_at.is_none_or(|at| now.since(at).get() > STALE_S);
    rested && (stale || !measurable(s).is_empty())
}

/// Of the unmeasured, those that a trial can measure: where only shadows answered the last one, none can run live, and one rank that selects
/// for all has no shadow.
fn measurable(s: &Snapshot) -> BTreeSet<Selector> {
    let mut new = unmeasured(s);
    let live = s.profiles.measured_at.is_none() || s.profiles.tried_at.is_some();
    new.retain(|x| live || x.selection.is_none());
    new
}

/// The request and its predicted cost in seconds: what is not measured first, and of it what may turn out to be the best. `slowdown` is
/// how many times longer than by the model trials take.
pub(crate) fn request(
    s: &Snapshot,
    all: &[Priced],
    slowdown: f64,
    why: impl FnOnce(f64) -> String,
) -> Option<(TrialRequest, f64)> {
    let find = |x: &Strategy| all.iter().find(|p| p.plan == *x);
    let time = |x: &Strategy| find(x).map_or(f64::INFINITY, |p| p.what.t_step.get());
    let low = |x: &Strategy| find(x).map_or(f64::INFINITY, low_score);
    let new = unmeasured(s);
    let mut candidates: Vec<(bool, f64, Strategy)> =
        one_of_each(&s.space(), time).into_iter().map(|x| (!new.contains(&x.selector()), low(&x), x)).collect();
    candidates.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let (mut taken, mut total_s): (Vec<Strategy>, f64) = (Vec::new(), 0.0);
    for (_, _, x) in candidates {
        let alike = || taken.iter().filter(|t| t.selector() == x.selector());
        let near = |t: &Strategy| (t.cr().get() / x.cr().get()).ln().abs() < APART.ln();
        let with_s = total_s + time(&x) * f64::from(TRIAL_ITERATIONS);
        let fits = slowdown * (SNAPSHOTS_S + SLACK * with_s) <= s.config.trial_budget_s.get();
        if taken.len() < MAX_TRIAL_CANDIDATES
            && alike().count() < MOST_OF_SELECTOR
            && !alike().any(near)
            && (fits || taken.is_empty())
        {
            total_s = with_s;
            taken.push(x);
        }
    }
    if taken.is_empty() {
        return None;
    }
    let budget_s = slowdown * (SNAPSHOTS_S + SLACK * total_s);
    let budget = Seconds::new(budget_s.min(s.config.trial_budget_s.get())).ok()?;
    let cost_s = slowdown * (SNAPSHOTS_S + total_s);
    Some((TrialRequest { candidates: taken, iterations: TRIAL_ITERATIONS, budget, why: why(cost_s) }, cost_s))
}

/// The score that it falls below in one sample of eight.
fn low_score(of: &Priced) -> f64 {
    let mut scores = of.scores.clone();
    scores.sort_by(f64::total_cmp);
    scores.get(scores.len() / 8).copied().unwrap_or(f64::INFINITY)
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
