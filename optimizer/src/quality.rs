//! What a step leaves of the gradient, and what that costs: every price of quality is [`Quality::steps`].

use flexcomm_domain::{CompressorSpec, Gain, Strategy};
use serde::{Deserialize, Serialize};

/// What a step leaves of the mean gradient.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Quality {
    /// Share of the energy that is sent; of an unbiased compressor without error feedback 1/(1 + ω).
    pub gain: Gain,
    /// ω/N, the relative variance of the mean over ranks; 0 but for unbiased compressors without error feedback.
    pub variance: f64,
    /// How much of the exponent of delay counts under error feedback; none without a memory, where nothing is sent later.
    pub delay: Option<f64>,
}

impl Default for Quality {
    /// Dense: nothing is lost.
    fn default() -> Self {
        Self { gain: Gain::FULL, variance: 0.0, delay: None }
    }
}

impl Quality {
    /// Of a strategy of this gain on so many ranks.
    pub fn of(strategy: &Strategy, gain: Gain, ranks: usize) -> Self {
        let spec = strategy.spec();
        let variance = spec.variance_of_mean(gain.get(), ranks);
        Self { gain, variance, delay: delay(spec) }
    }

    /// Steps that make the progress of one dense step.
    ///
    /// Under error feedback gain^-p with the `exponent` p of [`exponent_of`], times [`Self::delay`]: what is not sent in a step is sent in
    /// a later one, and only the delay costs. Without a memory what is not sent is lost: p = 1.
    ///
    /// An unbiased compressor without memory takes 1 + ω/N: N ranks average errors that are independent and have mean 0, so
    /// that E ‖mean C(g_i)‖² is at most (1 + ω/N) times that of gradients as they are, and the step size and with it the
    /// progress of a step must be smaller by as much: L/μ·(1 + ω/N)·log 1/ε steps (Khirirat, Feyzmahdavian and Johansson,
    /// Distributed learning with compressed gradients, 2018; Gorbunov, Hanzely and Richtárik, A unified theory of SGD, 2020).
    pub fn steps(&self, exponent: f64) -> f64 {
        if self.variance > 0.0 { 1.0 + self.variance } else { self.gain.get().powf(-self.exponent(exponent)) }
    }

    /// The objective 1/gain that strategies compete by, whatever the policy: the steps as if nothing were made up for. With error feedback
    /// who has less of it takes fewer steps at any exponent.
    pub fn inverse_gain(&self) -> f64 {
        self.steps(1.0)
    }

    /// The gain of which [`Self::inverse_gain`] is the inverse: what a least gain is compared with.
    pub fn effective_gain(&self) -> f64 {
        1.0 / self.inverse_gain()
    }

    /// The least gain of which [`Self::effective_gain`] is not below this floor.
    pub fn least_gain(&self, floor: f64) -> f64 {
        floor.powf(1.0 / self.exponent(1.0))
    }

    /// The gain of which [`Self::inverse_gain`] has this logarithm, negated.
    pub fn least(&self, log: f64) -> Gain {
        Gain::new((log / self.exponent(1.0)).exp().clamp(1e-9, 1.0)).unwrap_or(Gain::FULL)
    }

    /// That of the law: 1 where nothing is sent later.
    pub(crate) fn exponent(&self, exponent: f64) -> f64 {
        self.delay.map_or(1.0, |delay| delay * exponent)
    }
}

/// [`Quality::delay`]. Factors of a matrix send at once what successive gradients have in common, and keep back what they have not, which
/// is mostly noise: they keep little of the energy and cost few steps, the fewer the more columns they have (Vogels et al. 2019, table 1:
/// rank 2 trains as SGD does).
pub(crate) fn delay(spec: &CompressorSpec) -> Option<f64> {
    spec.memory().map(|_| spec.rank().map_or(1.0, |rank| LOW_RANK / rank as f64))
}

// Fitted to the regret suite's fixed settings, see docs/decisions/price-of-delay.md.
const LOW_RANK: f64 = 0.5;
const WITHOUT_MOMENTUM: f64 = 0.08;
const AT_ASSUMED: f64 = 0.24;
/// SGD's as it is mostly set, and Adam's default.
const ASSUMED_MOMENTUM: f64 = 0.9;

/// The exponent p of gain^-p, the steps that make the progress of a dense one under error feedback, for an optimizer of this
/// momentum; where it is not known, of [`ASSUMED_MOMENTUM`].
pub fn exponent_of(momentum: Option<f64>) -> f64 {
    let momentum = momentum.unwrap_or(ASSUMED_MOMENTUM);
    WITHOUT_MOMENTUM + (AT_ASSUMED - WITHOUT_MOMENTUM) * (momentum / ASSUMED_MOMENTUM).powi(2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop_assert, proptest};

    fn of(text: &str, gain: f64, ranks: usize) -> Quality {
        Quality::of(&text.parse().unwrap(), Gain::new(gain).unwrap(), ranks)
    }

    #[test]
    fn what_is_sent_later_costs_its_delay_and_what_is_not_costs_all() {
        let steps = |text: &str| of(text, 0.25, 8).steps(0.1);
        assert_eq!(steps("topk(k=0.1)+ef(vanilla)/allgather"), 4f64.powf(0.1));
        assert_eq!(steps("powersgd(rank=1)+ef(vanilla)/dense-ring"), 4f64.powf(0.05));
        assert_eq!(steps("powersgd(rank=4)+ef(vanilla)/dense-ring"), 4f64.powf(0.0125));
        assert_eq!(steps("topk(k=0.1)/allgather"), 4.0);
        assert_eq!(of("none/dense-ring", 1.0, 8).steps(0.1), 1.0);
    }

    #[test]
    fn unbiased_compressors_without_memory_cost_their_variance_over_the_ranks() {
        let steps = |text: &str| of(text, 0.1, 9).steps(0.1);
        assert_eq!(steps("randomk(k=0.1,scaled=true,shared=false)/allgather"), 2.0);
        assert_eq!(steps("randomk(k=0.1,scaled=true)/dense-ring"), 10.0, "all ranks draw alike");
        assert_eq!(of("qsgd(s=4)/allgather", 0.1, 9).effective_gain(), 0.5);
        assert_eq!(of("qsgd(s=4)/allgather", 1.0, 9).steps(0.1), 1.0);
        assert_eq!(of("qsgd(s=7,norm=max)+ef(vanilla)/allgather", 0.1, 9).variance, 0.0, "it is a contraction");
    }

    #[test]
    fn the_least_gain_is_that_of_the_floor() {
        for text in
            ["topk(k=0.1)+ef(vanilla)/allgather", "powersgd(rank=4)+ef(vanilla)/dense-ring", "topk(k=0.1)/allgather"]
        {
            let least = of(text, 1.0, 8).least_gain(0.05);
            assert!((of(text, least, 8).effective_gain() - 0.05).abs() < 1e-9, "{text}: {least}");
        }
    }

    #[test]
    fn delay_costs_what_the_momentum_makes_of_it() {
        let p = |momentum| exponent_of(Some(momentum));
        assert!((p(0.0) - 0.08).abs() < 1e-12 && (p(0.9) - 0.24).abs() < 1e-12 && exponent_of(None) == p(0.9));
        assert!(p(0.0) < p(0.5) && p(0.5) < p(0.9) && p(0.9) < p(0.99));
    }

    proptest! {
        #[test]
        fn more_ranks_and_more_gain_never_cost_more(gain in 0.01..1.0f64, ranks in 1usize..4096, p in 0.0..=1.0f64) {
            for text in ["qsgd(s=4)/allgather", "topk(k=0.1)/allgather", "topk(k=0.1)+ef(vanilla)/allgather"] {
                let (less, more) = (of(text, gain, ranks), of(text, (gain * 1.5).min(1.0), ranks + 1));
                prop_assert!(more.steps(p) <= less.steps(p) && less.steps(p) >= 1.0 && less.steps(p) <= less.inverse_gain());
            }
        }
    }
}
