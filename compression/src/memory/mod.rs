//! Memories: what is held back of a gradient and added to the next (phi and psi of GRACE, equation 5). Decorators
//! around any codec.
//!
//! A memory adds in two steps, so that a gradient that is refused, or a step that is given up, changes nothing:
//! [`Memory::compensate`] writes phi(m, g) into a buffer of the pipeline and leaves the memory as it was;
//! [`Memory::update`] takes that buffer back once the codec has taken C out of it, and only this moves the state.
//!
//! What was held back belongs to the gradient, not to the codec: a change of parameters or of codec keeps it, bit
//! for bit. A change of memory hands it over ([`Memory::held_back`], [`Memory::take_over`]); a strategy without
//! memory gets it added to its first gradient. Nothing is lost.

mod vanilla;

use crate::Kernel;
use crate::codec::{EncodeError, ReadError, Stats};
use crate::strategy::MemoryEntry;
use crate::wire::{Reader, Writer};

pub use vanilla::Vanilla;

/// Every memory, one line each.
pub static MEMORIES: &[MemoryEntry] = &[vanilla::ENTRY];

/// Error feedback around a codec.
pub trait Memory: Send + std::fmt::Debug {
    /// phi: `fed` becomes what the codec compresses. Nothing else changes. NaN and infinity show in the answer.
    fn compensate(&mut self, gradient: &[f32], step: Feeding, fed: &mut [f32]) -> Result<Stats, EncodeError>;

    /// psi: `fed` holds phi − C(phi) and is swapped or copied in; its content afterwards is scratch. `step` is the same
    /// as given to the [`Self::compensate`] before.
    fn update(&mut self, step: Feeding, fed: &mut Vec<f32>);

    /// What is held back, in units of gradients.
    fn held_back(&self, out: &mut Vec<f32>);

    /// Becomes a memory that holds this back, in units of gradients.
    fn take_over(&mut self, held_back: &[f32]);

    /// Appends the state.
    fn save(&self, out: &mut Writer);

    /// Puts a saved state back, bit for bit; refuses values that are not finite.
    fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError>;
}

/// What a memory knows of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Feeding {
    /// eta of this step; finite, above 0.
    pub learning_rate: f64,
    /// Instructions to use.
    pub kernel: Kernel,
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
