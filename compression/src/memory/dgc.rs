//! Deep gradient compression's memory (Lin et al. 2018, sections 3.1 and 3.2; GRACE 3.2): momentum correction,
//! u = mu u + g, v = v + u, compresses v; and momentum factor masking: where v was sent, v and u start over.
//!
//! Switch the optimiser's momentum off: what arrives has it.

use super::{Feeding, Memory, Residual, Tensor, Units, restore_values, save_values};
use crate::codec::{ReadError, Stats};
use crate::wire::{Reader, Writer};

/// u and v.
#[derive(Debug)]
pub struct Dgc {
    mu: f32,
    momentum: Vec<f32>,
    accumulated: Vec<f32>,
    /// u of the step that is on its way.
    next: Vec<f32>,
    /// eta of the last step, for a memory that follows.
    learning_rate: Option<f64>,
    /// Before the last update.
    before: Option<f64>,
}

impl Dgc {
    pub(super) fn new(mu: f32, n: usize) -> Self {
        Self {
            mu,
            momentum: vec![0.0; n],
            accumulated: vec![0.0; n],
            next: vec![0.0; n],
            learning_rate: None,
            before: None,
        }
    }
}

impl Memory for Dgc {
    fn compensate(&mut self, tensor: Tensor<'_>, step: Feeding) -> Stats {
        let (mu, Tensor { range, gradient, compensated, .. }) = (self.mu, tensor);
        let own = self.momentum[range.clone()].iter().zip(&self.accumulated[range.clone()]);
        let state = self.next[range].iter_mut().zip(own);
        for ((g, compensated), (next, (u, v))) in gradient.iter().zip(compensated.iter_mut()).zip(state) {
            *next = mu * u + g;
            *compensated = v + *next;
        }
        crate::kernels::stats(step.kernel, compensated)
    }

    fn update(&mut self, step: Feeding, compensated: &mut Vec<f32>) {
        // What differs from the sum that the codec saw was sent, in whole or in part.
        for ((next, v), left) in self.next.iter_mut().zip(&self.accumulated).zip(compensated.iter()) {
            if v + *next != *left {
                *next = 0.0;
            }
        }
        std::mem::swap(&mut self.momentum, &mut self.next);
        std::mem::swap(&mut self.accumulated, compensated);
        self.before = self.learning_rate.replace(step.learning_rate);
    }

    fn undo(&mut self, compensated: &mut Vec<f32>) {
        std::mem::swap(&mut self.momentum, &mut self.next);
        std::mem::swap(&mut self.accumulated, compensated);
        self.learning_rate = self.before;
    }

    /// v. Its parts were accumulated at the rates of their steps and are sent as gradients, as published; a memory that
    /// follows takes the last rate for all.
    fn residual(&self) -> Residual<'_> {
        Residual { values: &self.accumulated, units: Units { learning_rate: self.learning_rate, weight: 1.0 } }
    }

    fn take_over(&mut self, residual: Residual<'_>, learning_rate: f64) {
        let ratio = residual.units.ratio(learning_rate) as f32;
        self.accumulated.iter_mut().zip(residual.values).for_each(|(to, value)| *to = ratio * value);
        self.momentum.fill(0.0);
        self.learning_rate = Some(learning_rate);
    }

    fn save(&self, out: &mut Writer) {
        self.residual().units.save(out);
        save_values(&self.momentum, out);
        save_values(&self.accumulated, out);
    }

    fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError> {
        self.learning_rate = Units::restore_rate(from, 1.0)?;
        restore_values(from, &mut self.momentum)?;
        restore_values(from, &mut self.accumulated)
    }
}
