//! AR-Topk (Tyagi and Swany 2023, algorithm 1): one rank's top-k indices go to all, then everybody's values at these indices
//! add up in flight. Which rank: `star` takes turns by step, `var` takes the one whose top-k
//! values have the largest energy.
//!
//! The exchanges of this interface are sums, so the broadcast is one: the chosen rank gives its indices, the others
//! zeros. Indices travel as f32, exact up to 2^24; of longer tensors as two each, the upper and the lower 16 bits.
//! With 2 k near n, or as many `slots`, it sends more than the gradient has: it is for small k.
//!
//! Rounds: with `var` first `slots` energies, where rank r bids in slot r mod `slots` (ranks that share a slot bid
//! together and take turns); then the indices; then k values.

use super::agreed::Agreed;
use super::topk::Selector;
use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size};
use crate::entry::Entry;
use crate::wire::{Reader, Writer};
use flexcomm_domain::spec::{Values, compressors};

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::ARTOPK,
    code: 75,
    examples: &["k=0.01", "k=0.2,choose=var,slots=2", "k=5,choose=var"],
    build: |values, shape| Box::new(ArTopK::new(values, shape)),
};

/// Whole numbers below this are exact in f32.
const EXACT: usize = 1 << 24;

#[derive(Debug)]
struct ArTopK {
    by_energy: bool,
    slots: u32,
    /// The slot that won.
    slot: u32,
    selector: Selector,
    agreed: Agreed,
}

impl ArTopK {
    fn new(values: &Values, shape: Shape) -> Self {
        let n = shape.values();
        let agreed = Agreed::new(n, values.kept(0, n));
        let slots = values.whole(2) as u32; // at most 65,536
        Self { by_energy: values.whole(1) == 1, slots, slot: 0, selector: Selector::default(), agreed }
    }

    /// Elements per index.
    fn elements(&self) -> usize {
        if self.agreed.n <= EXACT { 1 } else { 2 }
    }

    /// The rank whose indices count.
    fn chosen(&self, context: &Context) -> u32 {
        let world = context.world.max(1);
        if !self.by_energy {
            return (context.step % u64::from(world)) as u32;
        }
        let sharing = (world - self.slot.min(world - 1)).div_ceil(self.slots);
        self.slot + self.slots * (context.step % u64::from(sharing)) as u32
    }

    fn write_bid(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<(), EncodeError> {
        self.selector.select(x, self.agreed.k, context)?;
        let energy = self.selector.selection.energy();
        // Ranks add up: what they sum to stays finite too.
        let bid = (energy as f32).min(f32::MAX / 65_536.0);
        let slots = out.room(4 * self.slots as usize).as_chunks_mut::<4>().0;
        slots[(context.rank % self.slots) as usize] = bid.to_le_bytes();
        Ok(())
    }

    fn write_indices(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<(), EncodeError> {
        let (k, elements) = (self.agreed.k, self.elements());
        if context.rank != self.chosen(context) {
            out.room(4 * k * elements);
            return Ok(());
        }
        self.selector.select(x, k, context)?;
        for index in self.selector.selection.indices() {
            if elements == 2 {
                out.f32((index >> 16) as f32);
                out.f32((index & 0xffff) as f32);
            } else {
                out.f32(*index as f32);
            }
        }
        Ok(())
    }

    fn read_slot(&mut self, sum: &mut Reader<'_>) -> Result<(), ReadError> {
        let bids = sum.f32s("energy", self.slots as usize)?;
        let best = (0..).zip(bids).fold((0, f32::MIN), |best, bid| if bid.1 > best.1 { bid } else { best });
        self.slot = best.0;
        Ok(())
    }

    fn read_indices(&mut self, sum: &mut Reader<'_>) -> Result<(), ReadError> {
        let (elements, Agreed { n, k, indices, .. }) = (self.elements(), &mut self.agreed);
        indices.clear();
        let mut numbers = sum.f32s("index", *k * elements)?;
        let mut least = 0u64;
        for _ in 0..*k {
            let index =
                (0..elements).fold(0.0, |index, _| index * 65_536.0 + f64::from(numbers.next().unwrap_or(-1.0)));
            if index.fract() != 0.0 || index < least as f64 || index >= *n as f64 {
                let rule = "it must be whole, ascend and stay below n";
                indices.clear();
                return Err(ReadError::Number { what: "index", value: index, rule });
            }
            least = index as u64 + 1;
            indices.push(index as u32);
        }
        Ok(())
    }
}

impl Codec for ArTopK {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let stats = context.stats(x)?;
        let rounds = self.rounds();
        let mut energy = Energy { sent: 0.0, compensated: stats.energy };
        match rounds - context.round.min(rounds - 1) {
            1 => energy.sent = self.agreed.encode(x, rounds, out)?,
            2 => self.write_indices(x, context, out)?,
            _ => self.write_bid(x, context, out)?,
        }
        Ok(energy)
    }

    fn encode_taking(&mut self, x: &mut [f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let energy = self.encode(x, context, out)?;
        self.agreed.take(x);
        Ok(energy)
    }

    fn decode_add(
        &mut self,
        from: &mut Reader<'_>,
        _context: &Context,
        target: (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        self.agreed.decode_add(from, target)
    }

    fn size(&self) -> Size {
        Size::Exact(4 * self.agreed.k)
    }

    fn rounds(&self) -> u32 {
        if self.by_energy { 3 } else { 2 }
    }

    fn round_size(&self, round: u32) -> Size {
        match self.rounds().saturating_sub(round) {
            0 | 1 => self.size(),
            2 => Size::Exact(4 * self.agreed.k * self.elements()),
            _ => Size::Exact(4 * self.slots as usize),
        }
    }

    fn reply(&mut self, sum: &mut Reader<'_>, context: &Context, _scale: f32) -> Result<(), ReadError> {
        match self.rounds().saturating_sub(context.round) {
            0 | 1 => sum.f32s("value", self.agreed.k).map(|_| ()),
            2 => self.read_indices(sum),
            _ => self.read_slot(sum),
        }
    }

    fn wants_reply(&self) -> bool {
        false
    }
}
