//! Momentum inside the compressor, before the memory (BytePS): for methods whose optimiser must see momentum that was
//! compressed. Switch the optimiser's own off.

use crate::codec::ReadError;
use crate::memory::{restore_values, save_values};
use crate::wire::{Reader, Writer};
use flexcomm_domain::spec::{MomentumKind, Values};

/// A momentum for n values.
pub(crate) fn build(kind: MomentumKind, values: &Values, n: usize) -> Box<dyn Momentum> {
    match kind {
        MomentumKind::Nesterov => Box::new(Nesterov::new(values.number(0) as f32, n)),
    }
}

/// A momentum before a memory or a codec. As a memory, it moves only when the step is sure.
pub trait Momentum: Send + std::fmt::Debug {
    /// `out` becomes what follows in the gradient's place.
    fn apply(&mut self, gradient: &[f32], out: &mut [f32]);

    /// The step of the last [`Self::apply`] counts.
    fn commit(&mut self);

    /// Takes the last [`Self::commit`] back; right after it, before any other [`Self::apply`].
    fn undo(&mut self);

    /// What has gathered so far.
    fn velocity(&self) -> &[f32];

    /// Goes on from what another of its kind, of as many values, has gathered.
    fn take_over(&mut self, velocity: &[f32]);

    /// Appends the state.
    fn save(&self, out: &mut Writer);

    /// Puts a saved state back, bit for bit.
    fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError>;
}

/// Nesterov's, as BytePS has it: m = mu m + g; p = g + mu m.
#[derive(Debug)]
pub struct Nesterov {
    mu: f32,
    momentum: Vec<f32>,
    /// Becomes the momentum with [`Momentum::commit`].
    next: Vec<f32>,
}

impl Nesterov {
    fn new(mu: f32, n: usize) -> Self {
        Self { mu, momentum: vec![0.0; n], next: vec![0.0; n] }
    }
}

impl Momentum for Nesterov {
    fn apply(&mut self, gradient: &[f32], out: &mut [f32]) {
        let mu = self.mu;
        let state = self.next.iter_mut().zip(&self.momentum);
        for ((g, p), (next, m)) in gradient.iter().zip(out).zip(state) {
            *next = mu * m + g;
            *p = g + mu * *next;
        }
    }

    fn commit(&mut self) {
        std::mem::swap(&mut self.momentum, &mut self.next);
    }

    fn undo(&mut self) {
        std::mem::swap(&mut self.momentum, &mut self.next);
    }

    fn velocity(&self) -> &[f32] {
        &self.momentum
    }

    fn take_over(&mut self, velocity: &[f32]) {
        self.momentum.copy_from_slice(velocity);
    }

    fn save(&self, out: &mut Writer) {
        save_values(&self.momentum, out);
    }

    fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError> {
        restore_values(from, &mut self.momentum)
    }
}
