//! Sparse gradient compression's memory, as GRACE 3.2 gives it: u' = u + epsilon g, v = alpha u + u', compresses v; what
//! was sent starts over, as in DGC. The part alpha u stands for the momentum of the residual.
//!
//! Where a codec sends a value only in part, u becomes what it left of v.

use super::{Feeding, Memory, Residual, Tensor, Units, restore_values, save_values};
use crate::codec::{Carried, ReadError, Stats};
use crate::wire::{Reader, Writer};

/// u.
#[derive(Debug)]
pub struct Sgc {
    alpha: f32,
    epsilon: f32,
    accumulated: Vec<f32>,
    /// u' of the step that is on its way.
    next: Vec<f32>,
    /// eta of the last step, for a memory that follows.
    learning_rate: Option<f64>,
    /// Before the last update.
    before: Option<f64>,
}

impl Sgc {
    pub(super) fn new([alpha, epsilon]: [f32; 2], n: usize) -> Self {
        Self { alpha, epsilon, accumulated: vec![0.0; n], next: vec![0.0; n], learning_rate: None, before: None }
    }
}

impl Memory for Sgc {
    fn compensate(&mut self, tensor: Tensor<'_>, step: Feeding) -> Stats {
        let Self { alpha, epsilon, .. } = *self;
        let Tensor { range, gradient, compensated, .. } = tensor;
        let state = self.next[range.clone()].iter_mut().zip(&self.accumulated[range]);
        for ((g, compensated), (next, u)) in gradient.iter().zip(compensated.iter_mut()).zip(state) {
            *next = u + epsilon * g;
            *compensated = alpha * u + *next;
        }
        crate::kernels::stats(step.kernel, compensated)
    }

    fn carried(&self, _step: Feeding) -> Carried {
        Carried { weight: 1.0 + self.alpha, kept: 1.0 }
    }

    fn update(&mut self, step: Feeding, compensated: &mut Vec<f32>) {
        let alpha = self.alpha;
        for ((next, u), left) in self.next.iter_mut().zip(&self.accumulated).zip(compensated.iter()) {
            if alpha * u + *next != *left {
                *next = *left;
            }
        }
        std::mem::swap(&mut self.accumulated, &mut self.next);
        self.before = self.learning_rate.replace(step.learning_rate);
    }

    fn undo(&mut self, _fed: &mut Vec<f32>) {
        std::mem::swap(&mut self.accumulated, &mut self.next);
        self.learning_rate = self.before;
    }

    /// u, in units of epsilon times a gradient.
    fn residual(&self) -> Residual<'_> {
        let units = Units { learning_rate: self.learning_rate, weight: f64::from(self.epsilon) };
        Residual { values: &self.accumulated, units }
    }

    fn take_over(&mut self, residual: Residual<'_>, learning_rate: f64) {
        let ratio = self.epsilon * residual.units.ratio(learning_rate) as f32;
        self.accumulated.iter_mut().zip(residual.values).for_each(|(to, value)| *to = ratio * value);
        self.learning_rate = Some(learning_rate);
    }

    fn unit(&self, _step: Feeding) -> f64 {
        f64::from(self.epsilon)
    }

    fn save(&self, out: &mut Writer) {
        self.residual().units.save(out);
        save_values(&self.accumulated, out);
    }

    fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError> {
        self.learning_rate = Units::restore_rate(from, f64::from(self.epsilon))?;
        restore_values(from, &mut self.accumulated)
    }
}
