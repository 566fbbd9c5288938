//! What a step leaves of the gradient, and what that costs: every price of quality is [`Quality::steps`].

use flexcomm_domain::{Gain, Strategy};
use serde::{Deserialize, Serialize};

/// What a step leaves of the mean gradient.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Quality {
    /// Share of the energy that is sent; of an unbiased compressor without error feedback 1/(1 + ω).
    pub gain: Gain,
    /// ω/N, the relative variance of the mean over ranks; 0 but for unbiased compressors without error feedback.
    pub variance: f64,
    /// Whether error feedback keeps what is not sent.
    #[serde(rename = "is_fed")]
    pub has_error_feedback: bool,
}

impl Default for Quality {
    /// Dense: nothing is lost.
    fn default() -> Self {
        Self { gain: Gain::FULL, variance: 0.0, has_error_feedback: false }
    }
}

impl Quality {
    /// Of a strategy of this gain on so many ranks.
    pub fn of(strategy: &Strategy, gain: Gain, ranks: usize) -> Self {
        let spec = strategy.spec();
        let variance = spec.variance_of_mean(gain.get(), ranks);
        Self { gain, variance, has_error_feedback: spec.memory().is_some() }
    }

    /// Steps that make the progress of one dense step, `uncompensated` being the share u of the work that error feedback does
    /// not make up for.
    ///
    /// Under error feedback 1 − u + u/gain. The form is that of its convergence bounds (Stich and Karimireddy, The
    /// Error-Feedback Framework, 2020): gain divides only the term of the smooth, noiseless problem, not that of the stochastic
    /// gradient. Without a memory nothing is made up for: u = 1.
    ///
    /// An unbiased compressor without memory takes 1 + ω/N: N ranks average errors that are independent and have mean 0, so
    /// that E ‖mean C(g_i)‖² is at most (1 + ω/N) times that of gradients as they are, and the step size and with it the
    /// progress of a step must be smaller by as much: L/μ·(1 + ω/N)·log 1/ε steps (Khirirat, Feyzmahdavian and Johansson,
    /// Distributed learning with compressed gradients, 2018; Gorbunov, Hanzely and Richtárik, A unified theory of SGD, 2020).
    pub fn steps(&self, uncompensated: f64) -> f64 {
        self.steps_losing(self.lost(uncompensated))
    }

    /// The same as if nothing were made up for: the objective that strategies compete by, whatever the policy.
    pub fn inverse_gain(&self) -> f64 {
        self.steps_losing(1.0)
    }

    /// The gain of which [`Self::inverse_gain`] is the inverse: what a least gain is compared with.
    pub fn effective_gain(&self) -> f64 {
        1.0 / self.inverse_gain()
    }

    /// The share of what is not sent that is lost.
    pub(crate) fn lost(&self, uncompensated: f64) -> f64 {
        if self.has_error_feedback { uncompensated } else { 1.0 }
    }

    fn steps_losing(&self, lost: f64) -> f64 {
        if self.variance > 0.0 { 1.0 + self.variance } else { 1.0 - lost + lost / self.gain.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop_assert, proptest};

    fn of(text: &str, gain: f64, ranks: usize) -> Quality {
        Quality::of(&text.parse().unwrap(), Gain::new(gain).unwrap(), ranks)
    }

    #[test]
    fn what_is_fed_back_costs_its_share_and_what_is_not_costs_all() {
        let steps = |text: &str| of(text, 0.25, 8).steps(0.1);
        assert_eq!(steps("topk(k=0.1)+ef(vanilla)/allgather"), 0.9 + 0.1 * 4.0);
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

    proptest! {
        #[test]
        fn more_ranks_and_more_gain_never_cost_more(gain in 0.01..1.0f64, ranks in 1usize..4096, u in 0.0..=1.0f64) {
            for text in ["qsgd(s=4)/allgather", "topk(k=0.1)/allgather", "topk(k=0.1)+ef(vanilla)/allgather"] {
                let (less, more) = (of(text, gain, ranks), of(text, (gain * 1.5).min(1.0), ranks + 1));
                prop_assert!(more.steps(u) <= less.steps(u) && less.steps(u) >= 1.0 && less.steps(u) <= less.inverse_gain());
            }
        }
    }
}
