use super::*;
use crate::pareto;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const CELLS: usize = 6;

/// Times of a gene's cells add up, and what is lost by them multiplies: neighbouring cells are alike.
struct Additive(Vec<[[f64; 3]; CELLS]>);

impl Additive {
    fn new(genes: usize, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let gene = |_| {
            let [send, compress, lost] = [0.1..5.0, 0.01..0.5, 0.05..0.6].map(|range| rng.random_range(range));
            std::array::from_fn(|cell| {
                let kept = 0.4f64.powi(cell as i32);
                [compress * (1.0 - 0.2 * kept.ln()), send * kept, -lost * kept.ln()]
            })
        };
        Self((0..genes).map(gene).collect())
    }

    fn points(&self, choices: &[Vec<usize>]) -> Vec<[f64; 3]> {
        choices.iter().map(|choice| self.objectives(choice)).collect()
    }

    /// Every choice there is.
    fn all(&self) -> Vec<Vec<usize>> {
        let genes = self.genes() as u32;
        (0..CELLS.pow(genes)).map(|code| (0..genes).map(|gene| code / CELLS.pow(gene) % CELLS).collect()).collect()
    }
}

impl Search for Additive {
    fn genes(&self) -> usize {
        self.0.len()
    }

    fn cells(&self) -> usize {
        CELLS
    }

    fn objectives(&self, choice: &[usize]) -> [f64; 3] {
        let mut sums = [0.0; 3];
        for (cells, at) in self.0.iter().zip(choice) {
            sums.iter_mut().zip(cells[*at]).for_each(|(sum, x)| *sum += x);
        }
        [sums[0], sums[1], sums[2].exp()]
    }

    fn start(&self, count: usize) -> Vec<Vec<usize>> {
        (0..CELLS).map(|cell| vec![cell; self.genes()]).take(count).collect()
    }
}

/// Undominated, each once, in order.
fn front(mut points: Vec<[f64; 3]>) -> Vec<[f64; 3]> {
    points.sort_by(|a, b| a.partial_cmp(b).unwrap());
    points.dedup();
    let all = points.clone();
    points.retain(|point| !all.iter().any(|other| pareto::dominates(other, point)));
    points
}

#[test]
fn search_and_enumeration_give_the_same_front() {
    let settings = Settings { population: 200, generations: 150, archive: 10_000, ..Settings::default() };
    for genes in 1..=4 {
        for seed in 0..3 {
            let problem = Additive::new(genes, seed);
            let found = choices(&problem, &settings, seed).unwrap();
            let [found, listed] = [found, problem.all()].map(|choices| front(problem.points(&choices)));
            assert_eq!(found, listed, "{genes} genes, seed {seed}");
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_choices() {
    let problem = Additive::new(12, 5);
    let settings = Settings { generations: 20, ..Settings::default() };
    let found = |seed| choices(&problem, &settings, seed).unwrap();
    assert_eq!(found(9), found(9));
    assert_ne!(found(9), found(10), "the seed has no effect");
}

#[test]
fn operators_make_progress_and_a_given_start_is_ahead() {
    let problem = Additive::new(60, 3);
    let found = |start, generations| {
        let settings = Settings { generations, archive: 0, start, ..Settings::default() };
        problem.points(&choices(&problem, &settings, 1).unwrap())
    };
    let (early, late) = (found(Start::Random, 1), found(Start::Random, 100));
    let given = found(Start::Given, 100);
    let mut worst = [0.0_f64; 3];
    for point in early.iter().chain(&late).chain(&given) {
        worst.iter_mut().zip(point).for_each(|(w, o)| *w = w.max(o * 1.01));
    }
    let [early, late, given] = [early, late, given].map(|points| pareto::hypervolume(&points, worst));
    assert!(late > 1.02 * early && given > late, "{early} {late} {given}");
}

#[test]
fn settings_are_checked() {
    let problem = Additive::new(2, 1);
    for bad in [
        Settings { population: 1, ..Settings::default() },
        Settings { generations: MAX_GENERATIONS + 1, ..Settings::default() },
        Settings { archive: MAX_ARCHIVE + 1, ..Settings::default() },
    ] {
        assert!(matches!(choices(&problem, &bad, 1), Err(NsgaError::Setting { .. })));
    }
}
