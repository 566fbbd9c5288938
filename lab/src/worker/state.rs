//! Everything that training depends on, and its snapshot.

use super::Spoil;
use super::data::{Images, Order};
use super::model::{Network, Shape};
use super::sync::{SyncError, Synchronizer};
use flexcomm_exchange::Bucket;
use flexcomm_trainer::{Costs, Tick};
use std::time::{Duration, Instant};

/// Settings of the optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Samples per rank and step.
    pub batch: usize,
    /// Learning rate.
    pub lr: f32,
    /// Share of the last update that is kept.
    pub momentum: f32,
    /// Forward and backward take at least this long.
    pub least_compute: Duration,
}

/// One update by SGD of slices of one length. A compressed gradient is 0 at most coordinates, where the velocity only decays:
/// after some 800 steps it would be subnormal and stay so, and processors take tens of times as long for such values.
pub fn sgd_update(parameters: &mut [f32], velocity: &mut [f32], gradient: &[f32], lr: f32, momentum: f32) {
    let state = parameters.iter_mut().zip(velocity).zip(gradient);
    for ((parameter, velocity), gradient) in state {
        let next = momentum * *velocity + gradient;
        *velocity = if next.abs() < f32::MIN_POSITIVE { 0.0 } else { next };
        *parameter -= lr * *velocity;
    }
}

/// What a rank trains on.
pub struct Inputs {
    /// Its shard.
    pub images: Images,
    /// Of the order of images, another one on every rank.
    pub order_seed: u64,
    /// Of the first parameters, the same on every rank.
    pub parameters_seed: u64,
    /// What changes its gradients.
    pub spoil: Spoil,
}

/// A rank's training.
///
/// What changes from step to step is `parameters`, `velocity` and the compressor's memory. The data position
/// and MSTopk's randomness are functions of the step, which the agreement keeps; all other fields are buffers.
pub struct Training {
    sgd: Sgd,
    images: Images,
    order: Order,
    network: Network,
    parameters: Vec<f32>,
    velocity: Vec<f32>,
    gradient: Vec<f32>,
    mean: Vec<f32>,
    sync: Synchronizer,
    spoil: Spoil,
}

/// What one exchange and its update cost and showed.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    pub costs: Costs,
    /// Mean loss of this rank's batch.
    pub loss: f32,
}

/// A copy of what changes but the residual, of which the bucket keeps training's own in a trial.
pub struct Saved {
    parameters: Vec<f32>,
    velocity: Vec<f32>,
}

impl Training {
    /// With no velocity.
    pub fn new(shape: &Shape, sgd: Sgd, inputs: Inputs, sync: Synchronizer) -> Self {
        let n = shape.parameters();
        Self {
            sgd,
            order: Order::new(inputs.images.len(), inputs.order_seed),
            images: inputs.images,
            network: Network::new(shape.clone()),
            parameters: shape.initial(inputs.parameters_seed),
            velocity: vec![0.0; n],
            gradient: vec![0.0; n],
            mean: vec![0.0; n],
            sync,
            spoil: inputs.spoil,
        }
    }

    /// The compressor and its connections.
    pub fn sync(&mut self) -> &mut Synchronizer {
        &mut self.sync
    }

    /// This rank's gradient of the last step, before error feedback, and its bucket.
    pub fn exchanged(&mut self) -> (&[f32], &Bucket) {
        (&self.gradient, self.sync.bucket())
    }

    /// One batch, one exchange, one update. Where a trial's candidate has diverged the update takes a mean of zeros, and the loss
    /// is NaN.
    pub fn step(&mut self, check: u32, tick: &Tick) -> Result<StepOutcome, SyncError> {
        let started = Instant::now();
        let loss = self.compute_gradient(tick);
        if !loss.is_finite() {
            // The other ranks wait for this one's part, and learn by it that there is none.
            self.gradient.fill(f32::NAN);
        }
        (self.spoil)(&mut self.gradient);
        std::thread::sleep(self.sgd.least_compute.saturating_sub(started.elapsed()));
        let forward = started.elapsed();
        let (exchange, ran) = self.sync.run(check, tick, &self.gradient, &mut self.mean);
        let loss = match ran {
            // The trial ends, and all of it is undone.
            Err(SyncError::NotFinite { .. }) if tick.trial.is_some() => {
                self.mean.fill(0.0);
                f32::NAN
            }
            ran => ran.map(|()| loss)?,
        };
        let before_update = Instant::now();
        sgd_update(&mut self.parameters, &mut self.velocity, &self.mean, self.sgd.lr, self.sgd.momentum);
        let compute = forward + before_update.elapsed();
        Ok(StepOutcome { costs: Costs { compute, step: started.elapsed(), ..exchange }, loss })
    }

    fn compute_gradient(&mut self, tick: &Tick) -> f32 {
        let (index, batch) = (tick.index(), self.sgd.batch as u64);
        let positions = index * batch..(index + 1) * batch;
        self.network.load(&self.images, positions.map(|p| self.order.at(p)));
        self.network.gradient(&self.parameters, &mut self.gradient)
    }

    /// Share of images that are recognised, 0 to 1.
    pub fn accuracy(&mut self, images: &Images) -> f64 {
        /// Bounds the buffers, not the result.
        const BATCH: usize = 250;
        let mut correct = 0;
        for start in (0..images.len()).step_by(BATCH) {
            self.network.load(images, start..images.len().min(start + BATCH));
            correct += self.network.correct(&self.parameters);
        }
        correct as f64 / images.len().max(1) as f64
    }

    /// A hash of all parameters' bits. Not cryptographic: it tells ranks that ran apart.
    pub fn hash(&self) -> u64 {
        const PRIME: u64 = 0x0000_0100_0000_01b3;
        // Eight lanes of FNV-1a, so that hashing costs far less than a step.
        let mut lanes: [u64; 8] = std::array::from_fn(|i| 0xcbf2_9ce4_8422_2325 ^ i as u64);
        for values in self.parameters.chunks(8) {
            for (lane, value) in lanes.iter_mut().zip(values) {
                *lane = (*lane ^ u64::from(value.to_bits())).wrapping_mul(PRIME);
            }
        }
        lanes.iter().fold(0, |hash: u64, lane| (hash.rotate_left(7) ^ lane).wrapping_mul(PRIME))
    }

    /// Copies everything that a trial changes.
    pub fn save(&self) -> Saved {
        Saved { parameters: self.parameters.clone(), velocity: self.velocity.clone() }
    }

    /// Puts everything back: training goes on bit for bit as if nothing had happened. Once for every candidate.
    pub fn restore(&mut self, saved: &Saved) {
        self.sync.bucket().end_candidate();
        self.parameters.copy_from_slice(&saved.parameters);
        self.velocity.copy_from_slice(&saved.velocity);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_velocity_that_only_decays_ends_at_zero() {
        let (mut parameters, mut velocity) = ([1.0, 1.0], [1.0, -1.0]);
        for _ in 0..1000 {
            sgd_update(&mut parameters, &mut velocity, &[0.0, 0.0], 0.1, 0.9);
            assert!(velocity.iter().all(|v| !v.is_subnormal()), "{velocity:?}");
        }
        assert_eq!(velocity, [0.0, 0.0]);
        // What was decayed has moved the parameters before: lr times the sum of a geometric series.
        assert!((parameters[0] - 0.1).abs() < 1e-3 && (parameters[1] - 1.9).abs() < 1e-3, "{parameters:?}");
    }
}
