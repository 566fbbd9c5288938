//! Signs in one bit each: packed with the sums that scales and gains need, and added.

use super::portable::BLOCK;
use super::{Kernel, PassStats, Work, key};

/// Σ |x| and Σ x², block by block in eight sums each, whatever the kernel, and the largest key.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sums {
    /// Of blocks that are closed.
    pub(super) magnitude: f64,
    pub(super) energy: f64,
    /// Of the last block, while it is short.
    pub(super) magnitudes: [f64; 8],
    pub(super) squares: [f64; 8],
    /// NaN and infinity show in it.
    pub(crate) max_key: u32,
}

impl Sums {
    /// Σ |x|.
    pub(crate) fn magnitude(&self) -> f64 {
        self.magnitude + self.magnitudes.iter().sum::<f64>()
    }

    /// Σ x².
    pub(crate) fn energy(&self) -> f64 {
        self.energy + self.squares.iter().sum::<f64>()
    }

    /// The block is whole.
    pub(super) fn close(&mut self) {
        (self.magnitude, self.energy) = (self.magnitude(), self.energy());
        (self.magnitudes, self.squares) = ([0.0; 8], [0.0; 8]);
    }

    /// Goes on with `x`, whose first value is the first of a block, or of eight that end within one.
    pub(super) fn add(&mut self, x: &[f32], bits: &mut [u8]) {
        for (block, bits) in x.chunks(BLOCK).zip(bits.chunks_mut(BLOCK / 8)) {
            self.add_block(block, bits);
            if block.len() == BLOCK {
                self.close();
            }
        }
    }

    fn add_block(&mut self, x: &[f32], bits: &mut [u8]) {
        for (chunk, byte) in x.chunks(8).zip(bits) {
            let mut group = [0.0; 8];
            // A whole chunk is copied with one load.
            match chunk.first_chunk::<8>() {
                Some(whole) => group = *whole,
                None => group[..chunk.len()].copy_from_slice(chunk),
            }
            let mut signs = 0;
            for (lane, value) in group.into_iter().enumerate() {
                let wide = f64::from(value.abs());
                self.magnitudes[lane] += wide;
                self.squares[lane] += wide * wide;
                self.max_key = self.max_key.max(key(value));
                signs |= u8::from(value < 0.0) << lane;
            }
            *byte = signs;
        }
    }
}

impl Kernel {
    /// Packs signs, a set bit for x < 0, and adds up, in one read. `bits` has ⌈n/8⌉ bytes. Without MAGNITUDES
    /// [`Sums::magnitude`] is not to be asked.
    pub(crate) fn signs<const MAGNITUDES: bool>(self, x: &[f32], bits: &mut [u8]) -> Sums {
        let mut sums = Sums::default();
        let done = self.signs_first::<MAGNITUDES>(x, bits, &mut sums);
        sums.add(&x[done..], &mut bits[done / 8..]);
        sums
    }

    /// A momentum's next values and their signs, past what it was; answers Σ x² and the largest key of what came in.
    pub(crate) fn decayed_signs(self, decayed: Decayed<'_>) -> PassStats {
        let (Decayed { x, momentum, next, bits, delta }, mut seen) = (decayed, PassStats::default());
        let decayed = Decayed { x, momentum, next: &mut *next, bits: &mut *bits, delta };
        let done = self.decayed_signs_first(decayed, &mut seen);
        let values = x[done..].chunks(BLOCK).zip(momentum[done..].chunks(BLOCK)).zip(next[done..].chunks_mut(BLOCK));
        for (((x, momentum), next), bits) in values.zip(bits[done / 8..].chunks_mut(BLOCK / 8)) {
            let sums = self.signs::<false>(x, bits);
            self.run(Decay { x, momentum, next: &mut *next, delta });
            self.signs::<false>(next, bits);
            seen.energy += sums.energy();
            seen.max_key = seen.max_key.max(sums.max_key);
        }
        seen
    }

    /// `out += value`, or −value where the bit is set; where it is FRESH, to zeros instead of what `out` holds.
    pub(crate) fn add_signs<const FRESH: bool>(self, bits: &[u8], value: f32, out: &mut [f32]) {
        self.add_sides::<FRESH>(bits, [value, -value], out);
    }

    /// `out +=` the first value, or the second where the bit is set.
    pub(crate) fn add_sides<const FRESH: bool>(self, bits: &[u8], values: [f32; 2], out: &mut [f32]) {
        let done = self.add_sides_first::<FRESH>(bits, values, out);
        self.run(AddSides::<FRESH> { bits: &bits[done / 8..], values, out: &mut out[done..] });
    }
}

/// `next = (1 − delta) x + delta momentum`, and a set bit where that is below 0. Slices of one length, ⌈n/8⌉ bytes.
pub(crate) struct Decayed<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) momentum: &'a [f32],
    pub(crate) next: &'a mut [f32],
    pub(crate) bits: &'a mut [u8],
    pub(crate) delta: f32,
}

/// The values of [`Decayed`].
struct Decay<'a> {
    x: &'a [f32],
    momentum: &'a [f32],
    next: &'a mut [f32],
    delta: f32,
}

impl Work for Decay<'_> {
    #[inline(always)]
    fn run(self) {
        let fresh = 1.0 - self.delta;
        let pairs = self.x.iter().zip(self.momentum);
        self.next.iter_mut().zip(pairs).for_each(|(to, (x, z))| *to = fresh * x + self.delta * z);
    }
}

/// [`Kernel::add_sides`].
struct AddSides<'a, const FRESH: bool> {
    bits: &'a [u8],
    values: [f32; 2],
    out: &'a mut [f32],
}

impl<const FRESH: bool> Work for AddSides<'_, FRESH> {
    #[inline(always)]
    fn run(self) {
        let [clear, set] = self.values.map(f32::to_bits);
        let add = |to: &mut f32, byte: u8, lane: usize| {
            let held = if FRESH { 0.0 } else { *to };
            let is_set = (u32::from(byte) >> lane & 1).wrapping_neg();
            *to = held + f32::from_bits(clear ^ (clear ^ set) & is_set);
        };
        let (groups, rest) = self.out.as_chunks_mut::<8>();
        for (group, byte) in groups.iter_mut().zip(self.bits) {
            group.iter_mut().enumerate().for_each(|(lane, to)| add(to, *byte, lane));
        }
        let last = self.bits.get(groups.len()).copied().unwrap_or(0);
        rest.iter_mut().enumerate().for_each(|(lane, to)| add(to, last, lane));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// By definition one value after the other: value i of a block of 1024 into sums i modulo 8.
    fn check(x: &[f32]) -> Result<(), TestCaseError> {
        let (mut magnitude, mut energy, mut bytes) = (0.0f64, 0.0f64, vec![0u8; x.len().div_ceil(8)]);
        for block in x.chunks(1024) {
            let (mut magnitudes, mut squares) = ([0.0f64; 8], [0.0f64; 8]);
            for (i, value) in block.iter().enumerate() {
                magnitudes[i % 8] += f64::from(value.abs());
                squares[i % 8] += f64::from(*value) * f64::from(*value);
            }
            magnitude += magnitudes.iter().sum::<f64>();
            energy += squares.iter().sum::<f64>();
        }
        x.iter().enumerate().for_each(|(i, value)| bytes[i / 8] |= u8::from(*value < 0.0) << (i % 8));
        let max_key = x.iter().map(|x| key(*x)).max().unwrap_or(0);
        let number = |sum: f64| if sum.is_nan() { None } else { Some(sum.to_bits()) };
        for kernel in Kernel::available() {
            let mut bits = vec![0xaa; bytes.len()];
            prop_assert_eq!(number(kernel.signs::<false>(x, &mut bits).energy()), number(energy));
            prop_assert_eq!(&bits, &bytes, "{:?}", kernel);
            bits.fill(0x55);
            let sums = kernel.signs::<true>(x, &mut bits);
            prop_assert_eq!(&bits, &bytes, "{:?}", kernel);
            prop_assert_eq!(sums.max_key, max_key);
            prop_assert_eq!(number(sums.energy()), number(energy));
            prop_assert_eq!(number(sums.magnitude()), number(magnitude));
            let mut out = vec![1.0f32; x.len()];
            kernel.add_signs::<false>(&bits, 0.25, &mut out);
            let want: Vec<f32> = x.iter().map(|x| if *x < 0.0 { 0.75 } else { 1.25 }).collect();
            prop_assert_eq!(&out, &want);
            kernel.add_signs::<true>(&bits, 0.25, &mut out);
            let want: Vec<f32> = x.iter().map(|x| if *x < 0.0 { -0.25 } else { 0.25 }).collect();
            prop_assert_eq!(&out, &want);
            kernel.add_signs::<true>(&bits, 0.0, &mut out);
            prop_assert!(out.iter().all(|to| to.to_bits() == 0), "0 - 0 is 0");
            check_decayed(kernel, x, (number(energy), max_key))?;
        }
        Ok(())
    }

    fn check_decayed(kernel: Kernel, x: &[f32], (energy, max_key): (Option<u64>, u32)) -> Result<(), TestCaseError> {
        let momentum: Vec<f32> = x.iter().rev().map(|x| if x.is_finite() { 0.5 * x } else { 1.0 }).collect();
        let want: Vec<f32> = x.iter().zip(&momentum).map(|(x, z)| (1.0 - 0.9) * x + 0.9 * z).collect();
        let (mut next, mut bits) = (vec![7.0; x.len()], vec![0xaa; x.len().div_ceil(8)]);
        let decayed = Decayed { x, momentum: &momentum, next: &mut next, bits: &mut bits, delta: 0.9 };
        let seen = kernel.decayed_signs(decayed);
        prop_assert_eq!(seen.max_key, max_key);
        prop_assert_eq!(if seen.energy.is_nan() { None } else { Some(seen.energy.to_bits()) }, energy);
        for (i, (got, want)) in next.iter().zip(&want).enumerate() {
            prop_assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{i}: {got} {want}");
            prop_assert_eq!(bits[i / 8] >> (i % 8) & 1 == 1, *want < 0.0);
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn all_kernels_pack_the_same(x in super::super::values::of_all_classes(200)) {
            check(&x)?;
        }
    }

    /// Several blocks, and some that are no pair; the last so long that what is written goes past the caches.
    #[test]
    fn long_tensors_are_packed_the_same() {
        for n in [1023, 1024, 2048, 3079, 5120, (1 << 22) + 1300] {
            let x: Vec<f32> = (0..n as u32).map(|i| (i.wrapping_mul(0x9e37_79b9) as i32 >> 8) as f32 * 1e-3).collect();
            check(&x).unwrap();
        }
    }
}
