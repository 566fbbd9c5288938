//! The exact k-th largest key. Counting the bins that the range of keys is divided into leaves the keys of one bin in play;
//! when these are few they are ranked by selection, else that bin is divided. Never a full sort, and no more than three
//! counting reads whatever the data.

use crate::kernels::KEY_MASK;
use std::ops::RangeInclusive;

/// Every key: 31 bits, which three divisions count out.
pub(crate) const ANY_KEY: RangeInclusive<u32> = 0..=KEY_MASK;

/// Bins of a range are at most two to this power.
const BIN_BITS: u32 = 11;

/// Most bins.
const BINS: usize = 1 << BIN_BITS;

/// Histograms side by side: equal bins in a row do not wait for each other's store.
const LANES: usize = 4;

/// Up to here ranking is cheaper than clearing and adding up histograms.
const FEW: usize = 2048;

/// Up to here the keys of a bin are gathered and ranked.
const GATHERED: usize = 65_536;

/// Where k values end: all with a larger key are in, and the first `ties` with this key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) key: u32,
    pub(crate) ties: usize,
}

/// One bin of a histogram.
struct Bin {
    bin: u32,
    /// How many lie in higher bins, and how many in this one.
    above: usize,
    count: usize,
}

/// Buffers for cutting.
#[derive(Debug)]
pub(crate) struct Cutter {
    histogram: Vec<u32>,
    gathered: Vec<u32>,
}

impl Default for Cutter {
    fn default() -> Self {
        Self { histogram: vec![0; BINS * LANES], gathered: Vec::with_capacity(GATHERED + 1) }
    }
}

impl Cutter {
    /// The cut for the k largest of `n` keys, which lie within a range: the closer it fits, the fewer share a bin. k from 1 to
    /// n, n below 2^32.
    pub(crate) fn cut(
        &mut self,
        keys: impl Iterator<Item = u32> + Clone,
        within: RangeInclusive<u32>,
        (n, k): (usize, usize),
    ) -> Cut {
        if n <= FEW {
            return self.rank(keys, n, k, |_| true);
        }
        // Keys from `low` on, up to `span` above it, are still in play; `rest` of them are in.
        let (mut low, mut span, mut rest) = (*within.start(), within.end() - within.start(), k);
        loop {
            let shift = (u32::BITS - span.leading_zeros()).saturating_sub(BIN_BITS);
            let above_low = keys.clone().map(move |key| key.wrapping_sub(low)).filter(move |above| *above <= span);
            let Bin { bin, above, count } = self.count(above_low.map(|key| key >> shift), span >> shift, rest);
            rest -= above;
            low += bin << shift;
            span = (span - (bin << shift)).min((1 << shift) - 1);
            if span == 0 {
                return Cut { key: low, ties: rest };
            }
            if count <= GATHERED {
                return self.rank(keys, count, rest, |key| key.wrapping_sub(low) <= span);
            }
        }
    }

    /// The bin in which the `rank`-th largest lies.
    fn count(&mut self, bins: impl Iterator<Item = u32>, highest: u32, rank: usize) -> Bin {
        self.histogram.fill(0);
        let mut lane = 0;
        bins.for_each(|bin| {
            self.histogram[lane + bin as usize] += 1;
            lane = (lane + BINS) % (LANES * BINS);
        });
        let of =
            |bin: u32| -> usize { (0..LANES).map(|lane| self.histogram[lane * BINS + bin as usize] as usize).sum() };
        let mut above = 0;
        for bin in (1..=highest).rev() {
            let count = of(bin);
            if rank <= above + count {
                return Bin { bin, above, count };
            }
            above += count;
        }
        Bin { bin: 0, above, count: of(0) }
    }

    /// By selection among few keys: the `count` that are in play.
    fn rank(&mut self, keys: impl Iterator<Item = u32>, count: usize, k: usize, in_play: impl Fn(u32) -> bool) -> Cut {
        // One place more, and every key is stored: a branch would be guessed wrong too often.
        self.gathered.resize(count + 1, 0);
        let mut len = 0;
        keys.for_each(|key| {
            self.gathered[len] = key;
            len += usize::from(in_play(key));
        });
        self.gathered.truncate(count);
        let (larger, key, _) = self.gathered.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        let key = *key;
        // Of the first k, those that are no tie.
        let ties = k - larger.iter().filter(|x| **x > key).count();
        Cut { key, ties }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(mut keys: Vec<u32>, k: usize) {
        let mut cutter = Cutter::default();
        let capacity = cutter.gathered.capacity();
        let cuts = [ANY_KEY, keys.iter().copied().min().unwrap()..=keys.iter().copied().max().unwrap()]
            .map(|within| cutter.cut(keys.iter().copied(), within, (keys.len(), k)));
        assert_eq!(cutter.gathered.capacity(), capacity, "it allocated");
        keys.sort_unstable_by(|a, b| b.cmp(a));
        let ties = keys[..k].iter().filter(|x| **x == keys[k - 1]).count();
        assert_eq!(cuts, [Cut { key: keys[k - 1], ties }; 2], "k = {k} of {}", keys.len());
    }

    proptest! {
        #[test]
        fn agrees_with_sorting(
            keys in prop::collection::vec(prop_oneof![0u32..4, 0u32..0x7f80_0000, 0x3f80_0000u32..0x3f80_0100], 1..5000),
            share in 0.0f64..=1.0,
        ) {
            let k = ((keys.len() as f64 * share) as usize).clamp(1, keys.len());
            check(keys, k);
        }
    }

    /// So many keys in one bin that it is divided again.
    #[test]
    fn crowded_bins_are_divided() {
        let n = 3 * GATHERED;
        for spread in [1u32, 2, 3, 700, 5000, 1 << 21] {
            let keys: Vec<u32> = (0..n as u32).map(|i| 0x3f80_0000 + i.wrapping_mul(0x9e37_79b1) % spread).collect();
            for k in [1, 2, n / 7, n - 1, n] {
                check(keys.clone(), k);
            }
        }
    }
}
