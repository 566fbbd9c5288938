//! Memories: the residual of error feedback, added to the next gradient (phi and psi of GRACE, equation 5). Decorators
//! around any codec.
//!
//! A memory adds in two steps, so that a gradient that is refused, or a step that is given up, changes nothing:
//! [`Memory::compensate`] writes phi(m, g) into a buffer of the pipeline and leaves the memory as it was;
//! [`Memory::update`] takes that buffer back once the codec has taken C out of it, and only this moves the state.
//!
//! The residual belongs to the gradient, not to the codec: a change of parameters or of codec keeps it, bit
//! for bit. A change of memory hands it over ([`Memory::residual`], [`Memory::take_over`]); a strategy without
//! memory gets it added to its first gradient, and sends of both what it sends of a gradient: a lossy one drops the rest, as it
//! always does. A change itself loses nothing. (A momentum that a memory keeps inside, as DGC's, is
//! no part of it: it stands for steps to come, and starts over.)

mod dgc;
mod efsign;
mod sgc;
mod vanilla;

use crate::Kernel;
use crate::codec::{CandidateFilter, Carried, ReadError, Stats};
use crate::kernels::{Added, Candidates, Feed};
use crate::wire::{Reader, Writer};
use flexcomm_domain::spec::{CompressorSpec, MemoryKind};
use std::ops::Range;

pub use dgc::Dgc;
pub use efsign::EfSign;
pub use sgc::Sgc;
pub use vanilla::Vanilla;

/// A compressor's memory for n values.
pub(crate) fn build(spec: &CompressorSpec, n: usize) -> Option<Box<dyn Memory>> {
    let (kind, values) = spec.memory()?;
    Some(match kind {
        MemoryKind::Vanilla => Box::new(Vanilla::new(&values, n)),
        MemoryKind::EfSign => Box::new(EfSign::new(&values, n)),
        MemoryKind::Dgc => Box::new(Dgc::new(values.number(0) as f32, n)),
        MemoryKind::Sgc => Box::new(Sgc::new([values.number(0) as f32, values.number(1) as f32], n)),
    })
}

/// Error feedback around a codec.
pub trait Memory: Send + std::fmt::Debug {
    /// phi of one tensor of the bucket: what the codec compresses. Nothing that lasts changes. NaN and infinity show in the
    /// answer.
    fn compensate(&mut self, tensor: Tensor<'_>, step: Feeding) -> Stats;

    /// How much of [`Self::residual`] is in what [`Self::compensate`] writes.
    fn carried(&self, _step: Feeding) -> Carried {
        Carried::WHOLE
    }

    /// psi: `compensated`, of the whole bucket, holds phi − C(phi) and is swapped or copied in; its content afterwards is
    /// scratch. `step` is the same as given to the [`Self::compensate`] before.
    fn update(&mut self, step: Feeding, compensated: &mut Vec<f32>);

    /// Takes the last [`Self::update`] back, bit for bit; right after it, before any other [`Self::compensate`].
    /// `compensated` is what that left.
    fn undo(&mut self, compensated: &mut Vec<f32>);

    /// The residual, where it is rescaled when the learning rate changes; none where rates leave it as it is.
    fn follows_rates(&mut self) -> Option<&mut [f32]> {
        None
    }

    /// The residual.
    fn residual(&self) -> Residual<'_>;

    /// Becomes a memory that holds this back and nothing else. `learning_rate` is the last step's.
    fn take_over(&mut self, residual: Residual<'_>, learning_rate: f64);

    /// The residual counts as if it came from a step at `ratio` times the rate: its weight in gradients stays as the rate changes.
    /// Memories whose weights no rate changes have nothing to do.
    fn rebase(&mut self, _ratio: f64) {}

    /// How much of what is sent makes one unit of gradient: receivers divide by it. 1 unless phi is in other units.
    fn unit(&self, _step: Feeding) -> f64 {
        1.0
    }

    /// Appends the state.
    fn save(&self, out: &mut Writer);

    /// Puts a saved state back, bit for bit; refuses values that are not finite.
    fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError>;
}

/// A tensor of a bucket on its way into a codec.
#[derive(Debug)]
pub struct Tensor<'a> {
    /// Its place in the bucket.
    pub range: Range<usize>,
    /// Its gradient.
    pub gradient: &'a [f32],
    /// Becomes what the codec compresses.
    pub compensated: &'a mut [f32],
    /// Collects the codec's candidates where one pass does both.
    pub filter: Option<&'a mut CandidateFilter>,
}

impl Tensor<'_> {
    /// `compensated` = beta * residual + gamma * gradient, of the tensor's part of the bucket's residual, in one pass.
    fn add(self, kernel: Kernel, residual: &[f32], (beta, gamma): (f32, f32)) -> Stats {
        let Self { range, gradient, compensated, filter } = self;
        let added = Added { residual: &residual[range], beta, gamma, compensated };
        match filter {
            Some(filter) => filter.feed(kernel, gradient, added),
            None => {
                let feed = Feed { gradient, added: Some(added), floor: None };
                kernel.feed(feed, &mut Candidates::default()).stats()
            }
        }
    }
}

/// What a memory knows of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Feeding {
    /// eta of this step; finite, above 0.
    pub learning_rate: f64,
    /// Instructions to use.
    pub kernel: Kernel,
}

/// A memory's residual, in its own units.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Residual<'a> {
    /// One per value of the bucket.
    pub values: &'a [f32],
    /// Their units.
    pub units: Units,
}

/// Units of values: `weight` times gradients, at a learning rate. value / weight * rate is the update of the model that is
/// owed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Units {
    /// eta of the step that left them. None: they are gradients of whatever rate they are sent at.
    pub learning_rate: Option<f64>,
    /// Above 0.
    pub weight: f64,
}

impl Units {
    /// Gradients of any rate.
    pub const GRADIENTS: Self = Self { learning_rate: None, weight: 1.0 };

    /// Gradients at a rate.
    pub const fn at(learning_rate: f64) -> Self {
        Self { learning_rate: Some(learning_rate), weight: 1.0 }
    }

    /// As of a step at `ratio` times the rate.
    pub fn rebased(self, ratio: f64) -> Self {
        Self { learning_rate: self.learning_rate.map(|before| before * ratio), ..self }
    }

    /// What makes values gradients at another rate.
    pub fn ratio(self, learning_rate: f64) -> f64 {
        self.learning_rate.map_or(1.0, |before| before / learning_rate) / self.weight
    }
}

/// Appends a buffer.
pub(crate) fn save_values(values: &[f32], out: &mut Writer) {
    out.u64(values.len() as u64);
    out.f32s(values);
}

/// Reads a buffer of the same length back.
pub(crate) fn restore_values(from: &mut Reader<'_>, values: &mut [f32]) -> Result<(), ReadError> {
    let (got, expected) = (from.u64("length of a saved buffer")?, values.len() as u64);
    if got != expected {
        return Err(ReadError::Length { expected, got });
    }
    let saved = from.f32s("saved value", values.len())?;
    values.iter_mut().zip(saved).for_each(|(to, value)| *to = value);
    Ok(())
}

impl Units {
    /// Appends them; a rate of 0 is none.
    pub(crate) fn save(self, out: &mut Writer) {
        out.f64(self.learning_rate.unwrap_or(0.0));
        out.f64(self.weight);
    }

    /// Reads them back.
    pub(crate) fn restore(from: &mut Reader<'_>) -> Result<Self, ReadError> {
        let (rate, weight) = (from.f64("learning rate")?, from.f64("weight")?);
        if rate.is_sign_negative() || weight <= 0.0 {
            return Err(ReadError::number("learning rate or weight", rate.min(weight), "it must be above 0"));
        }
        Ok(Self { learning_rate: (rate > 0.0).then_some(rate), weight })
    }

    /// As [`Self::restore`], of a memory whose weight is given; answers the rate.
    pub(crate) fn restore_rate(from: &mut Reader<'_>, weight: f64) -> Result<Option<f64>, ReadError> {
        let units = Self::restore(from)?;
        let other = ReadError::number("weight", units.weight, "not this memory's");
        if units.weight == weight { Ok(units.learning_rate) } else { Err(other) }
    }
}
