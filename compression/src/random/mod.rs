//! Random numbers by counter: number i of a stream is a function of (seed, step, tensor, purpose, rank, i) and nothing
//! else. No state, no order, nothing of the caller's: any part of a tensor can be worked on anywhere.

mod xorshift;

pub use xorshift::Xorshift128Plus;

/// Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xd251_1f53;
        let b = u64::from(counter[2]) * 0xcd9e_8d57;
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

/// One stream of random numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stream {
    key: [u32; 4],
}

impl Stream {
    /// Of a seed and what tells this stream apart. Streams of different words are unrelated.
    pub fn new(seed: u64, words: [u64; 4]) -> Self {
        let mut state = [0u32; 4];
        let mut key = [seed as u32, (seed >> 32) as u32];
        for pair in words.chunks(2) {
            let counter = [pair[0] as u32, (pair[0] >> 32) as u32, pair[1] as u32, (pair[1] >> 32) as u32];
            state = philox(std::array::from_fn(|i| counter[i] ^ state[i]), key);
            key = [key[0] ^ state[1], key[1] ^ state[3]];
        }
        Self { key: state }
    }

    /// Number i, all bits random. Cheap, and loops over neighbouring i become vectors; i counts modulo 2^32.
    #[inline(always)]
    pub fn word(self, i: u32) -> u32 {
        self.word_of(Counter::new(i))
    }

    /// [`Self::word`] of the number that a counter is at.
    #[inline(always)]
    pub(crate) fn word_of(self, i: Counter) -> u32 {
        mix(mix(i.spread ^ self.key[0]).wrapping_add(self.key[1]) ^ i.turned) ^ self.key[2]
    }

    /// Number i of those that come two from a word, for methods that round value after value and whose generator would cost
    /// more than all else: in each 32, numbers i and i + 16 are one word, the second with its halves swapped.
    ///
    /// Each alone has 32 random bits, as [`Self::word`] has. Two of one word depend on each other only where the upper half
    /// of the one decides nothing, at a chance of 2^-16: of "the first is below p" and "the second is below q" the
    /// covariance is at most 2^-17 + 2^-32, whatever p and q. All others are as independent as words are.
    #[inline(always)]
    pub fn twin(self, i: u32) -> u32 {
        self.word(i >> 5 << 4 | i & 15).rotate_left(i & 16)
    }

    /// [`Self::twin`] of number 32 * `group` and all that follow, to the end of `to`.
    #[inline(always)]
    pub(crate) fn twins(self, group: u32, to: &mut [[u32; 32]]) {
        for (group, to) in (group..).zip(to) {
            let mut counter = Counter::new(16 * group);
            let (words, swapped) = to.split_at_mut(16);
            for (word, swapped) in words.iter_mut().zip(swapped) {
                *word = self.word_of(counter);
                *swapped = word.rotate_left(16);
                counter = counter.next();
            }
        }
    }

    /// What [`Self::word`] mixes in, for kernels that draw several at once.
    pub(crate) fn keys(self) -> [u32; 4] {
        self.key
    }

    /// Number i in [0, 1), with 24 bits: every f32 k/2^24 is equally likely.
    #[inline(always)]
    pub fn uniform(self, i: u32) -> f32 {
        (self.word(i) >> 8) as f32 * (1.0 / 16_777_216.0)
    }

    /// Four numbers of the strongest kind, for choices that the whole message hangs on; i may be any u64.
    pub fn block(self, i: u64) -> [u32; 4] {
        philox([i as u32, (i >> 32) as u32, self.key[2], self.key[3]], [self.key[0], self.key[1]])
    }

    /// Number i in [0, 1) with 53 bits, of the strongest kind.
    pub fn unit(self, i: u64) -> f64 {
        let [a, b, ..] = self.block(i);
        ((u64::from(a) << 32 | u64::from(b)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Number i below `bound`, of the strongest kind, by multiplication (bias below 2^-32).
    pub fn below(self, i: u64, bound: u64) -> u64 {
        let [a, b, ..] = self.block(i);
        ((u128::from(u64::from(a) << 32 | u64::from(b)) * u128::from(bound)) >> 64) as u64
    }
}

/// What [`Stream::word`] needs of a number. Of neighbours it follows by additions, which cost less in a loop than a product
/// and a rotation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counter {
    spread: u32,
    turned: u32,
}

impl Counter {
    /// How far apart the first halves of neighbours are.
    pub(crate) const SPREAD: u32 = 0x9e37_79b9;

    /// At number i.
    #[inline(always)]
    pub(crate) fn new(i: u32) -> Self {
        Self { spread: i.wrapping_mul(Self::SPREAD), turned: i.rotate_left(16) }
    }

    /// At the next number, if that is no multiple of 2^16.
    #[inline(always)]
    pub(crate) fn next(self) -> Self {
        Self { spread: self.spread.wrapping_add(Self::SPREAD), turned: self.turned.wrapping_add(1 << 16) }
    }
}

/// A bijection of 32 bits in which every input bit flips every output bit with nearly half probability (constants of
/// C. Wellons' search, "lowbias32").
#[inline(always)]
fn mix(mut x: u32) -> u32 {
    x = (x ^ x >> 16).wrapping_mul(0x7feb_352d);
    x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
    x ^ x >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors that the authors publish with Random123 (kat_vectors, philox4x32 10).
    #[test]
    fn philox_known_values() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    /// Bits balance, neighbours and streams are unrelated: each count of 2^20 within 6 standard deviations.
    #[test]
    fn words_look_random() {
        const N: u32 = 1 << 20;
        let sigma = f64::from(N).sqrt() / 2.0;
        let near = |count: u32| (f64::from(count) - f64::from(N) / 2.0).abs() < 6.0 * sigma;
        for seed in 0..4 {
            let stream = Stream::new(seed, [1, 2, 3, 4]);
            let other = Stream::new(seed, [1, 2, 3, 5]);
            for bit in 0..32 {
                let ones = |of: &dyn Fn(u32) -> u32| (0..N).filter(|i| of(*i) >> bit & 1 == 1).count() as u32;
                assert!(near(ones(&|i| stream.word(i))), "bit {bit} of seed {seed}");
                assert!(near(ones(&|i| stream.word(i) ^ stream.word(i + 1))), "bit {bit} of neighbours");
                assert!(near(ones(&|i| stream.word(i) ^ other.word(i))), "bit {bit} of streams");
                assert!(near(ones(&|i| stream.twin(i) ^ stream.twin(i + 1))), "bit {bit} of neighbours, two a word");
                assert!(near(ones(&|i| stream.twin(i) ^ stream.twin(i ^ 16))), "bit {bit} of twins");
                assert!(near(ones(&|i| stream.word(i) ^ stream.word(i).rotate_left(7))), "bit {bit} within a word");
            }
        }
    }

    #[test]
    fn counters_lead_to_the_same_words() {
        let stream = Stream::new(5, [0; 4]);
        for first in [0u32, 16, 65_520, 0x1234_5670, u32::MAX - 15] {
            let mut counter = Counter::new(first);
            for i in first..=first + 15 {
                assert_eq!(stream.word_of(counter), stream.word(i), "{i} from {first}");
                counter = counter.next();
            }
        }
    }

    #[test]
    fn twins_are_the_halves_of_a_word_swapped() {
        let stream = Stream::new(6, [0; 4]);
        for group in [0u32, 1, 4095, 4096, (1 << 27) - 3] {
            let mut all = [[0; 32]; 3];
            stream.twins(group, &mut all);
            for (i, twin) in all.as_flattened().iter().enumerate() {
                assert_eq!(stream.twin(32 * group + i as u32), *twin, "number {i} from group {group}");
            }
            for group in all {
                (0..16).for_each(|i| assert_eq!(group[i].rotate_left(16), group[i + 16]));
            }
        }
        let mut words: Vec<u32> = (0..320).map(|i| stream.twin(i).min(stream.twin(i).rotate_left(16))).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), 160, "two numbers a word");
    }

    /// Whether a number and its twin are below p and q: covariances over 2^22 words are 0 to within 6 standard errors and the
    /// bound, also where both are rare and where both hang on the lower half.
    #[test]
    fn twins_decide_as_if_independent() {
        const N: u32 = 1 << 22;
        let stream = Stream::new(7, [0; 4]);
        let chances = [0.5, 0.3, 0.9, 1.0 / 65_536.0, 1.5 / 65_536.0, 0.5 + 0.5 / 65_536.0, 1e-3];
        for p in chances {
            for q in chances {
                let below = |i: u32, chance: f64| f64::from(stream.twin(i)) < chance * 4_294_967_296.0;
                let firsts = (0..2 * N).filter(|i| i & 16 == 0);
                let both = firsts.filter(|&i| below(i, p) && below(i + 16, q)).count();
                let off = (both as f64 / f64::from(N) - p * q).abs();
                let sigma = (p * q * (1.0 - p * q) / f64::from(N)).sqrt();
                // Counts of what hardly ever happens are no normal numbers: two more or less say nothing.
                assert!(off <= 6.0 * sigma + 1.0 / 131_072.0 + 2.0 / f64::from(N), "{p} and {q}: off by {off}");
            }
        }
    }

    #[test]
    fn every_word_names_another_stream() {
        let base = Stream::new(1, [0; 4]);
        assert_ne!(base, Stream::new(2, [0; 4]));
        assert_ne!(base, Stream::new(1 << 32, [0; 4]));
        for i in 0..4 {
            for value in [1, 1 << 32, u64::MAX] {
                let mut words = [0; 4];
                words[i] = value;
                assert_ne!(base, Stream::new(1, words), "word {i} = {value}");
            }
        }
    }

    #[test]
    fn ranges_are_kept() {
        let stream = Stream::new(9, [0; 4]);
        for i in 0..100_000 {
            assert!((0.0..1.0).contains(&stream.uniform(i)));
            assert!((0.0..1.0).contains(&stream.unit(u64::from(i))));
            assert!(stream.below(u64::from(i), 7) < 7);
        }
    }
}
