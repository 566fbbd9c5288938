//! Gradients to measure on.

use flexcomm_compression::random::Stream;
use flexcomm_compression::wire::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// A gradient of a network, see `compression/benches/data/README.md`.
static RECORDED: &[u8] = include_bytes!("../../compression/benches/data/mlp-gradient.f16");

/// Where values come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
pub enum Distribution {
    /// Normal, of standard deviation 0.001.
    Normal,
    /// Laplace: heavier tails.
    Laplace,
    /// A gradient of 101,770 values from a multilayer perceptron's training on Fashion-MNIST, repeated up to n, each time at
    /// another scale near 1 so that no value appears twice.
    Recorded,
}

/// Type of the gradient before compression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
pub enum DType {
    /// Four bytes.
    Fp32,
    /// Two bytes, IEEE 754.
    Fp16,
    /// Two bytes, the upper half of fp32.
    Bf16,
}

impl Distribution {
    /// As in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Laplace => "laplace",
            Self::Recorded => "recorded",
        }
    }

    /// n values, the same each time, as `dtype` can hold them.
    pub fn values(self, n: usize, dtype: DType) -> Vec<f32> {
        let stream = Stream::new(1, [0; 4]);
        let mut values: Vec<f32> = match self {
            Self::Normal => (0..n as u32).map(|i| normal(stream.uniform(i), stream.uniform(!i))).collect(),
            Self::Laplace => (0..n as u32).map(|i| laplace(stream.uniform(i))).collect(),
            Self::Recorded => recorded(n),
        };
        dtype.round(&mut values);
        values
    }
}

fn normal(a: f32, b: f32) -> f32 {
    1e-3 * (-2.0 * (1.0 - a).ln()).sqrt() * (std::f32::consts::TAU * b).cos()
}

fn laplace(u: f32) -> f32 {
    let u = u - 0.5;
    -1e-3 * u.signum() * (1.0 - 2.0 * u.abs()).max(f32::MIN_POSITIVE).ln()
}

fn recorded(n: usize) -> Vec<f32> {
    let halves: Vec<u16> = RECORDED.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect();
    let mut once = vec![0.0; halves.len()];
    f16_to_f32(&halves, &mut once);
    let scale = |i: usize| (1.0 + 0.001 * (i / halves.len()) as f32) / 1024.0;
    (0..n).map(|i| once[i % halves.len()] * scale(i)).collect()
}

impl DType {
    /// As in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
        }
    }

    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        if self == Self::Fp32 { 4 } else { 2 }
    }

    /// The bits of 16-bit types; empty for fp32.
    pub fn halves(self, values: &[f32]) -> Vec<u16> {
        let mut bits = vec![0; if self == Self::Fp32 { 0 } else { values.len() }];
        match self {
            Self::Fp32 => {}
            Self::Fp16 => f32_to_f16(values, &mut bits),
            Self::Bf16 => f32_to_bf16(values, &mut bits),
        }
        bits
    }

    fn round(self, values: &mut [f32]) {
        let bits = self.halves(values);
        match self {
            Self::Fp32 => {}
            Self::Fp16 => f16_to_f32(&bits, values),
            Self::Bf16 => bf16_to_f32(&bits, values),
        }
    }
}
