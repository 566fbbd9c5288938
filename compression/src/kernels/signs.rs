//! Signs in one bit each: packed with the sums that scales and gains need, and added.

use super::{Kernel, Work, key};

/// Σ |x| and Σ x² in eight sums each, whatever the kernel, and the largest key.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sums {
    pub(super) magnitudes: [f64; 8],
    pub(super) squares: [f64; 8],
    /// NaN and infinity show in it.
    pub(crate) max_key: u32,
}

impl Sums {
    /// Σ |x|.
    pub(crate) fn magnitude(&self) -> f64 {
        self.magnitudes.iter().sum()
    }

    /// Σ x².
    pub(crate) fn energy(&self) -> f64 {
        self.squares.iter().sum()
    }

    /// Goes on with `x`, whose first value is the first of eight.
    pub(super) fn add(&mut self, x: &[f32], bits: &mut [u8]) {
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
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => super::x86::signs_avx2(x, bits),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => super::x86::signs_avx512::<MAGNITUDES>(x, bits),
            _ => {
                let mut sums = Sums::default();
                sums.add(x, bits);
                sums
            }
        }
    }

    /// `out += value`, or −value where the bit is set.
    pub(crate) fn add_signs(self, bits: &[u8], value: f32, out: &mut [f32]) {
        let done = match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => super::x86::add_signs_avx512(bits, value, out),
            _ => 0,
        };
        self.run(AddSigns { bits: &bits[done / 8..], value, out: &mut out[done..] });
    }
}

/// `out += value`, or −value where the bit is set.
struct AddSigns<'a> {
    bits: &'a [u8],
    value: f32,
    out: &'a mut [f32],
}

impl Work for AddSigns<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let value = self.value.to_bits();
        let (groups, rest) = self.out.as_chunks_mut::<8>();
        for (group, byte) in groups.iter_mut().zip(self.bits) {
            for (lane, to) in group.iter_mut().enumerate() {
                *to += f32::from_bits(value ^ u32::from(*byte) >> lane << 31);
            }
        }
        let last = self.bits.last().copied().unwrap_or(0);
        for (lane, to) in rest.iter_mut().enumerate() {
            *to += f32::from_bits(value ^ u32::from(last) >> lane << 31);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// All kernels answer the same bits, by definition those of one value after the other.
        #[test]
        fn all_kernels_pack_the_same(x in prop::collection::vec(any::<f32>(), 0..200)) {
            let mut want = Sums::default();
            let mut bytes = vec![0u8; x.len().div_ceil(8)];
            for (i, value) in x.iter().enumerate() {
                want.magnitudes[i % 8] += f64::from(value.abs());
                want.squares[i % 8] += f64::from(*value) * f64::from(*value);
                want.max_key = want.max_key.max(key(*value));
                bytes[i / 8] |= u8::from(*value < 0.0) << (i % 8);
            }
            let number = |sum: f64| if sum.is_nan() { None } else { Some(sum.to_bits()) };
            for kernel in Kernel::available() {
                let mut bits = vec![0xaa; bytes.len()];
                let energy = kernel.signs::<false>(&x, &mut bits).energy();
                prop_assert_eq!(number(energy), number(want.energy()));
                prop_assert_eq!(&bits, &bytes, "{:?}", kernel);
                bits.fill(0x55);
                let sums = kernel.signs::<true>(&x, &mut bits);
                prop_assert_eq!(&bits, &bytes, "{:?}", kernel);
                prop_assert_eq!(sums.max_key, want.max_key);
                prop_assert_eq!(number(sums.energy()), number(want.energy()));
                prop_assert_eq!(number(sums.magnitude()), number(want.magnitude()));
                let mut out = vec![1.0f32; x.len()];
                kernel.add_signs(&bits, 0.25, &mut out);
                let want: Vec<f32> = x.iter().map(|x| if *x < 0.0 { 0.75 } else { 1.25 }).collect();
                prop_assert_eq!(out, want);
            }
        }
    }
}
