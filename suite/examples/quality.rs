//! What fixed settings keep of the gradient while they train: the features of the law that says what a strategy costs in steps
//! (docs/decisions/price-of-delay.md).
//!
//! `cargo run --release -p flexcomm-suite --example quality -- [CELLS]` prints a JSON line for each job, setting and window
//! of steps: per bucket the energies over all ranks and steps of the window.
#![allow(clippy::print_stdout)]

use anyhow::Result;
use flexcomm_lab::worker::DEFAULT_FOLDER;
use flexcomm_suite::cells::Cell;
use flexcomm_suite::fixed::{self, Shared};
use flexcomm_suite::ranks::{Ranks, Recipe};
use serde::Serialize;
use serde_json::json;

/// Steps at which a window ends.
const WINDOWS: [u64; 5] = [5, 20, 100, 200, 300];

/// Of a bucket, over the steps of a window.
#[derive(Clone, Default, Serialize)]
struct Sums {
    /// Over all ranks: the gain is their quotient.
    sent: f64,
    compensated: f64,
    /// ⟨mean residual after the step, mean gradient⟩ and ‖mean gradient‖²: the lag is their quotient.
    residual_along: f64,
    along: f64,
    /// What each rank sees of the lag by itself: ⟨residual before the step, gradient⟩ and ⟨gradient, the one before⟩.
    own_residual_along: f64,
    own_along: f64,
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let cells = Cell::read_all(args.next().unwrap_or("suite/cells".into()).as_ref())?;
    let data = Shared::new(DEFAULT_FOLDER.into());
    let mut recipes: Vec<Recipe> = Vec::new();
    for cell in &cells {
        let recipe = cell.recipe(cell.seeds[0]);
        if !recipes.contains(&recipe) {
            recipes.push(recipe);
        }
    }
    recipes.sort_by_key(|recipe| recipe.world);
    for recipe in recipes {
        let data = data.of(recipe.world)?;
        for (setting, strategy) in fixed::settings(recipe.momentum) {
            let mut ranks = Ranks::new(recipe, data.clone())?;
            let mut sums = vec![Sums::default(); ranks.buckets(0).count()];
            let mut begun = 0;
            let mut before: Vec<(Vec<f32>, Vec<f32>)> = vec![Default::default(); sums.len() * recipe.world];
            for step in 0..WINDOWS[WINDOWS.len() - 1] {
                let stepped = ranks.step(step, &strategy)?;
                for (bucket, exchanged) in stepped.buckets.iter().enumerate() {
                    for energy in &exchanged.energies {
                        sums[bucket].sent += energy.sent;
                        sums[bucket].compensated += energy.compensated;
                    }
                }
                for (bucket, sum) in sums.iter_mut().enumerate() {
                    let mut mean: Vec<f64> = Vec::new();
                    let mut residual: Vec<f64> = Vec::new();
                    for rank in 0..recipe.world {
                        let Some((of, gradient)) = ranks.buckets(rank).nth(bucket) else { continue };
                        let own = of.residual();
                        let (previous, residual_before) = &mut before[bucket * recipe.world + rank];
                        let dot =
                            |a: &[f32]| a.iter().zip(gradient).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
                        if !previous.is_empty() {
                            sum.own_residual_along += dot(residual_before);
                            sum.own_along += dot(previous);
                        }
                        add(&mut mean, gradient);
                        add(&mut residual, &own);
                        (*previous, *residual_before) = (gradient.to_vec(), own);
                    }
                    let (ranks, product) = ((recipe.world as f64).powi(2), |a: &[f64]| {
                        a.iter().zip(&mean).map(|(a, b)| a * b).sum::<f64>()
                    });
                    sum.residual_along += product(&residual) / ranks;
                    sum.along += product(&mean) / ranks;
                }
                if WINDOWS.contains(&(step + 1)) {
                    println!(
                        "{}",
                        json!({"recipe": recipe, "setting": setting, "from": begun, "to": step + 1, "buckets": sums})
                    );
                    sums.fill(Sums::default());
                    begun = step + 1;
                }
            }
        }
    }
    Ok(())
}

fn add(sum: &mut Vec<f64>, values: &[f32]) {
    sum.resize(sum.len().max(values.len()), 0.0);
    sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += f64::from(*value));
}
