//! What a step cost and showed on a rank.

use crate::trial::Measured;
use flexcomm_domain::Energy;
use flexcomm_wire::StepRecord;
use std::time::Duration;

/// What a step or a trial's iteration cost on this rank.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Costs {
    /// Forward, backward and update.
    pub compute: Duration,
    /// Compress and decompress.
    pub comp: Duration,
    /// In which the rank had nothing to do but wait for collectives, late ranks included.
    pub sync: Duration,
    /// The part of `sync` before the last rank entered; absent when the ranks do not share a clock.
    pub wait: Option<Duration>,
    /// The whole step.
    pub step: Duration,
    /// Bytes this rank sent.
    pub bytes: u64,
    /// Of this rank's gradient.
    pub energy: Energy,
    /// ‖g_b‖² of this rank's gradient before error feedback, by bucket; empty in steps in which it is not taken, see [`takes_energies`].
    pub bucket_energies: Vec<f64>,
}

/// Whether the buckets' energies are taken in a step: in the first ones, and then now and then, as they change slowly and cost a pass
/// over the gradient.
pub fn takes_energies(step: u64) -> bool {
    const FIRST: u64 = 8;
    const EVERY: u64 = 16;
    step < FIRST || step.is_multiple_of(EVERY)
}

/// Of a bucket in a step whose buckets run different strategies: its gain, by the energy of its gradient before error feedback. These
/// add up to the gain of the step. Of what was compensated they would not: a compressed bucket's also has what earlier steps did not
/// send, and a dense one's has not, so that the more is held back the less would dense buckets count.
pub fn weighted(energy: Energy, fresh: f64) -> Energy {
    if !fresh.is_finite() {
        return Energy { sent: 0.0, compensated: f64::INFINITY };
    }
    Energy { sent: fresh * energy.gain(), compensated: fresh }
}

/// ‖g‖² of a gradient: eight sums, so that one addition need not wait for the one before.
pub fn squared_norm(values: &[f32]) -> f64 {
    let (eights, rest) = values.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for eight in eights {
        sums.iter_mut().zip(eight).for_each(|(sum, value)| *sum += f64::from(*value).powi(2));
    }
    sums.iter().sum::<f64>() + rest.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>()
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

impl Costs {
    /// Of a step that trained.
    pub fn record(&self, step: u64, loss: Option<f64>, accuracy: Option<f64>) -> StepRecord {
        StepRecord {
            step,
            compute_us: us(self.compute),
            comp_us: us(self.comp),
            sync_us: us(self.sync),
            wait_us: self.wait.map(us),
            step_us: us(self.step),
            bytes_sent: self.bytes,
            gain: self.energy.gain(),
            energy: Some(self.energy.compensated),
            bucket_energies: self.bucket_energies.clone(),
            loss,
            accuracy,
        }
    }

    /// Of a trial's iteration: waiting for late ranks is not the collective.
    pub fn measured(&self) -> Measured {
        let sync = self.sync.saturating_sub(self.wait.unwrap_or_default());
        Measured { energy: self.energy, comp_us: us(self.comp), sync_us: us(sync), bytes: self.bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three quarters of the gradient are dense; of the rest half is kept, whatever its residual adds.
    #[test]
    fn gains_of_buckets_are_weighted_by_fresh_energy() {
        let dense = weighted(Energy::default(), 3.0);
        let sparse = weighted(Energy { sent: 50.0, compensated: 100.0 }, 1.0);
        assert_eq!(dense + sparse, Energy { sent: 3.5, compensated: 4.0 });
        assert_eq!((dense + weighted(Energy::default(), f64::NAN)).gain(), 0.0, "an exchange that the ranks refuse");
    }
}
