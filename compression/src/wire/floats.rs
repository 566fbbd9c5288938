//! Half precision: rounding to nearest, ties to even, by the `half` crate (with the processor's instructions where it
//! has them).

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};

/// Values above 65504 become infinite: check before.
pub fn f32_to_f16(from: &[f32], to: &mut [u16]) {
    to.reinterpret_cast_mut::<f16>().convert_from_f32_slice(from);
}

/// Exact.
pub fn f16_to_f32(from: &[u16], to: &mut [f32]) {
    from.reinterpret_cast::<f16>().convert_to_f32_slice(to);
}

/// Values that round above the largest bf16 become infinite: check before.
pub fn f32_to_bf16(from: &[f32], to: &mut [u16]) {
    to.reinterpret_cast_mut::<bf16>().convert_from_f32_slice(from);
}

/// Exact.
pub fn bf16_to_f32(from: &[u16], to: &mut [f32]) {
    from.reinterpret_cast::<bf16>().convert_to_f32_slice(to);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every one of the 65,536 patterns comes back, except that a NaN may get its quiet bit.
    #[test]
    fn all_patterns_come_back() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let (mut wide, mut back) = (vec![0.0; all.len()], vec![0; all.len()]);
        f16_to_f32(&all, &mut wide);
        f32_to_f16(&wide, &mut back);
        assert!(all.iter().zip(&back).zip(&wide).all(|((a, b), w)| a == b || w.is_nan()));
        bf16_to_f32(&all, &mut wide);
        f32_to_bf16(&wide, &mut back);
        assert!(all.iter().zip(&back).zip(&wide).all(|((a, b), w)| a == b || w.is_nan()));
    }

    #[test]
    fn ties_go_to_even() {
        let mut to = [0; 5];
        // 1 + 2^-11 lies between two f16, 2049 between 2048 and 2050, 65519.996 is the last below infinity.
        f32_to_f16(&[1.0 + 2f32.powi(-11), 1.0 + 3.0 * 2f32.powi(-11), 2049.0, 65_519.996, 65_520.0], &mut to);
        assert_eq!(to, [0x3c00, 0x3c02, 0x6800, 0x7bff, 0x7c00]);
        f32_to_bf16(&[1.0 + 2f32.powi(-8), 1.0 + 3.0 * 2f32.powi(-8), 1e-45, -0.0, f32::MAX], &mut to);
        assert_eq!(to, [0x3f80, 0x3f82, 0, 0x8000, 0x7f80]);
    }
}
