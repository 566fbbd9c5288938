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
        mix(mix(i.wrapping_mul(SPREAD) ^ self.key[0]).wrapping_add(self.key[1]) ^ i.rotate_left(16)) ^ self.key[2]
    }

    /// Number i of those that come four from a word, for methods that round value after value and whose generator would cost
    /// more than all else: in each 64, numbers i, i + 16, i + 32 and i + 48 are a word times [`FOURS`]. The word is mixed
    /// once, with a key before, between and after the first two shifts.
    ///
    /// Each alone has 32 random bits, since an odd factor loses none, and so have the lowest 23 or 24 of them alone. Two of one
    /// word are pairs of a lattice that is as even as lattices are: of "the first is below p" and "the second is below q" the
    /// covariance is at most about 2^-16, whatever p and q, also where only the lowest 23 bits count: the partial quotients
    /// of ratio / 2^23, which bound it, add up to at most 100. Three and four of one word are less even, which no variance of a
    /// sum depends on.
    #[inline(always)]
    pub fn fourth(self, i: u32) -> u32 {
        self.word_of_four(i >> 6 << 4 | i & 15).wrapping_mul(FOURS[i as usize >> 4 & 3])
    }

    /// [`Self::fourth`] of number 64 * `group` and all that follow, to the end of `to`.
    #[inline(always)]
    pub(crate) fn fourths(self, group: u32, to: &mut [[u32; 64]]) {
        for (group, to) in (group..).zip(to) {
            for lane in 0..16 {
                let word = self.word_of_four(16 * group + lane);
                FOURS
                    .iter()
                    .enumerate()
                    .for_each(|(part, factor)| to[16 * part + lane as usize] = word.wrapping_mul(*factor));
            }
        }
    }

    /// Word i of those that four numbers are made of.
    #[inline(always)]
    fn word_of_four(self, i: u32) -> u32 {
        let x = i.wrapping_mul(SPREAD).wrapping_add(self.key[0]);
        let x = (x ^ x >> 16 ^ self.key[1]).wrapping_mul(FIRST_FACTOR);
        let x = (x ^ x >> 15 ^ self.key[2]).wrapping_mul(SECOND_FACTOR);
        x ^ x >> 16
    }

    /// What [`Self::word`] mixes in, for kernels that draw several at once.
    pub(crate) fn keys(self) -> [u32; 4] {
        self.key
    }

    /// Number i below `bound`, which is at most 2^32, with a bias below bound / 2^32: for samples and hash tables.
    #[inline(always)]
    pub fn place(self, i: u32, bound: usize) -> usize {
        ((u64::from(self.word(i)) * bound as u64) >> 32) as usize
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

/// How far apart neighbours are before they are mixed.
pub(crate) const SPREAD: u32 = 0x9e37_79b9;

/// What [`Stream::fourth`] multiplies a word with: 1, c, c² and c³. The pairs of lowest 32, 24 and 23 bits that c, c² and c³
/// lead to lie at least 0.8 times as far apart as in the best lattice.
pub(crate) const FOURS: [u32; 4] = {
    let c = 0x349a_97cdu32;
    [1, c, c.wrapping_mul(c), c.wrapping_mul(c).wrapping_mul(c)]
};

/// Of C. Wellons' search, "lowbias32": with shifts by 16, 15 and 16 every input bit flips every output bit with nearly half
/// probability.
pub(crate) const FIRST_FACTOR: u32 = 0x7feb_352d;
pub(crate) const SECOND_FACTOR: u32 = 0x846c_a68b;

/// A bijection of 32 bits.
#[inline(always)]
fn mix(mut x: u32) -> u32 {
    x = (x ^ x >> 16).wrapping_mul(FIRST_FACTOR);
    x = (x ^ x >> 15).wrapping_mul(SECOND_FACTOR);
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
                assert!(near(ones(&|i| stream.word(i) ^ stream.word(i).rotate_left(7))), "bit {bit} within a word");
            }
        }
    }

    #[test]
    fn four_numbers_are_a_word_and_its_products() {
        let stream = Stream::new(6, [0; 4]);
        for group in [0u32, 1, 4095, 4096, (1 << 26) - 3] {
            let mut all = [[0; 64]; 3];
            stream.fourths(group, &mut all);
            for (i, number) in all.as_flattened().iter().enumerate() {
                assert_eq!(stream.fourth(64 * group + i as u32), *number, "number {i} from group {group}");
            }
            for group in all {
                (16..64).for_each(|i| assert_eq!(group[i - 16].wrapping_mul(FOURS[1]), group[i]));
            }
        }
    }

    /// How far counts of equally likely cases are from what is expected, in standard deviations of chi squared.
    fn surprise(counts: &[u32], total: f64) -> f64 {
        let (expected, cases) = (total / counts.len() as f64, counts.len() as f64);
        let chi: f64 = counts.iter().map(|count| (f64::from(*count) - expected).powi(2) / expected).sum();
        (chi - (cases - 1.0)) / (2.0 * (cases - 1.0)).sqrt()
    }

    /// Streams of seeds, steps and ranks that differ by one bit.
    fn streams() -> Vec<Stream> {
        [(1, 0, 0), (0, 0, 0), (1, 1, 0), (1, 0, 1), (1, 0, 3), (1 << 40, 0, 0)]
            .map(|(seed, step, rank)| Stream::new(seed, [step, 0, 0, rank]))
            .to_vec()
    }

    /// The upper 16 bits, the lower 16, and those between which rounding to steps decides by first, are equally likely, and so
    /// are pairs of neighbours, of numbers 2^k apart and of streams.
    #[test]
    fn numbers_for_rounding_are_even() {
        const N: u32 = 1 << 18;
        let all = streams();
        for (which, stream) in all.iter().enumerate() {
            for shift in [0, 8, 16] {
                let mut counts = vec![0; 1 << 16];
                (0..N).for_each(|i| counts[(stream.fourth(i) >> shift & 0xffff) as usize] += 1);
                let surprise = surprise(&counts, f64::from(N));
                assert!(surprise.abs() < 5.0, "bits from {shift} on of stream {which}: {surprise}");
            }
            let other = all[(which + 1) % all.len()];
            let mut pairs: Vec<(u32, Stream)> = (0..=20).map(|k| (1 << k, *stream)).collect();
            pairs.push((0, other));
            for (apart, other) in pairs {
                for shift in [15, 16, 24] {
                    let mut counts = vec![0; 1 << 16];
                    let byte = |stream: Stream, i: u32| (stream.fourth(i) >> shift & 0xff) as usize;
                    (0..N).for_each(|i| counts[byte(*stream, i) << 8 | byte(other, i + apart)] += 1);
                    let surprise = surprise(&counts, f64::from(N));
                    assert!(surprise.abs() < 6.0, "{apart} apart, bits from {shift} on of stream {which}: {surprise}");
                }
            }
        }
    }

    /// What eight ranks' rounding adds up to has the variance of independent errors.
    #[test]
    fn errors_of_ranks_average_out() {
        const N: u32 = 1 << 18;
        let ranks: Vec<Stream> = (0..8).map(|rank| Stream::new(1, [0, 0, 0, rank])).collect();
        for chance in [0.5, 0.1, 0.01] {
            let up = |stream: &Stream, i| {
                f64::from(u8::from(f64::from(stream.fourth(i) & 0xff_ffff) < chance * 16_777_216.0))
            };
            let error = |i| ranks.iter().map(|stream| up(stream, i) - chance).sum::<f64>();
            let (mean, square) =
                (0..N).fold((0.0, 0.0), |(mean, square), i| (mean + error(i), square + error(i).powi(2)));
            let (mean, variance) = (mean / f64::from(N), square / f64::from(N));
            let want = 8.0 * chance * (1.0 - chance);
            assert!(mean.abs() < 6.0 * (want / f64::from(N)).sqrt(), "{chance}: mean {mean}");
            assert!((variance / want - 1.0).abs() < 0.02, "{chance}: variance {variance}, not {want}");
            // Of numbers of one word, and of neighbours, likewise.
            for apart in [1, 16, 32, 48] {
                let stream = ranks[0];
                let both = (0..N)
                    .filter(|i| i & 48 == 0)
                    .map(|i| (up(&stream, i) - chance) * (up(&stream, i + apart) - chance));
                let off = both.sum::<f64>() / f64::from(N / 4);
                let sigma = chance * (1.0 - chance) / f64::from(N / 4).sqrt();
                assert!(off.abs() < 6.0 * sigma, "{chance}, {apart} apart: covariance {off}");
            }
        }
    }

    /// Factors from one number of a word to others of the same: 16, 32 and 48 on.
    fn between() -> [u32; 3] {
        [FOURS[1], FOURS[2], FOURS[3]]
    }

    /// The sum of the partial quotients of factor / whole: it bounds by how many points of the lattice a box has more or fewer
    /// than its share.
    fn partial_quotients(factor: u64, whole: u64) -> u64 {
        match factor {
            0 => 0,
            _ => whole / factor + partial_quotients(whole % factor, factor),
        }
    }

    /// The length of the shortest vector of the lattice of (1, factor) and (0, whole), of that of the best one (Gauss).
    fn spacing(factor: i128, whole: i128) -> f64 {
        let square = |v: [i128; 2]| v[0] * v[0] + v[1] * v[1];
        let (mut short, mut long) = ([1, factor], [0, whole]);
        loop {
            if square(short) > square(long) {
                (short, long) = (long, short);
            }
            let along = (short[0] * long[0] + short[1] * long[1]) as f64 / square(short) as f64;
            let times = along.round() as i128;
            if times == 0 {
                return (square(short) as f64 / (whole as f64 * 2.0 / 3f64.sqrt())).sqrt();
            }
            long = [long[0] - times * short[0], long[1] - times * short[1]];
        }
    }

    /// What [`Stream::fourth`] and [`FOURS`] promise of the factors, by arithmetic alone.
    #[test]
    fn factors_of_a_word_make_even_lattices() {
        for bits in [32, 24, 23] {
            for factor in between() {
                assert_eq!(factor % 2, 1, "an even factor loses bits");
                let (whole, factor) = (1u64 << bits, u64::from(factor) % (1 << bits));
                let quotients = partial_quotients(factor, whole);
                assert!(quotients <= 100, "{factor:#x}, {bits} bits: partial quotients add up to {quotients}");
                let spacing = spacing(factor.into(), whole.into());
                assert!((0.8..=1.0).contains(&spacing), "{factor:#x}, {bits} bits: {spacing} of the best");
            }
        }
    }

    /// Of all words there are, how often a number is below p and another of the same word below q: p q of them but for 16 words,
    /// and where both are rarer than 2^-16, at most two in all. Counted, not drawn: every word is as likely as any other.
    #[test]
    fn rare_decisions_of_a_word_coincide_as_seldom_as_they_should() {
        for bits in [32u32, 24, 23] {
            for factor in between() {
                for p in bits.saturating_sub(17).max(1)..=18 {
                    let others =
                        (0..1u32 << (bits - p)).map(|word| word.wrapping_mul(factor) & (u32::MAX >> (32 - bits)));
                    let mut others: Vec<u32> = others.collect();
                    others.sort_unstable();
                    for q in 1..=18 {
                        let both = others.partition_point(|other| u64::from(*other) < 1 << (bits - q));
                        let want = 2f64.powi(bits as i32 - p as i32 - q as i32);
                        let of = format!("{factor:#x}, {bits} bits, 2^-{p} and 2^-{q}: {both} of {want}");
                        assert!((both as f64 - want).abs() <= 16.0, "{of}");
                        assert!(p.min(q) < 16 || both <= 2, "{of}");
                    }
                }
            }
        }
    }

    /// Whether two numbers of a word are below p and q: covariances over 2^20 words are 0 to within 6 standard errors and the
    /// bound of the lattice, also where both are rare, by all bits and by those that steps and powers of two go by.
    #[test]
    fn four_of_a_word_decide_as_if_independent() {
        const N: u32 = 1 << 20;
        let stream = Stream::new(7, [0; 4]);
        let chances = [0.5, 0.3, 0.9, 2f64.powi(-10), 2f64.powi(-18), 0.5 + 2f64.powi(-17)];
        for bits in [32, 24, 23] {
            let whole = 2f64.powi(bits);
            let number = |i: u32| f64::from(stream.fourth(i) & (u32::MAX >> (32 - bits)));
            for (p, q) in chances.iter().flat_map(|p| chances.iter().map(move |q| (*p, *q))) {
                for apart in [16, 32, 48] {
                    let firsts = (0..N).map(|i| i >> 4 << 6 | i & 15);
                    let both = firsts.filter(|&i| number(i) < p * whole && number(i + apart) < q * whole).count();
                    let off = (both as f64 / f64::from(N) - p * q).abs();
                    let sigma = (p * q * (1.0 - p * q) / f64::from(N)).sqrt();
                    // Counts of what hardly ever happens are no normal numbers: two more or less say nothing.
                    assert!(
                        off <= 6.0 * sigma + 100.0 / whole + 2.0 / f64::from(N),
                        "{bits}: {p} and {q}: off by {off}"
                    );
                }
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
