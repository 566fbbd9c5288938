//! What a step cost and showed on a rank.

use crate::trial::Measured;
use flexcomm_domain::Energy;
use flexcomm_wire::StepRecord;
use std::time::Duration;

/// What a step or a trial's iteration cost on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
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
            loss,
            accuracy,
        }
    }

    /// Of a trial's iteration: waiting for late ranks is not the collective.
    pub fn measured(&self) -> Measured {
        let sync = self.sync.saturating_sub(self.wait.unwrap_or_default());
        Measured { energy: self.energy, comp_us: us(self.comp), sync_us: us(sync) }
    }
}
