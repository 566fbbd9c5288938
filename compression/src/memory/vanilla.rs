//! Error feedback as GRACE has it (equation 5) with BytePS's rescaling: phi = beta (eta_old / eta_new) m + gamma g,
//! psi = phi − C(phi). beta = gamma = 1 unless given.
//!
//! The residual stands for an update that was not made. When the learning rate falls, the residual at the old
//! rate must weigh more in units of gradients, to move the model as far as it would have.

use super::{Feeding, Memory, Residual, Tensor, Units, restore_values, save_values};
use crate::codec::{Carried, ReadError, Stats};
use crate::wire::{Reader, Writer};
use flexcomm_domain::spec::Values;

/// The residual and its units.
#[derive(Debug)]
pub struct Vanilla {
    residual: Vec<f32>,
    beta: f64,
    gamma: f64,
    units: Units,
    /// Before the last update.
    before: Units,
}

impl Vanilla {
    pub(super) fn new(values: &Values, n: usize) -> Self {
        Self {
            residual: vec![0.0; n],
            beta: values.number(0),
            gamma: values.number(1),
            units: Units::GRADIENTS,
            before: Units::GRADIENTS,
        }
    }

    fn weight(&self, step: Feeding) -> f32 {
        (self.beta * self.units.ratio(step.learning_rate)) as f32
    }
}

impl Memory for Vanilla {
    fn compensate(&mut self, tensor: Tensor<'_>, step: Feeding) -> Stats {
        tensor.add(step.kernel, &self.residual, (self.weight(step), self.gamma as f32))
    }

    fn carried(&self, step: Feeding) -> Carried {
        Carried::scaled(self.weight(step))
    }

    fn update(&mut self, step: Feeding, compensated: &mut Vec<f32>) {
        std::mem::swap(&mut self.residual, compensated);
        self.before = std::mem::replace(&mut self.units, Units::at(step.learning_rate));
    }

    fn undo(&mut self, compensated: &mut Vec<f32>) {
        std::mem::swap(&mut self.residual, compensated);
        self.units = self.before;
    }

    fn follows_rates(&mut self) -> Option<&mut [f32]> {
        self.units.learning_rate.is_some().then_some(&mut self.residual[..])
    }

    fn residual(&self) -> Residual<'_> {
        Residual { values: &self.residual, units: self.units }
    }

    fn take_over(&mut self, residual: Residual<'_>, _learning_rate: f64) {
        self.residual.copy_from_slice(residual.values);
        self.units = residual.units;
    }

    fn rebase(&mut self, ratio: f64) {
        self.units = self.units.rebased(ratio);
    }

    fn save(&self, out: &mut Writer) {
        self.units.save(out);
        save_values(&self.residual, out);
    }

    fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError> {
        self.units = Units::restore(from)?;
        restore_values(from, &mut self.residual)
    }
}
