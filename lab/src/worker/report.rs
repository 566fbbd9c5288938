//! What this worker says of itself and of its steps.

use super::state::StepOutcome;
use flexcomm_compression::{Layers, Sizes};
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_domain::{Collective, JobId, Rank, default_compressors};
use flexcomm_trainer::Measured;
use flexcomm_wire::{CodecInfo, Hello, PROTOCOL, StepRecord};
use std::time::Duration;

/// What moves the bytes: coefficients of the cost model are fitted per backend.
pub const BACKEND: &str = "lab-tcp";

/// What this worker is, for its agent.
pub fn hello(job: &JobId, rank: Rank, world: usize, layers: &Layers) -> Hello {
    let families = std::iter::once(CompressorSpec::NONE.into()).chain(default_compressors());
    Hello {
        protocol: PROTOCOL,
        job: job.clone(),
        run: None,
        rank: rank.0,
        world: world as u32,
        gradient_values: layers.values() as u64,
        backend: BACKEND.into(),
        codecs: families.map(|family| CodecInfo::new(family, Sizes::codec(family, layers))).collect(),
        collectives: Collective::ALL.iter().map(ToString::to_string).collect(),
    }
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Of a step that trained.
pub fn record(step: u64, outcome: &StepOutcome, accuracy: Option<f64>) -> StepRecord {
    StepRecord {
        step,
        compute_us: us(outcome.compute),
        comp_us: us(outcome.cost.comp),
        sync_us: us(outcome.cost.sync),
        wait_us: outcome.cost.wait.map(us),
        step_us: us(outcome.step),
        bytes_sent: outcome.cost.bytes,
        gain: outcome.cost.energy.gain(),
        loss: Some(f64::from(outcome.loss)),
        accuracy,
    }
}

/// Of a trial's iteration.
pub fn measured(outcome: &StepOutcome) -> Measured {
    // What was exchanged after the loss stopped being a number were zeros, which no compressor loses.
    let gain = if outcome.loss.is_finite() { outcome.cost.energy.gain() } else { 0.0 };
    // Waiting for late ranks is not the collective.
    let sync = outcome.cost.sync.saturating_sub(outcome.cost.wait.unwrap_or_default());
    Measured { gain, comp_us: us(outcome.cost.comp), sync_us: us(sync) }
}
