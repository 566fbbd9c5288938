//! Plain Rust, in blocks that stay in the first-level cache and loops that compilers turn into vectors.

use super::{Candidates, Fed, Feed, key};

/// Values per block: three buffers of 4 KiB.
const BLOCK: usize = 1024;

/// Values that are looked at together: one comparison skips a group without candidates.
const GROUP: usize = 16;

pub(super) fn feed(feed: Feed<'_>, found: &mut Candidates) -> Fed {
    let mut out = Fed::default();
    let gradient = feed.gradient.chunks(BLOCK);
    let residual = feed.residual.chunks(BLOCK);
    for (i, ((g, r), f)) in gradient.zip(residual).zip(feed.fed.chunks_mut(BLOCK)).enumerate() {
        f.iter_mut().zip(g).zip(r).for_each(|((f, g), r)| *f = g + r);
        out.energy += energy(f);
        out.max_key = f.iter().fold(out.max_key, |max, x| max.max(key(*x)));
        if let Some(floor) = feed.floor {
            // Positions fit u32: Layers sees to it.
            collect(f, (i * BLOCK) as u32, floor, found);
        }
    }
    out
}

/// Σ x² in eight independent sums.
#[inline(always)]
pub(crate) fn energy(values: &[f32]) -> f64 {
    let (groups, rest) = values.as_chunks::<8>();
    let mut sums = [0.0f64; 8];
    for group in groups {
        for (sum, x) in sums.iter_mut().zip(group) {
            *sum += f64::from(*x) * f64::from(*x);
        }
    }
    rest.iter().fold(sums.iter().sum(), |sum, x| sum + f64::from(*x) * f64::from(*x))
}

#[inline(always)]
pub(super) fn collect(values: &[f32], base: u32, floor: u32, found: &mut Candidates) {
    for (i, group) in values.chunks(GROUP).enumerate() {
        let max = group.iter().fold(0, |max: u32, x| max.max(key(*x)));
        if max < floor {
            continue;
        }
        if found.len + GROUP > found.limit + super::SLACK {
            found.overflowed = true;
            return;
        }
        let indices = &mut found.indices[found.len..found.len + group.len()];
        let bits = &mut found.bits[found.len..found.len + group.len()];
        let mut n = 0;
        for (j, x) in group.iter().enumerate() {
            indices[n] = base + (i * GROUP + j) as u32;
            bits[n] = x.to_bits();
            n += usize::from(key(*x) >= floor);
        }
        found.len += n;
    }
}
