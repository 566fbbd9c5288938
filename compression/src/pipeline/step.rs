//! A step from the gradient to the message.

use super::scale::{self, FACTOR_BYTES};
use super::{Gradient, Open, Outcome, Pipeline, Step, Unit};
use crate::Energy;
use crate::codec::{Carried, Context, EncodeError, not_finite};
use crate::memory::{Feeding, Tensor};
use crate::wire::{Writer, write_message};

impl Pipeline {
    /// The first round. A gradient that nothing is added to is read where it lies.
    pub(super) fn begin(
        &mut self,
        gradient: Gradient<'_>,
        open: Open,
        out: &mut Writer,
    ) -> Result<Outcome, EncodeError> {
        self.pass_mark();
        let n = self.layers.values();
        gradient.check_length(n)?;
        let added = self.momentum.is_some() || self.memory.is_some() || !self.leftover.is_empty();
        if added || self.rounds() > 1 {
            self.feed(gradient, open.step)?;
            return self.round(open, out);
        }
        let mut staged = std::mem::take(&mut self.staged);
        let sent = self.send(gradient.as_f32(n, &mut staged), &open, out);
        self.staged = staged;
        let energy = sent?;
        self.settle(open);
        Ok(Outcome { energy, more: false, skipped: open.skipped })
    }

    /// Writes the only round's message of values that are the caller's.
    fn send(&mut self, x: &[f32], open: &Open, out: &mut Writer) -> Result<Energy, EncodeError> {
        let (header, context) = (self.header(open, 0), self.context(open.step.index, 0));
        let payload = self.payload_size(0).most();
        let Self { units, seen, .. } = self;
        seen.clear();
        if let [_, _, ..] = &units[..] {
            // One codec's refusal must not come after another's state has moved.
            seen.extend(units.iter().map(|unit| crate::kernels::stats(context.kernel, &x[unit.range.clone()])));
            if !seen.iter().all(|stats| stats.is_finite()) {
                return Err(not_finite(x));
            }
        }
        write_message(&header, out, |out| {
            out.reserve(payload);
            let mut energy = Energy::default();
            for (i, unit) in units.iter_mut().enumerate() {
                let context = Context { tensor: unit.tensor, known: seen.get(i).copied(), ..context };
                energy = energy + unit.codec.encode(&x[unit.range.clone()], &context, out)?;
            }
            Ok(energy)
        })
    }

    /// Fills `compensated` with what the codecs see, and `seen` with what the pass found of each tensor. No state changes.
    pub(super) fn feed(&mut self, gradient: Gradient<'_>, step: Step) -> Result<(), EncodeError> {
        let n = self.layers.values();
        let owed = self.leftover_units.ratio(step.learning_rate) as f32;
        let feeding = Feeding { learning_rate: step.learning_rate, kernel: self.kernel };
        let Self { staged, compensated, seen, leftover, momentum, memory, units, .. } = self;
        let mut input = gradient.as_f32(n, staged);
        compensated.resize(n, 0.0);
        if let Some(momentum) = momentum {
            momentum.apply(input, compensated);
            staged.resize(n, 0.0);
            std::mem::swap(staged, compensated);
            input = staged;
        }
        seen.clear();
        for Unit { codec, range, .. } in units.iter_mut() {
            let (gradient, compensated) = (&input[range.clone()], &mut compensated[range.clone()]);
            // Asked for also where no memory fills it: it forgets what it found in a gradient that was refused.
            let filter = codec.filter();
            seen.push(match memory {
                Some(memory) => {
                    memory.compensate(Tensor { range: range.clone(), gradient, compensated, filter }, feeding)
                }
                None => {
                    compensated.copy_from_slice(gradient);
                    let residual = leftover.get(range.clone()).unwrap_or_default();
                    compensated.iter_mut().zip(residual).for_each(|(to, residual)| *to += owed * residual);
                    crate::kernels::stats(feeding.kernel, compensated)
                }
            });
        }
        if !seen.iter().all(|stats| stats.is_finite()) {
            return Err(not_finite(compensated));
        }
        self.tell_carried(step);
        Ok(())
    }

    /// Tells codecs what of their tensors is not this step's.
    fn tell_carried(&mut self, step: Step) {
        let owed = self.leftover_units.ratio(step.learning_rate) as f32;
        let Self { units, memory, leftover, kernel, .. } = self;
        let (residual, share) = match memory {
            Some(memory) => {
                let step = Feeding { learning_rate: step.learning_rate, kernel: *kernel };
                (memory.residual().values, memory.carried(step))
            }
            None if leftover.is_empty() => return,
            None => (&leftover[..], Carried::scaled(owed)),
        };
        units.iter_mut().for_each(|unit| unit.codec.carried(&residual[unit.range.clone()], share));
    }

    /// Writes a round's message; with the last one the memory moves on.
    pub(super) fn round(&mut self, open: Open, out: &mut Writer) -> Result<Outcome, EncodeError> {
        let header = self.header(&open, open.round);
        let context = self.context(open.step.index, open.round);
        let (last, payload) = (open.round + 1 >= self.rounds(), self.payload_size(open.round).most());
        let Self { units, compensated, seen, .. } = self;
        let takes = self.memory.is_some();
        let energy = write_message(&header, out, |out| {
            out.reserve(payload);
            let mut energy = Energy::default();
            let factors = out.len();
            out.room(if header.factors { FACTOR_BYTES * units.len() } else { 0 });
            for (i, unit) in units.iter_mut().enumerate() {
                let context = Context { tensor: unit.tensor, known: seen.get(i).copied(), ..context };
                let x = &mut compensated[unit.range.clone()];
                energy = energy
                    + match last && takes {
                        true if header.factors => {
                            let (factor, energy) = scale::encode_taking(&mut *unit.codec, x, &context, out)?;
                            out.set_f32(factors + FACTOR_BYTES * i, factor);
                            energy
                        }
                        true => unit.codec.encode_taking(x, &context, out)?,
                        false => unit.codec.encode(x, &context, out)?,
                    };
            }
            Ok(energy)
        })?;
        self.open = Some(open);
        if last {
            self.settle(open);
        }
        Ok(Outcome { energy, more: !last, skipped: open.skipped })
    }

    /// The step is sure: everything that waited for that moves.
    pub(super) fn settle(&mut self, open: Open) {
        self.skipped += u64::from(open.skipped);
        self.learning_rate = open.step.learning_rate;
        self.last = Some(open.step.index);
        if let Some(momentum) = &mut self.momentum {
            momentum.commit();
        }
        if let Some(memory) = &mut self.memory {
            let step = Feeding { learning_rate: open.step.learning_rate, kernel: self.kernel };
            memory.update(step, &mut self.compensated);
        }
        self.leave_mark();
    }
}
