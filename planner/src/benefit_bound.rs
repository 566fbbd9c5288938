//! What compressing could win at most. A trial stops training for seconds, and for the first one DDP registers a hook that
//! it cannot remove: while dense runs none is asked for where no answer could lead to a change.

use crate::solve::{Costs, Priced};
use crate::{Snapshot, trial};
use flexcomm_domain::{Gain, Seconds, Selector, Strategy};
use flexcomm_optimizer::{Evaluated, Terms};
use std::collections::BTreeSet;

/// So many seconds of steps tell what they take as well as `least_steps` of them: slow ones need not be waited for.
const ENOUGH_S: f64 = 2.0;

/// Dense steps, and the best that could come in their place.
pub(crate) struct BenefitBound<'a> {
    s: &'a Snapshot,
    /// On links that are trusted.
    costs: Option<&'a Costs>,
    unmeasured: BTreeSet<Selector>,
}

impl<'a> BenefitBound<'a> {
    /// `costs` on links that are trusted, or none: then the steps alone tell.
    pub(crate) fn new(s: &'a Snapshot, costs: Option<&'a Costs>) -> Self {
        Self { s, costs, unmeasured: trial::unmeasured(s) }
    }

    /// Whether a candidate of these selectors would be better than dense by the margin if it lost nothing and, where no
    /// trial has timed it, took no time to compress. Where the links are not known, nothing but computing is left of its
    /// step.
    pub(crate) fn holds(&self, of: impl Fn(&Selector) -> bool) -> bool {
        let Some(dense) = self.dense() else { return false };
        let wins = |x: Evaluated| self.score(&x).is_some_and(|best| best < dense * (1.0 - self.s.config.hysteresis));
        match self.costs {
            Some(costs) => {
                let open = |p: &&Priced| !p.blocked && !p.strategy().is_dense() && of(&p.strategy().selector());
                costs.all.iter().filter(open).any(|p| wins(self.at_best(p)))
            }
            None => wins(self.step_of(Seconds::ZERO)),
        }
    }

    /// The score of dense. What its steps are measured to take longer than predicted, links may hide.
    fn dense(&self) -> Option<f64> {
        let measured = self.measured_sync();
        let Some(costs) = self.costs else { return self.score(&self.step_of(measured?)) };
        let late = measured.map_or(0.0, |m| (m.get() - costs.in_force.what.t_sync.get()).max(0.0));
        let dense = costs.dense().unwrap_or(&costs.in_force).what.clone();
        self.score(&Evaluated { t_sync: plus(dense.t_sync, late), t_step: plus(dense.t_step, late), ..dense })
    }

    /// What collectives take in the steps in force, when enough of them are measured.
    fn measured_sync(&self) -> Option<Seconds> {
        let m = self.s.measured_now()?;
        let enough = m.steps >= self.s.config.least_steps || m.steps as f64 * m.t_step.get() >= ENOUGH_S;
        enough.then_some(m.t_sync)
    }

    fn at_best(&self, p: &Priced) -> Evaluated {
        let what = p.what.clone();
        let free = if self.unmeasured.contains(&p.strategy().selector()) { what.t_comp.get() } else { 0.0 };
        Evaluated {
            t_comp: plus(what.t_comp, -free),
            t_step: plus(what.t_step, -free),
            gain: Gain::FULL,
            variance: 0.0,
            ..what
        }
    }

    /// A step that loses nothing, with so long a collective.
    fn step_of(&self, t_sync: Seconds) -> Evaluated {
        let t_step = plus(t_sync, self.s.compute.map_or(0.0, Seconds::get));
        let (strategy, terms) = (Strategy::DENSE_RING, Terms::default());
        Evaluated { strategy, t_comp: Seconds::ZERO, t_sync, t_step, gain: Gain::FULL, variance: 0.0, terms }
    }

    fn score(&self, what: &Evaluated) -> Option<f64> {
        let score = self.s.config.policy.policy().score(what, self.s.compute.unwrap_or(Seconds::ZERO));
        score.filter(|score| score.is_finite())
    }
}

/// Never below 0.
fn plus(time: Seconds, by: f64) -> Seconds {
    Seconds::new((time.get() + by).max(0.0)).unwrap_or(time)
}
