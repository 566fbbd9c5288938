//! Bounded simulated binary crossover and polynomial mutation (Deb), on genes in [0, 1], and the snapping of
//! genes to cells.

use moors::{CrossoverOperator, MutationOperator, RandomGenerator};
use ndarray::{Array1, ArrayView1, ArrayViewMut1};

/// Distribution indices: children stay near their parents. 15 and 20 are the usual values.
const ETA_CROSSOVER: f64 = 15.0;
const ETA_MUTATION: f64 = 20.0;

/// Genes closer than this are the same.
const SAME: f64 = 1e-14;

/// The cell of a gene, of `cells` equal ones over [0, 1]. NaN is cell 0.
pub(super) fn cell(gene: f64, cells: usize) -> usize {
    ((gene * cells as f64) as usize).min(cells.saturating_sub(1))
}

/// The middle of a cell.
pub(super) fn middle(cell: usize, cells: usize) -> f64 {
    (cell as f64 + 0.5) / cells.max(1) as f64
}

/// Moves genes to the middle of their cells.
#[derive(Debug, Clone, Copy)]
pub(super) struct Snap {
    pub cells: usize,
}

impl Snap {
    pub(super) fn genes<'a>(&self, genes: impl Iterator<Item = &'a mut f64>) {
        genes.for_each(|gene| *gene = middle(cell(*gene, self.cells), self.cells));
    }

    pub(super) fn encode(&self, choice: &[usize]) -> Vec<f64> {
        choice.iter().map(|at| middle(*at, self.cells)).collect()
    }

    pub(super) fn decode(&self, genes: ArrayView1<'_, f64>) -> Vec<usize> {
        genes.iter().map(|gene| cell(*gene, self.cells)).collect()
    }
}

impl moors::operators::RepairOperator for Snap {
    fn repair(&self, mut individual: ArrayViewMut1<'_, f64>) {
        self.genes(individual.iter_mut());
    }
}

/// Simulated binary crossover within bounds: each gene crosses with probability one half, and the spread
/// is drawn from the part of the distribution that lies inside [0, 1].
#[derive(Debug, Clone, Copy)]
pub(super) struct Sbx;

impl CrossoverOperator for Sbx {
    fn crossover(
        &self,
        a: &Array1<f64>,
        b: &Array1<f64>,
        rng: &mut impl RandomGenerator,
    ) -> (Array1<f64>, Array1<f64>) {
        let (mut one, mut two) = (a.clone(), b.clone());
        for (x, y) in one.iter_mut().zip(two.iter_mut()) {
            if (*x - *y).abs() > SAME && rng.gen_bool(0.5) {
                (*x, *y) = cross(*x, *y, rng.gen_proability());
                if rng.gen_bool(0.5) {
                    std::mem::swap(x, y);
                }
            }
        }
        (one, two)
    }
}

/// Children of two different genes for a uniform `u`.
fn cross(x: f64, y: f64, u: f64) -> (f64, f64) {
    let (low, high) = if x < y { (x, y) } else { (y, x) };
    let gap = high - low;
    let spread = |room: f64| {
        let alpha = 2.0 - (1.0 + 2.0 * room / gap).powf(-(ETA_CROSSOVER + 1.0));
        let exponent = 1.0 / (ETA_CROSSOVER + 1.0);
        if u <= 1.0 / alpha { (u * alpha).powf(exponent) } else { (1.0 / (2.0 - u * alpha)).powf(exponent) }
    };
    let middle = 0.5 * (low + high);
    let child_low = middle - 0.5 * spread(low) * gap;
    let child_high = middle + 0.5 * spread(1.0 - high) * gap;
    (child_low.clamp(0.0, 1.0), child_high.clamp(0.0, 1.0))
}

/// Polynomial mutation within bounds: each gene mutates with probability 1/genes, by at least one cell. Most
/// steps of the polynomial are shorter than a cell, and snapping would undo them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Polynomial(pub Snap);

impl MutationOperator for Polynomial {
    fn mutate<'a>(&self, mut individual: ArrayViewMut1<'a, f64>, rng: &mut impl RandomGenerator) {
        let rate = 1.0 / individual.len().max(1) as f64;
        for gene in &mut individual {
            if rng.gen_bool(rate) {
                *gene = stepped(*gene, rng.gen_proability(), self.0.cells);
            }
        }
    }
}

/// Mutated by at least one of `cells`, away from the bounds where there is no room.
fn stepped(gene: f64, u: f64, cells: usize) -> f64 {
    let (from, to) = (cell(gene, cells), cell(mutated(gene, u), cells));
    if to != from {
        return middle(to, cells);
    }
    let up = (u >= 0.5 && from + 1 < cells) || from == 0;
    middle(if up { (from + 1).min(cells.saturating_sub(1)) } else { from - 1 }, cells)
}

fn mutated(gene: f64, u: f64) -> f64 {
    let power = 1.0 / (ETA_MUTATION + 1.0);
    let pull = |room: f64| (1.0 - room).powf(ETA_MUTATION + 1.0);
    let delta = if u < 0.5 {
        (2.0 * u + (1.0 - 2.0 * u) * pull(gene)).powf(power) - 1.0
    } else {
        1.0 - (2.0 * (1.0 - u) + 2.0 * (u - 0.5) * pull(1.0 - gene)).powf(power)
    };
    (gene + delta).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    proptest! {
        #[test]
        fn children_stay_within_bounds(x in 0.0..=1.0f64, y in 0.0..=1.0f64, u in 0.0..1.0f64) {
            if (x - y).abs() > SAME {
                let (a, b) = cross(x, y, u);
                prop_assert!((0.0..=1.0).contains(&a) && (0.0..=1.0).contains(&b), "{a} {b}");
                prop_assert!(a <= b);
            }
            let m = mutated(x, u);
            prop_assert!((0.0..=1.0).contains(&m), "{m}");
        }

        #[test]
        fn mutation_moves_to_another_cell(gene in 0.0..=1.0f64, u in 0.0..1.0f64, cells in 2usize..70) {
            let moved = stepped(gene, u, cells);
            prop_assert!((0.0..=1.0).contains(&moved));
            prop_assert!(cell(moved, cells) != cell(gene, cells));
        }

        #[test]
        fn snapping_is_stable(gene in 0.0..=1.0f64, cells in 1usize..70) {
            let once = middle(cell(gene, cells), cells);
            prop_assert_eq!(cell(once, cells), cell(gene, cells));
            prop_assert!((once - gene).abs() <= 0.5 / cells as f64 + 1e-12);
        }
    }

    #[test]
    fn the_median_draw_keeps_the_parents() {
        // Far from the bounds a draw of one half spreads by a factor of 1.
        let (a, b) = cross(0.49, 0.51, 0.5);
        assert!((a - 0.49).abs() < 1e-9 && (b - 0.51).abs() < 1e-9, "{a} {b}");
        assert!((mutated(0.5, 0.5) - 0.5).abs() < 1e-9);
        assert_eq!(stepped(0.5, 0.5, 1), 0.5, "one cell leaves nowhere to go");
    }
}
