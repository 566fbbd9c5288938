//! What fixed settings keep of the gradient while they train: the features of the law that says what a strategy costs in steps
//! (docs/decisions/price-of-delay.md).
//!
//! `cargo run --release -p flexcomm-suite --example quality -- [CELLS [STEPS]]` prints a JSON line for each job, setting and window
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
/// Every so many steps the residuals are looked at.
const LOOK: u64 = 5;

/// Of a bucket, over the steps of a window.
#[derive(Clone, Default, Serialize)]
struct Sums {
    /// Over all ranks: the gain is their quotient.
    sent: f64,
    compensated: f64,
    /// ‖gradient‖² of all ranks, and that of their mean.
    fresh: f64,
    mean_fresh: f64,
    /// ⟨mean residual after the step, mean gradient⟩, and the ‖mean gradient‖² beside it: the lag is their quotient.
    held_back: f64,
    along: f64,
    /// What each rank sees of the lag by itself: ⟨residual before the step, gradient⟩, and ⟨gradient, the one before⟩.
    own_held: f64,
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
                    let look = step % LOOK == LOOK - 1;
                    for rank in 0..recipe.world {
                        let Some((of, gradient)) = ranks.buckets(rank).nth(bucket) else { continue };
                        let held = of.residual();
                        let (previous, residual_before) = &mut before[bucket * recipe.world + rank];
                        let dot =
                            |a: &[f32]| a.iter().zip(gradient).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
                        if !previous.is_empty() {
                            sum.own_held += dot(residual_before);
                            sum.own_along += dot(previous);
                        }
                        (*previous, *residual_before) = (gradient.to_vec(), held.to_vec());
                        mean.resize(gradient.len(), 0.0);
                        for (mean, g) in mean.iter_mut().zip(gradient) {
                            *mean += f64::from(*g) / recipe.world as f64;
                            sum.fresh += f64::from(*g) * f64::from(*g);
                        }
                        if look {
                            residual.resize(gradient.len(), 0.0);
                            residual.iter_mut().zip(&held).for_each(|(r, h)| *r += f64::from(*h) / recipe.world as f64);
                        }
                    }
                    let norm: f64 = mean.iter().map(|x| x * x).sum();
                    sum.mean_fresh += norm;
                    if look {
                        sum.held_back += mean.iter().zip(&residual).map(|(m, r)| m * r).sum::<f64>();
                        sum.along += norm;
                    }
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
