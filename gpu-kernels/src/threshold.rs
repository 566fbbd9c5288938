//! Methods with a threshold, and how each finds it: launches that leave in the workspace which keys are selected.

use crate::feedback::ErrorFeedback;
use crate::launch::{Words, launch, start};
use crate::random::Random;
use crate::select::{Selection, begin, settle, take};
use crate::workspace::{Workspace, require};
use crate::{Device, LaunchError, Span};
use flexcomm_compression::random::philox;

/// A distribution of magnitudes that SIDCo fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fit {
    /// SIDCo-E.
    Exponential,
    /// Gamma first, then Pareto: SIDCo-GP.
    Gamma,
    /// SIDCo-P.
    Pareto,
}

/// A method and its parameters, as in the strategies' text; k is a number of values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Threshold {
    /// `threshold`: all magnitudes above v.
    Above {
        /// At least 0.
        v: f32,
    },
    /// `mstopk`: exactly k values.
    MsTopK {
        /// From 1 to n.
        k: u64,
        /// Of this step and rank.
        random: Random,
    },
    /// `dgc`, `sgc`.
    Dgc {
        /// About how many values.
        k: u64,
        /// Share of the values that the threshold is estimated from; at most an eighth.
        sample: f64,
        /// Times k, beyond which a top-k follows.
        most: f64,
        /// Of this step and rank.
        random: Random,
    },
    /// `sidco`. The caller adapts the number of stages to what earlier steps kept.
    Sidco {
        /// About how many values.
        k: u64,
        /// Of |x|.
        fit: Fit,
        /// Share that each stage but the last aims at.
        first: f64,
        /// From 1.
        stages: u32,
    },
}

/// Fewer are no estimate: shorter tensors are looked at whole.
const LEAST_SAMPLES: u64 = 1024;

/// Keys from here on: none of a finite value.
const NO_KEY: u64 = 0x7f80_0000;

/// One call on its way.
struct Call<'a, D> {
    device: &'a D,
    feedback: &'a ErrorFeedback,
    parts: Workspace,
}

/// Error feedback, selection by a threshold, and the memory's update. At most `to.len` values are selected; with less room than
/// the method may need, what is left over stays in the memory and the outcome says so.
pub fn threshold(
    device: &impl Device,
    feedback: &ErrorFeedback,
    method: Threshold,
    to: &Selection,
    workspace: Span,
) -> Result<(), LaunchError> {
    feedback.check()?;
    let parts = Workspace::new(workspace, feedback.n)?;
    to.check()?;
    method.check(feedback.n, &parts)?;
    let call = Call { device, feedback, parts };
    device.zero(parts.zeroed)?;
    let most = match method {
        Threshold::Above { v } => call.above(v)?,
        Threshold::MsTopK { k, random } => call.mstopk(k, random)?,
        Threshold::Dgc { k, sample, most, random } => call.dgc(k, random, sample, most)?,
        Threshold::Sidco { k, fit, first, stages } => call.sidco(k, fit, first, stages)?,
    };
    take(device, feedback, to.len.min(most), to, &parts)
}

fn samples(n: u64, share: f64) -> u64 {
    ((n as f64 * share).ceil() as u64).max(LEAST_SAMPLES).min(n)
}

impl Threshold {
    fn check(&self, n: u64, parts: &Workspace) -> Result<(), LaunchError> {
        let (Self::MsTopK { k, .. } | Self::Dgc { k, .. } | Self::Sidco { k, .. }) = *self else {
            let Self::Above { v } = *self else { return Ok(()) };
            return require(v >= 0.0 && v.is_finite(), "v", v.into(), "finite, not negative");
        };
        require(k <= n && (k == 0) == (n == 0), "k", k as f64, "from 1 to n")?;
        match *self {
            Self::Dgc { sample, most, .. } => {
                let listed = sample > 0.0 && samples(n, sample) <= parts.room_of_list();
                require(listed, "sample", sample, "above 0, and at most an eighth")?;
                require((1.0..=100.0).contains(&most), "most", most, "from 1 to 100")
            }
            Self::Sidco { first, stages, .. } => {
                require(first > 0.0 && first < 1.0, "first", first, "inside 0 to 1")?;
                require((1..=64).contains(&stages), "stages", stages.into(), "from 1 to 64")
            }
            _ => Ok(()),
        }
    }
}

impl<D: Device> Call<'_, D> {
    /// Every key from `key` on.
    fn settle_at(&self, key: u64) -> Result<u64, LaunchError> {
        launch(self.device, "settle_at", 1, (self.parts.state, key))?;
        Ok(self.feedback.n)
    }

    fn begin(&self, k: u64) -> Result<(), LaunchError> {
        begin(self.device, self.feedback, k, &self.parts)
    }

    /// Launches a kernel that reads the compensated gradient.
    fn read(&self, kernel: &'static str, arguments: impl Words) -> Result<(), LaunchError> {
        let ErrorFeedback { compensated, n, .. } = *self.feedback;
        start(self.device, kernel, n.div_ceil(4), (compensated, n, arguments))
    }

    fn above(&self, v: f32) -> Result<u64, LaunchError> {
        self.begin(0)?;
        self.settle_at(u64::from(v.to_bits() & 0x7fff_ffff) + 1)
    }

    fn mstopk(&self, k: u64, random: Random) -> Result<u64, LaunchError> {
        let (n, Workspace { state, outcome, .. }) = (self.feedback.n, self.parts);
        if k == n {
            self.begin(k)?;
            return self.settle_at(if n == 0 { NO_KEY } else { 0 });
        }
        self.begin(k + 1)?;
        settle(self.device, self.feedback, &self.parts, true)?;
        launch(self.device, "bisect", 1, (state, outcome))?;
        let key = random.key(0);
        let [a, b, ..] = philox([0, 0, key[2], key[3]], [key[0], key[1]]);
        self.read("count_band", (k, u64::from(a) << 32 | u64::from(b), state, outcome))?;
        Ok(k)
    }

    fn dgc(&self, k: u64, random: Random, share: f64, most: f64) -> Result<u64, LaunchError> {
        let (device, n) = (self.device, self.feedback.n);
        self.begin(k)?;
        if n == 0 {
            return self.settle_at(NO_KEY);
        }
        let samples = samples(n, share);
        let rank = (samples as f64 * (k as f64 / n as f64)).round().clamp(1.0, samples as f64) as u64;
        let most = ((k as f64 * most) as u64).clamp(k, n);
        let Workspace { state, outcome, sampled, list, .. } = self.parts;
        let drawn = (samples, rank, random.stream(0));
        start(device, "sample", samples, (self.feedback.compensated, n, drawn, list, sampled, outcome))?;
        // The sample is short: its keys are looked through again, without a list.
        let (keys, none) = ((list, samples, sampled, outcome), (Span::NONE, 0u32));
        start(device, "cut_second", samples, (keys, none, Span::NONE))?;
        start(device, "cut_third", samples, (keys, none))?;
        self.read("reach", (most, sampled, state, outcome))?;
        settle(device, self.feedback, &self.parts, false)?;
        Ok(most)
    }

    fn sidco(&self, k: u64, fit: Fit, first: f64, stages: u32) -> Result<u64, LaunchError> {
        let n = self.feedback.n;
        self.begin(0)?;
        if k == n {
            return self.settle_at(if k == 0 { NO_KEY } else { 0 });
        }
        let share = k as f64 / n.max(1) as f64;
        for stage in 1..=stages {
            let aim = if stage < stages { first } else { share / first.powi(stages as i32 - 1) };
            let fit = match fit {
                Fit::Exponential => 0u32,
                Fit::Gamma if stage == 1 => 1,
                Fit::Gamma | Fit::Pareto => 2,
            };
            self.read("fit_stage", (fit, aim, stage > 1, self.parts.ends()))?;
        }
        Ok(n)
    }
}
