//! Hard threshold (Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing"; GRACE 3.3): of values
//! with a magnitude above tau the sign is sent, and stands for ±tau. With error feedback the rest follows later.
//!
//! Strom packs each value into 32 bits, 31 for the index; here indices are a set in its least coding, and signs have a
//! bit each.

use super::super::sparsification::sparse::{Pick, selection_of};
use super::signed;
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size};
use crate::entry::Entry;
use crate::kernels::key;
use crate::wire::{Reader, Writer};
use crate::{Energy, Selection};
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::HARDTHRESHOLD,
    code: 113,
    examples: &["tau=0.5", "tau=2", "tau=1000000"],
    build: |values, shape| Box::new(HardThreshold::new(values.number(0), shape)),
};

#[derive(Debug)]
struct HardThreshold {
    n: usize,
    tau: f32,
    selection: Selection,
    /// Of a message that is decoded.
    indices: Vec<u32>,
    negative: Vec<u8>,
}

impl HardThreshold {
    fn new(tau: f64, shape: Shape) -> Self {
        // Numbers beyond f32's on either side become its last ones.
        let tau = (tau.min(f64::from(f32::MAX)) as f32).max(f32::from_bits(1));
        let n = shape.values();
        let (selection, indices, negative) = (selection_of(n, n), Vec::with_capacity(n), Vec::with_capacity(n));
        Self { n, tau, selection, indices, negative }
    }
}

impl Codec for HardThreshold {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let stats = context.stats(x)?;
        out.reserve(self.size().most());
        let (tau, selection) = (key(self.tau), &mut self.selection);
        selection.reset(x.len());
        context.kernel.run(Pick { x, selection, admits: |_, x| key(x) > tau });
        signed::write(&self.selection, out);
        Ok(Energy { sent: self.selection.len() as f64 * f64::from(self.tau).powi(2), compensated: stats.energy })
    }

    fn encode_taking(&mut self, x: &mut [f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let energy = self.encode(x, context, out)?;
        let tau = self.tau;
        let sent = self.selection.indices().iter().zip(self.selection.values());
        sent.for_each(|(i, value)| x[*i as usize] -= tau.copysign(*value));
        Ok(energy)
    }

    fn decode_add(
        &mut self,
        from: &mut Reader<'_>,
        _context: &Context,
        (scale, out): (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        let Self { tau, indices, negative, .. } = self;
        signed::read(from, out.len(), (indices, negative))?;
        for (i, negative) in indices.iter().zip(negative) {
            out[*i as usize] += scale * if *negative == 1 { -*tau } else { *tau };
        }
        Ok(())
    }

    fn size(&self) -> Size {
        Size::AtMost(signed::most_bytes(self.n))
    }
}
