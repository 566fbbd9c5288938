//! Payloads of k of n values as they arrive, read where they lie: their parts' places follow from n and k, so that no host has
//! to look at them before they are added up.

use crate::feedback::WORD;
use crate::launch::{launch, start};
use crate::workspace::{check, check_apart, check_count, require};
use crate::{Device, LaunchError, Span, THREADS, Target};
use flexcomm_domain::spec::{EliasFano, IndexCoding, index_bytes};

/// Gathered payloads of [`crate::Form::FIXED`], one of each rank: of k values at indices below n. They may begin at any byte,
/// as they do behind a word and a header.
#[derive(Debug, Clone, Copy)]
pub struct Lists {
    /// Values of the tensor.
    pub n: u64,
    /// Values of each payload.
    pub k: u64,
    /// From the first byte of rank 0's payload on, at least to the last byte of the last rank's.
    pub payloads: Span,
    /// Bytes from one payload's beginning to that of the next.
    pub stride: u64,
    /// How many payloads.
    pub ranks: u32,
}

/// Memory that [`add_lists`] borrows from its caller beside what it adds to.
#[derive(Debug, Clone, Copy)]
pub struct ListRoom {
    /// [`lists_room`] bytes for the time of the call: a workspace of n values has as much for up to 256 ranks.
    pub counts: Span,
    /// A u32 that says afterwards whether all payloads were what they had to be: 0, or the number (from 1) of the last rank
    /// whose payload was not. Copy it back when it is wanted.
    pub refused: Span,
}

/// Bytes of the number of values and of the coding's code, which come first.
const FRONT: u64 = 5;

/// Where the parts of a payload lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    coding: IndexCoding,
    /// Lower bits of an index that stand in front of the marks; of Elias-Fano.
    low: u32,
    /// Of the bits that are a one per index.
    marks: u64,
    /// Of the values.
    values: u64,
}

impl Layout {
    fn new(n: u64, k: u64) -> Self {
        let coding = IndexCoding::least(n, k);
        let EliasFano { low_bits, .. } = EliasFano::of(n, k);
        let low = if coding == IndexCoding::EliasFano { low_bits } else { 0 };
        let marks = FRONT + (k * u64::from(low)).div_ceil(8);
        Self { coding, low, marks, values: FRONT - 1 + index_bytes(n, k) }
    }

    /// Tiles of bits that kernels count in.
    fn tiles(&self) -> u64 {
        if self.coding == IndexCoding::U32 { 0 } else { (self.values - self.marks).div_ceil(u64::from(THREADS)) }
    }
}

/// Bytes of a payload of k of n values in [`crate::Form::FIXED`].
pub fn list_bytes(n: u64, k: u64) -> u64 {
    Layout::new(n, k).values + 4 * k
}

/// Bytes of [`ListRoom::counts`] for such payloads of so many ranks.
pub fn lists_room(n: u64, k: u64, ranks: u32) -> u64 {
    4 * u64::from(ranks) * Layout::new(n, k).tiles()
}

impl Lists {
    fn check(&self) -> Result<(), LaunchError> {
        check_count(self.n)?;
        check_count(self.k)?;
        require(self.k <= self.n, "k", self.k as f64, "at most n")?;
        let (bytes, rule) = (list_bytes(self.n, self.k), "at least 1 rank, and as long as a payload");
        require(self.ranks > 0 && self.stride >= bytes, "stride", self.stride as f64, rule)?;
        let last = u64::from(self.ranks - 1).saturating_mul(self.stride);
        check("the payloads", self.payloads, last.saturating_add(bytes), 1)
    }

    fn check_all(&self, out: Span, room: &ListRoom) -> Result<(), LaunchError> {
        let counts = lists_room(self.n, self.k, self.ranks);
        check("out", out, 4 * self.n, WORD)?;
        check("the counts", room.counts, counts, WORD)?;
        check("the word for what is refused", room.refused, WORD, WORD)?;
        let counts = room.counts.part(0, counts);
        let (own, others) = (("the payloads", self.payloads), ("out", out));
        for written in [("the counts", counts), ("the word for what is refused", room.refused)] {
            check_apart(written, own)?;
            check_apart(written, others)?;
        }
        check_apart(own, others)?;
        check_apart(("the counts", counts), ("the word for what is refused", room.refused))
    }
}

/// `out += scale * C(x)` of every rank's payload, in the order of ranks: with `out` zero before and a scale of 1 over the
/// number of ranks (as f32), the bits of the CPU side's mean. Nothing waits; a launch per rank, and two or three more.
///
/// Whatever the payloads' bytes are, nothing beyond them is read and nothing beyond `out` is written. Where one is not what
/// n and k say, or would be refused by the CPU side's reader, [`ListRoom::refused`] says so, and `out` is not to be used.
pub fn add_lists(device: &impl Device, lists: &Lists, to: Target, room: &ListRoom) -> Result<(), LaunchError> {
    lists.check()?;
    lists.check_all(to.out, room)?;
    let call = Call { lists, layout: Layout::new(lists.n, lists.k), room };
    device.zero(room.refused.part(0, WORD))?;
    call.count(device)?;
    (0..lists.ranks).try_for_each(|rank| call.add(device, rank, to))
}

/// What the launches of a call share.
struct Call<'a> {
    lists: &'a Lists,
    layout: Layout,
    room: &'a ListRoom,
}

impl Call<'_> {
    /// How many indices come before every tile, of all ranks.
    fn count(&self, device: &impl Device) -> Result<(), LaunchError> {
        let (Lists { k, payloads, stride, ranks, .. }, Layout { marks, values, .. }) = (*self.lists, self.layout);
        let (tiles, ListRoom { counts, refused }) = (self.layout.tiles(), *self.room);
        if tiles == 0 {
            return Ok(());
        }
        let jobs = u64::from(ranks) * tiles * u64::from(THREADS);
        start(device, "count_marks", jobs, (payloads, stride, ranks, marks, values - marks, counts))?;
        launch(device, "scan_marks", ranks, (counts, tiles, k, refused))
    }

    fn add(&self, device: &impl Device, rank: u32, Target { scale, out }: Target) -> Result<(), LaunchError> {
        let (Lists { n, k, payloads, stride, .. }, ListRoom { counts, refused }) = (*self.lists, *self.room);
        let Layout { coding, low, marks, values } = self.layout;
        let (before, tiles) = (u64::from(rank), self.layout.tiles());
        let payload = payloads.address() + before * stride;
        if coding == IndexCoding::U32 {
            return start(device, "add_listed", k, (out, n, payload, k, scale, refused, rank + 1));
        }
        let counts = counts.address() + 4 * before * tiles;
        let layout = (coding as u32, low, marks, values);
        let threads = tiles * u64::from(THREADS);
        start(device, "add_marked", threads, (out, n, payload, k, layout, scale, counts, refused, rank + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_compression::wire;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn layouts_are_those_of_the_cpu_side(
            (n, k) in (0usize..1 << 31).prop_flat_map(|n| (Just(n), 0..=n)),
            few in 0usize..300,
        ) {
            for (n, k) in [(n, k), (n, few.min(n)), (few, k.min(few))] {
                let layout = Layout::new(n as u64, k as u64);
                prop_assert_eq!(list_bytes(n as u64, k as u64), (4 + wire::index_bytes(n, k) + 4 * k) as u64);
                prop_assert!(layout.marks <= layout.values);
                prop_assert!(lists_room(n as u64, k as u64, 256) <= crate::workspace_bytes(n as u64));
            }
        }
    }
}
