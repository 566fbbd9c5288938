//! Variance-based sparsification (Tsuzuku et al. 2018, "Variance-based gradient compression for efficient distributed deep
//! learning", algorithm 1; GRACE 3.2): a value is sent once its accumulated gradient r stands out of its noise,
//! r² > alpha v, with v the accumulated squares; then r and v start over, and what is not sent has its v multiplied by
//! zeta.
//!
//! r is what error feedback accumulates: use it with `ef(vanilla)`; `trainable` refuses it without a memory. The
//! paper takes v over the single samples of a mini-batch. A gradient that reaches a compressor is their mean, so here a step's gradient counts as one sample (a
//! mini-batch of 1 in the paper's terms): v grows by (x − what the memory added)². Where the memory scales its residual, as
//! when the learning rate changes, v scales with its square: r and v stay in the same units. Another strategy's residual has
//! no noise on record. Squares are f32: what stays below 1e-23 is never sent.

use super::sparse::{Choose, Sparse};
use crate::Selection;
use crate::codec::{Carried, Context, EncodeError, ReadError, Stats};
use crate::entry::Entry;
use crate::memory::{restore_values, save_values};
use crate::wire::{Reader, Writer};
use flexcomm_domain::spec::{Values, compressors};

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::VARIANCE,
    code: 73,
    examples: &["alpha=0.5", "alpha=1.5,zeta=0.9", ""],
    build: |values, shape| Box::new(Sparse::new(shape.values(), Variance::new(values, shape.values()))),
};

#[derive(Debug)]
struct Variance {
    alpha: f32,
    zeta: f32,
    /// v.
    squares: Vec<f32>,
    /// What the memory put into the tensor to come; zeros but between [`Choose::carried`] and [`Choose::choose`].
    added: Vec<f32>,
    share: Carried,
}

impl Variance {
    fn new(values: &Values, n: usize) -> Self {
        let (alpha, zeta) = (values.number(0) as f32, values.number(1) as f32);
        Self { alpha, zeta, squares: vec![0.0; n], added: vec![0.0; n], share: Carried::WHOLE }
    }
}

impl Choose for Variance {
    const FIXED: bool = false;

    fn most(&self) -> usize {
        self.squares.len()
    }

    fn choose(&mut self, x: &[f32], context: &Context, selection: &mut Selection) -> Result<Stats, EncodeError> {
        let stats = context.stats(x)?;
        let Self { alpha, zeta, squares, added, share } = self;
        let (weight, kept) = (square(share.weight), square(share.kept));
        for (i, ((x, v), added)) in x.iter().zip(squares).zip(added).enumerate() {
            let new = (x - *added) * (x - *added);
            let sent = x * x > *alpha * noise(weight, *v, new);
            *v = if sent { 0.0 } else { *zeta * noise(kept, *v, new) };
            *added = 0.0;
            if sent {
                selection.indices.push(i as u32);
                selection.values.push(*x);
            }
        }
        self.share = Carried::WHOLE;
        Ok(stats)
    }

    fn carried(&mut self, residual: &[f32], share: Carried) {
        self.added.iter_mut().zip(residual).for_each(|(to, residual)| *to = share.weight * residual);
        self.share = share;
    }

    fn save(&self, out: &mut Writer) {
        save_values(&self.squares, out);
    }

    fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError> {
        restore_values(from, &mut self.squares)
    }
}

fn square(factor: f32) -> f64 {
    f64::from(factor).powi(2)
}

/// v in new units and a sample more. Squares of huge values stay finite, so that a saved state is.
fn noise(factor: f64, v: f32, new: f32) -> f32 {
    ((factor * f64::from(v)) as f32 + new).min(f32::MAX)
}
