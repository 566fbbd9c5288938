//! SIGNUM (Bernstein et al. 2019): each rank keeps a momentum z = (1 − delta) g + delta z from z = 0 on and sends sign(z);
//! together they mean the sign of the sum of signs, 0 on a tie. With delta = 0 it is signSGD. The weight decay of its algorithm
//! belongs to the optimiser.
//!
//! Payload: signs. State: z.

use super::signs;
use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Size, Target, not_finite};
use crate::entry::Entry;
use crate::kernels::Decayed;
use crate::memory::{restore_values, save_values};
use crate::wire::{Reader, Writer, packed_bytes};
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::SIGNUM,
    code: 22,
    examples: &["", "delta=0", "delta=0.5"],
    build: |values, shape| {
        let zeros = vec![0.0; shape.values()];
        Box::new(Signum { delta: values.number(0) as f32, next: zeros.clone(), momentum: zeros })
    },
};

#[derive(Debug)]
struct Signum {
    delta: f32,
    momentum: Vec<f32>,
    /// Written in the one pass that also finds out whether a gradient is refused, which changes nothing.
    next: Vec<f32>,
}

impl Codec for Signum {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let (start, Self { delta, momentum, next, .. }) = (out.len(), &mut *self);
        let bits = out.room(packed_bytes(x.len(), 1));
        let stats = context.kernel.decayed_signs(Decayed { x, momentum, next, bits, delta: *delta }).stats();
        if !stats.is_finite() {
            out.truncate(start);
            return Err(not_finite(x));
        }
        std::mem::swap(momentum, next);
        Ok(Energy { sent: x.len() as f64, compensated: stats.energy })
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        signs::add(signs::read(from, target.out.len())?, context, target);
        Ok(())
    }

    fn aggregate(&mut self, from: &mut [Reader<'_>], context: &Context, out: &mut [f32]) -> Result<(), ReadError> {
        signs::majority(from, context, out)
    }

    fn size(&self) -> Size {
        Size::Exact(packed_bytes(self.momentum.len(), 1))
    }

    fn save(&self, out: &mut Writer) {
        save_values(&self.momentum, out);
    }

    fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError> {
        restore_values(from, &mut self.momentum)
    }
}
