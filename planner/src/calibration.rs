//! Calibrates the cost model by what this job has measured itself.
//!
//! The model's coefficients are fitted over all jobs that used a backend, and its links are claims of agents. Steps that
//! the job has run are neither. So what is predicted of dense and of the strategy in force starts from their own measured
//! times, and the model says only by how much the links have changed them since. What is in force is believed to take
//! what its newest steps took, within their scatter.
//!
//! Steps show a change of the network before links do. What was remembered in the seconds before links moved may have
//! the change in it, which must not be counted twice: such a factor counts up to [`MOST_DOUBTED`].
//!
//! Links may also claim a change that the steps do not show. Then one of them is wrong, and it is not the steps: nothing
//! is learnt from such links, and no strategy that works is left because of them ([`Calibration::contradiction`]).

use crate::memory::Seen;
use crate::{Measured, Memory, Scatter, Snapshot};
use flexcomm_domain::{Seconds, Strategy, Timestamp};
use flexcomm_optimizer::problem::overlapped;
use flexcomm_optimizer::{Evaluated, Problem, Terms};

/// Bound of a factor that may have an unseen change of the network in it, and of its inverse.
const MOST_DOUBTED: f64 = 2.0;

/// Claimed and measured step differ by more than this factor: they tell of different networks. The cost model is off by
/// less than that, token buckets and shared memory included.
const CONTRADICTION: f64 = 4.0;

/// Times that the job has measured, as corrections of the model.
pub(crate) struct Calibration<'a> {
    problem: &'a Problem,
    /// Links have moved when the model's times change by this share.
    link_change: f64,
    known: Vec<Known<'a>>,
}

/// One measured strategy.
struct Known<'a> {
    strategy: Strategy,
    cost: &'a Measured,
    /// The model's time of the collective on the links of then, seconds.
    then_s: f64,
    /// Measured over modelled time of the collective, on the links of then.
    factor: f64,
}

impl<'a> Calibration<'a> {
    pub(crate) fn new(s: &Snapshot, memory: &'a Memory, problem: &'a Problem, now: Timestamp) -> Self {
        let current = s.strategy();
        let fresh = |x: &Seen| now.since(x.at) < s.config.trial_review_s;
        let counts = |x: &&Seen| x.strategy.is_dense() || x.strategy == current && fresh(x);
        let known = memory.seen.iter().filter(counts).filter_map(|seen| {
            let then_s = modelled(problem, &seen.strategy, seen.terms?);
            let factor = seen.cost.t_sync.get() / then_s;
            let usable = factor.is_finite() && factor > 0.0;
            let bounded = if seen.doubted { factor.clamp(1.0 / MOST_DOUBTED, MOST_DOUBTED) } else { factor };
            usable.then_some(Known { strategy: seen.strategy, cost: &seen.cost, then_s, factor: bounded })
        });
        Self { problem, link_change: s.config.link_change, known: known.collect() }
    }

    /// What is believed of a strategy, from what the model alone says.
    pub(crate) fn believe(&self, modelled: Evaluated) -> Evaluated {
        let Some(own) = self.own(&modelled.strategy) else { return modelled };
        let t_comp = if modelled.strategy.is_dense() { modelled.t_comp } else { own.cost.t_comp };
        let t_sync = Seconds::new(modelled.t_sync.get() * own.factor).unwrap_or(modelled.t_sync);
        self.with_times(modelled, t_comp, t_sync)
    }

    fn own(&self, strategy: &Strategy) -> Option<&Known<'a>> {
        self.known.iter().find(|k| k.strategy == *strategy)
    }

    fn with_times(&self, what: Evaluated, t_comp: Seconds, t_sync: Seconds) -> Evaluated {
        let step = overlapped(self.problem.compute.get(), t_comp.get() + t_sync.get(), self.problem.overlap);
        Seconds::new(step).map_or(what.clone(), |t_step| Evaluated { t_comp, t_sync, t_step, ..what })
    }

    /// The step that the links claim for the strategy in force, when its newest steps show nothing of it: they claim a
    /// change since its times were noted, or from the start a network on which such fast steps are impossible.
    pub(crate) fn contradiction(&self, modelled: &Evaluated, steps: &Scatter) -> Option<Seconds> {
        let slower = |t: Seconds| t.get() > CONTRADICTION * steps.step_high.get();
        let faster = |t: Seconds| t.get() * CONTRADICTION < steps.step_low.get();
        let claimed = self.believe(modelled.clone()).t_step;
        let contradicts = match self.own(&modelled.strategy) {
            Some(own) => {
                let (moved, least) = (modelled.t_sync.get() / own.then_s, 1.0 + self.link_change);
                // Where the model by itself agrees with the steps, the times that were noted are out of date.
                moved > least && slower(claimed) && slower(modelled.t_step)
                    || moved * least < 1.0 && faster(claimed) && faster(modelled.t_step)
            }
            None => {
                let unfitted = self.problem.compute.get() + modelled.terms.alpha_s + modelled.terms.beta_s;
                slower(modelled.t_step) && unfitted > CONTRADICTION * steps.step_high.get()
            }
        };
        contradicts.then_some(claimed)
    }

    /// What is believed of the strategy in force by its newest steps: what they took while links count as unmoved, and
    /// within their scatter when the model says that links have changed it since.
    pub(crate) fn by_steps(&self, modelled: &Evaluated, m: &Measured, steps: &Scatter) -> Evaluated {
        let believed = self.believe(modelled.clone());
        let least = 1.0 + self.link_change;
        let moved = self.own(&modelled.strategy).is_some_and(|own| {
            let change = modelled.t_sync.get() / own.then_s;
            change > least || change * least < 1.0
        });
        let t_sync = if moved { clamp(believed.t_sync, steps.sync_low, steps.sync_high) } else { m.t_sync };
        let held = self.with_times(believed.clone(), believed.t_comp, t_sync);
        Evaluated { t_step: clamp(held.t_step, steps.step_low, steps.step_high), ..held }
    }
}

fn modelled(problem: &Problem, strategy: &Strategy, terms: Terms) -> f64 {
    problem.coefficients.get(strategy.collective(), &problem.backend).predict(terms)
}

fn clamp(time: Seconds, low: Seconds, high: Seconds) -> Seconds {
    Seconds::new(time.get().max(low.get()).min(high.get())).unwrap_or(time)
}
