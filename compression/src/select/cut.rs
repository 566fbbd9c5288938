//! The exact k-th largest key. Counting the top digit leaves the keys of one bin in play; when these are few they are
//! ranked by selection, else the next digit is counted. Never a full sort, and no more than three counting reads
//! whatever the data.

/// Keys have 31 bits: one digit of 11 and two of 10.
const DIGITS: [(u32, u32); 3] = [(20, 11), (10, 10), (0, 10)];

/// Bins of the widest digit.
const BINS: usize = 1 << 11;

/// Histograms side by side: equal digits in a row do not wait for each other's store.
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

impl Cut {
    /// Whether the next key in order of position is in.
    pub(crate) fn admits(&mut self, key: u32) -> bool {
        let tie = (key == self.key) & (self.ties > 0);
        self.ties -= usize::from(tie);
        (key > self.key) | tie
    }
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
    /// The cut for the k largest of `n` keys. k from 1 to n, n below 2^32.
    pub(crate) fn cut(&mut self, keys: impl Iterator<Item = u32> + Clone, n: usize, k: usize) -> Cut {
        if n <= FEW {
            return self.rank(keys, n, k, |_| true);
        }
        // Keys whose bits above the current digit are `prefix` are still in play; `rest` of them are in.
        let (mut prefix, mut known, mut rest) = (0u32, 0u32, k);
        for (shift, width) in DIGITS {
            let mask = (1u32 << width) - 1;
            let in_play = keys.clone().filter(move |key| key & known == prefix);
            let (bin, above, count) = self.count(in_play.map(|key| key >> shift & mask), mask, rest);
            rest -= above;
            prefix |= bin << shift;
            known |= mask << shift;
            if count <= GATHERED {
                return self.rank(keys, count, rest, |key| key & known == prefix);
            }
        }
        Cut { key: prefix, ties: rest }
    }

    /// The bin in which the `rank`-th largest digit lies, how many lie above that bin, and how many in it.
    fn count(&mut self, digits: impl Iterator<Item = u32>, highest: u32, rank: usize) -> (u32, usize, usize) {
        self.histogram.fill(0);
        let mut lane = 0;
        digits.for_each(|digit| {
            self.histogram[lane + digit as usize] += 1;
            lane = (lane + BINS) % (LANES * BINS);
        });
        let of =
            |bin: u32| -> usize { (0..LANES).map(|lane| self.histogram[lane * BINS + bin as usize] as usize).sum() };
        let mut above = 0;
        for bin in (1..=highest).rev() {
            let count = of(bin);
            if rank <= above + count {
                return (bin, above, count);
            }
            above += count;
        }
        (0, above, of(0))
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
        let cut = cutter.cut(keys.iter().copied(), keys.len(), k);
        assert_eq!(cutter.gathered.capacity(), capacity, "it allocated");
        keys.sort_unstable_by(|a, b| b.cmp(a));
        let ties = keys[..k].iter().filter(|x| **x == keys[k - 1]).count();
        assert_eq!(cut, Cut { key: keys[k - 1], ties }, "k = {k} of {}", keys.len());
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

    /// So many keys in one bin of every digit that all three are counted.
    #[test]
    fn crowded_bins_take_all_digits() {
        let n = 3 * GATHERED;
        for spread in [1u32, 2, 3, 700, 5000, 1 << 21] {
            let keys: Vec<u32> = (0..n as u32).map(|i| 0x3f80_0000 + i.wrapping_mul(0x9e37_79b1) % spread).collect();
            for k in [1, 2, n / 7, n - 1, n] {
                check(keys.clone(), k);
            }
        }
    }
}
