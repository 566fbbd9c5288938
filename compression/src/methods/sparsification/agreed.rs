//! The last of several exchanges: all ranks have agreed on k indices, and their values there, as they are, add up in flight.

use crate::codec::{EncodeError, ReadError};
use crate::kernels;
use crate::wire::{Reader, Writer};

/// k indices, ascending and below n; empty until they are agreed.
#[derive(Debug)]
pub(super) struct Agreed {
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) indices: Vec<u32>,
    values: Vec<f32>,
}

impl Agreed {
    pub(super) fn new(n: usize, k: usize) -> Self {
        Self { n, k, indices: Vec::with_capacity(k), values: Vec::with_capacity(k) }
    }

    /// On every index, without an exchange before.
    pub(super) fn on_all(n: usize) -> Self {
        Self { indices: (0..n as u32).collect(), ..Self::new(n, n) }
    }

    /// Appends the values of `x`; answers their energy. `round` of `rounds` is the last.
    pub(super) fn encode(&mut self, x: &[f32], rounds: u32, out: &mut Writer) -> Result<f64, EncodeError> {
        if self.indices.len() != self.k {
            return Err(EncodeError::Round { asked: rounds - 1, next: 0, rounds });
        }
        self.values.clear();
        self.values.extend(self.indices.iter().map(|i| x[*i as usize]));
        out.f32s(&self.values);
        Ok(kernels::energy(&self.values))
    }

    /// x becomes x − C(x).
    pub(super) fn take(&self, x: &mut [f32]) {
        self.indices.iter().for_each(|i| x[*i as usize] = 0.0);
    }

    pub(super) fn decode_add(&self, from: &mut Reader<'_>, (scale, out): (f32, &mut [f32])) -> Result<(), ReadError> {
        if self.indices.len() != self.k || out.len() != self.n {
            let (expected, got) = (self.k as u64, self.indices.len() as u64);
            return Err(ReadError::Length { expected, got });
        }
        let values = from.f32s("value", self.k)?;
        self.indices.iter().zip(values).for_each(|(i, value)| out[*i as usize] += scale * value);
        Ok(())
    }
}
