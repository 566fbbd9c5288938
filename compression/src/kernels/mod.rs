//! The one pass over the whole gradient: error feedback add, energy, check for NaN and infinity, and the
//! candidates of a selection, in one read. Chosen at run time; all kernels answer the same bits.

mod approximate;
mod compact;
mod halves;
mod nearest;
mod packing;
mod partition;
mod places;
mod portable;
mod rounding;
mod signs;
mod tables;
mod ternary;
mod vectors;
mod work;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use approximate::approximate_stats;
pub(crate) use compact::{Compaction, ROOM};
pub(crate) use halves::{Half, NARROWED};
pub(crate) use nearest::{Even, Lines};
pub(crate) use packing::{Pack, Unpack, by_width};
pub(crate) use partition::Columns;
pub(crate) use places::{Packed, Places, SPAN};
pub(crate) use portable::energy;
pub(crate) use rounding::{Rounded, Rounding, Squares, Steps, TABLED, Words, total};
pub(crate) use signs::Decayed;
pub(crate) use tables::Table;
pub(crate) use ternary::{FIVE_ZEROS, WORTH};
pub(crate) use work::Work;

use crate::codec::Stats;

/// `|x|` as an integer: for finite floats, a larger magnitude is a larger key.
pub(crate) const KEY_MASK: u32 = 0x7fff_ffff;

/// Keys from here on are infinities and NaN.
pub(crate) const NOT_FINITE: u32 = 0x7f80_0000;

/// The key of a float.
pub(crate) fn key(value: f32) -> u32 {
    value.to_bits() & KEY_MASK
}

/// Which instructions the pass over the gradient uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Plain Rust, for every machine.
    Portable,
    /// 8 values at a time.
    Avx2,
    /// 16 values at a time.
    Avx512,
}

impl Kernel {
    /// Every kernel there is, the fastest last.
    pub const ALL: &'static [Self] = &[Self::Portable, Self::Avx2, Self::Avx512];

    /// Whether this machine can run it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => x86::avx2(self),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => x86::avx512(self),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }

    /// Those that this machine can run.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|k| k.is_available())
    }

    /// The fastest that this machine can run.
    pub fn best() -> Self {
        Self::available().last().unwrap_or(Self::Portable)
    }
}

/// Input of the pass. All slices have one length.
pub(crate) struct Feed<'a> {
    pub(crate) gradient: &'a [f32],
    /// None: the gradient is looked at as it is.
    pub(crate) added: Option<Added<'a>>,
    /// Keys from here on are candidates; None: there are none.
    pub(crate) floor: Option<u32>,
}

/// What is added to the gradient before it is looked at: `compensated = beta * residual + gamma * gradient` (GRACE, equation 5).
pub(crate) struct Added<'a> {
    pub(crate) residual: &'a [f32],
    pub(crate) beta: f32,
    pub(crate) gamma: f32,
    pub(crate) compensated: &'a mut [f32],
}

/// Output of the pass.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct PassStats {
    /// Σ x². Not a number when a value is not finite.
    pub(crate) energy: f64,
    /// The largest key.
    pub(crate) max_key: u32,
}

impl PassStats {
    /// Of no values.
    pub(crate) const NOTHING: Self = Self { energy: 0.0, max_key: 0 };

    /// In the words of codecs.
    pub(crate) fn stats(self) -> Stats {
        Stats { energy: self.energy, max: f32::from_bits(self.max_key) }
    }
}

/// ‖x‖² and max |x| in one read. NaN and infinity show in both.
pub(crate) fn stats(kernel: Kernel, x: &[f32]) -> Stats {
    scan(kernel, x, None, &mut Candidates::default()).stats()
}

/// [`stats`] of parts of `len` values that follow one another, of which vectors do several at once; answers whether this kernel
/// has them.
pub(crate) fn stats_of_parts(kernel: Kernel, x: &[f32], len: usize, seen: &mut [PassStats]) -> bool {
    len.is_multiple_of(16) && len <= portable::BLOCK && kernel.parts(x, len, seen)
}

/// [`stats`], and the candidates from a floor on.
pub(crate) fn scan(kernel: Kernel, x: &[f32], floor: Option<u32>, found: &mut Candidates) -> PassStats {
    kernel.feed(Feed { gradient: x, added: None, floor }, found)
}

/// Values at or above a floor, by position.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    /// One entry per candidate in the first `len`; beyond that, room for whole vectors.
    indices: Vec<u32>,
    bits: Vec<u32>,
    len: usize,
    limit: usize,
    overflowed: bool,
}

/// Room behind the limit, so that kernels may store whole vectors.
const SLACK: usize = 16;

impl Candidates {
    /// Empties the list and makes room for `limit` candidates.
    pub(crate) fn reset(&mut self, limit: usize) {
        (self.len, self.limit, self.overflowed) = (0, limit, false);
        if self.indices.len() < limit + SLACK {
            self.indices.resize(limit + SLACK, 0);
            self.bits.resize(limit + SLACK, 0);
        }
    }

    /// Positions, ascending, and float bits; None when there were more than fit.
    pub(crate) fn get(&self) -> Option<(&[u32], &[u32])> {
        (!self.overflowed).then(|| (&self.indices[..self.len], &self.bits[..self.len]))
    }
}

/// Values of tests that kernels must agree on.
#[cfg(test)]
mod values {
    use proptest::prelude::*;

    /// Fewer than `most`: zeros, subnormal and normal numbers, and in half of the cases some NaN (also signalling ones) and
    /// infinities, of both signs, between them. `any` makes neither, and where all classes are equally likely no long case is
    /// finite.
    pub(crate) fn of_all_classes(most: usize) -> impl Strategy<Value = Vec<f32>> {
        let mixed = prop_oneof![99 => any::<f32>(), 1 => prop::num::f32::ANY | prop::num::f32::SIGNALING_NAN];
        prop_oneof![prop::collection::vec(any::<f32>(), 0..most), prop::collection::vec(mixed, 0..most)]
    }

    #[test]
    fn every_class_occurs() {
        use proptest::strategy::ValueTree;
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let made: Vec<Vec<f32>> =
            (0..64).map(|_| of_all_classes(3000).new_tree(&mut runner).unwrap().current()).collect();
        let some = |is: fn(&f32) -> bool| made.iter().flatten().any(is);
        assert!(some(|x| x.is_nan()) && some(|x| *x == f32::INFINITY) && some(|x| *x == f32::NEG_INFINITY));
        assert!(some(|x| x.is_subnormal()) && some(|x| *x == 0.0) && some(|x| x.is_normal()));
        assert!(made.iter().filter(|x| x.len() > 100 && x.iter().all(|x| x.is_finite())).count() > 10);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What every kernel must answer: sums, largest key and candidates by plain loops.
    fn check(kernel: Kernel, gradient: &[f32], residual: &[f32], floor: Option<u32>, limit: usize) {
        for (beta, gamma) in [(1.0, 1.0), (0.75, 3.0)] {
            let sum: Vec<f32> = gradient.iter().zip(residual).map(|(g, r)| beta * r + gamma * g).collect();
            let (mut compensated, mut found) = (vec![9.0; sum.len()], Candidates::default());
            found.reset(limit);
            let added = Added { residual, beta, gamma, compensated: &mut compensated };
            let out = kernel.feed(Feed { gradient, added: Some(added), floor }, &mut found);
            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&compensated), bits(&sum), "{kernel:?}");
            check_found(kernel, Wanted { sum: &sum, floor, limit }, out, &found);
            found.reset(limit);
            let out = scan(kernel, &sum, floor, &mut found);
            check_found(kernel, Wanted { sum: &sum, floor, limit }, out, &found);
        }
    }

    /// Values, and what is collected of them.
    struct Wanted<'a> {
        sum: &'a [f32],
        floor: Option<u32>,
        limit: usize,
    }

    fn check_found(kernel: Kernel, wanted: Wanted<'_>, out: PassStats, found: &Candidates) {
        let Wanted { sum, floor, limit } = wanted;
        assert_eq!(out.max_key, sum.iter().map(|x| key(*x)).max().unwrap_or(0), "{kernel:?}");
        // By block, value i of it into sum i modulo 8, and what is no whole eight behind them.
        let block = |block: &[f32]| {
            let (mut sums, whole) = ([0.0f64; 8], block.len() / 8 * 8);
            block[..whole].iter().enumerate().for_each(|(i, x)| sums[i % 8] += f64::from(*x).powi(2));
            block[whole..].iter().fold(sums.iter().sum::<f64>(), |sum, x| sum + f64::from(*x).powi(2))
        };
        let energy: f64 = sum.chunks(1024).fold(0.0, |sum, values| sum + block(values));
        assert!(
            out.energy == energy || (out.energy.is_nan() && energy.is_nan()),
            "{kernel:?}: {} {energy}",
            out.energy
        );
        let want = sum.iter().enumerate().filter(|(_, x)| floor.is_some_and(|floor| key(**x) >= floor));
        let want: (Vec<u32>, Vec<u32>) = want.map(|(i, x)| (i as u32, x.to_bits())).unzip();
        match found.get() {
            Some((indices, bits)) => assert_eq!((indices, bits), (&want.0[..], &want.1[..]), "{kernel:?}"),
            None => assert!(want.0.len() > limit, "{kernel:?} gave up at {} of {limit}", want.0.len()),
        }
    }

    proptest! {
        #[test]
        fn all_kernels_answer_the_same(
            gradient in super::values::of_all_classes(3000),
            residual in super::values::of_all_classes(3000),
            fed_back in any::<bool>(),
            floor in prop::option::of(prop_oneof![Just(0u32), Just(KEY_MASK), Just(0x3f80_0000), 0u32..=KEY_MASK]),
            limit in prop_oneof![0usize..100, Just(3000usize)],
        ) {
            // One NaN times another keeps either's bits, by the order of operands: leave NaN to the one side.
            let clean = |x: f32| if x.is_nan() { 1.0 } else { x };
            let residual = residual.into_iter().map(|x| if fed_back { clean(x) } else { 0.0 });
            let residual: Vec<f32> = residual.chain(std::iter::repeat(0.5)).take(gradient.len()).collect();
            for kernel in Kernel::available() {
                check(kernel, &gradient, &residual, floor, limit);
            }
        }
    }

    /// So long that it is written past the caches, and at every alignment.
    #[test]
    fn long_gradients_are_fed_the_same() {
        let n = (1 << 22) + 1030;
        let gradient: Vec<f32> = (0..n as u32).map(|i| (i.wrapping_mul(0x9e37_79b9) as i32 >> 8) as f32).collect();
        let residual: Vec<f32> = gradient.iter().rev().map(|x| 0.3 * x).collect();
        for kernel in Kernel::available() {
            for skip in [0, 1, 4] {
                check(kernel, &gradient[skip..], &residual[skip..], Some(0x4afe_0000), n);
            }
        }
    }

    #[test]
    fn the_portable_kernel_is_always_there() {
        assert_eq!(Kernel::available().next(), Some(Kernel::Portable));
        assert!(Kernel::best().is_available());
    }
}
