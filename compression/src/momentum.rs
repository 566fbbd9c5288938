//! Momentum inside the compressor, before the memory (BytePS): for methods whose optimiser must see momentum that was
//! compressed. Switch the optimiser's own off.

use crate::codec::ReadError;
use crate::memory::{restore_values, save_values};
use crate::wire::{Reader, Writer};
use flexcomm_domain::spec::{CompressorSpec, MomentumKind};

/// A momentum before a memory or a codec: Nesterov's, as BytePS has it, m = mu m + g; p = g + mu m. As a memory, it moves only
/// when the step is sure.
#[derive(Debug)]
pub struct Momentum {
    mu: f32,
    velocity: Vec<f32>,
    /// Of the step that is on its way, or before the last.
    other: Vec<f32>,
}

impl Momentum {
    /// A compressor's momentum for n values.
    pub(crate) fn build(spec: &CompressorSpec, n: usize) -> Option<Self> {
        let (MomentumKind::Nesterov, values) = spec.momentum()?;
        Some(Self { mu: values.number(0) as f32, velocity: vec![0.0; n], other: vec![0.0; n] })
    }

    /// `out` becomes p, which follows in the gradient's place.
    pub(crate) fn apply(&mut self, gradient: &[f32], out: &mut [f32]) {
        let mu = self.mu;
        let state = self.other.iter_mut().zip(&self.velocity);
        for ((g, p), (next, m)) in gradient.iter().zip(out).zip(state) {
            *next = mu * m + g;
            *p = g + mu * *next;
        }
    }

    /// The step of the last [`Self::apply`] counts.
    pub(crate) fn commit(&mut self) {
        std::mem::swap(&mut self.velocity, &mut self.other);
    }

    /// The step that was committed last does not count; once only.
    pub(crate) fn undo(&mut self) {
        std::mem::swap(&mut self.velocity, &mut self.other);
    }

    /// Goes on from what another, of as many values, has gathered.
    pub(crate) fn take_over(&mut self, other: Self) {
        self.velocity = other.velocity;
    }

    /// Appends the state.
    pub(crate) fn save(&self, out: &mut Writer) {
        save_values(&self.velocity, out);
    }

    /// Puts a saved state back, bit for bit.
    pub(crate) fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError> {
        restore_values(from, &mut self.velocity)
    }
}
