//! Survival by rank and crowding, with what the engine's own lacks: NaN and copies come last.

use crate::pareto::dominates;
use moors::genetic::D12;
use moors::{PopulationMOO, RandomGenerator, SurvivalOperator};
use ndarray::{Array1, Ix2};

#[derive(Debug, Clone, Copy)]
pub(super) struct Survival;

impl SurvivalOperator for Survival {
    type FDim = Ix2;

    fn operate<ConstrDim: D12>(
        &mut self,
        population: PopulationMOO<ConstrDim>,
        num_survive: usize,
        _rng: &mut impl RandomGenerator,
    ) -> PopulationMOO<ConstrDim> {
        let points: Vec<[f64; 3]> =
            population.fitness.outer_iter().map(|f| [0, 1, 2].map(|i| f.get(i).copied().unwrap_or(f64::NAN))).collect();
        let fronts = fronts(&points, num_survive);
        let mut chosen: Vec<Survivor> = Vec::with_capacity(num_survive);
        for (rank, front) in fronts.iter().enumerate() {
            let mut scored = crowding(&points, front);
            let room = num_survive - chosen.len();
            if scored.len() > room {
                // Stable: of equally crowded ones the earlier stays.
                scored.sort_by(|a, b| b.1.total_cmp(&a.1));
                scored.truncate(room);
            }
            chosen.extend(scored.into_iter().map(|(index, score)| Survivor { index, rank, score }));
        }
        let indices: Vec<usize> = chosen.iter().map(|c| c.index).collect();
        let mut survivors = population.selected(&indices);
        survivors.set_rank(chosen.iter().map(|c| c.rank).collect::<Array1<usize>>());
        survivors.set_survival_score(chosen.iter().map(|c| c.score).collect::<Array1<f64>>());
        survivors
    }
}

/// A member of the population that goes on.
struct Survivor {
    index: usize,
    /// Its front.
    rank: usize,
    /// Its crowding distance.
    score: f64,
}

/// Fronts by dominance until `enough` are in them, then copies of earlier points and points that are no numbers.
fn fronts(points: &[[f64; 3]], enough: usize) -> Vec<Vec<usize>> {
    let (sound, last) = split_copies(points);
    let mut fronts = sort(points, sound, enough);
    fronts.push(last);
    fronts.retain(|f| !f.is_empty());
    cut(fronts, enough)
}

fn cut(mut fronts: Vec<Vec<usize>>, enough: usize) -> Vec<Vec<usize>> {
    let mut count = 0;
    let needed = fronts.iter().take_while(|f| {
        let more = count < enough;
        count += f.len();
        more
    });
    let needed = needed.count();
    fronts.truncate(needed);
    fronts
}

/// Splits into first occurrences of numbers and the rest.
fn split_copies(points: &[[f64; 3]]) -> (Vec<usize>, Vec<usize>) {
    let key = |i: &usize| points[*i].map(f64::to_bits);
    let mut order: Vec<usize> = (0..points.len()).collect();
    order.sort_by_key(|i| (key(i), *i));
    let mut copy = vec![false; points.len()];
    order.windows(2).filter(|w| key(&w[0]) == key(&w[1])).for_each(|w| copy[w[1]] = true);
    (0..points.len()).partition(|&i| !copy[i] && points[i].iter().all(|v| v.is_finite()))
}

/// Non-dominated sorting; stops when `enough` are sorted and appends nothing of the rest.
fn sort(points: &[[f64; 3]], mut rest: Vec<usize>, enough: usize) -> Vec<Vec<usize>> {
    // In lexicographic order a point is dominated only by earlier ones.
    rest.sort_by(|&a, &b| {
        let (p, q) = (&points[a], &points[b]);
        p[0].total_cmp(&q[0]).then(p[1].total_cmp(&q[1])).then(p[2].total_cmp(&q[2])).then(a.cmp(&b))
    });
    let mut fronts: Vec<Vec<usize>> = Vec::new();
    let mut sorted = 0;
    while !rest.is_empty() && sorted < enough {
        let mut front: Vec<usize> = Vec::new();
        rest.retain(|&i| {
            // The latest members are the nearest, and the likeliest to dominate.
            let beaten = front.iter().rev().any(|&f| dominates(&points[f], &points[i]));
            if !beaten {
                front.push(i);
            }
            beaten
        });
        sorted += front.len();
        front.sort_unstable();
        fronts.push(front);
    }
    fronts
}

/// Crowding distance of each member of a front: infinite at the ends of every objective.
fn crowding(points: &[[f64; 3]], front: &[usize]) -> Vec<(usize, f64)> {
    let mut distance = vec![0.0; front.len()];
    for objective in [0, 1, 2] {
        let value = |at: usize| points[front[at]][objective];
        let mut order: Vec<usize> = (0..front.len()).collect();
        order.sort_by(|&a, &b| value(a).total_cmp(&value(b)));
        let (Some(&first), Some(&last)) = (order.first(), order.last()) else {
            continue;
        };
        let range = value(last) - value(first);
        distance[first] = f64::INFINITY;
        distance[last] = f64::INFINITY;
        if range > 0.0 {
            order.windows(3).for_each(|w| distance[w[1]] += (value(w[2]) - value(w[0])) / range);
        }
    }
    front.iter().copied().zip(distance).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use moors::MOORandomGenerator;
    use ndarray::{Array2, array};

    fn survive(fitness: Array2<f64>, count: usize) -> Vec<f64> {
        let genes = Array2::from_shape_fn((fitness.nrows(), 1), |(i, _)| i as f64);
        let population = PopulationMOO::new_unconstrained(genes, fitness);
        let mut rng = MOORandomGenerator::new_from_seed(Some(1));
        Survival.operate(population, count, &mut rng).genes.column(0).to_vec()
    }

    #[test]
    fn nan_and_copies_come_last() {
        let fitness = array![
            [0.0, 0.0, f64::NAN],
            [1.0, 1.0, 1.0],
            [1.0, 1.0, 1.0],
            [0.0, 0.0, 0.0],
            [2.0, 2.0, 2.0],
            [0.5, 0.5, 0.5]
        ];
        assert_eq!(survive(fitness.clone(), 4), vec![3.0, 5.0, 1.0, 4.0]);
        assert_eq!(survive(fitness, 6), vec![3.0, 5.0, 1.0, 4.0, 0.0, 2.0]);
    }

    #[test]
    fn a_crowded_front_keeps_its_ends() {
        let fitness = array![[0.0, 4.0, 1.0], [1.9, 2.1, 1.0], [2.0, 2.0, 1.0], [2.1, 1.9, 1.0], [4.0, 0.0, 1.0]];
        let kept = survive(fitness, 3);
        assert!(kept.contains(&0.0) && kept.contains(&4.0), "{kept:?}");
    }
}
