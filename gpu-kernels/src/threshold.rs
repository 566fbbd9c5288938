//! Methods with a threshold, and how each finds it: launches that leave in the workspace which keys are selected.

use crate::device::start;
use crate::feed::Feed;
use crate::random::{Random, philox};
use crate::select::{Selected, begin, settle, take};
use crate::workspace::{Workspace, require};
use crate::{Device, LaunchError, Span};

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
    feed: &'a Feed,
    n: u32,
    parts: Workspace,
}

/// Error feedback, selection by a threshold, and the memory's update. At most `to.room` values are selected; with less room than
/// the method may need, what is left over stays in the memory and the outcome says so.
pub fn threshold(
    device: &impl Device,
    feed: &Feed,
    (method, to): (Threshold, &Selected),
    workspace: Span,
) -> Result<(), LaunchError> {
    let n = feed.check()?;
    let parts = Workspace::new(workspace, feed.n)?;
    let room = to.check()?;
    method.check(feed.n, &parts)?;
    let call = Call { device, feed, n, parts };
    device.zero(parts.zeroed)?;
    let most = match method {
        Threshold::Above { v } => call.above(v)?,
        Threshold::MsTopK { k, random } => call.mstopk(k, random)?,
        Threshold::Dgc { k, sample, most, random } => call.dgc((k, random), sample, most)?,
        Threshold::Sidco { k, fit, first, stages } => call.sidco((k, fit), first, stages)?,
    };
    take(device, feed, (n, room.min(most), to), &parts)
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
    fn settle_at(&self, key: u64) -> Result<u32, LaunchError> {
        self.device.launch("settle_at", 1, &[self.parts.state.address(), key])?;
        Ok(self.n)
    }

    fn groups(&self) -> u64 {
        self.feed.n.div_ceil(4)
    }

    fn above(&self, v: f32) -> Result<u32, LaunchError> {
        begin(self.device, self.feed, (self.n, 0), &self.parts)?;
        self.settle_at(u64::from(v.to_bits() & 0x7fff_ffff) + 1)
    }

    fn mstopk(&self, k: u64, random: Random) -> Result<u32, LaunchError> {
        let (n, parts, compensated) = (self.n, &self.parts, self.feed.compensated.address());
        // At most n, so 32 bits hold it.
        let kept = k as u32;
        if kept == n {
            begin(self.device, self.feed, (n, kept), parts)?;
            return self.settle_at(if n == 0 { NO_KEY } else { 0 });
        }
        begin(self.device, self.feed, (n, kept + 1), parts)?;
        settle(self.device, self.feed, n, parts, true)?;
        let (state, outcome) = (parts.state.address(), parts.outcome.address());
        self.device.launch("bisect", 1, &[state, outcome])?;
        let key = random.key(0);
        let [a, b, ..] = philox([0, 0, key[2], key[3]], [key[0], key[1]]);
        let seed = u64::from(a) << 32 | u64::from(b);
        let arguments = [compensated, u64::from(n), k, seed, state, outcome];
        start(self.device, "count_band", self.groups(), &arguments)?;
        Ok(kept)
    }

    fn dgc(&self, (k, random): (u64, Random), share: f64, most: f64) -> Result<u32, LaunchError> {
        let (device, feed, n, parts) = (self.device, self.feed, self.n, &self.parts);
        begin(device, feed, (n, k as u32), parts)?;
        if n == 0 {
            return self.settle_at(NO_KEY);
        }
        let samples = samples(feed.n, share);
        let rank = (samples as f64 * (k as f64 / feed.n as f64)).round().clamp(1.0, samples as f64) as u64;
        let most = ((k as f64 * most) as u64).clamp(k, feed.n);
        let [a, b, c, _] = random.key(0).map(u64::from);
        let (compensated, list) = (feed.compensated.address(), parts.list.address());
        let (state, sampled, outcome) = (parts.state.address(), parts.sampled.address(), parts.outcome.address());
        let arguments = [compensated, feed.n, samples, rank, a, b, c, list, sampled, outcome];
        start(device, "sample", samples, &arguments)?;
        // The sample is short: its keys are looked through again, without a list.
        start(device, "cut_second", samples, &[list, samples, sampled, outcome, 0, 0, 0])?;
        start(device, "cut_third", samples, &[list, samples, sampled, outcome, 0, 0])?;
        start(device, "reach", self.groups(), &[compensated, feed.n, most, sampled, state, outcome])?;
        settle(device, feed, n, parts, false)?;
        Ok(most as u32)
    }

    fn sidco(&self, (k, fit): (u64, Fit), first: f64, stages: u32) -> Result<u32, LaunchError> {
        begin(self.device, self.feed, (self.n, 0), &self.parts)?;
        if k == self.feed.n {
            return self.settle_at(if k == 0 { NO_KEY } else { 0 });
        }
        let share = k as f64 / self.feed.n.max(1) as f64;
        let parts = &self.parts;
        for stage in 1..=stages {
            let aim = if stage < stages { first } else { share / first.powi(stages as i32 - 1) };
            let fit = match fit {
                Fit::Exponential => 0,
                Fit::Gamma if stage == 1 => 1,
                Fit::Gamma | Fit::Pareto => 2,
            };
            let arguments = [
                self.feed.compensated.address(),
                self.feed.n,
                fit,
                aim.to_bits(),
                u64::from(stage > 1),
                parts.state.address(),
                parts.outcome.address(),
                parts.partials.address(),
            ];
            start(self.device, "fit_stage", self.groups(), &arguments)?;
        }
        Ok(self.n)
    }
}
