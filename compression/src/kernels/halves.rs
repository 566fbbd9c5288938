//! Halves: values of 16 bits, rounded to nearest, ties to even; two bytes each, little endian.

use super::portable::energy;
use super::rounding::{Squares, total};
use super::{Kernel, Work, key};

/// A type of 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    /// IEEE 754 binary16.
    F16,
    /// The upper half of binary32.
    Bf16,
}

/// Σ x² of what is given and of what became of it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Narrowed {
    /// Not finite where a value is not.
    pub(crate) compensated: f64,
    pub(crate) sent: f64,
}

/// Values that are narrowed at once, at most: few enough that squares add up in f32, 64 in each sum.
pub(crate) const NARROWED: usize = 4096;

/// Sums of squares in f32 that did not overflow, nor lose much below: others are taken again in f64.
pub(super) const TRUSTED: std::ops::Range<f64> = 1e-24..1e38;

impl Narrowed {
    /// Whether sums in f32 say it well enough of these values. Zeros are common where gradients are sparse.
    fn is_trusted(self, x: &[f32]) -> bool {
        let zeros = || self.compensated == 0.0 && x.iter().fold(0, |bits, x| bits | key(*x)) == 0;
        TRUSTED.contains(&self.compensated) && TRUSTED.contains(&self.sent) || zeros()
    }
}

/// Bits of the half nearest to a value of at most the largest half.
#[inline(always)]
fn narrow<const F16: bool>(x: f32) -> u16 {
    let (bits, magnitude) = (x.to_bits(), key(x));
    if !F16 {
        return (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    }
    let normal = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13).wrapping_sub(112 << 10);
    // Beside 0.5 an f32 has steps of 2^-24, as halves below 2^-14 do: the sum rounds.
    let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let half = if magnitude < 0x3880_0000 { small } else { normal };
    (half | bits >> 16 & 0x8000) as u16
}

/// Exact.
#[inline(always)]
fn widen<const F16: bool>(half: u16) -> f32 {
    let bits = u32::from(half);
    if !F16 {
        return f32::from_bits(bits << 16);
    }
    let magnitude = bits & 0x7fff;
    let not_finite = if magnitude >= 0x7c00 { 112 << 23 } else { 0 };
    let small = (f32::from_bits(0.5f32.to_bits() | magnitude) - 0.5).to_bits();
    let wide = if magnitude < 0x400 { small } else { (magnitude << 13) + (112 << 23) + not_finite };
    f32::from_bits(wide | (bits & 0x8000) << 16)
}

impl Kernel {
    /// Halves of at most [`NARROWED`] values, clipped to ±limit, and their squares.
    pub(crate) fn narrow(self, half: Half, (x, limit): (&[f32], f32), to: &mut [u8]) -> Narrowed {
        match half {
            Half::F16 => self.narrow_to::<true>(x, limit, to),
            Half::Bf16 => self.narrow_to::<false>(x, limit, to),
        }
    }

    fn narrow_to<const F16: bool>(self, x: &[f32], limit: f32, to: &mut [u8]) -> Narrowed {
        let (mut compensated, mut sent, to) = ([0.0; 64], [0.0; 64], to.as_chunks_mut::<2>().0);
        let done = self.narrow_first::<F16>((x, limit), to, (&mut compensated, &mut sent));
        let squares = (&mut compensated, &mut sent);
        self.run(Narrow::<F16> { x: &x[done..], limit, to: &mut to[done..], squares });
        let narrowed = Narrowed { compensated: total(&compensated), sent: total(&sent) };
        if narrowed.is_trusted(x) { narrowed } else { squares_in_f64::<F16>(x, to) }
    }

    /// `out += scale * half`, where it is FRESH to zeros; answers the largest key of what was added.
    pub(crate) fn widen<const FRESH: bool>(self, half: Half, from: &[u8], (scale, out): (f32, &mut [f32])) -> u32 {
        match half {
            Half::F16 => self.widen_from::<FRESH, true>(from, (scale, out)),
            Half::Bf16 => self.widen_from::<FRESH, false>(from, (scale, out)),
        }
    }

    fn widen_from<const FRESH: bool, const F16: bool>(self, from: &[u8], (scale, out): (f32, &mut [f32])) -> u32 {
        let from = from.as_chunks::<2>().0;
        let (done, max) = self.widen_first::<FRESH, F16>(from, (scale, &mut *out));
        max.max(self.run(Widen::<FRESH, F16> { from: &from[done..], scale, out: &mut out[done..] }))
    }
}

#[cold]
fn squares_in_f64<const F16: bool>(x: &[f32], halves: &[[u8; 2]]) -> Narrowed {
    let mut wide = [0.0; NARROWED];
    wide.iter_mut().zip(halves).for_each(|(wide, half)| *wide = widen::<F16>(u16::from_le_bytes(*half)));
    Narrowed { compensated: energy(x), sent: energy(&wide[..x.len()]) }
}

/// Value i's squares are added to sums i modulo 64.
struct Narrow<'a, const F16: bool> {
    x: &'a [f32],
    limit: f32,
    to: &'a mut [[u8; 2]],
    squares: (&'a mut Squares, &'a mut Squares),
}

impl<const F16: bool> Work for Narrow<'_, F16> {
    #[inline(always)]
    fn run(self) {
        let Self { x, limit, to, squares } = self;
        // Copies of their own, so that the loop keeps them in registers.
        let (mut compensated, mut sent) = (*squares.0, *squares.1);
        for (x, to) in x.chunks(64).zip(to.chunks_mut(64)) {
            for (((x, to), compensated), sent) in x.iter().zip(to).zip(&mut compensated).zip(&mut sent) {
                let half = narrow::<F16>(x.max(-limit).min(limit));
                let wide = widen::<F16>(half);
                *compensated += x * x;
                *sent += wide * wide;
                *to = half.to_le_bytes();
            }
        }
        (*squares.0, *squares.1) = (compensated, sent);
    }
}

struct Widen<'a, const FRESH: bool, const F16: bool> {
    from: &'a [[u8; 2]],
    scale: f32,
    out: &'a mut [f32],
}

impl<const FRESH: bool, const F16: bool> Work<u32> for Widen<'_, FRESH, F16> {
    #[inline(always)]
    fn run(self) -> u32 {
        let mut max = 0;
        for (to, half) in self.out.iter_mut().zip(self.from) {
            let value = widen::<F16>(u16::from_le_bytes(*half)) * self.scale;
            max = max.max(key(value));
            *to = if FRESH { 0.0 } else { *to } + value;
        }
        max
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    /// By the `half` crate, one value after the other.
    fn by_definition(half: Half, x: f32) -> (u16, f32) {
        match half {
            Half::F16 => (f16::from_f32(x).to_bits(), f16::from_f32(x).to_f32()),
            Half::Bf16 => (bf16::from_f32(x).to_bits(), bf16::from_f32(x).to_f32()),
        }
    }

    const LARGEST: [(Half, f32); 2] = [(Half::F16, 65_504.0), (Half::Bf16, 3.389_531_4e38)];

    fn check(x: &[f32], (half, limit): (Half, f32)) {
        let want: Vec<(u16, f32)> = x.iter().map(|x| by_definition(half, x.clamp(-limit, limit))).collect();
        let bytes: Vec<u8> = want.iter().flat_map(|(half, _)| half.to_le_bytes()).collect();
        let square = |x: f32| f64::from(x) * f64::from(x);
        let sent: f64 = want.iter().map(|(_, wide)| square(*wide)).sum();
        let compensated: f64 = x.iter().map(|x| square(*x)).sum();
        let mut reference = None;
        for kernel in Kernel::available() {
            let mut to = vec![0xaa; bytes.len()];
            let seen = kernel.narrow(half, (x, limit), &mut to);
            assert_eq!(to, bytes, "{half:?} {kernel:?}");
            let close = |a: f64, b: f64| (a - b).abs() <= 4e-6 * b;
            assert!(
                close(seen.compensated, compensated) && close(seen.sent, sent),
                "{half:?} {kernel:?}: {seen:?} {compensated} {sent}"
            );
            assert_eq!(*reference.get_or_insert(seen), seen, "{half:?} {kernel:?}");
        }
    }

    /// Next to every half and to every middle between two, with either sign.
    #[test]
    fn values_become_the_nearest_half() {
        for (half, limit) in LARGEST {
            let wide = |bits: u16| {
                if half == Half::F16 { f16::from_bits(bits).to_f32() } else { bf16::from_bits(bits).to_f32() }
            };
            let all: Vec<f32> = (0..0x7f80u16)
                .map(wide)
                .filter(|x| x.is_finite())
                .flat_map(|x| {
                    let bits = x.to_bits();
                    let middle = if half == Half::F16 { 0x1000 } else { 0x8000 };
                    [bits, bits.saturating_sub(1), bits + 1, bits + middle - 1, bits + middle, bits + middle + 1]
                })
                .map(f32::from_bits)
                .filter(|x| x.is_finite())
                .flat_map(|x| [x, -x])
                .collect();
            all.chunks(NARROWED).for_each(|x| check(x, (half, limit)));
            all.chunks(999).take(30).for_each(|x| check(x, (half, 0.1)));
        }
    }

    proptest! {
        #[test]
        fn any_values_become_the_nearest_half(
            x in prop::collection::vec(any::<f32>().prop_filter("finite", |x| x.is_finite()), 0..NARROWED),
            scale in prop_oneof![Just(1.0f32), Just(1e-30f32)],
        ) {
            let x: Vec<f32> = x.into_iter().map(|x| scale * x).collect();
            LARGEST.into_iter().for_each(|half| check(&x, half));
        }
    }

    /// Zeros are not taken again; what only underflows is.
    #[test]
    fn zeros_are_trusted() {
        let nothing = Narrowed::default();
        assert!(nothing.is_trusted(&[0.0, -0.0]) && nothing.is_trusted(&[]));
        assert!(!nothing.is_trusted(&[0.0, 1e-30]) && !nothing.is_trusted(&[-1e-45]));
        assert!(
            !Narrowed { compensated: 1.0, sent: 0.0 }.is_trusted(&[1.0])
                && Narrowed { compensated: 1.0, sent: 1.0 }.is_trusted(&[1.0])
        );
        assert!(!Narrowed { compensated: f64::NAN, sent: f64::NAN }.is_trusted(&[f32::NAN]));
    }

    #[test]
    fn what_is_not_finite_shows() {
        for kernel in Kernel::available() {
            for (half, limit) in LARGEST {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut x = vec![1.0; 100];
                    x[70] = bad;
                    assert!(
                        !kernel.narrow(half, (&x, limit), &mut [0; 200]).compensated.is_finite(),
                        "{kernel:?} {bad}"
                    );
                }
            }
        }
    }

    /// Every one of the 65,536 patterns; what is not finite shows.
    #[test]
    fn every_half_is_widened() {
        for kernel in Kernel::available() {
            for (half, _) in LARGEST {
                let patterns: Vec<u16> = (0..=u16::MAX).collect();
                for patterns in
                    [&patterns[..], &patterns[0x3c01..0x3c40], &patterns[0x7c00..0x7c01], &patterns[..0x7c00]]
                {
                    let wide = |bits: &u16| {
                        if half == Half::F16 { f16::from_bits(*bits).to_f32() } else { bf16::from_bits(*bits).to_f32() }
                    };
                    let values: Vec<f32> = patterns.iter().map(|bits| 0.5 * wide(bits)).collect();
                    let bytes: Vec<u8> = patterns.iter().flat_map(|bits| bits.to_le_bytes()).collect();
                    let max = values.iter().map(|x| key(*x)).max().unwrap();
                    let (mut fresh, mut added) = (vec![f32::NAN; values.len()], vec![1.0; values.len()]);
                    let seen = [
                        kernel.widen::<true>(half, &bytes, (0.5, &mut fresh)),
                        kernel.widen::<false>(half, &bytes, (0.5, &mut added)),
                    ];
                    // A NaN may get its quiet bit.
                    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                    assert!(seen.iter().all(|seen| *seen == max || max > 0x7f80_0000 && *seen > 0x7f80_0000));
                    assert!(fresh.iter().zip(&values).all(|(got, value)| same(*got, 0.0 + value)));
                    assert!(added.iter().zip(&values).all(|(got, value)| same(*got, 1.0 + value)));
                }
            }
        }
    }
}
