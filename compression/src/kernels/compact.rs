//! The values that reach a cut, out of candidates.

use super::{Kernel, SLACK, key};

/// Where the kept values go, and which are kept: those with a larger key, and the first `ties` with this key.
pub(crate) struct Compaction<'a> {
    pub(crate) key: u32,
    pub(crate) ties: usize,
    /// Both with room for all that are kept and [`ROOM`] behind them.
    pub(crate) indices: &'a mut [u32],
    pub(crate) values: &'a mut [f32],
    /// How many there are.
    pub(crate) len: usize,
}

/// Places behind the last that is kept: whole vectors are stored.
pub(crate) const ROOM: usize = SLACK;

impl Compaction<'_> {
    /// Stores the value and moves on only past what is kept: near the cut a branch would be guessed wrong half of the
    /// time.
    #[inline(always)]
    pub(crate) fn next(&mut self, index: u32, value: f32) {
        (self.indices[self.len], self.values[self.len]) = (index, value);
        let key = key(value);
        let tie = (key == self.key) & (self.ties > 0);
        self.ties -= usize::from(tie);
        self.len += usize::from((key > self.key) | tie);
    }
}

impl Kernel {
    /// Keeps those of the candidates that reach the cut, given by position and float bits.
    pub(crate) fn compact(self, (indices, bits): (&[u32], &[u32]), to: &mut Compaction<'_>) {
        let done = self.compact_first((indices, bits), to);
        let rest = indices[done..].iter().zip(&bits[done..]);
        rest.for_each(|(index, bits)| to.next(*index, f32::from_bits(*bits)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn all_kernels_keep_the_same(
            bits in prop::collection::vec(prop_oneof![any::<u32>(), 0u32..3, 0x8000_0000u32..0x8000_0003], 0..200),
            cut in prop_oneof![0u32..3, 0u32..0x7fff_ffff],
            ties in 0usize..40,
        ) {
            let indices: Vec<u32> = (0..bits.len() as u32).map(|i| 3 * i).collect();
            let mut left = ties;
            let mut kept = |bits: u32| match (bits & 0x7fff_ffff).cmp(&cut) {
                std::cmp::Ordering::Equal if left > 0 => {
                    left -= 1;
                    true
                }
                order => order.is_gt(),
            };
            let want: Vec<(u32, u32)> =
                indices.iter().copied().zip(bits.iter().copied()).filter(|(_, bits)| kept(*bits)).collect();
            for kernel in Kernel::available() {
                let (mut to, mut values) = (vec![0; want.len() + ROOM], vec![0.0; want.len() + ROOM]);
                let mut compaction = Compaction { key: cut, ties, indices: &mut to, values: &mut values, len: 0 };
                kernel.compact((&indices, &bits), &mut compaction);
                prop_assert_eq!((compaction.len, compaction.ties), (want.len(), left), "{:?}", kernel);
                let got: Vec<(u32, u32)> = to.into_iter().zip(values.into_iter().map(f32::to_bits)).collect();
                prop_assert_eq!(&got[..want.len()], &want[..], "{:?}", kernel);
            }
        }
    }
}
