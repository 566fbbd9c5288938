//! What the training loss tells of compression.

mod means;

pub use means::LOSS_POINTS;

use crate::{Losses, MeanLoss};
use flexcomm_domain::{Plan, Version};
use serde::{Deserialize, Serialize};

/// A loss that is higher than another by more standard errors than this has risen, and one that is lower by more than that has fallen. The
/// lowest of some ten means, which is what a rise is counted from, is lower than the others by chance alone.
pub(crate) const ROSE: f64 = 6.0;
const FELL: f64 = 4.0;
/// A loss that is higher by fewer is as low again.
pub(crate) const BACK: f64 = 2.0;
/// In so many steps a loss falls at the beginning of a training.
const FALLS_WITHIN: u64 = 100;
/// A loss that is lower than where the run began by this share of that has fallen, whatever its noise.
const LEARNT: f64 = 0.2;

impl MeanLoss {
    /// By how many standard errors it is higher than another.
    pub fn above(&self, other: Self) -> f64 {
        (self.mean - other.mean) / self.sd.hypot(other.sd).max(1e-9)
    }

    /// Whether it is of later steps than another, long enough for the loss to have fallen.
    fn is_long_after(&self, other: Self) -> bool {
        self.first_step > other.last_step && self.last_step >= other.last_step + FALLS_WITHIN
    }
}

/// Whether the loss falls at all since a run began, and what is known where it does not.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum LossWatch {
    /// No loss is known yet.
    #[default]
    New,
    /// It has not fallen yet.
    Watching {
        /// The decision in force,
        version: Version,
        /// and the first loss under it.
        first: MeanLoss,
    },
    /// Dense steps are run to see whether it falls under these.
    DenseTest {
        /// It did not fall under this plan,
        plan: Plan,
        /// which was expected to take so many steps for the progress of a dense one, as a logarithm,
        log_steps: f64,
        /// but stayed here.
        flat: MeanLoss,
    },
    /// It fell under dense steps and not under a plan: in this run nothing is decided that takes nearly as many steps as that for the
    /// progress of a dense one.
    Refused {
        /// That plan.
        plan: Plan,
        /// As in the test.
        log_steps: f64,
    },
    /// It has fallen, or does not fall under dense steps either.
    Over,
}

impl LossWatch {
    pub(crate) fn is_new(&self) -> bool {
        *self == Self::New
    }

    /// The plan that may not be decided, and the logarithm of the steps that it takes.
    pub fn refused(&self) -> Option<(&Plan, f64)> {
        if let Self::Refused { plan, log_steps } = self { Some((plan, *log_steps)) } else { None }
    }

    /// Whether dense steps are run to see whether it falls under these.
    pub(crate) fn tests_dense(&self) -> bool {
        matches!(self, Self::DenseTest { .. })
    }

    /// After a look at the newest losses, those of a plan.
    #[must_use]
    pub(crate) fn after(self, losses: &Losses, plan: &Plan) -> Self {
        let (version, newest) = (losses.version, losses.newest);
        let fell_from = |first: MeanLoss| first.above(newest) > FELL;
        match self {
            Self::New | Self::Watching { .. } if losses.has_fallen() => Self::Over,
            Self::New => Self::Watching { version, first: newest },
            Self::Watching { version: before, .. } if before != version => Self::Watching { version, first: newest },
            Self::Watching { first, .. } if plan.is_dense() && newest.is_long_after(first) => Self::Over,
            // Something else is pinned.
            Self::DenseTest { .. } if !plan.is_dense() => Self::Over,
            Self::DenseTest { plan, log_steps, flat } if fell_from(flat) => Self::Refused { plan, log_steps },
            Self::DenseTest { flat, .. } if newest.is_long_after(flat) => Self::Over,
            as_before => as_before,
        }
    }

    /// The first loss under the plan in force, where the loss is not lower. Constant losses are none of a training.
    pub(crate) fn not_lower_than(&self, losses: &Losses) -> Option<MeanLoss> {
        let Self::Watching { version, first } = self else { return None };
        let newest = losses.newest;
        let is_flat = *version == losses.version
            && !losses.has_fallen()
            && newest.is_long_after(*first)
            && newest.mean >= first.mean
            && newest.sd > 0.0;
        is_flat.then_some(*first)
    }
}

impl Losses {
    /// Whether it is much lower than where the run began; also where that is too long ago to tell.
    fn has_fallen(&self) -> bool {
        self.began.is_none_or(|began| began - self.newest.mean > LEARNT * began.abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POWERSGD: &str = "powersgd(rank=1)+ef(vanilla)/dense-ring";
    const DENSE: &str = "none/dense-ring";

    /// The 24 losses up to a step.
    fn losses(version: u64, last_step: u64, mean: f64) -> Losses {
        let newest = MeanLoss { mean, sd: 0.05, first_step: last_step.saturating_sub(23), last_step };
        Losses { version: Version(version), began: Some(2.4), before: None, newest }
    }

    fn after(watch: &LossWatch, plan: &str, looks: &[(u64, u64, f64)]) -> LossWatch {
        let plan: Plan = plan.parse().unwrap();
        looks
            .iter()
            .fold(watch.clone(), |watch, (version, step, mean)| watch.after(&losses(*version, *step, *mean), &plan))
    }

    #[test]
    fn a_loss_that_is_not_lower_after_a_hundred_steps_of_a_plan_is_flat() {
        let watch = after(&LossWatch::New, POWERSGD, &[(1, 34, 2.30), (1, 60, 2.25)]);
        assert_eq!(watch.not_lower_than(&losses(1, 133, 2.31)), None, "99 steps");
        assert_eq!(watch.not_lower_than(&losses(1, 134, 2.31)).unwrap().mean, 2.30);
        assert_eq!(watch.not_lower_than(&losses(1, 134, 2.29)), None, "lower");
        let sparse = MeanLoss { mean: 2.31, sd: 0.05, first_step: 20, last_step: 400 };
        assert_eq!(watch.not_lower_than(&Losses { newest: sparse, ..losses(1, 0, 0.0) }), None, "of the same steps");
        let constant = MeanLoss { sd: 0.0, ..losses(1, 134, 2.31).newest };
        assert_eq!(watch.not_lower_than(&Losses { newest: constant, ..losses(1, 0, 0.0) }), None);
        // What one plan does not do in 80 steps is not the next one's fault, and neither is what dense steps do not do.
        let next = after(&watch, POWERSGD, &[(1, 114, 2.31), (2, 140, 2.31)]);
        assert_eq!(next.not_lower_than(&losses(2, 170, 2.31)), None);
        assert_eq!(after(&watch, DENSE, &[(2, 60, 2.3), (2, 160, 2.3)]), LossWatch::Over);
        // It has fallen, or the run is not at its beginning.
        assert_eq!(after(&watch, POWERSGD, &[(1, 90, 1.9)]), LossWatch::Over);
        let later = Losses { began: None, ..losses(7, 9000, 2.3) };
        assert_eq!(LossWatch::New.after(&later, &POWERSGD.parse().unwrap()), LossWatch::Over);
    }

    #[test]
    fn a_plan_is_refused_where_the_loss_falls_under_dense_steps_alone() {
        let plan: Plan = POWERSGD.parse().unwrap();
        let (log_steps, flat) = (0.4, losses(1, 140, 2.3).newest);
        let test = LossWatch::DenseTest { plan: plan.clone(), log_steps, flat };
        for fell in [&[(2, 170, 2.3), (2, 230, 1.8)][..], &[(2, 170, 1.8)]] {
            assert_eq!(after(&test, DENSE, fell), LossWatch::Refused { plan: plan.clone(), log_steps });
        }
        assert!(after(&test, DENSE, &[(2, 170, 2.3), (2, 239, 2.2)]).tests_dense());
        assert_eq!(after(&test, DENSE, &[(2, 170, 2.3), (2, 240, 2.2)]), LossWatch::Over, "nor under dense steps");
        assert_eq!(after(&test, POWERSGD, &[(3, 170, 2.3)]), LossWatch::Over, "it is pinned");
        let stored = serde_json::to_string(&test).unwrap();
        assert_eq!(serde_json::from_str::<LossWatch>(&stored).unwrap(), test);
    }
}
