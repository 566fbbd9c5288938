//! k of n indices at random, without replacement: every set of k is equally likely.

use crate::random::Stream;

/// Draws sets with a buffer of one bit per index, which it keeps.
#[derive(Debug, Default)]
pub(in crate::methods) struct Subset {
    bits: Vec<u64>,
    /// The last set, ascending.
    pub(in crate::methods) indices: Vec<u32>,
    last: Option<Drawn>,
}

/// Which set: the same of the same.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Drawn {
    stream: Stream,
    n: usize,
    k: usize,
}

impl Subset {
    /// k of n indices by this stream, ascending, into [`Self::indices`]. Floyd's algorithm (Bentley and Floyd 1987): k draws,
    /// none rejected; of sets larger than half, those left out are drawn.
    pub(in crate::methods) fn draw(&mut self, stream: Stream, n: usize, k: usize) {
        let drawn = Drawn { stream, n, k };
        if self.last.replace(drawn) == Some(drawn) {
            return;
        }
        let few = k.min(n - k);
        self.bits.clear();
        self.bits.resize(n.div_ceil(64), 0);
        for (draw, last) in (n - few..n).enumerate() {
            let at = stream.below(draw as u64, last as u64 + 1) as usize;
            let taken = self.bits[at / 64] >> (at % 64) & 1 == 1;
            let at = if taken { last } else { at };
            self.bits[at / 64] |= 1 << (at % 64);
        }
        self.list(n, k, few);
    }

    fn list(&mut self, n: usize, k: usize, few: usize) {
        self.indices.clear();
        self.indices.reserve(k);
        let flip = if few == k { 0 } else { u64::MAX };
        for (at, word) in self.bits.iter().enumerate() {
            let inside = if n - at * 64 < 64 { (1 << (n - at * 64)) - 1 } else { u64::MAX };
            let mut word = (word ^ flip) & inside;
            while word != 0 {
                self.indices.push((at * 64) as u32 + word.trailing_zeros());
                word &= word - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// The known mistake is drawing with replacement, which repeats indices.
        #[test]
        fn exactly_k_different_indices_that_ascend(n in 0usize..700, share in 0.0f64..=1.0, seed: u64) {
            let k = (n as f64 * share) as usize;
            let mut subset = Subset::default();
            subset.draw(Stream::new(seed, [0; 4]), n, k);
            prop_assert_eq!(subset.indices.len(), k);
            prop_assert!(subset.indices.is_sorted_by(|a, b| a < b));
            prop_assert!(subset.indices.last().is_none_or(|i| (*i as usize) < n));
        }
    }

    /// All 10 sets of 2 and of 3 out of 5, within 6 standard deviations of a tenth.
    #[test]
    fn every_set_is_equally_likely() {
        for k in [2, 3] {
            let mut counts = BTreeMap::new();
            let mut subset = Subset::default();
            for seed in 0..20_000 {
                subset.draw(Stream::new(seed, [0; 4]), 5, k);
                *counts.entry(subset.indices.clone()).or_insert(0u32) += 1;
            }
            assert_eq!(counts.len(), 10);
            let sigma = (20_000.0f64 * 0.1 * 0.9).sqrt();
            assert!(counts.values().all(|c| (f64::from(*c) - 2000.0).abs() < 6.0 * sigma), "{counts:?}");
        }
    }
}
