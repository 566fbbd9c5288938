//! Ternary values, five to a byte: the quartic encoding of 3LC (`methods/hybrid/threelc.rs`).

use super::{Kernel, Work, key};

/// The worth of each run's digit.
pub(crate) const WORTH: [u8; 5] = [81, 27, 9, 3, 1];

/// The byte of five zeros.
pub(crate) const FIVE_ZEROS: u8 = 121;

impl Kernel {
    /// Of five runs of `to.len()` values, the last of which may be short, ±1 from ±half on (above 0) and else 0, a byte of each
    /// run's i-th; a set bit i modulo 64 in word i / 64 of `busy` where one is not 0. Answers how many are not.
    pub(crate) fn quartic(self, x: &[f32], half: f32, (to, busy): (&mut [u8], &mut [u64])) -> u64 {
        let (done, count) = self.quartic_first(x, half, (&mut *to, &mut *busy));
        count + self.run(Rest { x, half: key(half), to, busy, done })
    }
}

/// What kernels leave: bytes from a multiple of 64 on.
struct Rest<'a> {
    x: &'a [f32],
    half: u32,
    to: &'a mut [u8],
    busy: &'a mut [u64],
    done: usize,
}

impl Work<u64> for Rest<'_> {
    #[inline(always)]
    fn run(self) -> u64 {
        let Self { x, half, to, busy, done } = self;
        let (run_len, to) = (to.len(), &mut to[done..]);
        // Every digit stands for 0 until a value says otherwise: so does the padding.
        to.fill(FIVE_ZEROS);
        let mut sent = 0;
        for (run, worth) in x.chunks(run_len.max(1)).zip(WORTH) {
            for (block, to) in run.get(done..).unwrap_or(&[]).chunks(4096).zip(to.chunks_mut(4096)) {
                let mut count = 0u32;
                for (x, to) in block.iter().zip(to) {
                    let large = u8::from(key(*x) >= half);
                    let negative = (x.to_bits() >> 31) as u8;
                    // ±worth: −worth is its complement, plus 1.
                    *to = to.wrapping_add(
                        ((worth ^ negative.wrapping_neg()).wrapping_add(negative)) & large.wrapping_neg(),
                    );
                    count += u32::from(large);
                }
                sent += u64::from(count);
            }
        }
        for (bytes, word) in to.chunks(64).zip(&mut busy[done / 64..]) {
            *word = bytes.iter().enumerate().fold(0, |word, (i, byte)| word | u64::from(*byte != FIVE_ZEROS) << i);
        }
        sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against digits one by one.
        #[test]
        fn all_kernels_write_the_same(
            mut x in prop::collection::vec(prop_oneof![4 => -1.0f32..1.0, 1 => Just(0.5f32), 1 => Just(-0.5f32)], 0..1200),
            quiet in 0usize..300,
            half in prop_oneof![Just(0.5f32), Just(f32::from_bits(1)), 0.01f32..2.0],
        ) {
            x.iter_mut().skip(quiet).step_by(2).for_each(|x| *x = 0.0);
            let len = x.len().div_ceil(5);
            let digit = |run: usize, i: usize| match x.get(run * len + i) {
                Some(x) if x.abs() >= half => 1 + x.signum() as i32,
                _ => 1,
            };
            let byte = |i| (0..5).map(|run| digit(run, i) * i32::from(WORTH[run])).sum::<i32>() as u8;
            let want: Vec<u8> = (0..len).map(byte).collect();
            for kernel in Kernel::available() {
                let (mut to, mut busy) = (vec![7; len], vec![u64::MAX; len.div_ceil(64)]);
                let sent = kernel.quartic(&x, half, (&mut to, &mut busy));
                prop_assert_eq!(&to, &want, "{:?}", kernel);
                prop_assert_eq!(sent, x.iter().filter(|x| x.abs() >= half).count() as u64);
                let is_busy = |i: usize| busy[i / 64] >> (i % 64) & 1 == 1;
                prop_assert!((0..64 * busy.len()).all(|i| is_busy(i) == want.get(i).is_some_and(|byte| *byte != FIVE_ZEROS)));
            }
        }
    }
}
