//! Shadows of gradients that lie on a device: the same subsets, whose values the caller gathers there, compressed by kernels with
//! memories that stay there. Nothing waits: what the kernels found is told later, a step at a time.

use super::{Candidate, Runs, Shadow, Subset, seed_of, subsets};
use crate::bucket::{Home, OnHost, kernels};
use crate::error::EngineError;
use flexcomm_compression::{Energy, Method};
use flexcomm_gpu_kernels::bucket::{Gradient, Layers, Method as Kernels};
use flexcomm_gpu_kernels::{Copies, DType, OUTCOME_BYTES, Outcome, Span};

/// All candidates' subsets together are at most so much of a bucket, where each may have as many values as it needs for its
/// estimate: a step of them then moves about as many bytes as one read of the gradient.
const MOST_TOGETHER: f64 = 0.125;

/// A subset of one candidate's.
#[derive(Debug, Clone, Copy)]
struct Part {
    candidate: usize,
    method: Method,
    values: usize,
    weight: f64,
}

impl Part {
    fn kernels(&self, seed: u64) -> Result<Kernels, OnHost> {
        kernels(self.method, (1, self.method.cr.keep(self.values)), seed)
    }
}

/// A bucket's subsets, one behind the other.
#[derive(Debug)]
pub(super) struct OnDevice {
    /// Of the bucket.
    values: usize,
    parts: Vec<Part>,
    indices: Vec<u32>,
    /// With its memory, once it was lent.
    lent: Option<(Layers, Box<dyn Home>)>,
}

impl OnDevice {
    fn new(methods: &[Method], layers: &[usize], sampled: (f64, u64)) -> Self {
        let (mut parts, mut indices) = (Vec::new(), Vec::new());
        for (candidate, method) in methods.iter().enumerate() {
            for Subset { indices: own, weight } in subsets(*method, layers, sampled) {
                parts.push(Part { candidate, method: *method, values: own.len(), weight });
                indices.extend(own);
            }
        }
        Self { values: layers.iter().sum(), parts, indices, lent: None }
    }

    fn methods(&self, seed: u64) -> Result<Vec<Kernels>, OnHost> {
        self.parts.iter().map(|part| part.kernels(seed)).collect()
    }

    fn lengths(&self) -> Vec<u64> {
        self.parts.iter().map(|part| part.values as u64).collect()
    }
}

impl Shadow {
    /// Whether the subsets of a bucket of so many values have their memory on the device.
    pub fn is_resident(&self, bucket: usize, values: usize) -> bool {
        self.on_device.get(bucket).is_some_and(|own| own.lent.is_some() && own.values == values)
    }

    /// Whether those of a bucket have any memory there.
    pub fn is_lent(&self, bucket: usize) -> bool {
        self.on_device.get(bucket).is_some_and(|own| own.lent.is_some())
    }

    /// Forgets this bucket and all behind it; whether there were any.
    pub fn forget_from(&mut self, bucket: usize) -> bool {
        let some = self.on_device.len() > bucket;
        self.on_device.truncate(bucket);
        some
    }

    /// Draws a bucket's subsets: coordinates of all of them, one behind the other, and bytes of device memory to lend, aligned to 256.
    /// Buckets come in order; one that comes again is begun anew.
    pub fn sample_on(&mut self, bucket: usize, layers: &[usize]) -> Result<(&[u32], u64), OnHost> {
        // A pipeline's shadow is the host's, and then so are all: else nobody would ever know its gain.
        let method = |candidate: &Candidate| match candidate.runs {
            Runs::Selecting(method) => Ok(method),
            Runs::Pipeline(spec) => Err(OnHost::Text(spec.to_string())),
        };
        let methods = self.candidates.iter().map(method).collect::<Result<Vec<Method>, _>>()?;
        let share = self.share.min(MOST_TOGETHER / methods.len().max(1) as f64);
        let own = OnDevice::new(&methods, layers, (share, seed_of(self.seed, bucket)));
        let need = Layers::bytes(&own.lengths(), &own.methods(0)?)?;
        if self.on_device.len() < bucket {
            // The shadows began between two buckets of a step.
            return Ok((&[], 0));
        }
        self.on_device.truncate(bucket);
        self.on_device.push(own);
        Ok((self.on_device.last().map_or(&[], |own| &own.indices), need))
    }

    /// Gives a bucket's subsets their memory, which begins with what training holds back.
    pub fn reside(
        &mut self,
        device: &impl Copies,
        (bucket, residual): (usize, &[f32]),
        (home, lent): (Box<dyn Home>, Span),
    ) -> Result<(), OnHost> {
        let Some(own) = self.on_device.get_mut(bucket) else { return Err(OnHost::Absent) };
        let layers = Layers::new(device, (&own.lengths(), &own.methods(0)?), lent)?;
        let mut rest = &own.indices[..];
        for (part, memory) in own.parts.iter().zip(layers.held_back()) {
            let (indices, after) = rest.split_at(part.values);
            rest = after;
            let held = || indices.iter().map(|i| residual.get(*i as usize).copied().unwrap_or(0.0));
            if held().any(|value| value != 0.0) {
                let bytes: Vec<u8> = held().flat_map(f32::to_le_bytes).collect();
                device.upload(memory, &bytes)?;
            }
        }
        own.lent = Some((layers, home));
        Ok(())
    }

    /// Launches a step of a bucket's candidates over the values at their coordinates (float32, gathered by the caller). What they
    /// find will lie in what is answered: bring it to [`Self::hear`] when the device has done it.
    pub fn observe_on(&mut self, device: &impl Copies, (bucket, at): (usize, Span), turn: u64) -> Result<Span, OnHost> {
        let seed = self.seed.wrapping_add(turn);
        let Some(own) = self.on_device.get_mut(bucket) else { return Err(OnHost::Absent) };
        let methods = own.methods(seed)?;
        let Some((layers, _)) = &mut own.lent else { return Err(OnHost::Absent) };
        let gradient = Gradient { at, dtype: DType::F32, weights: (1.0, 1.0) };
        layers.step(device, (gradient, true), &methods)?;
        Ok(layers.outcomes())
    }

    /// What a bucket's candidates found in one step. A gradient that was not finite is passed over.
    pub fn hear(&mut self, bucket: usize, outcomes: &[u8]) -> Result<(), EngineError> {
        let Some(own) = self.on_device.get(bucket) else { return Ok(()) };
        let each = Layers::OUTCOME as usize;
        if outcomes.len() < each * own.parts.len() {
            let (bucket, got, expected) = (bucket as u32, outcomes.len(), each * own.parts.len());
            return Err(EngineError::Buffer { bucket, what: "what the shadows found", got, expected });
        }
        for (part, bytes) in own.parts.iter().zip(outcomes.chunks_exact(each)) {
            let Some(bytes) = bytes.first_chunk::<{ OUTCOME_BYTES as usize }>() else { continue };
            let outcome = Outcome::read(bytes);
            if let Some(candidate) = self.candidates.get_mut(part.candidate).filter(|_| !outcome.refused) {
                let Energy { sent, fed } = candidate.energy;
                candidate.energy =
                    Energy { sent: sent + part.weight * outcome.sent, fed: fed + part.weight * outcome.fed };
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_compression::Compressor;
    use flexcomm_domain::CompressionRatio;

    /// As a device leaves it.
    fn outcome(fed: f64, sent: f64, refused: bool) -> Vec<u8> {
        let mut bytes = vec![0; Layers::OUTCOME as usize];
        bytes[..8].copy_from_slice(&fed.to_le_bytes());
        bytes[8..16].copy_from_slice(&sent.to_le_bytes());
        bytes[28] = u8::from(refused);
        bytes
    }

    fn shadow() -> Shadow {
        let half = CompressionRatio::new(0.5).unwrap();
        let spec = |compressor: Compressor| compressor.family().at(half).unwrap();
        Shadow::new(&[spec(Compressor::TopK), spec(Compressor::LwTopK)], 1.0, 7)
    }

    #[test]
    fn what_is_heard_late_is_a_step_of_every_candidate() {
        let mut shadow = shadow();
        let (indices, need) = shadow.sample_on(0, &[30, 0, 10]).unwrap();
        // The whole bucket, and then its layers that have values.
        let all: Vec<u32> = (0..40).collect();
        assert!(indices == [&all[..], &all[..]].concat() && need > 3 * 2 * 256);
        let found = [outcome(10.0, 4.0, false), outcome(3.0, 1.0, false), outcome(1.0, 1.0, false)].concat();
        shadow.hear(0, &found).unwrap();
        shadow.end_step();
        let gains: Vec<f64> = shadow.gains().iter().map(|gain| gain.gain).collect();
        assert_eq!(gains, [0.4, 0.5]);
        // What was not finite does not count, and what is no message of these is an error.
        shadow.hear(0, &[outcome(1.0, 1.0, true), outcome(1.0, 1.0, true), outcome(2.0, 1.0, false)].concat()).unwrap();
        shadow.end_step();
        assert_eq!(shadow.gains().iter().map(|gain| gain.steps).collect::<Vec<_>>(), [1, 2]);
        assert!(shadow.hear(0, &found[1..]).is_err());
    }

    #[test]
    fn subsets_are_an_eighth_of_a_bucket_together_or_as_many_as_they_need() {
        let mut shadow = shadow();
        let (indices, _) = shadow.sample_on(0, &[1_000_000]).unwrap();
        assert_eq!(indices.len(), 125_000);
        assert!(!shadow.is_lent(0) && !shadow.is_resident(0, 1_000_000));
        assert_eq!(shadow.sample_on(1, &[5000]).unwrap().0.len(), 2 * 4096);
        assert!(shadow.forget_from(1) && !shadow.forget_from(1));
        // They began between two buckets of a step.
        assert_eq!(shadow.sample_on(3, &[5000]).unwrap(), (&[][..], 0));
    }
}
