//! signSGD with majority vote (Bernstein et al. 2018 and 2019): each rank sends the sign of each value; together they mean
//! the sign of the sum of signs, 0 on a tie. Every other value is +1 or −1: the learning rate is to be chosen for that.
//!
//! Payload: signs.

use super::signs;
use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Size};
use crate::entry::Entry;
use crate::wire::{Reader, Writer, packed_bytes};
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::SIGNSGD,
    code: 21,
    examples: &[""],
    build: |_, shape| Box::new(SignSgd { n: shape.values() }),
};

#[derive(Debug)]
struct SignSgd {
    n: usize,
}

impl Codec for SignSgd {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        signs::encode(x, context, out)
    }

    signs::decode_signs!();

    fn aggregate(&mut self, from: &mut [Reader<'_>], context: &Context, out: &mut [f32]) -> Result<(), ReadError> {
        signs::majority(from, context, out)
    }

    fn size(&self) -> Size {
        Size::Exact(packed_bytes(self.n, 1))
    }
}
