//! The first population.

use super::operators::Snap;
use moors::{RandomGenerator, SamplingOperator};
use ndarray::{Array1, Array2};

/// Gives the engine some choices first and fills up at random, snapped.
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
                Some(given) => row.iter_mut().zip(given).for_each(|(gene, value)| *gene = *value),
                None => row.assign(&self.sample_individual(num_vars, rng)),
            }
        }
        population
    }
}
