//! The first population: exact solutions of weighted sums, spread evenly over the prices at which something
//! changes, then random plans.

use super::operators::Snap;
use crate::buckets::{BucketProblem, Cell};
use moors::{RandomGenerator, SamplingOperator};
use ndarray::{Array1, Array2};

/// How seconds of compressing are weighed against seconds of communicating.
const DIRECTIONS: [f64; 4] = [1.0, 0.0, 0.2, 5.0];

/// Up to `count` different plans (collective, levels), each the best for some price of energy.
pub(super) fn exact(problem: &BucketProblem, count: usize) -> Vec<(usize, Vec<usize>)> {
    let sweeps = problem.collectives().len() * DIRECTIONS.len();
    let each = (count / sweeps).max(2);
    let mut plans: Vec<(usize, Vec<usize>)> = Vec::with_capacity(count);
    for comp in DIRECTIONS {
        for collective in 0..problem.collectives().len() {
            for price in prices(problem, collective, comp, each) {
                plans.push((collective, problem.weighted(collective, comp, price)));
            }
        }
    }
    plans.sort();
    plans.dedup();
    plans.truncate(count);
    plans
}

/// `count` prices that split the changes of the best plan into equal parts: between two of a bucket's levels
/// that are both best for some price, the choice changes where the price equals the slope between them.
fn prices(problem: &BucketProblem, collective: usize, comp: f64, count: usize) -> Vec<f64> {
    let mut slopes: Vec<f64> = Vec::new();
    for bucket in 0..problem.buckets() {
        push_slopes(problem.cells_of(collective, bucket), comp, &mut slopes);
    }
    slopes.sort_by(f64::total_cmp);
    let Some(last) = slopes.last().copied() else {
        return vec![0.0];
    };
    // Half way between neighbouring slopes, so that no price sits on a tie.
    let at = |i: usize| match i * slopes.len() / (count - 1).max(1) {
        0 => slopes[0] * 0.5,
        k if k >= slopes.len() => last * 2.0,
        k => 0.5 * (slopes[k - 1] + slopes[k]),
    };
    (0..count).map(at).collect()
}

/// Slopes of the lower convex hull of (kept, time) over a bucket's levels, those above 0.
fn push_slopes(cells: &[Cell], comp: f64, slopes: &mut Vec<f64>) {
    let time = |c: &Cell| comp * c.t_comp + c.t_sync;
    let slope = |a: &Cell, b: &Cell| (time(b) - time(a)) / (b.kept - a.kept);
    let mut hull: Vec<&Cell> = Vec::with_capacity(cells.len());
    // Levels rise in c, and so does what is kept.
    for cell in cells {
        if hull.last().is_some_and(|top| cell.kept <= top.kept) {
            continue;
        }
        while let [.., a, b] = hull[..] {
            if slope(a, b) < slope(b, cell) {
                break;
            }
            hull.pop();
        }
        hull.push(cell);
    }
    slopes.extend(hull.windows(2).map(|w| slope(w[0], w[1])).filter(|s| *s > 0.0 && s.is_finite()));
}

/// Gives the engine the exact plans first and fills up at random, snapped.
#[derive(Debug, Clone)]
pub(super) struct Sampler {
    pub rows: Vec<Vec<f64>>,
    pub snap: Snap,
}

impl SamplingOperator for Sampler {
    fn sample_individual(&self, num_vars: usize, rng: &mut impl RandomGenerator) -> Array1<f64> {
        let mut genes = Array1::from_shape_fn(num_vars, |_| rng.gen_proability());
        self.snap.genes(genes.iter_mut());
        genes
    }

    fn operate(&self, population_size: usize, num_vars: usize, rng: &mut impl RandomGenerator) -> Array2<f64> {
        let mut population = Array2::zeros((population_size, num_vars));
        for (i, mut row) in population.outer_iter_mut().enumerate() {
            match self.rows.get(i) {
                Some(exact) => row.iter_mut().zip(exact).for_each(|(gene, value)| *gene = *value),
                None => row.assign(&self.sample_individual(num_vars, rng)),
            }
        }
        population
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slopes(cells: &[(f64, f64)]) -> Vec<f64> {
        let cells: Vec<Cell> = cells.iter().map(|&(kept, t_sync)| Cell { t_comp: 1.0, t_sync, kept }).collect();
        let mut out = Vec::new();
        push_slopes(&cells, 0.5, &mut out);
        out.iter().map(|s| (s * 1e6).round() / 1e6).collect()
    }

    #[test]
    fn slopes_are_those_of_the_lower_hull() {
        assert_eq!(slopes(&[(0.1, 1.0), (0.2, 1.5), (0.3, 3.0)]), vec![5.0, 15.0]);
        assert_eq!(slopes(&[(0.1, 1.0), (0.2, 2.9), (0.3, 3.0)]), vec![10.0], "the middle is never the best");
        assert_eq!(slopes(&[(0.1, 1.0), (0.1, 2.0)]), Vec::<f64>::new(), "costs more, keeps no more");
        assert_eq!(slopes(&[(0.1, 2.0), (0.2, 1.0)]), Vec::<f64>::new(), "always the better one: no price decides");
    }
}
