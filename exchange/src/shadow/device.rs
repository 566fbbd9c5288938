//! Shadows of gradients that lie on a device: the same samples, whose values the caller gathers there, compressed by kernels with
//! memories that stay there. Nothing waits: what the kernels found is reported later, a step at a time.

use super::sample::{Sample, Sampling, samples};
use super::{Shadow, seed_of};
use crate::bucket::{DeviceBuffer, NotOnDevice, Param, layers};
use crate::error::ExchangeError;
use flexcomm_compression::pipeline::Member;
use flexcomm_domain::CompressorSpec;
use flexcomm_gpu_kernels::bucket::{Gradient, Layers, Method as Kernels, Plan};
use flexcomm_gpu_kernels::{Copies, DType, OUTCOME_BYTES, Outcome, Span};

/// All candidates' samples together are at most so much of a bucket, where each may have as many values as it needs for its
/// estimate: a step of them then moves about as many bytes as one read of the gradient.
const MOST_TOGETHER: f64 = 0.125;

/// A sample of one candidate's.
#[derive(Debug)]
struct Part {
    candidate: usize,
    plan: Plan,
    sample: Sample,
}

impl Part {
    fn new(candidate: usize, spec: &CompressorSpec, sample: Sample, member: Member) -> Result<Self, NotOnDevice> {
        let param = Param { id: 0, len: sample.places.len(), cols: sample.cols };
        let layers = layers(&[param]).ok();
        // Kernels of shadows always have a memory.
        let plan = layers.and_then(|layers| Plan::new(spec, &layers, member)).filter(|plan| plan.keeps);
        let plan = plan.ok_or_else(|| NotOnDevice::Parts(spec.to_string()))?;
        Ok(Self { candidate, plan, sample })
    }
}

/// A bucket's samples, one behind the other.
#[derive(Debug)]
pub(super) struct OnDevice {
    /// Of the bucket.
    values: usize,
    parts: Vec<Part>,
    indices: Vec<u32>,
    /// With its memory, once there is any.
    memory: Option<(Layers, Box<dyn DeviceBuffer>)>,
}

impl OnDevice {
    fn methods(&self, step: u64) -> Vec<Kernels> {
        self.parts.iter().filter_map(|part| part.plan.methods(step)).flatten().collect()
    }

    fn lengths(&self) -> Vec<u64> {
        self.parts.iter().map(|part| part.sample.places.len() as u64).collect()
    }
}

impl Shadow {
    /// Whether the samples of a bucket of so many values have their memory on the device.
    pub fn is_on_device(&self, bucket: usize, values: usize) -> bool {
        self.on_device.get(bucket).is_some_and(|own| own.memory.is_some() && own.values == values)
    }

    /// Whether those of a bucket have any memory there.
    pub fn has_memory_on_device(&self, bucket: usize) -> bool {
        self.on_device.get(bucket).is_some_and(|own| own.memory.is_some())
    }

    /// Forgets this bucket and all behind it; whether there were any.
    pub fn forget_from(&mut self, bucket: usize) -> bool {
        let some = self.on_device.len() > bucket;
        self.on_device.truncate(bucket);
        some
    }

    /// Draws a bucket's samples: coordinates of all of them, one behind the other, and bytes of device memory to give, aligned to
    /// 256. Buckets come in order; one that comes again is begun anew. Where one candidate's kernels are missing, all shadows are
    /// the host's.
    pub fn sample_on(&mut self, bucket: usize, params: &[Param]) -> Result<(&[u32], u64), NotOnDevice> {
        let share = self.share.min(MOST_TOGETHER / self.candidates.len().max(1) as f64);
        let sampling = Sampling { share, seed: seed_of(self.seed, bucket) };
        let values = params.iter().map(|param| param.len).sum();
        let mut own = OnDevice { values, parts: Vec::new(), indices: Vec::new(), memory: None };
        for (candidate, spec) in self.candidates.iter().map(|candidate| candidate.spec).enumerate() {
            for (number, sample) in (0..).zip(samples(&spec, params, sampling)) {
                own.indices.extend(sample.places.indices());
                let member = Member { tensor: number, ..Member::alone(self.seed) };
                own.parts.push(Part::new(candidate, &spec, sample, member)?);
            }
        }
        let need = Layers::bytes(&own.lengths(), &own.methods(0))?;
        if self.on_device.len() < bucket {
            // The shadows began between two buckets of a step.
            return Ok((&[], 0));
        }
        self.on_device.truncate(bucket);
        self.on_device.push(own);
        Ok((self.on_device.last().map_or(&[], |own| &own.indices), need))
    }

    /// Gives a bucket's samples their memory, which begins with training's residual (empty where there is none).
    pub fn move_to_device(
        &mut self,
        device: &impl Copies,
        bucket: usize,
        residual: &[f32],
        buffer: Box<dyn DeviceBuffer>,
    ) -> Result<(), NotOnDevice> {
        let Some(own) = self.on_device.get_mut(bucket) else { return Err(NotOnDevice::Absent) };
        let layers = Layers::new(device, &own.lengths(), &own.methods(0), buffer.span())?;
        for (part, memory) in own.parts.iter().zip(layers.residual()) {
            let residual = part.sample.places.of(residual);
            if residual.iter().any(|value| *value != 0.0) {
                let bytes: Vec<u8> = residual.into_iter().flat_map(f32::to_le_bytes).collect();
                device.upload(memory, &bytes)?;
            }
        }
        own.memory = Some((layers, buffer));
        Ok(())
    }

    /// Launches a step of a bucket's candidates over the values at their coordinates (float32, gathered by the caller). What they
    /// find will lie in what is answered: bring it to [`Self::take_outcomes`] when the device has done it.
    pub fn observe_on(
        &mut self,
        device: &impl Copies,
        bucket: usize,
        at: Span,
        step: u64,
    ) -> Result<Span, NotOnDevice> {
        let Some(own) = self.on_device.get_mut(bucket) else { return Err(NotOnDevice::Absent) };
        let methods = own.methods(step);
        let Some((layers, _)) = &mut own.memory else { return Err(NotOnDevice::Absent) };
        let gradient = Gradient { at, dtype: DType::F32, weights: (1.0, 1.0) };
        layers.step(device, gradient, true, &methods)?;
        Ok(layers.outcomes())
    }

    /// What a bucket's candidates found in one step. A gradient that was not finite is passed over.
    pub fn take_outcomes(&mut self, bucket: usize, outcomes: &[u8]) -> Result<(), ExchangeError> {
        let Some(own) = self.on_device.get(bucket) else { return Ok(()) };
        let each = Layers::OUTCOME as usize;
        if outcomes.len() < each * own.parts.len() {
            let (bucket, got, expected) = (bucket as u32, outcomes.len(), each * own.parts.len());
            return Err(ExchangeError::Buffer { bucket, what: "what the shadows found", got, expected });
        }
        for (part, bytes) in own.parts.iter().zip(outcomes.chunks_exact(each)) {
            let Some(bytes) = bytes.first_chunk::<{ OUTCOME_BYTES as usize }>() else { continue };
            let outcome = Outcome::read(bytes);
            if let Some(candidate) = self.candidates.get_mut(part.candidate).filter(|_| !outcome.refused) {
                candidate.tally.add(part.sample.weight, part.plan.energy(&[outcome]));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a device leaves it; half of what was sent comes back in the residual.
    fn outcome(compensated: f64, sent: f64, refused: bool) -> Vec<u8> {
        let mut bytes = vec![0; Layers::OUTCOME as usize];
        let numbers = [compensated, sent, compensated - sent / 2.0].map(f64::to_le_bytes);
        bytes[..24].copy_from_slice(numbers.as_flattened());
        bytes[36] = u8::from(refused);
        bytes
    }

    fn shadow() -> Shadow {
        Shadow::new(&["topk", "lwtopk"].map(|name| format!("{name}(k=0.5)+ef(vanilla)").parse().unwrap()), 1.0, 7)
    }

    fn params(layers: &[usize]) -> Vec<Param> {
        layers.iter().zip(0..).map(|(len, id)| Param { id, len: *len, cols: 1 }).collect()
    }

    #[test]
    fn what_is_heard_late_is_a_step_of_every_candidate() {
        let mut shadow = shadow();
        let (indices, need) = shadow.sample_on(0, &params(&[30, 0, 10])).unwrap();
        // The whole bucket, and then its layers that have values.
        let all: Vec<u32> = (0..40).collect();
        assert!(indices == [&all[..], &all[..]].concat() && need > 3 * 2 * 256);
        let found = [outcome(10.0, 4.0, false), outcome(3.0, 1.0, false), outcome(1.0, 1.0, false)].concat();
        shadow.take_outcomes(0, &found).unwrap();
        shadow.end_step();
        let gains: Vec<f64> = shadow.gains().iter().map(|gain| gain.gain).collect();
        assert_eq!(gains, [0.4, 0.5]);
        // What was not finite does not count, and what is no message of these is an error.
        shadow
            .take_outcomes(0, &[outcome(1.0, 1.0, true), outcome(1.0, 1.0, true), outcome(2.0, 1.0, false)].concat())
            .unwrap();
        shadow.end_step();
        assert_eq!(shadow.gains().iter().map(|gain| gain.steps).collect::<Vec<_>>(), [1, 2]);
        assert!(shadow.take_outcomes(0, &found[1..]).is_err());
    }

    /// As on the host: the values of a message may be larger than those that it takes out of the residual.
    #[test]
    fn what_comes_back_in_the_residual_was_not_sent() {
        let mut shadow = Shadow::new(&["threelc(s=1)+ef(vanilla)".parse().unwrap()], 1.0, 7);
        shadow.sample_on(0, &params(&[20, 20])).unwrap();
        shadow.take_outcomes(0, &[outcome(10.0, 4.0, false), outcome(30.0, 4.0, false)].concat()).unwrap();
        shadow.end_step();
        assert_eq!(shadow.gains()[0].gain, 0.1);
    }

    #[test]
    fn subsets_are_an_eighth_of_a_bucket_together_or_as_many_as_they_need() {
        let mut shadow = shadow();
        let (indices, _) = shadow.sample_on(0, &params(&[1_000_000])).unwrap();
        assert_eq!(indices.len(), 125_000);
        assert!(!shadow.has_memory_on_device(0) && !shadow.is_on_device(0, 1_000_000));
        assert_eq!(shadow.sample_on(1, &params(&[5000])).unwrap().0.len(), 2 * 4096);
        assert!(shadow.forget_from(1) && !shadow.forget_from(1));
        // They began between two buckets of a step.
        assert_eq!(shadow.sample_on(3, &params(&[5000])).unwrap(), (&[][..], 0));
    }
}
