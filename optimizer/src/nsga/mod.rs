//! NSGA-II over plans by bucket: the engine is `moors`, with our own operators.
//!
//! Genes lie in [0, 1], snapped to the middle of their cell: see [`Search`]. Ours are crossover and mutation (bounded SBX and polynomial mutation, without which the search
//! falls behind from 30 genes on), the first population (exact solutions of weighted sums, snapped, where the
//! engine would sample without repairing) and the survival (Deb's rule for constraints, NaN last, copies last:
//! the engine's own ignores constraints and panics on NaN). The same seed gives the same front, bit by bit.

mod operators;
mod sampler;
mod survival;

use moors::{AlgorithmBuilder, NoDuplicatesCleaner, RankAndScoringSelectionMOO};
use ndarray::Array2;
use operators::{Polynomial, Sbx, Snap};
use serde::{Deserialize, Serialize};
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
    /// Generations; 0: only the first population.
    pub generations: usize,
    /// Undominated plans remembered beyond the population; 0: none.
    pub archive: usize,
    /// How the first population is made.
    pub start: Start,
}

/// The first population.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// [`Search::start`], filled up at random.
    Given,
    /// At random: to measure what the operators do alone.
    Random,
}

impl Default for Settings {
    fn default() -> Self {
        Self { population: 100, generations: 50, archive: 1_000, start: Start::Given }
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
}

/// Who found what a decision chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Solver {
    /// It was among those that are listed: one strategy for all buckets, or one for the first few and another for the rest.
    #[serde(rename = "enumeration")]
    Enumeration,
    /// A strategy for each bucket that was not.
    #[serde(rename = "nsga-ii")]
    NsgaII,
}

impl Solver {
    /// Its name in reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Enumeration => "enumeration",
            Self::NsgaII => "nsga-ii",
        }
    }
}

/// What is searched: a choice of one cell for each gene.
pub trait Search {
    /// How many genes.
    fn genes(&self) -> usize;

    /// From how many cells a gene chooses; neighbours are alike.
    fn cells(&self) -> usize;

    /// (t_comp in s, t_sync in s, 1/gain) of a choice.
    fn objectives(&self, choice: &[usize]) -> [f64; 3];

    /// At most so many choices for the first population, which is filled up at random.
    fn start(&self, count: usize) -> Vec<Vec<usize>>;
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

/// The choices that a search ends with, its archive's among them: undominated ones and others.
pub fn choices(problem: &impl Search, settings: &Settings, seed: u64) -> Result<Vec<Vec<usize>>, NsgaError> {
    settings.check()?;
    let snap = Snap { cells: problem.cells() };
    let start = match settings.start {
        Start::Given => problem.start(settings.population),
        Start::Random => Vec::new(),
    };
    if settings.generations == 0 {
        return Ok(start);
    }
    let archive = RefCell::new(Archive::new(settings.archive));
    let fitness = |genes: &Array2<f64>| {
        let mut out = Array2::zeros((genes.nrows(), 3));
        let mut archive = archive.borrow_mut();
        for (row, mut fitness) in genes.outer_iter().zip(out.outer_iter_mut()) {
            let choice = snap.decode(row);
            let objectives = problem.objectives(&choice);
            fitness.iter_mut().zip(objectives).for_each(|(f, o)| *f = o);
            archive.offer(choice, objectives);
        }
        out
    };
    let mut engine = AlgorithmBuilder::default()
        .sampler(sampler::Sampler { rows: start.iter().map(|choice| snap.encode(choice)).collect(), snap })
        .selector(RankAndScoringSelectionMOO::default())
        .survivor(survival::Survival)
        .crossover(Sbx)
        .mutation(Polynomial(snap))
        .repair(snap)
        .duplicates_cleaner(NoDuplicatesCleaner)
        .fitness_fn(fitness)
        .constraints_fn(moors::NoConstraints)
        .num_vars(problem.genes())
        .population_size(settings.population)
        .num_offsprings(settings.population)
        .num_iterations(settings.generations)
        .crossover_rate(0.9)
        .mutation_rate(1.0)
        .verbose(false)
        .seed(seed)
        .build()
        .map_err(|e| NsgaError::Engine(e.to_string()))?;
    engine.run().map_err(|e| NsgaError::Engine(e.to_string()))?;
    let survivors = engine.population.take().ok_or_else(|| NsgaError::Engine("no population is left".into()))?;
    drop(engine);
    let mut found: Vec<Vec<usize>> = survivors.genes.outer_iter().map(|row| snap.decode(row)).collect();
    found.extend(archive.into_inner().choices.into_iter().map(|(choice, _)| choice));
    Ok(found)
}

/// Undominated choices seen so far, up to a limit.
struct Archive {
    limit: usize,
    choices: Vec<(Vec<usize>, [f64; 3])>,
    seen: HashMap<[u64; 3], ()>,
}

impl Archive {
    fn new(limit: usize) -> Self {
        Self { limit, choices: Vec::new(), seen: HashMap::new() }
    }

    fn offer(&mut self, choice: Vec<usize>, o: [f64; 3]) {
        if self.limit == 0 || !o.iter().all(|v| v.is_finite()) || self.seen.insert(o.map(f64::to_bits), ()).is_some() {
            return;
        }
        if self.choices.iter().any(|(_, p)| crate::pareto::dominates(p, &o)) {
            return;
        }
        self.choices.retain(|(_, p)| !crate::pareto::dominates(&o, p));
        if self.choices.len() < self.limit {
            self.choices.push((choice, o));
        }
    }
}

#[cfg(test)]
mod tests;
