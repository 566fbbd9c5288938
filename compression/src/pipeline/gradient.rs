//! Gradients as they come.

use crate::codec::EncodeError;
use crate::wire::{DType, bf16_to_f32, f16_to_f32};
use half::{bf16, f16};

/// A gradient in one of the types that frameworks hold them in. All arithmetic is done in f32.
#[derive(Debug, Clone, Copy)]
pub enum Gradient<'a> {
    /// IEEE 754 binary32.
    F32(&'a [f32]),
    /// Bits of IEEE 754 binary16.
    F16(&'a [u16]),
    /// Bits of bfloat16.
    Bf16(&'a [u16]),
    /// Nothing but zeros: a rank that has no gradient but must take part.
    Zeros,
}

impl<'a> From<&'a [f32]> for Gradient<'a> {
    fn from(values: &'a [f32]) -> Self {
        Self::F32(values)
    }
}

impl<'a> Gradient<'a> {
    pub(super) fn dtype(self) -> DType {
        match self {
            Self::F32(_) | Self::Zeros => DType::F32,
            Self::F16(_) => DType::F16,
            Self::Bf16(_) => DType::Bf16,
        }
    }

    pub(super) fn check_length(self, expected: usize) -> Result<(), EncodeError> {
        let got = match self {
            Self::F32(values) => values.len(),
            Self::F16(bits) | Self::Bf16(bits) => bits.len(),
            Self::Zeros => expected,
        };
        if got == expected { Ok(()) } else { Err(EncodeError::Length { what: "it", expected, got }) }
    }

    /// The error of a step names the gradient's first value that is not finite, or else what was added to it.
    #[cold]
    pub(super) fn clear(self, error: EncodeError) -> EncodeError {
        let EncodeError::NonFinite { index, value } = error else { return error };
        let first = |values: &mut dyn Iterator<Item = f32>| values.enumerate().find(|(_, x)| !x.is_finite());
        let own = match self {
            Self::F32(values) => first(&mut values.iter().copied()),
            Self::F16(bits) => first(&mut bits.iter().map(|x| f16::from_bits(*x).to_f32())),
            Self::Bf16(bits) => first(&mut bits.iter().map(|x| bf16::from_bits(*x).to_f32())),
            Self::Zeros => None,
        };
        match own {
            Some((index, value)) => EncodeError::NonFinite { index, value },
            None => EncodeError::Residual { index, value },
        }
    }

    /// As f32: its own values, or converted into `staged`.
    pub(super) fn as_f32<'b>(self, n: usize, staged: &'b mut Vec<f32>) -> &'b [f32]
    where
        'a: 'b,
    {
        if let Self::F32(values) = self {
            return values;
        }
        staged.resize(n, 0.0);
        match self {
            Self::F16(bits) => f16_to_f32(bits, staged),
            Self::Bf16(bits) => bf16_to_f32(bits, staged),
            Self::F32(_) | Self::Zeros => staged.fill(0.0),
        }
        staged
    }
}
