//! How many steps plans take, and changes between plans: what the law of steps (docs/decisions/price-of-delay.md) is compared with.
//!
//! `cargo run --release -p flexcomm-suite --example plans -- CELL.toml SEEDS SCRIPT...` trains the cell's job by each script, with each
//! of so many seeds, and prints steps to the target over dense's. A script is plans with the step at which each begins, such as
//! `none/dense-ring @100 powersgd(rank=1)+ef(vanilla)/dense-ring`; `%25 A ; B` changes between A and B every 25 steps.
#![allow(clippy::print_stdout)]

use anyhow::{Context, Result};
use flexcomm_domain::{Plan, Version};
use flexcomm_lab::worker::DEFAULT_FOLDER;
use flexcomm_suite::cells::Cell;
use flexcomm_suite::fixed::{Shared, TEST_EVERY, points};
use flexcomm_suite::ranks::{Ranks, Recipe};
use flexcomm_suite::score;
use flexcomm_trainer::Tick;

/// Which plan is in force in a step.
struct Script {
    every: u64,
    plans: Vec<(u64, Plan)>,
}

impl Script {
    fn read(text: &str) -> Result<Self> {
        let plan = |text: &str| text.trim().parse::<Plan>().with_context(|| format!("the plan {text}"));
        if let Some(rest) = text.strip_prefix('%') {
            let (every, plans) = rest.split_once(' ').context("%STEPS A ; B")?;
            let plans = plans.split(';').map(|text| Ok((0, plan(text)?))).collect::<Result<_>>()?;
            return Ok(Self { every: every.parse()?, plans });
        }
        let mut plans = Vec::new();
        for (number, part) in text.split('@').enumerate() {
            let (from, text) = if number == 0 { ("0", part) } else { part.split_once(' ').context("@STEP PLAN")? };
            plans.push((from.parse()?, plan(text)?));
        }
        Ok(Self { every: 0, plans })
    }

    fn at(&self, step: u64) -> &Plan {
        match self.every {
            0 => &self.plans.iter().rev().find(|(from, _)| *from <= step).unwrap_or(&self.plans[0]).1,
            every => &self.plans[(step / every) as usize % self.plans.len()].1,
        }
    }
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let cell = Cell::read(args.next().context("CELL.toml")?.as_ref())?;
    let seeds: u64 = args.next().context("SEEDS")?.parse()?;
    let data = Shared::new(DEFAULT_FOLDER.into()).of(cell.world)?;
    for text in args {
        let script = Script::read(&text)?;
        let mut ratios = Vec::new();
        for seed in 1..=seeds {
            let recipe: Recipe = cell.recipe(seed);
            let folder = "suite/curves".as_ref();
            let curves = flexcomm_suite::fixed::Curves::read(folder, &recipe)?.context("no curves of this job")?;
            let dense = score::smooth(&points(&curves.of("none/dense-ring")?.losses));
            let budget = dense.iter().filter(|point| point.steps <= recipe.steps / 3).copied().collect::<Vec<_>>();
            let target = score::target(&budget, 0.9).context("a target")?;
            let dense_steps = score::steps_to(&dense, target).context("dense gets there")?;
            let mut ranks = Ranks::new(recipe, data.clone())?;
            let mut losses = vec![ranks.test().loss];
            let mut reached = None;
            for step in 0..recipe.steps {
                ranks.tick(&Tick { step, plan: script.at(step).clone(), version: Version(0), trial: None })?;
                if (step + 1) % TEST_EVERY == 0 {
                    losses.push(ranks.test().loss);
                    reached = score::steps_to(&score::smooth(&points(&losses)), target);
                    if reached.is_some_and(|at| at + 2.0 * (TEST_EVERY as f64) < (step + 1) as f64) {
                        break;
                    }
                }
            }
            ratios.push(reached.map_or(f64::NAN, |at| at / dense_steps));
        }
        let mean = score::geometric_mean(ratios.iter().copied()).unwrap_or(f64::NAN);
        println!("{mean:.2} {ratios:.2?} {text}");
    }
    Ok(())
}
