//! EFsignSGD's form (Karimireddy et al. 2019, algorithm 1): phi = e + gamma g, psi = phi − C(phi), where gamma is the
//! learning rate and C(phi) is the update of the model itself. GRACE sets beta = 1 and gamma to the initial rate.
//!
//! Receivers divide by gamma, so that an optimiser that multiplies by the learning rate makes exactly the update C(phi).
//! For codecs with C(a x) = a C(x) this is `vanilla`; for others (signs without a scale, thresholds) it is not.
//! The first step is as all others: to leave gamma out where there is no residual yet makes it 1/gamma times too large,
//! a known mistake.

use super::{Feeding, Memory, Residual, Tensor, Units, restore_values, save_values};
use crate::codec::{Carried, ReadError, Stats};
use crate::wire::{Reader, Writer};
use flexcomm_domain::spec::Values;

/// The residual, in units of what is sent.
#[derive(Debug)]
pub struct EfSign {
    residual: Vec<f32>,
    /// None: the learning rate.
    gamma: Option<f64>,
    units: Units,
    /// The residual came from another memory: it is to be converted.
    foreign: bool,
    /// Units and origin before the last update.
    before: (Units, bool),
}

impl EfSign {
    pub(super) fn new(values: &Values, n: usize) -> Self {
        let gamma = Some(values.number(0)).filter(|gamma| *gamma > 0.0);
        Self {
            residual: vec![0.0; n],
            gamma,
            units: Units::GRADIENTS,
            foreign: false,
            before: (Units::GRADIENTS, false),
        }
    }
}

impl EfSign {
    fn weight(&self, step: Feeding) -> f32 {
        if self.foreign { (self.unit(step) * self.units.ratio(step.learning_rate)) as f32 } else { 1.0 }
    }
}

impl Memory for EfSign {
    fn compensate(&mut self, tensor: Tensor<'_>, step: Feeding) -> Stats {
        tensor.add(step.kernel, &self.residual, (self.weight(step), self.unit(step) as f32))
    }

    fn carried(&self, step: Feeding) -> Carried {
        Carried::scaled(self.weight(step))
    }

    fn update(&mut self, step: Feeding, compensated: &mut Vec<f32>) {
        std::mem::swap(&mut self.residual, compensated);
        self.before = (self.units, self.foreign);
        self.units = Units::at(step.learning_rate / self.unit(step));
        self.foreign = false;
    }

    fn undo(&mut self, compensated: &mut Vec<f32>) {
        std::mem::swap(&mut self.residual, compensated);
        (self.units, self.foreign) = self.before;
    }

    fn unit(&self, step: Feeding) -> f64 {
        self.gamma.unwrap_or(step.learning_rate)
    }

    fn follows_rates(&mut self) -> Option<&mut [f32]> {
        (self.gamma.is_none() && self.units.learning_rate.is_some()).then_some(&mut self.residual[..])
    }

    fn residual(&self) -> Residual<'_> {
        Residual { values: &self.residual, units: self.units }
    }

    fn take_over(&mut self, residual: Residual<'_>, _learning_rate: f64) {
        self.residual.copy_from_slice(residual.values);
        self.units = residual.units;
        self.foreign = true;
    }

    fn rebase(&mut self, ratio: f64) {
        self.units = self.units.rebased(ratio);
        // Its unit may be the rate itself.
        self.foreign = true;
    }

    fn save(&self, out: &mut Writer) {
        self.units.save(out);
        out.u8(u8::from(self.foreign));
        save_values(&self.residual, out);
    }

    fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError> {
        self.units = Units::restore(from)?;
        self.foreign = from.flag("origin of the residual")?;
        restore_values(from, &mut self.residual)
    }
}
