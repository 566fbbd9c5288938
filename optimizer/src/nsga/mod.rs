//! NSGA-II over bucket plans: the engine is `moors`, with our own operators.
//!
//! Genes lie in [0, 1]: one per bucket for its ratio and one for the collective, snapped to the middle of
//! their cell. Ours are crossover and mutation (bounded SBX and polynomial mutation, without which the search
//! falls behind from 30 genes on), the first population (exact solutions of weighted sums, snapped, where the
//! engine would sample without repairing) and the survival (Deb's rule for constraints, NaN last, copies last:
//! the engine's own ignores constraints and panics on NaN). The same seed gives the same front, bit by bit.

mod operators;
mod seeds;
mod survival;

use crate::buckets::{BucketError, BucketProblem, PlanPoint};
use moors::{AlgorithmBuilder, NoDuplicatesCleaner, RankAndScoringSelectionMOO};
use ndarray::{Array2, ArrayView1};
use operators::{Polynomial, Sbx, Snap};
use std::cell::RefCell;
use std::collections::HashMap;

/// Limits: a search is bounded in time and memory whatever its settings.
pub const MAX_POPULATION: usize = 2_000;
/// Most generations.
pub const MAX_GENERATIONS: usize = 10_000;
/// Most plans of the archive.
pub const MAX_ARCHIVE: usize = 20_000;

/// How hard to search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Plans per generation, 2 to [`MAX_POPULATION`].
    pub population: usize,
    /// Generations; 0: only the first population, the exact solutions of weighted sums.
    pub generations: usize,
    /// Undominated plans remembered beyond the population; 0: none.
    pub archive: usize,
    /// How the first population is made.
    pub start: Start,
}

/// The first population.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Exact solutions of weighted sums, filled up at random.
    Exact,
    /// At random: to measure what the operators do alone.
    Random,
}

impl Default for Settings {
    fn default() -> Self {
        Self { population: 100, generations: 50, archive: 1_000, start: Start::Exact }
    }
}

/// Why a search failed.
#[derive(Debug, thiserror::Error)]
pub enum NsgaError {
    /// Settings outside their limits.
    #[error("failed to search: {what} is {value}, allowed is {least} to {most}")]
    Setting {
        /// Which.
        what: &'static str,
        /// As given.
        value: usize,
        /// Least allowed.
        least: usize,
        /// Most allowed.
        most: usize,
    },
    /// The engine refused.
    #[error("failed to search: {0}")]
    Engine(String),
    /// The problem is not valid.
    #[error(transparent)]
    Problem(#[from] BucketError),
}

/// Searches the front of (t_comp, t_sync, 1/gain). Dense plans take part in it. The plans come by rising t_sync.
pub fn search(problem: &BucketProblem, settings: &Settings, seed: u64) -> Result<Vec<PlanPoint>, NsgaError> {
    settings.check()?;
    let mut points = problem.dense().to_vec();
    if problem.has_sparse() {
        points.extend(search_sparse(problem, settings, seed)?);
    }
    Ok(problem.front_of(points))
}

impl Settings {
    fn check(&self) -> Result<(), NsgaError> {
        let within = |what, value, least, most| {
            let ok = (least..=most).contains(&value);
            if ok { Ok(()) } else { Err(NsgaError::Setting { what, value, least, most }) }
        };
        within("population", self.population, 2, MAX_POPULATION)?;
        within("generations", self.generations, 0, MAX_GENERATIONS)?;
        within("archive", self.archive, 0, MAX_ARCHIVE)
    }
}

fn search_sparse(problem: &BucketProblem, settings: &Settings, seed: u64) -> Result<Vec<PlanPoint>, NsgaError> {
    let code = Code { problem };
    let exact = match settings.start {
        Start::Exact => seeds::exact(problem, settings.population),
        Start::Random => Vec::new(),
    };
    if settings.generations == 0 {
        return Ok(exact.iter().map(|(collective, levels)| problem.point(*collective, levels)).collect());
    }
    let archive = RefCell::new(Archive::new(settings.archive));
    let fitness = |genes: &Array2<f64>| code.evaluate(genes, &archive);
    let floor = problem.gain_floor();
    let constraints = |genes: &Array2<f64>| {
        let violation = |genes: ArrayView1<'_, f64>| floor - 1.0 / code.objectives(genes)[2];
        Array2::from_shape_fn((genes.nrows(), 1), |(row, _)| violation(genes.row(row)))
    };
    let mut engine = AlgorithmBuilder::default()
        .sampler(seeds::Sampler { rows: exact.iter().map(|(c, l)| code.encode(*c, l)).collect(), snap: code.snap() })
        .selector(RankAndScoringSelectionMOO::default())
        .survivor(survival::Survival)
        .crossover(Sbx)
        .mutation(Polynomial(code.snap()))
        .repair(code.snap())
        .duplicates_cleaner(NoDuplicatesCleaner)
        .fitness_fn(fitness)
        .constraints_fn(constraints)
        .num_vars(problem.buckets() + 1)
        .population_size(settings.population)
        .num_offsprings(settings.population)
        .num_iterations(settings.generations)
        .crossover_rate(0.9)
        .mutation_rate(1.0)
        .keep_infeasible(true)
        .verbose(false)
        .seed(seed)
        .build()
        .map_err(|e| NsgaError::Engine(e.to_string()))?;
    engine.run().map_err(|e| NsgaError::Engine(e.to_string()))?;
    let survivors = engine.population.take().ok_or_else(|| NsgaError::Engine("no population is left".into()))?;
    drop(engine);
    let mut points: Vec<PlanPoint> = survivors.genes.outer_iter().map(|row| code.point(row)).collect();
    points.extend(archive.into_inner().plans.iter().map(|(genes, _)| code.point(ArrayView1::from(genes))));
    Ok(points)
}

/// Between genes and plans.
#[derive(Debug, Clone, Copy)]
struct Code<'a> {
    problem: &'a BucketProblem,
}

impl Code<'_> {
    fn snap(&self) -> Snap {
        Snap { levels: self.problem.levels().len(), collectives: self.problem.collectives().len() }
    }

    fn encode(&self, collective: usize, levels: &[usize]) -> Vec<f64> {
        let snap = self.snap();
        let genes = levels.iter().map(|&l| operators::middle(l, snap.levels));
        genes.chain([operators::middle(collective, snap.collectives)]).collect()
    }

    fn decode(self, genes: ArrayView1<'_, f64>) -> (usize, impl Iterator<Item = usize>) {
        let snap = self.snap();
        let collective = operators::cell(genes[genes.len() - 1], snap.collectives);
        let levels = genes.slice_move(ndarray::s![..self.problem.buckets()]);
        (collective, levels.into_iter().map(move |g| operators::cell(*g, snap.levels)))
    }

    fn objectives(&self, genes: ArrayView1<'_, f64>) -> [f64; 3] {
        let (collective, levels) = self.decode(genes);
        self.problem.objectives(collective, levels)
    }

    fn point(&self, genes: ArrayView1<'_, f64>) -> PlanPoint {
        let (collective, levels) = self.decode(genes);
        self.problem.point(collective, &levels.collect::<Vec<_>>())
    }

    fn evaluate(&self, genes: &Array2<f64>, archive: &RefCell<Archive>) -> Array2<f64> {
        let mut out = Array2::zeros((genes.nrows(), 3));
        let mut archive = archive.borrow_mut();
        for (row, mut fitness) in genes.outer_iter().zip(out.outer_iter_mut()) {
            let objectives = self.objectives(row);
            fitness.iter_mut().zip(objectives).for_each(|(f, o)| *f = o);
            archive.offer(row, objectives, self.problem.gain_floor());
        }
        out
    }
}

/// Undominated plans seen so far, up to a limit.
struct Archive {
    limit: usize,
    plans: Vec<(Vec<f64>, [f64; 3])>,
    seen: HashMap<[u64; 3], ()>,
}

impl Archive {
    fn new(limit: usize) -> Self {
        Self { limit, plans: Vec::new(), seen: HashMap::new() }
    }

    fn offer(&mut self, genes: ArrayView1<'_, f64>, o: [f64; 3], gain_floor: f64) {
        let infeasible = o[2] * gain_floor > 1.0 + 1e-12 || !o.iter().all(|v| v.is_finite());
        if self.limit == 0 || infeasible || self.seen.insert(o.map(f64::to_bits), ()).is_some() {
            return;
        }
        if self.plans.iter().any(|(_, p)| crate::pareto::dominates(p, &o)) {
            return;
        }
        self.plans.retain(|(_, p)| !crate::pareto::dominates(&o, p));
        if self.plans.len() < self.limit {
            self.plans.push((genes.to_vec(), o));
        }
    }
}

#[cfg(test)]
mod tests;
