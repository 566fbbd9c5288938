//! none: every value as it is.
//!
//! Payload: n floats, added in flight.

use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Size, Target};
use crate::entry::Entry;
use crate::wire::{Reader, Writer};
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::NONE,
    code: 32,
    examples: &[""],
    build: |_, shape| Box::new(Plain { n: shape.values() }),
};

#[derive(Debug)]
struct Plain {
    n: usize,
}

impl Codec for Plain {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let energy = context.stats(x)?.energy;
        out.f32s(x);
        Ok(Energy { sent: energy, compensated: energy })
    }

    fn decode(&mut self, from: &mut Reader<'_>, _: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let (scale, out) = target.added();
        from.add_f32s("values", (scale, out))
    }

    fn size(&self) -> Size {
        Size::Exact(4 * self.n)
    }
}
