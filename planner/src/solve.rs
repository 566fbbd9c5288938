//! Predicts every candidate on the links of now, and finds the policy's pick among those not blocked.

use crate::calibration::Calibration;
use crate::gains::{self, Powers};
use crate::memory::LinkSummary;
use crate::{Alternative, Measured, Memory, Snapshot, floor};
use flexcomm_domain::{Link, LinkMatrix, Seconds, Strategy, Timestamp};
use flexcomm_optimizer::{Evaluated, Evaluator, Load, Problem, ProblemError, Space, pareto, terms};

/// One candidate with everything that ranks it.
#[derive(Debug, Clone)]
pub(crate) struct Priced {
    /// As believed: the model, calibrated by what the job has measured.
    pub(crate) what: Evaluated,
    /// The collective by the model alone.
    pub(crate) model_sync: Seconds,
    /// What the policy minimises; None: not admitted, or not anew ([`floor`]).
    pub(crate) score: Option<f64>,
    pub(crate) on_front: bool,
    pub(crate) blocked: bool,
}

impl Priced {
    /// The score, infinitely bad when the policy does not admit it.
    pub(crate) fn cost(&self) -> f64 {
        self.score.unwrap_or(f64::INFINITY)
    }

    pub(crate) fn strategy(&self) -> Strategy {
        self.what.strategy
    }

    /// `41 ms per step`, with the gain when something is lost.
    pub(crate) fn words(&self) -> String {
        let step = crate::words::time(self.what.t_step.get());
        match self.what.gain.get() {
            1.0 => format!("{step} per step"),
            gain => format!("{step} per step at gain {}", crate::words::number(gain)),
        }
    }
}

impl From<&Priced> for Alternative {
    fn from(p: &Priced) -> Self {
        Self {
            strategy: p.what.strategy,
            t_comp_s: p.what.t_comp.get(),
            t_sync_s: p.what.t_sync.get(),
            model_sync_s: p.model_sync.get(),
            t_step_s: p.what.t_step.get(),
            gain: p.what.gain,
            variance: p.what.variance,
            score: p.score,
            on_front: p.on_front,
            blocked: p.blocked,
            terms: p.what.terms,
        }
    }
}

/// Every candidate, priced.
#[derive(Debug)]
pub(crate) struct Costs {
    /// Best first; those that are not admitted last.
    pub(crate) all: Vec<Priced>,
    /// The strategy in force, which may no longer be among the candidates: no slower than modelled.
    pub(crate) in_force: Priced,
    /// The same as its newest steps show it.
    pub(crate) measured: Priced,
    /// The same by the model alone: what the guard holds its steps against.
    pub(crate) modelled: Evaluated,
    /// The step that the links claim for it, when its newest steps tell of another network.
    pub(crate) contradicted: Option<Seconds>,
    /// Whether it still is.
    pub(crate) offered: bool,
    /// The policy's pick among the candidates that are not blocked.
    pub(crate) best: Option<Priced>,
    /// The power that trials' gains are taken to at the ratio in force, when it is not 1.
    pub(crate) gain_power: Option<f64>,
    /// What was priced.
    pub(crate) problem: Problem,
}

/// Prices all candidates and the strategy in force. A candidate whose time leaves the range of a duration
/// is left out; when that is the one in force, nothing can be compared. With `steps`, those that are measured now, the
/// strategy in force takes what they took.
pub(crate) fn price(
    s: &Snapshot,
    links: &LinkMatrix,
    memory: &Memory,
    steps: Option<&Measured>,
    now: Timestamp,
) -> Result<Costs, ProblemError> {
    let powers = Powers::new(s, memory, now);
    let problem = s.problem(links, gains::profiles(s, &powers));
    let space = usable(s.space(), s.ranks);
    let calibration = Calibration::new(s, memory, &problem, now);
    let evaluator = Evaluator::new(&problem);
    let modelled = evaluator.evaluate(&s.strategy())?;
    let scatter = steps.and_then(|m| m.scatter.as_ref());
    let current = match steps.zip(scatter) {
        Some((m, scatter)) => calibration.by_steps(&modelled, m, scatter),
        None => calibration.believe(modelled.clone()),
    };
    // Slower than modelled is the guard's matter, which waits until the links cannot explain it.
    let incumbent = if current.t_step <= modelled.t_step { &current } else { &modelled };
    let believed = |model: Evaluated| {
        let model_sync = model.t_sync;
        let own = model.strategy == current.strategy;
        (if own { incumbent.clone() } else { calibration.believe(model) }, model_sync)
    };
    let models = space.iter().filter_map(|x| evaluator.evaluate(x).ok());
    let (candidates, model_syncs): (Vec<Evaluated>, Vec<Seconds>) = models.map(believed).unzip();
    let front = pareto::front(&candidates);
    let priced = |what: Evaluated, model_sync: Seconds, on_front: bool| Priced {
        score: score(s, &what),
        blocked: memory.blocked(&what.strategy, now).is_some(),
        on_front,
        model_sync,
        what,
    };
    let offered = space.contains(&current.strategy);
    let each = candidates.into_iter().zip(model_syncs).enumerate();
    let mut all: Vec<Priced> = each.map(|(i, (what, sync))| priced(what, sync, front.contains(&i))).collect();
    let best = pick(s, &all, |p| !p.blocked);
    let own = all.iter().find(|p| p.strategy() == current.strategy);
    let in_force = own.cloned().unwrap_or_else(|| priced(incumbent.clone(), modelled.t_sync, false));
    all.sort_by(|a, b| a.cost().total_cmp(&b.cost()));
    let contradicted = scatter.and_then(|steps| calibration.contradiction(&modelled, steps));
    let gain_power = powers.shown(s);
    let measured = priced(current, modelled.t_sync, in_force.on_front);
    Ok(Costs { all, in_force, measured, modelled, contradicted, offered, best, gain_power, problem })
}

/// With one rank nothing travels: only dense makes sense.
fn usable(space: Space, ranks: u32) -> Vec<Strategy> {
    space.strategies().into_iter().filter(|s| ranks > 1 || s.is_dense()).collect()
}

/// The policy's score, None when it is no number or what is not in force does not clear the floor. What keeps the same
/// share by another collective is not new.
fn score(s: &Snapshot, what: &Evaluated) -> Option<f64> {
    let (current, new) = (s.strategy(), what.strategy);
    let in_force = current.selector() == new.selector() && current.cr() == new.cr();
    let noise = s.config.noise_weight * s.measured_now().map_or(0.0, |m| m.gain_spread);
    let least = floor::entry(s.config.policy.gain_floor(), s.config.gain_floor_margin + noise);
    let admitted = in_force || what.quality().effective_gain() >= least;
    let score = s.config.policy.policy().score(what, s.compute.unwrap_or(Seconds::ZERO));
    score.filter(|score| score.is_finite() && admitted)
}

/// Of what is admitted and open; where nothing is, the policy knows what is safe.
fn pick(s: &Snapshot, all: &[Priced], open: impl Fn(&Priced) -> bool) -> Option<Priced> {
    let mut open: Vec<&Priced> = all.iter().filter(|p| open(p)).collect();
    if open.is_empty() {
        return None;
    }
    if open.iter().any(|p| p.score.is_some()) {
        open.retain(|p| p.score.is_some());
    }
    let candidates: Vec<Evaluated> = open.iter().map(|p| p.what.clone()).collect();
    let compute = s.compute.unwrap_or(Seconds::ZERO);
    let choice = s.config.policy.policy().choose(&candidates, &pareto::front(&candidates), compute);
    open.get(choice.index).map(|p| (*p).clone())
}

impl Costs {
    /// The cheapest dense candidate that is not blocked.
    pub(crate) fn dense(&self) -> Option<&Priced> {
        self.all.iter().find(|p| p.what.strategy.is_dense() && !p.blocked)
    }

    /// The policy's pick of some of the candidates.
    pub(crate) fn pick(&self, s: &Snapshot, open: impl Fn(&Priced) -> bool) -> Option<Priced> {
        pick(s, &self.all, open)
    }

    /// A candidate by its strategy.
    pub(crate) fn find(&self, strategy: &Strategy) -> Option<&Priced> {
        self.all.iter().find(|p| p.strategy() == *strategy)
    }

    /// Whether a candidate would keep links that are all as the mean is busy for longer than the strategy in force.
    pub(crate) fn sends_more(&self, p: &Priced) -> bool {
        let links = LinkSummary::of(&self.problem.links);
        let mean = Link::new(links.alpha_mean_s, links.bandwidth_mean_bps);
        let Ok(equal) = mean.and_then(|link| LinkMatrix::uniform(self.problem.links.ranks(), link)) else {
            return false;
        };
        let busy_s = |strategy: Strategy| {
            let load = Load { values: self.problem.values, codec: self.problem.codec(strategy.family()) };
            terms(&strategy, &load, &equal).beta_s
        };
        busy_s(p.strategy()) > busy_s(self.in_force.strategy())
    }

    /// The strategies on the Pareto front.
    pub(crate) fn front(&self) -> Vec<Strategy> {
        self.all.iter().filter(|p| p.on_front).map(Priced::strategy).collect()
    }
}
