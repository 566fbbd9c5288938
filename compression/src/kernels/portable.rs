//! Plain Rust, in blocks that stay in the first-level cache and loops that compilers turn into vectors.

use super::{Added, Candidates, Feed, PassStats, SLACK, key};

/// Values per block: three buffers of 4 KiB. Energies are added up block by block, on every kernel.
pub(super) const BLOCK: usize = 1024;

/// Values that are looked at together: one comparison skips a group without candidates.
const GROUP: usize = 16;

pub(super) fn feed(feed: Feed<'_>, found: &mut Candidates) -> PassStats {
    let (mut out, Feed { gradient, added, floor }) = (PassStats::default(), feed);
    let Some(Added { residual, beta, gamma, compensated }) = added else {
        gradient.chunks(BLOCK).enumerate().for_each(|(i, block)| look(block, i * BLOCK, (floor, found), &mut out));
        return out;
    };
    let pairs = gradient.chunks(BLOCK).zip(residual.chunks(BLOCK));
    for (i, ((g, r), f)) in pairs.zip(compensated.chunks_mut(BLOCK)).enumerate() {
        f.iter_mut().zip(g).zip(r).for_each(|((f, g), r)| *f = beta * r + gamma * g);
        look(f, i * BLOCK, (floor, found), &mut out);
    }
    out
}

fn look(block: &[f32], base: usize, (floor, found): (Option<u32>, &mut Candidates), out: &mut PassStats) {
    out.energy += energy(block);
    out.max_key = block.iter().fold(out.max_key, |max, x| max.max(key(*x)));
    if let Some(floor) = floor {
        // Positions fit u32: Layers sees to it.
        collect(block, base as u32, floor, found);
    }
}

/// Σ x² in eight independent sums.
pub(crate) fn energy(values: &[f32]) -> f64 {
    energy_on([0.0; 8], values)
}

/// As [`energy`], of values that go on from sums that were begun. Squares are exact in f64, so that it does not matter
/// whether a processor fuses multiplication and addition.
#[inline(always)]
pub(super) fn energy_on(mut sums: [f64; 8], values: &[f32]) -> f64 {
    let (groups, rest) = values.as_chunks::<8>();
    for group in groups {
        for (sum, x) in sums.iter_mut().zip(group) {
            *sum += f64::from(*x) * f64::from(*x);
        }
    }
    rest.iter().fold(sums.iter().sum(), |sum, x| sum + f64::from(*x) * f64::from(*x))
}

/// Appends those of `values`, the first at position `base`, whose keys reach the floor.
pub(super) fn collect(values: &[f32], base: u32, floor: u32, found: &mut Candidates) {
    for (i, group) in values.chunks(GROUP).enumerate() {
        let max = group.iter().fold(0, |max: u32, x| max.max(key(*x)));
        if max < floor {
            continue;
        }
        if found.len + GROUP > found.limit + SLACK {
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
